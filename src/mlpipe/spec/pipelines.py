"""Rules of the key `pipeline` of a training."""

from __future__ import annotations

from collections.abc import Iterator

from mlpipe._core import pipelines
from mlpipe._core.feasibility import Infeasible
from mlpipe.spec import mesh as mesh_rules
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, problem_of_key


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
