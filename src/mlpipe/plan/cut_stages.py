"""What each rank of a pipeline has of a user's own model that was traced, and whether another cut would be
more even. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from mlpipe._core.pipelines import stages_per_rank
from mlpipe._core.units import format_bytes
from mlpipe.kinds.train.spec import Train
from mlpipe.plan.candidates import pricer_of, schedule_of
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.shapes.traced import Traced
from mlpipe.plan.stages import even_cut


@dataclass(frozen=True)
class RankShare:
    """`stages`: first and last child of each. `flops_ratio`: of the model's."""

    rank: int
    stages: tuple[tuple[str, str], ...]
    num_parameters: int
    flops_ratio: float
    memory_bytes: int


@dataclass(frozen=True)
class Cut:
    """`longest_ratio`: of the model's FLOPs, those of the longest stage; `even`: a cut whose longest stage
    has fewer, `even_ratio` of them; None: there is none."""

    ranks: tuple[RankShare, ...]
    longest_ratio: float
    even: tuple[str, ...] | None
    even_ratio: float


def cut_of(spec: Train, shape: Traced, hardware: Hardware, chosen: Candidate) -> Cut | None:
    """None: it is not cut, or nobody knows what its ranks take."""
    if chosen.memory is None or chosen.mesh is None or not shape.cut:
        return None
    names, flops = [one.name for one in shape.children], [one.flops for one in shape.children]
    num_ranks, whole = chosen.mesh.pp, sum(flops) or 1.0
    begins = [0, *map(names.index, shape.cut)]
    own, even = _stages(flops, begins), even_cut(flops, num_ranks * stages_per_rank(schedule_of(spec)))
    best = _stages(flops, [0, *even])
    needs = pricer_of(spec, shape, hardware).memory_by_rank(chosen)
    ends = [*begins[1:], len(names)]
    ranks = tuple(
        RankShare(
            rank,
            tuple((names[begins[s]], names[ends[s] - 1]) for s in range(rank, len(begins), num_ranks)),
            shape.parameters.by_rank[rank].total,
            sum(own[rank::num_ranks]) / whole,
            needs[rank].total,
        )
        for rank in range(num_ranks)
    )
    more_even = tuple(names[begin] for begin in even) if max(best) < 0.98 * max(own) else None
    return Cut(ranks, max(own) / whole, more_even, max(best) / whole)


def _stages(flops: list[float], begins: list[int]) -> list[float]:
    return [sum(flops[begin:end]) for begin, end in zip(begins, [*begins[1:], len(flops)], strict=True)]


def words_of(cut: Cut) -> list[str]:
    """One line a rank, and the better cut."""
    lines = []
    for one in cut.ranks:
        stages = " and ".join(first if first == last else f"{first} to {last}" for first, last in one.stages)
        lines.append(
            f"  pp rank {one.rank}: {stages}; {one.num_parameters:,} parameters, {one.flops_ratio:.0%} of "
            f"the FLOPs, {format_bytes(one.memory_bytes)}"
        )
    if cut.even is not None:
        lines.append(
            f"  the longest stage has {cut.longest_ratio:.0%} of the FLOPs; with cut: [{', '.join(cut.even)}]"
            f" it would have {cut.even_ratio:.0%}"
        )
    return lines
