"""The lines that workers and launchers write: the only source of metrics and reports.

One JSON object a line, with `v`, the version of this schema, and `kind` before the fields of its kind. A
reader takes of a line the fields that it knows and that have the type that stands here: what an older version
did not write yet, and what has another type, reads as absent (None). A torn line, and one without a time or a
kind, is no record. A field is never renamed without raising SCHEMA_VERSION.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

SCHEMA_VERSION = 1

# Upper bounds of an expert's tokens over the mean of its layer; no step of millions of tokens needs more.
LOAD_BOUNDS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, math.inf)

# A float that may be NaN. JSON has no NaN, hence a line says null.
MaybeNan = float


@dataclass(kw_only=True, slots=True)
class Record:
    """Of every kind."""

    kind: ClassVar[str] = ""

    time: float = field(default_factory=time.time)
    """When it was made: Unix seconds, UTC."""
    rank: int = -1
    """Of the writer; -1: the driver or a launcher."""
    restart: int = 0
    """torchrun's count of its rounds within the attempt, and 1,000 for each restart of the whole gang."""

    def values(self) -> dict[str, Any]:
        """By name. Records have slots: with over 30 attributes each would have a dictionary of its own, and
        trackers that hang keep ten thousand."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(kw_only=True, slots=True)
class Start(Record):
    """Every rank, when it is ready for its first step; again after each restart."""

    kind = "start"

    world_size: int | None
    """Ranks of the training."""
    strategy: str | None
    """Name of the strategy that the plan chose."""
    mesh: dict[str, int] | None
    """Size of each axis of the device mesh."""
    device: str | None
    """`cpu`, or the GPU's name."""
    device_type: str | None
    """`cpu` or `cuda`. Of lines without it only `device` says whether it is a CPU."""
    steps: int | None
    """The step at which the training ends."""
    seq_len: int | None
    """Tokens of a sample."""
    global_batch: int | None
    """Samples of a step, over all ranks."""
    precision: str | None
    """`fp32`, `bf16` or `fp16`."""
    torch: str | None
    """Version of PyTorch."""
    host: str | None
    """Name of the machine, or of the pod."""
    pid: int | None
    """Of the process, as it sees itself."""
    metrics_port: int | None
    """Where the rank serves /metrics; null: nowhere."""
    seconds_since_spawn: float | None
    """From the start of the process to this line."""
    start_step: int | None
    """Steps that are done: 0, or those of the checkpoint that is gone on from."""
    resumed_from: str | None
    """Key of that checkpoint, or null."""
    num_params: int | None
    """Parameters of the whole model."""
    num_flops_per_token: float | None = None
    """FLOPs of the model, forward and backward, a token computed; null if unknown."""
    num_hardware_flops_per_token: float | None = None
    """The same with what activation checkpointing computes again; null if unknown."""
    flops_convention: str | None = None
    """How these are counted."""
    peak_flops: float | None = None
    """FLOP/s of a device, of which MFU is a share; null where the worker measures it after its first step."""
    peak_name: str | None = None
    """What that peak is."""
    restore_seconds: float | None = None
    """Of `seconds_since_spawn`, loading the checkpoint."""
    sample_lengths: dict[str, int] | None = None
    """Of data that tell: how many samples have up to so many tokens, and more than the bound before."""
    bucket_bytes: int | None = None
    """So many bytes of gradients at most are averaged together; null: as DDP does unasked, or there are no
    buckets."""
    bucket_seconds: dict[str, float] | None = None
    """Of the fastest forward and backward pass, as measured for the choice of `bucket_bytes`: by these,
    `default` for null."""
    notes: list[str] = field(default_factory=list)
    """What a person should know, such as damaged checkpoints that were passed over."""

    def pipeline_stage(self, rank: int) -> int:
        """The place of `rank` along `pp`, which is the mesh's outermost axis."""
        if not isinstance(self.mesh, dict) or not self.world_size:
            return 0
        return rank * self.mesh.get("pp", 1) // self.world_size


