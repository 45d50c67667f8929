from __future__ import annotations

import html
import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import rollpack
from rollpack.report.page import look_up

from .browser import BROWSER, Page, opened
from .conftest import ROWS, write

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def report(run, tmp_path):
    """Makes a report: (exit status, its numbers, its page)."""

    def report(*arguments):
        page = tmp_path / "report.html"
        status, out, err = run("report", *arguments, "-o", page, "--json")
        assert err == ""
        return status, json.loads(out), page

    return report


def samples(*rows):
    """Rows of so many tokens, of which all but the first are trained: (trained, rollout, group)."""
    return [
        {"tokens": [1] * (n + 1), "loss_mask": [1] * n, "rollout_id": rollout, "group_index": group}
        for n, rollout, group in rows
    ]


def test_histograms_worked_out_by_hand(report, file):
    # Total lengths 3 5 4 6, mask sums 1 2 0 3; rollouts 10 (two samples) and 11 in group 0, 12 in group 1.
    status, found, _ = report(file)
    assert status == 0
    assert found["histograms"] == {
        "total_length": {"edges": [3, 4, 5, 6, 7], "counts": [1, 1, 1, 1]},
        "mask_sum": {"edges": [0, 1, 2, 3, 4], "counts": [1, 1, 1, 1]},
        "fan_out": {"edges": [1, 2, 3], "counts": [2, 1]},
        "group_size": {"edges": [1, 2, 3], "counts": [1, 1]},
    }


def test_a_histogram_has_at_most_forty_bars(report, tmp_path):
    file = write(tmp_path / "a.parquet", samples(*((n, n, 0) for n in range(1, 101))))
    counted = report(file)[1]["histograms"]["mask_sum"]
    assert counted == {"edges": list(range(1, 105, 3)), "counts": [3] * 33 + [1]}


def test_shares_worked_out_by_hand(report, file):
    # Trained tokens: rollout 10 has 4, 11 has 2, 12 none; groups 6 and 0. The longest tenth is rollout 10 (5 of response).
    # sample_mean: 1/3 for each of 10 and 11; the others: by tokens.
    modes = report(file)[1]["weights"]["modes"]
    assert {mode: shares["longest_tenth"] for mode, shares in modes.items()} == pytest.approx(
        {"sample_mean": 1 / 2, "prompt_mean": 2 / 3, "token_mean": 2 / 3, "constant": 2 / 3}
    )
    assert all(shares["largest_group"] == pytest.approx(1) for shares in modes.values())
    # A token of rollout 10 weighs 1/12 and one of 11 1/6, on average 1/9.
    assert modes["sample_mean"]["token"] == pytest.approx(
        {"min": 3 / 4, "p10": 3 / 4, "p50": 3 / 4, "p90": 3 / 2, "max": 3 / 2}
    )
    assert modes["token_mean"]["token"] == pytest.approx(dict.fromkeys(("min", "p10", "p50", "p90", "max"), 1.0))
    # The longest third of the rollouts is rollout 10, two thirds are 10 and 11; 50 % lie halfway between.
    assert [modes["sample_mean"]["curve"][percent] for percent in (0, 50, 100)] == pytest.approx([0, 3 / 4, 1])
    assert [modes["token_mean"]["curve"][percent] for percent in (0, 50, 100)] == pytest.approx([0, 5 / 6, 1])


def test_weights_by_length_worked_out_by_hand(report, file):
    weights = report(file)[1]["weights"]
    assert weights["trained_edges"] == [2, 3, 4, 5]
    assert weights["modes"]["sample_mean"]["by_length"] == [pytest.approx(3 / 2), None, pytest.approx(3 / 4)]


def test_groups_worked_out_by_hand(report, tmp_path):
    file = write(tmp_path / "a.parquet", samples((1, 0, "a"), (3, 1, "b"), (2, 2, "b"), (4, 3, "b")))
    weights = report(file)[1]["weights"]
    first, second = weights["groups"]
    assert first == {
        "group": "b",
        "rollouts": 3,
        "trained_tokens": 9,
        "share": pytest.approx({"sample_mean": 3 / 4, "prompt_mean": 1 / 2, "token_mean": 9 / 10, "constant": 9 / 10}),
    }
    assert second["group"] == "a"
    assert weights["groups_in_tenth"] == 1
    assert weights["modes"]["prompt_mean"]["largest_tenth_of_groups"] == pytest.approx(1 / 2)


