"""What plan.json says of a program."""

import shlex
from typing import NamedTuple

from mlpipe.plan.work import StageWork


class _Told(NamedTuple):
    argv: tuple[str, ...]


class CommandPlan(_Told, StageWork):
    """A program with its arguments."""

    __slots__ = ()  # a name that it has not is refused

    kind = "command"

    @property
    def summary(self) -> str:
        return shlex.join(self.argv)


PLAN = CommandPlan
