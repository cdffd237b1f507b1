"""The driver's Job on a cluster: started, looked at, waited for, given up."""

from __future__ import annotations

import contextlib
import os
import time

from mlpipe._core import environment
from mlpipe._core.errors import SubmitError
from mlpipe.plan.ahead import plan_ahead
from mlpipe.render import names
from mlpipe.render.kubernetes import driver_objects
from mlpipe.render.prepull import prepull_objects
from mlpipe.spec.model import Pipeline
from mlpipe.store.base import Store
from mlpipe.store.runs import RUN_ENDED, RunState, read_run
from mlpipe.submit.kubernetes.api import ClusterApi, connect
from mlpipe.submit.kubernetes.manifests import waiting
from mlpipe.submit.kubernetes.objects import create_all, driver_labels, finished
from mlpipe.submit.kubernetes.pending import why_pending
from mlpipe.submit.kubernetes.postmortem import last_words

_POLL_SECONDS = 1.0
_ENDS_SECONDS = 60.0  # from the end of its run: a report to write, a pod to be seen as ended


def start_driver(
    api: ClusterApi, store: Store, run: RunState, pipeline: Pipeline, *, only: str | None, seal: str
) -> None:
    """The driver's Job, or the one that is there already. One that has ended makes room for a new one.
    `seal`: what it is to drive (`Seal.digests`)."""
    plan = plan_ahead(pipeline, pipeline.stages[0].name, store.url, run.run_id, cluster=True)
    if plan.cluster is None:
        raise SubmitError("the pipeline names no image", hint="write `image:`", kind="input")
    objects = driver_objects(
        run.run_id, store.url, plan.cluster, stage=only, spec_digest=run.spec_digest, seal=seal
    )
    for body in objects:
        former = api.get(body["kind"], body["metadata"]["name"])
        if former is not None and finished(former) is not None:
            # not the one that somebody else has started meanwhile
            api.delete(body["kind"], body["metadata"]["name"], uid=former["metadata"]["uid"])
    if plan.cluster.prepull:
        _pull_ahead(api, store, run, pipeline, only)
    create_all(api, objects)


def _pull_ahead(api: ClusterApi, store: Store, run: RunState, pipeline: Pipeline, only: str | None) -> None:
    """Ends by itself, or with the run: who submits may not make the driver's Job its owner."""
    plans = [plan_ahead(pipeline, one.name, store.url, run.run_id, cluster=True) for one in pipeline.stages]
    for body in prepull_objects(plans, waiting(pipeline, only), run.spec_digest):
        api.create_or_adopt(body)


def driver_is_alive(api: ClusterApi, run_id: str, only: str | None) -> bool:
    """Whether the driver's Job is there and has not ended, though its pod may be between two starts."""
    job = api.get("Job", names.driver_name(run_id, only))
    return job is not None and finished(job) is None


def why_undriven(api: ClusterApi, run_id: str) -> str:
    """Of a run under way without a live driver: what has become of that, and the remedy; "" when it is just
    about to start."""
    labels = driver_labels(run_id)
    pods = sorted(api.list("Pod", labels), key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
    if all(finished(job) is not None for job in api.list("Job", labels)):
        words = last_words(pods[::-1])
        end = f"it ended for good: {words}" if words else "its Job is gone"
        return f"nobody drives it: {end}; go on with mlpipe resume {run_id}"
    current = [pod for pod in pods if pod.get("status", {}).get("phase") != "Failed"]
    if reason := why_pending(api, labels, pods=current):
        return f"its driver does not run: {reason}"
    words = last_words(pods[::-1])
    return f"its driver fails and is started again: {words}" if words else ""


def give_up_driver(run_id: str, only: str | None) -> None:
    """For a driver in its pod, which is about to fail of what no other driver can mend: its Job makes no
    other. Not by a podFailurePolicy: with that, the driver of a lost node would not be replaced."""
    if not os.environ.get(environment.POD_UID):
        return
    name = names.driver_name(run_id, only)
    with contextlib.suppress(SubmitError):  # then the Job tries again, and so do we
        api = connect()
        if (job := api.get("Job", name)) is not None:
            api.patch("Job", name, {"spec": {"backoffLimit": job.get("status", {}).get("failed", 0)}})


def pod_has_ended(api: ClusterApi, name: str, uid: str) -> bool:
    """Whether its node says so. One that is gone may have been deleted by force, and still run on a node that
    is cut off."""
    pod = api.get("Pod", name)
    if pod is None or pod["metadata"]["uid"] != uid:
        return False
    containers = pod.get("status", {}).get("containerStatuses", [])
    return bool(containers) and all(one.get("state", {}).get("terminated") for one in containers)


def await_end_of_driver(api: ClusterApi, store: Store, run_id: str, only: str | None) -> RunState:
    """The driver of a run that has ended is about to end, too: its Job must not be taken for a new one's. It
    is deleted where that takes long. Returns the run as it is then: perhaps somebody else resumed it."""
    deadline = time.monotonic() + _ENDS_SECONDS
    name = names.driver_name(run_id, only)
    while (run := read_run(store, run_id)).state in RUN_ENDED:
        job = api.get("Job", name)
        if job is None or finished(job) is not None:
            break
        if time.monotonic() > deadline:
            api.delete("Job", name, uid=job["metadata"]["uid"])
            break
        time.sleep(_POLL_SECONDS)
    return run
