"""``python -m tests.trainers.compare``: what a token weighs under each trainer's own function, beside the reference.

One real batch (``../shared/data``: 200 rows of 50 prompts) in float64. A number is max|w - w0| / max|w0| over all tokens: w
is the gradient that the optimizer gets with respect to the token losses, w0 what the formula in the table of names gives.
Prints the tables of the README.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from environments import HERE, PACKAGES, run

ORDER = ["verl", "trl", "skyrl", "openrlhf", "areal", "tinker"]


def shown(value):
    """0 is what float64 or float32 rounds to."""
    return "0" if value < 1e-7 else f"{value:.2g}"


def main():
    lines = ["| function | mode | cut | off |", "|---|---|---|---|"]
    kit = ["| function | mode | what `check_reducer` finds |", "|---|---|---|"]
    for name in ORDER:
        version = PACKAGES[name][0].partition("==")[2]
        told = json.loads(run(name, HERE / f"{name}_case.py", "real").splitlines()[-1])
        by_result = {}
        for row in told["compared"]:
            by_result.setdefault((row["function"], shown(row["off"]), row["cut"]), []).append(row["mode"])
        joined = {}
        for (function, off, cut), modes in by_result.items():
            joined.setdefault((function, off, ", ".join(modes)), []).append(cut)
        for (function, off, modes), cuts in joined.items():
            lines.append(f"| {function} ({version}) | {modes} | {'; '.join(cuts)} | {off} |")
        kit += [
            f"| {row['function']} ({version}) | {row['mode']} | {', '.join(row['causes']) or 'all hold'} |"
            for row in told.get("kit", [])
        ]
    print("\n".join([*lines, "", *kit]))


if __name__ == "__main__":
    main()
