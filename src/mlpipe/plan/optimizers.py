"""What an optimizer costs: the tensors that it keeps, and a step. Which optimizers there are says
`_core/optimizers.py`; a plan and a pipeline have what one of the user's own keeps as
`state_bytes_per_parameter`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from mlpipe._core.optimizers import OPTIMIZERS, Parameter, StateTensor, UpdateCost
from mlpipe.plan.shapes.shape import ParameterCounts, by_shape
from mlpipe.plan.tensors import GRADIENT_BYTES, WEIGHT_BYTES, Group, Tensors, total
from mlpipe.plan.work import TrainPlan


class OptimizerCost(NamedTuple):
    """`bytes_per_parameter`: of states that are split as the parameters are. `name`: of the table, whose
    entry may know them to the byte; None: a user's own. `averages`: an average of the weights is kept.
    `on_host`: the states are, and the update; the average is not."""

    bytes_per_parameter: int
    name: str | None = None
    averages: bool = False
    on_host: bool = False

    @property
    def replaces_weights(self) -> bool:
        """Whether one of its states is what a checkpoint has as the weights."""
        return self.name is not None and OPTIMIZERS[self.name].averages

    def states(self, parameters: ParameterCounts, num_ranks: int) -> Group:
        """On the first of so many ranks, which has the most rows."""
        return _states(self, parameters, num_ranks)

    def states_on_gpu(self, parameters: ParameterCounts, num_ranks: int) -> Group:
        """Of these the ones that do not wait on the host."""
        kept = self._replace(bytes_per_parameter=0, name=None) if self.on_host else self
        return kept.states(parameters, num_ranks)

    def state_bytes_per_parameter(self, parameters: ParameterCounts) -> float:
        """Of a rank that has them all, on average."""
        return total(self.states(parameters, 1)) / max(1, parameters.total)

    def traffic_bytes_per_parameter(self, parameters: ParameterCounts) -> float:
        """Bytes that a step reads and writes in memory: the norm reads the gradient, clipping reads and
        writes it; the update reads weight, gradient and state, and writes weight and state; an average reads
        the new weight. For AdamW 4 + 8 + 16 + 12 = 40."""
        return traffic_bytes(self.state_bytes_per_parameter(parameters)) + WEIGHT_BYTES * self.averages

    def update_cost(self, parameters: ParameterCounts) -> UpdateCost:
        """Of the whole model."""
        known = OPTIMIZERS[self.name].update_cost if self.name is not None else None
        if known is None:
            return UpdateCost(0.0, 0)
        costs = [(known(parameter), number) for parameter, number in _each(parameters)]
        return UpdateCost(
            sum(cost.flops * number for cost, number in costs),
            sum(cost.sent_bytes * number for cost, number in costs),
        )

    def stacked_bytes(self, parameters: ParameterCounts) -> int:
        """Of the bytes that `update_cost` sends, those of experts."""
        known = OPTIMIZERS[self.name].update_cost if self.name is not None else None
        if known is None:
            return 0
        stacks = ((known(one).sent_bytes, number) for one, number in _each(parameters) if one.matrices > 1)
        return sum(sent * number for sent, number in stacks)


def optimizer_cost(plan: TrainPlan) -> OptimizerCost:
    """Of what was planned."""
    optimizer = plan.optimizer
    return OptimizerCost(
        optimizer.state_bytes_per_parameter,
        optimizer.name,
        plan.ema is not None,
        plan.offload in ("optimizer", "all"),
    )


def traffic_bytes(state_bytes_per_parameter: float) -> float:
    """Of a step without an average, for each parameter."""
    norm, clipping = GRADIENT_BYTES, 2 * GRADIENT_BYTES
    read = WEIGHT_BYTES + GRADIENT_BYTES + state_bytes_per_parameter
    written = WEIGHT_BYTES + state_bytes_per_parameter
    return norm + clipping + read + written


def _each(parameters: ParameterCounts) -> Iterator[tuple[Parameter, int]]:
    """Kinds of tensors, and how many there are of each."""
    inside = by_shape(parameters.block_matrices)
    for rows, columns, number in parameters.tensors:
        in_block = min(number, inside[rows, columns])
        inside[rows, columns] -= in_block
        for *_, stacked, matrices in (one for one in parameters.stacks if one[:2] == (rows, columns)):
            yield Parameter(rows, columns, True, matrices), stacked
            in_block, number = in_block - stacked, number - stacked
        for many, is_inside in ((in_block, True), (number - in_block, False)):
            if many:
                yield Parameter(rows, columns, is_inside), many


@lru_cache(maxsize=1024)  # each is asked for by every candidate
def _states(cost: OptimizerCost, parameters: ParameterCounts, num_ranks: int) -> Group:
    known: Callable[[Parameter], tuple[StateTensor, ...]] | None = None
    if cost.name is not None:
        known = OPTIMIZERS[cost.name].states
    states: Group = parameters.sharded(num_ranks, WEIGHT_BYTES) if cost.averages else ()
    if known is None:  # as many fp32 tensors a parameter as make these bytes
        number, rest = divmod(cost.bytes_per_parameter, WEIGHT_BYTES)
        states += number * parameters.sharded(num_ranks, WEIGHT_BYTES)
        return states + parameters.sharded(num_ranks, rest) if rest else states
    return states + tuple(
        Tensors(number * (-(-parameter.rows // num_ranks) * kept.row_bytes + kept.whole_bytes), number)
        for parameter, number in _each(parameters)
        for kept in known(parameter)
    )
