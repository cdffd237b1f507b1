"""The backend `rented`: a stage that trains runs on a machine that is rented for it, and returned after it.

Commands and the driver run on this machine, which must stay awake: a rented machine that has no sign of it
saves, and ends its own rental.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import SubmitError
from mlpipe.submit.backend import Backend
from mlpipe.submit.rented.limits import OPTIONS, Limits
from mlpipe.submit.rented.vendor import connect
from mlpipe.submit.submission import Availability, Console, Finding, Preview, Submission

if TYPE_CHECKING:
    from mlpipe.plan.hardware import Hardware
    from mlpipe.spec.model import Pipeline
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.executor import Executor
    from mlpipe.submit.rented.market import Market


class RentedBackend(Backend):
    """An account of a vendor, and what may be spent of it. The account's key is in the environment of who
    submits and of the driver, and nowhere else."""

    name = "rented"
    options = OPTIONS
    trains_elsewhere = True

    def __init__(self, place: Mapping[str, Any], pipeline: Pipeline | None = None) -> None:
        super().__init__(place)
        self._pipeline = pipeline
        self._market: Market | None = None

    @classmethod
    def of_submission(cls, pipeline: Pipeline, options: Mapping[str, Any]) -> Backend:
        Limits.of_place(options)
        if pipeline.sweep is not None:
            raise SubmitError(
                "a sweep is several runs, and --max-usd is of one",
                hint="submit one of them: --set sweep=null",
                kind="input",
            )
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
        return cls({name: value for name, value in given.items() if value})

    @classmethod
    def of_driver(cls, run: RunState, pipeline: Pipeline) -> Backend:
        return cls(run.place, pipeline)

    def availability(self, submission: Submission) -> Availability:
        from mlpipe.submit.rented.ahead import availability, look_ahead

        return availability(look_ahead(submission, Limits.of_place(self.place)))

    def preview(self, submission: Submission, console: Console, *, on_server: bool = False) -> Preview:
        from mlpipe.submit.rented.ahead import look_ahead, preview

        return preview(submission, look_ahead(submission, Limits.of_place(self.place)))

    def check(self, submission: Submission, console: Console, *, is_new: bool) -> None:
        """Shows what would be rented, and refuses what the budget does not finish: nothing is spent yet."""
        if is_new:
            from mlpipe.submit.rented.ahead import look_ahead

            for choice in look_ahead(submission, Limits.of_place(self.place)).choices:
                console.note(choice.table())

    def hardware(self, pipeline: Pipeline, stage: str) -> Hardware:
        from mlpipe.submit.rented.market import is_rented

        if not is_rented(pipeline, stage):
            return super().hardware(pipeline, stage)
        if self._market is None:
            raise SubmitError("only the driver of a run looks for its machines")
        return self._market.hardware(pipeline, stage)

    def executor(self, store: Store, run: RunState, holder: str) -> Executor:
        from mlpipe.submit.detach import working_folder
        from mlpipe.submit.process_executor import ProcessExecutor
        from mlpipe.submit.rented.handle import RentedExecutor

        if self._pipeline is None:
            raise SubmitError("a driver of this backend knows its pipeline")
        self._market = self._open(store, run)
        here = ProcessExecutor(store, driver=holder, folder=working_folder(run))
        return RentedExecutor(self._market, self._pipeline, here)

    def clear(self, store: Store, run: RunState, *, timeout_seconds: float) -> None:
        from mlpipe.submit.rented.clear import clear

        super().clear(store, run, timeout_seconds=timeout_seconds)
        clear(self._open(store, run), run, timeout_seconds=timeout_seconds)

    def doctor(self, store: Iterable[Finding]) -> Iterator[Finding]:
        from mlpipe.submit.rented.doctor import examine

        yield from examine(store)

    def _open(self, store: Store, run: RunState) -> Market:
        from mlpipe.submit.rented.market import Market

        limits = Limits.of_place(self.place)
        return Market(store, run, connect(limits.vendor), limits)
