"""What the planner asks of a model, whatever it is built of: parameters, FLOPs, what a micro-batch keeps and
makes, and how long its passes take: of one rank that has the whole model, or a `Part` of each micro-batch's
work. What is sent, and how states are split over ranks that read different samples, stands in `plan/axes/`.
Standard library only."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, Protocol

from mlpipe.plan.kernels import Kernels
from mlpipe.plan.tensors import Group, Tensors, total


class Part(NamedTuple):
    """What of a model one rank computes, and of which tokens. `tp`: each matrix product, head and vocabulary
    is split into so many, the residual stream by its tokens (sequence parallelism). `cp`: each sequence is.
    `num_blocks`: of its pipeline stage; None: all. `is_first`, `is_last`: whether the stage has the
    embedding, or the head and the loss. `rank`: of the pipeline, where the shape knows what each has.
    `number`: of the rank in the pipeline, between the first and the last. `ep`: so many ranks have a block's
    experts among them, and each other's tokens for these."""

    tp: int = 1
    cp: int = 1
    num_blocks: int | None = None
    is_first: bool = True
    is_last: bool = True
    rank: int | None = None
    number: int = 1
    ep: int = 1


class ParameterCounts(NamedTuple):
    """A model in numbers of parameters: in all, of its largest block, and of all that is in no block
    (embedding, last norm, head). `tensors`: rows, parameters a row, and how many such tensors there are;
    `block_matrices`: of these the blocks' matrices, of two dims. `trained_only`: the same of those that are
    trained; None: all are. `base_elsewhere`: the others are in no checkpoint. `by_rank`: of the ranks of a
    pipeline whose stages are of no equal blocks. `quantized`: of the tensors those that are kept in few bits,
    equally many in each block: rows, parameters a row, bytes a row, and their number. `stacks`: of the
    blocks' matrices those that are several, one below the other: rows, parameters a row, how many such
    tensors there are, and matrices in each. `looked_up`: of an embedding that is no head, which no product
    reads. `unreached`: of blocks below all that is trained, to which no backward pass goes."""

    total: int
    block: int
    outside: int
    num_blocks: int
    tensors: tuple[tuple[int, int, int], ...]
    block_matrices: tuple[tuple[int, int, int], ...] = ()
    trained_only: "ParameterCounts | None" = None
    base_elsewhere: bool = False
    by_rank: tuple["ParameterCounts", ...] = ()
    quantized: tuple[tuple[int, int, int, int], ...] = ()
    stacks: tuple[tuple[int, int, int, int], ...] = ()
    looked_up: int = 0
    unreached: int = 0

    @property
    def trained(self) -> "ParameterCounts":
        """Those that have gradients."""
        return self if self.trained_only is None else self.trained_only

    def share(self, num_ranks: int) -> int:
        """Parameters of the first rank, which has the most: each tensor is cut into equal whole rows, as
        torch.chunk does, and FSDP2 and a sharded optimizer with it."""
        return _share(self.tensors, num_ranks)

    def sharded(self, num_ranks: int, width_bytes: int) -> Group:
        """The tensors of this share, of `width_bytes` a parameter."""
        return _sharded(self.tensors, num_ranks, width_bytes)

    def held(self, num_ranks: int, width_bytes: int) -> Group:
        """As `sharded`, of weights: those of few bits in their own bytes."""
        if not self.quantized:
            return self.sharded(num_ranks, width_bytes)
        few = tuple((rows, row_bytes, number) for rows, _, row_bytes, number in self.quantized)
        return self.cast(num_ranks, width_bytes) + _sharded(few, num_ranks, 1)

    def cast(self, num_ranks: int, width_bytes: int) -> Group:
        """As `sharded`, without those of few bits: of these nobody keeps a copy."""
        if not self.quantized:
            return self.sharded(num_ranks, width_bytes)
        numbers = by_shape(self.tensors)
        for rows, columns, _, number in self.quantized:
            numbers[rows, columns] -= number
        plain = tuple((rows, columns, number) for (rows, columns), number in numbers.items() if number)
        return _sharded(plain, num_ranks, width_bytes)

    def spared_bytes(self, width_bytes: int) -> int:
        """By which a block has fewer than `width_bytes` a parameter."""
        if not self.quantized:
            return 0
        whole = sum(
            rows * (width_bytes * columns - row_bytes) * number
            for rows, columns, row_bytes, number in self.quantized
        )
        return whole // max(1, self.num_blocks)

    def of(self, part: Part) -> "ParameterCounts":
        """Those of this part: of every matrix and embedding a share of the rows, vectors whole; of the stage
        its blocks, and of what is in none the embedding, or the last norm and the head, which may be one."""
        if part.rank is not None:
            return self.by_rank[part.rank]
        if part == Part(cp=part.cp, ep=part.ep):
            return self
        return _of_part(self, part)


