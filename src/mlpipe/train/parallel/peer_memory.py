"""As `shared_memory`, for ranks on GPUs of one node: parts lie in device memory that the others have mapped
(torch's symmetric memory), and what is read or added goes over NVLink, or whatever else lets the GPUs reach
each other's memory.

An addition to another GPU's memory is a read and a write, and atomic for neither of two that add at once: it
takes the same locks, and is over when it gives one back. A thread waits for that, on a stream of its own,
while the backward pass goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from mlpipe._core.errors import TrainError
from mlpipe.train.parallel.shared_memory import SharedMemory

_MOST_WAITING = 2  # gradients of so many units wait to be added; each keeps its memory until then


class PeerMemory(SharedMemory):
    """`device`: this rank's GPU."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        gradient_numels: list[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__(rank, num_ranks, gradient_numels, group)
        self.device = device
        self._handles: dict[tuple[str, int], Any] = {}
        self._stream = torch.cuda.Stream(device)
        # a thread's device is the first: to leave a stream would make a context there
        self._thread = ThreadPoolExecutor(1, "mlpipe-push", torch.cuda.set_device, (device,))
        self._waiting: deque[Future[None]] = deque()

    def push(self, unit: int, gradients: Tensor) -> None:
        self._check(unit, gradients)
        while len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft().result()
        computed = torch.cuda.Event(blocking=True)
        computed.record(torch.cuda.current_stream(self.device))
        self._waiting.append(self._thread.submit(self._add_beside, unit, gradients, computed))

    def fence(self) -> None:
        while self._waiting:
            self._waiting.popleft().result()
        torch.cuda.synchronize(self.device)
        super().fence()

    def _add_beside(self, unit: int, gradients: Tensor, computed: torch.cuda.Event) -> None:
        computed.synchronize()
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._add(unit, gradients)

    @contextmanager
    def _locked(self, number: int) -> Iterator[None]:
        with super()._locked(number):
            yield
            self._stream.synchronize()

    def _made(self, kind: str, unit: int, numel: int, dtype: torch.dtype) -> Tensor:
        return symmetric_memory.empty(numel, dtype=dtype, device=self.device).zero_()

    def _mapped(self, kind: str, unit: int, rank: int, like: Tensor) -> Tensor:
        """All ranks meet at the first of each tensor, in the same order."""
        if rank == self.rank:
            return like
        if (kind, unit) not in self._handles:
            group = self.group or dist.distributed_c10d._get_default_group()
            try:
                found = symmetric_memory.rendezvous(like, group)
            except RuntimeError as error:
                raise TrainError(
                    f"the GPUs of this node cannot map each other's memory: {str(error).splitlines()[0]}",
                    where="train.communication",
                    hint="write communication: resident",
                    kind="input",
                ) from error
            self._handles[kind, unit] = found
        mapped: Tensor = self._handles[kind, unit].get_buffer(rank, like.shape, like.dtype)
        return mapped
