"""A model of which adapters alone are trained (`train.adapter`): all its weights, and beside matrices of its
blocks two small ones each, which have gradients and states."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from mlpipe._core.adapters import A, B, targets
from mlpipe._core.presets import Named
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.shapes.frozen import Frozen
from mlpipe.plan.shapes.shape import Activations, ParameterCounts, PassSeconds, StepShape, by_shape
from mlpipe.plan.tensors import COMPUTE_BYTES, Tensors


@dataclass(frozen=True)
class Adapted(Frozen):
    """`patterns`: which matrices have an adapter; empty: all."""

    rank: int

    @cached_property
    def _targets(self) -> list[Named]:
        layers = {
            one.name.removesuffix(".weight"): one
            for one in self.whole.config.named_tensors()
            if one.block is not None and one.columns > 1 and one.name.endswith(".weight")
        }
        return [layers[name] for name in targets(self.patterns, layers)]

    @cached_property
    def trained(self) -> tuple[Named, ...]:
        """Raises PlanError for a pattern that fits nothing."""
        return tuple(
            Named(f"{one.name.removesuffix('.weight')}.{name}", rows, columns, one.block)
            for one in self._targets
            for name, rows, columns in ((A, self.rank, one.columns), (B, one.rows, self.rank))
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
        return replace(
            whole,
            total=whole.total + own.total,
            block=whole.block + block,
            tensors=_together(whole.tensors, added),
            block_matrices=_together(whole.block_matrices, matrices),
            trained_only=own,
            base_elsewhere=True,
        )

    def activations(self, step: StepShape, device: str) -> Activations:
        """Besides, what comes out of each A."""
        found = super().activations(step, device)
        width = COMPUTE_BYTES[step.precision]
        size = step.num_tokens * width * self.rank * len(self._targets)
        return replace(found, saved=(*found.saved, Tensors(size, len(self._targets))))

    def pass_seconds(self, step: StepShape, kernels: Kernels) -> PassSeconds:
        """Besides, two small products for each target, and twice as many in the backward pass."""
        found = super().pass_seconds(step, kernels)
        products = sum(kernels.matmul(step.num_tokens, one.columns, one.rows) for one in self.trained)
        each = products / self.whole.config.num_layers
        return replace(
            found,
            forward_block=found.forward_block + each,
            backward_block=found.backward_block + 2 * each,
        )


def _together(
    some: tuple[tuple[int, int, int], ...], others: tuple[tuple[int, int, int], ...]
) -> tuple[tuple[int, int, int], ...]:
    numbers = by_shape((*some, *others))
    return tuple((rows, columns, number) for (rows, columns), number in numbers.items())
