"""What the page says of a stage that gives a checkpoint the name of a model."""

from __future__ import annotations

from mlpipe.kinds.promote.plan import PromotePlan
from mlpipe.observe.blocks import Card, Cell, Facts, Link, Section
from mlpipe.observe.runview import StageView


def section(stage: StageView) -> Section:
    """Which model and alias."""
    plan = stage.part(PromotePlan)
    if plan is None:
        return Section([])
    pairs: dict[str, Cell] = {"model": plan.model_name, "alias": plan.alias, "from": plan.train_stage}
    if page := stage.outcome.get("mlflow"):
        pairs["mlflow"] = Link(str(page))
    return Section([Card([Facts({**pairs, "outcome": stage.outcome.get("message")})])])
