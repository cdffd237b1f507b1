"""This process among those that torchrun started, by torchrun's own variables. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mlpipe._core import environment


@dataclass(frozen=True)
class RankProcess:
    """`local_rank`: among the `local_world_size` of this node. `restart` goes on where the launcher says:
    torchrun counts from 0 again when a gang of pods is restarted as a whole."""

    rank: int
    local_rank: int
    local_world_size: int
    restart: int

    @staticmethod
    def from_environment() -> RankProcess:
        """Raises KeyError where torchrun has not started this process."""
        return RankProcess(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            restart=int(os.environ.get(environment.FIRST_RESTART, "0"))
            + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
