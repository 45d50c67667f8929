"""Broken data is refused, or read as what it is; it never crashes, hangs or becomes a number that nobody wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from corrupt import KINDS

#: How often a file is damaged in each way. For the record: ROLLPACK_CORRUPT=3000.
TRIES = int(os.environ.get("ROLLPACK_CORRUPT", "150"))


@pytest.mark.parametrize("kind", KINDS)
def test_corruption(tmp_path, kind, record_property):
    command = [sys.executable, str(Path(__file__).with_name("corrupt.py")), kind, str(tmp_path), str(TRIES)]
    timeout = 120 + TRIES
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert run.returncode == 0, f"status {run.returncode}\n{run.stderr[-3000:]}"
    assert "panicked" not in run.stderr, run.stderr[-3000:]
    counts = json.loads(run.stdout.splitlines()[-1])
    print(counts)
    record_property("counts", counts)
    assert counts.get("refused", 0) > 0 or kind == "null counts"
    assert counts["slowest"] < 30
    if kind == "flipped parquet with checksums":
        # The footer has none: a changed name of an optional column is another file, and a sound one.
        assert counts.get("as stored", 0) <= counts["tried"] / 50
