"""Runs all cases that were asked for at once, and prints the table of what they came to."""

import os

import pytest
import ranks
import report
import torch
from cases import Case, missing

torch.set_num_threads(1)
#: Seconds for all cases together.
LIMIT = 3 * 3600 if os.environ.get("ROLLPACK_ALL") == "1" else 1200
results: dict[Case, ranks.Result] = {}


@pytest.fixture(scope="session")
def measured(request):
    """The result of each case that a collected test asks for. The first test to look waits for all of them."""
    wanted = [item.callspec.params["case"] for item in request.session.items if "case" in getattr(item, "fixturenames", ())]
    wanted = [case for case in wanted if not missing(case.trainer)]
    todo = sorted(set(wanted), key=lambda case: (case.ranks, case.cp_size, case.trainer, case))
    results.update(ranks.run(todo, limit=LIMIT))
    return results


def pytest_terminal_summary(terminalreporter):
    if not results:
        return
    terminalreporter.section("largest gradient errors under real distributed training")
    for line in report.table({case: result for case, result in results.items() if case.trainer != "wrong"}):
        terminalreporter.line(line)
    terminalreporter.line(report.versions())
