from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as papq
import pytest

from .conftest import ROWS, write

DATA = Path(__file__).parents[3] / "shared" / "data"
FILES = sorted(DATA.glob("*.parquet"))


def spread(*values):
    names = ("min", "p10", "p25", "p50", "p75", "p90", "p99", "max", "mean")
    return dict(zip(names, values, strict=True))


def test_values_worked_out_by_hand(run, rollouts):
    status, out, err = run("inspect", rollouts, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "files": [{"path": str(rollouts), "rows": 4}],
        "rows": 4,
        "sound_rows": 4,
        "rollouts": 3,
        "groups": 2,
        "tokens": 18,
        "response_tokens": 10,
        "trained_tokens": 6,
        "trained_of_response": 0.6,
        "trained_of_all": pytest.approx(1 / 3),
        "total_length": spread(3, 3, 3, 4, 5, 6, 6, 6, 4.5),
        "response_length": spread(1, 1, 1, 2, 3, 4, 4, 4, 2.5),
        "trained_length": spread(0, 0, 0, 1, 2, 3, 3, 3, 1.5),
        "group_size": spread(1, 1, 1, 1, 2, 2, 2, 2, 1.5),
        "groups_of_one": 1,
        "fan_out": spread(1, 1, 1, 1, 2, 2, 2, 2, pytest.approx(4 / 3)),
        "fanned_out": 1,
        "fanned_out_share": pytest.approx(1 / 3),
        "untrained_samples": 1,
        "untrained_rollouts": 1,
        "untrained_groups": 1,
        "rollout_key": ["rollout_id"],
        "ids_unique_within_prompt_only": False,
        "faults": [],
    }


def test_text(run, rollouts):
    status, out, _ = run("inspect", rollouts)
    assert status == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines == [
        str(rollouts),
        "rows 4",
        "rollouts 3 by rollout_id",
        "groups 2",
        "tokens 18",
        "response 10",
        "trained 6",
        "mask density 60.0% of response, 33.3% of all",
        "fan-out 1 rollout of several samples (33.3%)",
        "groups of one 1",
        "nothing trained in 1 sample, 1 rollout, 1 group",
        "",
        "min p10 p25 p50 p75 p90 p99 max mean",
        "total length 3 3 3 4 5 6 6 6 4.5",
        "response length 1 1 1 2 3 4 4 4 2.5",
        "trained tokens 0 0 0 1 2 3 3 3 1.5",
        "samples a rollout 1 1 1 1 2 2 2 2 1.3",
        "rollouts a group 1 1 1 1 2 2 2 2 1.5",
        "",
        "no faults",
    ]


def test_a_key_of_one_column_goes_by_its_name(run, rollouts):
    status, out, _ = run("inspect", rollouts, "--rollout-key", "group_index", "--json")
    found = json.loads(out)
    assert (status, found["rollouts"], found["rollout_key"]) == (0, 2, ["group_index"])


