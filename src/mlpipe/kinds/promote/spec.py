"""The keys of a stage that promotes."""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.part import Reference, SpecPart

if TYPE_CHECKING:
    from mlpipe.spec.smoke import Smoke


class Promote(SpecModel):
    """Copy the weights to the registry of models."""

    as_: f.Name = Field(alias="as", description="Name of the model.")
    alias: f.Name | None = Field(None, description="Points to this version from now on.")
    train: f.Name | None = Field(None, description="Stage to promote. Default: the one it needs.")
    evaluate: f.Name | None = Field(None, description="Its evaluation. Default: the one it needs.")
    dry_run: bool | None = Field(
        None, description="Look whether it could be registered, and register nothing. Default: false."
    )


def _smoke(work: Promote, smoke: "Smoke", num_workers: int) -> dict[str, Any]:
    """Whatever a smoke test changes of the training, nobody wants its model."""
    return {"dry_run": True}


PART = SpecPart(
    Promote,
    "Register a model.",
    references=(Reference("train"), Reference("evaluate", required=False)),
    smoke=_smoke,
)
