"""All of a gang or nothing, where nobody else sees to it: without Kueue or Volcano pods are placed one by
one, and two gangs that would each fit alone may hold half of the nodes each, for ever.

A gang of which some pods have nodes and others find none is half-placed, and gives its nodes back (it is
suspended, as a queue would) for an older one that is; this is wait-die (Rosenkrantz, Stearns and Lewis 1978):
of all that are half-placed in a namespace the oldest stays, so somebody always gets on, and since a gang
keeps its age, it is the oldest some day. What holds the other nodes may be out of sight (another namespace,
pods of others): then a half-placed gang gives up after a time that is drawn anew each time, so that of two
that wait for each other one gives up first, and the other has its nodes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlpipe.plan.plan import Plan
from mlpipe.render.names import ATTEMPT, PREFIX, QUEUE, REPLICA, RUN, STAGE
from mlpipe.submit.kubernetes.api import ApiError, ClusterApi, Object
from mlpipe.submit.kubernetes.objects import GANGS, finished

YIELDED = f"{PREFIX}/yielded"  # annotation of a gang: how often it gave its nodes back
SETTLE_SECONDS = 60.0  # a scheduler, or an autoscaler's next node, may be about to place the rest
PATIENCE_SECONDS = 600.0  # without anybody older in sight: so many, and up to as many again
# Of a pod that has nothing to save: torchrun meets SIGTERM only after the others. A kubelet that has begun to
# end it keeps the time that it was told first (its SyncTerminatingPod, kubernetes/kubernetes#113606).
GRACE_SECONDS = 10
_LOOK_SECONDS = 10.0  # between two looks at the others
_GANG = (RUN, STAGE, ATTEMPT)


@dataclass(frozen=True)
class Standing:
    """How a gang stands. `age`: the smaller, the older; no two are equal."""

    age: tuple[str, str]
    wanted: int
    bound: int
    unschedulable: int

    @property
    def is_half(self) -> bool:
        return 0 < self.bound < self.wanted and self.unschedulable > 0


def must_yield(own: Standing, others: Iterable[Standing], seconds: float, patience: float) -> bool:
    """`seconds`: how long it has been half-placed."""
    if not own.is_half or seconds < SETTLE_SECONDS:
        return False
    return seconds >= patience or has_older(own, others)


def has_older(own: Standing, others: Iterable[Standing]) -> bool:
    """Whether an older one is half-placed."""
    return any(other.is_half and other.age < own.age for other in others)


def standing(gang: Object, pods: Sequence[Object]) -> Standing:
    """Of the gang whose pods these are."""
    metadata = gang["metadata"]
    bound = sum(bool(pod.get("spec", {}).get("nodeName")) for pod in pods)
    age = (metadata.get("creationTimestamp", ""), metadata.get("uid", ""))
    return Standing(age, num_pods(gang), bound, sum(map(_is_unschedulable, pods)))


def num_pods(gang: Object) -> int:
    """Of the whole gang."""
    spec = gang["spec"]
    if "trainer" in spec:  # of a TrainJob
        return int(spec["trainer"].get("numNodes") or 1)
    if "replicatedJobs" in spec:  # of a JobSet
        return sum(int(job["template"]["spec"].get("completions") or 1) for job in spec["replicatedJobs"])
    return int(spec.get("completions") or 1)


def _is_unschedulable(pod: Object) -> bool:
    return any(
        condition["type"] == "PodScheduled"
        and condition["status"] == "False"
        and condition.get("reason") == "Unschedulable"
        for condition in pod.get("status", {}).get("conditions", [])
    )


class WholePlacement:
    """Of one gang that its driver follows. What it has done stands in the object, so that the next driver
    goes on with it."""

    def __init__(self, api: ClusterApi, jitter: random.Random | None = None) -> None:
        self._api = api
        self._random = jitter or random.Random()
        self._half_since: float | None = None
        self._patience = 0.0
        self._returns: float | None = None  # not before
        self._looked = 0.0

    @staticmethod
    def is_for(plan: Plan) -> bool:
        """Whoever has a queue is placed by that; the replicas of an elastic training come one by one."""
        cluster = plan.cluster
        queued = cluster is None or cluster.queue is not None or cluster.volcano_queue is not None
        return plan.launch.num_nodes > 1 and plan.launch.replicas is None and not queued

    def look(self, gang: Object, pods: Sequence[Object], now: float) -> str:
        """Gives the nodes back, or takes the gang up again; what to say of it, "" while there is nothing.
        `now`: seconds of a clock that only moves on. Raises SubmitError."""
        if finished(gang) is not None:
            return ""
        times = int(gang["metadata"].get("annotations", {}).get(YIELDED, "0"))
        if gang["spec"].get("suspend"):
            return self._wait(gang, pods, now) if times else ""
        own = standing(gang, pods)
        if not own.is_half:
            self._half_since = None
            return ""
        if self._half_since is None:
            self._half_since, self._patience = now, self._random.uniform(1, 2) * PATIENCE_SECONDS
        words = f"{own.bound} of its {own.wanted} pods have nodes"
        if now - self._looked < _LOOK_SECONDS:
            return ""
        self._looked = now
        if not must_yield(own, self._others(gang), now - self._half_since, self._patience):
            return ""
        try:
            self._patch(gang, {"suspend": True}, times + 1)
        except ApiError as error:
            if error.status != 403:
                raise
            return f"{words}, and its driver may not give them back for others: apply k8s/base anew"
        self._half_since = None
        self._returns = now + self._random.uniform(1, 2) * SETTLE_SECONDS
        return f"{words}: it gives them back for others"

    def _wait(self, gang: Object, pods: Sequence[Object], now: float) -> str:
        """Until its pods are gone, a while is over and no older gang is half-placed."""
        if self._returns is None:  # another driver's
            self._returns = now + self._random.uniform(1, 2) * SETTLE_SECONDS
        words = "it has given its nodes back, since others could not be placed beside it"
        for pod in pods:  # not before its controller ends it: that would count as a failure
            if pod["metadata"].get("deletionGracePeriodSeconds", 0) > GRACE_SECONDS:
                self._api.delete("Pod", pod["metadata"]["name"], grace_seconds=GRACE_SECONDS)
        if pods or now < self._returns or now - self._looked < _LOOK_SECONDS:
            return words
        self._looked = now
        if has_older(standing(gang, pods), self._others(gang)):
            return words
        self._returns = None
        self._patch(gang, {"suspend": False})
        return ""

    def _patch(self, gang: Object, spec: dict[str, Any], times: int | None = None) -> None:
        body: Object = {"spec": spec}
        if times is not None:
            body["metadata"] = {"annotations": {YIELDED: str(times)}}
        self._api.patch(gang["kind"], gang["metadata"]["name"], body)

    def _others(self, own: Object) -> list[Standing]:
        """Gangs of the namespace that nobody else places; a Job that fetches images is of no attempt, and
        needs no pods at once."""
        gangs = [
            gang
            for kind in GANGS
            for gang in self._list(kind)
            if gang["metadata"]["uid"] != own["metadata"]["uid"]
            and {QUEUE, REPLICA, ATTEMPT} & gang["metadata"]["labels"].keys() == {ATTEMPT}
            and not any(one.get("controller") for one in gang["metadata"].get("ownerReferences", []))
            and num_pods(gang) > 1
        ]
        if not gangs:
            return []
        pods: dict[tuple[str, ...], list[Object]] = {}
        for pod in self._api.list("Pod", {"app.kubernetes.io/component": "worker"}):
            pods.setdefault(_key(pod), []).append(pod)
        return [standing(gang, pods.get(_key(gang), [])) for gang in gangs]

    def _list(self, kind: str) -> list[Object]:
        try:
            found = self._api.list(kind, {"app.kubernetes.io/component": "worker"})
        except ApiError as error:
            if error.status in (403, 404):  # nothing of that kind is there, or may be seen
                return []
            raise
        return [{**gang, "kind": kind} for gang in found]  # items of a list do not say it


def _key(one: Object) -> tuple[str, ...]:
    return tuple(one["metadata"]["labels"].get(label, "") for label in _GANG)
