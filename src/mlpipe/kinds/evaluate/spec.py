"""The keys of a stage that evaluates."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec import validation
from mlpipe.spec.base import SpecModel
from mlpipe.spec.part import Reference, SpecPart
from mlpipe.spec.tree import Node

if TYPE_CHECKING:
    from mlpipe.spec.smoke import Smoke


class Evaluate(SpecModel):
    """Validation loss and other metrics of the trained model, and a gate that can fail the run."""

    train: f.Name | None = Field(None, description="Stage to evaluate. Default: the one in `needs`.")
    checkpoint: Literal["latest", "best"] | None = Field(
        None, description="`best`: that of the training's `validate.best`. Default: `latest`."
    )
    max_tokens: f.Count = Field(131_072, description="Held-out tokens to read at most.")
    weights: Literal["last", "ema"] | None = Field(
        None,
        description="`ema`: the average that the training keeps. Default: `last`, those of the last step.",
    )
    metrics: validation.Metrics | None = Field(
        None, description="What to measure besides loss, perplexity and bits per byte; as of `validate`."
    )
    gate: f.GateText | None = Field(
        None, description="Like `val_bits_per_byte < 2.6`, or on any of `metrics`: `accuracy > 0.9`."
    )
    prompt: str | None = Field(None, description="Start of the generated sample.")
    generate_tokens: f.CountOrZero = Field(64, description="Length of the generated sample.")


def _smoke(work: Evaluate, smoke: "Smoke", num_workers: int) -> dict[str, Any]:
    """No gate: what a few steps have learnt passes none."""
    if not smoke.tiny:
        return {}
    few = {"max_tokens": min(work.max_tokens, 256), "generate_tokens": min(work.generate_tokens, 8)}
    return few if work.gate is None else {**few, "gate": None}


def _texts(evaluate: Node) -> Iterator[Node]:
    for path, leaf in evaluate.walk():
        if path[:1] == ("metrics",) and path[2:3] == ("args",):
            yield leaf


PART = SpecPart(
    Evaluate,
    "Measure a model.",
    references=(Reference("train", lends=True),),
    problems=validation.gate_problems,
    texts=_texts,
    smoke=_smoke,
)
