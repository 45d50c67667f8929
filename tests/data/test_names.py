"""Other trainers' mode names: each formula of the table is worked out by hand, and what plan makes of the name is that."""

import re
from enum import Enum
from fractions import Fraction as F
from pathlib import Path

import pyarrow as pa
import pytest

import rollpack
from rollpack.names import LAYOUTS, MODES, OURS, VERSIONS, mode_of, takes_divisor

#: Rows with a loss for each response token, one of them all masked, groups of 2 and 3.
LOSSES = [[4], [1, 2, 3], [10, 20], [1, 100, 2, 3], [7]]
MASKS = [[1], [1, 1, 1], [1, 1], [1, 0, 1, 1], [0]]
GROUPS = [0, 0, 1, 1, 1]
ROWS = range(5)
L = 10
COUNTED = [row for row in ROWS if any(MASKS[row])]


def total(rows):
    return sum(F(x) for row in rows for x, m in zip(LOSSES[row], MASKS[row], strict=True) if m)


def tokens(rows):
    return sum(sum(MASKS[row]) for row in rows)


def means(units, count):
    return sum(total(unit) / tokens(unit) for unit in units if tokens(unit)) / count


#: Formula → the loss of these rows, of units without a trained token counted (``count``) or not (``skip``).
BY_HAND = {
    "Σ m x / T": lambda _, __: total(ROWS) / tokens(ROWS),
    "(1/R) Σ_i ( Σ m x / M_i )": lambda _, empty: means([[r] for r in ROWS], 4 if empty == "skip" else 5),
    "(1/N) Σ_r ( Σ m x / M_r )": lambda _, __: means([[r] for r in ROWS], 5),
    "Σ m x / (L R)": lambda _, __: total(ROWS) / (L * 5),
    "Σ m x / R": lambda _, __: total(ROWS) / 5,
    "(1/P) Σ_g ( Σ m x / M_g )": lambda _, __: means([[0, 1], [2, 3, 4]], 2),
    "(1/K) Σ_k ( Σ m x / T_k )": lambda cut, _: means(cut, sum(tokens(rows) > 0 for rows in cut)),
}


def table(**columns):
    return pa.table(
        {
            "tokens": [[7] * (1 + len(mask)) for mask in MASKS],
            "loss_mask": MASKS,
            "group_index": GROUPS,
            "rollout_id": list(ROWS),
        }
        | columns
    )


def plan(name, data=None, **options):
    mode = MODES[name]
    options = {"divisor": L if isinstance(mode.divisor, str) else None, "empty": mode.empty or "count"} | options
    return rollpack.plan(table() if data is None else data, loss_aggregation=name, micro_batch_size=2, **options)


@pytest.mark.filterwarnings("ignore:token_mean_legacy is a mean of micro-batch means")
@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.mode])
def test_a_name_means_what_its_formula_says(name):
    made = plan(name)
    cut = [made.rows(0, 0, k).tolist() for k in range(made.steps[0].num_micro_batches)]
    weights = dict(zip(made.to_arrow()["row"].to_pylist(), made.to_arrow()["sample_weight"].to_pylist(), strict=True))
    loss = sum(weights[row] * float(total([row])) for row in ROWS)
    assert loss == pytest.approx(float(BY_HAND[MODES[name].formula](cut, MODES[name].empty)), rel=1e-14)
    assert made.settings.loss_aggregation == MODES[name].mode


def test_our_names_are_those_that_the_core_knows():
    for layout in LAYOUTS:
        assert rollpack.plan(table(), micro_batch_size=1, cp_size=2, layout=layout).settings.layout == layout
    for mode in OURS:
        divisor = 10.0 if mode == "constant" else None
        made = rollpack.plan(table(), micro_batch_size=1, loss_aggregation=mode, divisor=divisor)
        assert made.settings.loss_aggregation == mode


def test_every_trainer_has_names_and_every_name_a_trainer():
    assert {name.partition(":")[0] for name in MODES} == set(VERSIONS)


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.mode is None])
def test_a_name_that_is_none_of_ours_says_why(name):
    with pytest.raises(rollpack.PlanError, match=re.escape(f"{name} is {MODES[name].formula}, and no mode of ours is that")):
        plan(name)


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.per_row])
def test_means_of_rows_are_refused_where_a_rollout_has_several(name):
    fanned_out = table(rollout_id=["a", "b", "b", "c", "d"])
    with pytest.raises(rollpack.PlanError, match="averages rows, and rows 1 and 2 are one rollout"):
        plan(name, fanned_out)
    # Unless rows are made the unit.
    assert plan(name, fanned_out, columns={"rollout_id": None}).to_arrow().equals(plan(name).to_arrow())


def test_the_first_rollout_of_several_rows_is_named_by_its_first_two():
    fanned_out = table(rollout_id=["a", "b", "c", "b", "c"])
    with pytest.raises(rollpack.PlanError, match="rows 1 and 3 are one rollout"):
        plan("trl:grpo", fanned_out)


