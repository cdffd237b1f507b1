"""What few trainings say of their optimizer."""

from typing import Annotated

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class OwnSchedule(SpecModel):
    """A schedule of yours."""

    entry: f.EntryPath = Field(
        description="`package.module:function`, called with the step, from 1, the number of steps, and "
        "`args`; it returns the factor of `lr`."
    )
    args: dict[f.Text, f.Json] = Field({}, description="Keyword arguments of the function.")


class ParameterGroup(SpecModel):
    """Parameters that are updated otherwise, by their names. Each belongs to the first group that it
    matches."""

    match: f.Text = Field(
        description="Pattern of names, like `*.bias` or `layers.0.*`, with `*`, `?` and `[...]` of shells."
    )
    lr_scale: f.NotNegative = Field(1.0, description="Times the learning rate; 0 leaves them as they are.")
    weight_decay: f.NotNegative | None = Field(
        None, description="Instead of the optimizer's, of matrices and vectors. Default: as all others."
    )


class Ema(SpecModel):
    """An average of the weights (exponential moving average), kept beside them and saved with them."""

    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.999, description="Share of the average that stays with each update of it."
    )
    every: f.Count = Field(1, description="Steps between two updates of it.")
