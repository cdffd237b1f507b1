"""One attempt of one stage, with numbers: the frozen dataclass of `plan.json`, which is all that a worker
reads. What a stage does stands in `work.py`, and in `kinds/<kind>/plan.py`.

Importable with the standard library alone. Written by `plan/build.py`, read by `train/` and `submit/`.
"""

import hashlib
import os
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import mlpipe
from mlpipe._core.serial import Sparse, from_plain, read_json, to_plain, write_json
from mlpipe.kinds import KINDS, Kind
from mlpipe.plan.cluster import ClusterPlan
from mlpipe.plan.work import StageWork

SCHEMA_VERSION = 1


AnyWork = TypeVar("AnyWork", bound=StageWork)


class Replicas(NamedTuple):
    """Of an elastic training: how many replicas of the model may take part, each launched by itself. Fewer
    than `fewest` wait for others."""

    fewest: int
    most: int


class PreflightPlan(NamedTuple):
    """What each machine must be able to do before ranks start. `slow_ratio`: of the speed of the others.
    `expected_*`: of one GPU, by the catalogue; None: nobody knows, as of CPUs. `spares`: machines beyond the
    nodes that are asked for, at most."""

    slow_ratio: float
    clock_seconds: float
    disk_bytes: int
    store_bytes_per_second: float
    link_bytes_per_second: float | None = None
    expected_flops: float | None = None  # of a matmul, at the training's precision
    expected_memory_bytes_per_second: float | None = None
    rdma: Sparse[bool] = False  # it needs an active port for it, and pinned memory
    spares: Sparse[int] = 0


class Launch(NamedTuple):
    """How workers are started: `nproc_per_node` of them on each of `num_nodes` nodes, each of them Python
    with `argv` and with `env` besides what it inherits. Without workers: one process a node, no `argv`.
    `replicas`: all this is of one of them; None: there is one, and it is the whole training."""

    num_nodes: int
    nproc_per_node: int
    max_restarts: int
    device: Literal["cpu", "cuda"]
    argv: tuple[str, ...]
    env: dict[str, str]
    timeout_seconds: float | None  # of the whole stage
    shutdown_seconds: float  # between SIGTERM and SIGKILL: above a step plus a save
    metrics_port: int | None  # base port of /metrics, plus the local rank; 0: any free port; None: off
    replicas: Replicas | None = None
    preflight: PreflightPlan | None = None  # None: machines are trusted
    avoid: tuple[str, ...] = ()  # nodes on which it is not to run: of earlier attempts at fault or slow

    @property
    def num_spares(self) -> int:
        return self.preflight.spares if self.preflight is not None else 0

    @property
    def num_machines(self) -> int:
        """With those that are held in reserve."""
        return self.num_nodes + self.num_spares


@dataclass(frozen=True)
class Plan:
    """One attempt of one stage. `work`: what it does, by its kind; in plan.json it stands under the kind's
    name. `inputs`: stage keys of the outputs that it reads, which whoever starts the stage fetches to the
    folders that the plan names."""

    schema_version: int
    run_id: str
    pipeline: str
    stage: str
    attempt: int
    store_url: str
    spec_digest: str  # sha256 of the resolved pipeline
    # of the mlpipe that wrote the document; empty: nobody has. It is no part of what is planned
    code_digest: str = field(compare=False)
    launch: Launch
    work: StageWork
    inputs: tuple[str, ...] = ()
    cluster: ClusterPlan | None = None  # None: the pipeline says nothing about a cluster
    # on demand, or the user's own; None: nobody said, or (on CPU) nothing is rented by the device
    price_usd_per_device_hour: float | None = None

    @property
    def kind(self) -> Kind:
        return KINDS[self.work.kind]

    def part(self, plan: type[AnyWork]) -> AnyWork | None:
        """`work`, if it is of this class; None for a stage of another kind."""
        return self.work if isinstance(self.work, plan) else None

    @property
    def module(self) -> str:
        """What runs it: `python -m MODULE --plan PLAN --scratch DIR`."""
        return self.kind.module if self.launch.replicas is None else "mlpipe.train.supervisor"

    @property
    def stage_key(self) -> str:
        return f"runs/{self.run_id}/stages/{self.stage}"

    @property
    def attempt_key(self) -> str:
        return f"{self.stage_key}/attempt-{self.attempt}"

    def to_plain(self) -> dict[str, Any]:
        """The document of plan.json."""
        plain = {each.name: to_plain(getattr(self, each.name)) for each in fields(self)}
        plain["code_digest"] = self.code_digest or code_digest()
        return {self.kind.name if key == "work" else key: value for key, value in plain.items()}

    def to_json(self) -> str:
        return write_json(self.to_plain())

    @staticmethod
    def from_json(text: str | bytes) -> "Plan":
        """Of this version, or of another if it means the same here (see `_core/serial.py`). Raises ValueError
        naming the path of what does not fit."""
        from mlpipe.plan.older import of_this_version

        data = of_this_version(read_json(text))
        if not isinstance(data, dict):
            raise ValueError("$: expected an object")
        # a version that had a key for every kind wrote null for all but one
        names = [name for name in KINDS if data.get(name) is not None]
        if len(names) != 1:
            raise ValueError(f"$: expected exactly one of {', '.join(KINDS)}, got {names or 'none'}")
        kind = KINDS[names[0]]
        work = from_plain(kind.part("plan").PLAN, data.pop(kind.name), f"$.{kind.name}")
        plan = from_plain(Plan, {**data, "work": work})
        if plan.schema_version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {plan.schema_version}, this mlpipe reads {SCHEMA_VERSION}")
        return plan


@lru_cache(maxsize=1)
def code_digest() -> str:
    """sha256 over the names and bytes of mlpipe's own Python files, all closed by a NUL, which none has."""
    root = os.path.dirname(mlpipe.__file__)
    digest = hashlib.sha256()
    # six hundred files: with `open` it took a third longer
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(name for name in names if name.endswith(".py")):
            path = f"{folder}/{name}"
            digest.update(f"{path[len(root) :]}\0".encode())
            descriptor = os.open(path, os.O_RDONLY)
            try:
                while some := os.read(descriptor, 2**16):
                    digest.update(some)
            finally:
                os.close(descriptor)
            digest.update(b"\0")
    return digest.hexdigest()
