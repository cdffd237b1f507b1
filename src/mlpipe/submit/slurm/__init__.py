"""The backend `slurm`: a stage is a batch job; the driver is a process on the login node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import SubmitError
from mlpipe.submit.backend import Backend
from mlpipe.submit.submission import (
    Availability,
    Console,
    Finding,
    Preview,
    Rendered,
    Submission,
)

if TYPE_CHECKING:
    from mlpipe.plan.hardware import Hardware
    from mlpipe.spec.model import Pipeline
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.batch import Batch
    from mlpipe.submit.executor import Executor


class SlurmBackend(Backend):
    """The cluster that this machine submits to."""

    name = "slurm"
    has_server_dry_run = True
    renders = True
    outlives_driver = True
    has_batches = True

    def __init__(self, place: Mapping[str, Any], pipeline: Pipeline | None = None) -> None:
        super().__init__(place)
        self._pipeline = pipeline

    @classmethod
    def of_driver(cls, run: RunState, pipeline: Pipeline) -> Backend:
        return cls(run.place, pipeline)

    @classmethod
    def takes(cls, pipeline: Pipeline) -> bool:
        return pipeline.slurm is not None

    def preview(self, submission: Submission, console: Console, *, on_server: bool = False) -> Preview:
        from mlpipe.submit.slurm import scripts

        files = scripts.scripts(submission)
        if on_server:
            scripts.server_dry_run(files, submission.folder)
        return scripts.preview(files)

    def check(self, submission: Submission, console: Console, *, is_new: bool) -> None:
        """A refusal by Slurm leaves no run behind."""
        self.preview(submission, console, on_server=True)

    def availability(self, submission: Submission) -> Availability:
        from mlpipe.submit.slurm import scripts

        return scripts.availability(scripts.scripts(submission), submission.folder)

    def hardware(self, pipeline: Pipeline, stage: str) -> Hardware:
        from mlpipe.plan.build import stage_hardware

        return stage_hardware(pipeline, stage, cluster=True)

    def executor(self, store: Store, run: RunState, holder: str) -> Executor:
        from functools import partial

        from mlpipe.submit.detach import working_folder
        from mlpipe.submit.slurm.executor import SlurmExecutor
        from mlpipe.submit.slurm.scripts import of_plan

        if self._pipeline is None:
            raise SubmitError("a driver of this backend knows its pipeline")
        pipeline = self._pipeline
        return SlurmExecutor(store, working_folder(run), partial(of_plan, pipeline), run.meta.get("batch"))

    def batch(
        self,
        store: Store,
        sweep: RunState,
        trials: Mapping[str, Submission],
        most: int,
        note: Callable[[str], None],
    ) -> Batch | None:
        from mlpipe.submit.slurm.arrays import batch

        return batch(store, sweep, trials, most, note, self.hardware)

    def clear(self, store: Store, run: RunState, *, timeout_seconds: float) -> None:
        from mlpipe.submit.slurm.clear import clear

        clear(store, run, timeout_seconds=timeout_seconds)

    def doctor(self, store: Iterable[Finding]) -> Iterator[Finding]:
        from mlpipe.submit.slurm.doctor import examine

        yield from examine(store)

    def render(self, submission: Submission, console: Console) -> Rendered:
        if submission.pipeline.sweep is not None:
            from mlpipe.submit.slurm import arrays

            return arrays.rendered(submission)
        from mlpipe.submit.slurm import scripts

        return scripts.rendered(submission)
