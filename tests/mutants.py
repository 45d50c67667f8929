"""Mutation testing of the Python side: `python -m tests.mutants weights.py torch/reducer.py`, or all files without names.

A mutant is a file of `rollpack` with one place changed: a comparison, an operator, a constant, a condition turned round, a
statement, an argument or a call left out, a `return` of None. Left as they are: docstrings, annotations, decorators, the
text of errors and warnings, `strict=` of `zip`, and on which device a tensor is (tests/device runs where there are several).

Which tests run a line is traced once, so a mutant is held only against those, the shortest first, until one fails, and then
against those that start other processes, in which nothing is traced. What runs at import is held against all. Each is tried
in a fork of a process that has imported torch already, over a copy of the package: that takes a few seconds.

Prints every mutant that lives, then the counts. What they showed is in python/docs/mutants.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
#: The files that are mutated, and the tests that cover each.
TESTS = {
    "_arguments.py": "data/test_arguments.py data/test_weights.py data/test_plan.py loss/test_backends.py",
    "weights.py": "data/test_weights.py data/test_arguments.py loss/test_legacy.py",
    "names.py": "data/test_names.py data/test_plan.py loss/test_metrics.py",
    "cost.py": "data/test_plan.py data/test_simulation.py data/test_arguments.py",
    "arrivals.py": "loss/test_online.py loss/test_metrics.py",
    "_sources/request.py": "data/test_summarize.py data/test_sources.py data/test_pack.py",
    "torch/backends.py": "loss/test_backends.py loss/test_online.py",
    "torch/weights.py": "loss/test_reducer.py loss/test_legacy.py",
    "torch/reducer.py": "loss/test_reducer.py loss/test_steps.py loss/test_masks.py loss/test_backends.py "
    "loss/test_online.py test_reprs.py",
    "torch/mesh.py": "loss/test_mesh.py loss/test_masks.py loss/test_reducer.py loss/test_stream.py loss/test_metrics.py "
    "loss/test_rank_shards.py",
    "torch/masks.py": "loss/test_masks.py loss/test_reducer.py loss/test_legacy.py",
    "torch/metrics.py": "loss/test_metrics.py loss/test_legacy.py test_reprs.py",
    "summary.py": "data/test_summarize.py data/test_shards.py data/test_plan.py test_reprs.py",
    "torch/stream.py": "loss/test_stream.py test_reprs.py",
    "planning.py": "data/test_plan.py data/test_shards.py data/test_pack.py data/test_names.py loss/test_legacy.py",
    "plans.py": "data/test_plan.py data/test_shards.py data/test_pack.py data/test_show.py test_reprs.py "
    "data/test_arguments.py",
}
#: Time of one mutant, in seconds, of the processor and in all: at least, and of what its tests take unchanged.
LEAST, FACTOR = 20, 4
#: After so many seconds in which it takes none it hangs: a thread waits for what never comes.
IDLE = 20
_QUIET = "ignore::pytest.PytestAssertRewriteWarning"  # hypothesis was imported before pytest began

SWAPS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Add,), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,), ast.Or: (ast.And,),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "zeros": "ones", "ones": "zeros"}


def changed(node: ast.AST, in_message: bool) -> Iterator[tuple[str, Any]]:
    """What a node may become; None is: left out."""
    match node:
        case ast.Compare(ops=[op, *rest]):
            for new in SWAPS[type(op)]:
                yield new.__name__, ast.Compare(node.left, [new(), *rest], node.comparators)
            if rest:
                yield (
                    "last " + SWAPS[type(rest[-1])][0].__name__,
                    ast.Compare(node.left, [op, *rest[:-1], SWAPS[type(rest[-1])][0]()], node.comparators),
                )
        case ast.BinOp(op=op) if type(op) in SWAPS:
            yield SWAPS[type(op)][0].__name__, ast.BinOp(node.left, SWAPS[type(op)][0](), node.right)
        case ast.BoolOp(op=op):
            yield SWAPS[type(op)][0].__name__, ast.BoolOp(SWAPS[type(op)][0](), node.values)
        case ast.AugAssign(op=op) if type(op) in SWAPS:
            yield SWAPS[type(op)][0].__name__, ast.AugAssign(node.target, SWAPS[type(op)][0](), node.value)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield "sign left out", node.operand
        case ast.Constant(value=bool(value)):
            yield str(not value), ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield f"{value + 1}", ast.Constant(value + 1)
        case ast.Constant(value=str(value)) if not in_message:
            yield "another text", ast.Constant("XX" + value)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None", ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Expr(value=ast.Call()) | ast.Break():
            yield "left out", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() | ast.Tuple()]):
            yield "left out", ast.Pass()
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            if name in NAMES:
                func = (
                    ast.Name(NAMES[name]) if isinstance(node.func, ast.Name) else ast.Attribute(node.func.value, NAMES[name])
                )
                yield NAMES[name], ast.Call(func, node.args, node.keywords)
            if isinstance(node.func, ast.Attribute) and not node.args and not node.keywords and name != "cpu":
                yield f"no .{name}()", node.func.value
            for i, keyword in enumerate(node.keywords):
                if keyword.arg not in {None, "device", "strict", "stacklevel"}:
                    yield f"no {keyword.arg}=", ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1 :])
        case ast.Slice():
            for end in ("lower", "upper"):
                if getattr(node, end):
                    yield (
                        f"no {end} end",
                        ast.Slice(**{"lower": node.lower, "upper": node.upper, "step": node.step} | {end: None}),
                    )


def mutants(source: str) -> Iterator[tuple[range, bool, str, str]]:
    """The lines of the statement, whether it runs at import, what was changed, and the whole source with the change."""
    tree = ast.parse(source)

    def visit(node: ast.AST, lines: range, in_function: bool, in_message: bool) -> Iterator[tuple[range, bool, str, str]]:
        for field, value in ast.iter_fields(node):
            if field in {"annotation", "returns", "decorator_list", "type_params"} or isinstance(
                node, ast.ImportFrom | ast.Import
            ):
                continue
            inside = in_function or (isinstance(node, ast.FunctionDef | ast.Lambda) and field == "body")
            children = value if isinstance(value, list) else [value]
            for i, child in enumerate(children):
                docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                if not isinstance(child, ast.AST) or docstring:
                    continue
                if isinstance(child, ast.keyword) and child.arg == "strict":
                    continue
                here = _lines(child, lines)
                message = in_message or isinstance(child, ast.Raise | ast.JoinedStr) or "warn" in ast.unparse(child)[:14]
                options = list(changed(child, message))
                if field == "test" and not isinstance(child, ast.Compare | ast.UnaryOp):
                    options.append(("turned round", ast.UnaryOp(ast.Not(), child)))
                for what, new in options:
                    if isinstance(value, list):
                        value[i] = new
                    else:
                        setattr(node, field, new)
                    ast.fix_missing_locations(tree)
                    yield here, not inside, f"{ast.unparse(child).splitlines()[0]}: {what}", ast.unparse(tree)
                    if isinstance(value, list):
                        value[i] = child
                    else:
                        setattr(node, field, child)
                yield from visit(child, here, inside, message)

    yield from visit(tree, range(0), False, False)


def _lines(node: ast.AST, of_parent: range) -> range:
    """The lines of the statement that a node is in, without the statements in it."""
    if isinstance(node, ast.stmt | ast.match_case):
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
        inner = body[0].pattern if body and isinstance(body[0], ast.match_case) else body and body[0]
        return range(first, max(inner.lineno, first + 1) if inner else node.end_lineno + 1)
    return of_parent


class Trace:
    """Which test runs which lines of a file, for how long, and whether it starts processes."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.starts, self.found = str(path), set[int](), False, dict[str, Any]()
        self.starting = set[str]()

    def pytest_sessionstart(self) -> None:
        sys.addaudithook(self.audit)

    def audit(self, event: str, _arguments: Any) -> None:
        self.starts |= event in {"subprocess.Popen", "os.fork", "os.posix_spawn"}

    def enter(self, frame: Any, _event: str, _arg: Any) -> Any:
        return self.line if frame.f_code.co_filename == self.path else None

    def line(self, frame: Any, _event: str, _arg: Any) -> Any:
        self.lines.add(frame.f_lineno)
        return self.line

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        """A fixture that starts processes serves several tests, and is set up for the first of them only."""
        before, self.starts = self.starts, False
        try:
            return (yield)
        finally:
            self.starting |= {fixturedef.argname} if self.starts else set()
            self.starts |= before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.lines, self.starts, start, begun = set(), False, time.process_time(), time.monotonic()
        sys.settrace(self.enter)
        threading.settrace(self.enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            took = time.process_time() - start, time.monotonic() - begun
            starts = self.starts or not self.starting.isdisjoint(item.fixturenames)
            self.found[item.nodeid] = (*took, sorted(self.lines), starts)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            raise SystemExit(f"{report.nodeid} fails without any mutant:\n{report.longreprtext}")


def forked(cpu: float, wall: float, tests: list[str], plugin: Any = None, answer: Path | None = None) -> str:
    """How pytest ended in a fork: "lived", "killed" or "timed out"."""
    child = os.fork()
    if not child:
        os.setsid()
        sys.dont_write_bytecode = not answer  # once without any mutant: tests are not compiled again for each
        resource.setrlimit(
            resource.RLIMIT_CPU, (int(cpu), int(cpu))
        )  # processor time: a machine that is busy slows nothing down
        code: int = 9
        with contextlib.suppress(BaseException), open(os.devnull, "w") as null:
            if not answer:
                os.dup2(null.fileno(), 1)
                os.dup2(null.fileno(), 2)
            code = int(
                pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", _QUIET, *tests], plugins=[plugin] if plugin else [])
            )
            if answer:
                answer.write_text(json.dumps(plugin.found))
        os._exit(code)
    taken, idle = -1, 0
    for poll in range(int(wall * 20)):
        done, status = os.waitpid(child, os.WNOHANG)
        if done or idle > IDLE:
            break
        time.sleep(0.05)
        if poll % 20 == 0:
            before, taken = taken, _taken(child)
            idle = idle + 1 if taken == before else 0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    if not done or os.WIFSIGNALED(status):
        return "timed out"
    return "killed" if os.WEXITSTATUS(status) else "lived"


def _taken(session: int) -> int:
    """The processor time of all processes of a session, in the kernel's ticks."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            ticks += (int(fields[11]) + int(fields[12])) * (int(fields[3]) == session)
    return ticks


def try_file(name: str, copy: Path, only: set[int]) -> dict[str, int]:
    """Try the mutants of one file."""
    path, source = copy / "rollpack" / name, (ROOT / "python/rollpack" / name).read_text()
    tests = [f"tests/{test}" for test in TESTS[name].split()]
    answer = copy / "trace.json"
    trace = Trace(path)
    if forked(600, 600, tests, trace, answer) != "lived":
        raise SystemExit("the tests fail without any mutant")
    found = sorted(((*of, test) for test, of in json.loads(answer.read_text()).items()), key=lambda of: of[1])
    counts = dict.fromkeys(("found", "killed", "timed out", "lived"), 0)
    for place, at_import, what, mutant in mutants(source):
        if only and not only & {*place}:
            continue
        path.write_text(mutant)
        run = [of for of in found if at_import or not {*place}.isdisjoint(of[2])]
        # What no test runs may run at import.
        chosen = run + [of for of in found if of[3] and of not in run] if run else found
        cpu, wall = (LEAST + FACTOR * sum(of[i] for of in chosen) for i in (0, 1))
        end = forked(cpu, wall, [of[-1] for of in chosen])
        counts["found"] += 1
        counts[end] += 1
        if end != "killed":
            print(f"{name}:{place[0]}: {what} ({end}{'' if run else ', no test runs it here'})", flush=True)
    path.write_text(source)
    print(name, counts, flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*", default=list(TESTS))
    parser.add_argument("--lines", help="only these lines, as 12,15", default="")
    arguments = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary).resolve()
        shutil.copytree(ROOT / "python/rollpack", copy / "rollpack", ignore=shutil.ignore_patterns("__pycache__"))
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"] = str(copy)
        for module in ("torch", "pyarrow.parquet", "pyarrow.dataset", "hypothesis", "pandas", "polars"):
            __import__(module)
        for name in arguments.files:
            try_file(name, copy, {int(line) for line in arguments.lines.split(",") if line})


if __name__ == "__main__":
    main()
