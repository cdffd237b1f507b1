"""The keys of a stage that trains, and the rules between them."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlpipe._core import meshes
from mlpipe._core.feasibility import Infeasible, not_with_experts
from mlpipe._core.meshes import STRATEGIES, Strategy
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe._core.pipelines import DEFAULT, stages_per_rank
from mlpipe._core.presets import PRESETS, MoeConfig
from mlpipe._core.units import parse_seconds
from mlpipe.spec import data, feasibility, links, starting, tracking, validation
from mlpipe.spec import fields as f
from mlpipe.spec import optimizer as optimizers
from mlpipe.spec.base import OnNeedOf, SpecModel
from mlpipe.spec.data import AnyData, OwnData, TokenData
from mlpipe.spec.optimizer import AnyOptimizer, default_optimizer
from mlpipe.spec.part import SpecPart
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, each_alone, get, problem_of_key, text_of

if TYPE_CHECKING:
    from mlpipe.spec.callbacks import Callback
    from mlpipe.spec.layout import Context, MeshSizes, Pipelining
    from mlpipe.spec.models import OwnModel as OwnModel
    from mlpipe.spec.models import PretrainedModel as PretrainedModel
    from mlpipe.spec.optimizer_parts import Ema
    from mlpipe.spec.profile import Profile
    from mlpipe.spec.smoke import Smoke
    from mlpipe.spec.validate import Validate
else:  # imported for the trainings that have them
    _layout, _models = OnNeedOf("layout"), OnNeedOf("models")
    Context, MeshSizes, Pipelining = _layout.Context, _layout.MeshSizes, _layout.Pipelining
    OwnModel, PretrainedModel = _models.OwnModel, _models.PretrainedModel
    Callback, Ema = OnNeedOf("callbacks").Callback, OnNeedOf("optimizer_parts").Ema
    Profile, Validate = OnNeedOf("profile").Profile, OnNeedOf("validate").Validate

Preset = Literal[
    "llama-1m", "llama-4m", "llama-8m", "llama-25m", "llama-125m",
    "llama-350m", "llama-1b", "llama-3b", "llama-8b", "llama-70b",
    "moe-2m", "moe-8m", "moe-7b", "moe-16b", "moe-8x7b",
]  # fmt: skip
# Strategies that have what these keys need.
_AVERAGING = ("single", "ddp", "zero1")
_WITH_COPIES = {"compress": _AVERAGING, "update": ("single", "ddp", "hsdp"), "buckets": _AVERAGING}
_WITH_SHARDS = tuple(name for name, axes in STRATEGIES.items() if axes == ("dp_shard",))
_WITHIN_NODES = tuple(name for name, axes in STRATEGIES.items() if axes == ("dp_replicate", "dp_shard"))
_TINY_SEQ_LEN = 64
_SHORTEST_HANG_SECONDS = 1.0  # the watchdog looks twice a second


class PresetModel(SpecModel):
    """One of mlpipe's Llama-style models; any number of its shape can be changed."""

    preset: Preset = Field(description="Name of the shape.")
    seq_len: f.Count = Field(description="Tokens in a sample.")
    vocab_size: f.Count | None = Field(
        None, description="Default: of the tokens, rounded up to a multiple of 64."
    )
    dim: f.Count | None = Field(None, description="Width of the model.")
    num_layers: f.Count | None = Field(None, description="Blocks.")
    num_heads: f.Count | None = Field(None, description="Query heads.")
    num_kv_heads: f.Count | None = Field(None, description="Key and value heads.")
    ffn_dim: f.Count | None = Field(None, description="Width of the feed-forward layer.")
    max_seq_len: f.Count | None = Field(None, description="Longest sequence the positions allow.")
    rope_theta: f.Positive | None = Field(None, description="Base of the rotary frequencies.")
    norm_eps: f.Positive | None = Field(None, description="Epsilon of the RMSNorms.")
    tied: bool | None = Field(None, description="Whether the head shares the input embedding's matrix.")
    num_experts: f.Count | None = Field(None, description="Of a `moe-*` preset: experts of a block.")
    experts_per_token: f.Count | None = Field(None, description="Of these, how many compute a token.")
    num_shared_experts: f.CountOrZero | None = Field(None, description="More of them, for every token.")
    balance_rate: f.NotNegative | None = Field(
        None, description="How fast experts are balanced: by so much a step moves the bias of each; 0: never."
    )
    capacity_factor: f.Positive | None = Field(
        None,
        description="Most tokens of a worker's micro-batch that an expert learns from, over the mean; the "
        "others pass it by. Default: none do.",
    )