def test_shares_are_those_of_the_steps(report, tmp_path):
    """One rollout a step: under token_mean each makes the whole loss of its step, however long it is."""
    file = write(tmp_path / "a.parquet", samples((1, 0, 0), (3, 1, 1)))
    longest = {True: 1 / 2, False: 3 / 4}
    for stepped, share in longest.items():
        flags = ("--global-batch-size", 1) if stepped else ()
        found = report(file, "--micro-batch-size", 1, *flags)[1]
        assert found["weights"]["modes"]["token_mean"]["longest_tenth"] == pytest.approx(share)


def test_the_chosen_mode_weighs_as_its_plan_does(report, tmp_path):
    rng = np.random.default_rng(0)
    file = write(tmp_path / "a.parquet", samples(*((int(n), i, i // 4) for i, n in enumerate(rng.integers(1, 90, 40)))))
    found = report(file, "--max-tokens-per-gpu", 100, "--loss-aggregation", "prompt_mean", "--global-batch-size", 8)[1]
    placed = (
        rollpack.plan(file, max_tokens_per_gpu=100, loss_aggregation="prompt_mean", global_batch_size=8)
        .to_arrow()
        .to_pandas()
    )
    mass = placed.sort_values("row").eval("sample_weight * mask_sum").to_numpy()
    longest = np.argsort(-placed.sort_values("row")["total_length"].to_numpy(), kind="stable")[:4]
    assert found["weights"]["modes"]["prompt_mean"]["longest_tenth"] == pytest.approx(mass[longest].sum() / mass.sum())


@pytest.mark.filterwarnings("ignore:token_mean_legacy")
def test_a_mode_that_depends_on_the_cut_is_shown_as_planned(report, tmp_path):
    # Two micro-batches, of 1 and of 3 trained tokens, each with half of the loss.
    file = write(tmp_path / "a.parquet", samples((1, 0, 0), (3, 1, 0)))
    found = report(file, "--micro-batch-size", 1, "--loss-aggregation", "token_mean_legacy")[1]
    assert found["weights"]["modes"]["token_mean_legacy"]["longest_tenth"] == pytest.approx(1 / 2)


def test_without_groups(report, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"tokens": [1, 2, 3], "loss_mask": [1, 1]}] * 3)
    status, found, page = report(file)
    assert status == 0
    assert found["weights"]["why_not"] == {"prompt_mean": "there is no group column"}
    assert found["weights"]["groups"] is found["histograms"]["group_size"] is None
    text = page.read_text()
    assert "There is no group column" in text
    assert "prompt_mean: not possible here: there is no group column" in text


def test_nothing_trained(report, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"tokens": [1, 2, 3], "loss_mask": [0, 0], "group_index": 0}] * 3)
    status, found, page = report(file)
    assert (status, found["weights"]["modes"]) == (0, {})
    assert set(found["weights"]["why_not"].values()) == {"no token is trained"}
    assert "no token is trained" in page.read_text()


def test_the_divisor_that_stands_in_is_told(report, file):
    assert "L = <span" in report(file)[2].read_text()
    assert "no divisor was given" in report(file)[2].read_text()
    status, found, page = report(file, "--micro-batch-size", 1, "--loss-aggregation", "constant", "--divisor", 7)
    assert (status, found["weights"]["divisor"], found["weights"]["divisor_given"]) == (0, 7.0, True)
    assert "no divisor was given" not in page.read_text()


def test_one_is_no_plural(report, run, tmp_path):
    file = write(tmp_path / "one.parquet", [{"tokens": [1, 2], "loss_mask": [1]}, {"tokens": [1, 2], "loss_mask": [2]}])
    text = re.sub("<[^>]*>", "", report(file)[2].read_text(encoding="utf-8"))
    assert "1 fault, below. Numbers are of\nthe 1 row without one." in text
    file = write(tmp_path / "long.parquet", samples((1, 0, 0), (1, 0, 0), (7, 1, 0)))
    flags = ("--max-tokens-per-gpu", 4, "--oversize", "alone")
    text = re.sub("<[^>]*>", "", report(file, *flags)[2].read_text(encoding="utf-8"))
    assert "1 rollout of several samples. " in text
    assert "3 samples in 1 step." in text
    assert "edged in red: 1 row." in text
    said = run("plan", file, *flags)[1]
    assert said.startswith("Plan(3 samples in 1 step of 2 micro-batches on each of 1 x 1 dp x cp ranks, ")
    assert "1 row over the budget" in said


def test_without_a_budget_there_is_no_schedule(report, file):
    status, found, page = report(file)
    assert (status, found["plan"]) == (0, None)
    assert "pass --max-tokens-per-gpu or --micro-batch-size" in page.read_text()


