"""Mixtures of data, for the trainings that have one."""

from typing import Annotated

from pydantic import Field, Tag

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.own_data import Own, Parquet, Read, Tars


class _Weighted(SpecModel):
    weight: f.Weight = Field(1.0, description=f.WEIGHT)


class TokenSource(_Weighted, SpecModel):
    """A folder of token files, in a mixture."""

    tokens: f.Text = Field(description=f.TOKENS)
    cache: f.Size | None = Field(None, description=f.CACHE)


class OwnSource(_Weighted, Own):
    """A data set of your own, in a mixture."""


class ParquetSource(_Weighted, Parquet):
    """Rows of Parquet files, in a mixture."""


class TarsSource(_Weighted, Tars):
    """Tars of samples, in a mixture."""


AnySource = Annotated[
    Annotated[TokenSource, Tag("TokenSource")]
    | Annotated[OwnSource, Tag("OwnSource")]
    | Annotated[ParquetSource, Tag("ParquetSource")]
    | Annotated[TarsSource, Tag("TarsSource")],
    f.by_key(entry=OwnSource, parquet=ParquetSource, tars=TarsSource, tokens=TokenSource),
]


class MixData(Read):
    """Several sources, of which each gives its share of the samples. All samples are alike in keys and
    shapes; those of tokens have `inputs` and `targets`."""

    mix: tuple[AnySource, ...] = Field(
        strict=False,
        min_length=1,
        description="The sources: `tokens`, `parquet`, `tars` or an `entry` each, with a `weight`.",
    )
