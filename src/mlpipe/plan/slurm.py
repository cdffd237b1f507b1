"""What a stage asks a Slurm cluster for: its resources and the pipeline's `slurm` section, resolved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlpipe._core.errors import PlanError
from mlpipe._core.units import parse_bytes, parse_seconds
from mlpipe.plan.build import stage_resources
from mlpipe.plan.pods import pod_resources
from mlpipe.plan.references import stage_named

if TYPE_CHECKING:
    from mlpipe.spec import slurm as s
    from mlpipe.spec.model import Pipeline

MIB = 2**20


@dataclass(frozen=True)
class SlurmContainer:
    """`mounts`: folders that are seen inside as outside."""

    runtime: Literal["pyxis", "apptainer"]
    image: str
    mounts: tuple[str, ...]


@dataclass(frozen=True)
class SlurmJob:
    """Of one stage; cores, memory and GPUs are of each node. None: the cluster's default."""

    cpus: int
    memory_mib: int
    gpus: int = 0
    gpu_type: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    time_seconds: float | None = None
    options: tuple[tuple[str, str], ...] = ()
    python: str = "python"
    modules: tuple[str, ...] = ()
    container: SlurmContainer | None = None
    scratch: str | None = None
    max_requeues: int = 3


def slurm_job(pipeline: Pipeline, stage_name: str, host_bytes: int = 0) -> SlurmJob:
    """What is said for the stage alone stands before what is said for all; of `options` each by itself.
    `host_bytes`: of a node's memory that the stage needs at least. Raises PlanError."""
    from mlpipe.spec.slurm import Slurm, SlurmJobKeys

    stage = stage_named(pipeline, stage_name)
    if stage.groups:
        raise PlanError(
            "a job of Slurm has nodes of one class: a heterogeneous one starts each part by itself",
            where=f"stage {stage_name!r}",
            hint="write one mapping in resources; where its nodes differ, add stragglers: move_load",
        )
    section = pipeline.slurm or Slurm.model_construct()
    single = section.stages.get(stage_name) or SlurmJobKeys.model_construct()
    workers = stage.kind.runs == "workers"
    resources = pod_resources(stage_resources(pipeline, stage), workers=workers, host_bytes=host_bytes)
    time = single.time or section.time
    return SlurmJob(
        cpus=math.ceil(resources.cpus or 1),
        memory_mib=math.ceil(parse_bytes(resources.memory or "") / MIB),
        gpus=resources.gpus_per_node,
        gpu_type=single.gpu_type or section.gpu_type,
        partition=single.partition or section.partition,
        account=single.account or section.account,
        qos=single.qos or section.qos,
        reservation=single.reservation or section.reservation,
        constraint=single.constraint or section.constraint,
        time_seconds=parse_seconds(time) if time else None,
        options=tuple(sorted({**section.options, **single.options}.items())),
        python=section.python,
        modules=section.modules,
        container=_container(section.container, pipeline.image),
        scratch=section.scratch,
        max_requeues=section.max_requeues,
    )


def _container(spec: s.SlurmContainer | None, image: str | None) -> SlurmContainer | None:
    return None if spec is None else SlurmContainer(spec.runtime, spec.image or image or "", spec.mounts)
