"""Metrics of the user's own, for the files that have some."""

from pydantic import Field

from mlpipe._core.gate import default_name
from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class OwnMetric(SpecModel):
    """A metric of yours, or of torchmetrics or torcheval."""

    entry: f.EntryPath = Field(
        description="`package.module:name` of a class or function that makes an object with "
        "`update(outputs, batch)` and `compute()`."
    )
    args: dict[f.Text, f.Json] = Field({}, description="Keyword arguments.")
    name: f.MetricName | None = Field(
        None, description="What its value is called. Default: the entry's name, `TopFive` as `top_five`."
    )

    @property
    def label(self) -> str:
        """What its value is called."""
        return self.name or default_name(self.entry)
