"""What the page says of a stage that runs a command."""

from __future__ import annotations

import shlex

from mlpipe.kinds.command.plan import CommandPlan
from mlpipe.observe.blocks import Card, Code, Facts, Section
from mlpipe.observe.runview import StageView


def section(stage: StageView) -> Section:
    """What it ran, and how it ended."""
    plan = stage.part(CommandPlan)
    argv = plan.argv if plan is not None else ()
    return Section([Card([Facts({"argv": Code(shlex.join(argv)), "exit code": stage.state.exit_code})])])
