"""What plan.json says of a program."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import ClassVar

from mlpipe.plan.work import StageWork


@dataclass(frozen=True)
class CommandPlan(StageWork):
    """A program with its arguments."""

    kind: ClassVar[str] = "command"

    argv: tuple[str, ...]

    @property
    def summary(self) -> str:
        return shlex.join(self.argv)


PLAN = CommandPlan
