"""Saving and loading: any strategy and world size to any other, without ever stopping to write.

A save costs the step almost nothing: parameters and optimizer states are only written by the optimizer,
so a thread copies them to host memory *under the next forward and backward*, and `wait_for_staging` waits
for what is left. Buffers, which a forward may write (batch norm's statistics), are cloned before. The same
thread then writes the blobs, tells rank 0 over a TCPStore of its own (no collective runs outside the main
thread) and rank 0 commits (store/catalogue.py).

Nothing is unpickled: the manifest is JSON, tensors are raw little-endian bytes in row-major order, and a
rank finds the shards it needs by intersecting them with the chunks listed there.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mlpipe import __version__
from mlpipe._core.errors import MlpipeError, StoreError, TrainError
from mlpipe.store import catalogue
from mlpipe.store.base import Store
from mlpipe.store.manifest import FORMAT
from mlpipe.train.shards import LocalShard

_log = logging.getLogger(__name__)
_ALIGNMENT = 64
_CHUNK_BYTES = 16 * 2**20
_COMMIT_TIMEOUT = timedelta(minutes=30)
_HEARD_TIMEOUT = timedelta(minutes=1)


@dataclass
class Saved:
    """What one save was, as this rank saw it. `error`: why it was not committed."""

    step: int
    key: str
    num_bytes: int
    stall_seconds: float
    save_seconds: float
    error: MlpipeError | None = None


class _Save:
    def __init__(self, step: int, scalars: dict[str, Any], best: bool) -> None:
        self.step = step
        self.scalars = scalars
        self.best = best
        self.began = time.perf_counter()
        self.stall_seconds = 0.0
        self.staged = threading.Event()
        self.key = ""
        self.num_bytes = 0
        self.error: MlpipeError | None = None
        self.thread: threading.Thread | None = None


@dataclass(frozen=True)
class SaveSettings:
    """Of one attempt's checkpoints: where they go, what they say of themselves, how many are kept, and
    whether training goes on while one is written."""

    stage_key: str
    attempt: int
    restart: int
    code_digest: str
    keep: int
    asynchronous: bool


@dataclass(frozen=True)
class Coordination:
    """How the ranks agree on a commit. `store`: a TCPStore client that only the saving thread uses."""

    store: dist.Store
    rank: int
    world_size: int


class Checkpointer:
    """At most one save is in flight.

    `on_saved` is called in the main thread, from `poll` or `finish`; `while_waiting` each second that
    `finish` waits: a save has deadlines of its own, which are longer than those of a step.
    """

    def __init__(
        self,
        store: Store,
        settings: SaveSettings,
        coordination: Coordination,
        *,
        on_saved: Callable[[Saved], None],
        while_waiting: Callable[[], None],
    ) -> None:
        self.store = store
        self.settings = settings
        self.rank, self.world_size = coordination.rank, coordination.world_size
        prefix = f"checkpoint/{settings.attempt}/{settings.restart}"
        self.coordination_store = dist.PrefixStore(prefix, coordination.store)
        self.on_saved = on_saved
        self.while_waiting = while_waiting
        self.in_use: set[str] = set()
        self._buffers: dict[str, torch.Tensor] = {}
        self._current: _Save | None = None

    # -- saving -----------------------------------------------------------------------------------

    def save(
        self, step: int, tensors: list[LocalShard], scalars: dict[str, Any], *, best: bool = False
    ) -> None:
        """Starts saving the state after `step` updates. `scalars` must be JSON. `best`: it is kept as the
        best. Returns at once when asynchronous (after waiting for the save before, if that still runs)."""
        began = time.perf_counter()
        self.finish()
        save = _Save(step, json.loads(json.dumps(scalars)), best)
        tensors = [replace(item, local=item.local.clone()) if item.is_buffer else item for item in tensors]
        # The optimizer's kernels that made these values are queued on the main thread's stream.
        ready = torch.cuda.Event() if any(item.local.is_cuda for item in tensors) else None
        if ready is not None:
            ready.record()
        save.thread = threading.Thread(
            target=self._run, args=(save, tensors, ready), name="checkpoint", daemon=True
        )
        self._current = save
        save.thread.start()
        save.stall_seconds = time.perf_counter() - began
        if not self.settings.asynchronous:
            self.finish()

    def wait_for_staging(self) -> float:
        """To be called before anything writes to the saved tensors. Seconds waited."""
        save = self._current
        if save is None or save.staged.is_set():
            return 0.0
        began = time.perf_counter()
        if not save.staged.wait(_COMMIT_TIMEOUT.total_seconds()):
            raise TrainError(f"copying step {save.step} to host memory did not end", kind="infrastructure")
        waited = time.perf_counter() - began
        save.stall_seconds += waited
        return waited

    def poll(self) -> None:
        """Reports a save that has ended, without waiting."""
        if self._current is not None and self._current.thread and not self._current.thread.is_alive():
            self.finish()

    def finish(self) -> None:
        """Waits until the save in flight, if any, is committed or has failed."""
        save, self._current = self._current, None
        if save is None or save.thread is None:
            return
        began = time.perf_counter()
        while save.thread.is_alive():
            save.thread.join(1.0)
            self.while_waiting()
            if time.perf_counter() - began > _COMMIT_TIMEOUT.total_seconds():
                raise TrainError(
                    f"saving step {save.step} did not end within {_COMMIT_TIMEOUT}", kind="infrastructure"
                )
        save.stall_seconds += time.perf_counter() - began
        total = time.perf_counter() - save.began
        self.on_saved(Saved(save.step, save.key, save.num_bytes, save.stall_seconds, total, save.error))

    def _run(self, save: _Save, tensors: list[LocalShard], ready: torch.cuda.Event | None) -> None:
        exchange = dist.PrefixStore(str(save.step), self.coordination_store)
        try:
            try:
                staged = self._stage(tensors, ready)
            finally:
                save.staged.set()
            self._write(save, staged, exchange)
        except Exception as error:  # also of the TCPStore: a peer is gone, or a deadline passed
            save.error = _as_ours(error, save.step)

    def _stage(self, tensors: list[LocalShard], ready: torch.cuda.Event | None) -> list[_Staged]:
        """Copies this rank's share into one reused host buffer per kind of tensor."""
        mine = share(tensors)
        staged = []
        device = next((item.local.device for item in tensors if item.local.is_cuda), None)
        stream = None
        if device is not None:
            # A new thread's is the first, whatever the rank's is: leaving a stream makes a context there.
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)
        for kind in ("model", "optim"):
            items = [item for item in mine if item.name.startswith(f"{kind}.")]
            if not items:
                continue
            offsets, num_bytes = _layout(items)
            buffer = self._buffer(kind, num_bytes, pinned=stream is not None)
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                if stream is not None and ready is not None:
                    stream.wait_event(ready)
                for item, offset in zip(items, offsets, strict=True):
                    target = buffer[offset : offset + item.local.nbytes].view(item.local.dtype)
                    target.view(item.local.shape).copy_(item.local, non_blocking=True)
            if stream is not None:
                stream.synchronize()
            staged.append(_Staged(kind, items, offsets, buffer[:num_bytes]))
        return staged

    def _buffer(self, kind: str, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        buffer = self._buffers.get(kind)
        if buffer is None or buffer.numel() < num_bytes:
            # Reused by every later save: fresh memory would cost a page fault per 4 KiB each time.
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._buffers[kind] = buffer
        return buffer

    def _write(self, save: _Save, staged: list[_Staged], exchange: dist.Store) -> None:
        """What fails on one rank is told to rank 0, and what fails on rank 0 to all, at once."""
        if self.rank == 0:
            save.key = catalogue.new_prefix(self.settings.stage_key, save.step, self.settings.attempt)
            exchange.set("prefix", save.key)
        else:
            exchange.wait(["prefix"], _COMMIT_TIMEOUT)
            save.key = exchange.get("prefix").decode()
        report: dict[str, Any] = {"parts": [], "problem": ""}
        try:
            for part in staged:
                blob = catalogue.write_blob(
                    self.store, f"{save.key}/{part.kind}-{self.rank:05d}", _pieces(part.buffer)
                )
                report["parts"].append({"blob": blob, "chunks": part.chunks()})
                save.num_bytes += part.buffer.numel()
        except Exception as error:
            report["problem"] = str(_as_ours(error, save.step))
        exchange.set(f"rank-{self.rank}", json.dumps(report))
        if self.rank == 0:
            self._commit(save, exchange)
        exchange.wait(["committed"], _COMMIT_TIMEOUT)
        problem = exchange.get("committed").decode()
        exchange.set(f"heard-{self.rank}", "")
        if self.rank == 0:  # whose process has the TCPStore, and may end with this save
            with suppress(dist.DistError):  # a peer that is gone ends the run elsewhere; this is committed
                exchange.wait([f"heard-{rank}" for rank in range(self.world_size)], _HEARD_TIMEOUT)
        if problem:
            raise StoreError(problem)

    def _commit(self, save: _Save, exchange: dist.Store) -> None:
        problem = ""
        try:
            keys = [f"rank-{rank}" for rank in range(self.world_size)]
            exchange.wait(keys, _COMMIT_TIMEOUT)
            reports = [json.loads(exchange.get(key)) for key in keys]
            problem = "; ".join(report["problem"] for report in reports if report["problem"])
            if not problem:
                manifest = _merge([report["parts"] for report in reports])
                manifest |= {
                    "format": FORMAT,
                    "step": save.step,
                    "attempt": self.settings.attempt,
                    "uuid": save.key.rpartition("-")[2],
                    "time": time.time(),
                    "code": {
                        "mlpipe": __version__,
                        "torch": torch.__version__,
                        "digest": self.settings.code_digest,
                    },
                    "scalars": save.scalars,
                }
                if save.best:
                    catalogue.mark_best(self.store, save.key, save.scalars.get("validation", {}))
                if not catalogue.commit(self.store, save.key, manifest):
                    problem = f"{save.key}: another writer has committed under this key"
        except Exception as error:
            problem = str(_as_ours(error, save.step))
        exchange.set("committed", problem)
        if not problem:
            try:
                # this one stays, whatever higher step another hand has put into the store
                in_use = {*self.in_use, save.key}
                catalogue.prune(self.store, self.settings.stage_key, self.settings.keep, in_use=in_use)
            except StoreError as error:  # this one is committed; the next save prunes again
                _log.warning("old checkpoints are left: %s", error)


def _as_ours(error: Exception, step: int) -> MlpipeError:
    if isinstance(error, MlpipeError):
        return error
    return TrainError(f"step {step} was not saved: {type(error).__name__}: {error}", kind="infrastructure")


@dataclass
class _Staged:
    kind: str
    items: list[LocalShard]
    offsets: list[int]
    buffer: torch.Tensor

    def chunks(self) -> list[dict[str, Any]]:
        return [
            {
                "name": item.name,
                "dtype": str(item.local.dtype).removeprefix("torch."),
                "global_shape": list(item.shape),
                "offset": list(item.offset),
                "shape": list(item.local.shape),
                "byte_offset": offset,
            }
            for item, offset in zip(self.items, self.offsets, strict=True)
        ]


def share(tensors: Iterable[LocalShard]) -> list[LocalShard]:
    """What this rank writes: of a shard that several ranks hold, exactly one of them writes it, chosen such
    that their bytes balance (greedy, the same on every rank). A buffer is written by the first: between two
    steps running statistics differ, and that one's are what all ranks go on with."""
    written: dict[int, list[int]] = {}
    mine = []
    for item in tensors:
        if item.is_copy:
            continue
        loads = written.setdefault(item.num_replicas, [0] * item.num_replicas)
        writer = 0 if item.is_buffer else loads.index(min(loads))
        # by its whole size: the parts of a tensor differ, and with them what ranks would count
        loads[writer] += math.prod(item.shape) * item.local.element_size()
        if writer == item.replica_id and item.local.numel():
            mine.append(item)
    return mine


def _layout(items: list[LocalShard]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for item in items:
        offsets.append(end)
        end += -(-item.local.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _pieces(buffer: torch.Tensor) -> Iterator[memoryview]:
    view = memoryview(buffer.numpy().data)
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


def _merge(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The parts of all ranks into one manifest's `tensors` and `blobs`."""
    tensors: dict[str, Any] = {}
    blobs: list[Any] = []
    for part in (part for parts in ranks for part in parts):
        for chunk in part["chunks"]:
            tensor = tensors.setdefault(
                chunk["name"], {"dtype": chunk["dtype"], "shape": chunk["global_shape"], "chunks": []}
            )
            tensor["chunks"].append(
                {
                    "offset": chunk["offset"],
                    "shape": chunk["shape"],
                    "blob": len(blobs),
                    "byte_offset": chunk["byte_offset"],
                }
            )
        blobs.append(part["blob"])
    return {"tensors": tensors, "blobs": blobs}
