"""A Pipeline's stage on given hardware to a Plan: pure arithmetic, no torch, no network, no clock. Only two
things are read: the manifest of the tokens, once they exist (`plan/training.py`), and mlpipe's own source
(its digest)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlpipe
from mlpipe._core.errors import PlanError
from mlpipe._core.units import parse_seconds
from mlpipe.plan import training
from mlpipe.plan.candidates import enumerate_candidates
from mlpipe.plan.choose import Candidate, rank
from mlpipe.plan.grace import shutdown_seconds
from mlpipe.plan.hardware import Hardware, detect_hardware
from mlpipe.plan.memory import cpu_allocator, is_sparing
from mlpipe.plan.plan import (
    SCHEMA_VERSION,
    CommandPlan,
    EvaluatePlan,
    Launch,
    Plan,
    PromotePlan,
    TrainPlan,
)
from mlpipe.plan.pods import cluster_plan, pod_resources
from mlpipe.plan.scaling import Scale, parse_nodes, scale
from mlpipe.plan.traced import Traced
from mlpipe.spec.model import Pipeline, Resources, Stage
from mlpipe.spec.placeholders import fill, resolve


def stage_hardware(pipeline: Pipeline, stage_name: str, *, cluster: bool = False) -> Hardware:
    """What the stage runs on. What its resources leave open is on a `cluster` a pod's default, else what this
    machine has."""
    resources = _resources(pipeline, _stage(pipeline, stage_name))
    return detect_hardware(pod_resources(resources) if cluster else resources, elsewhere=cluster)


def _resources(pipeline: Pipeline, stage: Stage) -> Resources | None:
    """Its own, or those of the training that it evaluates."""
    if stage.resources is None and stage.evaluate is not None:
        stage = pipeline.stage(train_stage_of(pipeline, stage))
    return stage.resources


def build_plan(
    pipeline: Pipeline,
    stage_name: str,
    *,
    run_id: str,
    attempt: int,
    store_url: str,
    inputs: Mapping[str, str],
    hardware: Hardware,
    resume: bool = False,
    traced: Traced | None = None,
) -> Plan:
    """`inputs`: stage name -> local folder of its output; `{{stages.NAME.output}}` of a stage that is not
    among them stays as it is, so that a pipeline can be planned before it has run. The same arguments (and
    token manifests) give the same bytes. `traced`: the numbers of a user's own model. Raises PlanError."""
    stage = _stage(pipeline, stage_name)
    known = {"store": store_url, "run.id": run_id}
    known |= {f"stages.{name}.output": folder for name, folder in inputs.items()}
    train = evaluate = command = promote = None
    if stage.train is not None:
        train = training.train_plan(stage.train, hardware, known, resume=resume, traced=traced)
    elif stage.evaluate is not None:
        evaluate = _evaluate(pipeline, stage, hardware, known)
    elif stage.command is not None:
        # whoever runs it resolves once more, with {{output}}
        command = CommandPlan(tuple(resolve(arg, known, partial=True) for arg in stage.command))
    elif stage.promote is not None:
        promote = PromotePlan(
            train_stage=train_stage_of(pipeline, stage),
            evaluate_stage=stage.promote.evaluate or _only(pipeline, stage, "evaluate"),
            model_name=stage.promote.as_,
            alias=stage.promote.alias,
        )
    return Plan(
        schema_version=SCHEMA_VERSION,
        run_id=run_id,
        pipeline=pipeline.name,
        stage=stage_name,
        attempt=attempt,
        store_url=store_url,
        spec_digest=pipeline.digest,
        code_digest=code_digest(),
        launch=_launch(stage, hardware, known, train),
        train=train,
        evaluate=evaluate,
        command=command,
        promote=promote,
        inputs=tuple(f"runs/{run_id}/stages/{name}" for name in sorted(inputs)),
        cluster=cluster_plan(pipeline, stage, _resources(pipeline, stage)),
        price_usd_per_device_hour=hardware.price_usd_per_device_hour,
    )


def compare(
    pipeline: Pipeline,
    stage_name: str,
    hardware: Hardware,
    inputs: Mapping[str, str] | None = None,
    traced: Traced | None = None,
) -> list[Candidate]:
    """Every way to train the stage on this hardware, best first, also what its file does not ask for. Raises
    PlanError for a stage that does not train."""
    stage = _stage(pipeline, stage_name)
    if stage.train is None:
        raise PlanError(f"stage {stage_name!r} does not train", where=stage_name)
    known = {f"stages.{name}.output": folder for name, folder in (inputs or {}).items()}
    return rank(enumerate_candidates(stage.train, training.shape_of(stage.train, known, traced), hardware))


