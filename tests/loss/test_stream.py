"""Micro-batches on a device, packed in the background."""

import dataclasses
import functools
import gc
import inspect
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import rollpack
from rollpack.testing import make_rollouts
from rollpack.torch import MicroBatchDataset, micro_batches
from rollpack.torch.stream import _Staging

TABLE = make_rollouts(seed=2, prompts=4, longest=400)
TABLE = TABLE.append_column("advantages", pa.array([[0.5] * n for n in TABLE["response_length"].to_pylist()]))
ARGUMENTS = {"loss_aggregation": "prompt_mean", "max_tokens_per_gpu": 512, "dp_size": 2, "cp_size": 2, "placeholders": True}
COLUMNS = {"token_columns": ["advantages"], "sample_columns": ["reward", "group_index"]}


@pytest.fixture(scope="module")
def plan():
    return rollpack.plan(TABLE, **ARGUMENTS)


def equal(left, right):
    """All fields: tensors and arrays by value and dtype, the rest as it is."""
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=0, atol=0, equal_nan=True)
        elif isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b, field.name


def threads():
    return [t for t in threading.enumerate() if t.name == "rollpack micro_batches"]


@pytest.mark.parametrize("prefetch", [1, 2, 50])
def test_it_gives_what_pack_gives_in_the_same_order(plan, prefetch):
    for dp_rank in range(2):
        for cp_rank in range(2):
            ranks = {"dp_rank": dp_rank, "cp_rank": cp_rank}
            expected = [m.to("cpu") for m in rollpack.pack(TABLE, plan, **ranks, **COLUMNS)]
            found = micro_batches(TABLE, plan, **ranks, **COLUMNS, device="cpu", prefetch=prefetch)
            assert len(found) == len(expected) > 2
            for left, right in zip(found, expected, strict=True):
                equal(left, right)
    assert not threads()


def test_buffers_on_the_way_to_a_device_are_used_again(plan):
    """The road to a GPU, with a CPU at its end: everything but pinning, streams and events."""
    staging = _Staging(torch.device("cpu"), 2)
    expected = [m.to("cpu") for m in rollpack.pack(TABLE, plan, **COLUMNS)]
    packer = rollpack.packing.Packer(TABLE, plan.columns, **COLUMNS)
    found, memory = [], []
    for packed in packer.rank(plan, 0, 0, 0, buffers=staging.next):
        found.append(staging.send(packed)[0])
        memory.append({name: buffer.data_ptr() for name, buffer in staging._sets[staging._current].items()})
    for left, right in zip(found, expected, strict=True):  # only now: what was sent first is not written over
        equal(left, right)
    for one, after in itertools.pairwise(memory):  # by turns: one set is filled while the other is copied
        assert one["packed torch.int32"] != after["packed torch.int32"]
    again = [a["packed torch.int32"] == b["packed torch.int32"] for a, b in zip(memory, memory[2:], strict=False)]
    assert any(again)
    # Of what was packed nothing is copied on the host: only the small arrays of samples are put together.
    small = {f"samples {dtype}" for dtype in (torch.int64, torch.float64)}
    packed = {f"packed {dtype}" for dtype in (torch.int32, torch.bool, torch.float32, torch.float64)}
    assert [of.keys() for of in memory] == [packed | small] * len(memory)
    # One buffer a dtype, of which the fields are views.
    first = found[0]
    assert first.tokens.untyped_storage().data_ptr() == first.segment_ids.untyped_storage().data_ptr()
    assert first.rows.untyped_storage().data_ptr() == first.prompt_mask_sums.untyped_storage().data_ptr()


def test_a_buffer_has_half_as_much_to_spare_and_is_made_anew_where_it_is_too_small():
    staging, held = _Staging(torch.device("cpu"), 1), []
    for wanted, long in ((10, 15), (15, 15), (3, 15), (16, 24)):
        ints, *_ = staging.next([wanted, 1, 1, 1])
        held.append(staging._sets[0]["packed torch.int32"])
        assert (len(ints), len(held[-1])) == (wanted, long)
        assert ints.ctypes.data == held[-1].data_ptr()
    assert held[0] is held[1] is held[2]


