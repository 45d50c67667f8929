"""Masks that are changed later, with the denominators of the new masks; and what a mesh tells of wrong use."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples import FOUR_SAMPLES, MODES

import rollpack
from rollpack.torch import LossReducer

#: The example's masks after rejection: of sample 1 the token of loss 2, of sample 3 all tokens.
NEW_MASKS = [[1], [1, 0, 1], [1, 1], [0, 0, 0, 0]]

MASKS = [[1], [1, 1, 1], [1, 1], [1, 0, 1, 1]]

#: By hand. N = 4 and P = 2 stay. Samples: 4/1, (1+3)/2, 30/2, 0. Groups: (4+4)/3, 30/2. All: 38/5, 38/(10*4).
EXPECTED = {"sample_mean": 21 / 4, "prompt_mean": (8 / 3 + 15) / 2, "token_mean": 38 / 5, "constant": 38 / 40}


def whole_masks(batch, masks=NEW_MASKS):
    """The masks of all samples of a micro-batch, prompt included, one behind the other."""
    return torch.tensor([x for row in batch.rows.tolist() for x in [0, 0, *masks[row]]], dtype=torch.bool)


def batches(**arguments):
    table = FOUR_SAMPLES.table()
    plan = rollpack.plan(table, **({"micro_batch_size": 2} | arguments))
    return [b.to("cpu") for b in rollpack.pack(table, plan, token_columns=["loss"])]


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_current_denominators_by_hand(mode, micro_batch_size):
    divisor = 10.0 if mode == "constant" else None
    steps = batches(loss_aggregation=mode, divisor=divisor, micro_batch_size=micro_batch_size)
    reducer = LossReducer(denominators="current")
    reducer.set_masks(steps, [whole_masks(b) for b in steps], cut=False)
    loss = sum(reducer(b.columns["loss"].double(), b) for b in steps)
    assert loss.item() == pytest.approx(EXPECTED[mode], rel=1e-14)
    # The same masks as this rank has them, of the token after each position.
    shifted = [torch.tensor([x for row in b.rows.tolist() for x in [0, *NEW_MASKS[row], 0]]).bool() for b in steps]
    reducer.set_masks(steps, shifted, cut=True)
    loss = sum(reducer(b.columns["loss"].double(), b) for b in steps)
    assert loss.item() == pytest.approx(EXPECTED[mode], rel=1e-14)
    # With all that was trained, they are the original ones.
    reducer.set_masks(steps, [b.loss_mask for b in steps], cut=True)
    loss = sum(reducer(b.columns["loss"].double(), b) for b in steps)
    assert loss.item() == pytest.approx(float(FOUR_SAMPLES.expected[mode]), rel=1e-14)


def test_a_mask_that_trains_what_the_plan_does_not_is_refused():
    """Off by one, or with cut= the wrong way round, the loss would be 0 or of other tokens, and nobody would know."""
    steps = batches(pad_to_multiple_of=4)
    reducer = LossReducer(denominators="current")
    told = [b.loss_mask for b in steps]
    # Tokens 2 and on of a sample are its response, and sample 3 has a token in it that is not trained.
    whole = [whole_masks(b, MASKS) for b in steps]
    for masks, cut in ((told, True), (whole, False)):
        reducer.set_masks(steps, masks, cut=cut)
        loss = sum(reducer(b.columns["loss"].double(), b) for b in steps)
        assert loss.item() == pytest.approx(5.75, rel=1e-14)
        for n in range(len(masks)):
            for at in (~masks[n]).nonzero()[:, 0].tolist():
                more = [mask.clone() for mask in masks]
                more[n][at] = True
                with pytest.raises(rollpack.RollpackError, match="masks of all ranks have 1 token that the plan does not"):
                    reducer.set_masks(steps, more, cut=cut)
    unpadded = batches()
    with pytest.raises(rollpack.RollpackError, match=r"Is cut= right\?"):
        reducer.set_masks(unpadded, [b.loss_mask for b in unpadded], cut=False)
    with pytest.raises(rollpack.RollpackError, match=r"Is cut= right\?"):
        reducer.set_masks(unpadded, [whole_masks(b, MASKS) for b in unpadded], cut=True)


def test_a_token_that_is_added_to_a_step_of_one_rollout_is_refused_too():
    table = FOUR_SAMPLES.table().slice(3, 1)
    (packed,) = rollpack.pack(table, rollpack.plan(table, micro_batch_size=1))
    mask = packed.to("cpu").loss_mask
    with pytest.raises(rollpack.RollpackError, match="masks of all ranks have 3 tokens that the plan does not train"):
        LossReducer(denominators="current").set_masks([packed], [torch.ones_like(mask)], cut=True)


def test_another_mode_takes_the_new_masks_too():
    steps = batches(loss_aggregation="prompt_mean")
    reducer = LossReducer(denominators="current")
    reducer.set_masks(steps, [whole_masks(b) for b in steps], cut=False)
    for mode in ("sample_mean", "token_mean"):
        loss = sum(reducer(b.columns["loss"].double(), b, loss_aggregation=mode) for b in steps)
        assert loss.item() == pytest.approx(EXPECTED[mode], rel=1e-14)


def test_masks_are_of_one_step():
    """The plan of another table may be the same to the last number: lengths and mask sums, by which it is told."""
    steps = batches()
    reducer = LossReducer(denominators="current")
    for _ in range(2):
        reducer.set_masks(steps, [whole_masks(b) for b in steps], cut=False)
        with reducer.step():
            loss = sum(reducer(b.columns["loss"].double(), b) for b in steps)
        assert loss.item() == pytest.approx(EXPECTED["sample_mean"], rel=1e-14)
    # The same objects, as they were reduced before: the next epoch over a list of them.
    for loss in (steps[0].columns["loss"], steps[0].columns["loss"].double()):
        with pytest.raises(rollpack.PlanError, match="call reducer.set_masks"):
            reducer(loss, steps[0])
        with pytest.raises(rollpack.PlanError, match="call reducer.set_masks"), reducer.step():
            reducer(loss, steps[0])


def test_wrong_use_is_told():
    steps = batches()
    masks = [b.loss_mask for b in steps]
    reducer = LossReducer(denominators="current")
    with pytest.raises(rollpack.PlanError, match="call reducer.set_masks"):
        reducer(steps[0].columns["loss"], steps[0])
    with pytest.raises(rollpack.PlanError, match="micro-batch 1 of .* did not come"):
        reducer.set_masks(steps[:1], masks[:1], cut=True)
    with pytest.raises(rollpack.PlanError, match="there is no micro-batch; pass all of this rank's"):
        reducer.set_masks([], [], cut=True)
    with pytest.raises(rollpack.RollpackError, match="2 micro-batches and 1 mask;"):
        reducer.set_masks(steps, masks[:1], cut=True)
    with pytest.raises(rollpack.RollpackError, match=r"masks\[0\] is torch.float32"):
        reducer.set_masks(steps, [m.float() for m in masks], cut=True)
    with pytest.raises(rollpack.RollpackError, match=r"masks\[0\] is torch.bool of shape .*; it has to be bool \["):
        reducer.set_masks(steps, [m[1:] for m in masks], cut=False)
    with pytest.raises(rollpack.PlanError, match="micro-batch 0 is given twice, and would count twice"):
        reducer.set_masks([steps[0], *steps], [masks[0], *masks], cut=True)
    with pytest.raises(TypeError, match=r"^masks\[0\] is a list; it has to be a torch tensor"):
        reducer.set_masks(steps, [m.tolist() for m in masks], cut=True)
    with pytest.raises(rollpack.PlanError, match="^cut is 'False'; it has to be True or False"):
        reducer.set_masks(steps, masks, cut="False")
    reducer.set_masks(steps, masks, cut=True)
    with pytest.raises(rollpack.PlanError, match="masks go into reducer.set_masks"):
        reducer(steps[0].columns["loss"], steps[0], loss_mask=masks[0])
    other = batches(global_batch_size=4, micro_batch_size=4)
    with pytest.raises(rollpack.PlanError, match="masks that were set are of another step"):
        reducer(other[0].columns["loss"], other[0])
    with pytest.raises(rollpack.PlanError, match="denominators='current'"):
        LossReducer().set_masks(steps, masks, cut=True)
    with pytest.raises(rollpack.PlanError, match="denominators is 'new'"):
        LossReducer(denominators="new")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of four gloo processes found: one start serves all tests below."""
    folder = tmp_path_factory.mktemp("gloo")
    worker = Path(__file__).with_name("masks_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), folder / "store", folder / "out"],
            cwd=worker.parent,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        for process in processes:
            _, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(4)]


