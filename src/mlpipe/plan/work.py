"""What a stage does, with numbers (`Plan.work`): of a training its model, data and optimizer, and how all is
split over ranks; what other kinds do is in `kinds/<kind>/plan.py`.

Importable with the standard library alone. Sequences are the unit of a batch:
`global_batch = micro_batch * num_data_ranks * accumulation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from mlpipe._core.gate import Mode
from mlpipe._core.pipelines import Schedule
from mlpipe._core.quantized import Base
from mlpipe._core.serial import SPARSE

Strategy = Literal["single", "ddp", "zero1", "zero2", "fsdp", "hsdp"]
STRATEGIES: tuple[Strategy, ...] = ("single", "ddp", "zero1", "zero2", "fsdp", "hsdp")
Checkpointing = Literal["none", "selective", "full"]
Compile = Literal["off", "block", "model"]
Precision = Literal["fp32", "bf16", "fp16"]
Communication = Literal["collective", "resident", "on_demand"]
ContextExchange = Literal["all_gather", "ring"]  # how keys and values come to the ranks of `cp`
Offload = Literal["off", "activations", "optimizer", "all"]  # what waits on the host
Loss = Literal["logits", "fused"]  # of whole logits, or of the head's input, a chunk of rows at a time
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")  # by what is computed again


@dataclass(frozen=True)
class Mesh:
    """Sizes of the named axes of the device mesh, outermost first: ranks that are neighbours along `tp` have
    neighbouring numbers. An axis of size 1 does nothing.

    The ranks of one `pp`, `cp` or `tp` group work on the same samples; those of `dp_replicate` and `dp_shard`
    read different ones. `ep` is no further factor of the world: as in torchtitan, it groups neighbours along
    `dp_shard`, which hold different experts.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        sizes = vars(self)
        if min(sizes.values()) < 1:
            raise ValueError(f"an axis of a mesh has at least one rank: {sizes}")
        if self.dp_shard % self.ep:
            raise ValueError(f"ep {self.ep} does not divide dp_shard {self.dp_shard}")

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes that multiply to the world, outermost first."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    @property
    def num_data_ranks(self) -> int:
        """Number of groups of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_data_rank(self) -> int:
        """Number of ranks that read the same samples."""
        return self.pp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        coordinates, rest = {}, rank
        for axis, size in reversed(self.axes.items()):
            rest, coordinates[axis] = divmod(rest, size)
        if rest or rank < 0:
            raise ValueError(f"rank {rank} is not one of {self.world_size}")
        return {axis: coordinates[axis] for axis in self.axes} | {"ep": coordinates["dp_shard"] % self.ep}

    def nodes_of_weights(self, each: int) -> int | None:
        """Nodes, of `each` ranks, of one group of ranks that share weights: neighbours by number. None where
        a node belongs to two groups."""
        nodes, rest = divmod(self.dp_shard * self.cp * self.tp, each)
        return nodes if rest == 0 else None

    def number_at(self, place: int, each: int) -> int:
        """Of the node, of `each` ranks, whose machine has that place in its gang. Schedulers give machines
        that stand near each other neighbouring places; here all ranks of one stage have numbers before those
        of the next. So that the nodes of one pipeline are neighbours, they have neighbouring places."""
        nodes = self.nodes_of_weights(each)
        if nodes is None:
            return place
        group, node = divmod(place, nodes)
        pipeline, stage = divmod(group, self.pp)
        return (stage * self.dp_replicate + pipeline) * nodes + node

    def data_rank(self, rank: int) -> int:
        """Which of the `num_data_ranks` parts of the samples `rank` reads."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def holds_loss(self, rank: int) -> bool:
        """Whether this rank's sums of the loss, targets and tokens count in the world's. Exactly one rank has
        each part of the batch: one of the last pipeline stage, of a tensor-parallel group the first."""
        at = self.coordinates(rank)
        return at["pp"] == self.pp - 1 and at["tp"] == 0


@dataclass(frozen=True)
class Entry:
    """A user's function by import path. `entry` is `package.module:function`, called with `args`."""

    entry: str
    args: dict[str, Any]


