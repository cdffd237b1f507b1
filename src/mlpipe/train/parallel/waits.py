"""How long this rank waits for the others inside collectives: what is left of a step is its own work.

In synchronous training the wall time of a step is the same on every rank, so a slow rank shows only as the
one that waits least. The waits measured here are those that stop this rank's computation: communication
that runs beside it costs nothing and is not counted.

On a CPU the clock is read around what blocks. On CUDA nothing blocks the host: events are recorded on the
computing stream around the point where it waits for the communication's stream, and are read once they have
passed, perhaps a step later. Nothing synchronises for the sake of a measurement.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

Result = TypeVar("Result")
_MOST_PENDING = 8192


class Waited(NamedTuple):
    """Seconds. `stages`: for other stages of a pipeline, which is no part of `collective`."""

    collective: float
    stages: float


class Waits:
    """Spans of waiting; inner ones of a nest are part of the outermost. `device`: of the computation."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._depth = 0
        self._for_stages = False
        self._began = 0.0
        self._seconds = {True: 0.0, False: 0.0}  # for stages, for others
        self._mark: torch.cuda.Event | None = None
        # bounded: an evaluation records spans and never asks for them
        self._pending: deque[tuple[bool, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_MOST_PENDING)
        self._free: list[torch.cuda.Event] = []

    @property
    def open(self) -> bool:
        """Whether this rank waits now; on CUDA, where the host does not, False."""
        return self._depth > 0 and not self._cuda

    def begin(self, for_stages: bool = False) -> None:
        """This rank waits from now on."""
        self._depth += 1
        if self._depth == 1:
            self._for_stages = for_stages
            if self._cuda:
                self._mark = self._record()
            else:
                self._began = time.perf_counter()

    def end(self) -> None:
        """Nothing where no span is open."""
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            if self._mark is not None:
                self._pending.append((self._for_stages, self._mark, self._record()))
                self._mark = None
            else:
                self._seconds[self._for_stages] += time.perf_counter() - self._began

    def timed(self, function: Callable[..., Result], *, for_stages: bool = False) -> Callable[..., Result]:
        """The same function; while it runs, this rank waits: for other stages of a pipeline, or in a
        collective."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            self.begin(for_stages)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return call

    def time_end_of_backward(self, module: nn.Module) -> None:
        """From the end of the backward's own work, when DDP and FSDP begin to wait for the gradients, until
        `end` is called. `module` gives the loss first. The engine runs callbacks in the order in which they
        were queued, and nobody queues one before the hook of the loss itself."""

        def of_loss(gradient: torch.Tensor) -> None:
            engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(self.begin)

        def after_forward(module: nn.Module, args: Any, output: Any) -> None:
            loss = output[0] if isinstance(output, tuple) else output  # or a stage's activations
            if loss.requires_grad:
                loss.register_hook(of_loss)

        module.register_forward_hook(after_forward, prepend=True)

    def take(self) -> Waited:
        """Since the last call; on CUDA of the spans that the device has passed by now."""
        while self._pending and self._pending[0][2].query():
            for_stages, begin, end = self._pending.popleft()
            self._seconds[for_stages] += begin.elapsed_time(end) / 1000
            self._free += (begin, end)
        waited = Waited(collective=self._seconds[False], stages=self._seconds[True])
        self._seconds = {True: 0.0, False: 0.0}
        return waited

    def _record(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event
