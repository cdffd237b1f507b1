"""The `validate` of a training, for those that have it; rules: `spec/validation.py`."""

from typing import Literal

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.validation import Metrics


class Best(SpecModel):
    """Which checkpoint is the best one; it is kept beside the latest."""

    metric: f.MetricName = Field(description="One of `metrics`; `NAME.KEY` of one that gives several values.")
    mode: Literal["min", "max"] | None = Field(
        None, description="Whether less or more is better; has to be said of a metric of yours."
    )


class Stop(SpecModel):
    """When to end before the last step: the metric of `best` does not get better any more."""

    patience: f.FewCount = Field(description="Validations in a row without a better value.")
    min_delta: f.NotNegative = Field(0.0, description="Better by no more than this does not count.")


class Validate(SpecModel):
    """Validation while training."""

    every: f.Steps = Field(
        description="Steps between two, like `200 steps`; the last step is validated, too."
    )
    max_tokens: f.Count = Field(
        131_072, description="Held-out tokens to read at most; samples, where they are no text."
    )
    metrics: Metrics = Field(("loss",), description="What to measure: names, and `entry` of your own.")
    best: Best | None = Field(None, description="Keep the best checkpoint beside the latest.")
    stop: Stop | None = Field(None, description="End early.")
    sample: str | None = Field(None, description="Start of a text to generate at each validation.")
    generate_tokens: f.Count = Field(64, description="Length of that text.")