def scale_stage(
    pipeline: Pipeline, stage_name: str, hardware: Hardware, nodes: str, traced: Traced | None = None
) -> list[Scale]:
    """The stage's training on other numbers of nodes, like `1..64`. Raises PlanError."""
    stage = _stage(pipeline, stage_name)
    if stage.train is None:
        raise PlanError(f"stage {stage_name!r} does not train", where=stage_name)
    return scale(stage.train, training.shape_of(stage.train, {}, traced), hardware, parse_nodes(nodes))


def meaning_of(pipeline: Pipeline, stage_name: str, inputs: Mapping[str, str]) -> dict[str, Any]:
    """`meaning` of a training stage, on any hardware; `inputs` as of `build_plan`. Raises PlanError."""
    spec = _stage(pipeline, stage_name).train
    if spec is None:
        raise PlanError(f"stage {stage_name!r} does not train", where=stage_name)
    known = {f"stages.{name}.output": folder for name, folder in inputs.items()}
    return training.meaning(spec, known)


def train_stage_of(pipeline: Pipeline, stage: Stage) -> str:
    """The training stage that an `evaluate` or `promote` stage is about."""
    spec = stage.evaluate or stage.promote
    name = spec.train if spec is not None and spec.train else _only(pipeline, stage, "train")
    if name is None:
        raise PlanError(f"stage {stage.name!r} needs no train stage", hint="add it to 'needs'")
    return name


@lru_cache(maxsize=1)
def code_digest() -> str:
    """sha256 over the names and bytes of mlpipe's own Python files."""
    root = Path(mlpipe.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _stage(pipeline: Pipeline, name: str) -> Stage:
    try:
        return pipeline.stage(name)
    except KeyError:
        known = ", ".join(stage.name for stage in pipeline.stages)
        raise PlanError(f"no stage {name!r} in {pipeline.name!r}", hint=f"write one of {known}") from None


def _only(pipeline: Pipeline, stage: Stage, kind: str) -> str | None:
    """The stage of this kind among all that `stage` needs; the loader has refused several."""
    seen: set[str] = set()
    todo = list(stage.needs)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(pipeline.stage(name).needs)
    return next((s.name for s in pipeline.stages if s.name in seen and s.kind == kind), None)


def _launch(stage: Stage, hardware: Hardware, known: Mapping[str, str], plan: TrainPlan | None) -> Launch:
    env = {key: resolve(value, known, partial=True) for key, value in stage.env.items()}
    train = stage.train
    distributed = train is not None or stage.evaluate is not None
    if distributed:
        env = {key: fill(value, known) for key, value in stage.env.items()}
        threads = max(1, hardware.cpus_per_node // hardware.devices_per_node)
        env.setdefault("OMP_NUM_THREADS", str(threads))
        if hardware.device == "cpu":
            sparing = plan is not None and is_sparing(plan.mesh, plan.activation_checkpointing)
            env = {**cpu_allocator(sparing=sparing), **env}
        if train is not None and train.deterministic and hardware.device == "cuda":
            env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
    return Launch(
        num_nodes=hardware.num_nodes if distributed else 1,
        nproc_per_node=hardware.devices_per_node if distributed else 1,
        max_restarts=train.max_restarts if train is not None else 0,
        device=hardware.device if distributed else "cpu",
        argv=("-m", "mlpipe.train.worker") if distributed else (),
        env=env,
        timeout_seconds=parse_seconds(stage.timeout) if stage.timeout else None,
        shutdown_seconds=shutdown_seconds(plan, hardware.devices_per_node),
        metrics_port=train.metrics_port if train is not None and train.metrics_port != "off" else None,
    )


def _evaluate(pipeline: Pipeline, stage: Stage, hardware: Hardware, known: Mapping[str, str]) -> EvaluatePlan:
    train_stage = train_stage_of(pipeline, stage)
    spec, evaluate = pipeline.stage(train_stage).train, stage.evaluate
    if spec is None or evaluate is None:
        raise PlanError(f"stage {train_stage!r} does not train")
    own_resources = stage.resources is not None
    train = training.evaluation_plan(spec, hardware, known, own_resources=own_resources)
    return EvaluatePlan(
        train_stage=train_stage,
        train=train,
        data=train.data,
        max_tokens=evaluate.max_tokens,
        gate=evaluate.gate,
        prompt=evaluate.prompt,
        generate_tokens=evaluate.generate_tokens,
    )
