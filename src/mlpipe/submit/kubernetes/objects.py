"""A run's objects in a cluster: created all or none, found again by their labels, ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from mlpipe._core.errors import SubmitError
from mlpipe.render import names
from mlpipe.render.pod import escaped
from mlpipe.store.open import one_spelling
from mlpipe.submit.kubernetes.api import (
    NO_KUEUE,
    ApiError,
    ClusterApi,
    Object,
    is_away,
    is_same,
)
from mlpipe.submit.kubernetes.multikueue import is_ready, is_sent, known_workers, lacking, refuse_what_stays
from mlpipe.submit.kubernetes.pending import remedy

GANGS = ("TrainJob", "JobSet", "Job")  # who makes another stands before it
_POLL_SECONDS = 1.0
_WORKERS_SECONDS = 15.0  # for all worker clusters together to be asked: one may be slow to find, too


def create_all(api: ClusterApi, objects: list[Object], made: list[Object] | None = None) -> None:
    """All or nothing, unless the server is away meanwhile (`is_away`): then call it again, with the same
    list `made`, empty at first. What belongs to the gang goes with it when that is deleted."""
    made = [] if made is None else made  # or perhaps made: its answer was lost
    there = []
    try:
        for body in objects:
            try:
                made_object, new = api.create_or_adopt(body)
            except SubmitError as error:
                made += [body] if is_away(error) else []
                raise
            made += [body] if new else []
            there.append(made_object)
        owner = next((one for one in there if one["kind"] in GANGS), None)
        if owner is None:
            return
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
        for one in there:
            metadata = one["metadata"]
            if one is not owner and reference not in metadata.get("ownerReferences", []):
                api.patch(one["kind"], metadata["name"], {"metadata": {"ownerReferences": [reference]}})
    except SubmitError as error:
        if not is_away(error):
            with contextlib.suppress(SubmitError):  # what went wrong first is what is told
                remove_all(api, made)
        raise


def remove_all(api: ClusterApi, objects: list[Object]) -> None:
    """Those that are there and the very same."""
    for body in reversed(objects):
        kind, name = body["kind"], body["metadata"]["name"]
        existing = api.get(kind, name)
        if existing is not None and is_same(existing, body):
            api.delete(kind, name, uid=existing["metadata"]["uid"])


def check_queue(api: ClusterApi, objects: list[Object]) -> None:
    """Raises SubmitError (input) for a gang in a queue where there is no Kueue: it would wait for ever."""
    queues = [
        body["metadata"]["labels"][names.QUEUE]
        for body in objects
        if names.QUEUE in body["metadata"]["labels"]
    ]
    if queues and api.kueue_version() is None:
        message, hint = NO_KUEUE
        raise SubmitError(f"kubernetes.queue is {queues[0]}, and {message}", hint=hint, kind="input")


def server_dry_run(
    api: ClusterApi, objects: list[Object], note: Callable[[str], None] = lambda text: None
) -> None:
    """A dry run on the server, of the objects and of the Jobs and pods that the cluster will make of them: it
    looks at those when it is too late to say so, and JobSet tells its log alone. Raises ApiError for what is
    refused, before anything is written down anywhere. None is that a name is taken (see `create_or_adopt`), a
    webhook that has no dry run, that who submits may not create pods, or that there is no room for a stage
    yet. `note` is told of clusters that were not reached."""
    check_queue(api, objects)
    may_create_pods, sent = True, []
    for body in objects:
        stage = _stage(body)
        is_of_stage = body["metadata"]["labels"].get("app.kubernetes.io/component") == "worker"
        for one in (body, *(made_of(body) if body["kind"] in GANGS else [])):
            if one["kind"] == "Pod" and not may_create_pods:
                continue
            try:
                if is_sent(api.create(one, dry_run=True)) and one is body:
                    stays = [
                        other for other in objects if _stage(other) == stage and other["kind"] not in GANGS
                    ]
                    refuse_what_stays(body, stays)
                    sent.append(body)
            except ApiError as error:
                if error.status == 409 or "does not support dry run" in error.message:
                    continue
                if one["kind"] == "Pod" and error.status == 403 and " cannot create " in error.message:
                    may_create_pods = False
                elif not (is_of_stage and "exceeded quota" in error.message):
                    error.where = f"stage {stage!r}" if is_of_stage else error.where
                    error.hint = remedy(error.message) or error.hint
                    raise

    if sent:
        _dry_run_there(api, sent, note)


def _dry_run_there(api: ClusterApi, sent: list[Object], note: Callable[[str], None]) -> None:
    """Gangs of a queue that MultiKueue sends elsewhere, in each of those clusters that can be asked, all at
    once: any may be chosen, and nobody here would see why pods there do not start."""
    pods = [one["spec"] for gang in sent for one in made_of(gang) if one["kind"] == "Pod"]
    queue = sent[0]["metadata"]["labels"][names.QUEUE]
    workers = known_workers(api, queue)
    answers: dict[str, Exception | None] = {}

    def ask(name: str, there: ClusterApi) -> None:
        try:
            server_dry_run(there, sent)
            if absent := lacking(there, pods, queue):
                raise SubmitError(
                    f"MultiKueue may send it to cluster {name}, which lacks {', '.join(absent)}",
                    where=f"namespace {there.namespace}",
                    hint="make them there, under the same names as here",
                    kind="input",
                )
            answers[name] = None
        except ApiError as error:
            error.where = f"cluster {name}"
            answers[name] = error
        except SubmitError as error:
            error.where = error.where or f"cluster {name}"
            answers[name] = error
        except Exception as error:  # a bug, which is told as one
            answers[name] = error

    threads = [threading.Thread(target=ask, args=one, daemon=True) for one in workers.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _WORKERS_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    said, late = dict(answers), SubmitError(f"no answer within {_WORKERS_SECONDS:.0f} s")
    for name in workers:
        refusal = said.get(name, late)
        away = isinstance(refusal, ApiError) and (is_away(refusal) or refusal.status <= 0)
        if isinstance(refusal, SubmitError) and (away or refusal is late):
            note(f"MultiKueue's cluster {name} was not asked what it would refuse: {refusal.message}")
        elif isinstance(refusal, ApiError) and refusal.status == 403 and " cannot " in refusal.message:
            continue  # MultiKueue may do there what we may not: it has credentials of its own
        elif refusal is not None:
            raise refusal


def _stage(body: Object) -> str | None:
    """Of the very pipeline's, as a label; of the driver, None, but where a stage was submitted alone."""
    labels: dict[str, str] = body["metadata"]["labels"]
    return labels.get(names.STAGE)


