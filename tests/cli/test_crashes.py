"""What is on disk after the worst: killed at any moment, a full disk, a place that cannot be written."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

import rollpack

from .conftest import write
from .processes import limited, rollpack_process, start, to_its_end

MICRO_BATCHES = 1500  # on each of two ranks
ROWS = [{"tokens": [1, 2, 3, row % 7], "loss_mask": [1, 1], "rollout_id": row // 2} for row in range(2 * MICRO_BATCHES)]
FLAGS = ["--micro-batch-size", "1", "--dp-size", "2"]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return write(tmp_path_factory.mktemp("many") / "rollouts.parquet", ROWS)


def killed(process, folder, after):
    """Kill it ``after`` so many seconds from when its output is begun; whether it was still running."""
    there = set(folder.iterdir())
    while process.poll() is None and set(folder.iterdir()) == there:
        time.sleep(0.001)
    time.sleep(after)
    process.kill()
    to_its_end(process)
    return process.returncode < 0


def micro_batches(path):
    """How many are in a file; None where it does not open."""
    try:
        return sum(1 for _ in rollpack.read_packed(path))
    except rollpack.DataError:
        return None


def test_pack_killed_at_any_moment_leaves_no_short_file_that_opens(many, tmp_path):
    seed = time.time_ns()
    print(f"seed {seed}")
    moments, midway = random.Random(seed), 0
    for trial in range(6):
        folder = tmp_path / str(trial)
        folder.mkdir()
        running = killed(start("pack", many, *FLAGS, "-o", folder / "out"), folder, moments.uniform(0, 0.5))
        opened = [micro_batches(path) for path in folder.rglob("*.arrow")]
        assert set(opened) <= {None, MICRO_BATCHES}, opened
        whole = [micro_batches(path) for path in (folder / "out").glob("*.arrow")]
        assert whole in ([], [MICRO_BATCHES] * 2), "what has its own name is whole"
        midway += running and None in opened
    assert midway > 0, "no run was killed while it wrote; it writes faster than this test kills"


def test_what_a_killed_run_left_is_named_and_hinders_nobody(many, tmp_path):
    output, others = tmp_path / "out[1]", [tmp_path / ".out1.12345678.tmp", tmp_path / ".out[1].tmp"]
    for other in others:  # of outputs with other names
        other.mkdir()
    while not (found := set(tmp_path.iterdir()) - {output, *others}):
        shutil.rmtree(output, ignore_errors=True)  # it was done before it was killed
        killed(start("pack", many, *FLAGS, "-o", output), tmp_path, 0.02)
    (left,) = found
    ended = rollpack_process("pack", many, *FLAGS, "-o", output, "--json")
    assert ended.returncode == 0
    assert ended.stderr == (
        f"rollpack: warning: {left}: left by a run that was killed, or being written by another; if none runs, remove it\n"
    )
    assert json.loads(ended.stdout)["output"] == str(output)
    assert [micro_batches(path) for path in output.iterdir()] == [MICRO_BATCHES] * 2
    assert left.is_dir()


@pytest.mark.parametrize("command", ["plan", "report"])
def test_what_is_there_stays_whole_when_its_successor_is_killed(many, tmp_path, command):
    output, flags = tmp_path / "output", [*FLAGS, "-o", tmp_path / "output"]
    assert rollpack_process(command, many, *flags).stderr == ""
    before = output.read_bytes()
    for after in (0.0, 0.002):
        killed(start(command, many, *flags), tmp_path, after)
        assert output.read_bytes() == before
        if command == "plan":
            assert len(rollpack.Plan.load(output).steps) == 1


@contextmanager
def mounted(folder, options):
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("this takes a file system of its own, which this user may not mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def refused(folder, *arguments, **options):
    """One line and status 2, and the folder is as it was; the line."""
    before = sorted(folder.rglob("*"))
    ended = rollpack_process(*arguments, **options)
    said = ended.stderr
    assert ended.returncode == 2, said
    assert said.startswith("rollpack: error: ")
    assert said.count("\n") == 1, said
    assert sorted(folder.rglob("*")) == before
    return said


@pytest.mark.parametrize("command", ["pack", "plan", "report"])
def test_a_full_disk(many, tmp_path, command):
    with mounted(tmp_path / "small", "size=64k") as folder:
        assert "No space left on device" in refused(folder, command, many, *FLAGS, "-o", folder / "output")


@pytest.mark.parametrize("command", ["pack", "plan", "report"])
def test_a_place_that_cannot_be_written(many, tmp_path, command):
    with mounted(tmp_path / "read-only", "ro") as folder:
        assert "Read-only file system" in refused(folder, command, many, *FLAGS, "-o", folder / "output")


@pytest.mark.parametrize("command", ["pack", "plan"])
def test_a_file_over_the_limit(many, tmp_path, command):
    output = tmp_path / "output"
    assert "File too large" in refused(tmp_path, command, many, *FLAGS, "-o", output, before=limited(50_000))


def test_a_file_that_was_cut_short_does_not_open(many, tmp_path):
    """So that the tests above look at the right thing."""
    plan = rollpack.plan(many, micro_batch_size=1, dp_size=2)
    path = rollpack.write_packed(many, plan, tmp_path / "out")[0]
    assert micro_batches(path) == MICRO_BATCHES
    path.write_bytes(path.read_bytes()[:-10])
    assert micro_batches(path) is None
