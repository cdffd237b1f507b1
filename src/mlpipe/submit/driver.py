"""The driver of a run: takes the lease, clears or adopts what the driver before it left, walks, lets go.

A run has one driver at a time. It may be `mlpipe run` or `mlpipe resume` in a terminal, the process that
`mlpipe submit` detaches, or the driver's own object on a backend (which are `mlpipe resume` again): all of
them come through `drive`.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.plan.hardware import Hardware, knows_machine
from mlpipe.spec.model import Pipeline
from mlpipe.store import leases, outputs, runs, wanted
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState, StageState
from mlpipe.submit import backends, planning, seal
from mlpipe.submit.backend import Backend
from mlpipe.submit.changes import NONE, Changes, apply, prepare, under_way
from mlpipe.submit.dag_runner import DagRunner, Drive
from mlpipe.submit.executor import StopRequest
from mlpipe.submit.follower import cancel_orphans
from mlpipe.submit.held_lease import TAKEOVER_SECONDS, HeldLease

CLEAR_SECONDS = 660.0  # for what a dead driver left behind to save and end; more than any stage's patience


@dataclass(frozen=True)
class DriveOptions:
    """What of the run is driven. `only`: that stage, and others that are asked for meanwhile, see
    `store/wanted.py`. `for_followers`: they have asked; without any who still does, or where another driver
    is alive, which hears them as well, nothing is done. `digests`, `trust_store`: what the run is, see
    `seal.verified`. `seen`: the transition of the run (`seq`) for which this driver was started."""

    only: str | None = None
    for_followers: bool = False
    changes: Changes = NONE
    digests: str | None = None
    trust_store: bool = False
    seen: int | None = None


def drive(
    store: Store,
    run_id: str,
    options: DriveOptions = DriveOptions(),
    *,
    stop: StopRequest,
    watch: Callable[[RunState], None] = lambda state: None,
    note: Callable[[str], None] = lambda text: None,
) -> RunState:
    """Walk the run until it has ended, or what the options say of it; its final state. A done run stays as it
    is without changes, see `submit/changes.py`. `note`: takes a line for a person who watches.

    Raises SpecError, PlanError or SubmitError (input) before anything starts; SubmitError or StoreError
    (input) if another driver is alive; SubmitError if the lease was lost on the way.
    """
    only, changes = options.only, options.changes
    former = runs.read_run(store, run_id)
    if former.state == "done" and not changes:
        return former
    if former.state in runs.RUN_ENDED and options.seen not in (None, former.seq):
        return former  # it was cancelled before we began
    sealed = seal.verified(store, former, digests=options.digests, trust_store=options.trust_store)
    prepared = prepare(store, former, sealed, changes, only)
    if only is not None and not options.for_followers:
        planning.check_needs(planning.needs(prepared.pipeline), former, only, prepared.again)
    backend = backends.load(sealed.backend).of_driver(former, prepared.pipeline)
    planning.probe_scratch()
    with contextlib.ExitStack() as held:
        try:
            lease = held.enter_context(_lease(store, run_id, backend, note))
        except StoreError as error:
            # another driver hears the followers; who deletes checkpoints hears nobody
            if (
                options.for_followers
                and error.kind == "input"
                and not isinstance(error, leases.DeletionError)
            ):
                return runs.read_run(store, run_id)
            if backend.has_own_driver and error.kind == "input":  # exit code 2 would end it for good
                raise SubmitError(error.message, where=error.where, hint=error.hint) from None
            raise
        if not backend.outlives_driver:
            _say_what_is_waited_for(former, note)
            backend.clear(store, former, timeout_seconds=CLEAR_SECONDS)
        left = runs.read_run(store, run_id)  # as the driver before us left it
        if left.seq != former.seq and left.state in runs.RUN_ENDED:
            if not changes:
                return left  # another was asked for the same, was quicker, and has ended it
            raise under_way(run_id)
        # the checkpoint to go back to may have been pruned meanwhile
        if left.stages != former.stages or left.meta != former.meta or changes.from_step is not None:
            sealed = seal.verified(store, left, digests=options.digests, trust_store=options.trust_store)
            prepared = prepare(store, left, sealed, changes, only)
        former, pipeline = left, prepared.pipeline
        apply(store, run_id, prepared)
        if options.digests is None:
            seal.keep(store, run_id, seal.changed(sealed, changes.overrides))
        if only is not None and not options.for_followers:
            wanted.ask(store, run_id, only)
        if only is not None and not _is_anything_left(store, former, backend):
            return former
        _reopen(store, former, only is not None, backend, forget_cancel=not options.for_followers)
        made = {} if backend.outlives_driver else _committed_outputs(store, former)
        runs.update_run(
            store,
            run_id,
            lambda run: replace(run, state="running", message="", stages={**run.stages, **made}),
        )
        scratch = planning.scratch_folder(store.url, run_id)
        look = cancel_orphans(store, run_id, stop) if pipeline.on_orphan == "cancel" else None

        def alive() -> None:
            lease.check()
            if look is not None:
                look()

        walk = Drive(store, run_id, lease.holder, scratch, stop, alive, watch, backend.outlives_driver)
        runner = _runner(walk, backend, pipeline, former, held, note)
        try:
            return runner.run(only_wanted=only is not None)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _runner(
    walk: Drive,
    backend: Backend,
    pipeline: Pipeline,
    former: RunState,
    held: contextlib.ExitStack,
    note: Callable[[str], None],
) -> DagRunner:
    """Where trainings run on this machine, it is measured beside the first stages, until `held` is left."""
    hardware: Callable[[Pipeline, str], Hardware] = backend.hardware
    executor = backend.executor(walk.store, former, walk.holder)
    if not (backend.outlives_driver or backend.trains_elsewhere) and knows_machine():
        from mlpipe.submit import measuring
        from mlpipe.submit.process_executor import ProcessExecutor

        hardware, standbys = held.enter_context(measuring.beside(pipeline, former, hardware, note))
        if isinstance(executor, ProcessExecutor):
            executor.standbys = standbys
    fetch = not backend.outlives_driver
    planner = planning.planner(walk.store, walk.run_id, pipeline, hardware, fetch=fetch)
    return DagRunner(walk, planning.needs(pipeline), planner, executor)


def _lease(store: Store, run_id: str, backend: Backend, note: Callable[[str], None]) -> HeldLease:
    """Where the driver is started anew, one that has ended is not waited for, and one that is gone until its
    lease has expired."""
    patience = TAKEOVER_SECONDS if backend.has_own_driver else 0.0
    return HeldLease(store, run_id, patience_seconds=patience, has_ended=backend.lease_is_dead, note=note)


def _is_anything_left(store: Store, former: RunState, backend: Backend) -> bool:
    """Stages that run without their driver are adopted."""
    return bool(wanted.asked(store, former.run_id)) or (backend.outlives_driver and former.is_under_way)


def _reopen(store: Store, former: RunState, partly: bool, backend: Backend, *, forget_cancel: bool) -> None:
    """What the driver before us left under way waits again, unless it goes on; so does what ended badly,
    `partly`: what of it is asked for. A request to cancel an ended run was heard."""
    ended = former.state in runs.RUN_ENDED
    if not ended and (former.state == "pending" or backend.outlives_driver):
        return
    names = None
    if partly:
        names = wanted.asked(store, former.run_id)
        names += [name for name, stage in former.stages.items() if stage.state in ("running", "skipped")]
    runs.reopen(store, former.run_id, names, forget_cancel=forget_cancel or ended)


def _committed_outputs(store: Store, former: RunState) -> dict[str, StageState]:
    """Stages whose driver died between the commit of their output and the note of it: the commit counts."""
    made = {}
    for name, stage in former.stages.items():
        key = f"runs/{former.run_id}/stages/{name}"
        if stage.state != "done" and stage.attempt and store.exists(f"{key}/outputs/MANIFEST.json"):
            outcome = {"digest": outputs.load_output(store, key)["digest"]}
            made[name] = replace(stage, state="done", message="", exit_code=0, outcome=outcome)
    return made


def _say_what_is_waited_for(former: RunState, note: Callable[[str], None]) -> None:
    """If a driver is gone from stages that were running."""
    if names := [name for name, stage in former.stages.items() if stage.state == "running"]:
        left = f"what is left of {', '.join(names)}"
        note(f"the driver of run {former.run_id} is gone: waits until {left} has saved and ended")


def cancel(
    store: Store,
    run_id: str,
    why: str,
    *,
    timeout_seconds: float,
    note: Callable[[str], None] = lambda text: None,
) -> RunState:
    """Stop a run and wait until it has stopped. A live driver lets the stages save; a dead one is replaced
    for as long as it takes to end what it left, on this machine or on the cluster. `note`: takes a line for a
    person who watches. Raises SubmitError when `timeout_seconds` are over."""
    run = runs.read_run(store, run_id)
    if run.state in runs.RUN_ENDED:
        return run
    deadline = time.monotonic() + timeout_seconds
    while True:
        runs.request_cancel(store, run_id, why)  # again: whoever resumes the run forgets it
        run = runs.read_run(store, run_id)
        if run.state in runs.RUN_ENDED:
            return run
        if not leases.lease_is_live(run.driver):
            try:
                return _cancel_driverless(store, run, why, timeout_seconds, note)
            except StoreError as error:
                if error.kind != "input":  # another driver was quicker, and is asked to stop
                    raise
        if time.monotonic() > deadline:
            raise SubmitError(
                f"run {run_id} was asked to stop and has not stopped within {timeout_seconds:.0f} s",
                hint=f"it saves before it stops; look again with mlpipe status {run_id}",
            )
        time.sleep(0.2)


def _cancel_driverless(
    store: Store, former: RunState, why: str, timeout_seconds: float, note: Callable[[str], None]
) -> RunState:
    def stopped(stage: StageState) -> StageState:
        if stage.state == "running":
            return replace(stage, state="cancelled", message="its driver was gone", ended=time.time())
        return replace(stage, state="skipped", message=why) if stage.state == "pending" else stage

    with HeldLease(store, former.run_id):
        _say_what_is_waited_for(former, note)
        backends.of_run(former).clear(store, former, timeout_seconds=timeout_seconds)
        return runs.update_run(
            store,
            former.run_id,
            lambda run: (
                run
                if run.state in runs.RUN_ENDED  # meanwhile, by a driver that was quick
                else replace(
                    run,
                    state="cancelled",
                    message=why,
                    stages={name: stopped(stage) for name, stage in run.stages.items()},
                )
            ),
        )