def test_faults_are_shown_and_counted(report, tmp_path):
    rows = [*ROWS, *[{**ROWS[0], "rollout_id": 90 + i, "loss_mask": [7]} for i in range(30)]]
    file = write(tmp_path / "a.parquet", rows)
    status, found, page = report(file, "--micro-batch-size", 1)
    assert (status, found["num_faults"], found["plan"]) == (1, 30, None)
    assert found["inspection"]["sound_rows"] == sum(found["histograms"]["total_length"]["counts"]) == 4
    assert found["weights"]["modes"]["sample_mean"]["longest_tenth"] == pytest.approx(1 / 2)
    text = page.read_text()
    assert text.count("the value at position 0 is 7") == 22  # twenty, and twice why there is no plan
    assert len(found["inspection"]["faults"]) == 30


def test_nothing_but_faults(report, tmp_path):
    file = write(tmp_path / "a.parquet", [{"token": [1, 2], "loss_mask": [1]}])
    status, found, page = report(file, "--micro-batch-size", 1)
    assert (status, found["weights"]) == (1, None)
    assert "did you mean &#39;token&#39;?" in page.read_text()


@pytest.mark.parametrize(("groups", "sound"), [([1.5] * 4, 4), ([None, 0, 0, 0], 3)])
def test_groups_with_faults(report, tmp_path, groups, sound):
    """A plan that reads no groups can be made; the groups are left out, or those that are sound are shown."""
    rows = [{"tokens": [1, 2], "loss_mask": [1], "group_index": group} for group in groups]
    status, found, page = report(write(tmp_path / "a.parquet", rows), "--micro-batch-size", 1)
    assert (status, found["num_faults"], found["plan"]["num_rows"]) == (1, 1, 4)
    assert found["inspection"]["sound_rows"] == sound
    assert ("There is no group column" in page.read_text()) == (sound == 4)


def test_what_cannot_be_planned_is_told(report, file):
    status, found, page = report(file, "--max-tokens-per-gpu", 4)
    assert (status, found["plan"]) == (1, None)
    assert "row 1" in found["no_plan"]
    assert "No schedule" in page.read_text()


def test_text(run, file, tmp_path):
    page = tmp_path / "report.html"
    status, out, err = run("report", file, "--micro-batch-size", 2, "-o", page)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "Inspection(4 sound rows, 3 rollouts, 2 groups, 0 faults)",
        repr(rollpack.plan(file, micro_batch_size=2)),
        f"{page}: {page.stat().st_size / 1024:.1f} KiB",
    ]


def test_equal_reports_are_equal_bytes(report, file):
    first = report(file, "--micro-batch-size", 2)[2].read_bytes()
    assert report(file, "--micro-batch-size", 2)[2].read_bytes() == first


def test_written_whole_or_not_at_all(run, file, tmp_path, monkeypatch):
    page = tmp_path / "report.html"
    page.write_text("before")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert run("report", file, "-o", page)[0] == 2
    monkeypatch.undo()
    assert page.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "rollouts.parquet"]


def test_the_page_does_not_take_the_place_of_the_rollouts(fails, file):
    assert fails("report", file, "-o", file) == f"{file} is one of the files to read; name another to write"


def test_a_missing_extra_is_one_line(fails, file, tmp_path, monkeypatch):
    monkeypatch.setattr("rollpack.cli.report.find_spec", lambda name: None if name == "jinja2" else find_spec(name))
    message = fails("report", file, "-o", tmp_path / "report.html")
    assert message == "rollpack report needs jinja2; install it with: pip install 'rollpack[report]'"