@lru_cache(maxsize=256)  # each is asked for by every candidate
def _of_part(whole: ParameterCounts, part: Part) -> "ParameterCounts":
    all_blocks = max(1, whole.num_blocks)
    num_blocks = whole.num_blocks if part.num_blocks is None else part.num_blocks
    inside, all_of_them = by_shape(whole.block_matrices), by_shape(whole.tensors)
    tensors, block, outside = [], 0, 0
    for (rows, columns), number in all_of_them.items():
        is_vector = columns == 1
        in_blocks = number - number % all_blocks if is_vector else inside[rows, columns]
        apart = number - in_blocks
        if not (part.is_first and part.is_last):
            has_it = part.is_last if is_vector else part.is_first or part.is_last
            apart = min(apart, 1) * has_it
        kept, a_block = rows if is_vector else -(-rows // part.tp), in_blocks // all_blocks
        tensors.append((kept, columns, a_block * num_blocks + apart))
        block += kept * columns * a_block
        outside += kept * columns * apart
    matrices = tuple(
        (-(-rows // part.tp), columns, number // all_blocks * num_blocks)
        for rows, columns, number in whole.block_matrices
    )
    stacks = tuple(
        (-(-rows // part.tp), columns, number // all_blocks * num_blocks, -(-stacked // part.tp))
        for rows, columns, number, stacked in whole.stacks
    )
    return ParameterCounts(
        block * num_blocks + outside,
        block,
        outside,
        num_blocks,
        tuple(tensor for tensor in tensors if tensor[2]),
        matrices,
        trained_only=None if whole.trained_only is None else _trained_of_part(whole.trained_only, part),
        stacks=stacks,
        looked_up=-(-whole.looked_up // part.tp) * part.is_first,
        unreached=whole.unreached // max(1, whole.block) * block if part.num_blocks is None else 0,
    )


def by_shape(tensors: tuple[tuple[int, int, int], ...]) -> Counter[tuple[int, int]]:
    """How many of each: an embedding may be as large as a matrix of a block."""
    numbers: Counter[tuple[int, int]] = Counter()
    for rows, columns, number in tensors:
        numbers[rows, columns] += number
    return numbers


def _trained_of_part(trained: ParameterCounts, part: Part) -> "ParameterCounts":
    """Which blocks have them nobody says here: a stage has its share, rounded up."""
    num_blocks = trained.num_blocks if part.num_blocks is None else part.num_blocks
    share = num_blocks / max(1, trained.num_blocks)

    def cut(tensors: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
        return tuple(
            (rows if columns == 1 else -(-rows // part.tp), columns, math.ceil(number * share))
            for rows, columns, number in tensors
        )

    tensors = cut(trained.tensors)
    return ParameterCounts(
        sum(rows * columns * number for rows, columns, number in tensors),
        -(-trained.block // part.tp),
        -(-trained.outside // part.tp),
        num_blocks,
        tensors,
        cut(trained.block_matrices),
        stacks=tuple(
            (-(-rows // part.tp), columns, math.ceil(number * share), -(-stacked // part.tp))
            for rows, columns, number, stacked in trained.stacks
        ),
        looked_up=-(-trained.looked_up // part.tp),
    )


@lru_cache(maxsize=1024)  # likewise
def _sharded(tensors: tuple[tuple[int, int, int], ...], num_ranks: int, width_bytes: int) -> Group:
    return tuple(
        Tensors(width_bytes * -(-rows // num_ranks) * columns * number, number)
        for rows, columns, number in tensors
    )


@lru_cache(maxsize=1024)  # likewise
def _share(tensors: tuple[tuple[int, int, int], ...], num_ranks: int) -> int:
    return total(_sharded(tensors, num_ranks, 1))


class StepShape(NamedTuple):
    """What one rank computes in a step: `accumulation` times forward and backward over a micro-batch of
    `micro_batch` samples of `seq_len` tokens (gradient accumulation), or its `part` of that."""

    seq_len: int
    micro_batch: int
    accumulation: int
    precision: str
    checkpointing: str
    compiled: bool
    part: Part = Part()
    offloads: bool = False  # inputs of recomputed blocks wait on the host
    fused_head: bool = False  # with the loss: logits are never whole
    float8: bool = False  # products of the blocks' linear layers
    exact_sums: bool = False  # as of `TrainPlan`

    @property
    def num_tokens(self) -> int:
        """Of one micro-batch, on one rank of `cp`."""
        return self.micro_batch * self.seq_len // self.part.cp


class Activations(NamedTuple):
    """Of one micro-batch. `saved`: what autograd keeps for the backward pass. `rebuilt`: of those, what
    recomputation brings back of one block. `backward_bytes`: the most that a block's backward pass makes
    besides. `made`: all tensors that the passes make, for an allocator to which each of them costs time.
    `offloaded_bytes`: of each block but the last, what waits on the host, and is not among the saved on a
    GPU. `kept_logit_bytes`: of `logit_bytes` the gradient of the logits, which stays until the backward pass.
    `put_off_bytes`: what stays behind a backward pass that puts off the gradients of the weights of linear
    layers, their inputs and the gradients of what they gave. `head_gradient_bytes`: of the head's weights,
    made while all that is saved is there. `tied_bytes`: of a head that is the embedding, what its gradient
    takes besides when the embedding's is added to it."""

    saved: Group
    rebuilt: Group
    backward_bytes: int
    logit_bytes: int
    made: Group
    offloaded_bytes: int = 0
    kept_logit_bytes: int = 0
    put_off_bytes: int = 0
    head_gradient_bytes: int = 0
    tied_bytes: int = 0


class PassSeconds(NamedTuple):
    """Of one micro-batch: of a block, and of all that is in none (embedding, last norm, head and loss).
    Backward passes with what they compute again. `attention`: of a block's forward pass; 0 where nobody
    knows."""

    forward_block: float
    backward_block: float
    forward_outside: float
    backward_outside: float
    attention: float = 0.0

    def total(self, num_blocks: int) -> float:
        """Forward and backward of the whole model."""
        blocks = num_blocks * (self.forward_block + self.backward_block)
        return blocks + self.forward_outside + self.backward_outside

    def scaled(self, ratio: float) -> "PassSeconds":
        """All times `ratio`."""
        return PassSeconds(
            ratio * self.forward_block,
            ratio * self.backward_block,
            ratio * self.forward_outside,
            ratio * self.backward_outside,
            ratio * self.attention,
        )


class ModelShape(Protocol):
    """What each kind of model answers."""

    @property
    def parameters(self) -> "ParameterCounts": ...

    @property
    def widths(self) -> Mapping[str, int]:
        """Named sizes that kernels and axes want to divide evenly (dim, ffn_dim, num_heads, num_experts);
        empty where nobody knows them."""

    def flops_per_token(self, seq_len: int) -> float:
        """By the convention of `plan/flops.py`."""

    def activations(self, step: StepShape, device: str) -> Activations: ...

    def pass_seconds(self, step: StepShape, kernels: Kernels) -> "PassSeconds": ...
