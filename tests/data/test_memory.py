"""Reading what is larger than memory holds one batch and the summary; packing holds what it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Bytes of each file. For the record: ROLLPACK_MEMORY=2e9.
SIZE = float(os.environ.get("ROLLPACK_MEMORY", "1.2e8"))
#: MiB. Batches of 8, what the allocator keeps of them, and the summary, which takes a hundredth.
LIMIT = 96 + SIZE / 2**20 / 50


def run(*arguments):
    command = [sys.executable, str(Path(__file__).with_name("memory.py")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", ["parquet", "Arrow file", "Arrow file, lz4", "Arrow stream"])
def test_memory(tmp_path, kind, record_property):
    path = tmp_path / ("data.arrows" if kind == "Arrow stream" else "data")
    run("write", path, kind, SIZE)
    cases = [("path", "plan")]
    if kind != "Arrow stream":
        run(path, kind, "path", "save")
    cases += [("path", "pack")] if kind != "Arrow stream" else []
    cases += [("dataset", "plan")] if kind == "parquet" else []
    for form, verb in cases:
        said, growth = run(path, kind, form, verb)
        print(said)
        record_property(f"{form} {verb}", said)
        assert float(growth) < LIMIT < SIZE / 2**20, said
