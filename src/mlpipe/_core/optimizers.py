"""The optimizers that a pipeline can name: their arguments, the function that makes them, and what they cost.

This table lies in the lowest layer because three layers follow it: `spec` accepts names and arguments by it,
`plan` counts bytes by it and `train` builds by it. A new optimizer is one file in `train/optim/` and one
entry here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """A flag, a number or several numbers, as `default` is. The bounds hold for each of the numbers."""

    default: bool | float | tuple[float, ...]
    about: str
    above: float | None = None
    at_least: float | None = None
    below: float | None = None


class Parameter(NamedTuple):
    """What the cost of an optimizer depends on: rows (dim 0, over which a parameter is split), values in a
    row (1: a vector), whether it is a matrix of one of the model's blocks, and of how many, one below the
    other, as those of experts."""

    rows: int
    columns: int
    in_block: bool
    matrices: int = 1


class StateTensor(NamedTuple):
    """What an optimizer keeps between steps: bytes for each row of the parameter, split over the ranks as its
    rows are, or bytes that every rank keeps."""

    row_bytes: int
    whole_bytes: int = 0


class UpdateCost(NamedTuple):
    """Of a parameter, where its rows are split: FLOPs of one of the ranks that share them, in bf16, and bytes
    of the parameter that travel to the rank that computes, and again on their way back."""

    flops: float
    sent_bytes: int


class Optimizer(NamedTuple):
    """`build`: `package.module:function`; called with the shards that a rank updates and the arguments, it
    returns an `Update` (`train/optim/update.py`). `state_bytes_per_parameter`: what it keeps between steps
    for each fp32 parameter, by the arguments; `states`: the same to the byte, of optimizers that do not keep
    tensors of the parameters' shapes in fp32. `update_cost`: besides reading and writing all of these. `lr`,
    `schedule`: defaults of the learning rate. `needs_blocks`: it is for the blocks of a model, and refuses
    one without. `uncut`: axes of the mesh that it does not go with, since it needs whole matrices.
    `averages`: one of its states is an average of the weights, which a checkpoint has in their place.
    `block`: values of a row that share a scale, if any do."""

    title: str
    about: str
    build: str
    arguments: Mapping[str, Argument]
    state_bytes_per_parameter: Callable[[Mapping[str, Any]], int]
    states: Callable[[Parameter], tuple[StateTensor, ...]] | None = None
    update_cost: Callable[[Parameter], UpdateCost] | None = None
    lr: float = 3e-4
    schedule: str = "cosine"
    needs_blocks: bool = False
    uncut: tuple[str, ...] = ()
    averages: bool = False
    block: int = 0


_EPS = Argument(1e-8, "Added to the denominator.", above=0)
_DECAY = Argument(0.1, "Decoupled weight decay.", at_least=0)
_MOMENTS = Argument((0.9, 0.95), "Decay of the first and second moment.", at_least=0, below=1)


QUANTIZED_BLOCK = 256  # values of a row that share a scale
QUANTIZED_BLOCK_4BIT = 128
SHORTEST_QUANTIZED_ROW = 32  # whose scale is worth its bytes
NEWTON_SCHULZ_STEPS = 5


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Of the iterations over a matrix: with m the smaller dim and n the larger, each has two products of
    2 m m n and one of 2 m m m."""
    small, large = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * (4.0 * small * small * large + 2.0 * small**3)


