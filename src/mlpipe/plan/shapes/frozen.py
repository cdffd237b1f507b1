"""A preset of which some parameters are not trained (`train.freeze`): these have no gradients and no states
of the optimizer, nothing of them is reduced, and the backward pass computes no gradients of theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mlpipe._core.errors import PlanError
from mlpipe._core.presets import Named
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.plan import AdapterPlan, TrainPlan
from mlpipe.plan.shapes import presets
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import Activations, ModelShape, ParameterCounts, PassSeconds, StepShape


@dataclass(frozen=True)
class Frozen:
    """`whole` without what `patterns` match. FLOPs and MFU stay those of the whole model, by whose convention
    they are compared; activations are counted as if all were trained."""

    whole: Dense
    patterns: tuple[str, ...]

    @cached_property
    def trained(self) -> tuple[Named, ...]:
        """Raises PlanError for a pattern that fits nothing, and where nothing is left."""
        from mlpipe._core.patterns import matching, nearest  # of few plans

        everything = {one.name: one for one in self.whole.config.named_tensors()}
        left = dict(everything)
        for pattern in self.patterns:
            found = matching(pattern, everything)
            if not found:
                raise PlanError(
                    f"{pattern!r} fits no parameter of the model",
                    where="train.freeze",
                    hint=nearest(pattern, everything),
                )
            for name in found:
                left.pop(name, None)
        if not left:
            raise PlanError(
                "all parameters are frozen, so nothing is trained",
                where="train.freeze",
                hint="leave some out",
            )
        return tuple(left.values())

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
        )
        return replace(whole, trained_only=trained)

    @property
    def widths(self) -> Mapping[str, int]:
        return self.whole.widths

    def flops_per_token(self, seq_len: int) -> float:
        return self.whole.flops_per_token(seq_len)

    def activations(self, step: StepShape, device: str) -> Activations:
        return self.whole.activations(step, device)

    def pass_seconds(self, step: StepShape, kernels: Kernels) -> PassSeconds:
        """A backward pass goes down to the lowest parameter that is trained; of a frozen matrix it has one
        product fewer."""
        seconds, config = self.whole.pass_seconds(step, kernels), self.whole.config
        lowest = min(
            (-1 if one.name.startswith("embed") else config.num_layers if one.block is None else one.block)
            for one in self.trained
        )
        reached = (config.num_layers - max(0, lowest)) / config.num_layers
        share = _block_matrices(self.trained) / _block_matrices(config.named_tensors())
        gradients = self.whole.weight_gradient_seconds(step, kernels)
        block = reached * (seconds.backward_block - gradients) + share * gradients
        names = {one.name for one in self.trained}
        head = seconds.backward_outside - self.whole.embedding_seconds(step, kernels)
        has_table = "embed_tokens.weight" in names
        has_head = has_table if config.tied else "lm_head.weight" in names
        below = lowest < config.num_layers or "norm.weight" in names
        outside = head * (below + has_head) / 2 + (seconds.backward_outside - head) * has_table
        return replace(seconds, backward_block=block, backward_outside=outside)


def _block_matrices(tensors: Iterable[Named]) -> int:
    """Their parameters."""
    return sum(one.size for one in tensors if one.block is not None and one.columns > 1)


def _counted(tensors: Counter[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    return tuple((rows, columns, number) for (rows, columns), number in tensors.items())


def without(
    shape: ModelShape | None, patterns: Sequence[str] | None, adapter: AdapterPlan | None = None
) -> ModelShape | None:
    """What is planned where so much is frozen, or all but an adapter: of a model whose parameters have no
    names here, all."""
    if adapter is not None and isinstance(shape, Dense):
        from mlpipe.plan.shapes.adapted import Adapted  # of few plans, and made of this

        return Adapted(shape, adapter.targets, adapter.rank)
    if not patterns or not isinstance(shape, Dense):
        return shape
    found = Frozen(shape, tuple(patterns))
    _ = found.trained  # patterns that say nothing are refused at once
    return found


def planned(train: TrainPlan) -> ModelShape | None:
    """The shape of a planned training; None: of a user's own model."""
    return without(presets.planned(train.model), train.freeze, train.adapter)
