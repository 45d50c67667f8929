"""``python -m tests.trainers.compare``: what a token weighs under each trainer's own function, beside the reference.

One real batch (``../shared/data``: 200 rows of 50 prompts) in float64. A number is max|w - w0| / max|w0| over all tokens: w
is the gradient that the optimizer gets with respect to the token losses, w0 what the formula in the table of names gives.
Prints the tables of python/docs/trainers.md.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from environments import HERE, PACKAGES, run

ORDER = ["verl", "trl", "skyrl", "openrlhf", "areal", "tinker"]


def shown(values):
    """The largest; what only rounds is shown by its power of ten."""
    worst = max(values)
    return f"{worst:.2g}" if worst >= 1e-7 or worst == 0 else f"{worst:.0e}"


def main():
    lines = ["| function | mode | cut | off |", "|---|---|---|---|"]
    kit = ["| function | mode | what `check_reducer` finds |", "|---|---|---|"]
    for name in ORDER:
        version = PACKAGES[name][0].partition("==")[2]

        def of(function, name=name, version=version):
            return f"{name} {version}" if function.startswith("rollpack") else version

        told = json.loads(run(name, HERE / f"{name}_case.py", "real").splitlines()[-1])
        by_result = {}
        for row in told["compared"]:
            agrees = row["off"] < 1e-7
            key = row["function"], row["cut"], agrees or round(row["off"], 3)
            by_result.setdefault(key, []).append(row)
        joined = {}
        for (function, cut, key), rows in by_result.items():
            modes = ", ".join(row["mode"] for row in rows)
            found = joined.setdefault((function, key, modes), ([], []))
            found[0].append(cut)
            found[1].extend(row["off"] for row in rows)
        for (function, _, modes), (cuts, values) in joined.items():
            lines.append(f"| {function} ({of(function)}) | {modes} | {'; '.join(cuts)} | {shown(values)} |")
        kit += [
            f"| {row['function']} ({of(row['function'])}) | {row['mode']} | {', '.join(row['causes']) or 'all hold'} |"
            for row in told.get("kit", [])
        ]
    print("\n".join([*lines, "", *kit]))


if __name__ == "__main__":
    main()
