"""A few seconds of ``python -m tests.endurance``, in a process of its own; a release runs an hour of it."""

import os
import subprocess
import sys
from pathlib import Path


def test_sixty_rounds():
    command = [sys.executable, "-W", "error", "-m", "tests.endurance", "--rounds", "60", "--limit", "64"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing grew"
    assert " by " in done.stdout, done.stdout  # some were held against the reference
