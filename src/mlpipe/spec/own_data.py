"""Data sets of the user's own and files that are read as they are, for the trainings that have them; in a
mixture: `spec/mixture.py`."""

from typing import Literal, cast

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class Read(SpecModel):
    """How samples of one's own are made a batch, and by whom."""

    collate: f.EntryPath | None = Field(
        None,
        description="`package.module:function` of yours that makes a batch, a dict of tensors, of a list of "
        "samples, which then may be anything. Default: they are stacked.",
    )
    workers: f.Workers = Field(
        0,
        description="Processes of each worker of the training that read samples ahead, beside it. `auto`: "
        "none at first, and more while the training waits for data.",
    )
    batch_size: f.Count = Field(description="Samples in a step, over all workers.")
    micro_batch: f.CountOrAuto = Field(
        "auto", description="Samples in one forward pass of one worker; `auto`: the fastest that fits."
    )


class Own(SpecModel):
    entry: f.EntryPath = Field(
        description="`package.module:function`, called with `args` and `split` "
        "(`train` or `validation`); the result has `len()` and `[i] -> dict of tensors`, or can be iterated "
        "over."
    )
    args: dict[f.Text, f.Json] = Field({}, description="Keyword arguments of the function.")


class _Splits(SpecModel):
    splits: f.FewCount = Field(
        1,
        description="Of a set that can only be iterated over: parts into which it is cut, each read by one "
        "worker of the training; `batch_size` is a multiple of it. 1: each reads all and keeps its share.",
    )


class OwnData(Read, _Splits, Own):
    """A function of yours that returns a data set, map-style or one to iterate over."""

    packing: Literal["off", "best_fit", "balanced"] | None = Field(
        None,
        description="Of a map-style set with `length(i)` or `lengths`, whose samples differ in length: as of "
        "conversations. Left out: all samples are alike.",
    )


class _Files(SpecModel):
    validation: f.Text | None = Field(
        None, description="The held-out files, in the same way; without them nothing is validated with."
    )
    columns: dict[f.Text, f.Text] | None = Field(
        None,
        description="What of a row is in a sample: by the sample's key the column, of tars the extension. "
        "Default: all, as they are called.",
    )
    tokenizer: f.Text | None = Field(
        None,
        description="For text: a `tokenizer.json` or its folder, usually `{{stages.NAME.output}}` of "
        "`mlpipe-corpus`. Text is cut or padded to `seq_len` tokens.",
    )
    cache: f.Size | None = Field(None, description=f.CACHE)

    @property
    def format(self) -> Literal["parquet", "tars"]:
        return "parquet" if "parquet" in type(self).model_fields else "tars"

    @property
    def path(self) -> str:
        """As written."""
        return cast(str, getattr(self, self.format))


class Parquet(_Files):
    parquet: f.Text = Field(
        description="A file, a folder, or a pattern like `data/train-*.parquet`; or in a bucket, `s3://...`."
    )


class Tars(_Files):
    tars: f.Text = Field(
        description="A tar of samples, a folder, or a pattern like `data/train-*.tar`; or in a bucket, `s3://...`."
    )


class ParquetData(Read, Parquet):
    """Rows of Parquet files."""


class TarsData(Read, Tars):
    """Tars as WebDataset has them: files of one name and several extensions are a sample."""
