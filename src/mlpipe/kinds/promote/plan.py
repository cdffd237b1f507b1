"""What plan.json says of a promotion."""

from typing import NamedTuple

from mlpipe.plan.work import StageWork, TrackerPlan


class _Told(NamedTuple):
    train_stage: str
    evaluate_stage: str | None
    model_name: str
    alias: str | None
    dry_run: bool = False  # registers nothing
    track: tuple[TrackerPlan, ...] = ()  # of the training: a tracker with a registry gets the version, too


class PromotePlan(_Told, StageWork):
    """Which checkpoint becomes a version of which model."""

    __slots__ = ()  # a name that it has not is refused

    kind = "promote"

    @property
    def summary(self) -> str:
        alias = f", alias {self.alias}" if self.alias else ""
        dry = ", dry run" if self.dry_run else ""
        return f"{self.train_stage}'s checkpoint as model {self.model_name}{alias}{dry}"


PLAN = PromotePlan
