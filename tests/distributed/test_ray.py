"""A Ray Dataset to micro-batches on a real local cluster, with workers that die on the way."""

import os
import pickle
import signal
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as papq
import pytest

import rollpack
from rollpack._sources import remote

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # ray's own, of many kinds

#: 24 rows: rollouts of two samples, groups of two rollouts; tokens tell their row.
TABLE = pa.table(
    {
        "tokens": [[100 * row + k for k in range(4 + row % 5)] for row in range(24)],
        "loss_mask": [[1] * (1 + row % 3) for row in range(24)],
        "rollout_id": [row // 2 for row in range(24)],
        "group_index": [row // 4 for row in range(24)],
        "reward": [float(row) for row in range(24)],
    }
)
ARGUMENTS = {"loss_aggregation": "prompt_mean", "max_tokens_per_gpu": 16, "dp_size": 2, "prompts_per_step": 3}


@pytest.fixture(scope="module")
def cluster():
    """Three worker processes and room for trainers."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=150 << 20, log_to_driver=False, logging_level="error")
    import rollpack.ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    yield rollpack.ray
    ray.shutdown()


def dataset(table=TABLE, blocks=6):
    bounds = np.linspace(0, len(table), blocks + 1).astype(int)
    return ray.data.from_arrow([table.slice(a, b - a).combine_chunks() for a, b in pairwise(bounds)])


def same(some, others):
    some, others = list(some), list(others)
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        for name in ("tokens", "labels", "rows", "sample_weights", "cu_seqlens"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_a_dataset_is_planned_and_packed_as_the_table_would_be(cluster):
    ds = dataset()
    summary = cluster.summarize(ds, groups=True)
    assert summary.sources == tuple((block, 4) for block in range(6))
    plan, whole = rollpack.plan(summary, **ARGUMENTS), rollpack.plan(TABLE, **ARGUMENTS)
    assert plan.to_arrow().equals(whole.to_arrow())
    for dp_rank, shard in enumerate(cluster.shards(ds, plan)):
        assert repr(shard) == f"RankShard(dp_rank {dp_rank}, 12 rows in {len(shard._shards.data)} blocks)"
        for step in range(2):
            place = {"step": step, "sample_columns": ["reward"]}
            expected = list(rollpack.pack(TABLE, whole, dp_rank=dp_rank, **place))
            same(pickle.loads(pickle.dumps(shard)).micro_batches(**place), expected)
            tensors = list(shard.micro_batches(device="cpu", **place))
            assert [m.tokens.tolist() for m in tensors] == [m.tokens.tolist() for m in expected]
            assert [m.sample_columns["reward"].tolist() for m in tensors] == [
                m.sample_columns["reward"].tolist() for m in expected
            ]


def test_a_shard_packs_for_its_own_rank_only(cluster):
    ds = dataset()
    plan = rollpack.plan(cluster.summarize(ds), micro_batch_size=4, dp_size=2)
    shard = cluster.shards(ds, plan)[0]
    same(shard.micro_batches(dp_rank=0), rollpack.pack(TABLE, plan, dp_rank=0))
    for device in ({}, {"device": "cpu"}):
        with pytest.raises(rollpack.PlanError, match="^this shard is what dp_rank 0 packs, and dp_rank 1 was asked for"):
            shard.micro_batches(dp_rank=1, **device)


def test_only_the_rows_and_columns_of_a_rank_are_fetched(cluster, monkeypatch):
    ds = dataset()
    plan = rollpack.plan(cluster.summarize(ds), micro_batch_size=1, dp_size=24)
    shard = cluster.shards(ds, plan)[17]
    (row,) = plan.rows(0, 17, 0)
    assert list(shard._shards.data) == [row // 4]
    fetched = []
    monkeypatch.setattr(remote, "_fetch", lambda ref, fetch=remote._fetch: fetched.append(fetch(ref)) or fetched[-1])
    (micro_batch,) = shard.micro_batches()
    assert micro_batch.tokens.tolist() == TABLE["tokens"][row].as_py()
    (table,) = [found for found in fetched if isinstance(found, pa.Table)]
    assert table.num_rows == 1
    assert table.column_names == ["tokens", "loss_mask"]


def test_a_fault_is_named_by_its_row_in_the_dataset(cluster):
    masks = TABLE["loss_mask"].to_pylist()
    masks[14] = [1, 2, 1]
    wrong = TABLE.set_column(1, "loss_mask", [masks])
    with pytest.raises(
        rollpack.DataError, match="row 14 of the dataset, in block 3 there: column 'loss_mask', row 2: "
    ) as error:
        cluster.summarize(dataset(wrong))
    assert (error.value.column, error.value.row) == ("loss_mask", 14)
    with pytest.raises(rollpack.SchemaError, match="'tokens': is missing; did you mean 'token'"):
        cluster.summarize(dataset(TABLE.rename_columns(["token", *TABLE.column_names[1:]])))
    with pytest.raises(rollpack.DataError, match="no rows"):
        cluster.summarize(dataset(TABLE.slice(0, 0), 1))
    plan = rollpack.plan(TABLE, micro_batch_size=24)
    with pytest.raises(rollpack.DataError, match="24 rows were planned, and the dataset has 20"):
        cluster.shards(dataset(TABLE.slice(0, 20)), plan)


@pytest.mark.parametrize("union", [False, True])
def test_blocks_that_differ_in_columns_are_named(cluster, union):
    bare = TABLE.drop_columns(["loss_mask"]).append_column("response_length", pa.array([1] * 24))

    def mixed(*tables):
        made = ray.data.from_arrow
        return made(tables[0]).union(*map(made, tables[1:])) if union else made(tables)

    with pytest.raises(rollpack.SchemaError, match="loss_mask, rollout_id in source 0 and tokens, response_length") as third:
        cluster.summarize(mixed(TABLE, TABLE, bare))
    assert "rollout_id in source 2;" in str(third.value)
    with pytest.raises(rollpack.SchemaError, match="the sources are the blocks of the dataset, by number") as differ:
        cluster.summarize(mixed(bare, TABLE))
    assert differ.value.column == "response_length"  # the first that only one of them has
    with pytest.raises(rollpack.SchemaError, match="^block 1: column 'tokens': is missing") as missing:
        cluster.summarize(mixed(TABLE, TABLE.drop_columns(["tokens"])))
    assert missing.value.column == "tokens"
    with pytest.raises(rollpack.SchemaError, match="the rollout_key is rollout_id in source 0 and none in source 1") as key:
        cluster.summarize(mixed(TABLE, TABLE.drop_columns(["rollout_id"])))
    assert key.value.column == "rollout_id"


@pytest.mark.parametrize(
    "arguments",
    [{"groups": ("source", "group_index")}, {"rollout_key": ("source", "rollout_id")}, {"rollout_key": "source"}],
)
def test_blocks_are_no_sources_of_ids(cluster, arguments):
    for table in (TABLE, TABLE.append_column("source", TABLE["group_index"])):
        with pytest.raises(rollpack.RollpackError, match="'source' is the block of a dataset, and where Ray cuts blocks"):
            cluster.summarize(dataset(table), **arguments)
    with pytest.raises(rollpack.RollpackError, match="^groups is None; it has to be True, False"):
        cluster.summarize(dataset(), groups=None)
    assert cluster.summarize(dataset(), groups="group_index").group_key == ("group_index",)


def test_what_is_no_dataset_or_no_plan_is_refused(cluster):
    with pytest.raises(TypeError, match="^Table is no Ray Dataset; pass ray.data.from_arrow"):
        cluster.summarize(TABLE)
    with pytest.raises(TypeError, match="^Table is no Ray Dataset; pass ray.data.from_arrow"):
        cluster.shards(TABLE, rollpack.plan(TABLE, micro_batch_size=24))
    with pytest.raises(rollpack.PlanError, match="^Summary is no Plan; pass the data, then what rollpack.plan returned"):
        cluster.shards(dataset(), rollpack.summarize(TABLE))


def test_workers_that_die_while_they_summarize_lose_and_double_nothing(cluster, tmp_path):
    def die_once(block):
        """The worker of block 2 is killed as it begins, and that of block 4 when it has done half."""
        first = block["tokens"][0][0].as_py() // 100
        flag = tmp_path / str(first)
        if first in {8, 16} and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return block

    ds = dataset().map_batches(die_once, batch_size=None, batch_format="pyarrow")
    summary = cluster.summarize(ds, groups=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["16", "8"]  # both have died
    whole = rollpack.plan(TABLE, **ARGUMENTS)
    plan = rollpack.plan(summary, **ARGUMENTS)
    assert plan.to_arrow().equals(whole.to_arrow())
    for flag in tmp_path.iterdir():
        flag.unlink()
    for dp_rank, shard in enumerate(cluster.shards(ds, plan)):  # read again, with deaths again
        same(shard.micro_batches(step=1), rollpack.pack(TABLE, whole, step=1, dp_rank=dp_rank))
    assert len(list(tmp_path.iterdir())) == 2


def workers_at(task):
    """The processes that are at this task: Ray names them by it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(b"ray::") and task.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_real_rollouts_on_a_cluster_whose_workers_are_killed_at_random(cluster):
    path = Path(__file__).parents[3] / "shared" / "data" / "reflexion_fanout.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not here")

    def slowly(block):
        time.sleep(0.5)
        return block

    blocks = dataset(papq.read_table(path), 12)
    ds = blocks.map_batches(slowly, batch_size=None, batch_format="pyarrow")
    killed = []

    def kill():
        while len(killed) < 3 and not done.wait(0.3):
            for process in workers_at("MapBatches(slowly)")[-1:]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)

    done = threading.Event()
    thread = threading.Thread(target=kill)
    thread.start()
    summary = cluster.summarize(ds, groups=True)
    done.set()
    thread.join()
    assert killed
    arguments = {"loss_aggregation": "prompt_mean", "max_tokens_per_gpu": 16_384, "dp_size": 4}
    plan = rollpack.plan(summary, **arguments)
    assert plan.to_arrow().equals(rollpack.plan(path, **arguments).to_arrow())


