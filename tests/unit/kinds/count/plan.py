"""What plan.json says of it."""

from dataclasses import dataclass
from typing import ClassVar

from mlpipe.plan.plan import StageWork


@dataclass(frozen=True)
class CountPlan(StageWork):
    kind: ClassVar[str] = "count"

    stage: str
    file: str
    at_least: int

    @property
    def summary(self) -> str:
        return f"words of {self.file}, at least {self.at_least}"


PLAN = CountPlan
