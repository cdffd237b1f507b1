"""Its section of the report."""

from mlpipe.observe.blocks import Card, Facts, Section
from mlpipe.observe.runview import StageView


def section(stage: StageView) -> Section:
    return Section([Card([Facts({"words": stage.outcome.get("words")})])])
