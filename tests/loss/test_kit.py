"""The kit for other people's reducers: each wrong one is caught and named, and no right one is."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from examples import MODES

import rollpack
from rollpack.testing import check_reducer, check_trainer, faults, padded_rows
from rollpack.testing.explanation import DETACHED
from rollpack.testing.faults import single_faults
from rollpack.testing.formulas import Layout, right_formula
from rollpack.testing.probes import Target, batches, probes
from rollpack.torch import LossReducer
from rollpack.torch.backends import BACKENDS

DIVISOR = 16.0


def meant(mode, **others):
    return {"loss_aggregation": mode, "divisor": DIVISOR if mode == "constant" else None} | others


# --- right ones -----------------------------------------------------------------------------------------------------


def plain(mode):
    """A loop over samples, as one would write it on paper."""

    def reducer(token_loss, mb):
        total = token_loss[:0].sum()
        for sample, row in enumerate(mb.rows.tolist()):
            if row < 0:
                continue
            mine = (mb.segment_ids == sample) & mb.loss_mask
            if mode == "sample_mean":
                divisor = int(mb.rollout_mask_sums[sample]) * mb.num_rollouts
            elif mode == "prompt_mean":
                divisor = int(mb.prompt_mask_sums[sample]) * mb.num_prompts
            elif mode == "token_mean":
                divisor = mb.num_tokens
            else:
                divisor = mb.divisor * mb.num_rollouts
            if mine.any():
                total = total + token_loss[mine].sum() / divisor
        return total

    return reducer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("empty", "group_size"), [("count", 2), ("skip", 1), ("count", 8)])
def test_no_false_alarm_on_a_plain_loop(mode, empty, group_size):
    report = check_reducer(plain(mode), **meant(mode, empty=empty, group_size=group_size))
    assert report.ok, report
    assert report.causes == ()
    assert str(report).startswith("all 16 invariances hold: plain batch, fan-out")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_no_false_alarm_on_ours(backend, mode):
    def reducer(token_loss, mb):
        steps = mb.num_micro_batches if backend in {"accelerate", "deepspeed", "hf_trainer"} else None
        ours = LossReducer(backend=backend, accumulation_steps=steps)
        return (ours.loss_and_count if backend == "megatron_per_token" else ours)(token_loss, mb)

    report = check_reducer(reducer, **meant(mode, backend=backend))
    assert report.ok, report


def test_what_works_in_place_is_no_failure():
    def reducer(token_loss, mb):
        weights = rollpack.torch.token_weights(mb.loss_mask, mb.segment_ids, mb.sample_weights)
        return token_loss.masked_fill_(~mb.loss_mask, 0).mul_(weights).sum()

    assert check_reducer(reducer).ok


@pytest.mark.parametrize("mode", MODES)
def test_float32_is_no_failure(mode):
    report = check_reducer(lambda x, mb: LossReducer(backend="none")(x.float(), mb), **meant(mode))
    assert report.ok, report


def trainer(loss, combine=lambda gradients: sum(gradients) / len(gradients)):
    """Data parallelism as DDP does it: a model a rank, gradients averaged."""

    def train(step):
        gradients = []
        for micro_batches in step.ranks:
            model = step.model()
            for mb in micro_batches:
                loss(model(mb), mb).backward()
            gradients.append(model.weight.grad)
        return combine(gradients)

    return train


@pytest.mark.parametrize("mode", MODES)
def test_no_false_alarm_on_right_trainers(mode):
    assert check_trainer(trainer(LossReducer(backend="fsdp")), **meant(mode)).ok
    assert check_trainer(trainer(plain(mode), combine=sum), **meant(mode)).ok

    def logs_too(step):
        models, total = [], 0.0
        for micro_batches in step.ranks:
            models.append(step.model())
            for mb in micro_batches:
                loss = plain(mode)(models[-1](mb), mb)
                loss.backward()
                total += loss.item()
        return total, sum(model.weight.grad for model in models)

    assert check_trainer(logs_too, **meant(mode)).ok


# --- wrong reducers, as they are found in trainers --------------------------------------------------------------------


def rows(token_loss, mb):
    """[S, W] losses and masks, masked losses 0."""
    mask = padded_rows(mb.loss_mask, mb)
    return torch.where(mask, padded_rows(token_loss, mb), 0.0), mask


def masked_mean(token_loss, mb):
    """The token mean of this micro-batch."""
    x, mask = rows(token_loss, mb)
    return x.sum() / mask.sum().clamp(min=1)


def mean_of_row_means(token_loss, mb):
    x, mask = rows(token_loss, mb)
    return (x.sum(1) / mask.sum(1).clamp(min=1)).mean()


def masked_mean_without_clamp(token_loss, mb):
    mask = mb.loss_mask
    return token_loss[mask].mean()


def per_row(token_loss, mb):
    """Rows of the step are counted right, but every row is one."""
    x, mask = rows(token_loss, mb)
    return (x.sum(1) / mask.sum(1).clamp(min=1)).sum() / mb.num_rollouts


def whole_row_means(token_loss, mb):
    x, _ = rows(token_loss, mb)
    return (x.sum(1) / mb.mask_sums.clamp(min=1)).sum() / mb.num_rollouts


def sum_of_masked(token_loss, mb):
    return rows(token_loss, mb)[0].sum()


def times(factor, mode="sample_mean"):
    return lambda token_loss, mb: plain(mode)(token_loss, mb) * factor(mb)


def phantom(token_loss, mb):
    """SUM over rows of clamp(tokens of the row, 1), all-reduced, in place of T."""
    return sum_of_masked(token_loss, mb) / (mb.num_tokens + STEP_EMPTY_ROWS[mb.plan_id])


def width_divisor(token_loss, mb):
    """Dr. GRPO's constant, but taken from the tensor."""
    x, _ = rows(token_loss, mb)
    return x.sum() / (x.shape[1] * mb.num_rollouts)


