"""The trackers of a training: made on rank 0, refused on all ranks alike."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlpipe._core.errors import StoreError
from mlpipe._core.record_lines import decode_line
from mlpipe._core.records import End, Record, Save, Start, Step, Validation
from mlpipe._core.serial import to_plain
from mlpipe.observe.records import list_attempts, records_key
from mlpipe.observe.tracking.mlflow import Mlflow, uri_of
from mlpipe.observe.tracking.tensorboard import TensorBoard
from mlpipe.observe.tracking.tracker import TrackedRun, Tracker
from mlpipe.observe.tracking.tracking import Ending, Tracking
from mlpipe.observe.tracking.wandb import Wandb, check_installed
from mlpipe.plan.work import TrackerPlan
from mlpipe.store.base import Store
from mlpipe.store.runs import read_pipeline
from mlpipe.train.session import Session


def make_trackers(session: Session, plans: Sequence[TrackerPlan]) -> list[tuple[str, Tracking]]:
    """By name; none but on rank 0. Raises MlpipeError (input) where one cannot be."""
    for plan in plans:
        if plan.name == "mlflow":
            uri_of(plan.settings)
        elif plan.name == "wandb":
            check_installed()
    ending = Ending()
    return [(plan.name, _tracking(session, plan, ending)) for plan in plans] if session.rank == 0 else []


@contextmanager
def told(session: Session, plans: Sequence[TrackerPlan], start: Start) -> Iterator[Callable[[Record], None]]:
    """A stage that does one thing, for its trackers: they begin with `start`, hear of what is passed on, and
    end with the block."""
    trackers = [tracker for _, tracker in make_trackers(session, plans)]
    for tracker in trackers:
        tracker.on_start(start)

    def tell(record: Record) -> None:
        for tracker in trackers:
            tracker.on_step(record)

    outcome = "failed"
    try:
        yield tell
        outcome = "done"
    finally:
        for tracker in trackers:
            tracker.on_end(End(outcome=outcome, step=start.start_step or 0, message=""))


def _tracking(session: Session, plan: TrackerPlan, ending: Ending) -> Tracking:
    stage_key, store = session.plan.stage_key, session.store
    return Tracking(
        _tracker(session, plan),
        lambda first, last: history(store, stage_key, first, last),
        session.recorder.write,
        lambda: session.watchdog.beat(f"telling {plan.name} the rest", session.plan.work.training.steps),
        ending,
    )


def _tracker(session: Session, plan: TrackerPlan) -> Tracker:
    run = _run(session)
    if plan.name == "mlflow":
        return Mlflow(plan.settings, run)
    if plan.name == "wandb":
        local = session.store.local_path(run.stage_key)
        folder = local or Path(os.environ.get("WANDB_DIR") or tempfile.mkdtemp(prefix="mlpipe-wandb-"))
        return Wandb(plan.settings, run, folder)
    return TensorBoard(session.store, run)


def _run(session: Session) -> TrackedRun:
    plan = session.plan
    try:
        config = read_pipeline(session.store, plan.run_id)
    except StoreError:  # it is for people to read: no reason to fail
        config = ""
    return TrackedRun(
        run_id=plan.run_id,
        pipeline=plan.pipeline,
        stage=plan.stage,
        stage_key=plan.stage_key,
        store_url=plan.store_url,
        attempt=plan.attempt,
        config=config,
        plan=plan.to_json(),
        decided=to_plain(plan.work),
    )


def history(store: Store, stage_key: str, first: int, last: int) -> list[Record]:
    """What rank 0 wrote of the steps `first` to `last`, as they were done last, in their order. Raises
    StoreError."""
    steps: dict[int, Record] = {}
    others: list[Record] = []
    for attempt in list_attempts(store, stage_key):
        data, _ = store.read_log(records_key(f"{stage_key}/attempt-{attempt}", 0))
        for line in data.split(b"\n"):
            record = decode_line(line)
            at = getattr(record, "step", None)
            if record is None or at is None or not first <= at <= last:
                continue
            if isinstance(record, Step):
                steps[at] = record
            elif isinstance(record, Save | Validation):
                others.append(record)
    return sorted([*steps.values(), *others], key=lambda record: (getattr(record, "step", 0), record.time))
