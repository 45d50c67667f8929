"""The script for a GPU, as far as a CPU goes: programs of their own, as it has Triton interpreted."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def test_on_a_cpu_what_can_be_had_passes_and_the_rest_is_told():
    done = run("-m", "tests.device.run", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    assert " pass, 0 fail, " in last
    assert sum(line.endswith(" pass") for line in table) == int(last.split()[0]) >= 40
    assert sum("not run: no GPU" in line for line in table) == 5


def test_a_line_that_fails_and_a_check_that_raises_make_the_status():
    program = """
import sys
sys.argv += ["--device", "cpu"]
from tests.device import run
from tests.device.lines import at_least, at_most

def check(device):
    yield at_most("small", 1.0, 2.0)
    yield at_least("not judged", 1.0, 2.0, judged=False)
    yield at_most("nothing", float("nan"), 2.0)
    raise RuntimeError("this went wrong")

run.CHECKS = [(check, False)]
sys.exit(run.main())
"""
    done = run("-c", program)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "1 pass, 2 fail, 1 not judged"
    assert "RuntimeError: this went wrong" in done.stdout


def test_what_is_for_a_gpu_alone_runs_on_a_cpu_where_it_shows_nothing():
    """So that no slip is found on the GPU only. Memory is that of CUDA's allocator, and stays out."""
    program = """
import sys
sys.argv += ["--device", "cpu"]
from tests.device import agreement, run, speed
import torch

for check in (agreement.suite, agreement.like_the_cpu, speed.graph, speed.no_sync):
    for line in check(torch.device("cpu")):
        assert line.ok, line
"""
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
