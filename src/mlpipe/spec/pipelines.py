"""The key `pipeline` of a training, and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from mlpipe._core import pipelines
from mlpipe._core.feasibility import Infeasible
from mlpipe.spec import fields as f
from mlpipe.spec import mesh as mesh_rules
from mlpipe.spec.base import SpecModel
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, problem_of_key


class Pipelining(SpecModel):
    """How the stages of a pipeline work together, where the mesh has `pp`."""

    schedule: pipelines.Schedule = Field(
        pipelines.DEFAULT,
        description="`gpipe` (all forward passes, then all backward passes), `1f1b` (holds fewer "
        "microbatches), `interleaved` (two stages a worker, half as idle, twice the transfers) or "
        "`zero_bubble` (weights' gradients are computed when nothing else can be).",
    )
    cut: Literal["auto"] | Annotated[tuple[f.Text, ...], Field(strict=False)] = Field(
        "auto",
        description="Of a model of your own, the modules with which its stages begin, but for the first: "
        "names of children, like `[layers.4]`, between which its forward does nothing, or layers of a "
        "class of `transformers` that brings a plan, like `[model.layers.4]`. `auto`: such that the longest "
        "stage has as few FLOPs as can be.",
    )
    microbatches: f.CountOrAuto = Field(
        "auto", description="Of a step on each data rank: the same as `accumulation`."
    )


def problems(train: Node, num_workers: int) -> Iterator[Problem]:
    """Of a pipeline without stages, of numbers that do not fit, of what its schedule cannot do."""
    pipeline, sizes = get(train, "pipeline"), mesh_rules.sizes_of(train, num_workers)
    if isinstance(sizes, Infeasible):
        return
    if pipeline is not None and isinstance(pipeline.value, dict):
        passes, microbatches = get(train, "accumulation"), get(pipeline, "microbatches")
        left = get(train, "mesh") is None and not mesh_rules.is_searched(train)
        if left or (sizes is not None and sizes["pp"] == 1):
            yield problem_of_key(
                pipeline, "there is a pipeline, but no mesh with pp", "write mesh: {pp: 2}, or remove it"
            )
        if passes is not None and microbatches is not None and passes.value != microbatches.value:
            yield problem_of_key(
                microbatches,
                f"microbatches {microbatches.value} and accumulation {passes.value} are one number",
                "keep one of them",
            )
    if sizes is None:
        return
    schedule, microbatches = get(train, "pipeline", "schedule"), get(train, "pipeline", "microbatches")
    name = schedule.value if schedule is not None else pipelines.DEFAULT
    number = microbatches.value if microbatches is not None else None
    if name not in pipelines.SCHEDULES:
        return
    figures = mesh_rules.figures_of(train)
    whole = number if type(number) is int and number > 0 else None
    for key, conflict in pipelines.conflicts(name, whole, sizes, figures, train.plain()):
        node = get(train, "pipeline", key) or get(train, "mesh", "pp") or train
        yield Problem.at(node.place, conflict.message, conflict.remedy)