def test_over_real_ranks_cut_or_whole(ranks):
    for found in ranks:
        assert len(found["losses"]) == 2 * 4 * 3 * 2
        for case, loss in found["losses"].items():
            assert loss == pytest.approx(EXPECTED[case.split()[1]], rel=1e-14), case


def test_ranks_come_from_a_mesh(ranks):
    assert [found["ranks"] for found in ranks] == [[2, 2, 0, 0], [2, 2, 0, 1], [2, 2, 1, 0], [2, 2, 1, 1]]
    assert [found["flat"] for found in ranks] == [[4, 1, rank, 0] for rank in range(4)]


def test_a_token_that_is_added_on_one_rank_is_told_on_all(ranks):
    for found in ranks:
        assert "masks of all ranks have 1 token that the plan does not train" in found["added"]


def test_what_is_wrong_on_one_rank_is_an_error_on_all(ranks):
    own = [
        r"RollpackError: masks\[0\] is torch.bool of shape",
        r"RollpackError: masks\[0\] is torch.float32",
        "RollpackError: there are 2 micro-batches and 1 mask;",
        "RollpackError: there are 2 micro-batches and 0 masks; one each",
        "PlanError: micro-batch 0 of this rank's 2 in step 0 did not come",
        "PlanError: there is no micro-batch; pass all of this rank's",
        "TypeError: micro_batches is a NoneType; it has to be a sequence",
        "TypeError: micro_batches has a NoneType; it has to hold rollpack.MicroBatch",
        "TypeError: masks is a NoneType; it has to be a sequence",
        r"PlanError: set_masks is for LossReducer\(denominators='current'\)",
    ]
    for rank, found in enumerate(ranks):
        assert found["wrong on none"] is None
        for text, told in zip(own, found["wrong on rank 1"], strict=True):
            assert re.match(text if rank == 1 else "RollpackError: set_masks failed on another rank: the error", told)
        told = found["wrong on rank 1 of a mesh"]
        assert re.match(own[0] if rank == 1 else "RollpackError: set_masks failed on another rank: the error", told)
        assert re.match("PlanError: ranks set the masks of different plans or steps: plan alike", found["of two steps"])


