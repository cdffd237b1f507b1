"""What a stage asks a Slurm cluster for: its resources and the pipeline's `slurm` section, resolved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from mlpipe._core.errors import PlanError
from mlpipe._core.units import parse_bytes, parse_seconds
from mlpipe.plan.build import stage_resources
from mlpipe.plan.pods import pod_resources
from mlpipe.plan.references import stage_named

if TYPE_CHECKING:
    from mlpipe.spec import slurm as s
    from mlpipe.spec.model import Pipeline, Resources, Stage

MIB = 2**20


@dataclass(frozen=True)
class SlurmContainer:
    """`image`: as the runtime takes it. `mounts`: folders that are seen inside as outside."""

    runtime: Literal["pyxis", "apptainer"]
    image: str
    mounts: tuple[str, ...]


@dataclass(frozen=True)
class SlurmJob:
    """Of one stage; cores, memory and GPUs are of each node. `others`: of groups of machines those behind the
    first, the further components of a heterogeneous job. None: the cluster's default."""

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
    others: tuple[SlurmJob, ...] = ()


def slurm_job(pipeline: Pipeline, stage_name: str, host_bytes: int = 0) -> SlurmJob:
    """What is said for the stage alone stands before what is said for all, and what is said for a group of
    machines before both; of `options` each by itself. `host_bytes`: of a node's memory that the stage needs
    at least. Raises PlanError."""
    from mlpipe.spec.slurm import SlurmNodeKeys, SlurmStageKeys

    stage = stage_named(pipeline, stage_name)
    single = SlurmStageKeys.model_construct()
    if pipeline.slurm is not None:
        single = pipeline.slurm.stages.get(stage_name, single)
    if not stage.groups:
        return _component(pipeline, stage, stage_resources(pipeline, stage), host_bytes, single)
    own = single.groups or [SlurmNodeKeys.model_construct() for _ in stage.groups]
    jobs = [
        _component(pipeline, stage, group, host_bytes, keys, single)
        for group, keys in zip(stage.groups, own, strict=True)
    ]
    _refuse_alike(stage, jobs)
    return replace(jobs[0], others=tuple(jobs[1:]))


def _refuse_alike(stage: Stage, jobs: Sequence[SlurmJob]) -> None:
    """Raises PlanError where Slurm could give a group the machines of another one."""
    for (first, one), (second, other) in combinations(zip(stage.groups, jobs, strict=True), 2):
        keys = ("gpu_type", "partition", "reservation", "constraint")
        if first.gpu != second.gpu and all(getattr(one, key) == getattr(other, key) for key in keys):
            raise PlanError(
                f"nothing tells Slurm which nodes have {first.gpu}, and which {second.gpu}",
                where=f"stage {stage.name!r}",
                hint=f"write slurm.stages.{stage.name}.groups: [{{gpu_type: ...}}, {{gpu_type: ...}}], or a "
                "constraint or partition of each",
            )


def _component(
    pipeline: Pipeline, stage: Stage, asked: Resources | None, host_bytes: int, *keys: s.SlurmNodeKeys
) -> SlurmJob:
    """`keys`: what stands before what is said for all, the first before the next."""
    from mlpipe.spec.slurm import Slurm

    section = pipeline.slurm or Slurm.model_construct()
    resources = pod_resources(asked, workers=stage.kind.runs == "workers", host_bytes=host_bytes)

    def said(key: str) -> Any:
        return next((value for one in (*keys, section) if (value := getattr(one, key, None))), None)

    time = said("time")
    return SlurmJob(
        cpus=math.ceil(resources.cpus or 1),
        memory_mib=math.ceil(parse_bytes(resources.memory or "") / MIB),
        gpus=resources.gpus_per_node,
        gpu_type=said("gpu_type"),
        partition=said("partition"),
        account=said("account"),
        qos=said("qos"),
        reservation=said("reservation"),
        constraint=said("constraint"),
        time_seconds=parse_seconds(time) if time else None,
        options=tuple(sorted({**section.options, **getattr(keys[-1], "options", {})}.items())),
        python=section.python,
        modules=section.modules,
        container=_container(section.container, pipeline.image),
        scratch=section.scratch,
        max_requeues=section.max_requeues,
    )


def _container(spec: s.SlurmContainer | None, image: str | None) -> SlurmContainer | None:
    if spec is None:
        return None
    return SlurmContainer(spec.runtime, spec.image or _as_asked(spec.runtime, image or ""), spec.mounts)


def _as_asked(runtime: str, image: str) -> str:
    """The pipeline's image, which is written as Kubernetes takes it. Apptainer would look for a file of that
    name; enroot, which pyxis asks, for all of it at Docker Hub."""
    if "://" in image or image.endswith(".sif"):
        return image  # in a runtime's own words
    if runtime == "apptainer":
        return f"docker://{image}"
    registry, _, rest = image.partition("/")
    if not rest or not (set(".:") & set(registry) or registry == "localhost"):  # as Docker tells a registry
        return image
    return rest if registry == "docker.io" else f"{registry}#{rest}"
