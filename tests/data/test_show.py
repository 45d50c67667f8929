"""``plan.show()``: the picture of a schedule, drawn and in text."""

import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pyarrow as pa
import pytest

import rollpack

SVG = "{http://www.w3.org/2000/svg}"


def made(lengths, **options):
    table = pa.table({"tokens": [[1] * n for n in lengths], "loss_mask": [[1]] * len(lengths)})
    return rollpack.plan(table, **options)


def hints(shown):
    return [title.text for title in ET.fromstring(shown._repr_svg_()).iter(f"{SVG}title")]


def by_tokens(shown, values):
    """Values of micro-batches by the tokens of each, where these differ."""
    return dict(zip(shown.tokens.ravel().tolist(), values.ravel().tolist(), strict=True))


def test_ranks_that_wait_once_a_step_run_on():
    shown = made([7, 5, 4, 2], micro_batch_size=1, dp_size=2).show()  # 7 + 2 and 5 + 4
    assert by_tokens(shown, shown.lengths) == {7: 7, 5: 5, 4: 4, 2: 2}
    assert shown.end == 9
    assert [sum(row) for row in shown.tokens.tolist()] == [9, 9]
    assert shown.starts.tolist() == [[0, shown.tokens[0, 0]], [0, shown.tokens[1, 0]]]


def test_ranks_that_wait_at_each_micro_batch_begin_together():
    shown = made([7, 6, 3, 2], micro_batch_size=1, dp_size=2, sync="micro_batch").show()
    assert sorted(map(sorted, shown.tokens.T.tolist())) == [[2, 3], [6, 7]]
    assert shown.starts[0].tolist() == shown.starts[1].tolist() == [0, shown.tokens[:, 0].max()]
    assert shown.end == 10


def test_time_is_the_cost_that_ranks_are_balanced_by():
    shown = made([10, 3], micro_batch_size=2, cost=rollpack.CostModel(2, 5)).show()
    assert shown.lengths.tolist() == [[2 * 10 + 5 * 100 + 2 * 3 + 5 * 9]]
    assert shown.tokens.tolist() == [[13]]


def test_fill_is_of_the_budget_of_all_cp_ranks():
    shown = made([8, 6, 20], max_tokens_per_gpu=8, cp_size=2, layout="contiguous", oversize="alone").show()
    assert by_tokens(shown, shown.fills) == {20: 20 / 16, 14: 14 / 16}


@pytest.mark.parametrize("options", [{"max_tokens_per_gpu": 60}, {"micro_batch_size": 3}])
def test_fill_agrees_with_the_plan(options):
    plan = made(np.random.default_rng(0).integers(2, 50, 60).tolist(), dp_size=4, **options)
    assert plan.show().fills.mean() == pytest.approx(plan.fill, abs=1e-12)


def test_text():
    lengths = [6, 2, 4]
    plan = made(lengths, micro_batch_size=1, dp_size=3)
    of_rank = [lengths[plan.rows(0, rank, 0)[0]] for rank in range(3)]
    assert sorted(of_rank) == [2, 4, 6]
    assert plan.show().text(width=12) == [
        *(f"dp rank   {rank} |{'█' * 2 * n}{'·' * 2 * (6 - n)}|         {n} tokens" for rank, n in enumerate(of_rank)),
        "█▓ micro-batches, 1 on each rank; ·· waiting for the others at the end of the step",
    ]


def test_a_terminal_shows_text():
    shown = made([6, 2, 4], micro_batch_size=1, dp_size=3).show()
    assert repr(shown) == "\n".join(shown.text())


def test_many_ranks_in_text():
    lines = made([2] * 70, micro_batch_size=1, dp_size=70).show().text()
    assert (len(lines), lines[-2]) == (66, "... and 6 more ranks")
    prompts = {"tokens": [[7]] * 65, "response_length": [0] * 65}
    lines = rollpack.plan(prompts, micro_batch_size=1, dp_size=65).show().text()
    assert (lines[0][-9:], lines[-2]) == ("  1 token", "... and 1 more rank")


def test_what_a_micro_batch_holds_is_told():
    plan = made([8, 6, 20], max_tokens_per_gpu=16, oversize="alone")
    told = {tuple(plan.rows(0, 0, k)): hint for k, hint in enumerate(hints(plan.show()))}
    assert told[(2,)].endswith("20 tokens, fill 125.0%, over the budget\nrows 2")
    (both,) = (hint for rows, hint in told.items() if len(rows) == 2)
    assert "14 tokens, fill 87.5%\nrows " in both


def test_long_lists_of_rows_are_cut_short():
    (hint,) = hints(made([2] * 40, micro_batch_size=40).show())
    assert hint.endswith(", ... (40 rows)")
    assert hint.partition("rows ")[2].count(",") == 12


def test_each_micro_batch_is_a_block_and_placeholders_are_none():
    shown = made([3, 4, 5], micro_batch_size=1, dp_size=2, placeholders=True).show()
    assert (shown.tokens == 0).sum() == 1
    assert len(hints(shown)) == 3


def test_a_step_is_chosen():
    plan = made([2, 3, 4], micro_batch_size=1, global_batch_size=1)
    assert [int(plan.show(step).tokens.sum()) for step in range(3)] == [2, 3, 4]
    with pytest.raises(rollpack.PlanError, match="step is 3"):
        plan.show(3)


def test_a_notebook_gets_the_picture_in_its_page():
    shown = made([2, 3], micro_batch_size=1).show()
    assert shown._repr_html_() == shown._repr_svg_()
    assert shown._repr_html_().startswith("<svg ")
    assert "<style" not in shown._repr_html_()  # it would be the whole notebook's


def test_nothing_is_drawn_before_it_is_asked_for():
    code = (
        "import sys, rollpack, pyarrow as pa\n"
        "data = pa.table({'tokens': [[1, 2]], 'loss_mask': [[1]]})\n"
        "shown = rollpack.plan(data, micro_batch_size=1).show()\n"
        "print(shown)\n"
        "assert not {'matplotlib', 'jinja2', 'torch'} & set(sys.modules)\n"
        "sys.modules['matplotlib'] = None\n"
        "assert shown._repr_svg_() is None and shown._repr_html_() is None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
