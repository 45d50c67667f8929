"""Every code block of the pages in python/docs runs, page by page, in order, in one folder."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "python" / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.filterwarnings("ignore")  # ray's own, of many kinds
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for number, text in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)):
        exec(compile(text, f"{page.name}, block {number}", "exec"), namespace)
        # A comment behind a print says what it prints.
        said = [line.partition("#")[2].strip() for line in text.splitlines() if line.startswith("print(") and "# (" in line]
        printed = capsys.readouterr().out
        for words in said:
            assert words in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
