"""Networks between the nodes of a gang, by profile: what ranks and pods need for one, and how fast it is. A
table in `networks.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

DEFAULT = "default"  # of figures by class: all others; as `spec/network.py` has it
TABLE = Path(__file__).with_name("networks.json")


@dataclass(frozen=True)
class Profile:
    """`gb_per_second`: 10^9 bytes, of one GPU to other nodes, in one direction. It and the number of a
    resource may differ by the class of the GPU; under `DEFAULT` stands that of all others. `hugepages`: of
    2 MiB, such as "5 GiB". `rdma`: a machine must have an active port of the verbs interface. None: not
    said."""

    gb_per_second: Mapping[str, float]
    env: Mapping[str, str]
    resources: Mapping[str, int | Mapping[str, int]] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    hugepages: str | None = None
    pinned_memory: bool | None = None
    rdma: bool | None = None

    def speed_of(self, gpu: str) -> float:
        """Bytes a second of one GPU of that class."""
        return 1e9 * self.gb_per_second.get(gpu, self.gb_per_second[DEFAULT])

    def resources_of(self, gpu: str) -> dict[str, int]:
        """Of a pod with GPUs of that class."""
        return {
            name: count if isinstance(count, int) else count.get(gpu, count[DEFAULT])
            for name, count in self.resources.items()
        }

    def extended(self, other: Profile) -> Profile:
        """What `other` says in place of it; of maps each entry by itself."""
        return Profile(
            other.gb_per_second or self.gb_per_second,
            {**self.env, **other.env},
            {**self.resources, **other.resources},
            {**self.annotations, **other.annotations},
            other.hugepages or self.hugepages,
            self.pinned_memory if other.pinned_memory is None else other.pinned_memory,
            self.rdma if other.rdma is None else other.rdma,
        )


@lru_cache(maxsize=1)
def profiles() -> dict[str, Profile]:
    """Those that are built in, by name."""
    return {name: Profile(**entry) for name, entry in json.loads(TABLE.read_bytes())["networks"].items()}