class Checkpoint(SpecModel):
    """When to save and what to retain."""

    every: f.Every = Field("15 min", description="Steps or time between two, like `100 steps`.")
    keep: f.Count = Field(3, description="Checkpoints to retain.")
    asynchronous: bool = Field(True, description="Write while the training goes on.")


def _model_tag(value: Any) -> str:
    if isinstance(value, SpecModel):
        return type(value).__name__
    keys = value if isinstance(value, dict) else {}
    return "OwnModel" if "entry" in keys else "PretrainedModel" if "pretrained" in keys else "PresetModel"


class Train(SpecModel):
    """Train a model with torchrun."""

    model: Annotated[
        Annotated[PresetModel, Tag("PresetModel")]
        | Annotated[PretrainedModel, Tag("PretrainedModel")]
        | Annotated[OwnModel, Tag("OwnModel")],
        Discriminator(_model_tag),
    ] = Field(description="A `preset`, open weights (`pretrained`), or your own `entry`.")
    data: AnyData = Field(
        description="A folder of `tokens`, files of `parquet` or `tars`, lines of `chat`, an `entry` of "
        "your own, or a `mix`."
    )
    steps: f.Count = Field(description="Optimizer steps in all.")
    optimizer: AnyOptimizer = Field(
        default_factory=default_optimizer, description="By `name`, or your own `entry`; and its schedule."
    )
    accumulation: f.CountOrAuto | None = Field(
        None,
        description="Micro-batches that a worker adds up in a step, instead of `micro_batch`. Default: "
        "`auto`, as many as that makes.",
    )
    ema: Ema | None = Field(None, description="Average of the weights. Default: none is kept.")
    init_from: starting.InitFrom | None = Field(
        None, description="Weights to start from, instead of the seed's; checkpoints of its own go before."
    )
    freeze: Annotated[tuple[f.Text, ...], Field(min_length=1, strict=False)] | None = Field(
        None,
        description="Parameters that stay as they are, by patterns of their names, like `embed_tokens.*`.",
    )
    adapter: starting.Adapter | None = Field(
        None, description="Train small matrices beside the model's own, which stay as they are."
    )
    strategy: Literal["auto", Strategy] = Field(
        "auto", description="How to split the work; `auto`: the fastest that fits."
    )
    communication: Literal["auto", "collective", "resident", "on_demand"] = Field(
        "auto",
        description="How often workers wait for each other. `collective`: at each block of a micro-batch; "
        "all have equally many. `resident`: once a step, for which weights stay gathered; who has long "
        "samples has fewer micro-batches. `on_demand`: the same, with weights read from their owners when "
        "they are needed; of several nodes each has all weights, and gradients are summed across "
        "them once a step. `auto`: for packed conversations `resident` where that fits, else `collective`.",
    )
    stragglers: Literal["leave", "move_load"] = Field(
        "leave",
        description="`move_load`: a worker that is measured slower than the others gets fewer samples of "
        "each batch. Batches and updates stay the same, but for what a worker draws at random, and the last "
        "digits of sums. `leave`: all have equal shares.",
    )
    mesh: MeshSizes | None = Field(
        None, description="Sizes of the axes that the workers are laid out on. Default: the strategy's."
    )
    pipeline: Pipelining | None = Field(
        None, description="How the stages work together, where the mesh has `pp`. Default: `schedule: 1f1b`."
    )
    context: Context | None = Field(
        None, description="How workers share a sequence, where the mesh has `cp`. Default: `exchange: auto`."
    )
    compress: links.Compress | None = Field(
        None,
        description="Send gradients in fewer bytes, by name or `{powersgd: {rank: 8}}`; what that leaves "
        "out is sent later. Default: as they are.",
    )
    update: links.Update | None = Field(
        None,
        description="Let workers learn by themselves for several steps before they agree on the weights: "
        "`local_sgd`, `diloco` or `async`, by name or with settings. Default: they average gradients in "
        "every step.",
    )
    buckets: f.SizeOrAuto | None = Field(
        None,
        description="Gradients that copies of the model average together, like `8 MiB`; `auto`: the fastest "
        "size over this link, measured for seconds before the first step. Default: DDP's, 25 MiB.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Of the matmuls; weights, gradients and loss stay fp32. `fp16` scales the loss, so that "
        "gradients fit, and skips steps in which they do not. `auto`: bf16 where the hardware computes it "
        "natively; fp16 on GPUs that have no bf16.",
    )
    float8: bool | None = Field(
        None,
        description="Products of the blocks' linear layers in float8, of GPUs that have it (Hopper and "
        "later), beside `precision: bf16`. Default: not.",
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = Field(
        "none",
        description="What to recompute in the backward pass, to save memory; `auto`: as little as fits.",
    )
    offload: Literal["activations", "optimizer", "all"] | None = Field(
        None,
        description="What waits in the host's memory, of a training on GPUs. `activations`: what recomputed "
        "blocks keep, their inputs, until the backward pass. `optimizer`: its states, and the update is the "
        "CPUs'. `all`: both. Default: nothing.",
    )
    loss: Literal["fused"] | None = Field(
        None,
        description="`fused`: head and cross-entropy of a preset or of open weights in one, some rows at a "
        "time: the logits are never whole, which spares memory of large vocabularies. Default: the loss of "
        "whole logits.",
    )
    compile: Literal["off", "block", "model"] = Field(
        "off",
        description="torch.compile: block by block, or the whole model with its loss, which takes longer to "
        "compile and is a little faster. Where weights are sharded or activations recomputed `model` is "
        "`block`.",
    )
    deterministic: bool = Field(
        False,
        description="Repeats are bit-equal (elastic: while as many take each step), and what `tp` and `cp` "
        "add up is not rounded before (but of adapters); may be slower.",
    )
    seed: f.CountOrZero = Field(0, description="Of the weights and the sample order.")
    checkpoint: Checkpoint = Field(
        default_factory=lambda: Checkpoint.model_construct(), description="When to save."
    )
    validate_: Validate | None = Field(
        None, alias="validate", description="Measure on held-out samples while training."
    )
    profile: Profile | None = Field(
        None, description="Trace some steps, and say what to change. Default: when `mlpipe profile` asks."
    )
    max_restarts: f.FewOrZero = Field(3, description="Restarts of crashed workers within an attempt.")
    hang_timeout: f.Duration = Field("10 min", description="A longer step ends the run; 1 s or more.")
    metrics_port: f.Port | Literal["off"] = Field(
        0, description="Of /metrics, plus the local rank; 0 takes any free port."
    )
    callbacks: tuple[Callback, ...] | None = Field(
        None, strict=False, description="Objects of yours that hear of each step, validation and checkpoint."
    )
    track: tuple[tracking.Tracker, ...] | None = Field(
        None,
        strict=False,
        description="Who is told of metrics, settings and checkpoints: `[tensorboard, mlflow, wandb]`, each "
        "a name or `{mlflow: {uri: ...}}`.",
    )


def _problems(stage: Node) -> Iterator[Problem]:
    yield from feasibility.problems(stage)
    yield from starting.problems(stage)
    yield from starting.adapter_problems(stage)
    train = get(stage, "train")
    if train is None or not isinstance(train.value, dict):
        return
    model = get(train, "model")
    if model is not None and isinstance(model.value, dict):
        named = [key for key in ("entry", "pretrained", "preset") if key in model.value]
        if len(named) > 1:
            yield problem_of_key(
                model.value[named[-1]],
                f"model has both {' and '.join(map(repr, named[-2:]))}",
                "keep one of them",
            )
        if not named:
            yield problem_of_key(
                model,
                "model has neither 'preset', 'pretrained' nor 'entry'",
                "add 'preset: ...', 'pretrained: ...' or 'entry: ...'",
            )
    if get(train, "communication") is not None or get(train, "stragglers") is not None:
        from mlpipe.spec import communication  # of few files

        yield from communication.problems(stage, _WITH_SHARDS, _WITHIN_NODES)
    yield from data.problems(train)
    yield from tracking.problems(train)
    yield from validation.problems(train)
    for one in each_alone(stage):
        yield from data.disk_problems(one)
    yield from _disagreement(train)
    patience = get(train, "hang_timeout")
    if patience is not None and 0 < _seconds(patience) < _SHORTEST_HANG_SECONDS:
        yield problem_of_key(
            patience, f"hang_timeout {patience.value!r} would end any run", "write 1 s or more"
        )
    yield from optimizers.problems(train)
    nodes = get(stage, "resources", "nodes")
    islands = STRATEGIES if nodes is not None and f.is_range(nodes.value) else _WITH_COPIES["update"]
    yield from links.problems(train, {**_WITH_COPIES, "update": tuple(islands)})
    yield from _never_profiled(train)
    yield from _nothing_to_offload(train)
    yield from _no_head_to_fuse(train)
    yield from _no_float8(train)


def _nothing_to_offload(train: Node) -> Iterator[Problem]:
    """Of blocks that are not recomputed nobody knows what autograd keeps of them."""
    asked, mode, compiled = (get(train, key) for key in ("offload", "activation_checkpointing", "compile"))
    if asked is None:
        return
    if text_of(asked) in ("optimizer", "all"):
        optimizer = get(train, "optimizer", "name")
        known = OPTIMIZERS.get(text_of(optimizer) or "")
        if optimizer is not None and known is not None and (known.uncut or known.averages):
            yield Problem.at(
                optimizer.place,
                f"{text_of(optimizer)} is no optimizer for the host: it computes with other workers, or its "
                "states are what is measured",
                "take adamw, or offload: activations",
            )
    if text_of(asked) not in ("activations", "all"):
        return
    if mode is None or text_of(mode) == "none":
        where = asked if mode is None else mode
        yield Problem.at(
            where.place,
            "offload takes what recomputed blocks keep, and activation_checkpointing is none",
            "write activation_checkpointing: full",
        )
    if compiled is not None and text_of(compiled) not in (None, "off"):
        yield Problem.at(
            compiled.place, "a compiled block hides what it keeps from offload", "write compile: off"
        )


def _no_head_to_fuse(train: Node) -> Iterator[Problem]:
    """What else computes with the head."""
    asked, own = get(train, "loss"), get(train, "model", "entry")
    if asked is None or asked.value is None:
        return
    if own is not None:
        yield Problem.at(
            asked.place,
            "loss: fused computes the head as well, and of your own model nobody knows where it is",
            "remove it, or return the loss from your model",
        )
    if get(train, "adapter") is not None:
        yield Problem.at(asked.place, "loss: fused computes the head without its adapter", "remove it")
    compiled = get(train, "compile")
    if compiled is not None and text_of(compiled) == "model":
        yield Problem.at(
            compiled.place,
            "loss: fused is no part of a model that is one graph",
            "write compile: block",
        )


def _no_float8(train: Node) -> Iterator[Problem]:
    """What products of other bits do not go with."""
    asked = get(train, "float8")
    if asked is None or asked.value is not True:
        return
    precision, mode = get(train, "precision"), get(train, "activation_checkpointing")
    if precision is not None and text_of(precision) in ("fp32", "fp16"):
        yield Problem.at(precision.place, "float8 stands beside bf16", "write precision: bf16")
    if mode is not None and text_of(mode) == "selective":
        yield Problem.at(
            mode.place, "selective keeps products of bf16, and float8 makes none", "write none or full"
        )
    if get(train, "adapter") is not None:
        yield Problem.at(asked.place, "float8 does not go with adapters yet", "remove it")
    preset = get(train, "model", "preset")
    if preset is not None and isinstance(PRESETS.get(str(preset.value)), MoeConfig):
        yield Problem.at(preset.place, not_with_experts("float8").message, "take a llama-* preset")


def _never_profiled(train: Node) -> Iterator[Problem]:
    """Steps that there are not."""
    at, steps = get(train, "profile", "at"), get(train, "steps")
    if at is None or steps is None or not isinstance(at.value, int) or not isinstance(steps.value, int):
        return
    if at.value > steps.value:
        words = f"profile.at is {at.value}, and the training ends at step {steps.value}"
        yield problem_of_key(at, words, f"write {max(1, steps.value // 2)}, or leave profile away")


def _disagreement(train: Node) -> Iterator[Problem]:
    """Between a mesh and a strategy that is named."""
    strategy, mesh = text_of(get(train, "strategy")) or "auto", get(train, "mesh")
    if mesh is None or strategy not in STRATEGIES:
        return
    for axis in _other_axes(strategy, mesh):
        size = get(mesh, axis)
        may = " and ".join(STRATEGIES[strategy]) or "none"
        yield Problem.at(
            size.place if size is not None else mesh.place,
            f"{strategy} has no {axis}; of the data axes it has {may}",
            "make it 1, or leave strategy away: it follows from the mesh",
        )


def _other_axes(strategy: str, mesh: Node) -> list[str]:
    """Data axes of the mesh that are not this strategy's."""
    sizes = {axis: node.value for axis in meshes.DATA_AXES if (node := get(mesh, axis)) is not None}
    return [axis for axis, size in sizes.items() if size != 1 and axis not in STRATEGIES[strategy]]


def _seconds(node: Node) -> float:
    """0 for what is no duration."""
    try:
        return parse_seconds(text_of(node) or "")
    except ValueError:
        return 0.0


def _texts(train: Node) -> Iterator[Node]:
    for path, leaf in train.walk():
        of_schedule = path[:3] == ("optimizer", "schedule", "args")
        of_item = path[:1] in (("callbacks",), ("validate",)) and "args" in path[2:4]
        of_data = path[:1] == ("data",) and data.is_text_with_placeholders(path[1:])
        of_weights = path[:2] in (("init_from", "path"), ("model", "pretrained"))
        if path[1:2] == ("args",) or of_item or of_data or of_weights or of_schedule:
            yield leaf


def _overridden(train: Node, key: Sequence[str], value: Any) -> str | None:
    """Another strategy drops a mesh that is not its own; `auto` any: it chooses one."""
    mesh = get(train, "mesh")
    if tuple(key) != ("strategy",) or mesh is None or (value != "auto" and value not in STRATEGIES):
        return None
    if value != "auto" and not _other_axes(value, mesh):
        return None
    del train.value["mesh"]
    return "drops the stage's mesh, which is of another strategy"


def _tiny_shape(train: Train, smoke: "Smoke", num_workers: int) -> dict[str, int]:
    """Sizes of the smallest shape that its own mesh can split; with fewer workers it has none."""
    sizes = (
        train.mesh.on(num_workers) if train.mesh is not None and smoke.ranks is None else Infeasible("", "")
    )
    if isinstance(sizes, Infeasible):
        sizes = dict.fromkeys(meshes.AXES, 1)
    schedule = train.pipeline.schedule if train.pipeline is not None else DEFAULT
    num_heads = max(2, sizes["tp"])
    unit = sizes["cp"] * math.lcm(2, sizes["tp"])  # divides the file's seq_len where that is longer
    return {
        "seq_len": min(train.model.seq_len, max(unit, _TINY_SEQ_LEN // unit * unit)),
        "dim": 16 * num_heads,
        "num_layers": max(2, sizes["pp"] * stages_per_rank(schedule)),
        "num_heads": num_heads,
        "num_kv_heads": sizes["tp"],
        "ffn_dim": 32 * num_heads,
    }


def _smoke(train: Train, smoke: "Smoke", num_workers: int) -> dict[str, Any]:
    """Models and data sets of the user's own stay as they are, but for the samples in a step."""
    changes: dict[str, Any] = {}
    two_axes = len(STRATEGIES.get(train.strategy, ())) == 2
    if smoke.ranks is not None and (train.mesh is not None or two_axes):
        alone = num_workers if train.update is not None else 1  # islands are copies, of which some are needed
        least = 4 if train.communication == "on_demand" else 2  # which shares weights within each copy
        replicas = 2 if num_workers % 2 == 0 and num_workers >= least else alone
        both = {"dp_replicate": replicas, "dp_shard": num_workers // replicas}
        changes["mesh"] = both if two_axes else None
    if train.pipeline is not None and smoke.ranks is not None:
        changes["pipeline"] = None
    if train.context is not None and smoke.ranks is not None:
        changes["context"] = None
    if smoke.steps is not None:
        changes["steps"] = smoke.steps
        if train.profile is not None and train.profile.at > smoke.steps:
            changes["profile"] = None
        for key in ("warmup_steps", "decay_steps"):
            if (getattr(train.optimizer, key) or 0) > smoke.steps:
                changes[f"optimizer.{key}"] = smoke.steps
    if not smoke.tiny:
        return changes
    if isinstance(train.model, PresetModel):
        shape: dict[str, Any] = {**_tiny_shape(train, smoke, num_workers), "max_seq_len": None}
        if starting.starts_outside(train.init_from):  # with weights that fit no other shape
            shape = {"seq_len": shape["seq_len"]}
        changes |= {f"model.{key}": value for key, value in shape.items()}
    if isinstance(train.data, TokenData):
        changes["data.batch_tokens"] = None
    if train.pipeline is not None and smoke.ranks is None:
        changes["pipeline.microbatches"] = "auto"
    splits = train.data.splits if isinstance(train.data, OwnData) else 1
    changes |= {"data.batch_size": 2 * math.lcm(num_workers, splits), "data.micro_batch": None}
    if train.validate_ is not None:
        changes |= {"validate.every": "2 steps", "validate.max_tokens": min(train.validate_.max_tokens, 256)}
    return {**changes, "accumulation": None, "checkpoint.every": "2 steps", "compile": "off"}


PART = SpecPart(
    Train, "Train a model.", problems=_problems, texts=_texts, overridden=_overridden, smoke=_smoke
)