def test_the_mode_behind_a_name_and_whether_it_is_given_a_divisor():
    modes = {"trl:dapo": "token_mean", "verl:token-sum": None, "prompt_mean": "prompt_mean", "trl:luspo": "constant"}
    assert {name: mode_of(name) for name in modes} == modes
    given = {"constant": True, "sample_mean": False, "trl:dr_grpo": True, "trl:luspo": False, "trl:dapo": False}
    assert {name: takes_divisor(name) for name in given} == given


def test_token_means_do_not_mind_fan_out():
    assert plan("trl:dapo", table(rollout_id=["a", "b", "b", "c", "d"])).steps[0].num_rollouts == 4


def test_divisors_of_constant():
    with pytest.raises(rollpack.PlanError, match="pass divisor=max_completion_length"):
        plan("trl:dr_grpo", divisor=None)
    with pytest.raises(rollpack.PlanError, match="takes no divisor: it is 'constant' with a divisor of 1"):
        plan("trl:luspo", divisor=2.0)
    with pytest.raises(rollpack.PlanError, match="only loss_aggregation 'constant' takes one"):
        plan("trl:dapo", divisor=2.0)


def test_whether_empty_rows_count_has_to_be_said_as_it_is_there():
    with pytest.raises(rollpack.PlanError, match="without a trained token do not count: pass empty='skip'"):
        plan("openrlhf:seq-mean-token-mean", empty="count")
    with pytest.raises(rollpack.PlanError, match="without a trained token count: pass empty='count'"):
        plan("trl:grpo", empty="skip")


#: Means over tokens alone have no unit that could be without one.
OVER_TOKENS = {"Σ m x / T", "(1/K) Σ_k ( Σ m x / T_k )"}


@pytest.mark.filterwarnings("ignore:token_mean_legacy is a mean of micro-batch means")
@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.mode])
def test_every_name_that_counts_units_says_whether_those_that_are_empty_count(name):
    if MODES[name].formula in OVER_TOKENS:
        assert plan(name, empty="skip").to_arrow().equals(plan(name, empty="count").to_arrow())
        return
    counted = "skip" if name in {"nemo-rl:sequence_level", "openrlhf:seq-mean-token-mean"} else "count"
    plan(name, empty=counted)
    with pytest.raises(rollpack.PlanError, match=f"pass empty='{counted}'"):
        plan(name, empty="count" if counted == "skip" else "skip")


def test_a_trainers_name_without_its_prefix_is_told_with_it():
    for name, meant in (
        ("dapo", "trl:dapo"),
        ("DAPO", "trl:dapo"),
        ("seq-mean-token-mean", "verl:seq-mean-token-mean or openrlhf:seq-mean-token-mean"),
        ("grpo", "trl:grpo or areal:grpo"),
    ):
        with pytest.raises(rollpack.PlanError) as told:
            rollpack.plan({"tokens": [[1]], "response_length": [1]}, micro_batch_size=1, loss_aggregation=name)
        assert str(told.value).startswith(f"loss_aggregation is {name!r}, which is no mode of ours; ")
        assert str(told.value).endswith(f"did you mean {meant}?")


def test_unknown_names_tell_the_known_ones():
    for name, told in [("trl:grop", "trl:grpo, trl:bnpo"), ("ms-swift:grpo", "trainers are verl, trl, skyrl")]:
        with pytest.raises(rollpack.PlanError, match=told):
            rollpack.plan(table(), loss_aggregation=name, micro_batch_size=2)


def test_a_member_of_an_enumeration_is_no_name_of_a_trainer():
    """Its text has a colon in it, as those have."""
    with pytest.raises(rollpack.PlanError, match=r"^loss_aggregation is '<Mode.MEAN: 'token_mean'>'; it has to be one of"):
        rollpack.plan(table(), loss_aggregation=Enum("Mode", {"MEAN": "token_mean"}).MEAN, micro_batch_size=2)


def as_row(mode):
    """A row of the table in python/docs/trainers.md."""
    ours = "none" if mode.mode is None else f"`{mode.mode}`"
    if mode.divisor is not None:
        ours += f", L = {mode.divisor if isinstance(mode.divisor, str) else f'{mode.divisor:g}'}"
    conditions = ["a row a rollout"] if mode.per_row else []
    conditions += ['`empty="skip"`'] if mode.empty == "skip" else []
    conditions += [mode.note] if mode.note else []
    return f"| `{mode.name}` | {mode.formula} | {ours} | {'; '.join(conditions)} |".replace("|  |", "| |")


def test_the_page_has_the_same_table():
    page = (Path(__file__).parents[2] / "python" / "docs" / "trainers.md").read_text()
    rows = re.findall(rf"^\| `(?:{'|'.join(VERSIONS)}):.*$", page, flags=re.MULTILINE)
    assert rows == [as_row(mode) for mode in MODES.values()]
    for trainer, version in VERSIONS.items():
        assert f"{trainer} {version}" in " ".join(page.split())
