"""The backend `local`: this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlpipe.submit.backend import Backend
from mlpipe.submit.submission import Availability, Console, Finding, Submission

if TYPE_CHECKING:
    from mlpipe.plan.plan import Plan
    from mlpipe.spec.model import Pipeline
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.executor import Executor


class LocalBackend(Backend):
    """A stage is a process here, and so is the driver; both end with this machine."""

    name = "local"

    @classmethod
    def takes(cls, pipeline: Pipeline) -> bool:
        return True

    def check(self, submission: Submission, console: Console, *, is_new: bool) -> None:
        from mlpipe.submit.process_executor import gpu_ids

        super().check(submission, console, is_new=is_new)
        num_gpus = len(gpu_ids())
        for stage in submission.pipeline.stages:
            asked = 0
            if stage.resources is not None and isinstance(stage.resources.nodes, int):
                asked = stage.resources.nodes * stage.resources.gpus_per_node
            # of workers that is an error; what a program does without is its own affair
            if asked > num_gpus and stage.kind.runs == "command" and submission.stage in (None, stage.name):
                console.note(
                    f"stage {stage.name!r} asks for {asked} GPUs, and there "
                    f"{'is' if num_gpus == 1 else 'are'} {num_gpus} here: its command runs all the same"
                )

    def check_plan(self, plan: Plan) -> None:
        from mlpipe.submit.process_executor import check_fits, gpu_ids

        check_fits(plan, len(gpu_ids()))

    def command(self, plan: Plan, scratch: Path) -> tuple[list[str], dict[str, str]]:
        from mlpipe.submit.process_executor import command_line

        return command_line(plan, scratch)

    def executor(self, store: Store, run: RunState, holder: str) -> Executor:
        from mlpipe.submit.detach import working_folder
        from mlpipe.submit.process_executor import ProcessExecutor

        return ProcessExecutor(store, driver=holder, folder=working_folder(run))

    def availability(self, submission: Submission) -> Availability:
        return Availability(0.0, "this machine")

    def doctor(self, store: Iterable[Finding]) -> Iterator[Finding]:
        from mlpipe.submit.local.machine import examine

        yield from examine()
        yield from store
