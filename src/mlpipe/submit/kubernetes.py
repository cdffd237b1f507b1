"""The backend `kubernetes`: a stage is a JobSet or a Job with its ConfigMap; the driver is a small Job.

What is created has names that follow from run, stage and attempt, so that whoever comes again (a restarted
driver, a second submit) adopts what is there. What became of a stage is read from its objects' status and
from the outcomes that its launchers left in the store, never from the end of a stream.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mlpipe._core.errors import SubmitError
from mlpipe.plan.plan import Plan
from mlpipe.render import names
from mlpipe.render.kubernetes import stage_objects
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit.cluster_api import (
    NO_KUEUE,
    ApiError,
    ClusterApi,
    Object,
    connect,
    is_away,
    is_same,
)
from mlpipe.submit.handle import ThreadedHandle, ended_by, read_outcome
from mlpipe.submit.pending import remedy, why_pending
from mlpipe.submit.postmortem import Postmortem, fate, last_words
from mlpipe.submit.walk import Ended, Room
from mlpipe.submit.watch import Watched

_POLL_SECONDS = 1.0
_NOTE_SECONDS = 3.0  # between two looks for what a stage waits for, when there is news of its pods
_NOTE_AGAIN_SECONDS = 20.0  # when there is none: quotas and queues change without
_AWAY_SECONDS = 1800.0  # an API server may be away for this long; pods go on without it
_LOST_SECONDS = 60.0  # after a lost node's pod was deleted, its gang is given up
_GANGS = ("JobSet", "Job")


class KubernetesBackend:
    """Starts stages in the namespace of `api`. They go on when the driver dies."""

    outlives_driver = True

    def __init__(self, store: Store, api: ClusterApi) -> None:
        self._store = store
        self._api = api

    def room(self) -> Room:
        """The cluster's scheduler knows better."""
        return Room(cpus=2**31, gpus=2**31)

    def check(self, plan: Plan) -> None:
        """Raises RenderError for what can never run on a cluster."""
        stage_objects(plan)

    def start(self, plan: Plan, scratch: Path) -> Gang:
        return Gang(self._store, self._api, plan)


