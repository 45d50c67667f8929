"""Every code block of the README and of the pages in python/docs runs, page by page, in order, in one folder."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "python" / "docs").glob("*.md"))
PAGES = [README, *DOCS, *sorted((ROOT / ".github").glob("*.md"))]
#: Set-up commands run in .ci/run, and what begins with the version of a trainer runs with it, in tests/trainers.
ELSEWHERE = re.compile(r"python3 -m venv|# \w+ \d")
#: Ray warns of many things.
RAYS = pytest.mark.filterwarnings("ignore")


def blocks(page):
    """(kind, text) of each code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def quickstart():
    """The code of the README's first section, on which the pages go on that say so."""
    first = README.read_text().partition("## Quickstart")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", first, flags=re.MULTILINE | re.DOTALL)


def run_python(text, name, namespace, capsys):
    exec(compile(text, name, "exec"), namespace)
    printed = capsys.readouterr().out
    # A comment behind a print says what it prints.
    for said in re.findall(r"^print\(.*# (\(.*)$", text, flags=re.MULTILINE):
        assert said in printed


def run_bash(text):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert ("all agree" in done.stdout) == ("rollpack verify" in text)


@pytest.fixture
def one_rank(monkeypatch):
    """The environment that torchrun gives a process that is alone."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "page",
    [README, *(pytest.param(page, marks=RAYS if page.stem == "shards" else ()) for page in DOCS)],
    ids=lambda p: p.stem,
)
def test_code_blocks_run(page, tmp_path, monkeypatch, capsys, one_rank):
    monkeypatch.chdir(tmp_path)
    if page.stem == "shards":
        # Ray lists files in threads. Each asks for this, and without aiohttp one may see half of what another imports.
        monkeypatch.setitem(sys.modules, "fsspec.implementations.http", None)
    namespace = {}
    for text in quickstart() if "README.md#quickstart" in page.read_text() else ():
        run_python(text, "quickstart", namespace, capsys)
    for number, (kind, text) in enumerate(blocks(page)):
        # sh: of a checkout, and of hours: not run here
        assert kind in {"python", "bash", "sh", "mermaid", "text"}
        if ELSEWHERE.match(text):
            continue
        if kind == "python":
            run_python(text, f"{page.name}, block {number}", namespace, capsys)
        elif kind == "bash":
            run_bash(text)
    if "rollpack pack" in page.read_text():
        assert sorted(p.name for p in (tmp_path / "packed").iterdir()) == ["dp0-cp0.arrow", "dp1-cp0.arrow"]


def test_the_ranks_of_the_shards_page_share_the_batch(tmp_path, monkeypatch):
    """Its snippet under torchrun, in two processes: each row is packed once."""
    page = ROOT / "python" / "docs" / "shards.md"
    texts = [text for kind, text in blocks(page) if kind == "python"]
    (ranks,) = [text for text in texts if "check_same_plan" in text]
    monkeypatch.chdir(tmp_path)
    exec(compile(texts[0], page.name, "exec"), {})
    # Ranks meet before they leave: gloo may wait for ever, or abort, where one does right after a gather.
    end = "torch.distributed.barrier()\ntorch.distributed.destroy_process_group()"
    code = f"import rollpack, torch\ntorch.set_num_threads(1)\n{ranks}\n{end}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run([*torchrun, sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    packed = re.findall(r"dp_rank (\d) of 2 packs rows \[([\d, ]+)\]", done.stdout)
    assert {rank for rank, _ in packed} == {"0", "1"}
    assert sorted(int(row) for _, rows in packed for row in rows.split(", ")) == [0, 1, 2, 3]


def anchors(page):
    """What GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), (target, anchor)


def test_every_page_can_be_found_from_the_readme():
    for page in DOCS:
        assert f"(python/docs/{page.name})" in README.read_text(), page.name
