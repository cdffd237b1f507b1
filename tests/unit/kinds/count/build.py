"""Plans it."""

from mlpipe.kinds.count.plan import CountPlan

from mlpipe.plan.launch import Given, single_process
from mlpipe.plan.plan import Launch
from mlpipe.plan.references import stage_referred_to
from mlpipe.spec.model import Pipeline, Stage


def plan(pipeline: Pipeline, stage: Stage, given: Given) -> tuple[CountPlan, Launch]:
    made_by = stage_referred_to(pipeline, stage, "command")
    work = CountPlan(made_by.name, stage.work.file, stage.work.at_least)
    return work, single_process(stage, given)