def test_without_ids_each_row_is_a_rollout(run, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"tokens": [1, 2], "loss_mask": [1]}, {"tokens": [3, 4], "loss_mask": [0]}])
    status, out, _ = run("inspect", file, "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["rollouts"], found["groups"], found["group_size"], found["rollout_key"]) == (2, None, None, [])
    assert "2, each row of its own" in run("inspect", file)[1]


def test_groups_and_no_rollout_ids(run, tmp_path):
    rows = [{"tokens": [1, 2], "loss_mask": [1], "group_index": group} for group in "aab"]
    found = json.loads(run("inspect", write(tmp_path / "a.jsonl", rows), "--json")[1])
    assert (found["rollouts"], found["groups"], found["groups_of_one"]) == (3, 2, 1)


def test_every_fault_with_its_row_in_every_file(run, tmp_path):
    bad = [
        ROWS[0],
        {**ROWS[1], "loss_mask": [1, 2, 1]},
        {**ROWS[2], "tokens": [], "rollout_id": None},
        {**ROWS[3], "loss_mask": [1]},
    ]
    first = write(tmp_path / "a.parquet", ROWS)
    second = write(tmp_path / "b.jsonl", bad)
    third = write(tmp_path / "c.arrow", [{**ROWS[0], "response_length": -1}])
    status, out, err = run("inspect", first, second, third, "--json")
    found = json.loads(out)
    assert (status, err) == (1, "")
    assert (found["rows"], found["sound_rows"]) == (9, 5)
    assert [file["rows"] for file in found["files"]] == [4, 4, 1]
    places = [(f["column"], f["row"], Path(f["file"]).name, f["file_row"]) for f in found["faults"]]
    assert places == [
        ("loss_mask", 5, "b.jsonl", 1),
        ("rollout_id", 6, "b.jsonl", 2),
        ("tokens", 6, "b.jsonl", 2),
        ("response_length", 6, "b.jsonl", 2),
        ("loss_mask", 7, "b.jsonl", 3),
        ("response_length", 8, "c.arrow", 0),
    ]
    status, out, _ = run("inspect", first, second, third)
    assert status == 1
    assert "6 faults" in out
    assert f"column 'loss_mask', row 5, row 1 of {second}: the value at position 1 is 2" in out
    assert f"column 'response_length', row 8, row 0 of {third}: -1 is negative" in out


def test_faults_of_a_kind_are_counted_and_a_rare_one_is_not_lost(run, tmp_path):
    rows = [{"tokens": [1, 2], "loss_mask": [7]} for _ in range(1000)] + [{"tokens": [], "loss_mask": []}]
    file = write(tmp_path / "a.parquet", rows)
    status, out, _ = run("inspect", file)
    assert status == 1
    assert "1,001 faults" in out
    assert out.count("a mask holds only 0 and 1") == 20
    assert "... and 980 more of this kind (--json has all)" in out
    assert "column 'tokens', row 1000: the sequence is empty; drop the row" in out
    assert len(json.loads(run("inspect", file, "--json")[1])["faults"]) == 1001


def samples(ids):
    return [{"tokens": [1, 2], "loss_mask": [1], "rollout_id": r, "group_index": g} for g, r in ids]


def test_ids_unique_only_within_their_prompt(run, tmp_path):
    file = write(tmp_path / "a.parquet", samples([(g, r) for g in range(50) for r in range(4)]))
    status, out, _ = run("inspect", file, "--json")
    found = json.loads(out)
    assert status == 1
    assert found["ids_unique_within_prompt_only"] is True
    assert found["rollout_key"] == ["group_index", "rollout_id"]
    assert (found["rollouts"], found["groups"], found["sound_rows"]) == (200, 50, 200)
    (fault,) = found["faults"]
    assert (fault["kind"], fault["column"], fault["row"]) == ("ids", "rollout_id", None)
    assert "4 of 4 rollout ids lie in several groups, such as rollout_id 0 in 50 of them" in fault["message"]
    assert "Pass --rollout-key group_index,rollout_id, as was done" in fault["message"]
    status, out, _ = run("inspect", file, "--rollout-key", "group_index,rollout_id")
    assert status == 0
    assert "200 by group_index, rollout_id" in out


def test_few_ids_in_two_groups_are_mistakes_one_by_one(run, tmp_path):
    ids = [(g, 4 * g + r) for g in range(5) for r in range(4)]
    ids[7] = (1, 0)
    ids[19] = (4, 1)
    status, out, _ = run("inspect", write(tmp_path / "a.parquet", samples(ids)), "--json")
    found = json.loads(out)
    assert status == 1
    assert found["ids_unique_within_prompt_only"] is False
    assert [(f["kind"], f["column"], f["row"]) for f in found["faults"]] == [
        ("data", "group_index", 7),
        ("data", "group_index", 19),
    ]
    assert (found["sound_rows"], found["rollouts"]) == (18, 18)


def test_string_ids_and_other_names(run, tmp_path):
    rows = [{"input_ids": [1, 2], "mask": [1], "uid": r, "prompt": g} for g, r in [("a", "x"), ("a", "y"), ("b", "z")]]
    columns = "tokens=input_ids,loss_mask=mask,rollout_id=uid,group_index=prompt"
    found = json.loads(run("inspect", write(tmp_path / "a.jsonl", rows), "--columns", columns, "--json")[1])
    assert (found["rollouts"], found["groups"], found["faults"]) == (3, 2, [])


def test_a_column_left_out(run, file):
    found = json.loads(run("inspect", file, "--columns", "loss_mask=", "--json")[1])
    assert found["trained_tokens"] == 10


def test_a_column_that_cannot_be_read_ends_the_reading(run, tmp_path):
    text = write(tmp_path / "text.parquet", [{"tokens": "a b", "loss_mask": [1]}])
    status, out, _ = run("inspect", text)
    assert (status, out.splitlines()[0]) == (1, f"{text}: no row can be read")
    assert "column 'tokens': has type" in out


def test_missing_columns_are_faults_with_their_file(run, tmp_path, file):
    other = write(tmp_path / "other.parquet", [{"token": [1, 2], "loss_mask": [1]}])
    status, out, _ = run("inspect", file, other, "--json")
    found = json.loads(out)
    assert status == 1
    assert found["rows"] is None
    told = [(f["kind"], f["column"], f["file"]) for f in found["faults"]]
    assert ("schema", "tokens", str(other)) in told
    assert ("schema", "group_index", str(other)) in told
    assert not [f for f in found["faults"] if f["file"] == str(file)]
    assert any("did you mean 'token'?" in f["message"] for f in found["faults"])


def test_a_mistyped_column_does_not_hide_the_rest(run, tmp_path):
    rows = [{"tokens": [1, 2], "loss_mask": [3], "rollout_id": 0.5}, {"tokens": [], "loss_mask": [], "rollout_id": 1.5}]
    faults = json.loads(run("inspect", write(tmp_path / "a.parquet", rows), "--json")[1])["faults"]
    assert [(f["column"], f["row"]) for f in faults] == [("rollout_id", None), ("loss_mask", 0), ("tokens", 1)]


def test_all_rows_faulty(run, tmp_path):
    file = write(tmp_path / "a.parquet", [{"tokens": [1, 2], "loss_mask": [9], "rollout_id": 1, "group_index": 1}])
    status, out, _ = run("inspect", file)
    assert status == 1
    assert "1 row, and none without a fault" in out
    found = json.loads(run("inspect", file, "--json")[1])
    assert (found["rows"], found["sound_rows"], found["total_length"], found["trained_of_all"]) == (1, 0, None, None)


def test_group_column_of_nulls(run, tmp_path):
    file = write(tmp_path / "a.jsonl", [{**ROWS[0], "group_index": None}, {**ROWS[1], "group_index": None}])
    status, out, _ = run("inspect", file, "--json")
    assert status == 1
    assert {f["column"] for f in json.loads(out)["faults"]} == {"group_index"}


def test_a_glob_that_the_shell_did_not_expand(run, tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.parquet", ROWS)
    found = json.loads(run("inspect", tmp_path / "*.parquet", "--json")[1])
    assert [Path(file["path"]).name for file in found["files"]] == ["a.parquet", "b.parquet"]
    assert found["rows"] == 8


def test_nothing_to_read(fails, tmp_path):
    empty = tmp_path / "empty.parquet"
    papq.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), empty)
    assert fails("inspect", empty).startswith(f"{empty}: the data has no rows")
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n\n")
    assert "the data has no rows" in fails("inspect", blank)
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text("")
    assert fails("inspect", nothing) == f"{nothing}: the file is empty"


