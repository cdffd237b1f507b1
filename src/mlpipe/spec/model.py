"""The pipeline a user writes, typed. One class a mapping; every field's description is its reference.

Shapes and types live here; what concerns several fields or stages at once is in `spec/rules.py`.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from mlpipe._core.yaml import to_yaml
from mlpipe.spec import fields as f
from mlpipe.spec.base import Model, one_of
from mlpipe.spec.kubernetes import Kubernetes

Preset = Literal[
    "llama-1m", "llama-4m", "llama-8m", "llama-25m", "llama-125m",
    "llama-350m", "llama-1b", "llama-3b", "llama-8b", "llama-70b",
]  # fmt: skip
Strategy = Literal["auto", "single", "ddp", "zero1", "zero2", "fsdp", "hsdp"]
Kind = Literal["command", "train", "evaluate", "promote"]
KINDS: tuple[Kind, ...] = ("command", "train", "evaluate", "promote")


class Device(Model):
    """A GPU that the catalogue lacks, or other figures for one that it has. A new one needs `memory` and
    `fp32_tflops`; what else is left out is taken for slow: PCIe within nodes, 10 Gb/s between."""

    memory: f.Size | None = Field(None, description="What the driver shows as total, like `80 GiB`.")
    fp32_tflops: f.Positive | None = Field(None, description="Dense peak outside the tensor cores.")
    bf16_tflops: f.Positive | None = Field(
        None, description="Dense peak, without sparsity. Default: it has no bf16."
    )
    achievable_ratio: f.PositiveRatio | None = Field(
        None, description="Share of the peak that its best matmul reaches."
    )
    memory_gb_per_second: f.Positive | None = Field(None, description="Bandwidth of its memory.")
    link_gb_per_second: f.Positive | None = Field(
        None, description="To the other GPUs of the node, in one direction, such as 450 for NVLink 4."
    )
    network_gb_per_second: f.Positive | None = Field(
        None, description="To other nodes, of one GPU, in one direction, such as 50 for 400 Gb/s."
    )


class Resources(Model):
    """What a stage gets, on each node and in all."""

    nodes: f.FewCount = Field(1, description="Machines.")
    workers_per_node: f.FewCount | None = Field(
        None,
        description="Worker processes on each node. Default: one per GPU, or 1 without GPUs.",
    )
    gpus_per_node: f.FewOrZero = Field(0, description="GPUs on each node; 0 trains on CPUs.")
    gpu: f.Text | None = Field(None, description="Model of the GPUs, such as `H100-80GB`.")
    cpus: f.Cpus | None = Field(
        None,
        description="CPU cores on each node. Default: what is there; in a pod 1 for each worker "
        "(4 with a GPU).",
    )
    memory: f.Size | None = Field(
        None,
        description="Memory on each node. Default: what is there; in a pod 4 GiB for each worker "
        "(32 with a GPU), 2 GiB for other stages.",
    )
    disk: f.Size | None = Field(
        None,
        description="Disk of each pod besides its volumes: scratch, cache, /tmp, logs; a pod that takes more "
        "is ended. Default: at least 2 GiB, at most 64 GiB.",
    )
    hardware: f.Text | None = Field(
        None, description="File of `mlpipe calibrate`: measured speeds instead of the catalogue's."
    )
    device: Device | None = Field(
        None, description="Figures of the GPU, where the catalogue's are not yours."
    )
    price_usd_per_gpu_hour: f.NotNegative | None = Field(
        None, description="Of one GPU, or CPU worker, for estimates of cost. Default: of the catalogue."
    )


class PresetModel(Model):
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


class OwnModel(Model):
    """A function of yours that returns a plain `nn.Module`."""

    entry: f.EntryPath = Field(description="`package.module:function`, importable where mlpipe runs.")
    args: dict[f.Text, f.Json] = Field({}, description="Keyword arguments of the function.")
    blocks: tuple[f.Text, ...] = Field(
        (),
        strict=False,
        description="Modules to shard, checkpoint and compile, such as `layers`. "
        "Default: the model's ModuleLists.",
    )
    seq_len: f.Count = Field(1, description="Tokens in a sample; 1 if samples are not text.")


class TokenData(Model):
    """A folder of token files, as `mlpipe-corpus` writes it."""

    model_config = ConfigDict(json_schema_extra=one_of("batch_tokens", "batch_size"))

    tokens: f.Text = Field(description="The folder, usually `{{stages.NAME.output}}`.")
    batch_tokens: f.Count | None = Field(
        None, description="Tokens in a step, over all workers: a multiple of `seq_len`."
    )
    batch_size: f.Count | None = Field(
        None, description="Sequences in a step, over all workers; instead of `batch_tokens`."
    )
    micro_batch: f.CountOrAuto = Field(
        "auto", description="Sequences in one forward pass of one worker; `auto`: the fastest that fits."
    )


class OwnData(Model):
    """A function of yours that returns a map-style data set."""

    entry: f.EntryPath = Field(
        description="`package.module:function`, called with `args` and `split` "
        "(`train` or `validation`); the result has `len()` and `[i] -> dict of tensors`."
    )
    args: dict[f.Text, f.Json] = Field({}, description="Keyword arguments of the function.")
    batch_size: f.Count = Field(description="Samples in a step, over all workers.")
    micro_batch: f.CountOrAuto = Field(
        "auto", description="Samples in one forward pass of one worker; `auto`: the fastest that fits."
    )


class Optimizer(Model):
    """AdamW and its learning-rate schedule."""

    name: Literal["adamw"] = Field("adamw", description="The only one so far.")
    lr: f.Positive = Field(3e-4, description="Peak learning rate.")
    betas: Annotated[tuple[f.BelowOne, f.BelowOne], Field(strict=False)] = Field(
        (0.9, 0.95), description="Decay of the first and second moment."
    )
    eps: f.Positive = Field(1e-8, description="Added to the denominator.")
    weight_decay: f.NotNegative = Field(0.1, description="Decoupled weight decay.")
    grad_clip: f.NotNegative = Field(1.0, description="Largest global gradient norm; 0 switches it off.")
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        "cosine", description="Learning rate after the warm-up. `wsd`: constant, then a linear decay."
    )
    warmup_steps: f.CountOrZero = Field(0, description="Steps of linear warm-up.")
    decay_steps: f.Count | None = Field(
        None, description="Of `wsd`: steps of the final decay. Default: a tenth of all."
    )
    min_lr_ratio: f.Ratio = Field(0.1, description="Final learning rate as a share of the peak.")


class Checkpoint(Model):
    """When to save and what to retain."""

    every: f.Every = Field("15 min", description="Steps or time between two, like `100 steps`.")
    keep: f.Count = Field(3, description="Checkpoints to retain.")
    asynchronous: bool = Field(True, description="Write while the training goes on.")


class MeshSizes(Model):
    """Sizes of the two data axes of `hsdp`, instead of nodes x workers per node."""

    dp_replicate: f.Count = Field(description="Copies of the model.")
    dp_shard: f.Count = Field(description="Workers that share a copy.")


def _entry_or(other: str, own: str) -> Discriminator:
    def choose(value: Any) -> str:
        return own if isinstance(value, OwnModel | OwnData) or "entry" in value else other

    def tag(value: Any) -> str:
        return choose(value) if isinstance(value, dict | Model) else other

    return Discriminator(tag)


class Train(Model):
    """Train a model with torchrun."""

    model: Annotated[
        Annotated[PresetModel, Tag("PresetModel")] | Annotated[OwnModel, Tag("OwnModel")],
        _entry_or("PresetModel", "OwnModel"),
    ] = Field(description="A `preset`, or your own `entry`.")
    data: Annotated[
        Annotated[TokenData, Tag("TokenData")] | Annotated[OwnData, Tag("OwnData")],
        _entry_or("TokenData", "OwnData"),
    ] = Field(description="A folder of `tokens`, or your own `entry`.")
    steps: f.Count = Field(description="Optimizer steps in all.")
    optimizer: Optimizer = Field(
        default_factory=lambda: Optimizer.model_construct(), description="Optimizer and schedule."
    )
    strategy: Strategy = Field("auto", description="How to split the work; `auto`: the fastest that fits.")
    mesh: MeshSizes | None = Field(None, description="For `hsdp` only.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="Of the matmuls; weights, gradients and loss stay fp32. `auto`: bf16 where the hardware "
        "computes it natively.",
    )
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = Field(
        "none",
        description="What to recompute in the backward pass, to save memory; `auto`: as little as fits.",
    )
    compile: Literal["off", "block", "model"] = Field(
        "off",
        description="torch.compile: block by block, or the whole model with its loss, which takes longer to "
        "compile and is a little faster. Where weights are sharded or activations recomputed `model` is "
        "`block`.",
    )
    deterministic: bool = Field(False, description="Repeats are bit-equal; may be slower.")
    seed: f.CountOrZero = Field(0, description="Of the weights and the sample order.")
    checkpoint: Checkpoint = Field(
        default_factory=lambda: Checkpoint.model_construct(), description="When to save."
    )
    max_restarts: f.FewOrZero = Field(3, description="Restarts of crashed workers within an attempt.")
    hang_timeout: f.Duration = Field("10 min", description="A longer step ends the run; 1 s or more.")
    metrics_port: f.Port | Literal["off"] = Field(
        0, description="Of /metrics, plus the local rank; 0 takes any free port."
    )


class Evaluate(Model):
    """Validation loss of the trained model, and a gate that can fail the run."""

    train: f.Name | None = Field(None, description="Stage to evaluate. Default: the one in `needs`.")
    max_tokens: f.Count = Field(131_072, description="Held-out tokens to read at most.")
    gate: f.GateText | None = Field(None, description="Like `val_bits_per_byte < 2.6`.")
    prompt: str | None = Field(None, description="Start of the generated sample.")
    generate_tokens: f.CountOrZero = Field(64, description="Length of the generated sample.")


class Promote(Model):
    """Copy the weights to the registry of models."""

    as_: f.Name = Field(alias="as", description="Name of the model.")
    alias: f.Name | None = Field(None, description="Points to this version from now on.")
    train: f.Name | None = Field(None, description="Stage to promote. Default: the one it needs.")
    evaluate: f.Name | None = Field(None, description="Its evaluation. Default: the one it needs.")


class Stage(Model):
    """One step of a pipeline: exactly one of `command`, `train`, `evaluate`, `promote`."""

    model_config = ConfigDict(json_schema_extra=one_of(*KINDS))

    name: f.Name = Field(description="Unique in the pipeline.")
    needs: tuple[f.Name, ...] = Field((), strict=False, description="Stages that must be done before.")
    command: Annotated[tuple[f.Text, ...], Field(min_length=1, strict=False)] | None = Field(
        None, description="Program and arguments; no shell. `{{output}}` is its folder."
    )
    train: Train | None = Field(None, description="Train a model.")
    evaluate: Evaluate | None = Field(None, description="Measure a model.")
    promote: Promote | None = Field(None, description="Register a model.")
    env: dict[f.EnvName, f.Text] = Field(
        {},
        description="Environment of the stage; no secrets.",
        json_schema_extra={"additionalProperties": False},
    )
    timeout: f.Duration | None = Field(None, description="Longest time for the stage.")
    resources: Resources | None = Field(
        None, description="Machines. Default: one CPU worker; of `evaluate`: those of its training."
    )

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


class Pipeline(Model):
    """The whole file."""

    version: Literal[1] = Field(description="Of this format.")
    name: f.Name = Field(description="Starts the run ids.")
    image: f.Image | None = Field(None, description="Container image; cluster backends only.")
    store: f.StoreUrl = Field("./runs", description="A folder, or `s3://bucket/prefix`.")
    kubernetes: Kubernetes | None = Field(None, description="How a run looks on a cluster.")
    on_orphan: Literal["continue", "cancel"] | None = Field(
        None, description="When whoever waited for the run with `--wait` is gone. Default: `continue`."
    )
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, strict=False)] = Field(
        description="The steps; `needs` orders them."
    )

    def stage(self, name: str) -> Stage:
        """Raises KeyError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def resolved_yaml(self) -> str:
        """All overrides and defaults written out; loads back to an equal Pipeline in any YAML parser."""
        return to_yaml(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    @cached_property
    def digest(self) -> str:
        """sha256 of `resolved_yaml()`. Every stage's plan names it."""
        return hashlib.sha256(self.resolved_yaml().encode()).hexdigest()