def test_many_micro_batches_are_joined(report, tmp_path):
    file = write(tmp_path / "a.parquet", samples(*((1 + i % 7, i, i // 8) for i in range(4000))))
    _, found, page = report(file, "--micro-batch-size", 1, "--dp-size", 2)
    assert found["plan"]["steps"][0]["num_micro_batches"] == 2000
    assert page.stat().st_size < 1_000_000
    blocks = [title for title in Page(page.read_text()).titles if title.startswith("dp rank")]
    assert len(blocks) == 2 * 667  # three micro-batches a block
    assert blocks[0].startswith("dp rank 0, micro-batch 0 to 2: ")
    assert sum(int(re.search(r": ([\d,]+) tokens", block)[1].replace(",", "")) for block in blocks) == sum(
        2 + i % 7 for i in range(4000)
    )


def test_many_ranks_are_left_out(report, tmp_path):
    file = write(tmp_path / "a.parquet", samples(*((1, i, 0) for i in range(200))))
    page = report(file, "--micro-batch-size", 1, "--dp-size", 200)[2]
    assert "The first 128 of" in page.read_text()


def shown_value(text):
    """A number as a person reads it, and how far off its last digit may be."""
    digits = text.removesuffix(" x").removesuffix("%").replace(",", "")
    scale = 100 if text.endswith("%") else 1
    decimals = len(digits.partition(".")[2])
    return float(digits) / scale, 0.51 * 10**-decimals / scale


NASTY = "<script>alert('x')</script>&\"" + "y" * 300


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(report, tmp_path, home, width):
    """No script runs, nothing is asked of the network, nothing sticks out, and all numbers are those of --json."""
    rng = np.random.default_rng(1)
    rows = samples(*((int(n), i // 2, f"{NASTY}{i // 8}") for i, n in enumerate(rng.integers(1, 90, 64))))
    folder = tmp_path / ("<b>" + "z" * 100)
    folder.mkdir()
    file = write(folder / "a&b.parquet", [*rows, {**rows[0], "loss_mask": [5]}][: 64 + (width == 390)])
    flags = ("--max-tokens-per-gpu", 100, "--dp-size", 2, "--loss-aggregation", "prompt_mean")
    status, found, page = report(file, *flags)
    assert status == (1 if width == 390 else 0)

    seen, console = opened(page, home)
    assert console == []
    assert "script" not in seen.elements
    for attributes in (a for elements in seen.elements.values() for a in elements):
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), attributes
    assert len(seen.numbers) > 80
    for path, value, text in seen.numbers:
        assert json.loads(value) == look_up(found, path), path
        if json.loads(value) is None:
            assert text == "–"
        elif text.endswith(" x") or path == "weights.divisor":  # three or more digits that count
            assert shown_value(text)[0] == pytest.approx(json.loads(value), rel=5e-3), path
        else:
            number, error = shown_value(text)
            assert number == pytest.approx(json.loads(value), abs=error), path
    plots = {a["data-plot"] for a in seen.elements["figure"]}
    assert plots == {"total_length", "mask_sum", "group_size", "fan_out", "weights-tokens", "weights-rollouts",
                     "weights-groups"} | ({"schedule"} if status == 0 else set())  # fmt: skip

    # A window is not as narrow as a phone, but a frame can be.
    frame = tmp_path / "frame.html"
    measure = "onload = () => { document.body.dataset.width = f.contentDocument.documentElement.scrollWidth }"
    inside = html.escape(page.read_text())
    style = f"border: 0; width: {width}px; height: 900px"
    frame.write_text(
        f'<!DOCTYPE html><body><iframe id=f style="{style}" srcdoc="{inside}"></iframe><script>{measure}</script>'
    )
    (body,) = opened(frame, home)[0].elements["body"]
    assert width - 20 < int(body["data-width"]) <= width  # a scroll bar takes some of it


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on PATH")
def test_the_browser_tells_of_what_is_refused_and_fails(tmp_path, home):
    """What the test above goes by."""
    page = tmp_path / "a.html"
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; script-src 'unsafe-inline'\">"
    page.write_text(f"<!DOCTYPE html>{policy}<img src='http://127.0.0.1:9/x.png'><script>nothing.there</script>")
    console = " ".join(opened(page, home)[1])
    assert "nothing is not defined" in console
    assert "Content Security Policy" in console


@pytest.mark.skipif(not DATA.exists(), reason="the shared data is not here")
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("tau_bench_airline", ["--max-tokens-per-gpu", "16384", "--dp-size", "4"]),
        ("reflexion_fanout", ["--max-tokens-per-gpu", "4096", "--prompts-per-step", "200", "--remainder", "drop"]),
        ("humaneval_k100", ["--micro-batch-size", "1", "--dp-size", "8", "--loss-aggregation", "prompt_mean"]),
    ],
)
def test_shared_data(report, name, flags):
    file = DATA / f"{name}.parquet"
    status, found, page = report(file, *flags)
    assert status == 0
    assert page.stat().st_size < 1_000_000
    table = pa.parquet.read_table(file, columns=["tokens", "loss_mask"])
    lengths = np.diff(table["tokens"].combine_chunks().offsets.to_numpy())
    for histogram, values in (("total_length", lengths), ("mask_sum", [sum(m) for m in table["loss_mask"].to_pylist()])):
        counted = found["histograms"][histogram]
        assert counted["counts"] == np.histogram(values, counted["edges"])[0].tolist()
    for shares in found["weights"]["modes"].values():
        assert shares["curve"][-1] == pytest.approx(1)