class Gang(ThreadedHandle):
    """The pods of one attempt of one stage, created or adopted."""

    def __init__(self, store: Store, api: ClusterApi, plan: Plan) -> None:
        super().__init__(store, plan)
        self._api = api
        self._objects = stage_objects(plan)
        gang = next(found for found in self._objects if found["kind"] in _GANGS)
        self._kind, self._name = gang["kind"], gang["metadata"]["name"]
        self._labels = selector(plan.run_id, plan.stage, plan.attempt)
        self._killing = False
        self._note = ""
        self._postmortem = Postmortem(store, api, plan.attempt_key, self._name)
        self._thread.start()

    def note(self) -> str:
        return self._note

    def kill(self) -> None:
        super().kill()
        self._killing = True

    def _work(self) -> Ended:
        if not self._create():
            return Ended("cancelled", "stopped before its pods were created")
        changed = threading.Event()
        gangs, pods = (Watched(self._api, kind, self._labels, changed) for kind in (self._kind, "Pod"))
        try:
            return self._follow_objects(gangs, pods, changed)
        finally:
            gangs.close()
            pods.close()

    def _create(self) -> bool:
        """Waits for an API server that is away. False: the stage was asked to stop meanwhile, and nothing of
        it is left."""
        began = time.monotonic()
        made: list[Object] = []
        while True:
            try:
                if made and self._stopping:
                    remove_all(self._api, self._objects)
                    return False
                create_all(self._api, self._objects, made)
                self._note = ""
                return True
            except SubmitError as error:
                if not is_away(error) or time.monotonic() - began > _AWAY_SECONDS:
                    raise
                self._note = error.message
                time.sleep(_POLL_SECONDS)

    def _follow_objects(self, gangs: Watched, watched_pods: Watched, changed: threading.Event) -> Ended:
        asked = killed = False
        ended: Ended | None = None
        news = True
        answered = noted = time.monotonic()
        while True:
            news = changed.wait(_POLL_SECONDS) or news
            changed.clear()
            now = time.monotonic()
            found, pods = gangs.objects(), watched_pods.objects()
            try:
                if error := gangs.error or watched_pods.error:
                    raise error
                if found is None or pods is None:
                    continue
                gang = next((one for one in found if one["metadata"]["name"] == self._name), None)
                if gang is None and not pods:
                    return ended or self._result_of_gone()
                state = finished(gang) if gang else None
                if state is not None and ended is None:
                    ended = self._result(state)
                # of a gang that is deleted one pod's end is not yet the others'
                if ended is not None and (not asked or not pods):
                    return ended
                if self._stopping and not asked:
                    self._api.delete(self._kind, self._name)
                    asked = True
                if self._killing and not killed:
                    for pod in pods:
                        self._api.delete("Pod", pod["metadata"]["name"], grace_seconds=0)
                    killed = True
                if (words := lost_for_good(pods, time.time())) is not None and not self._stopping:
                    self._postmortem.look(pods, at_the_end=True)
                    self._api.delete(self._kind, self._name)
                    return Ended("failed", words, kind="infrastructure", lost=True)
                self._postmortem.look(pods)
                if now - noted > (_NOTE_SECONDS if news else _NOTE_AGAIN_SECONDS):
                    self._note = self._why_pending(pods) or self._restarted(gang)
                    noted, news = now, False
                answered = now
            except SubmitError as error:
                if not is_away(error) or now - answered > _AWAY_SECONDS:
                    raise
                self._note = error.message

    def _why_pending(self, pods: list[Object]) -> str:
        if self._stopping:
            return ""
        return why_pending(self._api, self._labels, self._plan.launch.num_nodes, pods)

    def _restarted(self, gang: Object | None) -> str:
        status = gang.get("status", {}) if gang else {}
        times = status.get("restarts") or status.get("failed") or 0  # of a JobSet, pods of a Job
        if not times or self._stopping:
            return ""
        words = "restarted once" if times == 1 else f"restarted {times} times"
        return f"{words}; {self._postmortem.last}" if self._postmortem.last else words

    def _outcomes(self) -> list[dict[str, Any]]:
        """Of all nodes' launchers, as far as they left any."""
        key = self._plan.attempt_key
        names = ["outcome.json"]
        names += [f"outcome-node-{index}.json" for index in range(1, self._plan.launch.num_nodes)]
        found = (read_outcome(self._store, f"{key}/{name}") for name in names)
        return [outcome for outcome in found if outcome is not None]

    def _result(self, state: str) -> Ended:
        outcomes = self._outcomes()
        if state == "Complete":
            done = [outcome for outcome in outcomes if outcome["outcome"] == "done"]
            if done:
                return ended_by(done[0])
            return Ended("failed", f"{self._kind} {self._name} is complete, but left no outcome", kind="bug")
        pods = self._api.list("Pod", self._labels)  # as of now: a watch may be a moment late
        self._postmortem.look(pods, at_the_end=True)
        blamed = [found for found in outcomes if found["kind"] not in (None, "infrastructure", "cancelled")]
        if blamed:
            # of ranks that hang, one that waited for the others knows least
            return ended_by(min(blamed, key=lambda outcome: ("waiting" in outcome, outcome["time"])))
        if (befell := fate(pods)) is not None:
            return befell
        failed = [outcome for outcome in outcomes if outcome["outcome"] == "failed"]
        if failed:
            return ended_by(min(failed, key=lambda outcome: outcome["time"]))
        if outcomes:
            return ended_by(outcomes[0])
        words = last_words(pods) or self._postmortem.last or "left no word"
        return Ended("failed", f"{self._kind} {self._name} failed: {words}", kind="infrastructure")

    def _result_of_gone(self) -> Ended:
        outcomes = self._outcomes()
        ended = ended_by(outcomes[0]) if outcomes else None
        if ended is not None and ended.state in ("done", "cancelled"):
            return ended
        if self._stopping:
            return Ended("cancelled", "stopped before a checkpoint could be saved")
        return Ended(
            "failed", f"somebody deleted {self._kind} {self._name} while it ran", kind="infrastructure"
        )


def lost_for_good(pods: list[Object], now: float) -> str | None:
    """A pod of a lost node stays Terminating, so neither Job nor JobSet replaces it. Known by its conditions:
    it was not ready any more when the taint of its node had it deleted, and that is long ago (`now`: Unix
    seconds). A pod that a person's taint evicts is ready until it has saved."""
    for pod in pods:
        conditions = {found["type"]: found for found in pod.get("status", {}).get("conditions", [])}
        ready, disruption = conditions.get("Ready"), conditions.get("DisruptionTarget")
        if "deletionTimestamp" not in pod["metadata"] or ready is None or disruption is None:
            continue
        if disruption.get("reason") != "DeletionByTaintManager" or ready["status"] == "True":
            continue
        since = _unix(disruption["lastTransitionTime"])
        if _unix(ready["lastTransitionTime"]) <= since and now - since > _LOST_SECONDS:
            node = pod.get("spec", {}).get("nodeName", "its node")
            return f"{node} was lost with pod {pod['metadata']['name']}"
    return None


