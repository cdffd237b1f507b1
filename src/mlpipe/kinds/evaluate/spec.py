"""The keys of a stage that evaluates."""

from __future__ import annotations

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.part import Reference, SpecPart


class Evaluate(SpecModel):
    """Validation loss of the trained model, and a gate that can fail the run."""

    train: f.Name | None = Field(None, description="Stage to evaluate. Default: the one in `needs`.")
    max_tokens: f.Count = Field(131_072, description="Held-out tokens to read at most.")
    gate: f.GateText | None = Field(None, description="Like `val_bits_per_byte < 2.6`.")
    prompt: str | None = Field(None, description="Start of the generated sample.")
    generate_tokens: f.CountOrZero = Field(64, description="Length of the generated sample.")


PART = SpecPart(Evaluate, "Measure a model.", references=(Reference("train", lends=True),))
