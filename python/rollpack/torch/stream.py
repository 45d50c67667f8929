"""``micro_batches``: packed in the background, copied beside the computation."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset, get_worker_info

from rollpack._arguments import integer
from rollpack._errors import PlanError, RollpackError
from rollpack._text import counted
from rollpack.packing import MicroBatch, Packer
from rollpack.plans import Plan, as_plan
from rollpack.torch.batches import STAY_INT32, map_arrays, to_device, with_mode_weights
from rollpack.torch.mesh import own_ranks, ranks_of


def micro_batches(
    data: Any,
    plan: Plan,
    *,
    step: int | None = None,
    dp_rank: int | None = None,
    cp_rank: int | None = None,
    mesh: DeviceMesh | None = None,
    device: str | torch.device,
    prefetch: int = 2,
    token_columns: Sequence[str] = (),
    sample_columns: Sequence[str] = (),
) -> MicroBatches:
    """The micro-batches of :func:`rollpack.pack` on a device, in the same order, ready before they are asked for.

    A background thread packs (without the GIL) while the current micro-batch runs. On a CUDA device it packs into pinned
    buffers that are used again, one per dtype, and copies each with one call on a stream of its own; the current stream
    waits for the copy, the program does not. On a CPU nothing is pinned and nothing copied.

    Memory: at most ``prefetch + 2`` micro-batches on the device (the one in use, those that wait, one being made), and on
    the host as many pinned copies but one, besides what of ``data`` is held to pack this rank's rows.

    What goes wrong in the background is raised in the loop. :meth:`MicroBatches.close`, the end of a ``with`` block, letting
    go of it and the end of the program all stop the thread. It starts with the first micro-batch, in the process that asks
    for it.

    It can be looped over again, for another epoch of PPO: where all came, the next loop reads ``data`` once more and starts
    again. A loop that was left early goes on where it was.

    Args:
        data: as for :func:`rollpack.pack`.
        plan: the plan.
        step: as for :func:`rollpack.pack`.
        dp_rank: the data-parallel rank, or that of ``mesh``. Where the plan has several and several processes of
            torch.distributed run, one of the two has to be passed; else it is 0 if left out.
        cp_rank: the context-parallel rank, in the same way.
        mesh: a DeviceMesh that tells both ranks (see :func:`rollpack.torch.ranks_of`), instead of them.
        device: where the tensors are to be.
        prefetch: how many micro-batches wait ready, at least 1.
        token_columns: as for :func:`rollpack.pack`.
        sample_columns: as for :func:`rollpack.pack`.

    Raises:
        PlanError: as for :func:`rollpack.pack`; or the mesh has other sizes than the plan, or comes with ranks; or a rank is
            missing; or ``prefetch`` is below 1.
        RollpackError: there is no such CUDA device; or, in the loop, it was closed.
        DataError, SchemaError: as for :func:`rollpack.pack`, some of them only in the loop. A second loop may find that
            ``data`` cannot be read again.
    """
    prefetch = integer("prefetch", prefetch, least=1)
    dp_rank, cp_rank = _ranks(plan, mesh, dp_rank, cp_rank)
    step = plan._checked(step, dp_rank, cp_rank)
    rows = plan._rows_of(step, dp_rank)
    device = torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RollpackError(f"device is {str(device)!r}, and torch finds {torch.cuda.device_count()} CUDA devices here")

    def begun() -> Iterator[_Sent]:
        packer = Packer(data, plan.columns, token_columns, sample_columns, sources=plan.sources, rows=rows)
        staging = _Staging(device, prefetch + 1) if device.type == "cuda" else None
        packed = packer.rank(plan, step, dp_rank, cp_rank, buffers=staging.next if staging else None)
        return (staging.send(m) if staging else (to_device(m, device), None) for m in packed)

    return MicroBatches(begun, plan.steps[step].num_micro_batches, prefetch)


def _ranks(plan: Plan, mesh: DeviceMesh | None, dp_rank: int | None, cp_rank: int | None) -> tuple[int, int]:
    if mesh is None:
        return own_ranks(plan, dp_rank, cp_rank)
    if dp_rank is not None or cp_rank is not None:
        raise PlanError("pass mesh=, or dp_rank= and cp_rank=, not both")
    ranks = ranks_of(mesh)
    planned = as_plan(plan).settings.dp_size, plan.settings.cp_size
    if (ranks.dp_size, ranks.cp_size) != planned:
        raise PlanError(
            f"the mesh has dp {ranks.dp_size} x cp {ranks.cp_size}, and the plan is for dp {planned[0]} x cp {planned[1]}"
        )
    return ranks.dp_rank, ranks.cp_rank


#: On the device, and the event after which it is there; None where it is there already.
_Sent = tuple[MicroBatch[torch.Tensor], torch.cuda.Event | None]


class MicroBatches(Iterator[MicroBatch[torch.Tensor]]):
    """What :func:`micro_batches` returns. Its length is K, the number of micro-batches."""

    def __init__(self, begin: Callable[[], Iterator[_Sent]], number: int, prefetch: int) -> None:
        self._begin: Callable[[], Iterator[_Sent]] | None = begin
        self._number = number
        self._prefetch = prefetch
        self._start(begin)

    def _start(self, begin: Callable[[], Iterator[_Sent]]) -> None:
        self._worker = _Worker(begin(), self._prefetch)
        # Runs when this is let go of, and at the end of the program at the latest.
        self._stop = weakref.finalize(self, self._worker.stop)

    def _begun(self) -> Callable[[], Iterator[_Sent]]:
        if self._begin is None:
            raise RollpackError("these micro-batches were closed; call micro_batches again")
        return self._begin

    def __len__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return f"MicroBatches({counted(self._number, 'micro-batch')}{', closed' if self._begin is None else ''})"

    def __iter__(self) -> MicroBatches:
        begin = self._begun()
        if not self._stop.alive:  # all came, or an error did
            self._start(begin)
        return self

    def __next__(self) -> MicroBatch[torch.Tensor]:
        self._begun()
        if not self._stop.alive:
            raise StopIteration
        try:
            micro_batch, copied = self._worker.get()
        except BaseException:
            self._stop()
            raise
        if copied is not None:
            stream = torch.cuda.current_stream(micro_batch.tokens.device)
            stream.wait_event(copied)
            # The memory was made on another stream: it is not to be given away before this one is done with it.
            map_arrays(micro_batch, lambda _, tensor: tensor.record_stream(stream))
        return micro_batch

    def close(self) -> None:
        """Stop packing and let go of everything. After that it cannot be looped over."""
        self._begin = None
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """A thread that draws from an iterator ahead of who asks."""

    def __init__(self, made: Iterator[_Sent], prefetch: int) -> None:
        self._made: Iterator[_Sent] | None = made
        self._ready: queue.Queue[_Sent | BaseException] = queue.Queue(prefetch)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = 0

    def get(self) -> _Sent:
        """The next item.

        Raises:
            StopIteration: there is none.
            RollpackError: this process is a fork of the one that began.
            BaseException: what the iterator raised.
        """
        if self._thread is None:
            self._process = os.getpid()
            self._thread = threading.Thread(target=self._work, name="rollpack micro_batches", daemon=True)
            self._thread.start()
        elif self._process != os.getpid():
            raise RollpackError("this iterator was begun before the process was forked; call micro_batches in the child")
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _work(self) -> None:
        made = self._made
        try:
            for item in made or ():
                self._ready.put(item)
                del item  # it is the consumer's alone
                if self._stopped.is_set():
                    return
            self._ready.put(StopIteration())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._ready.put(error)

    def stop(self) -> None:
        """End the thread and let go of what it made."""
        self._stopped.set()
        self._made = None
        # A forked child has no thread to end; and garbage may be collected in the thread itself, which then sees the event.
        if self._thread is None or self._process != os.getpid() or threading.current_thread() is self._thread:
            return
        while self._thread.is_alive():
            self._drain()
            self._thread.join(0.01)
        self._drain()

    def _drain(self) -> None:
        try:
            while True:
                self._ready.get_nowait()
        except queue.Empty:
            pass


class _Staging:
    """Pinned buffers for the micro-batches that are on their way to a device.

    There are some sets of them. A set has a buffer a dtype for what is packed, and a buffer a dtype for the small arrays of
    samples; it is filled again when the copies of what it held have ended.
    """

    def __init__(self, device: torch.device, sets: int) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._sets: list[dict[str, torch.Tensor]] = [{} for _ in range(sets)]
        self._copied: list[torch.cuda.Event | None] = [None] * sets
        self._current = -1
        self._packed: list[torch.Tensor] = []

    def next(self, lengths: Sequence[int]) -> tuple[npt.NDArray[Any], ...]:
        """An int32, a bool, a float32 and a float64 array of these lengths, in the next set."""
        self._current = (self._current + 1) % len(self._sets)
        copied = self._copied[self._current]
        if copied is not None:
            copied.synchronize()
        dtypes = (torch.int32, torch.bool, torch.float32, torch.float64)
        self._packed = [self._buffer("packed", dtype, n) for dtype, n in zip(dtypes, lengths, strict=True)]
        return tuple(buffer.numpy() for buffer in self._packed)

    def send(self, micro_batch: MicroBatch[npt.NDArray[Any]]) -> _Sent:
        """The micro-batch whose arrays :meth:`next` gave, on the device: one copy a buffer, and fields are views."""
        staged, buffers = self._stage(with_mode_weights(micro_batch))
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            sent = [buffer.to(self._device, non_blocking=True, copy=True) for buffer in buffers]
            # int32 travels, and is widened where it arrives.
            wide = [tensor.to(torch.int64) if tensor.dtype == torch.int32 else tensor for tensor in sent]
        starts = [(buffer.data_ptr(), buffer.numel() * buffer.itemsize) for buffer in buffers]

        def on_device(name: str, array: npt.NDArray[Any]) -> torch.Tensor:
            address = array.ctypes.data
            of = next(i for i, (start, size) in enumerate(starts) if start <= address < start + size)  # no array is empty
            at = (address - starts[of][0]) // array.itemsize
            return (sent if name in STAY_INT32 else wide)[of][at : at + len(array)]

        moved = map_arrays(staged, on_device)
        if self._stream is not None:
            self._copied[self._current] = self._stream.record_event()
        return moved, self._copied[self._current]

    def _stage(self, micro_batch: MicroBatch[Any]) -> tuple[MicroBatch[Any], list[torch.Tensor]]:
        """The micro-batch with all arrays in buffers of the current set, and these."""
        packed = [(b.data_ptr(), b.data_ptr() + b.numel() * b.itemsize) for b in self._packed]
        loose: dict[np.dtype[Any], list[npt.NDArray[Any]]] = {}

        def is_packed(array: npt.NDArray[Any]) -> bool:
            return any(start <= array.ctypes.data < end for start, end in packed)

        def collect(_: str, array: npt.NDArray[Any]) -> None:
            if not is_packed(array):
                loose.setdefault(array.dtype, []).append(array)

        map_arrays(micro_batch, collect)
        buffers, views = list(self._packed), {}
        for dtype, arrays in loose.items():
            lengths = [len(array) for array in arrays]
            buffer = self._buffer("samples", torch.from_numpy(arrays[0]).dtype, sum(lengths))
            buffers.append(buffer)
            np.concatenate(arrays, out=buffer.numpy())
            views[dtype] = iter(np.split(buffer.numpy(), np.cumsum(lengths)[:-1]))
        return map_arrays(micro_batch, lambda _, a: a if is_packed(a) else next(views[a.dtype])), buffers

    def _buffer(self, name: str, dtype: torch.dtype, length: int) -> torch.Tensor:
        """Of the current set. It is made anew, with half as much to spare, only where it is too small."""
        buffers, key = self._sets[self._current], f"{name} {dtype}"
        if key not in buffers or len(buffers[key]) < length:
            buffers[key] = torch.empty(length + length // 2, dtype=dtype, pin_memory=self._stream is not None)
        return buffers[key][:length]


class MicroBatchDataset(IterableDataset[MicroBatch[torch.Tensor]]):
    """The micro-batches of one rank for a ``DataLoader(dataset, batch_size=None, num_workers=...)``, as tensors on the CPU.

    Each worker packs its share, and the loader, which asks them in turn, gives them in the plan's order. For a GPU
    :func:`micro_batches` is the faster way: it needs no other processes, as packing does not hold the GIL.

    Args:
        data: as for :func:`rollpack.pack`; it goes to every worker, so a path serves best.
        plan: the plan.
        step: as for :func:`rollpack.pack`.
        dp_rank: the data-parallel rank; it may be left out as for :func:`micro_batches`.
        cp_rank: the context-parallel rank, in the same way.
        token_columns: as for :func:`rollpack.pack`.
        sample_columns: as for :func:`rollpack.pack`.

    Raises:
        PlanError: as for :func:`rollpack.pack`, or a rank is missing.
    """

    def __init__(
        self,
        data: Any,
        plan: Plan,
        *,
        step: int | None = None,
        dp_rank: int | None = None,
        cp_rank: int | None = None,
        token_columns: Sequence[str] = (),
        sample_columns: Sequence[str] = (),
    ) -> None:
        self._ranks = own_ranks(plan, dp_rank, cp_rank)
        self._step = plan._checked(step, *self._ranks)
        self._data, self._plan = data, plan
        self._columns = token_columns, sample_columns

    def __len__(self) -> int:
        return self._plan.steps[self._step].num_micro_batches

    def __repr__(self) -> str:
        dp_rank, cp_rank = self._ranks
        micro_batches = counted(len(self), "micro-batch")
        return f"MicroBatchDataset({micro_batches}, step {self._step}, dp_rank {dp_rank}, cp_rank {cp_rank})"

    def __iter__(self) -> Iterator[MicroBatch[torch.Tensor]]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        indices = range(first, len(self), stride)
        rows = [self._plan.rows(self._step, self._ranks[0], i) for i in indices]
        held = np.concatenate([np.empty(0, np.int64), *rows])
        packer = Packer(self._data, self._plan.columns, *self._columns, sources=self._plan.sources, rows=held)
        for micro_batch in packer.rank(self._plan, self._step, *self._ranks, indices=indices):
            yield to_device(micro_batch, "cpu")
