"""What a stage does, with numbers (`Plan.work`): of a training all that the trainer is told, whose larger
parts are in modules beside this one; what other kinds do is in `kinds/<kind>/plan.py`.

Importable with the standard library alone. Sequences are the unit of a batch:
`global_batch = micro_batch * num_data_ranks * accumulation`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from mlpipe._core.meshes import Strategy
from mlpipe._core.serial import Sparse
from mlpipe.plan.data import DataPlan
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import AdapterPlan, InitPlan, ModelPlan
from mlpipe.plan.settings import (
    Checkpointing,
    Communication,
    Compile,
    ContextExchange,
    Loss,
    Offload,
    Precision,
    adds_exactly,
)
from mlpipe.plan.updates import CompressPlan, EmaPlan, IslandsPlan, OptimizerPlan
from mlpipe.plan.validation import ValidatePlan


class CheckpointPlan(NamedTuple):
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


class TrackerPlan(NamedTuple):
    """Who is told how the training goes, by its settings in the file. No credentials: those come from the
    environment."""

    name: Literal["tensorboard", "mlflow", "wandb"]
    settings: Mapping[str, Any] = {}


class Prediction(NamedTuple):
    """What the planner expects of a step: bytes on the fullest rank at the peak, the process with all it
    holds; seconds. The ratios are corrections of a calibration by earlier runs, contained in both.
    `idle_ratios`: by ways to communicate, the share of the workers' time for which they wait since samples
    differ in length (see `plan/uneven.py`); empty where nobody knows the lengths, or each is padded."""

    memory_bytes: int
    step_seconds: float
    memory_ratio: float
    time_ratio: float
    idle_ratios: Mapping[str, float] = {}


class GroupPlan(NamedTuple):
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
    """What a stage of one kind does: the base of each kind's NamedTuple or frozen dataclass (`PLAN` in
    `kinds/<kind>/plan.py`)."""

    __slots__ = ()
    kind: ClassVar[str]  # its name
    argv: tuple[str, ...]  # of one that runs as a command; never given to a shell, `{{output}}` is its folder

    @property
    def summary(self) -> str:
        """In a line, for `mlpipe plan`."""
        raise NotImplementedError

    @property
    def training(self) -> "TrainPlan":
        """Of a kind that runs in workers: what each rank is told of the model, its data and the mesh."""
        raise NotImplementedError


class ProfilePlan(NamedTuple):
    """From step `at` on so many are profiled, unasked."""

    at: int
    steps: int
    memory: bool = False


class _Told(NamedTuple):
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
    meaning: Mapping[str, Any] = {}  # see `plan/meaning.py`; kept with each checkpoint
    callbacks: tuple[CallbackPlan, ...] = ()
    track: tuple[TrackerPlan, ...] = ()
    validate: ValidatePlan | None = None  # None: nobody measures while it trains
    pipeline: PipelinePlan | None = None  # where `mesh.pp` is above 1
    # Where `mesh.cp` is above 1: keys and values of whole sequences at once, or those of a rank at a time.
    context_exchange: Sparse[ContextExchange] = "all_gather"
    offload: Sparse[Offload] = "off"
    loss: Sparse[Loss] = "logits"
    float8: Sparse[bool] = False  # products of the blocks' linear layers
    # Of a worker on a GPU, that wait on the host; None: none, or unknown.
    host_memory_bytes: Sparse[int | None] = None
    compress: CompressPlan | None = None  # None: gradients are sent as they are
    islands: IslandsPlan | None = None  # None: gradients are averaged in every step
    # Bytes of gradients that travel together, where copies average them as they come; `auto`: measured before
    # the first step; None: DDP's default.
    buckets: int | Literal["auto"] | None = None
    profile: ProfilePlan | None = None  # None: only when somebody asks
    # Of machines that differ, in the order of their ranks. `micro_batch` is then the smallest of theirs,
    # `accumulation` the most microbatches, `activation_checkpointing` what most is computed again.
    groups: Sparse[tuple[GroupPlan, ...]] = ()


class TrainPlan(_Told, StageWork):
    """All that the trainer is told."""

    __slots__ = ()  # a name that it has not is refused

    kind = "train"

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
    def training(self) -> "TrainPlan":
        return self
