"""Meshes that split more than the samples, for `strategy: auto`: tried where data parallelism alone does not
fit, or may be slower than they are by more than the model's own error.

Of each way to lay out the axes that share samples (a `Point`) two bounds hold for every layout of the data
axes around it: computing and these axes' own communication take at least so long, and activations with states
that are split over all ranks need at least so many bytes. Points are tried from the least time on; when the
next one's bound is above what is found, or where nothing is above the limit, all that is left is. Recomputing
more takes no less time: nobody looks how long before the same was tried with less. So pruning loses nothing.
Standard library only.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mlpipe._core.meshes import Strategy, unsupported_mix
from mlpipe.plan.choose import ROOM_WINDOW, Candidate, is_tight
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.pricing import Choices, Pricer
from mlpipe.plan.strategies import ORDER

# By how much predicted seconds of a step may be wrong (of benchmarks/planner's published runs from which
# nothing was learned seven of ten are within): a mesh with more axes has to win by more.
MODEL_ERROR = 0.12
_LEAST_CHUNK = 128  # tokens of a sequence that a rank of `cp` has in one piece
_MOST_CP = 32
_AXES = "pp", "cp", "tp", "ep"


class Point(NamedTuple):
    """A mesh with all data ranks along `dp_shard`, and the first of the choices beside it; those after that
    recompute more. `least_seconds`: no step under any layout of its data axes is shorter. `number`: of points
    with equal seconds the least comes first."""

    least_seconds: float
    number: int
    mesh: Mesh
    choices: Sequence[Choices]


@dataclass
class SearchResult:
    """`candidates`: priced. `bounds`: by axis the least seconds that any mesh with it could take, fitting or
    not; an axis that is missing splits nothing here. `num_points`, `num_priced`: what it cost."""

    candidates: list[Candidate] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)
    num_points: int = 0
    num_priced: int = 0


def sizes_of_axes(hardware: Hardware, figures: dict[str, int]) -> dict[str, list[int]]:
    """Of the axes that share samples, sizes to try: `tp` within a node, `pp` over as many stages as there are
    blocks at the most."""
    world, per_node = hardware.world_size, hardware.devices_per_node
    longest = max(1, figures.get("seq_len", 1) // (2 * _LEAST_CHUNK))
    most = {
        "tp": per_node,
        "cp": min(_MOST_CP, longest),
        "pp": min(world, figures.get("num_layers", 1)),
        "ep": min(world, figures.get("num_experts", 0) or 1),
    }
    return {
        axis: [n for n in range(1, limit + 1) if world % n == 0 and (axis != "tp" or per_node % n == 0)]
        for axis, limit in most.items()
    }


def model_meshes(
    hardware: Hardware, figures: dict[str, int], allows: Callable[[dict[str, int]], bool]
) -> Iterator[Mesh]:
    """All with an axis besides those of data parallelism, data ranks along `dp_shard`. `allows`: whether the
    trainer can do it."""
    sizes = sizes_of_axes(hardware, figures)
    for tp in sizes["tp"]:
        for cp in sizes["cp"]:
            for pp in sizes["pp"]:
                rest, uneven = divmod(hardware.world_size, tp * cp * pp)
                for ep in sizes["ep"]:
                    if uneven or rest % ep or tp * cp * pp * ep == 1:
                        continue
                    axes = {"pp": pp, "dp_replicate": 1, "dp_shard": rest, "cp": cp, "tp": tp, "ep": ep}
                    if allows(axes):
                        yield Mesh(**axes)


def layouts(mesh: Mesh, hardware: Hardware) -> Iterator[tuple[Strategy, Mesh]]:
    """Of the data axes around a point: those of the strategies on what the others leave of each node."""
    rest = mesh.dp_shard
    per_node = max(1, hardware.devices_per_node // (mesh.tp * mesh.cp))
    if rest % per_node:
        per_node = rest
    seen: set[tuple[Mesh, bool, bool]] = set()
    for strategy, settings in ORDER.items():
        meshes = settings.meshes(rest // per_node, per_node)
        for data in () if isinstance(meshes, str) else meshes:
            sizes = vars(mesh) | {"dp_replicate": data.dp_replicate, "dp_shard": data.dp_shard}
            if data.dp_shard % mesh.ep or next(unsupported_mix(sizes, {}, {}), None) is not None:
                continue
            whole = Mesh(**sizes)
            flags = settings.FLAGS if rest > 1 else {}  # of one data rank the strategies are one
            key = (whole, bool(flags), "reshard_after_forward" in flags)
            if key not in seen:
                seen.add(key)
                yield strategy, whole


def limit_of(data_parallel: Sequence[Candidate]) -> float:
    """Seconds that a step with other axes must not exceed to be worth them."""
    fitting = [candidate for candidate in data_parallel if candidate.fits and candidate.asked]
    fastest = min((c.step_seconds for c in fitting), default=math.inf)
    roomy = min((c.step_seconds for c in fitting if not is_tight(c)), default=math.inf)
    return min(roomy / (1 + MODEL_ERROR), fastest * ROOM_WINDOW)


def search(
    pricer: Pricer,
    points: Sequence[tuple[Mesh, Sequence[Choices]]],
    limit: float,
    *,
    prune: bool = True,
) -> SearchResult:
    """What may be chosen instead of candidates without other axes. `points`: meshes with choices that differ
    in how much they recompute, the least first. `limit`: as of `limit_of`. `prune`: off for the test that it
    loses nothing."""
    result = SearchResult()
    queue: list[Point] = []  # sorted
    around: dict[Mesh, list[tuple[Strategy, Mesh]]] = {}  # one mesh is that of many points

    def look(number: int, mesh: Mesh, choices: Sequence[Choices]) -> None:
        result.num_points += 1
        bounds = {axis: result.bounds.get(axis, math.inf) for axis in _AXES if getattr(mesh, axis) > 1}
        # of most, computing alone takes longer than whatever may be found or told
        too_long = max((limit * ROOM_WINDOW, *bounds.values())) if prune else math.inf
        seconds = pricer.least_seconds(mesh, choices[0], too_long)
        if seconds < too_long:
            result.bounds |= {axis: min(seconds, bound) for axis, bound in bounds.items()}
            insort(queue, Point(seconds, number, mesh, choices))

    for number, (mesh, choices) in enumerate(points):
        look(number, mesh, choices)
    best = math.inf
    # too slow to be worth it, but for what they leave free beside one that is not
    roomy: list[Candidate] = []
    while queue:
        point = queue.pop(0)
        if prune and point.least_seconds > (best * ROOM_WINDOW if result.candidates else limit):
            break
        here, *more = point.choices
        if more:
            look(point.number, point.mesh, more)
        if prune and pricer.least_bytes(point.mesh, here) > pricer.hardware.memory_bytes:
            continue
        if point.mesh not in around:
            around[point.mesh] = list(layouts(point.mesh, pricer.hardware))
        for strategy, mesh in around[point.mesh]:
            candidate = pricer.candidate(strategy, mesh, here, asked=True)
            result.num_priced += 1
            if candidate.fits and candidate.step_seconds <= limit:
                best = min(best, candidate.step_seconds)
                result.candidates.append(candidate)
            elif candidate.fits and not is_tight(candidate):
                roomy.append(candidate)
    if result.candidates:
        result.candidates += [one for one in roomy if one.step_seconds <= best * ROOM_WINDOW]
    return result