def _unix(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def create_all(api: ClusterApi, objects: list[Object], made: list[Object] | None = None) -> None:
    """All or nothing, unless the server is away meanwhile (`is_away`): then call it again, with the same
    list `made`, empty at first. What belongs to the Job or JobSet goes with it when that is deleted."""
    made = [] if made is None else made  # or perhaps made: its answer was lost
    there = []
    try:
        for body in objects:
            try:
                found, new = api.create_or_adopt(body)
            except SubmitError as error:
                made += [body] if is_away(error) else []
                raise
            made += [body] if new else []
            there.append(found)
        owner = next((found for found in there if found["kind"] in _GANGS), None)
        if owner is None:
            return
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
        for found in there:
            metadata = found["metadata"]
            if found is not owner and reference not in metadata.get("ownerReferences", []):
                api.patch(found["kind"], metadata["name"], {"metadata": {"ownerReferences": [reference]}})
    except SubmitError as error:
        if not is_away(error):
            with contextlib.suppress(SubmitError):  # what went wrong first is what is told
                remove_all(api, made)
        raise


def remove_all(api: ClusterApi, objects: list[Object]) -> None:
    """Those that are there and the very same."""
    for body in reversed(objects):
        kind, name = body["kind"], body["metadata"]["name"]
        found = api.get(kind, name)
        if found is not None and is_same(found, body):
            api.delete(kind, name, uid=found["metadata"]["uid"])


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


def would_take(api: ClusterApi, objects: list[Object]) -> None:
    """A dry run on the server, of the objects and of the pods that the cluster will make of them: admission
    looks at those when it is too late to say so. Raises ApiError for what is refused, before anything is
    written down anywhere. None is that a name is taken (see `create_or_adopt`), a webhook that has no dry
    run, that who submits may not create pods, or that there is no room for a stage yet."""
    check_queue(api, objects)
    may_create_pods = True
    for body in objects:
        stage = body["metadata"]["labels"].get(names.STAGE)
        is_of_stage = body["metadata"]["labels"].get("app.kubernetes.io/component") == "worker"
        for one in (body, *([_pod_of(body)] if body["kind"] in _GANGS and may_create_pods else [])):
            try:
                api.create(one, dry_run=True)
            except ApiError as error:
                if error.status == 409 or "does not support dry run" in error.message:
                    continue
                if one["kind"] == "Pod" and error.status == 403 and " cannot create " in error.message:
                    may_create_pods = False
                elif not (is_of_stage and "exceeded quota" in error.message):
                    error.where = f"stage {stage!r}" if is_of_stage else error.where
                    error.hint = remedy(error.message) or error.hint
                    raise


def _pod_of(gang: Object) -> Object:
    """What the Job, or the JobSet's one, makes."""
    spec = gang["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if gang["kind"] == "JobSet" else spec
    metadata = {**job["template"]["metadata"], "name": f"{gang['metadata']['name'][:50]}-0"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": job["template"]["spec"]}


def finished(found: Object) -> str | None:
    """ "Complete" or "Failed", of a Job or a JobSet (which says "Completed"); None while it is under way."""
    for condition in found.get("status", {}).get("conditions", []):
        if condition["status"] == "True" and condition["type"] in ("Complete", "Completed", "Failed"):
            return "Failed" if condition["type"] == "Failed" else "Complete"
    return None


def selector(run_id: str, stage: str | None = None, attempt: int | None = None) -> dict[str, str]:
    """Of all objects and pods of a run, of a stage, of an attempt."""
    found = {names.RUN: names.label_value(run_id)}
    if stage is not None:
        found[names.STAGE] = names.label_value(stage)
    if attempt is not None:
        found[names.ATTEMPT] = str(attempt)
    return found


def driver_labels(run_id: str) -> dict[str, str]:
    return {**selector(run_id), "app.kubernetes.io/component": "driver"}


def client_of(run: RunState) -> ClusterApi:
    """To the cluster that the run was submitted to, as it was reached then."""
    place = run.meta.get("kubernetes") or {}
    return connect(place.get("context"), place.get("namespace"))


def clear(api: ClusterApi, run_id: str, *, timeout_seconds: float) -> None:
    """Ends all that a run has in the cluster, its driver first, and waits until its pods are gone: they save
    before. Raises SubmitError when `timeout_seconds` are over, after killing what is left."""
    wanted = selector(run_id)
    for found in api.list("Job", driver_labels(run_id)):
        api.delete("Job", found["metadata"]["name"])
    for kind in _GANGS:
        for found in _list(api, kind, wanted):
            api.delete(kind, found["metadata"]["name"])
    deadline = time.monotonic() + timeout_seconds
    while pods := api.list("Pod", wanted):
        if time.monotonic() > deadline:
            for pod in pods:
                api.delete("Pod", pod["metadata"]["name"], grace_seconds=0)
            raise SubmitError(
                f"{len(pods)} pods of run {run_id} were killed: no end within {timeout_seconds:.0f} s",
                where=f"namespace {api.namespace}",
            )
        time.sleep(_POLL_SECONDS)


def _list(api: ClusterApi, kind: str, wanted: Mapping[str, str]) -> list[Object]:
    try:
        return api.list(kind, wanted)
    except ApiError as error:
        if error.status == 404:  # a cluster without JobSet
            return []
        raise
