"""What `submit`, `resume` and `status` do for a run on a Kubernetes cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import MlpipeError, StoreError, SubmitError
from mlpipe.cli.session import Session
from mlpipe.cli.submit import ask, await_heard, claim, follow, say_detached, say_if_ended, say_started

if TYPE_CHECKING:
    from mlpipe.spec.model import Pipeline
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.changes import Changes
    from mlpipe.submit.kubernetes.api import ClusterApi
    from mlpipe.submit.seal import Seal

_LOOK_SECONDS = 3.0  # between two looks at the cluster
_DRIVER_SECONDS = 900.0  # for the driver's pod to be scheduled, pulled and started


@dataclass(frozen=True)
class Asked:
    """The arguments of `mlpipe submit --to kubernetes`, or what a run was asked for."""

    spec: str
    pipeline: Pipeline
    seal: Seal
    stage: str | None
    run_id: str | None
    context: str | None = None


def preview(session: Session, asked: Asked, where: str) -> int:
    """The very objects that would be sent: the driver's, then each stage's as the driver will send them."""
    from mlpipe._core.yaml import documents
    from mlpipe.submit.kubernetes.objects import server_dry_run

    pipeline = asked.pipeline
    run_id = asked.run_id or f"{pipeline.name[:40]}-{pipeline.digest[:8]}"
    files = _rendered(session, asked, session.full_store_url(pipeline.store), run_id)
    objects = [found for file in files.values() for found in file]
    if where == "server":
        server_dry_run(_connect(pipeline, asked.context), objects)
    session.result(objects, documents(objects).rstrip("\n"))
    return 0


def submit(session: Session, asked: Asked, wait: bool) -> int:
    from mlpipe.store import runs
    from mlpipe.submit.kubernetes.driver_job import driver_is_alive
    from mlpipe.submit.kubernetes.objects import server_dry_run

    pipeline = asked.pipeline
    store = session.open_store(pipeline.store)
    run_id = asked.run_id or pipeline.name[:40]
    files = _rendered(session, asked, store.url, run_id)
    api = _connect(pipeline, asked.context)
    server_dry_run(
        api, [found for file in files.values() for found in file]
    )  # a refusal leaves no run behind
    place: dict[str, Any] = {"context": api.context, "namespace": api.namespace}
    run_id = claim(store, pipeline, asked.spec, asked.seal.overrides, asked.run_id, place)
    say_if_ended(session, store, run_id)

    def start_driver() -> None:
        _go_on(session, store, api, pipeline, runs.read_run(store, run_id), asked.stage)

    try:
        start_driver()
        if wait:
            session.note(f"run {run_id} in {store.url}; Ctrl-C leaves it running")
            return _follow(session, store, api, run_id, asked.stage, start_driver)
        await_heard(
            store, run_id, asked.stage, start_driver, lambda: driver_is_alive(api, run_id, asked.stage)
        )
    except KeyboardInterrupt:
        return say_detached(session, run_id)
    say_started(session, store, run_id)
    return 0


def resume(
    session: Session,
    store: Store,
    run_id: str,
    *,
    only: str | None,
    changes: Changes,
    trust_store: bool = False,
) -> int:
    from mlpipe.store import runs
    from mlpipe.submit import seal
    from mlpipe.submit.changes import prepare
    from mlpipe.submit.kubernetes.objects import client_of

    run = runs.read_run(store, run_id)
    before = seal.verified(store, run, digests=None, trust_store=trust_store)
    pipeline = prepare(store, run, before, changes, only).pipeline
    changed = seal.changed(before, changes.overrides)
    asked = Asked(f"runs/{run_id}/pipeline.yaml", pipeline, changed, only, run_id)
    _rendered(session, asked, store.url, run_id)
    api = client_of(run)

    def start_driver() -> None:
        _go_on(session, store, api, pipeline, runs.read_run(store, run_id), only)

    _go_on(session, store, api, pipeline, run, only, changes, before)
    try:
        return _follow(session, store, api, run_id, only, start_driver)
    except KeyboardInterrupt:
        return say_detached(session, run_id)


def _go_on(
    session: Session,
    store: Store,
    api: ClusterApi,
    pipeline: Pipeline,
    seen: RunState,
    only: str | None,
    changes: Changes | None = None,
    before: Seal | None = None,
) -> None:
    """Gives the run a driver, unless it has one. A run that has ended, as it was `seen`, is opened again by
    one of those who ask for it at once; the others adopt what that one started."""
    from mlpipe.store import leases, runs
    from mlpipe.submit.changes import apply, prepare, under_way
    from mlpipe.submit.kubernetes.driver_job import await_end_of_driver, driver_is_alive

    run_id = seen.run_id
    run = await_end_of_driver(api, store, run_id, only)
    running = any(stage.state == "running" for stage in run.stages.values())
    if changes and (running or leases.lease_is_live(run.driver) or driver_is_alive(api, run_id, only)):
        raise under_way(run_id)
    prepared = prepare(store, run, before, changes, only) if changes and before else None
    again = prepared.again if prepared else ()
    overtaken = False
    if again or (only is None and seen.state in ("failed", "cancelled")):
        try:
            runs.reopen(store, run_id, None if only is None else (), again=again, seen=seen)
        except StoreError:
            run = runs.read_run(store, run_id)
            overtaken = run.seq != seen.seq
            if not overtaken:
                raise
            if changes:
                raise under_way(run_id) from None
            session.note(f"somebody else has resumed run {run_id} meanwhile: following that")
    if prepared is not None:
        apply(store, run_id, prepared)
    if (overtaken and run.state in runs.RUN_ENDED) or not ask(store, pipeline, run_id, only):
        return
    _start_driver(store, api, run_id, pipeline, only)


def why_undriven(run: RunState) -> str:
    """Of the driver itself: what the stages wait for, their driver writes into run.json."""
    from mlpipe.submit.kubernetes import driver_job, objects

    try:
        return driver_job.why_undriven(objects.client_of(run), run.run_id)
    except MlpipeError as error:
        return f"its driver cannot be looked for: {error.message}"


def _rendered(session: Session, asked: Asked, store_url: str, run_id: str) -> dict[str, list[dict[str, Any]]]:
    """All that will be sent, before anything is: raises PlanError or RenderError for what cannot run."""
    from mlpipe.cli.render import render, tell

    files, findings = render(asked.pipeline, store_url, run_id, asked.stage, asked.seal.digests())
    tell(session, findings, asked.spec)
    return files


def _connect(pipeline: Pipeline, context: str | None) -> ClusterApi:
    from mlpipe.submit.kubernetes.api import connect

    return connect(context, pipeline.kubernetes.namespace if pipeline.kubernetes else None)


def _start_driver(store: Store, api: ClusterApi, run_id: str, pipeline: Pipeline, only: str | None) -> None:
    from mlpipe.plan.ahead import plan_ahead
    from mlpipe.store import runs
    from mlpipe.submit import seal
    from mlpipe.submit.kubernetes import driver_job

    plan = plan_ahead(pipeline, pipeline.stages[0].name, store.url, run_id, cluster=True)
    run = runs.read_run(store, run_id)
    digests = seal.vouched(store, run, pipeline).digests()
    driver_job.start_driver(api, store, run, plan, only=only, seal=digests)


def _follow(
    session: Session,
    store: Store,
    api: ClusterApi,
    run_id: str,
    only: str | None,
    start_driver: Callable[[], None],
) -> int:
    """While the run has no driver, says why its pod does not run."""
    from mlpipe.submit.kubernetes.driver_job import driver_is_alive, why_undriven

    looked = driverless = 0.0
    said = ""

    def is_driven(_: RunState) -> bool:
        nonlocal looked, driverless, said
        now = time.monotonic()
        if now - looked < _LOOK_SECONDS:
            return True
        driverless = now if now - looked > 3 * _LOOK_SECONDS else driverless
        looked = now
        if not driver_is_alive(api, run_id, only):
            return False
        reason = why_undriven(api, run_id)
        if reason and reason != said:
            session.note(reason)
            said = reason
        if now - driverless > _DRIVER_SECONDS:
            raise SubmitError(
                f"the driver of run {run_id} did not start within {_DRIVER_SECONDS:.0f} s: {reason}",
                hint=f"it starts when it can; give it up with mlpipe cancel {run_id}",
            )
        return True

    return follow(session, store, run_id, only, start_driver, is_driven)
