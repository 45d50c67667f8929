"""Pages as a real browser sees them."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Page(HTMLParser):
    """What is in a document: elements by name, and the text in each element that has an attribute ``data-number``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: dict[str, list[dict[str, str | None]]] = {}
        #: (data-number, data-value, text)
        self.numbers: list[tuple[str, str, str]] = []
        self.titles: list[str] = []
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.elements.setdefault(tag, []).append(values)
        self._inside = tag
        if "data-number" in values:
            self.numbers.append((values["data-number"], values["data-value"], ""))
            self._inside = "data-number"

    def handle_endtag(self, _):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "data-number":
            path, value, text = self.numbers[-1]
            self.numbers[-1] = (path, value, text + data)
        elif self._inside == "title":
            self.titles.append(data)


def opened(path: Path, home: Path) -> tuple[Page, list[str]]:
    """The document that a browser has made of a page, and what stood on its console (errors, what was refused)."""
    if BROWSER is None:
        pytest.skip("there is no chromium on PATH")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        f"--user-data-dir={home}",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return Page(done.stdout), re.findall(r"CONSOLE.*", done.stderr)