def test_a_mesh_tells_the_ranks(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
        alone = rollpack.plan(TABLE, max_tokens_per_gpu=512)
        assert len(list(micro_batches(TABLE, alone, mesh=mesh, device="cpu"))) == alone.steps[0].num_micro_batches
        two = rollpack.plan(TABLE, max_tokens_per_gpu=512, dp_size=2)
        with pytest.raises(rollpack.PlanError, match="the mesh has dp 1 x cp 1, and the plan is for dp 2 x cp 1"):
            micro_batches(TABLE, two, mesh=mesh, device="cpu")
        with pytest.raises(rollpack.PlanError, match="not both"):
            micro_batches(TABLE, alone, mesh=mesh, dp_rank=0, device="cpu")
    finally:
        torch.distributed.destroy_process_group()


def test_a_device_without_a_number_is_the_first(plan, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(rollpack.RollpackError, match="device is 'cuda', and torch finds 0 CUDA devices here"):
        micro_batches(TABLE, plan, device="cuda")


def test_wrong_arguments_are_told_at_once(plan):
    with pytest.raises(rollpack.RollpackError, match="prefetch is 0; it has to be at least 1"):
        micro_batches(TABLE, plan, device="cpu", prefetch=0)
    with pytest.raises(rollpack.PlanError, match="dp_rank"):
        micro_batches(TABLE, plan, device="cpu", dp_rank=2)
    with pytest.raises(rollpack.PlanError, match="cp_rank"):
        MicroBatchDataset(TABLE, plan, cp_rank=2)
    devices = torch.cuda.device_count()
    with pytest.raises(rollpack.RollpackError, match=f"'cuda:{devices}', and torch finds {devices} CUDA devices"):
        micro_batches(TABLE, plan, device=f"cuda:{devices}")
    with pytest.raises(rollpack.DataError, match="rows were planned"):
        list(micro_batches(TABLE.slice(1), plan, device="cpu"))


def test_what_goes_wrong_in_the_background_is_raised_in_the_loop_with_its_traceback():
    rows = TABLE.to_pylist()
    plan = rollpack.plan(rows, max_tokens_per_gpu=512)
    rows[plan.rows(0, 0, 2)[0]]["loss_mask"][0] ^= 1  # of the third micro-batch
    seen = 0
    with pytest.raises(rollpack.DataError, match="loss_mask") as caught:
        for _ in micro_batches(rows, plan, device="cpu"):
            seen += 1
    assert seen == 2
    assert any(entry.name == "pack_rows" for entry in caught.traceback)
    assert not threads()


@pytest.mark.parametrize("leave", ["break", "close", "with", "del", "never begun"])
def test_leaving_early_stops_the_thread_and_lets_go(plan, leave):
    found = micro_batches(TABLE, plan, device="cpu", prefetch=1)
    if leave == "break":
        for _ in found:
            break
        del found, _
    elif leave == "close":
        next(found)
        found.close()
        is_closed(found)
    elif leave == "with":
        with found:
            next(found)
        is_closed(found)
    elif leave == "del":
        next(found)
        del found
    else:
        found.close()
        is_closed(found)
    gc.collect()
    assert not threads()


def is_closed(found):
    for use in (next, iter):
        with pytest.raises(rollpack.RollpackError, match="were closed; call micro_batches again"):
            use(found)


@pytest.mark.parametrize("of", ["table", "path"])
def test_every_loop_over_them_is_an_epoch(tmp_path, plan, of):
    """PPO goes over its rollouts several times."""
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    expected = [m.to("cpu") for m in rollpack.pack(TABLE, plan, dp_rank=1, **COLUMNS)]
    data = TABLE if of == "table" else tmp_path / "rows.parquet"
    found = micro_batches(data, plan, dp_rank=1, **COLUMNS, device="cpu")
    for _ in range(3):
        for left, right in zip(found, expected, strict=True):
            equal(left, right)
        assert next(found, None) is None  # it begins again with a loop, not by itself
        assert not threads()
    assert len(found) == len(expected)


def test_a_loop_that_was_left_early_goes_on(plan):
    rows = [m.rows.tolist() for m in rollpack.pack(TABLE, plan)]
    found = micro_batches(TABLE, plan, device="cpu")
    for micro_batch in found:
        assert micro_batch.rows.tolist() == rows[0]
        break
    assert [m.rows.tolist() for m in found] == rows[1:]
    assert [m.rows.tolist() for m in found] == rows
    found.close()


def test_a_stream_that_was_read_to_its_end_is_no_second_epoch(plan):
    found = micro_batches(TABLE.to_reader(), plan, device="cpu")
    assert len(list(found)) == len(found)
    with pytest.raises(rollpack.DataError, match="a reader that was read before"):
        list(found)


@pytest.fixture(scope="module")
def in_shards():
    """A plan of two shards, and for each of two ranks the only shard that holds rows of it."""
    shards = {"east": TABLE.slice(0, 1), "west": TABLE.slice(1, 1)}
    read = [rollpack.summarize(shard, source=name) for name, shard in shards.items()]
    plan = rollpack.plan(rollpack.Summary.concat(read), micro_batch_size=1, dp_size=2)
    names = [list(shards)[plan.rows(0, rank, 0)[0]] for rank in range(2)]
    return plan, [{name: shards[name]} for name in names]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_without_a_row_of_this_rank_need_not_be_there(in_shards, rank):
    plan, own = in_shards
    (expected,) = (m.to("cpu") for m in rollpack.pack(own[rank], plan, dp_rank=rank))
    assert expected.rows.tolist() == plan.rows(0, rank, 0).tolist()
    (streamed,) = micro_batches(own[rank], plan, dp_rank=rank, device="cpu")
    (loaded,) = MicroBatchDataset(own[rank], plan, dp_rank=rank)
    equal(streamed, expected)
    equal(loaded, expected)


def test_a_step_of_several():
    plan = rollpack.plan(TABLE, max_tokens_per_gpu=512, global_batch_size=8, remainder="drop", dp_size=2)
    rows = plan.rows(1, 1, 0).tolist()
    assert next(iter(MicroBatchDataset(TABLE, plan, step=1, dp_rank=1))).rows.tolist() == rows
    with micro_batches(TABLE, plan, step=1, dp_rank=1, device="cpu") as found:
        assert next(found).rows.tolist() == rows
    assert len(MicroBatchDataset(TABLE, plan, step=1, dp_rank=1)) == len(found) == plan.steps[1].num_micro_batches


def test_two_wait_ready_where_nothing_else_is_said():
    assert inspect.signature(micro_batches).parameters["prefetch"].default == 2


def test_closing_ends_what_would_never_end_and_lets_go_of_it(plan):
    class Data:
        """Stands for the rollouts, which may be large."""

    data, (packed, *_) = Data(), rollpack.pack(TABLE, plan)
    held, micro_batch = weakref.ref(data), packed.to("cpu")

    def endless(data):
        while data:
            yield micro_batch, None

    begin = functools.partial(endless, data)
    found = rollpack.torch.MicroBatches(lambda begin=begin: begin(), 10**9, 1)
    assert next(found) is next(found) is micro_batch
    assert len(threads()) == 1
    found.close()
    assert not threads()
    del begin, data
    gc.collect()
    assert held() is None
    assert repr(found) == "MicroBatches(1,000,000,000 micro-batches, closed)"


def test_closing_lets_go_of_what_was_ready_when_the_thread_had_ended(plan):
    first, second = (next(rollpack.pack(TABLE, plan)).to("cpu") for _ in range(2))
    items, waiting = [first, second], weakref.ref(second)

    def made():
        while items:
            yield items.pop(0), None

    found = rollpack.torch.MicroBatches(made, 2, 2)
    assert next(found) is first
    for thread in threads():
        thread.join(60)
    del second
    assert waiting() is not None
    found.close()
    gc.collect()
    assert waiting() is None


def test_the_thread_itself_may_be_the_one_that_closes(plan):
    """Garbage is collected in any thread, and none can wait for itself."""
    micro_batch, ended = next(rollpack.pack(TABLE, plan)).to("cpu"), []

    def made():
        yield micro_batch, None
        found.close()
        ended.append(True)

    found = rollpack.torch.MicroBatches(made, 2, 1)
    assert next(found) is micro_batch
    for thread in threads():
        thread.join(60)
    assert ended == [True]
    is_closed(found)


def test_no_more_than_was_asked_for_is_made_ahead(plan):
    made = []

    def counted(lengths):
        made.append(lengths)
        return rollpack.packing.fresh(lengths)

    packer = rollpack.packing.Packer(TABLE, plan.columns)
    items = ((m.to("cpu"), None) for m in packer.rank(plan, 0, 0, 0, buffers=counted))
    found = rollpack.torch.MicroBatches(lambda: items, plan.steps[0].num_micro_batches, 1)
    assert not made  # nothing before the first is asked for
    next(found)
    for _ in range(100):
        time.sleep(0.005)
        assert len(made) <= 3  # in use, waiting, one being made
    found.close()


PROGRAM = """
import sys
import rollpack
from rollpack.torch import micro_batches

plan = rollpack.plan(sys.argv[1], max_tokens_per_gpu=512)
found = micro_batches(sys.argv[1], plan, device="cpu", prefetch=1)
next(found)
print("end")
"""


def test_nothing_is_left_running_at_the_end_of_a_program(tmp_path):
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "rows.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def _count(path, plan, results):
    results.put(sum(int(m.loss_mask.sum()) for m in micro_batches(path, plan, device="cpu")))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_works_in_child_processes(tmp_path, method):
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    plan = rollpack.plan(str(tmp_path / "rows.parquet"), max_tokens_per_gpu=512)
    here = micro_batches(TABLE, plan, device="cpu")
    next(here)  # a thread runs while the process is forked
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_count, args=(str(tmp_path / "rows.parquet"), plan, results))
    child.start()
    assert results.get(timeout=120) == plan.steps[0].num_tokens
    child.join(60)
    assert child.exitcode == 0
    here.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_iterator_that_was_begun_before_a_fork_says_so_in_the_child(plan):
    found = micro_batches(TABLE, plan, device="cpu")
    next(found)
    child = os.fork()
    if child == 0:
        try:
            next(found)
        except rollpack.RollpackError as error:
            os._exit(0 if "call micro_batches in the child" in str(error) else 4)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_data_loader_gives_them_in_order(tmp_path, plan, workers):
    pq.write_table(TABLE, tmp_path / "rows.parquet", row_group_size=8)
    dataset = MicroBatchDataset(str(tmp_path / "rows.parquet"), plan, cp_rank=1, **COLUMNS)
    expected = [m.to("cpu") for m in rollpack.pack(TABLE, plan, cp_rank=1, **COLUMNS)]
    for _ in range(2):  # epochs
        found = list(DataLoader(dataset, batch_size=None, num_workers=workers))
        for left, right in zip(found, expected, strict=True):
            equal(left, right)


def test_it_trains():
    """The loop of the design."""
    plan = rollpack.plan(TABLE, max_tokens_per_gpu=512, loss_aggregation="prompt_mean")
    reducer = rollpack.torch.LossReducer()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    for micro_batch in micro_batches(TABLE, plan, device="cpu"):
        reducer(weight * torch.ones(len(micro_batch.tokens), dtype=torch.float64), micro_batch).backward()
    groups, masks = TABLE["group_index"].to_pylist(), TABLE["loss_mask"].to_pylist()
    trained = {group for group, mask in zip(groups, masks, strict=True) if any(mask)}
    assert weight.grad.item() == pytest.approx(len(trained) / plan.steps[0].num_prompts)


@pytest.mark.parametrize("wrong", [torch.tensor(True), torch.tensor([2])])
def test_no_flag_or_list_in_a_tensor_passes_for_an_integer(wrong):
    for call in (
        lambda: rollpack.plan(TABLE, max_tokens_per_gpu=wrong),
        lambda: micro_batches(TABLE, rollpack.plan(TABLE, **ARGUMENTS), device="cpu", prefetch=wrong),
        lambda: micro_batches(TABLE, rollpack.plan(TABLE, **ARGUMENTS), device="cpu", dp_rank=wrong),
    ):
        with pytest.raises(rollpack.PlanError, match=r"is tensor\(.*; it has to be an integer$"):
            call()


def test_a_plan_and_nothing_else_is_taken_for_one():
    plan = rollpack.plan(TABLE, **ARGUMENTS)
    for call in (
        lambda: micro_batches(plan, TABLE, device="cpu"),
        lambda: MicroBatchDataset(plan, TABLE),
    ):
        with pytest.raises(rollpack.PlanError, match="^Table is no Plan; pass the data, then what rollpack.plan returned$"):
            call()