def made_of(gang: Object) -> list[Object]:
    """The JobSet's Jobs, and a pod of each; what becomes of a TrainJob only its runtime knows."""
    if gang["kind"] == "TrainJob":
        return []
    templates = (
        [one["template"] for one in gang["spec"]["replicatedJobs"]] if gang["kind"] == "JobSet" else [gang]
    )
    return [one for number, template in enumerate(templates) for one in _made_of(gang, number, template)]


def _made_of(gang: Object, number: int, template: Object) -> list[Object]:
    name, job, made = f"{gang['metadata']['name'][:50]}-{number}", gang, []
    if gang["kind"] == "JobSet":
        # what stands in a queue is the JobSet
        owner = {key: gang[key] for key in ("apiVersion", "kind")}
        owner |= {"name": gang["metadata"]["name"], "uid": "dry-run"}
        metadata = {**template["metadata"], "name": name, "ownerReferences": [owner]}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": template["spec"]}
        made = [job]
    pod = job["spec"]["template"]
    metadata = {**pod["metadata"], "name": name}
    return [*made, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}]


def finished(gang: Object) -> str | None:
    """ "Complete" or "Failed", of a gang (a JobSet says "Completed"); None while it is under way."""
    for condition in gang.get("status", {}).get("conditions", []):
        if condition["status"] == "True" and condition["type"] in ("Complete", "Completed", "Failed"):
            return "Failed" if condition["type"] == "Failed" else "Complete"
    return None


def selector(run_id: str, stage: str | None = None, attempt: int | None = None) -> dict[str, str]:
    """Of all objects and pods of a run, of a stage, of an attempt."""
    labels = {names.RUN: names.label_value(run_id)}
    if stage is not None:
        labels[names.STAGE] = names.label_value(stage)
    if attempt is not None:
        labels[names.ATTEMPT] = str(attempt)
    return labels


def driver_labels(run_id: str) -> dict[str, str]:
    """That select the drivers of a run, and nothing else of it."""
    return {**selector(run_id), "app.kubernetes.io/component": "driver"}


def is_anothers(api: ClusterApi, run_id: str, store_url: str) -> bool:
    """Whether a run of another store goes on in the namespace under the same id: all that there is under it
    is then that run's."""
    for job in api.list("Job", driver_labels(run_id)):
        args = job["spec"]["template"]["spec"]["containers"][0].get("args", [])
        theirs = args[args.index("--store") + 1] if "--store" in args[:-1] else store_url
        ours = (one_spelling(store_url), one_spelling(escaped(store_url)))
        if finished(job) is None and one_spelling(theirs) not in ours:
            return True
    return False


def clear(
    api: ClusterApi, run_id: str, *, timeout_seconds: float, have_said: Callable[[], bool] = lambda: True
) -> None:
    """Ends all that a run has in the cluster, its driver first, and waits until its pods are gone: they save
    before. Those in another cluster are not seen: `have_said` tells whether they are over. Raises SubmitError
    when `timeout_seconds` are over, after killing what is left."""
    wanted = selector(run_id)
    for gang in api.list("Job", driver_labels(run_id)):
        api.delete("Job", gang["metadata"]["name"])
    elsewhere = 0.0  # seconds
    for kind in GANGS:
        for gang in _list(api, kind, wanted):
            if is_sent(gang) and is_ready(gang) and finished(gang) is None:
                elsewhere = max(elsewhere, *_grace_seconds({"apiVersion": "", **gang, "kind": kind}))
            if not any(owner.get("controller") for owner in gang["metadata"].get("ownerReferences", [])):
                api.delete(kind, gang["metadata"]["name"])  # with what it made
    began = time.monotonic()
    deadline, killed = began + timeout_seconds, began + elsewhere
    while (pods := api.list("Pod", wanted)) or (time.monotonic() < killed and not have_said()):
        if time.monotonic() > deadline:
            for pod in pods:
                api.delete("Pod", pod["metadata"]["name"], grace_seconds=0)
            words = f"{len(pods)} pods of run {run_id} were killed" if pods else f"run {run_id} is elsewhere"
            raise SubmitError(
                f"{words}: no end within {timeout_seconds:.0f} s", where=f"namespace {api.namespace}"
            )
        time.sleep(_POLL_SECONDS)


def _grace_seconds(gang: Object) -> list[float]:
    return [one["spec"]["terminationGracePeriodSeconds"] for one in made_of(gang) if one["kind"] == "Pod"]


def _list(api: ClusterApi, kind: str, wanted: Mapping[str, str]) -> list[Object]:
    try:
        return api.list(kind, wanted)
    except ApiError as error:
        if error.status == 404:  # a cluster without JobSet
            return []
        raise
