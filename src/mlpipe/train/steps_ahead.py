"""Whole steps read ahead in data workers: each by one process, as the rank itself would read it, so that
what comes is the same with any number of them. How many there are follows from how long is waited for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from mlpipe._core.cpus import num_cpus
from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.loader import MicrobatchLoader, seeded_step
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.data.workers import DataWorkers, data_workers

_log = logging.getLogger(__name__)
_EACH = 2  # steps that a worker has before it, the one that it reads included
_WINDOW = 8  # steps
_STARVING_RATIO = 0.05
_HELPED_RATIO = 0.9


class StepsAhead:
    """`number`: of workers; "auto" begins with none, for which the rank reads, and has at most `limit`.
    `num_steps`: of the training, beyond which nothing is read."""

    def __init__(
        self,
        loader: MicrobatchLoader,
        workers: DataWorkers,
        *,
        number: int | Literal["auto"],
        limit: int,
        num_steps: int,
    ) -> None:
        self.loader = loader
        self.workers = workers
        self.num_steps = num_steps
        self.growth = Growth(limit) if number == "auto" else None
        self._began = time.perf_counter()
        self._asked: dict[int, int] = {}  # step -> worker
        workers.grow(0 if number == "auto" else number)

    def step(self, number: int, position: int) -> list[Microbatch]:
        """As `MicrobatchLoader.step`, of step `number`."""
        if not len(self.workers):
            return seeded_step(self.loader, number, position)
        last = min(self.num_steps, number + _EACH * len(self.workers))
        for ahead in range(number, last + 1):
            if ahead not in self._asked:
                worker = self._asked[ahead] = self.workers.least_asked()
                self.workers.ask(worker, (ahead, position + (ahead - number) * self.loader.global_batch))
        microbatches: list[Microbatch] = self.workers.answer(self._asked.pop(number))
        if number == self.num_steps:
            self.workers.close()
        return microbatches

    def state(self, number: int) -> None:
        """The position says all."""

    def waited(self, seconds: float) -> None:
        """Of the step that began with the last call, for data."""
        now = time.perf_counter()
        passed, self._began = now - self._began, now
        if self.growth is None:
            return
        number = self.growth.after_step(seconds, passed)
        if number > len(self.workers):
            _log.info("waiting for data: from %d to %d data workers", len(self.workers), number)
            self.workers.grow(number)


class Growth:
    """Doubles the number of workers after each window of steps in which more than a twentieth of the time
    went by waiting for data, to at most `limit`, until that helps no more. The first step does not count:
    it does many things for the first time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.number = 0
        self._steps = -1
        self._waited = self._passed = 0.0
        self._before: float | None = None  # what was waited, as a ratio, when it last grew

    def after_step(self, waited: float, passed: float) -> int:
        """How many there should be now, after a step of `passed` seconds of which `waited` for data."""
        self._steps += 1
        if self._steps == 0:
            return self.number
        self._waited += waited
        self._passed += passed
        if self._steps % _WINDOW:
            return self.number
        ratio = self._waited / max(self._passed, 1e-9)
        self._waited = self._passed = 0.0
        if ratio <= _STARVING_RATIO:
            self._before = None
        elif self._before is not None and ratio > _HELPED_RATIO * self._before:
            self.limit = self.number  # what it waits for is not processes
        elif self.number < self.limit:
            self._before = ratio
            self.number = min(self.limit, max(1, 2 * self.number))
        return self.number


def steps_ahead(
    loader: MicrobatchLoader, plan: TrainPlan, local_world_size: int, beat: Callable[[], None]
) -> StepsAhead:
    """As the plan asks for: `auto` shares the CPUs of the node among its `local_world_size` ranks."""

    def serve(job: tuple[int, int]) -> list[Microbatch]:
        number, position = job
        return seeded_step(loader, number, position)

    return StepsAhead(
        loader,
        data_workers(plan, beat)(serve),
        number=plan.data.workers,
        limit=max(1, num_cpus() // local_world_size),
        num_steps=plan.steps,
    )