def _quantized_states(parameter: Parameter, bits: int, block: int) -> tuple[StateTensor, ...]:
    """Of two moments: codes and scales, or fp32 where rows are short."""
    columns = parameter.columns
    if columns < SHORTEST_QUANTIZED_ROW:
        return 2 * (StateTensor(4 * columns),)
    return 2 * (StateTensor(-(-columns * bits // 8)), StateTensor(4 * -(-columns // block)))


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(
        "AdamW",
        "AdamW (Loshchilov and Hutter, 2019) and its learning-rate schedule. Matrices decay, vectors (norms, "
        "biases) do not.",
        "mlpipe.train.optim.adamw:AdamW",
        {"betas": _MOMENTS, "eps": _EPS, "weight_decay": _DECAY},
        lambda args: 8,  # the two moments
    ),
    "sgd": Optimizer(
        "SGD",
        "Stochastic gradient descent, by the formula of torch.optim.SGD, and its learning-rate schedule. "
        "Matrices decay, vectors do not.",
        "mlpipe.train.optim.sgd:SGD",
        {
            "momentum": Argument(0.9, "Decay of the sum of gradients.", at_least=0, below=1),
            "weight_decay": Argument(0.0, "Added to the gradient, times the weight.", at_least=0),
        },
        lambda args: 4 if args["momentum"] else 0,  # the sum
    ),
    "lion": Optimizer(
        "Lion",
        "Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023) and its learning-rate "
        "schedule: the sign of a running mean of the gradient. Takes a third to a tenth of AdamW's learning "
        "rate, and as many times its weight decay. Matrices decay, vectors do not.",
        "mlpipe.train.optim.lion:Lion",
        {
            "betas": Argument(
                (0.9, 0.99), "Share of the mean in the update, and the mean's own decay.", at_least=0, below=1
            ),
            "weight_decay": _DECAY,
        },
        lambda args: 4,  # the mean
        lr=1e-4,
    ),
    "adafactor": Optimizer(
        "Adafactor",
        "Adafactor (Shazeer and Stern, 2018), by the formula of torch.optim.Adafactor, and its learning-rate "
        "schedule: of the second moments of a matrix it keeps the means of rows and columns only. Steps are "
        "relative to the size of the weights, and `lr` is their upper limit. Matrices decay, vectors do not.",
        "mlpipe.train.optim.adafactor:Adafactor",
        {
            "beta2_decay": Argument(
                -0.8, "Power of the step by which the second moment's decay nears 1.", below=0
            ),
            "eps": Argument(1e-3, "Least size of weights that a step is relative to.", above=0),
            "clip_threshold": Argument(1.0, "Largest root mean square of an update.", at_least=1),
            "weight_decay": Argument(0.0, "Decoupled weight decay.", at_least=0),
        },
        lambda args: 0,
        states=lambda p: (
            (StateTensor(4),) if p.columns == 1 else (StateTensor(4), StateTensor(0, 4 * p.columns))
        ),
        lr=1e-2,
        uncut=("tp", "ep"),
    ),
    "muon": Optimizer(
        "Muon",
        "Muon (Jordan et al., 2024), by the formula of torch.optim.Muon, for the matrices of the model's "
        "blocks, of each expert by itself; AdamW for all else (embeddings, heads, norms, biases); and their "
        "learning-rate schedule. Updates are scaled to AdamW's (Liu et al., 2025), so one learning rate "
        "serves both. Matrices decay, vectors do not.",
        "mlpipe.train.optim.muon:Muon",
        {
            "momentum": Argument(0.95, "Decay of the mean of gradients.", at_least=0, below=1),
            "nesterov": Argument(True, "Look ahead by the newest gradient."),
            "weight_decay": _DECAY,
            "betas": Argument(
                (0.9, 0.95), "AdamW's decay of the first and second moment.", at_least=0, below=1
            ),
            "eps": Argument(1e-8, "Added to AdamW's denominator.", above=0),
        },
        lambda args: 4,
        states=lambda p: (1 if p.in_block else 2) * (StateTensor(4 * p.columns),),
        update_cost=lambda p: (
            UpdateCost(
                p.matrices * newton_schulz_flops(p.rows // p.matrices, p.columns), 2 * p.rows * p.columns
            )
            if p.in_block
            else UpdateCost(0.0, 0)
        ),
        needs_blocks=True,
        uncut=("tp",),
    ),
    "adamw8bit": Optimizer(
        "AdamW8bit",
        "AdamW with moments of 8 bits (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022) "
        "and its learning-rate schedule. Each 256 values of a row share a scale, so that blocks are the same "
        "under every strategy; tensors of rows of fewer than 32 values keep fp32 moments. Matrices decay, "
        "vectors do not.",
        "mlpipe.train.optim.adamw8bit:adamw8bit",
        {"betas": _MOMENTS, "eps": _EPS, "weight_decay": _DECAY},
        lambda args: 2,
        states=lambda p: _quantized_states(p, 8, QUANTIZED_BLOCK),
        block=QUANTIZED_BLOCK,
    ),
    "adamw4bit": Optimizer(
        "AdamW4bit",
        "AdamW with moments of 4 bits (Li et al., Memory Efficient Optimizers with 4-bit States, 2023) and "
        "its learning-rate schedule. Each 128 values of a row share a scale, so that blocks are the same "
        "under every strategy; tensors of rows of fewer than 32 values keep fp32 moments. Matrices decay, "
        "vectors do not.",
        "mlpipe.train.optim.adamw4bit:adamw4bit",
        {"betas": _MOMENTS, "eps": _EPS, "weight_decay": _DECAY},
        lambda args: 1,
        states=lambda p: _quantized_states(p, 4, QUANTIZED_BLOCK_4BIT),
        block=QUANTIZED_BLOCK_4BIT,
    ),
    "schedule_free_adamw": Optimizer(
        "ScheduleFreeAdamW",
        "Schedule-free AdamW (Defazio et al., The Road Less Scheduled, 2024) and its learning-rate schedule, "
        "which is constant unless you say otherwise: a warm-up is all it needs. It averages the weights; "
        "validations measure the average, and it is what checkpoints and exports have. Matrices decay, "
        "vectors do not.",
        "mlpipe.train.optim.schedule_free_adamw:ScheduleFreeAdamW",
        {
            "betas": Argument(
                (0.9, 0.999),
                "Share of the average in the weights of a pass, and decay of the second moment.",
                above=0,
                below=1,
            ),
            "eps": _EPS,
            "weight_decay": _DECAY,
        },
        lambda args: 12,  # the average, the steps' own weights, the second moment
        lr=2.5e-3,
        schedule="constant",
        averages=True,
    ),
}
DEFAULT = "adamw"
