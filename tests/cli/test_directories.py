"""Directories of rollouts, here and in the library."""

from __future__ import annotations

import json

import pytest

import rollpack

from .conftest import ROWS, write


@pytest.fixture
def shards(tmp_path):
    """A directory of three shards, and of much that is none."""
    folder = tmp_path / "shards"
    (folder / "_temporary").mkdir(parents=True)
    (folder / "notes").mkdir()
    others = (
        "_metadata",
        "_SUCCESS",
        "README.md",
        "dataset_info.json",
        ".part-0.parquet",
        "_part.parquet",
        "part.parquet.tmp",
    )
    for name in others:
        (folder / name).write_text("no rollouts")
    for shard in (10, 2, 0):
        rows = [{**ROWS[0], "rollout_id": shard}] * (shard + 1)
        write(folder / f"part-{shard}.parquet", rows)
    return folder


IN_ORDER = ["part-0.parquet", "part-10.parquet", "part-2.parquet"]  # as text


def test_a_directory_is_its_files_in_the_order_of_their_names(run, shards):
    status, out, _ = run("inspect", shards, "--json")
    assert status == 0
    assert json.loads(out)["files"] == [
        {"path": str(shards / name), "rows": rows} for name, rows in zip(IN_ORDER, (1, 11, 3), strict=True)
    ]
    plan = rollpack.plan(shards, micro_batch_size=4)
    assert json.loads(run("plan", f"{shards}/", "--micro-batch-size", 4, "--json")[1])["plan_id"] == plan.id
    ids = rollpack.summarize(str(shards)).column("rollout_id").tolist()
    assert ids == [0] + [10] * 11 + [2] * 3
    assert sum(len(m.rows) for m in rollpack.pack(shards, plan)) == 15


@pytest.mark.parametrize("suffix", [".arrow", ".arrows", ".jsonl"])
def test_of_every_kind(run, tmp_path, suffix):
    folder = tmp_path / "rollouts.parquet"  # as Spark names a directory
    folder.mkdir()
    write(folder / f"a{suffix}", ROWS)
    assert json.loads(run("inspect", folder, "--json")[1])["rows"] == 4


def test_a_directory_without_rollouts(fails, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    looked_for = ".parquet, .pq, .arrow, .arrows, .ipc, .feather, .jsonl, .ndjson"
    says = f"{folder} is a directory without files of rollouts ({looked_for})"
    assert fails("inspect", folder) == says
    (folder / "deeper").mkdir()
    write(folder / "deeper" / "a.parquet", ROWS)
    assert fails("plan", folder) == f"{says}; what lies deeper is found by a glob: {folder}/**/*.parquet"
    with pytest.raises(rollpack.DataError, match="is a directory without files of rollouts"):
        rollpack.summarize(folder)
    assert len(rollpack.summarize(f"{folder}/**/*.parquet")) == 4


def test_several_kinds_may_be_the_same_rows_twice(fails, tmp_path):
    write(tmp_path / "a.parquet", ROWS)
    write(tmp_path / "a.jsonl", ROWS)
    assert fails("inspect", tmp_path) == (
        f"{tmp_path} holds files of several kinds, JSON lines (a.jsonl) and Parquet (a.parquet); pass a glob, such as "
        f"{tmp_path}/*.parquet"
    )


def test_nothing_that_looks_like_rollouts_is_left_out(fails, tmp_path):
    write(tmp_path / "a.parquet", ROWS)
    (tmp_path / "b.parquet").symlink_to(tmp_path / "gone")
    assert fails("inspect", tmp_path) == f"{tmp_path / 'b.parquet'}: No such file or directory"


def test_directories_are_left_out_whatever_they_are_called(run, fails, tmp_path):
    deeper = tmp_path / "part.parquet"  # as Spark, DuckDB and polars write partitions
    deeper.mkdir()
    write(deeper / "a.parquet", ROWS[:1])
    (tmp_path / "linked.parquet").symlink_to(deeper)
    assert fails("inspect", tmp_path).endswith(f"; what lies deeper is found by a glob: {tmp_path}/**/*.parquet")
    write(tmp_path / "b.arrow", ROWS)  # of one kind with no directory
    for named, rows in ((tmp_path, 4), (deeper, 1), (f"{tmp_path}/part*/*.parquet", 1), (f"{tmp_path}/*", 4)):
        assert json.loads(run("inspect", named, "--json")[1])["rows"] == rows
        assert len(rollpack.summarize(named)) == rows


def test_a_directory_and_a_file_in_it(fails, shards):
    assert fails("inspect", shards, shards / "part-2.parquet") == (
        f"{shards / 'part-2.parquet'} is named twice, and its rows would count twice"
    )


def test_what_rollpack_wrote_is_no_rollouts(run, fails, file, tmp_path):
    packed, saved = tmp_path / "packed", tmp_path / "plan.arrow"
    assert run("pack", file, "--micro-batch-size", 2, "-o", packed)[0] == 0
    assert run("plan", file, "--micro-batch-size", 2, "-o", saved)[0] == 0
    says = "rollpack wrote this: it holds a plan or packed micro-batches, and no rollouts"
    for named in (packed, packed / "dp0-cp0.arrow", saved):
        for command in (("inspect",), ("plan", "--micro-batch-size", 1)):
            assert fails(*command, named).endswith(says)
        with pytest.raises(rollpack.DataError, match=says):
            rollpack.summarize(named)
