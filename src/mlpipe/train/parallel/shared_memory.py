"""Weights that ranks of one node read, and gradients that they add to, without their owner's help: memory
that all of them have mapped.

Each rank owns, of each unit (a module that FSDP2 gathers at once), a segment with its shard of the weights
and one with the sum of the gradients for that shard. Segments are files in /dev/shm until every rank has
mapped them; then they lose their names, and the kernel frees them with the last process, however that ends.
What a rank that was killed before leaves is removed by the next one that starts.

Additions take a lock for each owner and unit, of fcntl's kind: the kernel drops those of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe._core.errors import TrainError
from mlpipe.train.room import FOLDER, no_room

PREFIX = "mlpipe-on-demand-"
_SWEEP_SECONDS = 60.0


class SharedMemory:
    """`gradient_numels`: of each unit, values of this rank's part of the gradients; 0: it has none. `rank`:
    within `group`, of `num_ranks` on one node; None: the default group is this one."""

    def __init__(
        self, rank: int, num_ranks: int, gradient_numels: list[int], group: dist.ProcessGroup | None
    ) -> None:
        self.rank, self.num_ranks, self.group = rank, num_ranks, group
        self.gradient_numels = gradient_numels
        self._weights: dict[int, list[Tensor]] = {}  # by unit, of each rank
        self._gradients: dict[int, list[Tensor]] = {}
        self._own: dict[int, tuple[Tensor, Tensor | None]] = {}
        names: list[str | None] = [None]
        self._alive: IO[bytes] | None = None
        if rank == 0:
            names[0], self._alive = _new_folder()
        dist.broadcast_object_list(names, group_src=0, group=group)
        assert names[0] is not None
        self._folder = Path(names[0])
        self._locks = (self._folder / "locks").open("r+b")

    def publish(self, unit: int, shard: Tensor) -> None:
        """Flat; from the next fence on the others read it. Raises TrainError where there is no room."""
        if unit not in self._own:
            numel = self.gradient_numels[unit]
            gradients = self._made("g", unit, numel, torch.float32) if numel else None
            self._own[unit] = self._made("w", unit, shard.numel(), shard.dtype), gradients
        self._own[unit][0].copy_(shard)

    def connect(self) -> None:
        """Maps what the others have published first, all of it; all ranks together."""
        self.fence()
        for unit, (weights, gradients) in self._own.items():
            of_ranks = range(self.num_ranks)
            self._weights[unit] = [self._mapped("w", unit, rank, weights) for rank in of_ranks]
            if gradients is not None:
                self._gradients[unit] = [self._mapped("g", unit, rank, gradients) for rank in of_ranks]
        self.fence()
        if self._alive is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._alive.close()

    def read(self, unit: int, into: Tensor) -> None:
        """The shards of all ranks behind each other, as they were published."""
        for part, shard in zip(into.view(self.num_ranks, -1), self._weights[unit], strict=True):
            part.copy_(shard)

    def push(self, unit: int, gradients: Tensor) -> None:
        """Adds each rank's part to what it has; `gradients`: the parts behind each other."""
        self._check(unit, gradients)
        self._add(unit, gradients)

    def _check(self, unit: int, gradients: Tensor) -> None:
        if gradients.numel() != self.num_ranks * self.gradient_numels[unit]:
            raise TrainError(
                "a parameter got no gradient in this microbatch",
                hint="write communication: resident",
                kind="input",
            )

    def _add(self, unit: int, gradients: Tensor) -> None:
        parts = gradients.view(self.num_ranks, -1)
        for step in range(1, self.num_ranks + 1):  # not all at the same owner first
            owner = (self.rank + step) % self.num_ranks
            with self._locked(owner * len(self.gradient_numels) + unit):
                self._gradients[unit][owner].add_(parts[owner])

    def fence(self) -> None:
        """Until all ranks are here: what they did before is done."""
        dist.barrier(self.group)

    def gradients(self, unit: int) -> Tensor | None:
        """The sum that was pushed to this rank, between a fence and the next; None: of no gradients."""
        return self._own[unit][1]

    @contextmanager
    def _locked(self, number: int) -> Iterator[None]:
        fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, number)

    def _made(self, kind: str, unit: int, numel: int, dtype: torch.dtype) -> Tensor:
        path, num_bytes = self._path(kind, unit, self.rank), numel * dtype.itemsize
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # who writes to what is not there gets SIGBUS
            except OSError as error:
                raise no_room(num_bytes) from error
        return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)

    def _mapped(self, kind: str, unit: int, rank: int, like: Tensor) -> Tensor:
        if rank == self.rank:
            return like
        path = str(self._path(kind, unit, rank))
        return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)

    def _path(self, kind: str, unit: int, rank: int) -> Path:
        return self._folder / f"{kind}-{unit}-{rank}"


def _new_folder() -> tuple[str, IO[bytes]]:
    """And the lock that says that its ranks are still about to map what is in it. Folders whose lock nobody
    holds are removed; who makes one holds the lock of FOLDER itself meanwhile."""
    prefix = f"{PREFIX}{os.getuid()}-"
    handle = os.open(FOLDER, os.O_RDONLY)
    try:
        _lock(handle)
        for left in FOLDER.glob(f"{prefix}*"):
            with suppress(OSError):
                if left.lstat().st_uid != os.getuid():
                    continue  # anybody may make files here, and opening a pipe waits
                with (left / "alive").open("rb") as alive:
                    fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=FOLDER))
        (folder / "locks").touch()
        made = (folder / "alive").open("wb")
        fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else knows of it yet
    finally:
        os.close(handle)
    return str(folder), made


def _lock(handle: int) -> None:
    """For as long as it is open. Others hold it for milliseconds."""
    until = time.monotonic() + _SWEEP_SECONDS
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise TrainError(
                    f"{FOLDER} has been locked for {_SWEEP_SECONDS:.0f} s", hint="lslocks says by whom"
                ) from None
            time.sleep(0.01)
