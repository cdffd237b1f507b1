"""Starts stages as jobs: one, or an elastic training's several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlpipe.plan.plan import Plan
from mlpipe.render.slurm import parts_of
from mlpipe.store.base import Store
from mlpipe.submit.executor import Slots
from mlpipe.submit.handle import ThreadedHandle
from mlpipe.submit.slurm.jobs import JobHandle, Task
from mlpipe.submit.slurm.replicas import ReplicaJobs


class SlurmExecutor:
    """Starts stages by the scripts that `render` makes of their plans, and of parts of those, in `folder`.
    `task`: of an array, see `arrays.py`, which is the first attempt."""

    def __init__(
        self, store: Store, folder: str, render: Callable[[Plan, str], str], task: Task | None = None
    ) -> None:
        self._store, self._folder, self._render, self._task = store, folder, render, task

    def capacity(self) -> Slots:
        """Slurm knows better."""
        return Slots(cpus=2**31, gpus=2**31)

    def check(self, plan: Plan) -> None:
        """Raises RenderError for what can never run there."""
        if plan.kind.runs != "driver":
            for part in parts_of(plan):
                self._render(plan, part)

    def start(self, plan: Plan, scratch: Path) -> ThreadedHandle:
        if plan.launch.replicas is not None:
            return ReplicaJobs(self._store, plan, self._folder, self._render)
        task = self._task if plan.attempt == 1 else None
        return JobHandle(self._store, plan, self._folder, self._render(plan, ""), task)