def test_trainers_of_ray_train_get_the_loss_of_the_whole_though_one_dies(cluster, tmp_path):
    from ray import train
    from ray.train.torch import TorchTrainer

    arguments = {"loss_aggregation": "prompt_mean", "max_tokens_per_gpu": 10, "dp_size": 2}
    ds = dataset()
    plan = rollpack.plan(cluster.summarize(ds, groups=True), **arguments)

    def train_loop(config):
        import torch
        import torch.distributed as dist

        from rollpack.torch import LossReducer

        rank = train.get_context().get_world_rank()
        reducer, total = LossReducer(backend="none"), torch.zeros((), dtype=torch.float64)
        for micro_batch in config["shards"][rank].micro_batches(device="cpu"):
            # What a token loses is its id, so that a row that is lost or doubled shows.
            total += reducer(micro_batch.labels.double(), micro_batch)
            if rank == 1 and micro_batch.index == 1 and not os.path.exists(config["flag"]):
                open(config["flag"], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        if rank == 0:
            with open(config["result"], "w") as file:
                file.write(repr(total.item()))
        train.report({"loss": total.item()})

    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "shards": cluster.shards(ds, plan),
            "flag": str(tmp_path / "died"),
            "result": str(tmp_path / "result"),
        },
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=str(tmp_path / "run"), failure_config=train.FailureConfig(max_failures=1)),
    )
    trainer.fit()
    assert (tmp_path / "died").exists()
    masks, groups = TABLE["loss_mask"].to_pylist(), TABLE["group_index"].to_pylist()
    # Worked out by hand: the mean over groups of the mean over their trained tokens, the last of each row.
    trained = [
        [t for row in range(24) if groups[row] == g for t in TABLE["tokens"][row].as_py()[-len(masks[row]) :]]
        for g in range(6)
    ]
    expected = sum(sum(tokens) / len(tokens) for tokens in trained) / 6
    assert float((tmp_path / "result").read_text()) == pytest.approx(expected, rel=1e-12)