def width_mean(token_loss, mb):
    x, _ = rows(token_loss, mb)
    return x.sum(1).div(x.shape[1]).sum() / mb.num_rollouts


def max_seqlen_divisor(token_loss, mb):
    return rows(token_loss, mb)[0].sum() / (mb.max_seqlen * mb.num_rollouts)


def assumed_prompts(token_loss, mb, group_size=2):
    """P = rollouts / group size."""
    return plain("prompt_mean")(token_loss, mb) * mb.num_prompts / (mb.num_rollouts / group_size)


def assumed_prompts_floor(token_loss, mb, group_size=2):
    return plain("prompt_mean")(token_loss, mb) * mb.num_prompts / max(1, mb.num_rollouts // group_size)


def assumed_batch_size(token_loss, mb):
    """N is what was configured."""
    return plain("sample_mean")(token_loss, mb) * mb.num_rollouts / 64


def reshaped_groups(token_loss, mb, group_size=2):
    """Group g is rows G g to G g + G - 1 of the micro-batch."""
    x, mask = rows(token_loss, mb)
    pad = -len(x) % group_size
    sums, counts = (torch.nn.functional.pad(v, (0, pad)).reshape(-1, group_size).sum(1) for v in (x.sum(1), mask.sum(1)))
    return (sums / counts.clamp(min=1)).mean()


def multiplied(token_loss, mb):
    """Right in every value, until something masked is not finite."""
    weights = rollpack.torch.token_weights(mb.loss_mask, mb.segment_ids, mb.sample_weights)
    return (token_loss * weights).sum()


def not_counting_empty(mode="sample_mean"):
    def reducer(token_loss, mb):
        count = {"sample_mean": mb.num_rollouts, "prompt_mean": mb.num_prompts}[mode]
        return plain(mode)(token_loss, mb) * count / max(1, count - EMPTY_UNITS[mb.plan_id][mode])

    return reducer


def shifted(by):
    def reducer(token_loss, mb):
        mask = torch.roll(mb.loss_mask, by)
        return torch.where(mask, token_loss, 0.0).sum() / max(1, mb.num_tokens)

    return reducer


def of_positions(chosen, counted):
    """Σ over chosen positions over Σ counted of this micro-batch, averaged."""

    def reducer(token_loss, mb):
        return torch.where(chosen(mb), token_loss, 0.0).sum() / counted(mb).sum().clamp(min=1)

    return reducer


def in_response(mb):
    lengths = torch.diff(mb.cu_seqlens).long()
    responses = torch.nan_to_num(mb.sample_columns["response_length"]).long()
    after = mb.position_ids + 1
    follows = (mb.segment_ids >= 0) & (after < lengths[mb.segment_ids]) & (not mb.is_placeholder)
    return follows & (after >= (lengths - responses)[mb.segment_ids])


def in_sequence(mb):
    after = mb.position_ids + 1
    return (mb.segment_ids >= 0) & (after < torch.diff(mb.cu_seqlens).long()[mb.segment_ids]) & (not mb.is_placeholder)


def response_mean(token_loss, mb):
    """Divided by the response's length where it should be by its mask sum."""
    lengths = torch.nan_to_num(mb.sample_columns["response_length"]).clamp(min=1)
    x, _ = rows(token_loss, mb)
    same = mb.mask_sums / mb.rollout_mask_sums.clamp(min=1)  # right across the rows of a rollout
    return (x.sum(1) / lengths * same).sum() / mb.num_rollouts


def all_tokens(token_loss, mb):
    return torch.where(in_sequence(mb), token_loss, 0.0).sum() / max(1, mb.num_tokens)


def all_positions(token_loss, mb):
    return token_loss.sum() / max(1, mb.num_tokens)


def plain_mean(token_loss, mb):
    """loss.mean()."""
    return token_loss.mean()


def last_left_out(token_loss, mb):
    """x[:, :-1] once too often."""
    lengths = torch.diff(mb.cu_seqlens).long()[mb.segment_ids]
    mask = mb.loss_mask & (mb.position_ids + 1 < lengths - 1)
    return torch.where(mask, token_loss, 0.0).sum() / max(1, mb.num_tokens)


def cp_local_mean(token_loss, mb):
    """Each cp rank divides by what it holds of a rollout."""
    x, mask = rows(token_loss, mb)
    same = torch.zeros(int(mb.rollout_indices.max()) + 2).index_add(0, mb.rollout_indices + 1, mask.sum(1).float())
    return (x.sum(1) / same[mb.rollout_indices + 1].clamp(min=1)).sum() / mb.num_rollouts


def detached_zero(token_loss, mb):
    """Returns a constant where nothing is trained: DDP waits for ever."""
    return plain("token_mean")(token_loss, mb) if mb.loss_mask.any() else torch.tensor(0.0)


def no_clamp(token_loss, mb):
    """Right, until a filter takes out all that is trained in a step."""
    return sum_of_masked(token_loss, mb) / mb.num_tokens


def detached(token_loss, mb):
    """The loss of a copy of the token losses."""
    return plain("token_mean")(token_loss.detach(), mb)


def leaf_of_its_own(token_loss, mb):
    """A zero with a gradient that no parameter of the model gets: DDP waits for ever."""
    return plain("token_mean")(token_loss, mb) if mb.loss_mask.any() else torch.zeros((), requires_grad=True)


def value_off(token_loss, mb):
    loss = plain("sample_mean")(token_loss, mb)
    return loss + (loss * (mb.dp_size * mb.cp_size - 1)).detach()


def raises(token_loss, mb):
    if mb.is_placeholder:
        raise IndexError("max(): Expected reduction dim to be specified")
    return plain("sample_mean")(token_loss, mb)


def rollout_means(token_loss, mb):
    """Mean over a prompt's rollouts, each of its tokens, then over prompts."""
    total = token_loss[:0].sum()
    for sample, row in enumerate(mb.rows.tolist()):
        mine = (mb.segment_ids == sample) & mb.loss_mask
        if row >= 0 and mine.any():
            group = int(mb.sample_columns["group_index"][sample])
            members = ROLLOUTS_OF_GROUP[mb.plan_id][group]
            total = total + token_loss[mine].sum() / (int(mb.rollout_mask_sums[sample]) * members * mb.num_prompts)
    return total


def count_placeholders(token_loss, mb):
    return plain("sample_mean")(token_loss, mb) * mb.num_rollouts / (mb.num_rollouts + NUM_PLACEHOLDERS[mb.plan_id])


STEP_EMPTY_ROWS, EMPTY_UNITS, ROLLOUTS_OF_GROUP, NUM_PLACEHOLDERS = {}, {}, {}, {}


@pytest.fixture(scope="module", autouse=True)
def what_a_trainer_would_all_reduce():
    """Counts of the whole step by plan, for the reducers above that take wrong ones."""
    for mode, empty in [*((mode, "count") for mode in MODES), ("sample_mean", "skip")]:
        made = batches(Target(mode, DIVISOR if mode == "constant" else None, empty), 2)
        for probe in probes():
            ranks = made[probe.batch].ranks(probe)
            truth = made[probe.batch].truth.rollouts
            plan_id = ranks[0][0].plan_id
            trained = np.array([mask.sum() for mask in truth.masks])
            STEP_EMPTY_ROWS[plan_id] = int((trained == 0).sum())
            units = {"sample_mean": truth.rollouts, "prompt_mean": truth.groups}
            EMPTY_UNITS[plan_id] = {
                name: sum(not sum(t for t, u in zip(trained, ids, strict=True) if u == unit) for unit in set(ids))
                for name, ids in units.items()
            }
            pairs = set(zip(truth.groups, truth.rollouts, strict=True))
            ROLLOUTS_OF_GROUP[plan_id] = {g: sum(h == g for h, _ in pairs) for g in set(truth.groups)}
            NUM_PLACEHOLDERS[plan_id] = sum(mb.is_placeholder for rank in ranks for mb in rank)


class Wrong(NamedTuple):
    name: str
    reducer: object
    causes: set
    arguments: dict


WRONG = [
    Wrong("token mean of a micro-batch", masked_mean, {faults.MEAN_OF_MEANS}, meant("token_mean", backend="megatron")),
    Wrong(
        "mean of the row means of each micro-batch, averaged",
        mean_of_row_means,
        {faults.MEAN_OF_MEANS, faults.PER_ROW},
        meant("sample_mean", backend="megatron"),
    ),
    Wrong(
        "mean of row means over micro-batches, added up over ranks",
        lambda x, mb: mean_of_row_means(x, mb) / mb.num_micro_batches,
        {faults.MEAN_OF_MEANS, faults.PER_ROW, faults.DP_SIZE, faults.CP_TWICE},
        meant("sample_mean"),
    ),
    Wrong("means added up over ranks", masked_mean, {faults.OF_THE_MICRO_BATCH}, meant("token_mean")),
    Wrong(
        "averaged over ranks, no factor",
        plain("token_mean"),
        {faults.DP_SIZE, faults.CP_MISSING},
        meant("token_mean", backend="fsdp"),
    ),
    Wrong("times D though summed", times(lambda mb: mb.dp_size), {faults.DP_SIZE}, meant("sample_mean")),
    Wrong("averaged over dp by hand", times(lambda mb: 1 / mb.dp_size), {faults.DP_SIZE}, meant("sample_mean")),
    Wrong(
        "times D C where the schedule multiplies by C",
        LossReducer(backend="megatron"),
        {faults.CP_TWICE},
        meant("sample_mean", backend="megatron_legacy"),
    ),
    Wrong("times C", times(lambda mb: mb.cp_size, "constant"), {faults.CP_TWICE}, meant("constant")),
    Wrong(
        "times D only, averaged over dp x cp",
        times(lambda mb: mb.dp_size),
        {faults.CP_MISSING},
        meant("sample_mean", backend="ddp"),
    ),
    Wrong(
        "factor K forgotten",
        times(lambda mb: mb.dp_size * mb.cp_size),
        {faults.K_MISSING},
        meant("sample_mean", backend="megatron"),
    ),
    Wrong("times K though accumulated", times(lambda mb: mb.num_micro_batches), {faults.K_EXTRA}, meant("sample_mean")),
    Wrong("each row is a mean", whole_row_means, {faults.PER_ROW}, meant("sample_mean")),
    Wrong("each row is a mean, of its cp rank", per_row, {faults.PER_ROW, faults.OF_THE_CP_RANK}, meant("sample_mean")),
    Wrong("empty rows clamped to one token", phantom, {faults.PHANTOM}, meant("token_mean")),
    Wrong("prompts = rollouts / G", assumed_prompts, {faults.GROUP_SIZE}, meant("prompt_mean")),
    Wrong("prompts = rollouts // G", assumed_prompts_floor, {faults.GROUP_SIZE}, meant("prompt_mean")),
    Wrong(
        "reshape(-1, G)",
        reshaped_groups,
        {faults.GROUP_SIZE, faults.MEAN_OF_MEANS},
        meant("prompt_mean", backend="megatron"),
    ),
    Wrong("L from the tensor's width", width_divisor, {faults.PADDED_WIDTH}, meant("constant")),
    Wrong("rows divided by the width", width_mean, {faults.PADDED_WIDTH}, meant("sample_mean")),
    Wrong("L from max_seqlen", max_seqlen_divisor, {faults.PADDED_WIDTH}, meant("constant")),
    Wrong("N from the configuration", assumed_batch_size, {faults.ASSUMED_NUMBER}, meant("sample_mean")),
    Wrong(
        "masked by multiplication",
        multiplied,
        {"masked positions multiplied by zero instead of selected"},
        meant("sample_mean"),
    ),
    Wrong("empty rollouts left out of N", not_counting_empty(), {faults.EMPTY["count"]}, meant("sample_mean")),
    Wrong("empty groups left out of P", not_counting_empty("prompt_mean"), {faults.EMPTY["count"]}, meant("prompt_mean")),
    Wrong(
        "empty rollouts counted in N",
        times(lambda mb: mb.num_rollouts / (mb.num_rollouts + EMPTY_UNITS[mb.plan_id]["sample_mean"])),
        {faults.EMPTY["skip"]},
        meant("sample_mean", empty="skip"),
    ),
    Wrong("placeholders in N", count_placeholders, {faults.PLACEHOLDERS}, meant("sample_mean")),
    Wrong("mask not shifted", shifted(1), {faults.SHIFTED}, meant("token_mean")),
    Wrong("mask shifted twice", shifted(-1), {faults.SHIFTED}, meant("token_mean")),
    Wrong("prompts trained", all_tokens, {faults.PROMPT}, meant("token_mean")),
    Wrong("padding trained", all_positions, {faults.PADDING}, meant("token_mean")),
    Wrong("loss.mean()", plain_mean, {faults.PADDING, faults.MEAN_OF_MEANS}, meant("token_mean", backend="megatron")),
    Wrong("last token cut off", last_left_out, {faults.LAST_LEFT_OUT}, meant("token_mean")),
    Wrong("plain sum", sum_of_masked, {faults.SUM}, meant("token_mean")),
    Wrong("means added up", times(lambda mb: mb.num_rollouts), {faults.SUM}, meant("sample_mean")),
    Wrong("token mean instead", plain("token_mean"), {"token_mean instead of sample_mean"}, meant("sample_mean")),
    Wrong("sample mean instead", plain("sample_mean"), {"sample_mean instead of token_mean"}, meant("token_mean")),
    Wrong("mean of rollout means", rollout_means, {faults.PER_ROLLOUT}, meant("prompt_mean")),
    Wrong("a factor of 1.1", times(lambda _: 1.1), {faults.CONSTANT}, meant("sample_mean")),
    Wrong("denominators of what the rank has", cp_local_mean, {faults.OF_THE_MICRO_BATCH}, meant("sample_mean")),
    Wrong(
        "mean of nothing",
        masked_mean_without_clamp,
        {faults.MEAN_OF_MEANS, "0/0 where nothing is trained"},
        meant("token_mean", backend="megatron"),
    ),
    Wrong("a constant zero", detached_zero, {"not joined to the graph where nothing is trained"}, meant("token_mean")),
    Wrong("a zero of its own", leaf_of_its_own, {"not joined to the graph where nothing is trained"}, meant("token_mean")),
    Wrong("no clamp of T", no_clamp, {"0/0 where nothing is trained"}, meant("token_mean")),
    Wrong("detached", detached, {DETACHED, "not joined to the graph where nothing is trained"}, meant("token_mean")),
    Wrong("the logged value scaled", value_off, {"the value returned is not that of the gradient"}, meant("sample_mean")),
    Wrong(
        "the value and the weights scaled",
        lambda x, mb: value_off(x, mb) * mb.num_micro_batches,
        {"the value returned is not that of the gradient", faults.K_EXTRA},
        meant("sample_mean"),
    ),
    Wrong(
        "raises on a placeholder",
        raises,
        {"raises IndexError: max(): Expected reduction dim to be specified"},
        meant("sample_mean"),
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty", ["count", "skip"])
def test_the_catalogue_tells_its_faults_apart(mode, empty):
    """No two faults of different names do the same to every token, and none does nothing."""
    target = Target(mode, DIVISOR if mode == "constant" else None, empty)
    made = batches(target, 2)
    healthy = [probe for probe in probes() if probe.poison is None]
    layouts = [Layout(made[p.batch].ranks(p), made[p.batch].truth, target.divisor, 2) for p in healthy]
    right = right_formula(mode, empty)
    truth = np.concatenate([made[p.batch].truth.gradient(mode) for p in healthy])
    np.testing.assert_allclose(np.concatenate([layout.weights(right) for layout in layouts]), truth, rtol=1e-12, atol=0)
    seen = {np.round(truth / truth.max(), 7).tobytes(): ("nothing",)}
    for fault in single_faults(mode, empty, 2):
        weights = np.concatenate([layout.weights(fault.of(right)) for layout in layouts])
        causes = seen.setdefault(np.round(weights / truth.max(), 7).tobytes(), fault.causes)
        assert causes == fault.causes, fault


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_wrong_reducers_are_caught_and_named(wrong):
    report = check_reducer(wrong.reducer, **wrong.arguments)
    print(report)
    assert set(report.causes) == wrong.causes, report
    assert not report.ok


# --- wrong training steps ---------------------------------------------------------------------------------------------


def rank_tokens(step):
    """The token mean of all that the rank has, averaged over ranks."""
    gradients = []
    for micro_batches in step.ranks:
        model = step.model()
        count = max(1, sum(int(mb.loss_mask.sum()) for mb in micro_batches))
        for mb in micro_batches:
            (sum_of_masked(model(mb), mb) / count).backward()
        gradients.append(model.weight.grad)
    return sum(gradients) / len(gradients)


def rank_rollouts(step):
    """N / D of the rank: as many rollouts as it happens to have."""
    gradients = []
    for micro_batches in step.ranks:
        model = step.model()
        mine = {int(i) for mb in micro_batches for i in mb.rollout_indices if i >= 0}
        for mb in micro_batches:
            (plain("sample_mean")(model(mb), mb) * mb.num_rollouts * mb.cp_size / max(1, len(mine))).backward()
        gradients.append(model.weight.grad)
    return sum(gradients) / len(gradients)


def zeroed_too_often(step):
    gradients = []
    for micro_batches in step.ranks:
        model = step.model()
        for mb in micro_batches:
            model.zero_grad()
            LossReducer(backend="fsdp")(model(mb), mb).backward()
        gradients.append(model.weight.grad)
    return sum(gradients) / len(gradients)


def not_reduced(step):
    """Every rank steps with a gradient of its own; this is the first one's."""
    return trainer(plain("token_mean"), combine=lambda gradients: gradients[0])(step)


def averaged_twice(step):
    return trainer(LossReducer(backend="fsdp"), combine=lambda gs: sum(gs) / (len(gs) * step.ranks[0][0].dp_size))(step)


def averaged_over_dp_only(step):
    return trainer(LossReducer(backend="fsdp"), combine=lambda gs: sum(gs) / step.ranks[0][0].dp_size)(step)


def logs_the_mean_of_means(step):
    model, logged = step.model(), []
    for mb in (mb for micro_batches in step.ranks for mb in micro_batches):
        token_loss = model(mb)
        plain("token_mean")(token_loss, mb).backward()
        logged.append(masked_mean(token_loss, mb).item())
    return sum(logged) / len(logged), model.weight.grad


def multiplies(step):
    model, logged = step.model(), 0.0
    for mb in (mb for micro_batches in step.ranks for mb in micro_batches):
        loss = multiplied(model(mb), mb)
        loss.backward()
        logged += loss.item()
    return logged, model.weight.grad


WRONG_TRAINERS = [
    Wrong("denominator of the rank", rank_tokens, {faults.OF_THE_RANK}, meant("token_mean")),
    Wrong("rollouts of the rank", rank_rollouts, {faults.OF_THE_RANK}, meant("sample_mean")),
    Wrong(
        "accumulating means",
        trainer(lambda x, mb: masked_mean(x, mb) / mb.num_micro_batches),
        {faults.MEAN_OF_MEANS},
        meant("token_mean"),
    ),
    Wrong("zero_grad inside the loop", zeroed_too_often, {faults.ONE_MICRO_BATCH}, meant("sample_mean")),
    Wrong("detached", lambda step: torch.zeros_like(step.model().weight), {DETACHED}, meant("token_mean")),
    Wrong("no all-reduce", not_reduced, {faults.ONE_RANK}, meant("token_mean")),
    Wrong("averaged twice", averaged_twice, {faults.DP_SIZE}, meant("sample_mean")),
    Wrong("averaged without cp", averaged_over_dp_only, {faults.CP_TWICE}, meant("sample_mean")),
    Wrong(
        "summed", trainer(LossReducer(backend="fsdp"), combine=sum), {faults.DP_SIZE, faults.CP_TWICE}, meant("sample_mean")
    ),
    Wrong(
        "logs a mean of means",
        logs_the_mean_of_means,
        {"the value returned is not that of the gradient"},
        meant("token_mean"),
    ),
    Wrong(
        "masks by multiplication",
        multiplies,
        {"masked positions multiplied by zero instead of selected"},
        meant("sample_mean"),
    ),
]


@pytest.mark.parametrize("wrong", WRONG_TRAINERS, ids=lambda wrong: wrong.name)
def test_wrong_trainers_are_caught_and_named(wrong):
    report = check_trainer(wrong.reducer, **wrong.arguments)
    print(report)
    assert set(report.causes) == wrong.causes, report
    assert not report.ok


# --- the report ---------------------------------------------------------------------------------------------------------


def test_the_report_says_what_fails_by_how_much_and_why():
    report = check_reducer(times(lambda mb: mb.dp_size))
    assert not report.ok
    assert report.causes == (faults.DP_SIZE,)
    assert [(f.invariance, f.factor, f.cause) for f in report.failures] == [
        ("data-parallel ranks", pytest.approx(2.0), faults.DP_SIZE),
        ("all cuts together", pytest.approx(2.0), faults.DP_SIZE),
        ("empty ranks", pytest.approx(13.0), faults.DP_SIZE),
        ("long rollouts", pytest.approx(2.0), faults.DP_SIZE),
    ]
    assert {f.invariance for f in report.failures} < set(report.checked)
    first, *lines = str(report).splitlines()
    assert first == "4 of 16 invariances fail: dp-size dependence"
    assert " ".join(lines[0].split()) == (
        "data-parallel ranks x 2 dp-size dependence (hard batch, dp 2 x cp 1, zigzag, 100,000 tokens per GPU)"
    )


def test_a_factor_is_that_of_the_token_that_is_furthest_off():
    by_invariance = {f.invariance: f.factor for f in check_reducer(whole_row_means).failures}
    assert by_invariance["fan-out"] > 1.5  # a rollout of several rows counts several times
    by_invariance = {f.invariance: f.factor for f in check_reducer(all_tokens, **meant("token_mean")).failures}
    assert by_invariance["plain batch"] == math.inf  # what should not count at all
    by_invariance = {f.invariance: f.factor for f in check_reducer(last_left_out, **meant("token_mean")).failures}
    assert by_invariance["plain batch"] == 0.0
    by_invariance = {f.invariance: f.factor for f in check_reducer(detached_zero, **meant("token_mean")).failures}
    assert math.isnan(by_invariance["empty ranks"])


def test_two_mistakes_at_once_are_told_apart():
    """Each row a mean, and the factor K forgotten: fan-out shows one, micro-batches the other."""

    def both(token_loss, mb):
        return whole_row_means(token_loss, mb) * mb.dp_size * mb.cp_size

    report = check_reducer(both, backend="megatron")
    by_invariance = {f.invariance: f.cause for f in report.failures}
    assert by_invariance["fan-out"] == faults.PER_ROW
    assert by_invariance["micro-batches"] == faults.K_MISSING
    assert "data-parallel ranks" not in by_invariance


def test_a_mistake_that_nobody_made_before_is_caught_all_the_same():
    def odd(token_loss, mb):
        position = torch.arange(len(token_loss), dtype=torch.float64)
        return plain("sample_mean")(token_loss * (1 + 0.1 * torch.sin(position)), mb)

    report = check_reducer(odd)
    assert not report.ok
    assert report.causes == ("no usual mistake",)
    assert {"order of rows", "micro-batches", "padding"} <= {f.invariance for f in report.failures}


def test_reducers_that_assume_another_group_size():
    report = check_reducer(lambda x, mb: assumed_prompts(x, mb, 8), **meant("prompt_mean", group_size=8))
    assert report.causes == (faults.GROUP_SIZE,)
    assert "plain batch" not in {f.invariance for f in report.failures}  # where groups are of 8, it is right


def test_wrong_use_is_told():
    with pytest.raises(rollpack.PlanError, match="backend is 'horovod'; it has to be one of none, ddp"):
        check_reducer(plain("sample_mean"), backend="horovod")
    with pytest.raises(rollpack.PlanError, match="group_size is 0"):
        check_reducer(plain("sample_mean"), group_size=0)
    with pytest.raises(rollpack.PlanError, match="divisor"):
        check_reducer(plain("constant"), loss_aggregation="constant")
    for mode in ("mean", "token_mean_legacy", "trl:dapo"):
        with pytest.raises(
            rollpack.PlanError, match=f"^loss_aggregation is '{mode}'; what is held .* is one of sample_mean,"
        ):
            check_reducer(plain("sample_mean"), loss_aggregation=mode)
    with pytest.raises(TypeError, match="the reducer returned 1.0; the loss has to be a 0-d tensor"):
        check_reducer(lambda *_: 1.0)
    with pytest.raises(TypeError, match=r"the reducer returned a tensor of shape \[\d\d\]; the loss has to be a 0-d tensor"):
        check_reducer(lambda token_loss, _: token_loss * 0)
    for returned in (torch.tensor(1.0), (torch.tensor(1.0), 1, {})):
        with pytest.raises(TypeError, match=r"the reducer returned .*tensor\(1\.\).*; it has to be a loss and a count"):
            check_reducer(lambda *_, returned=returned: returned, backend="megatron_per_token")
    with pytest.raises(rollpack.PlanError, match="^reducer is 'fsdp'; it has to be a function$"):
        check_reducer("fsdp")
    with pytest.raises(rollpack.PlanError, match="^train is None; it has to be a function$"):
        check_trainer(None)
    for tolerance in (0.0, -1e-6, 1.0, math.nan):
        with pytest.raises(
            rollpack.PlanError, match=f"^tolerance is {tolerance}; it has to be above 0 and below 1, as 1e-6$"
        ):
            check_reducer(plain("sample_mean"), tolerance=tolerance)
    with pytest.raises(rollpack.PlanError, match="^tolerance is '1e-6'; it has to be a number$"):
        check_reducer(plain("sample_mean"), tolerance="1e-6")
    with pytest.raises(KeyError):  # a typo of one's own is no finding
        check_reducer(lambda _, mb: mb.sample_columns["reward"])
    with pytest.raises(TypeError, match=r"the training step returned None; it has to be the gradient of model.weight"):
        check_trainer(lambda _: None)


def test_padded_rows():
    probe = next(probe for probe in probes() if probe.batch == "small")
    ((packed,),) = batches(Target("sample_mean", None, "count"), 2)["small"].ranks(probe)
    mb = packed.to("cpu")
    rows = padded_rows(mb.tokens, mb)
    lengths = torch.diff(mb.cu_seqlens)
    assert rows.shape == (len(mb.rows), int(lengths.max()))
    assert padded_rows(mb.loss_mask, mb).sum(1).tolist() == mb.mask_sums.tolist()
