"""What a backend is: a place that runs can go to.

A subclass of `Backend` in a module of its own, and a line in `backends.TABLE` (or an entry point of the group
`mlpipe.backends`) make one. As it stands here, a run is planned for this machine and driven by a process on
it, in a session of its own; what a subclass must say is what starts the stages (`executor`). One instance is
one place: a cluster and namespace, a queue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mlpipe._core.errors import RenderError
from mlpipe.submit.submission import Availability, Console, Finding, Option, Preview, Rendered, Submission

if TYPE_CHECKING:
    from mlpipe.observe.logs import Reader
    from mlpipe.plan.hardware import Hardware
    from mlpipe.plan.plan import Plan
    from mlpipe.spec.model import Pipeline
    from mlpipe.store.base import Store
    from mlpipe.store.runs import Lease, RunState
    from mlpipe.submit.batch import Batch
    from mlpipe.submit.executor import Executor


class Backend(ABC):
    """One place of a kind that runs can go to. `place`: how it is found again, which run.json keeps."""

    name: ClassVar[str]
    options: ClassVar[Sequence[Option]] = ()  # of `mlpipe submit`
    doctor_options: ClassVar[Sequence[Option]] = ()  # of `mlpipe doctor`
    has_server_dry_run: ClassVar[bool] = False  # `submit --dry-run=server`
    renders: ClassVar[bool] = False  # `mlpipe render --for`
    # Stages go on without their driver: the next one adopts them. They fetch their inputs themselves.
    outlives_driver: ClassVar[bool] = False
    # It starts trials of a sweep by itself: see `batch`.
    has_batches: ClassVar[bool] = False
    # Its trainings run on other machines than its driver's, of which they say nothing.
    trains_elsewhere: ClassVar[bool] = False
    # The driver is the backend's own object, which starts it anew when it fails, and has a seal.
    has_own_driver: ClassVar[bool] = False

    def __init__(self, place: Mapping[str, Any]) -> None:
        self.place = dict(place)

    @classmethod
    def of_submission(cls, pipeline: Pipeline, options: Mapping[str, Any]) -> Backend:
        """Where `mlpipe submit` with these options goes; `options` that were not given are None."""
        return cls({name: value for name, value in options.items() if value is not None})

    @classmethod
    def of_driver(cls, run: RunState, pipeline: Pipeline) -> Backend:
        """As the run's driver reaches it."""
        return cls(run.place)

    @classmethod
    def takes(cls, pipeline: Pipeline) -> bool:
        """Whether the pipeline's file says what a run there needs."""
        return False

    # A run

    def availability(self, submission: Submission) -> Availability:
        """When its stages could begin, were it submitted now; asks without changing anything. Raises
        SubmitError where the place is away."""
        return Availability(None, "its queue cannot be asked")

    def preview(self, submission: Submission, console: Console, *, on_server: bool = False) -> Preview:
        """What `submit` would start, and starts nothing. `on_server`: after the server has checked it. Raises
        PlanError or RenderError for what cannot run, SubmitError for what is refused."""
        from mlpipe.submit import here

        self._check_data(submission)
        return here.preview(submission, self.check_plan, self.command)

    def check(self, submission: Submission, console: Console, *, is_new: bool) -> None:
        """Raises what `preview` raises, before anything is written. `is_new`: nobody has made the run yet."""
        from mlpipe.submit import here

        if is_new:
            here.plans(submission, submission.run_id or submission.pipeline.name[:40], self.check_plan)
            self._check_data(submission)

    def _check_data(self, submission: Submission) -> None:
        if not (self.outlives_driver or self.trains_elsewhere):
            from mlpipe.submit.data_there import check_data

            check_data(submission)

    # Its stages

    def hardware(self, pipeline: Pipeline, stage: str) -> Hardware:
        """What the stage runs on. Raises PlanError."""
        from mlpipe.plan.build import stage_hardware

        return stage_hardware(pipeline, stage)

    def check_plan(self, plan: Plan) -> None:
        """Raises SubmitError if `plan` can never run there."""
        return

    def command(self, plan: Plan, scratch: Path) -> tuple[list[str], dict[str, str]]:
        """argv of a stage's process, and the environment that is added to its driver's. `scratch`: a folder
        of this attempt, with its plan.json."""
        from mlpipe.submit.here import stage_command

        return stage_command(plan, scratch)

    @abstractmethod
    def executor(self, store: Store, run: RunState, holder: str) -> Executor:
        """What starts the stages, for the driver that has the lease `holder`."""

    def clear(self, store: Store, run: RunState, *, timeout_seconds: float) -> None:
        """Ends what a driver that is gone left behind of the run. Raises SubmitError if it cannot within
        `timeout_seconds`."""
        from mlpipe.submit.here import clear_orphans

        clear_orphans(store, run)

    def batch(
        self,
        store: Store,
        sweep: RunState,
        trials: Mapping[str, Submission],
        most: int,
        note: Callable[[str], None],
    ) -> Batch | None:
        """Of a sweep whose trials it starts by itself, `most` at a time: of those that an earlier controller
        gave it (`sweep.meta["batch"]`, and `sweep.state`, as that one left it), and `trials`, by name, which
        nobody has begun. Sends nothing yet. `note` hears why there is none. None: each trial is started by
        its driver."""
        return None

    # Its driver

    def start_driver(self, store: Store, run: RunState, pipeline: Pipeline, only: str | None) -> None:
        """One that outlives the caller, for the run or its stage `only`. Raises SubmitError."""
        from mlpipe.submit.detach import detach

        detach(store, run.run_id, only)

    def driver_is_alive(self, run_id: str, only: str | None) -> bool:
        """Whether there will be a driver though none has the lease: it is about to start, perhaps anew."""
        return False

    def await_end_of_driver(self, store: Store, run_id: str, only: str | None) -> RunState:
        """The driver of a run that has ended is about to end, too, and must not be taken for a new one.
        Returns the run as it is then."""
        from mlpipe.store.runs import read_run

        return read_run(store, run_id)

    def lease_is_dead(self, lease: Lease) -> bool:
        """Whether its holder is known to have ended, though the lease has not expired."""
        return False

    def why_undriven(self, store: Store, run: RunState) -> str:
        """Of a run under way that nobody drives: what has become of its driver, and the remedy."""
        from mlpipe.submit.detach import last_words

        words = last_words(store, run).partition("\n")[0]
        return f"nobody drives it{words and f' ({words})'}; go on with mlpipe resume {run.run_id}"

    @classmethod
    def give_up_driver(cls, run_id: str, only: str | None) -> None:
        """Called in a driver which is about to fail of what no other can mend: it is not started anew."""
        return

    # To look at

    def logs(
        self, store: Store, *, stage: str | None = None, rank: int | None = None, after: float | None = None
    ) -> Reader:
        """What its stages write: of `stage` or `rank` alone if these are given, from `after` (Unix seconds)
        on. Here: what they have sent to the store. A place that keeps logs itself has a reader of its own."""
        from mlpipe.observe.logs import Reader

        return Reader(store, stage, rank, after)

    def doctor(self, store: Iterable[Finding]) -> Iterator[Finding]:
        """What is missing there, up to the first thing without which nothing else can be told. `store`: what
        is missing of the store, which is asked when it is iterated."""
        yield from store

    def render(self, submission: Submission, console: Console) -> Rendered:
        """Needs no server and no store. Raises PlanError or RenderError."""
        raise RenderError(f"there is nothing to render for {self.name}")
