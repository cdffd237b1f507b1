"""The pods of one attempt of one stage: a JobSet, TrainJob or Job with its ConfigMap, followed to its end.

What is created has names that follow from run, stage and attempt, so that whoever comes again (a restarted
driver, a second submit) adopts what is there. What became of a stage is read from its objects' status and
from the outcomes that its launchers left in the store, never from the end of a stream.
"""

from __future__ import annotations

import threading
import time
from datetime import datetime

from mlpipe._core.errors import SubmitError
from mlpipe.plan.plan import Plan
from mlpipe.render.kubernetes import stage_objects
from mlpipe.store.base import Store
from mlpipe.submit.executor import Ended
from mlpipe.submit.handle import ThreadedHandle, blamed, elsewhere, ended_by, outcomes_of
from mlpipe.submit.kubernetes.api import ClusterApi, Object, is_away
from mlpipe.submit.kubernetes.multikueue import Sent
from mlpipe.submit.kubernetes.objects import GANGS, create_all, finished, remove_all, selector
from mlpipe.submit.kubernetes.pending import why_pending
from mlpipe.submit.kubernetes.placement import WholePlacement
from mlpipe.submit.kubernetes.postmortem import Postmortem, last_words, termination_reason
from mlpipe.submit.kubernetes.watch import Watched

_POLL_SECONDS = 1.0
_NOTE_SECONDS = 3.0  # between two looks for what a stage waits for, when there is news of its pods
_NOTE_AGAIN_SECONDS = 20.0  # when there is none: quotas and queues change without
_AWAY_SECONDS = 1800.0  # an API server may be away for this long; pods go on without it
_RESTARTS = "jobset.sigs.k8s.io/restart-attempt"
_LOST_SECONDS = 60.0  # after a lost node's pod was deleted, its gang is given up


