"""A Pipeline's stage on given hardware to a Plan: pure arithmetic, no torch, no network, no clock. Only two
things are read: the manifest of the tokens, once they exist, and mlpipe's own source (its digest)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import mlpipe
from mlpipe._core.errors import PlanError
from mlpipe._core.presets import LLAMA, PRESETS, LlamaConfig
from mlpipe._core.units import parse_cadence, parse_seconds
from mlpipe.plan.candidates import enumerate_candidates, global_batch, pick
from mlpipe.plan.choose import Candidate, micro_batches, rank
from mlpipe.plan.flops import num_flops_per_token
from mlpipe.plan.grace import shutdown_seconds
from mlpipe.plan.hardware import Hardware, detect_hardware
from mlpipe.plan.meaning import meaning
from mlpipe.plan.memory import cpu_allocator, is_sparing
from mlpipe.plan.plan import (
    SCHEMA_VERSION,
    CheckpointPlan,
    CommandPlan,
    DataPlan,
    Entry,
    EvaluatePlan,
    Launch,
    ModelPlan,
    OptimizerPlan,
    Plan,
    Prediction,
    PromotePlan,
    TrainPlan,
)
from mlpipe.plan.pods import cluster_plan, pod_resources
from mlpipe.plan.scaling import Scale, parse_nodes, scale
from mlpipe.plan.traced import Traced
from mlpipe.spec.model import OwnData, OwnModel, Pipeline, PresetModel, Resources, Stage, Train
from mlpipe.spec.placeholders import names, resolve


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
        train = _train(stage.train, hardware, known, resume=resume, traced=traced)
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
    return rank(enumerate_candidates(stage.train, _config(stage.train, known) or traced, hardware))


def scale_stage(
    pipeline: Pipeline, stage_name: str, hardware: Hardware, nodes: str, traced: Traced | None = None
) -> list[Scale]:
    """The stage's training on other numbers of nodes, like `1..64`. Raises PlanError."""
    stage = _stage(pipeline, stage_name)
    if stage.train is None:
        raise PlanError(f"stage {stage_name!r} does not train", where=stage_name)
    return scale(stage.train, _config(stage.train, {}) or traced, hardware, parse_nodes(nodes))


def meaning_of(pipeline: Pipeline, stage_name: str, inputs: Mapping[str, str]) -> dict[str, Any]:
    """`meaning` of a training stage, on any hardware; `inputs` as of `build_plan`. Raises PlanError."""
    spec = _stage(pipeline, stage_name).train
    if spec is None:
        raise PlanError(f"stage {stage_name!r} does not train", where=stage_name)
    known = {f"stages.{name}.output": folder for name, folder in inputs.items()}
    return meaning(spec, _model(spec, _config(spec, known), known), _data(spec, known))


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


def _fill(value: Any, known: Mapping[str, str]) -> Any:
    """Placeholders in text, also inside lists and mappings; text with one that is not known yet stays."""
    if isinstance(value, dict):
        return {key: _fill(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, known) for item in value]
    if isinstance(value, str):
        return resolve(value, known, partial=not set(names(value)) <= known.keys())
    return value


def _launch(stage: Stage, hardware: Hardware, known: Mapping[str, str], plan: TrainPlan | None) -> Launch:
    env = {key: resolve(value, known, partial=True) for key, value in stage.env.items()}
    train = stage.train
    distributed = train is not None or stage.evaluate is not None
    if distributed:
        env = {key: _fill(value, known) for key, value in stage.env.items()}
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


