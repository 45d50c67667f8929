"""All that wants a GPU, in under five minutes: one table, and a status that is not 0 where a line fails.

    python -m tests.device.run

Without a GPU (or with ``--device cpu``) what can be had of it runs on small data: agreement is judged, Triton is
interpreted, times are shown and not judged, and what only a GPU has is told as not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # where it is run as a file
if not torch.cuda.is_available() or "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from tests.device import agreement, speed
from tests.device.lines import Line

import rollpack

Check = Callable[[torch.device], Iterator[Line]]
#: In order; True where there is nothing of it on a CPU.
CHECKS: list[tuple[Check, bool]] = [
    (agreement.kernels, False),
    (agreement.reducer, False),
    (agreement.suite, True),
    (agreement.like_the_cpu, True),
    (agreement.logprobs_and_attention, False),
    (agreement.stream, False),
    (speed.graph, True),
    (speed.no_sync, True),
    (speed.memory, True),
    (speed.reducer, False),
    (speed.overlap, False),
]


def lines(check: Check, device: torch.device) -> Iterator[Line]:
    """What a check has to say; what it raises is a line that fails."""
    try:
        yield from check(device)
    except Exception as error:  # noqa: BLE001 - each failure is a line of the table
        traceback.print_exc()
        yield Line(
            check.__name__, f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}", "", False
        )
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    started, found = time.monotonic(), []
    for check, on_gpu_only in CHECKS:
        what = f"{check.__module__.rpartition('.')[2]}.{check.__name__}"
        print(f"{time.monotonic() - started:6.1f} s  {what}", flush=True)
        if on_gpu_only and device.type != "cuda":
            found.append(Line(f"{what}: {' '.join(check.__doc__.split())}", "not run: no GPU"))
        else:
            found += lines(check, device)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(f"\n{hardware}, torch {torch.__version__}, rollpack {rollpack.__version__}, {time.monotonic() - started:.0f} s")
    widths = [max(len(cell) for cell in column) for column in zip(*(line[:3] for line in found), strict=True)]
    for line in found:
        verdict = {True: "pass", False: "FAIL", None: "-"}[line.ok]
        print(*(cell.ljust(width) for cell, width in zip(line[:3], widths, strict=True)), verdict)
    failed = sum(line.ok is False for line in found)
    print(
        f"{sum(line.ok is True for line in found)} pass, {failed} fail, {sum(line.ok is None for line in found)} not judged"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
