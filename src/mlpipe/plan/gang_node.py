"""Which node of a gang a process is on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mlpipe._core import environment


@dataclass(frozen=True)
class GangNode:
    """Which node of the gang this is, by the variables of its pod; on a laptop none is set. `rendezvous`:
    host:port of node 0's torchrun. `gang_restart`: how often all pods were restarted together. `replica`: of
    an elastic training, in which each has launchers of its own; else None. `num_machines`: that came, of a
    gang with spares; else None."""

    index: int
    rendezvous: str
    gang_restart: int
    replica: int | None = None
    num_machines: int | None = None

    @staticmethod
    def from_environment() -> GangNode:
        return GangNode(
            index=int(os.environ.get(environment.FIRST_NODE) or "0")
            + int(os.environ.get("JOB_COMPLETION_INDEX") or "0"),
            rendezvous=os.environ.get(environment.RENDEZVOUS) or "localhost:0",
            gang_restart=int(os.environ.get(environment.GANG_RESTART) or "0"),
            replica=int(os.environ[environment.REPLICA]) if environment.REPLICA in os.environ else None,
            num_machines=int(os.environ.get(environment.NUM_MACHINES) or "0") or None,
        )

    def name(self, stem: str, suffix: str) -> str:
        """Of a file that every node writes: node 0's has the plain name."""
        if self.replica is not None:
            stem = f"{stem}-replica-{self.replica}"
        return f"{stem}{suffix}" if self.index == 0 else f"{stem}-node-{self.index}{suffix}"
