"""Ranks that summarize files of their own plan alike: real gloo processes."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as papq
import pytest
from examples import FOUR_SAMPLES

import rollpack
from rollpack.torch import check_same_plan, summarize_shards


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The four samples of the README in three files, and a file with a fault."""
    folder = tmp_path_factory.mktemp("shards")
    table = FOUR_SAMPLES.table()
    for i, (start, rows) in enumerate([(0, 1), (1, 2), (3, 1)]):
        papq.write_table(table.slice(start, rows), folder / f"part-{i}.parquet")
    wrong = pa.table({"tokens": [[1, 2], [3, 4]], "loss_mask": [[1], [2]]})
    papq.write_table(wrong, folder / "wrong.parquet")
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """What each of three processes found."""
    worker = Path(__file__).with_name("shards_worker.py")
    run = [sys.executable, worker]
    processes = [subprocess.Popen([*run, str(rank), folder], stderr=subprocess.PIPE, text=True) for rank in range(3)]
    try:
        for process in processes:
            _, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(3)]


def test_each_rank_plans_the_whole_and_packs_its_part(ranks, folder):
    for found in ranks:
        assert found["sources"] == [[str(folder / f"part-{i}.parquet"), rows] for i, rows in enumerate([1, 2, 1])]
        assert found["id"] == ranks[0]["id"]
        # From the design, worked out by hand.
        expected = {"sample_mean": 5.75, "prompt_mean": 4.85, "token_mean": 46 / 9}
        assert found["losses"] == pytest.approx(expected, rel=1e-14)
    assert ranks[0]["part"] == ranks[2]["part"] == [[0, 1], [2, 1]]


def test_another_plan_is_found_on_every_rank(ranks):
    for found in ranks:
        kind, text, *_ = found["errors"]["another plan"]
        assert kind == "PlanError"
        assert "ranks 1 have another plan" in text


def test_what_is_no_plan_on_one_rank_is_told_on_every_rank(ranks):
    for found in ranks:
        assert found["errors"]["no plan"][:2] == ["PlanError", "rank 1 passed a NoneType, which is no plan"]


def test_a_rank_outside_of_the_group_is_told(ranks):
    for call in ("outside", "outside, plan", "outside, log"):
        kind, text, *_ = ranks[1]["errors"][call]
        assert (kind, text.partition(":")[0]) == ("PlanError", "rank 1 is not in the process group that it passed")


@pytest.mark.parametrize(
    ("fault", "kind", "rank", "words", "place"),
    [
        ("bad row", "DataError", 2, "column 'loss_mask', row 1: ", ["loss_mask", 1]),
        ("no file", "DataError", 1, "nowhere", [None, None]),
        ("no shards", "RollpackError", 1, "TypeError: shards is a list; it has to be {source: data}", [None, None]),
        ("wrong type", "RollpackError", 0, "TypeError: int is no data", [None, None]),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all_and_none_waits(ranks, fault, kind, rank, words, place):
    for found in ranks:
        name, text, *where = found["errors"][fault]
        assert name == kind
        assert text.startswith(f"rank {rank}: ")
        assert words in text
        assert where == place


def test_a_source_of_two_ranks_and_no_rows_at_all_are_refused(ranks):
    for found in ranks:
        assert found["errors"]["same source"][:2] == [
            "DataError",
            "source 'mine' is there twice, and its rows would count twice",
        ]
        assert "no summaries to join" in found["errors"]["nothing"][1]


def test_alone_a_process_takes_its_own_shards(folder):
    files = sorted(folder.glob("part-*.parquet"))
    summary = summarize_shards({str(path): path for path in reversed(files)}, groups=True)
    whole = rollpack.plan(FOUR_SAMPLES.table(), loss_aggregation="prompt_mean", micro_batch_size=2)
    plan = rollpack.plan(summary, loss_aggregation="prompt_mean", micro_batch_size=2)
    check_same_plan(plan)
    with pytest.raises(rollpack.PlanError, match="passed a Summary, which is no plan"):
        check_same_plan(summary)
    assert plan.to_arrow().equals(whole.to_arrow())
    with pytest.raises(rollpack.DataError, match="rank 0: column 'loss_mask', row 1"):
        summarize_shards({"x": folder / "wrong.parquet"})