def test_unreadable_files(fails, tmp_path, file):
    assert fails("inspect", tmp_path / "no.parquet") == f"no file is called {tmp_path / 'no.parquet'}"
    assert fails("inspect", tmp_path / "*.no") == f"no file matches {tmp_path / '*.no'}"
    (tmp_path / "nothing").mkdir()
    assert "is a directory without files of rollouts" in fails("inspect", tmp_path / "nothing")
    text = tmp_path / "text.txt"
    text.write_text("hello")
    assert fails("inspect", text) == f"{text}: this is no Parquet, Arrow IPC or JSON-lines file"
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(file.read_bytes()[:-20])
    assert fails("inspect", file, cut).startswith(f"{cut}: cannot be read as Parquet")


def test_a_file_that_is_damaged_inside(fails, tmp_path, file):
    rows = [{"tokens": list(range(k % 97, k % 97 + 50)), "loss_mask": [1] * (k % 30)} for k in range(2000)]
    damaged = write(tmp_path / "damaged.parquet", rows)
    content = bytearray(damaged.read_bytes())
    column = papq.ParquetFile(damaged).metadata.row_group(0).column(0)
    start = column.data_page_offset + 60
    content[start : start + 400] = bytes(byte ^ 0xFF for byte in content[start : start + 400])
    damaged.write_bytes(content)
    assert fails("inspect", damaged).startswith(f"{damaged}: cannot be read as Parquet: ")
    assert fails("plan", damaged, "--micro-batch-size", 1).startswith(f"{damaged}: cannot be read as Parquet: ")


