"""An elastic training on a cluster: a Job for the coordinator and one for each replica, followed to the end.

Each look compares the Jobs that there are with how many replicas are wanted, and makes or deletes what
differs; nothing is remembered, so that a driver that takes over goes on. What befalls the pod of a replica is
its Job's to mend; only a node that is lost for good, whose pod stays, costs its Job, and another number takes
its place. One that is so slow that the others do better without costs its Job, too; the next one stays off
its node.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.plan.plan import Replicas
from mlpipe.render import names
from mlpipe.render.kubernetes import replica_object
from mlpipe.store import replicas
from mlpipe.store.outcome import AttemptOutcome
from mlpipe.submit import replica_outcomes
from mlpipe.submit.executor import Ended
from mlpipe.submit.kubernetes.api import Object, is_away
from mlpipe.submit.kubernetes.gang import Gang, lost_for_good
from mlpipe.submit.kubernetes.objects import create_all, finished
from mlpipe.submit.kubernetes.postmortem import last_words, termination_reason
from mlpipe.submit.kubernetes.watch import Watched
from mlpipe.submit.replica_outcomes import LeftOut

_POLL_SECONDS = 1.0
_LOOK_SECONDS = 3.0  # for how many replicas are wanted
_NOTE_SECONDS = 20.0
_AWAY_SECONDS = 1800.0
_OTHERS_SECONDS = 60.0  # when one replica has done the training, for the others to end


class ReplicaJobs(Gang):
    """The Jobs of one attempt, created or adopted."""

    def _follow_objects(self, gangs: Watched, watched_pods: Watched, changed: threading.Event) -> Ended:
        answered = time.monotonic()
        self._looked = self._noted = float("-inf")
        self._end: Ended | None = None
        self._deleted = self._killed = False
        self._left_out = LeftOut(self._store, self._plan.attempt_key, self._limits)
        while True:
            changed.wait(_POLL_SECONDS)
            changed.clear()
            jobs, pods = gangs.objects(), watched_pods.objects()
            try:
                if error := gangs.error or watched_pods.error:
                    raise error
                if jobs is None or pods is None:
                    continue
                ended = self._leave(jobs, pods) if self._stopping or self._end else self._tend(jobs, pods)
                if ended is not None:
                    return ended
                answered = time.monotonic()
            except (SubmitError, StoreError) as error:
                away = isinstance(error, StoreError) or is_away(error)
                if not away or time.monotonic() - answered > _AWAY_SECONDS:
                    raise
                self._note = error.message

    def _create(self) -> bool:
        """The coordinator. What there is of replicas is looked at before any is made."""
        self._objects = self._objects[:2]
        return super()._create()

    # -- while it trains ----------------------------------------------------------------------------

    def _tend(self, jobs: list[Object], pods: list[Object]) -> Ended | None:
        """One look. What it returns is the end, once nothing is left to be waited for."""
        self._postmortem.look(pods)
        coordinator = next((job for job in jobs if job["metadata"]["name"] == self._name), None)
        if coordinator is None:
            return self._gone()
        by_number = _numbered(jobs)
        # the coordinator's Job may be complete before those of the replicas that have done the training
        if any(finished(job) == "Complete" for job in (coordinator, *by_number.values())):
            self._end = replica_outcomes.done(self._outcomes().values())
            self._ends_at = time.monotonic() + _OTHERS_SECONDS
            return None
        failed = {number for number, job in by_number.items() if finished(job) == "Failed"}
        self._end = self._failure(failed, len(by_number) - len(failed), coordinator, pods)
        self._ends_at = time.monotonic()
        if self._end is None:
            self._give_up_lost(by_number, pods)
            self._scale(by_number, failed, pods)
            self._say(pods, coordinator, by_number, failed)
        return None

    def _failure(
        self, failed: set[int], num_alive: int, coordinator: Object, pods: list[Object]
    ) -> Ended | None:
        """Of the whole training: what the others would come to as well, or too few that go on."""
        if finished(coordinator) is not None:
            words = last_words(pods) or "its pod left no word"
            return Ended("failed", f"the coordinator of the replicas ended: {words}", kind="infrastructure")
        found = self._outcomes()
        known = [found[number] for number in failed & found.keys()]
        if not replica_outcomes.fatal(known) and (not failed or num_alive >= self._limits.fewest):
            return None
        self._postmortem.look(pods, at_the_end=True)
        if (ended := replica_outcomes.blame(known)) is not None:
            return ended
        words = f"{num_alive} replicas are left, {self._limits.fewest} have to be"
        reason = termination_reason(pods)
        why = reason.message if reason is not None else last_words(pods)
        return Ended("failed", f"{words}: {why}" if why else words, kind="infrastructure")

    def _give_up_lost(self, by_number: dict[int, Object], pods: list[Object]) -> None:
        """Its Job would wait for the pod on the lost node for ever, and hold its part of a queue's quota."""
        for number, job in list(by_number.items()):
            words = lost_for_good([pod for pod in pods if _number(pod) == number], time.time())
            if words is not None:
                self._postmortem.look(pods, at_the_end=True)
                self._api.delete("Job", job["metadata"]["name"], is_lost=True)
                del by_number[number]

    def _scale(self, by_number: dict[int, Object], failed: set[int], pods: list[Object]) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if self._slow_ones_leave(by_number, pods):
            return
        told = replicas.wanted(self._store, self._plan.attempt_key)
        wanted = replica_outcomes.num_wanted(self._limits, told, len(failed))
        staying = sorted(by_number.keys() - failed)
        for number in staying[wanted:]:
            self._api.delete("Job", by_number[number]["metadata"]["name"])
        taken = by_number.keys() | {_number(pod) for pod in pods}
        free = (number for number in range(self._limits.most + len(taken)) if number not in taken)
        missing = wanted - len(staying)
        new = [replica_object(self._plan, next(free), self._left_out.nodes) for _ in range(missing)]
        if new:
            create_all(self._api, [*self._objects, *new])

    def _slow_ones_leave(self, by_number: dict[int, Object], pods: list[Object]) -> bool:
        """Whether one does, whose number is free afterwards."""
        active = [pod for pod in pods if _is_active(pod) and _node(pod)]
        runs = [pod for pod in active if pod["status"].get("phase") == "Running"]
        nodes = {number: _node(pod) for pod in runs if (number := _number(pod)) in by_number}
        nodes = {number: node for number, node in nodes.items() if number is not None}
        if (number := self._left_out.look(nodes)) is not None:
            self._api.delete("Job", by_number.pop(number)["metadata"]["name"])
        others = [pod for pod in active if _number(pod) is not None and _number(pod) not in by_number]
        leaving = [pod for pod in others if _node(pod) in self._left_out.nodes]
        return any(lost_for_good([pod], time.time()) is None for pod in leaving)

    def _say(
        self, pods: list[Object], coordinator: Object, by_number: dict[int, Object], failed: set[int]
    ) -> None:
        if time.monotonic() - self._noted < _NOTE_SECONDS:
            return
        self._noted = time.monotonic()
        num_alive = len(by_number) - len(failed)
        active = [pod for pod in pods if _is_active(pod)]
        # one on a lost node stays
        num_leaving = sum("deletionTimestamp" in pod["metadata"] for pod in active)
        self._note = self._why_pending(active, 1 + num_alive + num_leaving)
        self._note = self._note or self._left_out.note()
        if coordinator["spec"].get("suspend") and all(_number(pod) is not None for pod in active):
            self._note = f"without their coordinator the replicas wait: {self._note}"
        if failed:
            names_of = ", ".join(map(str, sorted(failed)))
            self._note = f"replica {names_of} is given up, {num_alive} go on"

    # -- its end ------------------------------------------------------------------------------------

    def _leave(self, jobs: list[Object], pods: list[Object]) -> Ended | None:
        """Replicas first: they save, and meet at the coordinator to do so."""
        by_number = _numbered(jobs)
        if self._killing and not self._killed:
            self._kill_pods(pods)
            self._killed = True
        unfinished = any(finished(job) is None for job in by_number.values())
        if not self._stopping and unfinished and time.monotonic() < self._ends_at:
            return None
        if not self._deleted:
            for job in by_number.values():
                if self._stopping or finished(job) is None:
                    self._api.delete("Job", job["metadata"]["name"])
            self._deleted = True
        leaving = [pod for pod in pods if _number(pod) is not None and _is_active(pod)]
        if any(lost_for_good([pod], time.time()) is None for pod in leaving):
            return None  # it may still save
        if self._end is None:
            self._end = replica_outcomes.saved(self._outcomes().values())
        if any(job["metadata"]["name"] == self._name and finished(job) is None for job in jobs):
            self._api.delete("Job", self._name)
        return self._end

    def _gone(self) -> Ended:
        words = f"somebody deleted Job {self._name} while it ran"
        return Ended("failed", words, kind="infrastructure")

    def _outcomes(self) -> dict[int, AttemptOutcome]:
        return replicas.outcomes(self._store, self._plan.attempt_key)

    @property
    def _limits(self) -> Replicas:
        assert self._plan.launch.replicas is not None
        return self._plan.launch.replicas


def _numbered(jobs: Iterable[Object]) -> dict[int, Object]:
    """Jobs of replicas that are not being deleted."""
    there = [job for job in jobs if "deletionTimestamp" not in job["metadata"]]
    return {number: job for job in there if (number := _number(job)) is not None}


def _number(found: Object) -> int | None:
    label = found["metadata"].get("labels", {}).get(names.REPLICA)
    return None if label is None else int(label)


def _node(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "")


def _is_active(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
