"""What stands in the tables of python/docs/formulas.md is evaluated, and held against examples, reference and library."""

import itertools
import re
from fractions import Fraction as F
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import rollpack
from rollpack import _reference
from rollpack.names import LAYOUTS, OURS
from rollpack.torch import gradient_factor
from rollpack.torch.backends import BACKENDS

PAGE = (Path(__file__).parents[1] / "python" / "docs" / "formulas.md").read_text()


def table(head):
    """The rows of the table whose first heading this is, as lists of cells."""
    (lines,) = re.findall(rf"^\| {re.escape(head)} .*\n\|[-|]*\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines.splitlines()]


def codes(cell):
    return re.findall(r"`([^`]+)`", cell)


def value(expression, **names):
    """A formula of the page, exactly: its numbers are fractions."""
    exact = {name: F(number) for name, number in names.items()}
    return eval(re.sub(r"\b(\d+)\b", r"F(\1)", expression), {"F": F, "min": min}, exact)


MODES = {codes(row[0])[0]: codes(row[2])[0] for row in table("`loss_aggregation`")}


def example(row):
    """Of an example, as the page writes it: (loss, trained) of each token of each sample; rollouts; groups."""
    samples, rollouts, groups = [], [], []
    for group, of_group in enumerate(row[1].split(r"\|")):
        for rollout, of_rollout in enumerate(of_group.split(";")):
            for sample in of_rollout.split("/"):
                samples.append([(F(token.strip("()")), not token.startswith("(")) for token in sample.split()])
                rollouts.append((group, rollout))
                groups.append(group)
    return samples, rollouts, groups


EXAMPLES = {codes(row[0])[0]: row for row in table("example")}


def test_tables_hold_every_mode_backend_and_layout():
    assert list(MODES) == list(OURS)
    assert sorted(itertools.chain.from_iterable(codes(row[0]) for row in table("`backend`"))) == sorted(BACKENDS)
    assert [codes(row[0])[0] for row in table("`layout`")] == list(LAYOUTS)
    assert list(EXAMPLES) == ["four_samples", "fan_out", "uneven_groups", "all_apart"]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mode", MODES)
def test_weights_give_the_examples(name, mode):
    losses, rollouts, groups = example(EXAMPLES[name])
    trained = [sum(is_trained for _, is_trained in sample) for sample in losses]
    divisor = F(EXAMPLES[name][2])
    loss = F(0)
    for sample, rollout, group in zip(losses, rollouts, groups, strict=True):
        weight = value(
            MODES[mode],
            N=len(set(rollouts)),
            P=len(set(groups)),
            T=sum(trained),
            M_r=sum(n for n, r in zip(trained, rollouts, strict=True) if r == rollout),
            M_g=sum(n for n, g in zip(trained, groups, strict=True) if g == group),
            L=divisor,
        )
        loss += weight * sum(x for x, is_trained in sample if is_trained)
    stated = F(codes(EXAMPLES[name][3 + list(MODES).index(mode)])[0])
    assert loss == stated
    given = float(divisor) if mode == "constant" else None
    arrays = [np.array([float(x) for x, _ in sample]) for sample in losses]
    masks = [np.array([is_trained for _, is_trained in sample]) for sample in losses]
    assert _reference.step_loss(mode, arrays, masks, rollouts, groups, divisor=given) == pytest.approx(
        float(stated), rel=1e-14
    )
    assert planned(mode, given, arrays, masks, rollouts, groups) == pytest.approx(float(stated), rel=1e-14)


def planned(mode, divisor, losses, masks, rollouts, groups):
    """Σ w x with the weights of a plan."""
    rows = pa.table(
        {
            "tokens": [[7] * (1 + len(mask)) for mask in masks],
            "loss_mask": [mask.tolist() for mask in masks],
            "rollout_id": [10 * group + rollout for group, rollout in rollouts],
            "group_index": groups,
        }
    )
    plan = rollpack.plan(rows, loss_aggregation=mode, divisor=divisor, micro_batch_size=1)
    weights = pa.table(plan).sort_by("row")["sample_weight"].to_numpy()
    return sum(w * x[m].sum() for w, x, m in zip(weights, losses, masks, strict=True))


@pytest.mark.parametrize(("dp_size", "cp_size", "micro_batches"), [(1, 1, 1), (2, 3, 5)])
def test_factors_undo_what_the_trainer_does(dp_size, cp_size, micro_batches):
    sizes = {"D": dp_size, "C": cp_size, "K": micro_batches, "G": micro_batches, "T": 77}
    for row in table("`backend`"):
        (done,), (factor,) = codes(row[1]), codes(row[2])
        assert value(done, **sizes) * value(factor, **sizes) == 1, row
        for backend in codes(row[0]):
            made = gradient_factor(
                backend,
                dp_size=dp_size,
                cp_size=cp_size,
                num_micro_batches=micro_batches,
                num_tokens=77,
                accumulation_steps=micro_batches if "G" in factor else None,
            )
            assert made == value(factor, **sizes), backend


@pytest.mark.parametrize("row", table("`layout`"), ids=lambda row: codes(row[0])[0])
@pytest.mark.parametrize("cp_size", [2, 3])
def test_owners_are_those_of_the_table(row, cp_size):
    (layout,), (multiple,), (owner,) = codes(row[0]), codes(row[1]), codes(row[3])
    lengths, first = [7, 12, 25], [100, 200, 300]  # a sequence's tokens count up from here
    rows = pa.table(
        {"tokens": [list(range(a, a + n)) for a, n in zip(first, lengths, strict=True)], "response_length": [3, 9, 24]}
    )
    plan = rollpack.plan(rows, micro_batch_size=3, cp_size=cp_size, layout=layout)
    order = plan.rows(0, 0, 0).tolist()
    multiple = int(value(multiple, C=cp_size))
    padded = {i: n if layout == "contiguous" else -(-n // multiple) * multiple for i, n in enumerate(lengths)}
    total = -(-sum(padded.values()) // multiple) * multiple
    expected, begin = [set() for _ in range(cp_size)], 0
    for i in order:
        # Padding at the end of the micro-batch belongs to the last sequence; zigzag has none.
        for token in range(lengths[i] - [3, 9, 24][i], lengths[i]):
            p, size = (token - 1, padded[i]) if layout == "zigzag" else (begin + token - 1, total)
            rank = eval(owner, {"min": min, "p": p, "S": size, "C": cp_size})
            expected[rank].add(first[i] + token)
        begin += padded[i]
    for rank in range(cp_size):
        (packed,) = rollpack.pack(rows, plan, cp_rank=rank)
        assert set(packed.labels[packed.loss_mask].tolist()) == expected[rank]
