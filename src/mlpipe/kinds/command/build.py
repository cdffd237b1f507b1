"""Plans a program."""

from __future__ import annotations

from mlpipe.kinds.command.plan import CommandPlan
from mlpipe.plan.launch import Given, single_process
from mlpipe.plan.plan import Launch
from mlpipe.spec.model import Pipeline, Stage
from mlpipe.spec.placeholders import resolve


def plan(pipeline: Pipeline, stage: Stage, given: Given) -> tuple[CommandPlan, Launch]:
    """The program with what its placeholders stand for, as one process on each node."""
    # whoever runs it resolves once more, with {{output}}
    argv = tuple(resolve(word, given.known, partial=True) for word in stage.work)
    nodes = stage.resources.gang_nodes if stage.resources is not None else 1
    return CommandPlan(argv), single_process(stage, given)._replace(num_nodes=nodes)
