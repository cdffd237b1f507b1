"""A preset of which some parameters are not trained (`train.freeze`), or all but adapters (`train.adapter`):
these have no gradients and no states of the optimizer, nothing of them is reduced, and the backward pass
computes no gradients of theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from mlpipe._core.errors import PlanError
from mlpipe._core.presets import Named
from mlpipe._core.quantized import Base, is_quantized, row_bytes
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.shapes.dense import Dense, stacks
from mlpipe.plan.shapes.shape import (
    Activations,
    ParameterCounts,
    PassSeconds,
    StepShape,
    by_shape,
)
from mlpipe.plan.tensors import COMPUTE_BYTES, Tensors


@dataclass(frozen=True)
class Frozen:
    """`whole` without what `patterns` match. FLOPs and MFU stay those of the whole model, by whose convention
    they are compared. Blocks below the lowest trained parameter keep no activations; the others, and the
    stages of a pipeline, count as if all of them were trained."""

    whole: Dense
    patterns: tuple[str, ...]

    @cached_property
    def trained(self) -> tuple[Named, ...]:
        """Raises PlanError for a pattern that fits nothing, and where nothing is left."""
        from mlpipe._core.patterns import frozen  # of few plans

        everything = {one.name: one for one in self.whole.config.named_tensors()}
        fixed = set(frozen(self.patterns, everything, PlanError))
        left = tuple(one for name, one in everything.items() if name not in fixed)
        if not left:
            raise PlanError(
                "all parameters are frozen, so nothing is trained",
                where="train.freeze",
                hint="leave some out",
            )
        return left

    @cached_property
    def parameters(self) -> ParameterCounts:
        by_block: Counter[int | None] = Counter()
        tensors: Counter[tuple[int, int]] = Counter()
        matrices: Counter[tuple[int, int]] = Counter()
        for one in self.trained:
            by_block[one.block] += one.size
            tensors[one.rows, one.columns] += 1
            if one.block is not None and one.columns > 1:
                matrices[one.rows, one.columns] += 1
        whole, outside = self.whole.parameters, by_block.pop(None, 0)
        trained = ParameterCounts(
            total=outside + by_block.total(),
            block=max(by_block.values(), default=0),
            outside=outside,
            num_blocks=whole.num_blocks,
            tensors=_counted(tensors),
            block_matrices=_counted(matrices),
            stacks=stacks(self.whole.config, self.trained),
            looked_up=whole.looked_up
            if any(one.name == "embed_tokens.weight" for one in self.trained)
            else 0,
        )
        unreached = (whole.num_blocks - self._num_reached) * whole.block
        return whole._replace(trained_only=trained, unreached=unreached)

    @property
    def widths(self) -> Mapping[str, int]:
        return self.whole.widths

    def flops_per_token(self, seq_len: int) -> float:
        return self.whole.flops_per_token(seq_len)

    def activations(self, step: StepShape, device: str) -> Activations:
        activations = self.whole.activations(step, device)
        if step.part.num_blocks is None:  # of a pipeline's stages each would have blocks of its own
            num_blocks = max(1, self._num_reached)  # what a block only makes is there for a while, too
            above = step._replace(part=step.part._replace(num_blocks=num_blocks))
            activations = self.whole.activations(above, device)._replace(made=activations.made)
        if self._trains_head:
            return activations
        return activations._replace(head_gradient_bytes=0, tied_bytes=0)

    @cached_property
    def _num_reached(self) -> int:
        """Blocks through which a backward pass goes: down to the lowest in which something is trained, or to
        the embedding."""
        num_layers = self.whole.config.num_layers
        return num_layers - min(
            (0 if one.name.startswith("embed") else num_layers if one.block is None else one.block)
            for one in self.trained
        )

    @cached_property
    def _trains_head(self) -> bool:
        head = "embed_tokens.weight" if self.whole.config.tied else "lm_head.weight"
        return any(one.name == head for one in self.trained)

    def pass_seconds(self, step: StepShape, kernels: Kernels) -> PassSeconds:
        """A backward pass goes down to the lowest parameter that is trained; of a frozen matrix it has one
        product fewer."""
        seconds, config = self.whole.pass_seconds(step, kernels), self.whole.config
        reached = self._num_reached / config.num_layers
        share = _block_matrices(self.trained) / _block_matrices(config.named_tensors())
        gradients = self.whole.weight_gradient_seconds(step, kernels)
        block = reached * (seconds.backward_block - gradients) + share * gradients
        names = {one.name for one in self.trained}
        head = seconds.backward_outside - self.whole.embedding_seconds(step, kernels)
        has_table = "embed_tokens.weight" in names
        below = self._num_reached > 0 or "norm.weight" in names
        outside = head * (below + self._trains_head) / 2 + (seconds.backward_outside - head) * has_table
        return seconds._replace(backward_block=block, backward_outside=outside)


def _block_matrices(tensors: Iterable[Named]) -> int:
    """Their parameters."""
    return sum(one.size for one in tensors if one.block is not None and one.columns > 1)


def _counted(tensors: Counter[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((rows, columns, number) for (rows, columns), number in tensors.items())


@dataclass(frozen=True)
class Adapted(Frozen):
    """A model of which adapters alone are trained (`train.adapter`): all its weights, and beside matrices of
    its blocks two small ones each, which have gradients and states. `patterns`: which matrices have an
    adapter; empty: all. `base`: how the matrices of all linear layers of the blocks are kept."""

    rank: int
    dora: bool = False
    base: Base | None = None

    @cached_property
    def _layers(self) -> dict[str, Named]:
        """Neither a router nor experts, whose matrices are no layers of their own."""
        return {
            one.name.removesuffix(".weight"): one
            for one in self.whole.config.named_tensors()
            if is_quantized(one.name)
        }

    @cached_property
    def _targets(self) -> list[Named]:
        from mlpipe._core.adapters import targets  # of few plans

        return [self._layers[name] for name in targets(self.patterns, self._layers)]

    @cached_property
    def trained(self) -> tuple[Named, ...]:
        """Raises PlanError for a pattern that fits nothing."""
        from mlpipe._core.adapters import MAGNITUDE, A, B

        return tuple(
            Named(f"{one.name.removesuffix('.weight')}.{name}", rows, columns, one.block)
            for one in self._targets
            for name, rows, columns in (
                (A, self.rank, one.columns),
                (B, one.rows, self.rank),
                *(((MAGNITUDE, one.rows, 1),) if self.dora else ()),
            )
        )

    @cached_property
    def parameters(self) -> ParameterCounts:
        whole, by_block = self.whole.parameters, Counter[int | None]()
        numbers: Counter[tuple[int, int]] = Counter()
        for one in self.trained:
            by_block[one.block] += one.size
            numbers[one.rows, one.columns] += 1
        added = tuple((rows, columns, number) for (rows, columns), number in numbers.items())
        matrices = tuple(one for one in added if one[1] > 1)
        block = max(by_block.values())
        own = ParameterCounts(by_block.total(), block, 0, whole.num_blocks, added, matrices)
        return whole._replace(
            total=whole.total + own.total,
            block=whole.block + block,
            tensors=_together(whole.tensors, added),
            block_matrices=_together(whole.block_matrices, matrices),
            trained_only=own,
            base_elsewhere=True,
            quantized=self._quantized,
        )

    @property
    def _quantized(self) -> tuple[tuple[int, int, int, int], ...]:
        if self.base is None:
            return ()
        numbers = Counter((one.rows, one.columns) for one in self._layers.values())
        return tuple(
            (rows, columns, row_bytes(columns, self.base), number)
            for (rows, columns), number in numbers.items()
        )

    def _spelled_out_bytes(self, step: StepShape) -> int:
        """Of the largest matrix, for a product with it: in fp32, and beside that in the compute dtype, or
        before it pairs of codes as numbers of 4 bytes."""
        if self.base is None:
            return 0
        width = COMPUTE_BYTES[step.precision]
        beside = width if width < 4 else 2 if self.base == "nf4" else 0
        return (4 + beside) * max(one.size for one in self._layers.values())

    def activations(self, step: StepShape, device: str) -> Activations:
        """Besides, what comes out of each A; with DoRA also out of each weight, and out of each B. In a
        backward pass a matrix of few bits is spelled out."""
        activations = self.whole.activations(step, device, adapted=True)
        width = COMPUTE_BYTES[step.precision]
        number, columns = len(self._targets), self.rank * len(self._targets)
        if self.dora:
            number, columns = 3 * number, columns + 2 * sum(one.rows for one in self._targets)
        size = step.num_tokens * width * columns
        saved = (*activations.saved, Tensors(size, number))
        backward_bytes = activations.backward_bytes + self._spelled_out_bytes(step)
        return activations._replace(saved=saved, backward_bytes=backward_bytes)

    def pass_seconds(self, step: StepShape, kernels: Kernels) -> PassSeconds:
        """Besides, two small products for each target, and twice as many in the backward pass; with DoRA a
        third one in the forward pass, of A with the weight."""
        seconds, num_layers = super().pass_seconds(step, kernels), self.whole.config.num_layers
        matrices = [one for one in self.trained if one.columns > 1]
        each = sum(kernels.matmul(step.num_tokens, one.columns, one.rows) for one in matrices) / num_layers
        lengths = sum(kernels.matmul(one.rows, one.columns, self.rank) for one in self._targets if self.dora)
        spelled = self._spelled_out_seconds(step, kernels)
        again = spelled if step.checkpointing != "none" else 0.0
        return seconds._replace(
            forward_block=seconds.forward_block + each + lengths / num_layers + spelled,
            backward_block=seconds.backward_block + 2 * each + spelled + again,
        )

    def _spelled_out_seconds(self, step: StepShape, kernels: Kernels) -> float:
        """Of a block's matrices of few bits, each once: codes are read, written as numbers and read, values
        are written, scaled, and cast."""
        codes = sum(rows * row_bytes * number for rows, _, row_bytes, number in self._quantized)
        weights = sum(rows * columns * number for rows, columns, _, number in self._quantized)
        width = COMPUTE_BYTES[step.precision]
        indices = 4 if self.base == "nf4" else 0  # two of four bytes for each pair
        moved = codes + weights * (indices + 12 + (4 + width if width < 4 else 0))
        return kernels.stream(moved / self.whole.config.num_layers, fuse=False)


def _together(
    some: tuple[tuple[int, int, int], ...], others: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, int, int], ...]:
    numbers = by_shape((*some, *others))
    return tuple((rows, columns, number) for (rows, columns), number in numbers.items())