@dataclass(kw_only=True, slots=True)
class Step(Record):
    """Every rank, after each update. A step whose loss or gradient is not finite updated nothing and is the
    last one of its attempt, but in fp16, where it is `skipped`."""

    kind = "step"

    step: int
    """Its number: 1 is the first."""
    loss: MaybeNan | None
    """Mean over the target tokens of the global batch, in nats; null: not finite."""
    grad_norm: MaybeNan | None
    """Global L2 norm of the gradients before clipping; null: not finite."""
    lr: float | None = None
    """Learning rate of the update; absent where there was none."""
    loss_scale: float | None = None
    """In fp16: by how much gradients were too large on purpose in this step, of a loss that is a mean."""
    skipped: bool | None = None
    """In fp16: whether a gradient overflowed at that, so that nothing was updated."""
    tokens: int | None
    """Tokens that this rank computed, as measured; 0 where another rank counts the same ones. MFU counts
    these."""
    target_tokens: int | None
    """Of these, the ones that the loss is a mean over, as measured."""
    seconds: float | None
    """Of the whole step."""
    data_seconds: float | None
    """Of that, waiting for the batch."""
    compute_seconds: float | None
    """This rank's own forward, backward and update."""
    collective_seconds: float | None
    """This rank waiting for others, or for bytes on the way; in a pipeline without `bubble_seconds`."""
    bubble_seconds: float | None = None
    """Of a pipeline, this rank waiting for other stages: between their passes, and at the end of the step."""
    checkpoint_seconds: float | None = None
    """Standing still for a checkpoint before the update."""
    membership_seconds: float | None = None
    """Of an elastic training, before `seconds`: what it cost that other nodes than before take part. The step
    was begun in vain, they met, and healed each other."""
    replicas: int | None = None
    """Of an elastic training: how many nodes computed the step."""
    memory_bytes: int | None
    """The peak so far, of the process on a CPU, of what PyTorch reserved on a GPU."""
    tokens_per_second: float | None = None
    """Tokens computed, over all ranks; of rank 0 only."""
    mfu_ratio: float | None = None
    """Model FLOPs utilization, over all ranks; of rank 0 only."""
    peak_flops: float | None = None
    """FLOP/s of a device, of which MFU is a share: the plan's, or as measured after the first step."""
    achievable_flops: float | None = None
    """FLOP/s of the best large matrix product, measured on a device."""
    expert_max_load_ratio: dict[str, float] | None = None
    """Of a mixture of experts, by layer: tokens of its fullest expert over the mean; of rank 0 only."""
    expert_max_average_load_ratio: dict[str, float] | None = None
    """The same of tokens averaged over about the last 20 steps of the process: of a single step some of it is
    chance; of rank 0 only."""
    experts_by_load_ratio: dict[str, int] | None = None
    """How many experts, over all layers, had at most so many times the mean, and more than the bound before;
    of rank 0 only."""
    expert_dropped_ratio: float | None = None
    """Where experts have a `capacity_factor`: of the tokens' ways to experts, over all layers, those that had
    no room; of rank 0 only."""
    padding_tokens: int | None = None
    """Of the tokens that this rank computed, those that fill up shorter samples; absent where the data do not
    tell."""
    idle_predicted_ratio: float | None = None
    """Share of the step's work for which this rank is expected to wait for others, by the lengths of samples
    that are packed."""
    share_ratio: float | None = None
    """Where load is moved off slow ranks: tokens that this rank computed, over the mean of all."""
    slowness_ratio: float | None = None
    """Likewise, where nodes come and go, and on several nodes with a preflight: the time that this rank (or
    node, with all its ranks) takes for the same work, over the median of the others."""
    stragglers: dict[str, float] | None = None
    """Likewise, by rank, the same of those that have been slow for long; of rank 0 only. Where nodes come
    and go, by the first rank of each, and of that one on each."""
    exchanged_bytes: int | None = None
    """Of gradients that are compressed, or of what islands have learnt: bytes that this rank gave to others;
    absent where gradients are sent as they are."""
    exchanged_plain_bytes: int | None = None
    """What averaging all gradients in fp32 would have sent."""
    offloaded_bytes: int | None = None
    """Where activations wait on the host: bytes that this rank copied there, and back."""
    rounds: int | None = None
    """Of islands: how often all have agreed on weights so far."""
    cpu_others_ratio: float | None = None
    """Share of the CPUs that the node's ranks may use which went to other processes, since the last line that
    says so; of the first rank of a node, every 5 s or more."""
    cpu_steal_ratio: float | None = None
    """The same of other guests of the hypervisor."""
    cpu_pressure_ratio: float | None = None
    """Share of the same time in which something waited for a CPU."""


@dataclass(kw_only=True, slots=True)
class Save(Record):
    """Every rank, when a checkpoint is committed, or has failed to be."""

    kind = "checkpoint"

    step: int | None
    """Steps that are done in it."""
    key: str | None
    """Its key in the store."""
    bytes: int | None
    """What this rank wrote of it."""
    stall_seconds: float | None
    """For which this rank's training stood still."""
    save_seconds: float | None
    """Until it was committed; of rank 0 only."""
    error: str | None
    """Why it was not committed, else null."""


