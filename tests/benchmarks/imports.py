"""What ``import rollpack`` takes beyond numpy and pyarrow, beside what these take; each time in a fresh interpreter.

    python -m tests.benchmarks.imports

Medians, of the time that passes and of the time on a CPU: on a busy machine only the second says much. Then the modules
that take longest in one more import, as ``python -X importtime`` measures them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

TIMES = 15
SLOWEST = 10
CLOCKED = """
import time
def clocked(*names):
    wall, cpu = time.perf_counter(), time.process_time()
    for name in names:
        __import__(name)
    print(time.perf_counter() - wall, time.process_time() - cpu)
clocked("numpy", "pyarrow")
clocked("rollpack")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Bytecode as it is after the first import, whatever this shell says.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)


def main() -> None:
    run("-c", CLOCKED)  # compiles, and reads from disk
    runs = [[float(number) for number in run("-c", CLOCKED).stdout.split()] for _ in range(TIMES)]
    wall, cpu, own_wall, own_cpu = (1000 * median(column) for column in zip(*runs, strict=True))
    print(f"numpy and pyarrow: {wall:.1f} ms, {cpu:.1f} ms on a CPU")
    print(f"then rollpack: {own_wall:.1f} ms, {own_cpu:.1f} ms on a CPU, {own_cpu / cpu:.2f} of these")
    lines = run("-X", "importtime", "-c", "import numpy, pyarrow, rollpack").stderr.splitlines()
    after = next(i for i, line in enumerate(lines) if line.endswith("| pyarrow"))
    times = [(int(line.split("|")[0].rpartition(":")[2]), line.rpartition("|")[2].strip()) for line in lines[after + 1 :]]
    print(
        "longest by themselves: "
        + ", ".join(f"{name} {took / 1000:.1f} ms" for took, name in sorted(times)[: -SLOWEST - 1 : -1])
    )


if __name__ == "__main__":
    main()
