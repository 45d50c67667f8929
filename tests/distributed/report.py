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
    """Lines: for each trainer, precision and layout the largest gradient error of each mode, and that of the weights."""
    rows: dict[tuple[str, ...], list[Case]] = {}
    for case in sorted(results, key=lambda case: (case.dtype == "float32", [*TRAINERS].index(case.trainer), case.critic)):
        name = case.trainer + " +critic" * case.critic
        rows.setdefault((name, case.dtype, "no cp" if case.cp_size == 1 else case.layout), []).append(case)
    yield f"{'trainer':28} {'dtype':8} {'layout':10} " + " ".join(f"{m:>11}" for m in (*MODES, "weights")) + "  cuts"
    for (name, dtype, layout), of_row in rows.items():
        cells = [_worst([results[c].get("gradient") for c in of_row if c.mode == mode]) for mode in MODES]
        cells.append(_worst([results[c].get("weights") for c in of_row]))
        cuts = len({(c.cut, c.max_tokens_per_gpu) for c in of_row})
        yield f"{name:28} {dtype:8} {layout:10} " + " ".join(f"{c:>11}" for c in cells) + f" {cuts:>5}"


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
        elif max(result["gradient"], result["weights"]) > TOLERANCES[case.dtype]:
            print(f"{case}: {result}")
    seconds = {t: [r["seconds"] for c, r in results.items() if c.trainer == t and "seconds" in r] for t in TRAINERS}
    print("seconds a case: " + ", ".join(f"{t} {sum(s) / len(s):.2f}" for t, s in seconds.items() if s))
    print(f"{sum(r.get('seconds', 0) for r in results.values()):.0f} s in {len(results)} cases")


if __name__ == "__main__":
    main()
