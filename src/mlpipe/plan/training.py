"""A training's part of the pipeline file, on given hardware, to a TrainPlan: the shape of its model, the best
candidate, and all that the trainer is told. Only the manifest of the tokens is read, once it exists."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast, get_args

from mlpipe._core.errors import PlanError
from mlpipe._core.feasibility import not_with_experts, too_long
from mlpipe._core.gate import BUILT_IN
from mlpipe._core.pipelines import stages_per_rank, why_not
from mlpipe._core.presets import LLAMA, MoeConfig
from mlpipe._core.units import parse_bytes, parse_cadence, parse_seconds
from mlpipe.kinds.train.spec import OwnModel, PresetModel, PretrainedModel, Train
from mlpipe.plan import meaning as meanings
from mlpipe.plan.axes import dp_shard
from mlpipe.plan.candidates import (
    buckets_of,
    compress_plan,
    enumerate_candidates,
    exchange_of,
    global_batch,
    islands_plan,
    micro_batches,
    num_data_ranks,
    packing_of,
    pick,
    reads_on_demand,
    refuse,
    schedule_of,
    uneven_of,
)
from mlpipe.plan.choose import Candidate, rank
from mlpipe.plan.data import ChatFile, ChatPlan, DataPlan, FilesPlan, SourcePlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import AdapterPlan, InitPlan, ModelPlan
from mlpipe.plan.pricing import flags_of
from mlpipe.plan.references import stage_named
from mlpipe.plan.settings import Communication, ContextExchange, compiled
from mlpipe.plan.shapes import presets, trained
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import ModelShape
from mlpipe.plan.stages import num_blocks_of
from mlpipe.plan.tensors import COMPUTE_BYTES
from mlpipe.plan.updates import EmaPlan, OptimizerPlan, ParameterGroup
from mlpipe.plan.validation import BestPlan, MetricPlan, StopPlan, ValidatePlan
from mlpipe.plan.work import CallbackPlan, CheckpointPlan, Prediction, ProfilePlan, TrackerPlan, TrainPlan
from mlpipe.spec.data import (
    BUCKET,
    DEFAULT_CACHE,
    ChatData,
    MixData,
    OwnData,
    OwnSource,
    Source,
    TokenData,
    TokenSource,
)
from mlpipe.spec.model import Pipeline
from mlpipe.spec.optimizer import Optimizer, OwnOptimizer, OwnSchedule
from mlpipe.spec.placeholders import fill, names
from mlpipe.spec.tracking import settings_of
from mlpipe.spec.validation import OwnMetric

if TYPE_CHECKING:
    from mlpipe.plan.shapes.traced import Traced
    from mlpipe.spec.validate import Validate

Known = Mapping[str, str]  # what placeholders stand for


def train_plan(
    spec: Train, hardware: Hardware, known: Known, *, resume: bool, traced: Traced | None = None
) -> TrainPlan:
    """The best way to train it. `traced`: the numbers of a user's own model. Raises PlanError."""
    shape = shape_of(spec, known, traced)
    if hardware.groups:
        from mlpipe.plan import groups  # of few plans

        chosen, mixed = groups.deal(_with_chat(spec, known), shape, hardware)
        words = (
            f"{chosen.strategy}: each group has as much of a batch as it computes in the time of the others"
        )
        plan = _train_plan(spec, hardware, known, chosen, words, global_batch(spec))
        plan = groups.with_shares(plan, mixed)
    else:
        chosen, reason = pick(_with_chat(spec, known), shape, hardware)
        plan = _train_plan(spec, hardware, known, chosen, reason, global_batch(spec))
    if traced is not None and plan.pipeline is not None:
        plan = plan._replace(pipeline=plan.pipeline._replace(cut=traced.cut))
    return plan._replace(resume=resume, init_from=init_plan(spec, known), freeze=spec.freeze or ())


def adapter_plan(spec: Train) -> AdapterPlan | None:
    """None: there is none."""
    if spec.adapter is None:
        return None
    lora = spec.adapter.lora
    patterns = () if lora.targets == "auto" else lora.targets
    alpha = lora.alpha or float(lora.rank)
    return AdapterPlan(lora.rank, alpha, patterns, lora.dropout, lora.rslora, lora.dora, spec.adapter.base)


