"""A training on machines that differ: `resources` that list groups.

Each worker has as much of a batch as it computes in the time of the others, so shares follow from predicted
speed, and micro-batches from each class's memory. Gradients are averaged among all workers over the slowest
of their networks. With `stragglers: move_load` the trainer corrects the shares by measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, cast

from mlpipe._core.errors import PlanError
from mlpipe._core.feasibility import too_few_samples
from mlpipe.kinds.train.spec import MeshSizes, Train
from mlpipe.plan.candidates import (
    global_batch,
    own_mesh,
    packing_of,
    pick,
    precision_on,
    refuse,
    strategy_of,
)
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.plan import CHECKPOINTING, GroupPlan, Strategy, TrainPlan
from mlpipe.plan.shapes.shape import ModelShape
from mlpipe.plan.shares import bounds
from mlpipe.plan.strategies import ORDER

_DIGITS = 5  # of a speed: the rest is noise, which would make plans differ from machine to machine
_EQUAL_RATIO = 1.02  # of the fastest: the first strategy within it splits least


@dataclass(frozen=True)
class MixedPlan:
    """`even_seconds`: of a step where all workers have equal shares. None: of a model whose size nobody
    knows."""

    strategy: str
    communication: str
    groups: tuple[GroupPlan, ...]
    step_seconds: float | None
    even_seconds: float | None
    tokens_per_second: float | None


def deal(
    spec: Train, shape: ModelShape | None, hardware: Hardware, where: str | None = None
) -> tuple[Candidate, MixedPlan]:
    """The fastest strategy on the groups of `hardware`, as their least machine would do it, and what each of
    them has of a step. `shape`: None for a model whose size nobody knows. Raises PlanError."""
    refuse(too_few_samples(global_batch(spec), hardware.world_size), where=where)
    names: tuple[Strategy, ...] = tuple(ORDER) if spec.strategy == "auto" else (spec.strategy,)
    if spec.strategy == "auto" and (mesh := own_mesh(spec, shape, hardware)) is not None:
        names = (cast(Strategy, strategy_of(mesh)),)
    found: list[tuple[Candidate, MixedPlan]] = []
    whys: dict[str, str] = {}
    for name in names:
        for laid_out in _layouts(spec, hardware, name):
            if laid_out is spec and any(one.strategy == name for one, _ in found):
                continue  # copies of one class each do
            picked = _picked(laid_out, shape, hardware, name)
            if isinstance(picked, str):
                whys[name] = picked
                continue
            each = (one.activation_checkpointing for one in picked)
            most = max(each, key=tuple[str, ...](CHECKPOINTING).index)
            chosen = replace(picked[0], activation_checkpointing=most)
            found.append((chosen, _mixed(laid_out, hardware, picked)))
    if not found:
        raise PlanError(
            "no strategy whose workers may have unequal shares fits in the memory of each group: "
            + "; ".join(whys.values()),
            where=where,
            hint="leave the smallest group out, or plan one class alone",
        )
    least = min(mixed.step_seconds or math.inf for _, mixed in found)
    return next(one for one in found if (one[1].step_seconds or math.inf) <= least * _EQUAL_RATIO)


def _layouts(spec: Train, hardware: Hardware, strategy: Strategy) -> list[Train]:
    """Of a strategy that has copies of what it splits first those where each copy lies on machines of one
    class, since what is gathered stays within it; last all, for where none of these fits."""
    meshes = ORDER[strategy].meshes(hardware.num_nodes, hardware.devices_per_node)
    if spec.mesh is not None or isinstance(meshes, str):
        return [spec]
    common = math.gcd(*(one.num_nodes * one.devices_per_node for one in hardware.groups))
    fine = [one for one in meshes if 1 < one.dp_shard < hardware.world_size and common % one.dp_shard == 0]
    return [spec.model_copy(update={"mesh": MeshSizes(**asdict(one))}) for one in fine] + [spec]


def _picked(
    spec: Train, shape: ModelShape | None, hardware: Hardware, strategy: str
) -> list[Candidate] | str:
    """Of the least machine and then of each group, by one strategy, with the same mesh and precision on
    all and equal shares; or why it does not go."""
    changes: dict[str, Any] = {"strategy": strategy, "communication": "resident", "stragglers": "leave"}
    may_differ = _may_differ(spec)
    changes["precision"] = precision_on(spec, hardware)[0]
    data: dict[str, Any] = {"batch_size": _even_share(spec, hardware) * hardware.world_size}
    if hasattr(spec.data, "batch_tokens"):
        data["batch_tokens"] = None
    spec = spec.model_copy(update={**changes, "data": spec.data.model_copy(update=data)})
    least = min(_classes(hardware), key=lambda one: one.memory_bytes)
    picked: list[Candidate] = []
    for one in (least, *_classes(hardware)):
        try:
            best, _ = pick(spec, shape, one)
        except PlanError as error:
            return f"{strategy}: {error.message}"
        if not best.fits or best.mesh is None:
            return f"{strategy} {best.reason} on {one.name}"
        if not picked:  # which decides for the others
            same: dict[str, Any] = {"mesh": MeshSizes(**asdict(best.mesh))}
            if not may_differ:
                own = spec.data.model_copy(update={"micro_batch": best.micro_batch})
                same |= {"data": own}
            spec = spec.model_copy(update=same)
        picked.append(best)
    return picked


def _even_share(spec: Train, hardware: Hardware) -> int:
    """Samples of a worker, where all have equally many whole micro-batches: what is priced."""
    size = spec.data.micro_batch if isinstance(spec.data.micro_batch, int) else 1
    return max(1, global_batch(spec) // (hardware.world_size * size)) * size


def _classes(hardware: Hardware) -> list[Hardware]:
    """Each as if all nodes were of it, but for the network: its workers send among all."""
    slowest = hardware.speed.network_bytes_per_second
    return [
        replace(
            one,
            num_nodes=hardware.num_nodes,
            devices_per_node=hardware.devices_per_node,
            speed=replace(one.speed, network_bytes_per_second=slowest),
        )
        for one in hardware.groups
    ]


def _may_differ(spec: Train) -> bool:
    """Whether each group may have micro-batches of a size of its own: not where whole
    ones move, nor where samples are packed into rows that are dealt among all."""
    return not _moves_whole(spec) and packing_of(spec) is None and spec.data.micro_batch == "auto"


def _mixed(spec: Train, hardware: Hardware, picked: Sequence[Candidate]) -> MixedPlan:
    """What a worker computes takes its share's part of the time that it takes for an even one."""
    least, *each = picked
    batch, groups = global_batch(spec), hardware.groups
    num_workers = [one.num_nodes * one.devices_per_node for one in groups]
    whole = sum(num_workers)
    computes = _compute_seconds(hardware, each)
    rates = [1 / one for one in computes] if computes else _peak_rates(groups, least.precision)
    mean = sum(rate * number for rate, number in zip(rates, num_workers, strict=True)) / whole
    speeds = [float(f"{rate / mean:.{_DIGITS}g}") for rate in rates]
    sizes = [one.micro_batch or 1 for one in each]
    sample_tokens = least.num_tokens / (_even_share(spec, hardware) * whole)  # on the mean
    unit = 1
    if not _may_differ(spec):
        sizes = [min(sizes)] * len(groups)
    if _moves_whole(spec):
        unit = _unit(batch, whole, min(sizes))
        sizes = [unit] * len(groups)
    ends = bounds(
        batch // unit, whole, [speed for speed, n in zip(speeds, num_workers, strict=True) for _ in range(n)]
    )
    counts = [unit * (stop - start) for start, stop in pairwise(ends)]
    shares, first = [], 0
    for number in num_workers:
        shares.append(counts[first : first + number])
        first += number
    exposed = max((one.seconds.total - one.seconds.compute for one in each if one.seconds), default=0.0)

    def takes(index: int, sequences: int) -> float:
        return computes[index] * sequences / _even_share(spec, hardware) + exposed

    step = max(takes(index, max(own)) for index, own in enumerate(shares)) if computes else None
    plans = []
    for index, (one, best, own) in enumerate(zip(groups, each, shares, strict=True)):
        price = one.price_usd_per_device_hour
        usd = None if price is None else price * len(own)
        tokens = sum(own) * sample_tokens
        plans.append(
            GroupPlan(
                name=one.name,
                num_nodes=one.num_nodes,
                num_workers=len(own),
                speed=speeds[index],
                sequences=max(own),
                share_ratio=sum(own) / batch,
                micro_batch=min(sizes[index], max(own)),
                activation_checkpointing=cast(Any, best.activation_checkpointing),
                memory_bytes=best.memory.total if best.memory is not None else None,
                step_seconds=takes(index, max(own)) if computes else None,
                usd_per_hour=usd,
                usd_per_million_tokens=None
                if usd is None or step is None
                else usd * step / 3600 / tokens * 1e6,
            )
        )
    even = max(takes(index, -(-batch // whole)) for index in range(len(groups))) if computes else None
    rate = None if step is None else batch * sample_tokens / step
    return MixedPlan(least.strategy, least.communication, tuple(plans), step, even, rate)


def _compute_seconds(hardware: Hardware, each: Sequence[Candidate]) -> list[float]:
    """Of an even share, of each group; none where nobody knows the model's size. Where the file says how fast
    the groups are beside each other, that counts, and the first one's time."""
    seconds = [one.seconds.compute for one in each if one.seconds is not None]
    said = [one.relative_speed for one in hardware.groups]
    if len(seconds) < len(each) or None in said:
        return seconds if len(seconds) == len(each) else []
    return [seconds[0] * (said[0] or 1.0) / (one or 1.0) for one in said]


def _peak_rates(groups: Sequence[Hardware], precision: str) -> list[float]:
    """As the file says, or by what the best matmul of each reaches."""
    return [
        one.relative_speed or one.speed.peak_flops[precision] * one.speed.achievable_ratio for one in groups
    ]


def _moves_whole(spec: Train) -> bool:
    """Whether each new size of a micro-batch would be compiled."""
    return spec.compile != "off" and spec.stragglers == "move_load"


def _unit(batch: int, num_workers: int, micro_batch: int) -> int:
    """Samples of a micro-batch that moves as a whole; each worker has one at the least."""
    most = min(micro_batch, batch // num_workers)
    return next(size for size in range(most, 0, -1) if batch % size == 0)


def with_shares(plan: TrainPlan, mixed: MixedPlan) -> TrainPlan:
    """The plan of the least machine, as all groups follow it."""
    groups, predicted = mixed.groups, plan.predicted
    if predicted is not None and mixed.step_seconds is not None:
        fullest = max(one.memory_bytes or 0 for one in groups)
        seconds = float(f"{mixed.step_seconds:.{_DIGITS}g}")
        predicted = replace(predicted, memory_bytes=fullest, step_seconds=seconds)
    return replace(
        plan,
        groups=groups,
        micro_batch=min(one.micro_batch for one in groups),
        accumulation=max(-(-one.sequences // one.micro_batch) for one in groups),
        predicted=predicted,
        smaller_micro_batches=(),
    )
