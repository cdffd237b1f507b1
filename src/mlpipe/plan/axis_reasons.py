"""Why each axis of the mesh that shares samples is used, or is not, in a sentence each. Meshes that cannot be
chosen are not all tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mlpipe._core.meshes import AXES, DATA_AXES, conflicts, unsupported_mix
from mlpipe._core.units import format_step_seconds
from mlpipe.kinds.train.spec import Train
from mlpipe.plan.candidates import is_searched, pricer_of, searched
from mlpipe.plan.choose import Candidate, is_tight
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.search import MODEL_ERROR, SearchResult
from mlpipe.plan.shapes.shape import ModelShape


def axis_reasons(
    spec: Train,
    shape: ModelShape | None,
    hardware: Hardware,
    candidates: Sequence[Candidate],
    chosen: Candidate,
) -> Iterator[str]:
    """`candidates`: all, `chosen` one of them."""
    sharing = [axis for axis in AXES if axis not in DATA_AXES]
    used = {axis: size for axis in sharing if (size := getattr(chosen.mesh, axis, 1)) > 1}
    if spec.mesh is not None:
        words = ", ".join(f"{axis} {size}" for axis, size in used.items()) or "no axis that shares samples"
        yield f"The file names the mesh: {words}."
        return
    if shape is None or not is_searched(spec):
        yield "Only data parallelism is considered, as the strategy or the model asks."
        return
    open_ = [c for c in candidates if c.asked and c.fits]
    search = searched(spec, pricer_of(spec, shape, hardware), [c for c in candidates if c.asked])
    for axis in sharing:
        if axis in used:
            yield _used(axis, used[axis], [c for c in open_ if getattr(c.mesh, axis) == 1], chosen)
        else:
            with_it = [c for c in open_ if getattr(c.mesh, axis) > 1]
            yield _never(axis, spec, shape) or _unused(axis, with_it, chosen, search)


def _used(axis: str, size: int, without: Sequence[Candidate], chosen: Candidate) -> str:
    least = min((candidate.step_seconds for candidate in without), default=math.inf)
    if math.isinf(least):
        return f"{axis} {size} is used: nothing that was tried without it fits."
    if least < chosen.step_seconds and not is_tight(chosen):
        roomy = [candidate for candidate in without if not is_tight(candidate)]
        if not roomy:
            return f"{axis} {size} is used: what was tried without it and fits leaves little memory free."
        least = min(candidate.step_seconds for candidate in roomy)
        words = " that leaves memory free"
    else:
        words = ""
    ratio = least / chosen.step_seconds
    return (
        f"{axis} {size} is used: the fastest step tried without it{words} takes {ratio:.2f} times the time."
    )


def _never(axis: str, spec: Train, shape: ModelShape) -> str | None:
    """Why no size of it goes with this model and these settings."""
    sizes = dict.fromkeys(AXES, 1) | {"dp_shard": 2, axis: 2}
    refused = [
        *conflicts(sizes, {"num_experts": shape.widths.get("num_experts", 0) and 2}, own_model=False),
        *unsupported_mix({axis: 2}, spec.model_dump(), shape.widths),
    ]
    return f"{axis} is not used: {refused[0][1].message}." if refused else None


def _unused(axis: str, with_it: Sequence[Candidate], chosen: Candidate, search: SearchResult) -> str:
    bound = search.bounds.get(axis)
    if bound is None:
        return f"{axis} is not used: no size worth a try splits model and batch evenly over the workers."
    if with_it:
        ratio = min(candidate.step_seconds for candidate in with_it) / chosen.step_seconds
        return f"{axis} is not used: the fastest step tried with it takes {ratio:.2f} times the time."
    least = format_step_seconds(bound)
    if bound > chosen.step_seconds:
        return f"{axis} is not used: no step with it is shorter than {least}."
    return (
        f"{axis} is not used: of the steps with it, which take {least} or more, none that fits is faster "
        f"by more than the {MODEL_ERROR:.0%} that this model errs."
    )
