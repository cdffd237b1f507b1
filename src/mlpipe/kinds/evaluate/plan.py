"""What plan.json says of an evaluation."""

from typing import Literal, NamedTuple

from mlpipe.plan.data import DataPlan
from mlpipe.plan.validation import MetricPlan
from mlpipe.plan.work import StageWork, TrackerPlan, TrainPlan


class _Told(NamedTuple):
    train_stage: str
    train: TrainPlan  # of the training stage: model, precision, strategy
    data: DataPlan  # the held-out split
    max_tokens: int
    gate: str | None
    prompt: str | None
    generate_tokens: int
    weights: Literal["ema"] | None = None  # None: those of the last step
    checkpoint: Literal["latest", "best"] = "latest"
    metrics: tuple[MetricPlan, ...] = ()
    track: tuple[TrackerPlan, ...] = ()  # those of the training


class EvaluatePlan(_Told, StageWork):
    """Validation loss of a checkpoint of `train_stage`, and a gate over the metrics `val_loss`,
    `val_perplexity`, `val_bits_per_byte` and those of `metrics`."""

    __slots__ = ()  # a name that it has not is refused

    kind = "evaluate"

    @property
    def summary(self) -> str:
        gate = f"gate {self.gate}" if self.gate else "no gate"
        return f"{self.train_stage}'s {self.checkpoint} checkpoint on held-out text, {gate}"

    @property
    def training(self) -> TrainPlan:
        return self.train


PLAN = EvaluatePlan