def test_what_is_wrong_in_one_process_group_is_not_an_error_in_another(ranks):
    told = [found["wrong on rank 1 of pairs"] for found in ranks]
    assert re.match("RollpackError: set_masks failed on another rank: the error", told[0])
    assert re.match(r"RollpackError: masks\[0\] is torch.bool of shape", told[1])
    assert told[2:] == [None, None]


def test_ranks_that_are_said_and_processes_of_other_kinds_are_right(ranks):
    for found in ranks:
        assert [len(rows) for rows in found["rows"]] == [1, 1]  # of four samples on two dp ranks
        assert [len(rows) for rows in found["rows of one"]] == [1, 1, 1, 1]
        losses = {"none": 5.75, "megatron": 5.75, "megatron_legacy": 5.75, "megatron_per_token": 9 * 5.75}  # of 9 tokens
        assert found["fewer ranks than processes"] == pytest.approx(losses, rel=1e-14)
        assert found["summed by hand"] == 0.0  # a placeholder
    # Two of each pair of processes average: ddp undoes that with a factor of 2.
    for pair in (ranks[:2], ranks[2:]):
        assert sum(found["fewer ranks, of a group"] for found in pair) / 2 == pytest.approx(5.75, rel=1e-14)


def test_that_every_process_packs_for_rank_0_is_told(ranks):
    """All would train rank 0's rows, and nobody the others'."""
    *alone, of_step = ranks[0]["all pack for rank 0"]
    assert alone == [None, None]
    assert of_step.startswith("RollpackError: set_masks failed on another rank")
    for rank, found in enumerate(ranks[1:], 1):
        for told in found["all pack for rank 0"]:
            assert told.startswith(
                f"PlanError: this process is rank {rank} of 4, and the micro-batch was packed for dp_rank 0"
            )
            assert "pass this process's dp_rank= and cp_rank= to pack" in told


def test_a_mesh_or_group_that_does_not_fit_is_told(ranks):
    expected = {
        "no backend": "there are 4 ranks, and what the trainer does to gradients is not known",
        "mesh without cp": "dp 4 x cp 1, and the plan is for dp 2 x cp 2: .* give the mesh a 'cp' dimension",
        "no data dimension": r"dimensions \['tp'\], and none is data-parallel",
        "group without cp": "2 ranks, which are the plan's dp ranks without its cp_size 2: gradients have to be averaged",
        "other sizes": "dp 2 x cp 2, and the plan is for dp 1 x cp 1",
        "group of other size": "the process group has 4 ranks, and the plan is for dp 1 x cp 1",
        "another rank": r"this process is dp_rank (\d), cp_rank \d of the mesh, and .* packed for dp_rank (?!\1)",
        "other number of processes": "the plan is for 1 dp x cp ranks, and 4 processes run",
        "no dp rank": "dp_size 2, and each of 4 processes would pack for dp_rank 0: pass this process's dp_rank=",
        "no cp rank": "cp_size 2, and each of 4 processes would pack for cp_rank 0: pass this process's cp_rank=",
        "data set without ranks": "dp_size 2, and each of 4 processes would pack for dp_rank 0",
        "fewer ranks than processes": r"for dp 1 x cp 1, and 4 processes run: plan for the dp_size= .* LossReducer\(mesh=",
        "more ranks than processes": "for dp 8 x cp 1, and 4 processes run: .* Plan for the dp_size= and",
    } | dict.fromkeys(
        ("the kit", "the kit for trainers", "verify"), "in one process, and 4 processes .* run: call this before"
    )
    for found in ranks:
        assert found["errors"].keys() == expected.keys()
        for name, text in expected.items():
            assert re.search(text, found["errors"][name]), (name, found["errors"][name])