def test_json_lines_that_are_not(fails, tmp_path):
    file = tmp_path / "a.jsonl"
    line = '{"tokens": [1, 2], "loss_mask": [1]}\n'
    file.write_text(line * 60_000 + '{"tokens": [1, 2, "loss_mask": [1]}\n')
    assert fails("inspect", file) == f"{file}, line 60001: is no JSON: Expecting ',' delimiter at character 30"


def test_json_lines_with_masks_that_are_all_empty(run, tmp_path):
    file = write(tmp_path / "a.jsonl", [{"tokens": [1, 2], "loss_mask": []}, {"tokens": [1], "loss_mask": []}])
    status, out, _ = run("inspect", file, "--json")
    found = json.loads(out)
    assert (status, found["tokens"], found["trained_tokens"], found["untrained_samples"]) == (0, 3, 0, 2)
    assert found["trained_of_response"] is None


def test_json_lines_longer_than_a_block(run, tmp_path):
    rows = [{"tokens": [123_456] * 300_000, "loss_mask": [1], "rollout_id": k} for k in range(2)]
    found = json.loads(run("inspect", write(tmp_path / "a.jsonl", rows), "--json")[1])
    assert (found["tokens"], found["rollouts"]) == (600_000, 2)


@pytest.mark.skipif(not FILES, reason="the shared data is not here")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shared_data(run, path):
    status, out, _ = run("inspect", path, "--json")
    found = json.loads(out)
    table = papq.read_table(path)
    assert status == 0
    assert found["rows"] == table.num_rows
    assert found["groups"] == len(table["group_index"].unique())
    assert found["rollouts"] == len(table["rollout_id"].unique())
    assert found["trained_tokens"] == sum(sum(mask) for mask in table["loss_mask"].to_pylist())
    assert found["tokens"] == sum(len(tokens) for tokens in table["tokens"])


def test_tokens_that_cannot_be_packed_are_faults(run, tmp_path):
    rows = [{"tokens": [1, 2**32, 2], "loss_mask": [0, 1]}, {"tokens": [1, -1, -2], "loss_mask": [0, 1]}]
    status, out, _ = run("inspect", write(tmp_path / "a.parquet", rows), "--json")
    faults = [(f["column"], f["row"], f["message"]) for f in json.loads(out)["faults"]]
    assert status == 1
    assert [fault[:2] for fault in faults] == [("tokens", 0), ("tokens", 1)]
    assert "the value at position 1 is 4294967296, and tokens have to fit an int32" in faults[0][2]
    assert "the value at position 2 is -2, and a trained token has to be from 0" in faults[1][2]


def test_a_file_that_is_named_twice_is_told(fails, file, tmp_path):
    assert fails("inspect", file, tmp_path / "*") == f"{file} is named twice, and its rows would count twice"
