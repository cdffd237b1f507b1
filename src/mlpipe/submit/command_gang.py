"""A command on several nodes at once: what each of its processes is told, and when the stage is done.

The first node's folder is the stage's output. It is committed when all nodes are done: an output counts as a
stage that is done, whatever becomes of the others.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mlpipe._core import environment
from mlpipe.plan.gang_node import GangNode
from mlpipe.plan.plan import Plan
from mlpipe.store import outputs
from mlpipe.store.base import Store
from mlpipe.store.outcome import read_outcome
from mlpipe.submit import process
from mlpipe.submit.executor import Ended, Handle
from mlpipe.submit.handle import ThreadedHandle

_POLL_SECONDS = 0.1
_STORE_POLL_SECONDS = 1.0
_LONGEST_SECONDS = 7 * 24 * 3600.0  # of a stage without a timeout, after its first node was done
_AFTER_FIRST_SECONDS = 30.0  # between the first node's failure and the SIGKILL of the others


def variables(index: int, num_nodes: int, rendezvous: str) -> dict[str, str]:
    """Of the process on node `index`. `rendezvous`: host:port, where the first one may listen."""
    host, _, port = rendezvous.rpartition(":")
    return {
        environment.NUM_NODES: str(num_nodes),
        environment.NODE_RANK: str(index),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "JAX_COORDINATOR_ADDRESS": rendezvous,
    }


def commit(store: Store, plan: Plan, folder: Path) -> Ended:
    """The output of the stage, which is done with it. Raises StoreError."""
    digest = outputs.commit_output(store, plan.stage_key, folder, plan.attempt)
    return Ended("done", "", exit_code=0, outcome={"digest": digest})


def wait_for_others(store: Store, plan: Plan, node: GangNode, stopped: Callable[[], bool]) -> Ended | None:
    """What the first node does when it is done. None: all are. A node that fails leaves its outcome, and one
    that leaves none is seen by what started the gang, which stops this one, too."""
    deadline = time.monotonic() + (plan.launch.timeout_seconds or _LONGEST_SECONDS)
    waiting = list(range(1, plan.launch.num_nodes))
    said = 0
    while waiting:
        if len(waiting) != said:
            said = len(waiting)
            print(f"done; waits for nodes {', '.join(map(str, waiting))}", flush=True)  # noqa: T201
        for index in list(waiting):
            name = replace(node, index=index).name("outcome", ".json")
            outcome = read_outcome(store, f"{plan.attempt_key}/{name}")
            if outcome is None or outcome.restarts != node.gang_restart:
                continue
            if outcome.outcome != "done":
                words = f"node {index}: {outcome.message}"
                return Ended("failed", words, kind=outcome.kind or "failed", exit_code=outcome.exit_code)
            waiting.remove(index)
        if stopped():
            return Ended("cancelled", "stopped before all nodes were done")
        if time.monotonic() > deadline:
            return Ended("failed", f"nodes {waiting} were not done in time", kind="failed")
        time.sleep(_STORE_POLL_SECONDS if waiting else 0)
    return None


class GangHere(ThreadedHandle):
    """All nodes on this machine: of each the handle of a process. The first failure ends the others."""

    def __init__(self, store: Store, plan: Plan, parts: Sequence[Handle], scratch: Path, driver: str) -> None:
        super().__init__(store, plan)
        self._parts, self._scratch, self._driver = parts, scratch, driver
        self._thread.start()

    def terminate(self) -> None:
        super().terminate()
        for part in self._parts:
            part.terminate()

    def kill(self) -> None:
        super().kill()
        process.send(process.members(self._driver, self._plan.stage), signal.SIGKILL)

    def _work(self) -> Ended:
        first: tuple[int, Ended] | None = None
        deadline = float("inf")
        while True:
            ended = [part.poll() for part in self._parts]
            if first is None:
                bad = [(i, one) for i, one in enumerate(ended) if one is not None and one.state != "done"]
                if bad:
                    first = bad[0]
                    deadline = time.monotonic() + _AFTER_FIRST_SECONDS
                    for part in self._parts:
                        part.terminate()
            if time.monotonic() > deadline:
                self.kill()
                deadline = float("inf")
            if all(one is not None for one in ended):
                break
            time.sleep(_POLL_SECONDS)
        if self._stopping and (first is None or first[1].state == "cancelled"):
            return Ended("cancelled", "stopped before it was done")
        if first is not None:
            return replace(first[1], message=f"node {first[0]}: {first[1].message}")
        return commit(self._store, self._plan, self._scratch / "0" / "output")
