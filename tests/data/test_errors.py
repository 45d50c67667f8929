"""What errors are, and that importing rollpack takes nothing along."""

import copy
import pickle
import subprocess
import sys

import pyarrow as pa
import pytest

import rollpack


def raised(call):
    with pytest.raises(rollpack.RollpackError) as caught:
        call()
    return caught.value


ERRORS = {
    "schema": lambda: rollpack.summarize(pa.table({"token": [[1, 2]]})),
    "data": lambda: rollpack.summarize(pa.table({"tokens": [[1, 2], [1, 2]], "response_length": [1, 9]})),
    "data without a place": lambda: rollpack.summarize([]),
    "plan": lambda: rollpack.plan(pa.table({"tokens": [[1, 2]], "response_length": [1]})),
    "plan by Rust": lambda: rollpack.plan(pa.table({"tokens": [[1, 2]], "response_length": [1]}), max_tokens_per_gpu=1),
}
PLACES = {
    "schema": (rollpack.SchemaError, "tokens", None),
    "data": (rollpack.DataError, "response_length", 1),
    "data without a place": (rollpack.DataError, None, None),
    "plan": (rollpack.PlanError, None, None),
    "plan by Rust": (rollpack.PlanError, None, None),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_value_errors_that_survive_pickling_and_copying(name):
    error = raised(ERRORS[name])
    kind, column, row = PLACES[name]
    assert type(error) is kind
    assert isinstance(error, rollpack.RollpackError)
    assert isinstance(error, ValueError)
    copies = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for other in (error, copy.copy(error), copy.deepcopy(error), *copies):
        assert type(other) is kind
        assert str(other) == str(error)
        assert getattr(other, "column", None) == column
        assert getattr(other, "row", None) == row
        assert "\n" not in str(other)


def test_an_error_is_one_readable_line_and_has_no_chain_of_causes():
    error = raised(ERRORS["data"])
    assert str(error) == "column 'response_length', row 1: 9 is larger than the sequence, which has 2 tokens"
    assert error.__cause__ is None


def test_importing_rollpack_imports_neither_torch_nor_what_needs_it():
    script = "import sys, rollpack; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = set(run.stdout.split())
    assert "rollpack._core" in modules
    optional = ("torch", "polars", "duckdb", "datasets", "rollpack.torch", "rollpack.testing")
    optional += ("ray", "pandas", "matplotlib", "jinja2", "tqdm", "logging")
    optional += ("rollpack.integrations", "rollpack.examples", "rollpack.cli")
    assert not [name for name in modules for taken in optional if name == taken or name.startswith(taken + ".")]


def test_a_debug_build_says_so_when_it_is_imported():
    script = """
import importlib, warnings
warnings.simplefilter("ignore")  # this build may be one
import rollpack
for rollpack._core.DEBUG in (True, False):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.reload(rollpack)
    print(*(f"{warning.category.__name__}: {warning.message}" for warning in caught))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    said, nothing = run.stdout.splitlines()
    assert said.startswith("RuntimeWarning: this is a debug build of rollpack")
    assert "maturin develop --release" in said
    assert nothing == ""


def test_the_main_road_needs_no_torch(tmp_path):
    """Summarize, plan and pack where torch cannot be imported at all."""
    script = """
import sys
sys.modules["torch"] = None
import pyarrow as pa, rollpack
table = pa.table({"tokens": [[1, 2, 3]], "response_length": [2]})
(micro_batch,) = rollpack.pack(table, rollpack.plan(table, micro_batch_size=1))
print(*micro_batch.labels)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "3", "-100"]


def test_what_rollpack_names_is_there():
    for name in rollpack.__all__:
        assert getattr(rollpack, name) is not None
    assert rollpack.__version__ == "0.1.0"
