"""Every code block of the README runs, in order, in one folder. The two set-up commands are what CI itself calls."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
#: A block that begins with the version of a trainer runs with it, in tests/trainers.
OF_TRAINERS = [text for kind, text in BLOCKS if kind == "python" and re.match(r"# \w+ \d", text)]
SETUP = [text for kind, text in BLOCKS if kind == "bash" and ".venv/bin/pip" in text]


def test_the_readme_has_code_of_known_kinds_only():
    assert {kind for kind, _ in BLOCKS} == {"python", "bash"}
    assert len(SETUP) == 2


def test_set_up_commands_are_those_that_ci_calls():
    """CI takes them from the README by this pattern; the first runs the main job, the second the tests."""
    assert SETUP[0].rstrip().endswith(".venv/bin/rollpack demo")
    assert SETUP[1].rstrip().endswith(".venv/bin/python -m pytest")
    assert ".venv/bin/pip" in (ROOT / ".ci" / "run").read_text()


def test_code_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))  # as torchrun does
    ran = {"python": 0, "bash": 0}
    for kind, text in BLOCKS:
        if text in SETUP + OF_TRAINERS:
            continue
        ran[kind] += 1
        if kind == "python":
            exec(compile(text, f"README block {ran}", "exec"), namespace)
        else:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr + done.stdout
            assert ("all agree" in done.stdout) == ("rollpack verify" in text)
    torch.distributed.destroy_process_group()
    assert ran == {"python": 16, "bash": 2}
    assert sorted(p.name for p in (tmp_path / "packed").iterdir()) == ["dp0-cp0.arrow", "dp1-cp0.arrow"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_every_public_name_has_a_docstring():
    import rollpack
    import rollpack.torch

    for module in (rollpack, rollpack.torch):
        for name in module.__all__:
            assert (getattr(module, name).__doc__ or "").strip(), name
