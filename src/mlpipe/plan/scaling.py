"""The same training on other numbers of nodes, and the choice under a budget or a deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mlpipe._core.errors import PlanError
from mlpipe._core.meshes import FILL
from mlpipe._core.units import format_seconds
from mlpipe.plan import replicas
from mlpipe.plan.candidates import pick
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.references import stage_named
from mlpipe.plan.training import shape_of, training_of
from mlpipe.spec.model import Pipeline

if TYPE_CHECKING:
    from mlpipe.plan.shapes.traced import Traced

# Where adding nodes stops paying: below this share of the smallest's tokens per worker and second.
_PAYS = 0.5
_MOST_NODES = 1024


@dataclass(frozen=True)
class ScaledPlan:
    """The best plan on `num_nodes`, or in `note` why there is none. `efficiency`: tokens per second and
    worker against those of the smallest number of nodes that can do it."""

    num_nodes: int
    num_workers: int
    best: Candidate | None
    efficiency: float | None
    note: str


def parse_nodes(text: str) -> list[int]:
    """`1..64`: powers of two from the first to the last, and both; `8`: that one. Raises PlanError."""
    first, dots, last = text.partition("..")
    ends = [first, last] if dots else [first]
    if not all(end.isdecimal() and 1 <= int(end) <= _MOST_NODES for end in ends) or int(ends[0]) > int(
        ends[-1]
    ):
        raise PlanError(
            f"{text!r} is no range of nodes", where="--nodes", hint=f"write like 1..64, up to {_MOST_NODES}"
        )
    low, high = int(ends[0]), int(ends[-1])
    doubled = {low << i for i in range(11) if low << i <= high}
    return sorted({low, *doubled, high})


def scale_stage(
    pipeline: Pipeline, stage_name: str, hardware: Hardware, nodes: str, traced: Traced | None = None
) -> list[ScaledPlan]:
    """The stage's training on other numbers of nodes, like `1..64`; of an elastic one a replica on each.
    Raises PlanError."""
    spec = training_of(pipeline, stage_name)
    shape, resources = shape_of(spec, {}, traced), stage_named(pipeline, stage_name).resources
    if shape is not None and resources is not None and resources.replicas is not None:
        return _scale(hardware, parse_nodes(nodes), partial(replicas.best_on, spec, shape, hardware))
    # a mesh that does not fill what there is is chosen anew for each
    if spec.mesh is not None and FILL not in spec.mesh.model_dump().values():
        spec = spec.model_copy(update={"mesh": None})

    def best_on(number: int) -> Candidate:
        return pick(spec, shape, hardware._replace(num_nodes=number))[0]

    return _scale(hardware, parse_nodes(nodes), best_on)


def _scale(hardware: Hardware, nodes: Sequence[int], best_on: Callable[[int], Candidate]) -> list[ScaledPlan]:
    """The batch stays what it is, so that the run learns the same."""
    rows: list[ScaledPlan] = []
    first: float | None = None
    stopped = False
    for number in nodes:
        there = hardware._replace(num_nodes=number)
        try:
            best = best_on(number)
        except PlanError as error:
            rows.append(ScaledPlan(number, there.world_size, None, None, error.message.partition(";")[0]))
            continue
        if not best.fits or best.tokens_per_second is None:
            rows.append(ScaledPlan(number, there.world_size, None, None, best.reason))
            continue
        rate = best.tokens_per_second / there.world_size
        first = first or rate
        efficiency = rate / first
        note = ""
        if efficiency < _PAYS and not stopped:
            note, stopped = "stops paying here: half of the workers' time buys nothing", True
        rows.append(ScaledPlan(number, there.world_size, best, efficiency, note))
    return rows


def within(
    rows: Sequence[ScaledPlan], budget_usd: float | None, deadline_seconds: float | None
) -> tuple[ScaledPlan, str]:
    """The cheapest that meets the deadline, or without one the fastest within the budget, and why. Raises
    PlanError that says what would meet them."""
    able = [row for row in rows if row.best is not None and row.best.hours is not None]
    if not able:
        raise PlanError("no number of nodes can run this", hint="; ".join(row.note for row in rows[:3]))
    if budget_usd is not None and any(_usd(row) is None for row in able):
        raise PlanError(
            "a budget needs a price", where="--budget-usd", hint="write resources.price_usd_per_gpu_hour"
        )
    cheap = [row for row in able if budget_usd is None or (_usd(row) or 0.0) <= budget_usd]
    timely = [row for row in able if deadline_seconds is None or _seconds(row) <= deadline_seconds]
    both = [row for row in cheap if row in timely]
    if both and deadline_seconds is not None:
        best = min(both, key=lambda row: (_usd(row) or 0.0, row.num_nodes))
        return best, f"{_nodes(best)}: the cheapest that is done in time, after {_took(best)}{_for(best)}"
    if both:
        best = min(both, key=_seconds)
        return best, f"{_nodes(best)}: the fastest within the budget, {_took(best)}{_for(best)}"
    remedies = []
    fastest, cheapest = min(able, key=_seconds), min(able, key=lambda row: _usd(row) or 0.0)
    if deadline_seconds is not None and not timely:
        ratio = deadline_seconds / _seconds(fastest)
        enough = f"{format_seconds(deadline_seconds)} is enough for {_share(ratio)} of the steps"
        remedies.append(f"the fastest, {_nodes(fastest)}, takes {_took(fastest)}: {enough}")
    if budget_usd is not None and not cheap:
        ratio = budget_usd / (_usd(cheapest) or 1.0)
        enough = f"{budget_usd:,.2f} USD is enough for {_share(ratio)} of the steps"
        remedies.append(f"the cheapest, {_nodes(cheapest)}, costs {_usd(cheapest):,.2f} USD: {enough}")
    if timely and cheap:
        least = min(timely, key=lambda row: _usd(row) or 0.0)
        remedies.append(f"in time costs {_usd(least):,.2f} USD at least, on {_nodes(least)}")
        soonest = min(cheap, key=_seconds)
        remedies.append(f"within the budget takes {_took(soonest)} at least, on {_nodes(soonest)}")
    raise PlanError("no plan meets this", hint=f"what would: {'; '.join(remedies)}")


def _share(ratio: float) -> str:
    return f"{ratio:.0%}" if ratio >= 0.01 else "less than 1%"


def _usd(row: ScaledPlan) -> float | None:
    return row.best.usd if row.best is not None else None


def _seconds(row: ScaledPlan) -> float:
    return 3600 * (row.best.hours or 0.0) if row.best is not None else 0.0


def _took(row: ScaledPlan) -> str:
    return format_seconds(_seconds(row))


def _for(row: ScaledPlan) -> str:
    usd = _usd(row)
    return "" if usd is None else f", for {usd:,.2f} USD"


def _nodes(row: ScaledPlan) -> str:
    return f"{row.num_nodes} node{'s' if row.num_nodes > 1 else ''}"