@dataclass(kw_only=True, slots=True)
class Validation(Record):
    """Every rank, when the model was measured on held-out samples in the middle of its training."""

    kind = "validation"

    step: int | None
    """Steps that are done."""
    metrics: dict[str, float] | None
    """Its value by name of the metric, over all ranks, null where it is not finite; of rank 0 only."""
    num_samples: int | None
    """Held-out samples, over all ranks."""
    best: bool | None
    """Whether it is the best so far, by the metric of `validate.best`; null where nothing is said of it."""
    seconds: float | None
    """For which this rank's training stood still."""
    sample: str | None
    """Text that the model generated, or null; of rank 0 only."""


@dataclass(kw_only=True, slots=True)
class Evaluation(Record):
    """Rank 0 of an evaluate stage, when it is done."""

    kind = "evaluate"

    val_loss: float | None
    """Mean over the targets, in nats where they are tokens."""
    val_perplexity: float | None
    """Its exponential; null for a model whose loss is no cross entropy of tokens."""
    val_bits_per_byte: float | None
    """Of the text behind the tokens; null without a tokenizer."""
    num_tokens: float | None
    """Targets that were evaluated."""
    gate: str | None
    """The condition, or null."""
    passed: bool | None
    """Whether it holds; true without one."""
    sample: str | None
    """Text that the model generated, or null."""
    metrics: dict[str, float] | None = None
    """What `metrics` of the stage asked for, by name; null where it is not finite."""
    step: int | None = None
    """Of the checkpoint that was evaluated."""


@dataclass(kw_only=True, slots=True)
class StopSignal(Record):
    """Every rank, at the step boundary at which the ranks agreed to stop."""

    kind = "signal"

    step: int | None
    """Steps that are done."""
    signal: str | None
    """Its name."""


@dataclass(kw_only=True, slots=True)
class End(Record):
    """Every rank, when its work is done."""

    kind = "end"

    outcome: str | None
    """`done`, `saved` or `failed`."""
    step: int | None
    """Steps that are done."""
    message: str | None
    """Why it failed, or ended before its last step; else empty."""


@dataclass(kw_only=True, slots=True)
class Tracked(Record):
    """Rank 0, when a tracker has taken the training up."""

    kind = "tracked"

    tracker: str | None
    """Its name."""
    url: str | None
    """Its page of the training; null where it has none."""


@dataclass(kw_only=True, slots=True)
class Submitted(Record):
    """The driver, before the attempt starts."""

    kind = "submitted"


@dataclass(kw_only=True, slots=True)
class Launched(Record):
    """The first node's launcher, before it starts the workers; again if a gang is restarted."""

    kind = "launched"


@dataclass(kw_only=True, slots=True)
class Preflight(Record):
    """The first node's launcher, when the machines were checked, before it starts the workers."""

    kind = "preflight"

    seconds: float | None
    """That it took, from when all machines were there."""
    nodes: list[str] | None
    """Names of the machines; what each can do stands in preflight.json of the attempt."""
    faults: list[str] = field(default_factory=list)
    """Machines and links that did not pass, each with what is wrong; empty: all passed."""


@dataclass(kw_only=True, slots=True)
class Membership(Record):
    """The supervisor of an elastic training, when other replicas than before take part."""

    kind = "membership"

    members: list[int] | None
    """Their numbers; the first one leads, which writes the checkpoints."""
    step: int | None
    """Steps that are done."""
    why: str | None
    """What has changed."""


@dataclass(kw_only=True, slots=True)
class Fallback(Record):
    """Rank 0, when it went back to an earlier checkpoint because newer ones are damaged."""

    kind = "fallback"

    step: int | None
    """Steps that are done in the checkpoint that is gone on from."""
    given_up: list[str] = field(default_factory=list)
    """Keys of the damaged ones, the newest first."""
    why: list[str] = field(default_factory=list)
    """What is damaged of each."""


@dataclass(kw_only=True, slots=True)
class LaunchEnded(Record):
    """The first node's launcher, when the workers are gone."""

    kind = "ended"

    outcome: str | None
    """`done`, `saved` or `failed`."""
    message: str | None
    """Why it failed, else empty."""


@dataclass(kw_only=True, slots=True)
class Unknown(Record):
    """A line of a kind that this version does not know, as it stands."""

    kind_name: str
    line: Mapping[str, Any]


OF_A_RANK: tuple[type[Record], ...] = (
    Start, Step, Save, Validation, Evaluation, StopSignal, End, Tracked,
)  # fmt: skip
EVENTS: tuple[type[Record], ...] = (Submitted, Launched, Preflight, Membership, Fallback, LaunchEnded)
