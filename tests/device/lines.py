"""What a check has to say, and how time is taken on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Line(NamedTuple):
    """One line of the table. ``ok`` is None where there is no aim, or where it is not one for this device."""

    what: str
    found: str
    aim: str = ""
    ok: bool | None = None


def at_most(what: str, found: float, limit: float, unit: str = "", *, judged: bool = True) -> Line:
    """A line that passes where what was found is at most the limit; a NaN is not."""
    return Line(what, f"{found:.3g}{unit}", f"<= {limit:.3g}{unit}", found <= limit if judged else None)


def at_least(what: str, found: float, limit: float, unit: str = "", *, judged: bool = True) -> Line:
    """A line that passes where what was found is at least the limit; a NaN is not."""
    return Line(what, f"{found:.3g}{unit}", f">= {limit:.3g}{unit}", found >= limit if judged else None)


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, work: Callable[[], Any], repeat: int = 50) -> float:
    """The median over five of how long ``repeat`` runs take, per run, all of them queued before the device is waited for."""
    work()
    times = []
    for _ in range(5):
        wait(device)
        started = time.perf_counter()
        for _ in range(repeat):
            work()
        wait(device)
        times.append((time.perf_counter() - started) / repeat)
    return sorted(times)[2]


def captured(device: torch.device, work: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """``work`` as a CUDA graph: what replays it, and its outputs, which each replay writes. On a CPU, itself.

    A graph costs the host one launch, so that its time is that of the device.
    """
    if device.type != "cuda":
        return work, work()
    # Warm up on another stream, as capturing wants it: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    return graph.replay, outputs
