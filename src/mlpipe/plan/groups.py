"""A training on machines that differ: `resources` that list groups.

Each data rank (workers that compute the same samples, all of one class) has as much of a batch as it computes
in the time of the others, so shares follow from predicted speed, and micro-batches from each class's memory.
Gradients are averaged among all workers over the slowest of their networks. With `stragglers: move_load` the
trainer corrects the shares by measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

from mlpipe._core.errors import PlanError
from mlpipe._core.feasibility import too_few_samples
from mlpipe._core.meshes import Strategy, across_classes
from mlpipe._core.pipelines import why_not
from mlpipe._core.units import format_step_seconds
from mlpipe.kinds.train.spec import Train
from mlpipe.plan.candidates import (
    enumerate_candidates,
    global_batch,
    is_searched,
    num_data_ranks,
    own_mesh,
    packing_of,
    pick,
    precision_on,
    refuse,
    schedule_of,
    strategy_of,
)
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.search import MODEL_ERROR
from mlpipe.plan.settings import CHECKPOINTING
from mlpipe.plan.shapes.shape import ModelShape
from mlpipe.plan.shares import bounds
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.work import GroupPlan, TrainPlan
from mlpipe.spec.layout import Context, MeshSizes

_DIGITS = 5  # of a speed: the rest is noise, which would make plans differ from machine to machine
_EQUAL_RATIO = 1.02  # of the fastest: the first strategy within it splits least
_MOST_TRIED, _MOST_FITTING = 48, 3  # of meshes with other axes than those of data parallelism


@dataclass(frozen=True)
class MixedPlan:
    """`even_seconds`: of a step where all workers have equal shares. None: of a model whose size nobody
    knows."""

    strategy: str
    mesh: Mesh
    communication: str
    groups: tuple[GroupPlan, ...]
    step_seconds: float | None
    even_seconds: float | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class _Way:
    """To train on machines of one class, each data rank with an even share of the batch. `sample_seconds`: of
    one more. None: of a model whose size nobody knows."""

    hardware: Hardware
    spec: Train
    best: Candidate
    even: int
    sample_seconds: float | None

    def takes(self, sequences: int, sample_seconds: float) -> float:
        """Seconds of a step of a data rank that has so many."""
        assert self.sample_seconds is not None
        return self.best.step_seconds - self.even * self.sample_seconds + sequences * sample_seconds


def deal(
    spec: Train, shape: ModelShape | None, hardware: Hardware, where: str | None = None
) -> tuple[Candidate, MixedPlan]:
    """The fastest way on the groups of `hardware`, as their least machine would do it, and what each of
    them has of a step. `shape`: None for a model whose size nobody knows. Raises PlanError."""
    found, whys = _found(spec, shape, hardware, where)
    if not found:
        raise PlanError(
            "no strategy whose workers may have unequal shares fits in the memory of each group: "
            + "; ".join(whys.values()),
            where=where,
            hint="leave the smallest group out, or plan one class alone",
        )
    return _best(found)


def explain(spec: Train, shape: ModelShape | None, hardware: Hardware) -> list[str]:
    """Why it is done so, in lines: all that was tried, best first, what did not fit, and each group alone.
    Raises PlanError."""
    found, whys = _found(spec, shape, hardware, None)
    chosen = _best(found) if found else None
    lines = []
    for way in sorted(found, key=lambda one: one[1].step_seconds or math.inf):
        candidate, mixed = way
        step, even = (format_step_seconds(one or 0.0) for one in (mixed.step_seconds, mixed.even_seconds))
        told = f": a step of {step}, with equal shares {even}" if mixed.step_seconds is not None else ""
        lines.append(f"{_name(candidate)}{told}{' <- chosen' if way is chosen else ''}")
    lines += whys.values()
    if shape is not None:
        lines += [f"alone, {_alone(spec, shape, one)}" for one in hardware.groups]
    return lines


def _name(candidate: Candidate) -> str:
    sizes = candidate.mesh.larger_axes if candidate.mesh is not None else {}
    axes = [f"{axis} {size}" for axis, size in sizes.items()]
    return f"{candidate.strategy} ({', '.join(axes)})"


def _alone(spec: Train, shape: ModelShape, group: Hardware) -> str:
    """What its machines would do with the whole batch, without the others."""
    group = group._replace(relative_speed=None)
    try:
        best, _ = pick(spec.model_copy(update={"strategy": "auto", "mesh": None}), shape, group)
    except PlanError as error:
        return f"{group}: {error.message}"
    if not best.fits:
        return f"{group}: {best.reason}"
    cost = best.usd_per_million_tokens
    price = "" if cost is None else f", {cost:.3f} USD per million tokens"
    return f"{group}: {_name(best)}, a step of {format_step_seconds(best.step_seconds)}{price}"


_Found = list[tuple[Candidate, MixedPlan]]


def _best(found: _Found) -> tuple[Candidate, MixedPlan]:
    least = min(mixed.step_seconds or math.inf for _, mixed in found)
    return next(one for one in found if (one[1].step_seconds or math.inf) <= least * _EQUAL_RATIO)


def _found(
    spec: Train, shape: ModelShape | None, hardware: Hardware, where: str | None
) -> tuple[_Found, dict[str, str]]:
    """What fits, the least split first, and why others do not. Raises PlanError."""
    own = own_mesh(spec, shape, hardware)
    num_readers = hardware.world_size if own is None else own.num_data_ranks
    if own is None and is_searched(spec) and shape is not None:
        num_readers = 1  # the planner may find axes whose workers share samples
    refuse(too_few_samples(global_batch(spec), num_readers), where=where)
    names: tuple[Strategy, ...] = tuple(ORDER) if spec.strategy == "auto" else (spec.strategy,)
    if spec.strategy == "auto" and own is not None:
        names = (cast(Strategy, strategy_of(own)),)
    found: _Found = []
    whys: dict[str, str] = {}
    for name in names:
        for laid_out in _layouts(spec, hardware, name):
            if laid_out is spec and any(one.strategy == name for one, _ in found):
                continue  # copies of one class each do
            tried = _tried(laid_out, shape, hardware, name)
            if isinstance(tried, str):
                whys[name] = tried
            else:
                found.append(tried)
    if is_searched(spec) and shape is not None:
        least = min((mixed.step_seconds or math.inf for _, mixed in found), default=math.inf)
        others: _Found = []
        for name, mesh in _other_axes(spec, shape, hardware):
            tried = _tried(_with_mesh(spec, mesh), shape, hardware, name)
            others += [] if isinstance(tried, str) else [tried]
            if len(others) == _MOST_FITTING:
                break
        # a mesh with more axes has to win by more than the model's own error
        found += [one for one in others if (one[1].step_seconds or 0.0) <= least / (1 + MODEL_ERROR)]
    return found, whys


def _tried(
    spec: Train, shape: ModelShape | None, hardware: Hardware, name: Strategy
) -> tuple[Candidate, MixedPlan] | str:
    """One strategy; or why it does not go."""
    ways = _ways(spec, shape, hardware, name)
    if isinstance(ways, str):
        return ways
    mixed = _mixed(spec, shape, hardware, ways)
    if isinstance(mixed, str):
        return mixed
    each = (way.best.activation_checkpointing for way in ways)
    most = max(each, key=tuple[str, ...](CHECKPOINTING).index)
    return ways[0].best._replace(activation_checkpointing=most), mixed


def _with_mesh(spec: Train, mesh: Mesh) -> Train:
    return spec.model_copy(update={"mesh": MeshSizes(**asdict(mesh))})


def _layouts(spec: Train, hardware: Hardware, strategy: Strategy) -> list[Train]:
    """Of a strategy that has copies of what it splits first those where each copy lies on machines of one
    class, since what is gathered stays within it; last all, for where none of these fits."""
    meshes = ORDER[strategy].meshes(hardware.num_nodes, hardware.devices_per_node)
    if spec.mesh is not None or isinstance(meshes, str):
        return [spec]
    common = math.gcd(*(one.num_nodes * one.devices_per_node for one in hardware.groups))
    fine = [one for one in meshes if 1 < one.dp_shard < hardware.world_size and common % one.dp_shard == 0]
    return [*(_with_mesh(spec, one) for one in fine), spec]


def _other_axes(spec: Train, shape: ModelShape, hardware: Hardware) -> Iterator[tuple[Strategy, Mesh]]:
    """Meshes that split more than the samples, each of whose data ranks lies within a class: the fastest
    first, as they are on machines that are all like the least."""
    least = min(_classes(hardware), key=lambda one: one.memory_bytes)
    world, batch = least.world_size, global_batch(spec)
    # that comes out even for as many numbers of data ranks as can be
    batch = batch // world * world or max(n for n in range(1, batch + 1) if world % n == 0)
    changes = {"communication": "resident", "precision": precision_on(spec, hardware)[0]}
    alike = _of_batch(spec.model_copy(update=changes), batch)
    try:
        candidates = enumerate_candidates(alike, shape, least, every=False)
    except PlanError:
        return
    seen: set[tuple[Strategy, Mesh]] = set()
    for one in sorted(candidates, key=lambda one: one.step_seconds):
        if one.mesh is None or one.mesh.world_size == one.mesh.num_data_ranks > one.mesh.ep:
            continue
        key = one.strategy, one.mesh
        nodes, each = [group.num_nodes for group in hardware.groups], hardware.groups[0].devices_per_node
        apart = any(across_classes(asdict(one.mesh), nodes, each))
        apart |= one.mesh.ep > 1 and packing_of(spec) is not None  # as `spec/groups.py` refuses them
        if key not in seen and not apart and len(seen) < _MOST_TRIED:
            seen.add(key)
            yield key


def _ways(spec: Train, shape: ModelShape | None, hardware: Hardware, strategy: str) -> list[_Way] | str:
    """Of the least machine and then of each group, by one strategy, with the same mesh and precision on
    all and equal shares; or why it does not go."""
    changes: dict[str, Any] = {"strategy": strategy, "communication": "resident", "stragglers": "leave"}
    may_differ = _may_differ(spec)
    changes["precision"] = precision_on(spec, hardware)[0]
    spec = spec.model_copy(update=changes)
    num_readers = num_data_ranks(spec, hardware)
    if (few := too_few_samples(global_batch(spec), num_readers)) is not None:
        return f"{strategy}: {few.message}"
    even = _even_share(spec, num_readers)
    spec = _of_batch(spec, even * num_readers)
    least = min(_classes(hardware), key=lambda one: one.memory_bytes)
    ways: list[_Way] = []
    for one in (least, *_classes(hardware)):
        try:
            best, _ = pick(spec, shape, one)
        except PlanError as error:
            return error.message if error.message.startswith(strategy) else f"{strategy}: {error.message}"
        if not best.fits or best.mesh is None:
            return f"{strategy} {best.reason} on {one.name}"
        if not ways:  # which decides for the others
            same: dict[str, Any] = {"mesh": MeshSizes(**asdict(best.mesh))}
            if not may_differ:
                same |= {"data": spec.data.model_copy(update={"micro_batch": best.micro_batch})}
            if best.mesh.cp > 1:
                same |= {"context": Context(exchange=best.context_exchange)}
            spec = spec.model_copy(update=same)
        seconds = None
        if best.seconds is not None:  # what does not grow with the share is not counted
            seconds = (_again(spec, shape, one, best, 2 * even).step_seconds - best.step_seconds) / even
        ways.append(_Way(one, spec, best, even, seconds))
    return ways


def _again(
    spec: Train, shape: ModelShape | None, hardware: Hardware, best: Candidate, sequences: int
) -> Candidate:
    """The same, with so many in whole micro-batches on each data rank."""
    assert best.mesh is not None
    assert best.micro_batch is not None
    whole = -(-sequences // best.micro_batch) * best.micro_batch * best.mesh.num_data_ranks
    data = spec.data.model_copy(update={"micro_batch": best.micro_batch})
    fixed = {"data": data, "activation_checkpointing": best.activation_checkpointing}
    return pick(_of_batch(spec.model_copy(update=fixed), whole), shape, hardware)[0]


def _of_batch(spec: Train, batch: int) -> Train:
    data: dict[str, Any] = {"batch_size": batch}
    if hasattr(spec.data, "batch_tokens"):
        data["batch_tokens"] = None
    return spec.model_copy(update={"data": spec.data.model_copy(update=data)})


def _even_share(spec: Train, num_readers: int) -> int:
    """Samples of a data rank, where all have equally many whole micro-batches: what is priced."""
    size = spec.data.micro_batch if isinstance(spec.data.micro_batch, int) else 1
    return max(1, global_batch(spec) // (num_readers * size)) * size


def _classes(hardware: Hardware) -> list[Hardware]:
    """Each as if all nodes were of it, but for the network: its workers send among all."""
    slowest = hardware.speed.network_bytes_per_second
    return [
        one._replace(
            num_nodes=hardware.num_nodes,
            devices_per_node=hardware.devices_per_node,
            speed=one.speed._replace(network_bytes_per_second=slowest),
        )
        for one in hardware.groups
    ]


def _may_differ(spec: Train) -> bool:
    """Whether each group may have micro-batches of a size of its own: not where whole
    ones move, nor where samples are packed into rows that are dealt among all."""
    return not _moves_whole(spec) and packing_of(spec) is None and spec.data.micro_batch == "auto"


def _mixed(
    spec: Train, shape: ModelShape | None, hardware: Hardware, ways: Sequence[_Way]
) -> MixedPlan | str:
    """What a data rank computes grows with its share; or why its microbatches do not go."""
    least, each = ways[0].best, ways[1:]
    batch, groups, even, mesh = global_batch(spec), hardware.groups, ways[0].even, cast(Mesh, least.mesh)
    num_readers = [one.num_nodes * one.devices_per_node // mesh.ranks_per_data_rank for one in groups]
    whole = sum(num_readers)
    samples = _sample_seconds(hardware, each)
    rates = [1 / one for one in samples] if samples else _peak_rates(groups, least.precision)
    mean = sum(rate * number for rate, number in zip(rates, num_readers, strict=True)) / whole
    speeds = [float(f"{rate / mean:.{_DIGITS}g}") for rate in rates]
    sizes, shares = _shares(spec, num_readers, speeds, [way.best.micro_batch or 1 for way in each])
    sample_tokens = least.num_tokens / (even * whole)  # on the mean
    for size, own in zip(sizes, shares, strict=True):
        whys = (why_not(schedule_of(spec), mesh.pp, -(-count // size)) for count in own)
        if mesh.pp > 1 and (why := next(filter(None, whys), None)):
            return f"{least.strategy}: {why}"

    def takes(index: int, sequences: int) -> float:
        return each[index].takes(sequences, samples[index])

    step = max(takes(index, max(own)) for index, own in enumerate(shares)) if samples else None
    plans = []
    for index, (one, way, own) in enumerate(zip(groups, each, shares, strict=True)):
        best = way.best
        if mesh.pp > 1 and best.memory is not None:  # a pipeline may hold all microbatches of a share
            best = _again(way.spec, shape, way.hardware, best, max(own))
            if not best.fits:
                return f"{least.strategy} {best.reason} on {one.name}"
        price = one.price_usd_per_device_hour
        usd = None if price is None else price * one.num_nodes * one.devices_per_node
        tokens = sum(own) * sample_tokens
        plans.append(
            GroupPlan(
                name=one.name,
                num_nodes=one.num_nodes,
                num_workers=one.num_nodes * one.devices_per_node,
                speed=speeds[index],
                sequences=max(own),
                share_ratio=sum(own) / batch,
                micro_batch=min(sizes[index], max(own)),
                activation_checkpointing=cast(Any, best.activation_checkpointing),
                memory_bytes=best.memory.total if best.memory is not None else None,
                step_seconds=takes(index, max(own)) if samples else None,
                usd_per_hour=usd,
                usd_per_million_tokens=None
                if usd is None or step is None
                else usd * step / 3600 / tokens * 1e6,
            )
        )
    equal = max(takes(index, -(-batch // whole)) for index in range(len(groups))) if samples else None
    rate = None if step is None else batch * sample_tokens / step
    return MixedPlan(least.strategy, mesh, least.communication, tuple(plans), step, equal, rate)


def _shares(
    spec: Train, num_readers: Sequence[int], speeds: Sequence[float], sizes: list[int]
) -> tuple[list[int], list[list[int]]]:
    """Of each group the size of its micro-batches, and the samples of each of its data ranks. `sizes`: what
    each group has memory for."""
    batch, whole, unit = global_batch(spec), sum(num_readers), 1
    if not _may_differ(spec):
        sizes = [min(sizes)] * len(sizes)
    if _moves_whole(spec):
        unit = _unit(batch, whole, min(sizes))
        sizes = [unit] * len(sizes)
    of_each = [speed for speed, number in zip(speeds, num_readers, strict=True) for _ in range(number)]
    counts = [unit * (stop - start) for start, stop in pairwise(bounds(batch // unit, whole, of_each))]
    ends = accumulate(num_readers, initial=0)
    return sizes, [counts[first:end] for first, end in pairwise(ends)]


def _sample_seconds(hardware: Hardware, each: Sequence[_Way]) -> list[float]:
    """That a data rank of each group takes for a sample more; none where nobody knows the model's size. Where
    the file says how fast the groups are beside each other, that counts, and the first one's time."""
    seconds = [way.sample_seconds for way in each if way.sample_seconds is not None]
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
        predicted = predicted._replace(memory_bytes=fullest, step_seconds=seconds)
    return plan._replace(
        groups=groups,
        micro_batch=min(one.micro_batch for one in groups),
        accumulation=max(-(-one.sequences // one.micro_batch) for one in groups),
        predicted=predicted,
        smaller_micro_batches=(),
    )
