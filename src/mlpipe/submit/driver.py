"""The driver of a run: takes the lease, clears or adopts what the driver before it left, walks, lets go.

A run has one driver at a time. It may be `mlpipe run` or `mlpipe resume` in a terminal, the process that
`mlpipe submit` detaches, or the driver's Job on a cluster (which are `mlpipe resume` again): all of them come
through `drive`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.plan.plan import Plan
from mlpipe.spec.model import Pipeline
from mlpipe.store import leases, outputs, runs, wanted
from mlpipe.store.base import Store
from mlpipe.store.runs import Lease, RunState, StageState
from mlpipe.submit import planning, process, seal
from mlpipe.submit.changes import NONE, Changes, apply, prepare, under_way
from mlpipe.submit.dag_runner import DagRunner
from mlpipe.submit.executor import Executor, StopRequest
from mlpipe.submit.follower import cancel_orphans
from mlpipe.submit.local import LocalBackend

if TYPE_CHECKING:
    from mlpipe.submit.kubernetes.api import ClusterApi

LEASE_SECONDS = 60.0
_RENEW_SECONDS = 10.0
_TAKEOVER_SECONDS = LEASE_SECONDS + 10.0  # for the lease of a driver whose pod is gone to expire
_GRACE_SECONDS = 2.0  # for orphans of a stage whose plan cannot be read


def drive(
    store: Store,
    run_id: str,
    *,
    stop: StopRequest,
    only: str | None = None,
    for_followers: bool = False,
    changes: Changes = NONE,
    digests: str | None = None,
    trust_store: bool = False,
    watch: Callable[[RunState], None] = lambda state: None,
) -> RunState:
    """Walk the run until it has ended (with `only`: that stage, and others that are asked for meanwhile, see
    `store/wanted.py`); its final state. A done run stays as it is without `changes`, see
    `submit/changes.py`. `for_followers`: they have asked; without any who still does, or where another
    driver is alive, which hears them as well, nothing is done. `digests`, `trust_store`: what the run is, see
    `seal.verified`.

    Raises SpecError, PlanError or SubmitError (input) before anything starts; SubmitError or StoreError
    (input) if another driver is alive; SubmitError if the lease was lost on the way.
    """
    former = runs.read_run(store, run_id)
    if former.state == "done" and not changes:
        return former
    asked = seal.verified(store, former, digests=digests, trust_store=trust_store)
    prepared = prepare(store, former, asked, changes, only)
    if only is not None and not for_followers:
        check_needs(planning.needs(prepared.pipeline), former, only, prepared.again)
    on_cluster = asked.backend == "kubernetes"
    with contextlib.ExitStack() as held:
        try:
            lease = held.enter_context(_lease(store, run_id, prepared.pipeline, on_cluster))
        except StoreError as error:
            if for_followers and error.kind == "input":
                return runs.read_run(store, run_id)
            if on_cluster and error.kind == "input":  # exit code 2 would end the driver's Job for good
                raise SubmitError(error.message, where=error.where, hint=error.hint) from None
            raise
        if not on_cluster:
            _clear_orphans(store, former)
        left = runs.read_run(store, run_id)  # as the driver before us left it
        if left.seq != former.seq and left.state in runs.RUN_ENDED:
            if not changes:
                return left  # another was asked for the same, was quicker, and has ended it
            raise under_way(run_id)
        if left.stages != former.stages or left.meta != former.meta:
            asked = seal.verified(store, left, digests=digests, trust_store=trust_store)
            prepared = prepare(store, left, asked, changes, only)
        former, pipeline = left, prepared.pipeline
        apply(store, run_id, prepared)
        if digests is None:
            seal.keep(store, run_id, seal.changed(asked, changes.overrides))
        if only is not None and not for_followers:
            wanted.ask(store, run_id, only)
        if only is not None and not _is_anything_left(store, former, on_cluster):
            return former
        _reopen(store, former, only is not None, on_cluster, forget_cancel=not for_followers)
        made = {} if on_cluster else _committed_outputs(store, former)
        runs.update_run(
            store,
            run_id,
            lambda run: replace(
                run,
                state="running",
                message="",
                stages={**run.stages, **made},
            ),
        )
        scratch = planning.scratch_folder(store, run_id)
        look = cancel_orphans(store, run_id, stop) if pipeline.on_orphan == "cancel" else None

        def alive() -> None:
            lease.check()
            if look is not None:
                look()

        try:
            return DagRunner(
                store,
                run_id,
                planning.needs(pipeline),
                planning.planner(store, run_id, pipeline, cluster=on_cluster),
                _backend(store, asked, lease.holder, pipeline),
                holder=lease.holder,
                scratch=scratch,
                stop=stop,
                alive=alive,
                watch=watch,
            ).run(only_wanted=only is not None)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _lease(store: Store, run_id: str, pipeline: Pipeline, on_cluster: bool) -> HeldLease:
    """On a cluster, a driver whose pod has ended is not waited for, and one that is gone until its lease has
    expired."""
    if not on_cluster:
        return HeldLease(store, run_id)
    from mlpipe.submit.kubernetes.driver_job import pod_has_ended

    def has_ended(lease: Lease) -> bool:
        try:
            return bool(lease.pod) and pod_has_ended(_connect(pipeline), lease.pod, lease.pod_uid)
        except SubmitError:
            return False

    return HeldLease(store, run_id, patience_seconds=_TAKEOVER_SECONDS, has_ended=has_ended)


def _is_anything_left(store: Store, former: RunState, on_cluster: bool) -> bool:
    """On a cluster, stages that run without their driver are adopted."""
    return bool(wanted.asked(store, former.run_id)) or (
        on_cluster and any(stage.state == "running" for stage in former.stages.values())
    )


def _reopen(store: Store, former: RunState, partly: bool, on_cluster: bool, *, forget_cancel: bool) -> None:
    """What the driver before us left under way waits again, but for a cluster, where it goes on; so does what
    ended badly, `partly`: what of it is asked for. A request to cancel an ended run was heard."""
    ended = former.state in runs.RUN_ENDED
    if not ended and (former.state == "pending" or on_cluster):
        return
    names = None
    if partly:
        names = wanted.asked(store, former.run_id)
        names += [name for name, stage in former.stages.items() if stage.state in ("running", "skipped")]
    runs.reopen(store, former.run_id, names, forget_cancel=forget_cancel or ended)


def _backend(store: Store, asked: seal.Seal, holder: str, pipeline: Pipeline) -> Executor:
    if asked.backend == "kubernetes":
        from mlpipe.submit.kubernetes.gang import KubernetesBackend

        return KubernetesBackend(store, _connect(pipeline))
    return LocalBackend(store, driver=holder, folder=working_folder(asked.folder))


def _connect(pipeline: Pipeline) -> ClusterApi:
    from mlpipe.submit.kubernetes.api import connect

    return connect(namespace=pipeline.kubernetes.namespace if pipeline.kubernetes else None)


def _committed_outputs(store: Store, former: RunState) -> dict[str, StageState]:
    """Stages whose driver died between the commit of their output and the note of it: the commit counts."""
    made = {}
    for name, stage in former.stages.items():
        key = f"runs/{former.run_id}/stages/{name}"
        if stage.state != "done" and stage.attempt and store.exists(f"{key}/outputs/MANIFEST.json"):
            outcome = {"digest": outputs.load_output(store, key)["digest"]}
            made[name] = replace(stage, state="done", message="", exit_code=0, outcome=outcome)
    return made


def working_folder(folder: str) -> str:
    """Where the run was asked for, which is where its commands run, whoever drives it."""
    if not os.path.isdir(folder):
        raise SubmitError(
            f"the run was started in {folder}, which is not there (any more)",
            hint="make the folder again, or start a new run",
            kind="input",
        )
    return folder


class HeldLease:
    """The right to drive a run, renewed by a thread so that a long upload does not lose it."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        patience_seconds: float = 0.0,
        has_ended: Callable[[Lease], bool] = lambda lease: False,
    ) -> None:
        """`patience_seconds`: how long to wait for another's lease to expire. `has_ended`: whether others
        know that its holder is dead."""
        self._patience_seconds = patience_seconds
        self._has_ended = has_ended
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._store = store
        self._run_id = run_id
        self._released = threading.Event()
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> HeldLease:
        deadline = time.monotonic() + self._patience_seconds
        dead: str | None = None
        while True:
            try:
                leases.take_lease(self._store, self._run_id, self.holder, LEASE_SECONDS, dead=dead)
                break
            except StoreError as error:
                if time.monotonic() >= deadline:
                    raise
                former = runs.read_run(self._store, self._run_id).driver if error.kind == "input" else None
                dead = former.holder if former is not None and self._has_ended(former) else None
                if dead is None:
                    time.sleep(1.0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        try:
            leases.release_lease(self._store, self._run_id, self.holder)
        except StoreError:
            return  # it expires by itself, and an error on its way out must not be hidden by this one

    def check(self) -> None:
        """Raises SubmitError once the lease is lost."""
        if self._lost is not None:
            raise SubmitError(
                f"this driver lost the lease on run {self._run_id}: {self._lost}",
                hint=f"see who drives it: mlpipe status {self._run_id}; go on: mlpipe resume {self._run_id}",
            )

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._released.wait(_RENEW_SECONDS):
            try:
                leases.renew_lease(self._store, self._run_id, self.holder, LEASE_SECONDS)
                renewed = time.monotonic()
            except StoreError as error:
                if self._is_taken() or time.monotonic() - renewed > LEASE_SECONDS:
                    self._lost = str(error)
                    return

    def _is_taken(self) -> bool:
        try:
            driver = runs.read_run(self._store, self._run_id).driver
        except StoreError:
            return False
        return driver is None or driver.holder != self.holder


def cancel(store: Store, run_id: str, why: str, *, timeout_seconds: float) -> RunState:
    """Stop a run and wait until it has stopped. A live driver lets the stages save; a dead one is replaced
    for as long as it takes to end what it left, on this machine or on the cluster. Raises SubmitError when
    `timeout_seconds` are over."""
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
                return _cancel_driverless(store, run, why, timeout_seconds)
            except StoreError as error:
                if error.kind != "input":  # another driver was quicker, and is asked to stop
                    raise
        if time.monotonic() > deadline:
            raise SubmitError(
                f"run {run_id} was asked to stop and has not stopped within {timeout_seconds:.0f} s",
                hint=f"it saves before it stops; look again with mlpipe status {run_id}",
            )
        time.sleep(0.2)


def _cancel_driverless(store: Store, former: RunState, why: str, timeout_seconds: float) -> RunState:
    def stopped(stage: StageState) -> StageState:
        if stage.state == "running":
            return replace(stage, state="cancelled", message="its driver was gone", ended=time.time())
        return replace(stage, state="skipped", message=why) if stage.state == "pending" else stage

    with HeldLease(store, former.run_id):
        if former.backend == "kubernetes":
            from mlpipe.submit.kubernetes.objects import clear, client_of

            clear(client_of(former), former.run_id, timeout_seconds=timeout_seconds)
        else:
            _clear_orphans(store, former)
        return runs.update_run(
            store,
            former.run_id,
            lambda run: replace(
                run,
                state="cancelled",
                message=why,
                stages={name: stopped(stage) for name, stage in run.stages.items()},
            ),
        )


def _clear_orphans(store: Store, former: RunState) -> None:
    """Ends the processes of the driver before us that are on this machine."""
    lease: Lease | None = former.driver
    if lease is None:
        return
    grace = _GRACE_SECONDS
    for name, stage in former.stages.items():
        key = f"{former.attempt_key(name)}/plan.json"
        if stage.state == "running" and store.exists(key):
            try:
                plan = Plan.from_json(store.get(key))
            except ValueError:  # of another version of mlpipe
                continue
            grace = max(grace, plan.launch.shutdown_seconds)
    process.clear(lease.holder, run_id=former.run_id, grace_seconds=grace)


def check_needs(
    needs: Mapping[str, Sequence[str]], run: RunState, only: str, again: Collection[str] = ()
) -> None:
    """Raises SubmitError (input) unless the stage `only` may start, once those of `again` wait again."""
    if only not in needs:
        raise SubmitError(
            f"the pipeline has no stage {only!r}", hint=f"it has {', '.join(needs)}", kind="input"
        )
    missing = [need for need in needs[only] if run.stages[need].state != "done" or need in again]
    if missing:
        raise SubmitError(
            f"stage {only!r} needs {', '.join(missing)}, which this run has not done",
            hint="run that first, or leave --stage away",
            kind="input",
        )