class Gang(ThreadedHandle):
    """The pods of one attempt of one stage, created or adopted."""

    def __init__(self, store: Store, api: ClusterApi, plan: Plan) -> None:
        super().__init__(store, plan)
        self._api = api
        self._objects = stage_objects(plan)
        gang = next(body for body in self._objects if body["kind"] in GANGS)
        self._kind, self._name = gang["kind"], gang["metadata"]["name"]
        self._labels = selector(plan.run_id, plan.stage, plan.attempt)
        self._sent = Sent(store, plan)
        self._placement = WholePlacement(api) if WholePlacement.is_for(plan) else None
        self._postmortem = Postmortem(store, api, plan.attempt_key, self._name)
        self._thread.start()

    def note(self) -> str:
        return self._note

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
        asked = killed = taken = False
        ended: Ended | None = None
        news = True
        answered = noted = time.monotonic()
        while True:
            news = changed.wait(_POLL_SECONDS) or news
            changed.clear()
            now = time.monotonic()
            objects, pods = gangs.objects(), watched_pods.objects()
            try:
                if error := gangs.error or watched_pods.error:
                    raise error
                if objects is None or pods is None:
                    continue
                gang = next((one for one in objects if one["metadata"]["name"] == self._name), None)
                if gang is None and not pods:
                    if not self._sent.has_ended():
                        continue
                    return (
                        self._result_of_taken()
                        if taken and not self._stopping
                        else ended or self._result_of_gone()
                    )
                state = finished(gang) if gang else None
                if state is not None and ended is None:
                    ended = self._result(state)
                # of a gang that is deleted one pod's end is not yet the others'
                if ended is not None and (not asked or not pods):
                    return ended
                if gang and self._sent.look(self._api, gang) and not (asked or self._stopping):
                    taken = True  # whoever gets it next shall not write beside the pods that save
                if (self._stopping or taken) and not asked:
                    self._api.delete(self._kind, self._name)
                    asked = True
                if self._killing and not killed:
                    self._kill_pods(pods)
                    killed = True
                if (words := lost_for_good(pods, time.time())) is not None and not self._stopping:
                    self._postmortem.look(pods, at_the_end=True)
                    self._api.delete(self._kind, self._name, is_lost=True)
                    return Ended("failed", words, kind="infrastructure", lost=True)
                self._postmortem.look(pods)
                if words := self._place(gang, pods, now):
                    self._note, noted, news = words, now, True
                elif now - noted > (_NOTE_SECONDS if news else _NOTE_AGAIN_SECONDS):
                    waits = self._why_pending(pods, self._plan.launch.num_machines)
                    self._note = waits or self._restarted(gang, pods) or self._sent.note(gang)
                    noted, news = now, False
                answered = now
            except SubmitError as error:
                if not is_away(error) or now - answered > _AWAY_SECONDS:
                    raise
                self._note = error.message

    def _kill_pods(self, pods: list[Object]) -> None:
        for pod in pods:
            self._api.delete("Pod", pod["metadata"]["name"], grace_seconds=0)

    def _place(self, gang: Object | None, pods: list[Object], now: float) -> str:
        if gang is None or self._placement is None or self._stopping:
            return ""
        return self._placement.look({**gang, "kind": self._kind}, pods, now)

    def _why_pending(self, pods: list[Object], num_wanted: int) -> str:
        return "" if self._stopping else why_pending(self._api, self._labels, num_wanted, pods)

    def _restarted(self, gang: Object | None, pods: list[Object]) -> str:
        status = gang.get("status", {}) if gang else {}
        told = [pod["metadata"].get("labels", {}).get(_RESTARTS, "0") for pod in pods]  # by JobSet
        # of a JobSet; of a Job, its pods; a TrainJob does not tell
        times = status.get("restarts") or status.get("failed") or max(map(int, told), default=0)
        if not times or self._stopping:
            return ""
        words = "restarted once" if times == 1 else f"restarted {times} times"
        return f"{words}; {self._postmortem.last}" if self._postmortem.last else words

    def _result(self, state: str) -> Ended:
        outcomes = outcomes_of(self._store, self._plan)
        if state == "Complete":
            done = [outcome for outcome in outcomes if outcome.outcome == "done"]
            if done:
                return ended_by(done[0])
            return Ended("failed", f"{self._kind} {self._name} is complete, but left no outcome", kind="bug")
        pods = self._api.list("Pod", self._labels)  # as of now: a watch may be a moment late
        self._postmortem.look(pods, at_the_end=True)
        if (again := elsewhere(self._plan, outcomes)) is not None:
            return again
        if (culprit := blamed(outcomes)) is not None:
            return ended_by(culprit)
        if (reason := termination_reason(pods)) is not None:
            return reason
        if failed := [one for one in outcomes if one.outcome == "failed" and one.kind != "cancelled"]:
            return ended_by(min(failed, key=lambda outcome: outcome.time))
        # what was stopped was stopped for one that left no outcome, unless we asked for it
        words = last_words(pods) or self._postmortem.last
        if self._sent.ran and not words:
            words = f"it left no word; what befell its pods {self._sent.where} may know"
        if outcomes and (self._stopping or not words):
            return ended_by(outcomes[0])
        words = f"{self._kind} {self._name} failed: {words or 'left no word'}"
        return Ended("failed", words, kind="infrastructure")

    def _result_of_taken(self) -> Ended:
        """It goes on as another attempt, once what it was sent to commits no more: that cluster may be out of
        the manager's reach."""
        done = [one for one in outcomes_of(self._store, self._plan) if one.outcome == "done"]
        if done:
            return ended_by(done[0])
        words = f"MultiKueue took it back from {self._sent.where}"
        return Ended("failed", words, kind="infrastructure", lost=True)

    def _result_of_gone(self) -> Ended:
        outcomes = outcomes_of(self._store, self._plan)
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
        conditions = {
            condition["type"]: condition for condition in pod.get("status", {}).get("conditions", [])
        }
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