def evaluation_plan(spec: Train, hardware: Hardware, known: Known, *, own_resources: bool) -> TrainPlan:
    """For an evaluation of what `spec` trains. On its own resources the strategy is chosen anew, since they
    may be of another number. The batch need not be the training's: as many whole sequences as one pass takes.
    Raises PlanError."""
    alone: dict[str, Any] = {
        "accumulation": None,
        "compress": None,
        "update": None,
        "profile": None,
        "offload": None,
        "loss": None,
        "float8": None,
    }
    alone |= {"buckets": None}
    spec = spec.model_copy(update={**alone, "communication": "collective", "stragglers": "leave"})
    if spec.pipeline is not None:
        free = spec.pipeline.model_copy(update={"microbatches": "auto"})
        spec = spec.model_copy(update={"pipeline": free})
    if own_resources:
        spec = spec.model_copy(update={"mesh": None, "strategy": "auto"})
    num_readers = num_data_ranks(spec, hardware)
    share = -(-global_batch(spec) // num_readers)
    update: dict[str, Any] = {"batch_size": share * num_readers, "micro_batch": "auto"}
    if isinstance(spec.data, TokenData):
        update["batch_tokens"] = None
    spec = spec.model_copy(update={"data": spec.data.model_copy(update=update)})
    chosen, reason = pick(spec, shape_of(spec, known), hardware, simplest=True)
    batch = (chosen.micro_batch or 1) * num_readers
    train = _train_plan(spec, hardware, known, chosen, reason, batch)
    # these are of training's steps
    off: dict[str, Any] = {"callbacks": (), "track": (), "validate": None}
    return train._replace(predicted=None, memory_bytes=None, **off)


def shape_of(spec: Train, known: Known, traced: Traced | None = None) -> ModelShape | None:
    """What the model's size is read off; None: a user's own that nobody has traced. Raises PlanError."""
    return trained.without(_preset(spec, known) or traced, spec.freeze, adapter_plan(spec))


def trainings(pipeline: Pipeline) -> dict[str, Train]:
    """Of the stages that train, by name, in the order of the file."""
    parts = {stage.name: stage.part(Train) for stage in pipeline.stages}
    return {name: part for name, part in parts.items() if part is not None}


def compare(
    pipeline: Pipeline,
    stage_name: str,
    hardware: Hardware,
    inputs: Mapping[str, str] | None = None,
    traced: Traced | None = None,
) -> list[Candidate]:
    """Every way to train the stage on this hardware, best first, also what its file does not ask for; none
    for a stage that does not train, or on groups of machines that differ. Raises PlanError."""
    spec = stage_named(pipeline, stage_name).part(Train)
    if spec is None or hardware.groups:  # of groups the plan itself says what each does
        return []
    known = _outputs(inputs or {})
    return rank(enumerate_candidates(_with_chat(spec, known), shape_of(spec, known, traced), hardware))


def explain_groups(
    pipeline: Pipeline, stage_name: str, hardware: Hardware, traced: Traced | None = None
) -> list[str]:
    """Of a training on groups of machines that differ, why it is done so. Raises PlanError."""
    from mlpipe.plan import groups

    spec = training_of(pipeline, stage_name)
    return groups.explain(_with_chat(spec, {}), shape_of(spec, {}, traced), hardware)


def meaning_of(pipeline: Pipeline, stage_name: str, inputs: Mapping[str, str]) -> dict[str, Any]:
    """What the training of a stage is about, on any hardware (see `plan/meaning.py`); `inputs` as of
    `build_plan`. Raises PlanError."""
    spec, known = training_of(pipeline, stage_name), _outputs(inputs)
    return _meaning(spec, _model(spec, _preset(spec, known), known), data_plan(spec, known), known)


def _meaning(spec: Train, model: ModelPlan, data: DataPlan, known: Known) -> dict[str, Any]:
    revision = _located(spec.model, known)[1] if isinstance(spec.model, PretrainedModel) else None
    return meanings.meaning(spec, model, data, revision)


def training_of(pipeline: Pipeline, stage_name: str) -> Train:
    """What a stage that trains says of it. Raises PlanError for another stage."""
    spec = stage_named(pipeline, stage_name).part(Train)
    if spec is None:
        raise PlanError(f"stage {stage_name!r} does not train", where=stage_name)
    return spec


def _outputs(inputs: Mapping[str, str]) -> Known:
    return {f"stages.{name}.output": folder for name, folder in inputs.items()}


def _preset(spec: Train, known: Known) -> Dense | None:
    """The preset's shape with the user's changes and the tokens' vocabulary, or that of open weights; None
    for a model of theirs, and for weights that another stage has not made yet."""
    if isinstance(spec.model, PretrainedModel):
        shape = _pretrained(spec.model, _located(spec.model, known)[0], _vocab_in_data(spec, known))
        if shape is not None and isinstance(shape.config, MoeConfig):  # which config.json says, not the file
            for key in ("compress", "update", "float8"):
                if getattr(spec, key):
                    refuse(not_with_experts(key), where=spec.model.pretrained)
        return shape
    if not isinstance(spec.model, PresetModel):
        return None
    changes = spec.model.model_dump(exclude_none=True, exclude={"preset", "seq_len"})
    in_data = _vocab_in_data(spec, known)
    if in_data is not None and in_data > changes.get("vocab_size", in_data):
        raise PlanError(
            f"model.vocab_size is {changes['vocab_size']}, but there are {in_data} tokens in the data",
            where=spec.model.preset,
            hint="leave vocab_size away: it is taken from the data",
        )
    if in_data is not None:  # rounded to what matmuls like; the rest is never a target
        changes.setdefault("vocab_size", -(-in_data // 64) * 64)
    shape = presets.preset(spec.model.preset, changes)
    for conflict in shape.config.conflicts():
        refuse(conflict, where=spec.model.preset)
    refuse(too_long(spec.model.seq_len, shape.config.max_seq_len), where=spec.model.preset)
    return shape


def _located(model: PretrainedModel, known: Known) -> tuple[str, str | None]:
    """The folder of open weights, as far as it is known where other stages put theirs, and its commit."""
    folder = fill(model.pretrained, known)
    if names(folder):
        return folder, None
    from mlpipe.plan.shapes import pretrained  # of few plans

    return pretrained.located(folder, model.revision)


def _pretrained(model: PretrainedModel, folder: str, in_data: int | None) -> Dense | None:
    """None: another stage makes the folder, and has not yet."""
    if names(folder):
        return None
    from mlpipe.plan.shapes import pretrained

    config, sizes = pretrained.described(folder)
    if in_data is not None and in_data > sizes.vocab_size:
        raise PlanError(
            f"the model knows {sizes.vocab_size} tokens, but there are {in_data} in the data",
            where=model.pretrained,
            hint="make the tokens with the model's own tokenizer",
        )
    refuse(too_long(model.seq_len, pretrained.longest(config, sizes)), where=model.pretrained)
    return presets.of(sizes)


def _vocab_in_data(spec: Train, known: Known) -> int | None:
    """The most tokens that a folder of these knows; None before they exist."""
    sizes = [
        _vocab_size(source.tokens) for source in data_plan(spec, known).sources if source.tokens is not None
    ]
    return max((size for size in sizes if size is not None), default=None)


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


def _train_plan(
    spec: Train, hardware: Hardware, known: Known, chosen: Candidate, reason: str, batch: int
) -> TrainPlan:
    if chosen.mesh is None or chosen.micro_batch is None:
        raise PlanError(chosen.reason)
    shape = _preset(spec, known)
    model, data = _model(spec, shape, known), data_plan(spec, known)
    every = parse_cadence(spec.checkpoint.every)
    peak = hardware.peak_flops.get(chosen.precision)
    return TrainPlan(
        model=model,
        data=data,
        optimizer=_optimizer(spec, known),
        checkpoint=CheckpointPlan(
            every_steps=every.steps,
            every_seconds=every.seconds,
            keep=spec.checkpoint.keep,
            asynchronous=spec.checkpoint.asynchronous,
        ),
        steps=spec.steps,
        global_batch=batch,
        micro_batch=chosen.micro_batch,
        accumulation=batch // (chosen.micro_batch * chosen.mesh.num_data_ranks),
        strategy=chosen.strategy,
        mesh=chosen.mesh,
        reason=reason,
        precision=cast(Any, chosen.precision),
        activation_checkpointing=cast(Any, chosen.activation_checkpointing),
        compile=compiled(spec.compile, chosen.mesh, chosen.activation_checkpointing),
        deterministic=spec.deterministic,
        seed=spec.seed,
        hang_timeout_seconds=parse_seconds(spec.hang_timeout),
        num_flops_per_token=shape.flops_per_token(spec.model.seq_len) if shape else None,
        peak_flops=peak,
        peak_name=f"{hardware.name} datasheet, dense {chosen.precision}" if peak else "measured matmul peak",
        resume=True,
        **cast(Any, flags_of(chosen.strategy, chosen.communication)),
        communication=chosen.communication,
        moves_load=spec.stragglers == "move_load",
        shared_memory_bytes=_shared(chosen, shape, hardware),
        reduce_gradients=chosen.reduce_gradients,
        ema=EmaPlan(spec.ema.decay, spec.ema.every) if spec.ema else None,
        predicted=_predicted(chosen, hardware, _idle(_with_chat(spec, known), shape, hardware, chosen)),
        memory_bytes=hardware.memory_bytes,
        smaller_micro_batches=_smaller(spec, chosen, batch),
        adapter=adapter_plan(spec),
        meaning=_meaning(spec, model, data, known),
        callbacks=tuple(
            CallbackPlan(one.entry, fill(one.args, known), one.ranks) for one in spec.callbacks or ()
        ),
        track=trackers(spec),
        validate=None if spec.validate_ is None else _validate(spec.validate_, known),
        pipeline=_pipeline(spec, shape, chosen.mesh),
        context_exchange=_exchange(spec, chosen),
        offload=spec.offload or "off",
        loss=spec.loss or "logits",
        float8=bool(spec.float8),
        host_memory_bytes=(chosen.host_bytes if hardware.device == "cuda" else 0) or None,
        compress=compress_plan(spec),
        islands=islands_plan(spec),
        buckets=buckets_of(spec, chosen.mesh),
        profile=None
        if spec.profile is None
        else ProfilePlan(spec.profile.at, spec.profile.steps, spec.profile.memory),
    )


def _shared(chosen: Candidate, shape: ModelShape | None, hardware: Hardware) -> int | None:
    """Of a node, which may have several copies; GPUs have it in their own memory."""
    apart = chosen.communication != "on_demand" or hardware.device != "cpu"
    if apart or shape is None or chosen.mesh is None:
        return None
    shown = dp_shard.shown_bytes(shape.parameters, COMPUTE_BYTES[chosen.precision])
    return shown * (hardware.devices_per_node // chosen.mesh.dp_shard)


def _exchange(spec: Train, chosen: Candidate) -> ContextExchange:
    """Of a model that nobody could price, too."""
    asked = exchange_of(spec)
    uses = chosen.mesh is not None and chosen.mesh.cp > 1
    return asked if uses and asked != "auto" else chosen.context_exchange


def _pipeline(spec: Train, shape: Dense | None, mesh: Mesh) -> PipelinePlan | None:
    schedule = schedule_of(spec)
    if mesh.pp == 1:
        return None
    if isinstance(spec.model, OwnModel):
        asked = spec.pipeline.cut if spec.pipeline is not None else "auto"
        return PipelinePlan(schedule, (), () if asked == "auto" else asked)
    if shape is None:
        return PipelinePlan(schedule, ())
    num_stages = mesh.pp * stages_per_rank(schedule)
    return PipelinePlan(schedule, num_blocks_of(shape, spec.model.seq_len, num_stages))


def metric_plans(metrics: Sequence[str | OwnMetric], known: Known) -> tuple[MetricPlan, ...]:
    """Those of mlpipe's by name, and the user's own."""
    return tuple(
        MetricPlan(one.label, one.entry, fill(one.args, known))
        if isinstance(one, OwnMetric)
        else MetricPlan(one)
        for one in metrics
    )


def _validate(spec: Validate, known: Known) -> ValidatePlan:
    best, stop = spec.best, spec.stop
    return ValidatePlan(
        every_steps=parse_cadence(spec.every).steps or 1,
        max_tokens=spec.max_tokens,
        metrics=metric_plans(spec.metrics, known),
        best=None if best is None else BestPlan(best.metric, best.mode or BUILT_IN[best.metric]),
        stop=None if stop is None else StopPlan(stop.patience, stop.min_delta),
        sample=spec.sample,
        generate_tokens=spec.generate_tokens,
    )


def trackers(spec: Train) -> tuple[TrackerPlan, ...]:
    """Who is told of the training."""
    named = [settings_of(tracker) for tracker in spec.track or ()]
    return tuple(TrackerPlan(cast(Any, name), settings) for name, settings in named)


def _smaller(spec: Train, chosen: Candidate, batch: int) -> tuple[int, ...]:
    passes = (spec.accumulation, spec.pipeline.microbatches if spec.pipeline is not None else None)
    asked = any(isinstance(number, int) for number in passes) or spec.data.micro_batch != "auto"
    if asked or chosen.mesh is None or chosen.micro_batch is None or batch % chosen.mesh.num_data_ranks:
        return ()
    mesh, share = chosen.mesh, batch // chosen.mesh.num_data_ranks
    sizes = micro_batches(batch, mesh.num_data_ranks, None)
    smaller = (n for n in sizes if n < chosen.micro_batch and chosen.micro_batch % n == 0)
    return tuple(n for n in smaller if why_not(schedule_of(spec), mesh.pp, share // n) is None)


def _with_chat(spec: Train, known: Known) -> Train:
    """Its conversations where another stage has put them, once it has."""
    if not isinstance(spec.data, ChatData):
        return spec
    files = tuple(one.model_copy(update={"path": fill(one.path, known)}) for one in spec.data.files)
    chat = files[0].path if isinstance(spec.data.chat, str) else files
    data = spec.data.model_copy(update={"chat": chat})
    return spec.model_copy(update={"data": data})


def _idle(spec: Train, shape: ModelShape | None, hardware: Hardware, chosen: Candidate) -> dict[str, float]:
    """As of `Prediction`: three digits, of the ways that the file may ask for."""
    uneven = uneven_of(spec, shape)
    mesh = chosen.mesh
    if uneven is None or mesh is None or chosen.micro_batch is None or mesh.num_data_ranks == 1:
        return {}
    if spec.update is not None or hardware.groups:  # its workers meet every so many steps, or differ
        return {}
    capacity = chosen.micro_batch * spec.model.seq_len
    ways = get_args(Communication) if mesh.ep == 1 else ("collective",)
    if not reads_on_demand(mesh, hardware):
        ways = tuple(way for way in ways if way != "on_demand")
    return {way: round(uneven.idle(mesh, capacity, way, hardware.device), 3) for way in ways}


def _predicted(chosen: Candidate, hardware: Hardware, idle: dict[str, float]) -> Prediction | None:
    if chosen.memory is None or chosen.seconds is None:
        return None
    ratios = hardware.speed.memory_ratio, hardware.speed.time_ratio
    # five digits: the rest is noise of the last bit, which would make plans differ from machine to machine
    return Prediction(chosen.memory.total, float(f"{chosen.step_seconds:.5g}"), *ratios, idle)


def starts_from_weights(spec: Train) -> bool:
    """Other ones than the seed's."""
    return spec.init_from is not None or isinstance(spec.model, PretrainedModel)


def init_plan(spec: Train, known: Known) -> InitPlan | None:
    """Where its weights come from, as it is asked for; nobody has looked there."""
    if isinstance(spec.model, PretrainedModel):
        from mlpipe.plan.shapes import pretrained

        asked = spec.model.model_dump(exclude_none=True, include={"pretrained", "revision"})
        asked["path"] = asked.pop("pretrained")
        folder, revision = _located(spec.model, known)
        config = {} if names(folder) else pretrained.described(folder)[0]
        return InitPlan(asked, folder, {}, strict=True, config=config, revision=revision)
    if spec.init_from is None:
        return None
    asked = spec.init_from.model_dump(mode="json", exclude_none=True, exclude={"map", "strict"})
    path = fill(asked["path"], known) if "path" in asked else None
    return InitPlan(asked, path, spec.init_from.map, spec.init_from.strict)


def _model(spec: Train, shape: Dense | None, known: Known) -> ModelPlan:
    model = spec.model
    if isinstance(model, PresetModel) and shape is not None:
        return presets.model_plan(shape, model.preset, model.seq_len)
    if isinstance(model, PretrainedModel):
        if shape is None:  # nobody starts before it is planned again
            return ModelPlan(Entry(LLAMA, {}), None, model.seq_len, ())
        return presets.model_plan(shape, PurePath(model.pretrained).name, model.seq_len)
    own = cast(OwnModel, model)
    return ModelPlan(Entry(own.entry, fill(own.args, known)), None, own.seq_len, own.blocks, dict(own.tensor))


def data_plan(spec: Train, known: Known) -> DataPlan:
    """Where its samples come from."""
    data = spec.data
    if isinstance(data, TokenData):
        source = _source(1.0, data, known)
        return DataPlan(source.tokens, None, source.digest, cache_bytes=source.cache_bytes)
    if isinstance(data, ChatData):
        return DataPlan(None, None, None, chat=_chat(spec, data, known))
    read: dict[str, Any] = {"collate": data.collate, "workers": data.workers}
    if isinstance(data, MixData):
        mix = tuple(_source(source.weight, source, known) for source in data.mix)
        return DataPlan(None, None, None, **read, mix=mix)
    if isinstance(data, OwnData):
        read |= {"splits": data.splits, "packing": data.packing}
    source = _source(1.0, data, known)
    return DataPlan(None, source.dataset, None, **read, cache_bytes=source.cache_bytes, files=source.files)


def _chat(spec: Train, data: ChatData, known: Known) -> ChatPlan:
    tokenizer = data.tokenizer
    if tokenizer is None and isinstance(spec.model, PretrainedModel):
        tokenizer, _ = _located(spec.model, known)
    validation, tokenizer, template = (
        fill(text, known) for text in (data.validation, tokenizer, data.template)
    )
    files = tuple(ChatFile(fill(one.path, known), one.weight) for one in data.files)
    path, mix = (files[0].path, ()) if isinstance(data.chat, str) else (None, files)
    return ChatPlan(path, validation, tokenizer, template, packing_of(spec), mix)


def _source(weight: float, source: Source, known: Known) -> SourcePlan:
    if isinstance(source, OwnData | OwnSource):
        return SourcePlan(weight, None, Entry(source.entry, fill(source.args, known)), None)
    if not isinstance(source, TokenData | TokenSource):
        path, validation, tokenizer = (
            fill(text, known) for text in (source.path, source.validation, source.tokenizer)
        )
        files = FilesPlan(source.format, path, validation, source.columns or {}, tokenizer)
        return SourcePlan(weight, None, None, None, _cache(path, source.cache), files)
    folder = fill(source.tokens, known)
    if folder.startswith(BUCKET):
        return SourcePlan(weight, folder, None, None, _cache(folder, source.cache))
    path = Path(folder) / "manifest.json"
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return SourcePlan(weight, folder, None, digest)


def _cache(path: str, asked: str | None) -> int | None:
    return parse_bytes(asked or DEFAULT_CACHE) if path.startswith(BUCKET) else None


def _optimizer(spec: Train, known: Mapping[str, str]) -> OptimizerPlan:
    chosen = spec.optimizer
    decay = chosen.decay_steps or max(1, spec.steps // 10)
    return OptimizerPlan(
        name=None if isinstance(chosen, OwnOptimizer) else chosen.name,
        entry=chosen.entry if isinstance(chosen, OwnOptimizer) else None,
        args=fill(chosen.arguments, known),
        state_bytes_per_parameter=chosen.state_bytes_per_parameter,
        lr=chosen.lr,
        grad_clip=chosen.norm_limit,
        schedule="own" if isinstance(chosen.schedule, OwnSchedule) else chosen.schedule,
        warmup_steps=chosen.warmup_steps,
        decay_steps=decay if chosen.schedule == "wsd" else 0,
        min_lr_ratio=chosen.min_lr_ratio,
        power=chosen.power,
        own_schedule=_own_schedule(chosen, known),
        clip_value=chosen.clip_value,
        groups=tuple(
            ParameterGroup(group.match, group.lr_scale, group.weight_decay) for group in chosen.groups or ()
        ),
    )


def _own_schedule(chosen: Optimizer, known: Known) -> Entry | None:
    schedule = chosen.schedule
    return Entry(schedule.entry, fill(schedule.args, known)) if isinstance(schedule, OwnSchedule) else None
