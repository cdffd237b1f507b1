"""What befell the pods of an attempt, in its store before the cluster forgets it: a gang that restarts takes
its pods along. Kept are their last status (exit codes, reasons, the last lines that they wrote), their events
and, where the driver may read them, those of their nodes."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from mlpipe._core.errors import SAVED_CODE, StoreError
from mlpipe.store.base import Store
from mlpipe.submit.executor import Ended
from mlpipe.submit.kubernetes.api import ApiError, ClusterApi, Object

_NODE_EVENTS = "/api/v1/namespaces/default/events"  # where events of nodes lie
# kubelet's words for a pod that takes more of its node's disk than it may (pkg/kubelet/eviction)
_OVERFULL = re.compile(r"Usage of EmptyDir volume .* exceeds|local (ephemeral )?storage (usage|limit)")
_REASONS = ("Evicted", "Preempting", "NodeLost", "Shutdown", "DeadlineExceeded")  # of a pod


class Postmortem:
    """Of one attempt, whose objects are named `gang`. A driver that takes over goes on with what is there."""

    def __init__(self, store: Store, api: ClusterApi, attempt_key: str, gang: str) -> None:
        self.last = ""  # what befell the last pod that fell, in words
        self._store, self._api, self._gang = store, api, gang
        self._key = f"{attempt_key}/postmortem/cluster.json"
        self._seen: set[tuple[str, str]] = set()
        self._kept: dict[str, Any] = {}

    def look(self, pods: list[Object], *, at_the_end: bool = False) -> None:
        """Writes down those that fell since the last look; `at_the_end`, all. Raises nothing: a failure
        matters more than the record of it."""
        fallen = [pod for pod in pods if _fell(pod) and _mark(pod) not in self._seen]
        if not fallen and not at_the_end:
            return
        self._seen |= {_mark(pod) for pod in fallen}
        reason = termination_reason(fallen)
        self.last = reason.message.partition("\n")[0] if reason else last_words(fallen) or self.last
        try:
            self._write(pods if at_the_end else fallen)
        except (ApiError, StoreError):
            return

    def _write(self, pods: list[Object]) -> None:
        if not self._kept:
            former = self._store.get(self._key) if self._store.exists(self._key) else b"{}"
            self._kept = {"pods": [], "events": [], "node_events": [], **json.loads(former)}
        known = {pod["name"]: pod for pod in self._kept["pods"]}
        for pod in pods:
            name, node = pod["metadata"]["name"], pod.get("spec", {}).get("nodeName")
            known[name] = {"name": name, "node": node, "time": time.time(), "status": pod.get("status", {})}
        self._kept["pods"] = list(known.values())
        names = {*known, self._gang}
        events = [one for one in self._api.list("Event") if _about(one).get("name") in names]
        self._kept["events"] = _merged(self._kept["events"], events)
        node_events, why_not = self._node_events({str(pod["node"]) for pod in known.values() if pod["node"]})
        self._kept["node_events"] = _merged(self._kept["node_events"], node_events)
        self._kept["without_node_events"] = why_not
        self._store.put(self._key, json.dumps(self._kept, indent=2).encode())

    def _node_events(self, nodes: set[str]) -> tuple[list[Object], str | None]:
        """Those of `nodes`, and why there are none."""
        query = {"fieldSelector": "involvedObject.kind=Node"}
        try:
            answer = self._api.request("GET", _NODE_EVENTS, what="list Events of nodes", query=query)
        except ApiError as error:
            if error.status == 403:
                return [], "the driver may not read them; k8s/overlays/node-events would let it"
            return [], error.message
        return [one for one in answer.get("items") or [] if _about(one).get("name") in nodes], None


def termination_reason(pods: list[Object]) -> Ended | None:
    """What befell a pod that could not say so itself."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        if status.get("reason") in _REASONS:
            words = f"pod {name}: {status['reason']}: {status.get('message', '')}".rstrip(": .")
            if _OVERFULL.search(words):
                words += "\n  hint: raise `resources.disk` of the stage, or write to a volume"
            return Ended("failed", words, kind="infrastructure")
        for ended in _ends(pod):
            if ended.get("reason") == "OOMKilled":
                words = (
                    f"pod {name} ran out of memory (OOMKilled)\n  hint: raise `resources.memory` of the "
                    "stage, or let `strategy: auto` split the model further"
                )
                return Ended("failed", words, kind="infrastructure", exit_code=ended.get("exitCode"))
        if (condition := _disruption(pod)) is not None:
            words = f"pod {name} was disrupted: {condition.get('message') or condition.get('reason')}"
            return Ended("failed", words, kind="infrastructure")
    return None


def last_words(pods: list[Object]) -> str:
    """Of a container that failed, as Kubernetes kept them; "" if none did. One that saved was stopped."""
    for pod in pods:
        for ended in _ends(pod):
            if (code := ended.get("exitCode")) not in (0, SAVED_CODE):
                said = last_line(ended.get("message", ""))
                words = f"pod {pod['metadata']['name']} ended with exit code {code}"
                return f"{words}: {said}" if said else words
    return ""


def last_line(text: str) -> str:
    """Of a log: its last error of ours, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def _fell(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") == "Failed" or _disruption(pod) is not None


def _mark(pod: Object) -> tuple[str, str]:
    """One that is disrupted falls twice: it is told to stop, then it has ended."""
    return pod["metadata"].get("uid", ""), pod.get("status", {}).get("phase", "")


def _disruption(pod: Object) -> Object | None:
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            disruption: Object = condition
            return disruption
    return None


def _ends(pod: Object) -> list[Object]:
    states = [container.get("state", {}) for container in pod.get("status", {}).get("containerStatuses", [])]
    return [state["terminated"] for state in states if state.get("terminated")]


def _about(event: Object) -> Object:
    involved: Object = event.get("involvedObject") or {}
    return involved


def _merged(former: list[Object], events: list[Object]) -> list[Object]:
    """Of several that say the same of the same object the latest."""
    short = [
        {key: event.get(key) for key in ("involvedObject", "reason", "message", "lastTimestamp")}
        for event in events
    ]
    by_content = {(_about(one).get("name"), one["reason"], one["message"]): one for one in [*former, *short]}
    return list(by_content.values())
