"""The table of trainers, cuts and modes: ``python tests/distributed/report.py [part of a case's name ...]``.

ROLLPACK_ALL=1 runs the full grid.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cases import MODES, TOLERANCES, TRAINERS, Case, cases, missing

PACKAGES = {"megatron": "megatron-core"}


def versions() -> str:
    """The libraries that were run, with their versions."""
    found = []
    for library in dict.fromkeys(TRAINERS.values()):
        package = PACKAGES.get(library, library)
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} is not installed")
    return ", ".join(found)


def table(results: Mapping[Case, Mapping[str, Any]]) -> Iterable[str]:
    """Lines: a row per trainer, precision and cut, the largest gradient error of each mode, and that of the weights."""
    yield f"{'trainer':21} {'dtype':8} {'dp x cp':14} " + " ".join(f"{m:>11}" for m in (*MODES, "weights")) + "   runs"
    rows: dict[tuple[Any, ...], list[Case]] = {}
    for case in results:
        rows.setdefault((case.trainer + (" +critic" if case.critic else ""), case.dtype, case.cut), []).append(case)
    order = list(TRAINERS)
    for (trainer, dtype, cut), of_row in sorted(rows.items(), key=lambda r: (r[0][1] == "float32", order.index(r[1][0].trainer))):
        cells = [_worst([results[c].get("gradient") for c in of_row if c.mode == mode]) for mode in MODES]
        cells.append(_worst([results[c].get("weights") for c in of_row]))
        yield f"{trainer:21} {dtype:8} {cut:14} " + " ".join(f"{c:>11}" for c in cells) + f" {len(of_row):>6}"


def _worst(errors: list[float | None]) -> str:
    if not errors:
        return ""
    return "FAILED" if None in errors else f"{max(errors):.1e}"


def main() -> None:
    import ranks

    wanted = sys.argv[1:]
    chosen = [c for c in cases() if not missing(c.trainer) and all(part in f"{c}" for part in wanted)]
    results = ranks.run(chosen, limit=4 * 3600)
    print("\n".join(table(results)))
    print(versions())
    for case, result in results.items():
        if "error" in result:
            print(f"\n{case}\n{result['error']}")
        elif result["gradient"] > TOLERANCES[case.dtype]:
            print(f"{case}: {result}")
    print(f"{sum(r.get('seconds', 0) for r in results.values()):.0f} s in {len(results)} cases")


if __name__ == "__main__":
    main()