@dataclass(frozen=True)
class ModelPlan:
    """`build(**args)` returns the plain module. For a preset, `build` is mlpipe's own Llama.

    `blocks` names the modules to shard, checkpoint and compile ("layers", or "encoder.layers"); empty:
    the model's ModuleLists. `seq_len`: tokens a sample. `preset`: name, of open weights that of
    their folder, or None for a user's own. `tensor`: how the axis `tp` splits a user's own, `column`, `row`
    or `sum` by patterns of modules; empty: by the plan that the model brings.
    """

    build: Entry
    preset: str | None
    seq_len: int
    blocks: tuple[str, ...]
    tensor: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FilesPlan:
    """Files of samples as they are: `path` is one, a folder or a pattern, also in a bucket; `validation` that
    of the held-out ones. `columns`: by the sample's key the column, or the extension; empty: all as they are
    called. `tokenizer`: a tokenizer.json, or the folder of one, for what is text."""

    format: Literal["parquet", "tars"]
    path: str
    validation: str | None
    columns: dict[str, str]
    tokenizer: str | None

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all that is trained on."""
        return (self.path,)


class ChatFile(NamedTuple):
    """One of several that are mixed; `weight`: its share of the samples beside the others'."""

    path: str
    weight: float


@dataclass(frozen=True)
class ChatPlan:
    """Files of JSON lines: conversations, prompts with completions, or text. `path`: the training's, or
    instead `mix`, of what samples are mixed; `validation`: the held-out one. `tokenizer`: a tokenizer.json,
    or the folder of one with all that a model's has. `template`: a Jinja file, or `chatml`; None: that
    folder's. `packing`: several samples in a row of up to `micro_batch * seq_len` tokens, see
    `plan/dealing.py`; None: a sample a row, padded."""

    path: str | None
    validation: str | None
    tokenizer: str
    template: str | None = None
    packing: Literal["best_fit", "balanced"] | None = None
    mix: tuple[ChatFile, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all that is trained on."""
        return tuple(one.path for one in self.mix) if self.path is None else (self.path,)


class SourcePlan(NamedTuple):
    """One of several sources, as in `DataPlan`; `weight`: its share of the samples beside the others'."""

    weight: float
    tokens: str | None
    dataset: Entry | None
    digest: str | None
    cache_bytes: int | None = None
    files: FilesPlan | None = None


@dataclass(frozen=True)
class DataPlan:
    """Where samples come from: a folder of token files (`tokens`, a local path), or a user's own `dataset`
    whose function returns a map-style object (`len`, `[i] -> dict of tensors`). `digest`: sha256 of the
    folder's manifest, which has those of the files; None for a user's own, and before the data exist.
    `collate`: import path of the user's function that makes a batch of a list of samples; None: stacked.
    `workers`: processes that read ahead beside each rank. `splits`: parts of a set that can
    only be iterated over. `mix`: instead of the first three, of what samples are mixed.
    `cache_bytes`: on each node's disk for tokens or files in a bucket (an s3:// URL then). `files`, `chat`:
    instead of tokens and data set. `packing`: of a `dataset` that tells the lengths of its samples, as of
    `ChatPlan`; off: padded; None: all are equally long."""

    tokens: str | None
    dataset: Entry | None
    digest: str | None
    collate: str | None = None
    workers: int | Literal["auto"] = 0
    splits: int = 1
    mix: tuple[SourcePlan, ...] = ()
    cache_bytes: int | None = None
    files: FilesPlan | None = None
    chat: ChatPlan | None = None
    packing: Literal["off", "best_fit", "balanced"] | None = None

    @property
    def is_uneven(self) -> bool:
        """Whether samples differ in length, and how long each is is known before it is read."""
        return self.chat is not None or self.packing is not None

    @property
    def packed(self) -> Literal["best_fit", "balanced"] | None:
        """How several lie in a row; None: they do not."""
        if self.chat is not None:
            return self.chat.packing
        return None if self.packing == "off" else self.packing

    @property
    def sources(self) -> tuple[SourcePlan, ...]:
        """Of a mixture all, of other data the one."""
        own = SourcePlan(1.0, self.tokens, self.dataset, self.digest, self.cache_bytes, self.files)
        return self.mix or (own,)

    @property
    def all_files(self) -> tuple[FilesPlan | ChatPlan, ...]:
        """Of conversations, and of all sources that are files."""
        files = (self.chat, *(source.files for source in self.sources))
        return tuple(one for one in files if one is not None)

    @property
    def functions(self) -> tuple[Entry, ...]:
        """Of the user: those that make data sets, and the one that makes batches."""
        made = tuple(source.dataset for source in self.sources if source.dataset is not None)
        return made if self.collate is None else (*made, Entry(self.collate, {}))


class ParameterGroup(NamedTuple):
    """Parameters whose names match the pattern, and are of no earlier group. `lr_scale`: times the learning
    rate. `weight_decay`: instead of the optimizer's, of vectors as well; None: as all others."""

    match: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


class EmaPlan(NamedTuple):
    """Exponential moving average of the weights: after each `every` steps `average = decay * average +
    (1 - decay) * weight`."""

    decay: float
    every: int = 1


@dataclass(frozen=True)
class CompressPlan:
    """How gradients are sent: `name` and `args` as in `_core/compression.py`."""

    name: str
    args: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class IslandsPlan:
    """Each island updates by its own gradients, and every `sync_every` steps all agree on the weights, see
    `train/optim/islands.py`. `compress`: a code of `_core/compression.py`; None: fp32. `staleness`: so many
    steps an island goes on while what it told travels, and may be ahead of another."""

    sync_every: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    compress: str | None = None
    fragments: int = 1
    staleness: int = 0


@dataclass(frozen=True)
class OptimizerPlan:
    """`name`: of `_core/optimizers.py`; None: the user's own function, by `entry`. `args`: its arguments,
    whichever it is; learning rate and clipping are not among them. `state_bytes_per_parameter`: what it keeps
    between steps for each fp32 parameter. `own_schedule`: a function of the user's, of schedule `own`; called
    with the step, from 1, and the number of steps, it gives a factor of `lr`."""

    name: str | None
    entry: str | None
    args: dict[str, Any]
    state_bytes_per_parameter: int
    lr: float
    grad_clip: float  # global L2 norm; 0 switches clipping off
    schedule: Literal["constant", "cosine", "linear", "wsd", "polynomial", "own"]
    warmup_steps: int
    decay_steps: int  # of wsd: length of the final decay
    min_lr_ratio: float
    power: float | None = None  # of polynomial; None: 1
    own_schedule: Entry | None = None
    clip_value: float | None = None  # of each value of the gradient; None: no limit
    groups: tuple[ParameterGroup, ...] = ()


@dataclass(frozen=True)
class CheckpointPlan:
    """Exactly one of the `every_` is set. `keep`: committed checkpoints to retain."""

    every_steps: int | None
    every_seconds: float | None
    keep: int
    asynchronous: bool


class CallbackPlan(NamedTuple):
    """A user's class by import path, called with `args`. `ranks`: the first one has it, or all have."""

    entry: str
    args: dict[str, Any]
    ranks: Literal["first", "all"] = "first"


@dataclass(frozen=True)
class AdapterPlan:
    """Low-rank adapters, see `_core/adapters.py`. `targets`: patterns of layers; empty: all linear layers
    of the blocks. `dropout`: of what goes into an adapter. `dora`: how long the rows are is trained apart.
    `base`: how the weights of these layers are kept, see `_core/quantized.py`; None: as they are."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    base: Base | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class FoundWeights:
    """What `init_from` led to when it was looked up first, which is what every attempt starts from. `words`:
    for people. `format`, `store_url`, `key`: a checkpoint's prefix there, or a file or folder of safetensors.
    `step`: of a checkpoint. `digest`: of the manifest, or of names, sizes, times and headers of files; None
    for what another stage made, which has a digest of its own. `files`: each with its digest. `revision`: the
    commit of open weights that lie in the layout of Hugging Face's cache."""

    words: str
    format: Literal["checkpoint", "safetensors"]
    store_url: str
    key: str
    step: int | None
    digest: str | None
    files: tuple[str, ...] = field(default=(), metadata=SPARSE)
    revision: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class InitPlan:
    """`asked`: as in the file, one of `path`, `model`, or `run` and `stage`. `path`: that one with its
    placeholders filled. `map`: patterns of names there and what they are here. `strict`: every tensor here is
    there, none besides. `found`: None before somebody looked. `config`, `revision`: of open weights their
    config.json, and their commit where the folder's layout tells it."""

    asked: dict[str, Any]
    path: str | None
    map: dict[str, str]
    strict: bool
    found: FoundWeights | None = None
    config: dict[str, Any] = field(default_factory=dict)
    revision: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class TrackerPlan:
    """Who is told how the training goes, by its settings in the file. No credentials: those come from the
    environment."""

    name: Literal["tensorboard", "mlflow", "wandb"]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricPlan:
    """`name`: of `_core/gate.py`, or what the user calls one of their own, which has an `entry`: a class
    or function `package.module:name`, called with `args`."""

    name: str
    entry: str | None = None
    args: dict[str, Any] = field(default_factory=dict)


class BestPlan(NamedTuple):
    """The checkpoint to keep: that with the least or the largest value of `metric`."""

    metric: str
    mode: Mode


class StopPlan(NamedTuple):
    """The training ends after `patience` validations in a row none of which was better, by more than
    `min_delta`, than the best before them."""

    patience: int
    min_delta: float


@dataclass(frozen=True)
class ValidatePlan:
    """Validation in training: every so many steps, and after the last one. `sample`: what the text begins
    with that is generated each time; None: none is."""

    every_steps: int
    max_tokens: int
    metrics: tuple[MetricPlan, ...]
    best: BestPlan | None = None
    stop: StopPlan | None = None  # judged by the metric of `best`
    sample: str | None = None
    generate_tokens: int = 64


@dataclass(frozen=True)
class PipelinePlan:
    """How the ranks of the axis `pp` share a step, see `plan/pipelining.py`. Its microbatches are those of
    the step's gradient accumulation. `num_blocks`: of each stage; stage `s` lies on rank `s % pp`. `cut`: of
    a user's own model instead the modules with which the stages behind the first begin; neither: the trainer
    cuts it by FLOPs."""

    schedule: Schedule
    num_blocks: tuple[int, ...]
    cut: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prediction:
    """What the planner expects of a step: bytes on the fullest rank at the peak, the process with all it
    holds; seconds. The ratios are corrections of a calibration by earlier runs, contained in both.
    `idle_ratios`: by ways to communicate, the share of the workers' time for which they wait since samples
    differ in length (see `plan/uneven.py`); empty where nobody knows the lengths, or each is padded."""

    memory_bytes: int
    step_seconds: float
    memory_ratio: float
    time_ratio: float
    idle_ratios: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupPlan:
    """The machines of one class, of several in a gang. Each of their data ranks (workers that read the same
    samples) has up to `sequences` of a batch, in micro-batches of `micro_batch`, and takes `step_seconds` for
    them. `speed`: of a data rank, 1 on the mean of all. `share_ratio`: of the batch, of all of them together.
    None: nobody knows the size of the model, or the price."""

    name: str
    num_nodes: int
    num_workers: int
    speed: float
    sequences: int
    share_ratio: float
    micro_batch: int
    activation_checkpointing: Checkpointing
    memory_bytes: int | None
    step_seconds: float | None
    usd_per_hour: float | None
    usd_per_million_tokens: float | None


class StageWork:
    """What a stage of one kind does: the base of each kind's dataclass (`PLAN` in `kinds/<kind>/plan.py`)."""

    kind: ClassVar[str]  # its name
    argv: tuple[str, ...]  # of one that runs as a command; never given to a shell, `{{output}}` is its folder

    @property
    def summary(self) -> str:
        """In a line, for `mlpipe plan`."""
        raise NotImplementedError

    @property
    def training(self) -> TrainPlan:
        """Of a kind that runs in workers: what each rank is told of the model, its data and the mesh."""
        raise NotImplementedError


class ProfilePlan(NamedTuple):
    """From step `at` on so many are profiled, unasked."""

    at: int
    steps: int
    memory: bool = False


@dataclass(frozen=True)
class TrainPlan(StageWork):
    """All that the trainer is told."""

    kind: ClassVar[str] = "train"

    model: ModelPlan
    data: DataPlan
    optimizer: OptimizerPlan
    checkpoint: CheckpointPlan
    steps: int
    global_batch: int  # sequences per optimizer step, over all ranks
    micro_batch: int  # sequences per forward on one rank
    accumulation: int  # microbatches per optimizer step on one rank
    strategy: Strategy  # a name for people and records; what is applied follows from the mesh and the flags
    mesh: Mesh
    reason: str  # why this strategy, in a sentence
    precision: Precision
    activation_checkpointing: Checkpointing
    compile: Compile  # what is compiled, see `compiled`
    deterministic: bool
    seed: int
    hang_timeout_seconds: float
    num_flops_per_token: float | None  # None: a user's own model, counted by the worker
    peak_flops: float | None  # per device at `precision`; None: measured by the worker
    peak_name: str  # what `peak_flops` is, in words
    resume: bool  # resume from the stage's latest committed checkpoint if there is one
    # Where `dp_shard` splits the parameters: a block's are given up after its forward pass and gathered again
    # for its backward pass; else they stay from the first microbatch's forward to the last one's backward.
    reshard_after_forward: bool = True
    # Where parameters are replicated: each rank keeps the optimizer's states of, and updates, its slice only.
    shard_optimizer: bool = False
    # With accumulation, where parameters are split: `last` keeps whole gradients (4 bytes a parameter) until
    # the last microbatch and reduces once; `every` reduces after each and keeps its own shard.
    reduce_gradients: Literal["last", "every"] = "last"
    # `collective`: all ranks pass each microbatch together, and have equally many. `resident`: a rank meets
    # the others at its first and its last microbatch of a step only, and has as many as its work takes.
    # `on_demand`: it meets them at the ends of a step only, and may have no microbatch; ranks of `dp_shard`
    # are on one node.
    communication: Communication = "collective"
    moves_load: bool = False  # off ranks that are measured slower, see `plan/shares.py`
    shared_memory_bytes: int | None = None  # of a node's /dev/shm that this needs; None: none, or unknown
    ema: EmaPlan | None = None  # None: no average of the weights is kept
    predicted: Prediction | None = None  # None: a user's own model
    memory_bytes: int | None = None  # what a worker may use; None: nobody looks
    # what the memory probe may step down to, largest first; empty where the file names the microbatch
    smaller_micro_batches: tuple[int, ...] = ()
    init_from: InitPlan | None = None  # None: the seed's weights
    freeze: tuple[str, ...] = ()  # patterns of parameters that are not trained, see `_core/patterns.py`
    adapter: AdapterPlan | None = None  # None: the model's own parameters are trained
    meaning: dict[str, Any] = field(default_factory=dict)  # see `plan/meaning.py`; kept with each checkpoint
    callbacks: tuple[CallbackPlan, ...] = ()
    track: tuple[TrackerPlan, ...] = ()
    validate: ValidatePlan | None = None  # None: nobody measures while it trains
    pipeline: PipelinePlan | None = None  # where `mesh.pp` is above 1
    # Where `mesh.cp` is above 1: keys and values of whole sequences at once, or those of a rank at a time.
    context_exchange: ContextExchange = field(default="all_gather", metadata=SPARSE)
    offload: Offload = field(default="off", metadata=SPARSE)
    loss: Loss = field(default="logits", metadata=SPARSE)
    float8: bool = field(default=False, metadata=SPARSE)  # products of the blocks' linear layers
    # Of a worker on a GPU, that wait on the host; None: none, or unknown.
    host_memory_bytes: int | None = field(default=None, metadata=SPARSE)
    compress: CompressPlan | None = None  # None: gradients are sent as they are
    islands: IslandsPlan | None = None  # None: gradients are averaged in every step
    # Bytes of gradients that travel together, where copies average them as they come; `auto`: measured before
    # the first step; None: DDP's default.
    buckets: int | Literal["auto"] | None = None
    profile: ProfilePlan | None = None  # None: only when somebody asks
    # Of machines that differ, in the order of their ranks. `micro_batch` is then the smallest of theirs,
    # `accumulation` the most microbatches, `activation_checkpointing` what most is computed again.
    groups: tuple[GroupPlan, ...] = field(default=(), metadata=SPARSE)

    @property
    def exact_sums(self) -> bool:
        """Whether ranks that share products (`tp`, `cp`) add parts of them in fp32 and round the sums alone,
        as one rank does; else parts are rounded and travel in half the bytes. Products of adapters are
        rounded in any case."""
        return adds_exactly(self.deterministic, self.precision)

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """Of each data rank, where they do not all have equal shares from the beginning."""
        return tuple(one.speed for one in self.groups for _ in range(self._num_data_ranks(one))) or None

    def group_of(self, data_rank: int) -> GroupPlan | None:
        """The one that all its workers are in; None: there are none."""
        for one in self.groups:
            if data_rank < self._num_data_ranks(one):
                return one
            data_rank -= self._num_data_ranks(one)
        return None

    def _num_data_ranks(self, group: GroupPlan) -> int:
        return group.num_workers // self.mesh.ranks_per_data_rank

    @property
    def summary(self) -> str:
        return self.reason

    @property
    def training(self) -> TrainPlan:
        return self


def adds_exactly(deterministic: bool, precision: str) -> bool:
    """Of `TrainPlan.exact_sums`."""
    return deterministic and precision != "fp32"


def compiled(asked: Compile, mesh: Mesh, checkpointing: str) -> Compile:
    """What of a model is compiled where the user asks for `asked`. What hooks in between the blocks breaks
    the graph of a whole model: sharded or recomputed blocks are compiled one by one, and those of a
    pipeline's stages."""
    between = mesh.dp_shard > 1 or mesh.pp > 1 or checkpointing != "none"
    return "block" if asked == "model" and between else asked
