from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as papq
import pytest

from rollpack.cli import main

# Rollout 10 has two samples; the mask of rollout 12 is all 0, and it is alone in its group.
ROWS = [
    {
        "tokens": tokens,
        "response_length": len(mask),
        "loss_mask": mask,
        "rollout_id": rollout,
        "group_index": group,
        "reward": reward,
    }
    for tokens, mask, rollout, group, reward in [
        ([1, 2, 3], [1], 10, 0, 0.5),
        ([1, 2, 3, 4, 5], [1, 0, 1], 11, 0, None),
        ([1, 2, 3, 4], [0, 0], 12, 1, 1.0),
        ([1, 2, 3, 4, 5, 6], [1, 1, 1, 0], 10, 0, 2),
    ]
]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    """The rows as a file of the kind that its name says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        papq.write_table(table, path)
    else:
        new = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.fixture(params=["parquet", "arrow", "arrows", "jsonl"])
def rollouts(request, tmp_path):
    return write(tmp_path / f"rollouts.{request.param}", ROWS)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "rollouts.parquet", ROWS)


@pytest.fixture
def run(capsys):
    """Runs a command in this process: (exit status, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def fails(run):
    """Runs a command that has to fail as bad input does, and gives its one line."""

    def fails(*arguments: object) -> str:
        status, out, err = run(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith("rollpack: error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        return err.removeprefix("rollpack: error: ").rstrip("\n")

    return fails
