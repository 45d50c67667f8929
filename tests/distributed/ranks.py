"""Runs cases in real processes: one start per number of ranks, and nothing that hangs for long.

``run`` starts this file as a program, which imports the libraries once and forks the ranks. Rank 0 writes a line of JSON
for each case that is done. A rank that fails, or a case that takes too long, ends its processes; the other cases go on in
new ones.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from cases import TRAINERS, Case

HERE = Path(__file__).parent
#: Seconds that one case may take, of which its collectives may wait for so many.
CASE_LIMIT, COLLECTIVE_LIMIT = 90, 60

Result = dict[str, Any]  # the deviations of gradient and weights, and more of the run; or an error


def run(cases: Sequence[Case], *, limit: float) -> dict[Case, Result]:
    """Each case's result, and under ``error`` why there is none. ``limit``: seconds for all of them."""
    end = time.monotonic() + limit
    results: dict[Case, Result] = {}
    while left := [case for case in cases if case not in results]:
        found, why = _launch(left, end - time.monotonic())
        results |= found or {case: {"error": why} for case in left}
    return results


def _launch(cases: Sequence[Case], limit: float) -> tuple[dict[Case, Result], str]:
    """The results that one start of this file came to, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        todo, results, log = (Path(folder) / name for name in ("todo", "results", "log"))
        todo.write_text(json.dumps(cases))
        results.touch()
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, __file__, todo, results], cwd=folder, stdout=out, stderr=out, start_new_session=True
            )
            try:
                how = f"it ended with status {process.wait(limit)}"
            except subprocess.TimeoutExpired:
                how = "time is up"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its own session: it and its ranks
                process.wait()
        tail = "\n".join(log.read_text().splitlines()[-30:])
        found = [json.loads(line) for line in results.read_text().splitlines()]
    return {Case(*case): result for case, result in found}, f"not reached, {how}\n{tail}"


def main(todo: str, results: str) -> None:
    cases = [Case(*case) for case in json.loads(Path(todo).read_text())]
    preload({TRAINERS.get(case.trainer, "torch") for case in cases})
    work = Work()
    for case in cases:
        work.truth(case)
    for size, of_size in groupby(cases, key=lambda case: case.ranks):
        left = list(of_size)
        while left:
            left = left[start(size, left, work, results) :]


def preload(libraries: Iterable[str]) -> None:
    """Import what the cases need, once for all ranks."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if "accelerate" in libraries:
        import accelerate  # noqa: F401
    if "transformers" in libraries:
        from transformers import Trainer  # noqa: F401
    if find_spec("deepspeed") and not {"accelerate", "deepspeed"}.isdisjoint(libraries):
        import deepspeed
        from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

        # It would be compiled, which takes ninja on the PATH and a minute; inference alone uses it.
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
    if "megatron" in libraries:
        import megatron.core.distributed
        import megatron.core.pipeline_parallel.schedules
        import megatron.core.transformer  # noqa: F401
    gc.freeze()  # Trainer collects garbage at every turn: what was imported is none


class Work:
    """The rollouts and the truth about them, made before the ranks are forked."""

    def __init__(self) -> None:
        import tiny

        import trainers

        self.tiny, self.trainers = tiny, trainers
        self.table = tiny.rollouts()
        self.truths: dict[tuple[str, bool], tiny.Truth] = {}

    def truth(self, case: Case) -> Any:
        key = (case.mode, case.critic)
        if key not in self.truths:
            self.truths[key] = self.tiny.Truth(self.table, case.mode, critic=case.critic)
        return self.truths[key]

    def measure(self, case: Case) -> Result:
        """Train as the case says, in this rank, and compare. The worst rank counts."""
        import torch
        import torch.distributed as dist

        import rollpack
        from rollpack.testing import Cut

        started = time.monotonic()
        cut = Cut(case.dp_size, case.cp_size, case.layout, case.max_tokens_per_gpu)
        divisor = self.tiny.DIVISOR if case.mode == "constant" else None
        plan = cut.plan(self.table, loss_aggregation=case.mode, divisor=divisor)
        dp_rank, cp_rank = divmod(dist.get_rank(), case.cp_size)
        packed = rollpack.pack(self.table, plan, dp_rank=dp_rank, cp_rank=cp_rank, token_columns=["advantages"])
        group = self.trainers.cp_group(case.dp_size, case.cp_size)
        model = self.tiny.fresh(getattr(torch, case.dtype), critic=case.critic, cp_group=group)
        job = self.trainers.Job(model, [m.to("cpu") for m in packed], case.dp_size, case.cp_size)
        self.trainers.TRAINERS[case.trainer](job)

        truth = self.truth(case)
        weights = self.tiny.copy(job.model, lambda p: p)
        errors = torch.tensor([truth.gradient_error(job.gradient), truth.weights_error(weights)], dtype=torch.float64)
        errors = errors.nan_to_num(nan=float("inf"))
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
        logged = torch.tensor(list(job.logged.values()), dtype=torch.float64)
        dist.all_reduce(logged)
        result = {"gradient": errors[0].item(), "weights": errors[1].item(), "seconds": time.monotonic() - started}
        result |= {"loss": truth.loss, "micro_batches": len(job.micro_batches), "tokens": plan.steps[0].num_tokens}
        return result | dict(zip(job.logged, logged.tolist(), strict=True))


def start(size: int, cases: Sequence[Case], work: Work, results: str) -> int:
    """Fork ``size`` ranks that run the cases in turn. Returns how many are done with, failed ones included."""
    before = len(_lines(results))
    with tempfile.TemporaryDirectory() as folder:
        port, pids = _free_port(), []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _rank(rank, size, cases, work, results, folder, port)
            pids.append(pid)
        done, since, failed = before, time.monotonic(), ""
        alive = set(pids)
        while alive and not failed:
            time.sleep(0.05)
            for pid in list(alive):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    alive.discard(pid)
            if (now := len(_lines(results))) > done:
                done, since = now, time.monotonic()
            if errors := sorted(Path(folder).glob("error*"), key=os.path.getmtime):
                failed = errors[0].read_text()
            elif done - before < len(cases) and len(alive) < size:
                time.sleep(1)  # for the error to be written
                failed = "".join(e.read_text() for e in Path(folder).glob("error*")) or "a rank ended without a word"
            elif time.monotonic() - since > CASE_LIMIT:
                failed = f"took more than {CASE_LIMIT} s"
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    done = len(_lines(results)) - before
    if failed and done < len(cases):
        _write(results, cases[done], {"error": failed})
        done += 1
    return done


def _rank(rank: int, size: int, cases: Sequence[Case], work: Work, results: str, folder: str, port: int) -> None:
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        at = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in at.items()}
        wait = timedelta(seconds=COLLECTIVE_LIMIT)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=wait)
        for case in cases:
            result = work.measure(case)
            if rank == 0:
                _write(results, case, result)
        dist.barrier()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - it is written down for the test
        traceback.print_exc()
        unfinished = Path(folder) / f"writing{rank}"
        unfinished.write_text(traceback.format_exc())
        unfinished.rename(Path(folder) / f"error{rank}")
        os._exit(1)


def _write(results: str, case: Case, result: Result) -> None:
    with open(results, "a") as out:
        out.write(json.dumps([case, result]) + "\n")


def _lines(results: str) -> list[str]:
    return Path(results).read_text().splitlines()


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