def _config(spec: Train, known: Mapping[str, str]) -> LlamaConfig | None:
    """The preset's shape with the user's changes and the tokens' vocabulary; None for a model of theirs."""
    if not isinstance(spec.model, PresetModel):
        return None
    changes = spec.model.model_dump(exclude_none=True, exclude={"preset", "seq_len"})
    found = None if isinstance(spec.data, OwnData) else _vocab_size(_fill(spec.data.tokens, known))
    if found is not None and found > changes.get("vocab_size", found):
        raise PlanError(
            f"model.vocab_size is {changes['vocab_size']}, but there are {found} tokens in the data",
            where=spec.model.preset,
            hint="leave vocab_size away: it is taken from the data",
        )
    if found is not None:  # rounded to what matmuls like; the rest is never a target
        changes.setdefault("vocab_size", -(-found // 64) * 64)
    config = dataclasses.replace(PRESETS[spec.model.preset], **changes)
    problems = config.problems()
    if problems:
        raise PlanError(f"no model has this shape: {'; '.join(problems)}", where=spec.model.preset)
    if spec.model.seq_len > config.max_seq_len:
        raise PlanError(
            f"seq_len {spec.model.seq_len} is more than the {config.max_seq_len} positions of the model",
            where=spec.model.preset,
            hint=f"write seq_len: {config.max_seq_len}, or raise model.max_seq_len",
        )
    return config


def _vocab_size(folder: str) -> int | None:
    """Of the tokens in `folder`; None before they exist."""
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        return None
    try:
        size = json.loads(path.read_bytes())["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"not a manifest of token files: {error}", where=str(path), hint="write it with mlpipe-corpus"
        ) from None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(f"vocab_size {size!r} is no size of a vocabulary", where=str(path))
    return size


def _train(
    spec: Train, hardware: Hardware, known: Mapping[str, str], *, resume: bool, traced: Traced | None
) -> TrainPlan:
    chosen, reason = pick(spec, _config(spec, known) or traced, hardware)
    return _train_plan(spec, hardware, known, chosen, reason, global_batch(spec), resume=resume)


def _evaluate(pipeline: Pipeline, stage: Stage, hardware: Hardware, known: Mapping[str, str]) -> EvaluatePlan:
    """On its own resources the strategy is chosen anew, since they may be of another number. The batch need
    not be the training's: as many whole sequences as one pass takes."""
    train_stage = train_stage_of(pipeline, stage)
    spec, evaluate = pipeline.stage(train_stage).train, stage.evaluate
    if spec is None or evaluate is None:
        raise PlanError(f"stage {train_stage!r} does not train")
    share = -(-global_batch(spec) // hardware.world_size)
    update: dict[str, Any] = {"batch_size": share * hardware.world_size, "micro_batch": "auto"}
    if not isinstance(spec.data, OwnData):
        update["batch_tokens"] = None
    if stage.resources is not None:
        spec = spec.model_copy(update={"mesh": None, "strategy": "auto"})
    spec = spec.model_copy(update={"data": spec.data.model_copy(update=update)})
    chosen, reason = pick(spec, _config(spec, known), hardware, simplest=True)
    batch = (chosen.micro_batch or 1) * hardware.world_size
    train = _train_plan(spec, hardware, known, chosen, reason, batch, resume=True)
    train = dataclasses.replace(train, predicted=None, memory_bytes=None)  # of training's steps
    return EvaluatePlan(
        train_stage=train_stage,
        train=train,
        data=train.data,
        max_tokens=evaluate.max_tokens,
        gate=evaluate.gate,
        prompt=evaluate.prompt,
        generate_tokens=evaluate.generate_tokens,
    )


def _train_plan(
    spec: Train,
    hardware: Hardware,
    known: Mapping[str, str],
    chosen: Candidate,
    reason: str,
    batch: int,
    *,
    resume: bool,
) -> TrainPlan:
    if chosen.mesh is None or chosen.micro_batch is None:
        raise PlanError(chosen.reason)
    config = _config(spec, known)
    model, data = _model(spec, config, known), _data(spec, known)
    every = parse_cadence(spec.checkpoint.every)
    peak = hardware.peak_flops.get(chosen.precision)
    return TrainPlan(
        model=model,
        data=data,
        optimizer=_optimizer(spec),
        checkpoint=CheckpointPlan(
            every_steps=every.steps,
            every_seconds=every.seconds,
            keep=spec.checkpoint.keep,
            asynchronous=spec.checkpoint.asynchronous,
        ),
        steps=spec.steps,
        global_batch=batch,
        micro_batch=chosen.micro_batch,
        accumulation=batch // (chosen.micro_batch * chosen.mesh.data_ranks),
        strategy=chosen.strategy,
        mesh=chosen.mesh,
        reason=reason,
        precision=cast(Any, chosen.precision),
        activation_checkpointing=cast(Any, chosen.activation_checkpointing),
        compile=spec.compile,
        deterministic=spec.deterministic,
        seed=spec.seed,
        hang_timeout_seconds=parse_seconds(spec.hang_timeout),
        num_flops_per_token=num_flops_per_token(config, spec.model.seq_len) if config else None,
        peak_flops=peak,
        peak_name=f"{hardware.name} datasheet, dense {chosen.precision}" if peak else "measured matmul peak",
        resume=resume,
        reduce_gradients=chosen.reduce_gradients,
        predicted=_predicted(chosen, hardware),
        memory_bytes=hardware.memory_bytes,
        smaller_micro_batches=_smaller(spec, chosen, batch),
        meaning=meaning(spec, model, data),
    )


def _smaller(spec: Train, chosen: Candidate, batch: int) -> tuple[int, ...]:
    if spec.data.micro_batch != "auto" or chosen.mesh is None or chosen.micro_batch is None:
        return ()
    sizes = micro_batches(batch, chosen.mesh.data_ranks, None)
    return tuple(n for n in sizes if n < chosen.micro_batch and chosen.micro_batch % n == 0)


def _predicted(chosen: Candidate, hardware: Hardware) -> Prediction | None:
    if chosen.memory is None or chosen.seconds is None:
        return None
    ratios = hardware.speed.memory_ratio, hardware.speed.time_ratio
    # five digits: the rest is noise of the last bit, which would make plans differ from machine to machine
    return Prediction(chosen.memory.total, float(f"{chosen.step_seconds:.5g}"), *ratios)


def _model(spec: Train, config: LlamaConfig | None, known: Mapping[str, str]) -> ModelPlan:
    model = spec.model
    if isinstance(model, PresetModel) and config is not None:
        return ModelPlan(Entry(LLAMA, dataclasses.asdict(config)), model.preset, model.seq_len, ())
    own = cast(OwnModel, model)
    return ModelPlan(Entry(own.entry, _fill(own.args, known)), None, own.seq_len, own.blocks)


def _data(spec: Train, known: Mapping[str, str]) -> DataPlan:
    if isinstance(spec.data, OwnData):
        return DataPlan(None, Entry(spec.data.entry, _fill(spec.data.args, known)), None)
    folder = _fill(spec.data.tokens, known)
    path = Path(folder) / "manifest.json"
    return DataPlan(folder, None, hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None)


def _optimizer(spec: Train) -> OptimizerPlan:
    decay = spec.optimizer.decay_steps or max(1, spec.steps // 10)
    return OptimizerPlan(
        **spec.optimizer.model_dump() | {"decay_steps": decay if spec.optimizer.schedule == "wsd" else 0}
    )
