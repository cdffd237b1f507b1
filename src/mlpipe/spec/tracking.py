"""The `track` of a training: each tracker by its name, or a mapping of its name to settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, items_of

NAMES = ("tensorboard", "mlflow", "wandb")


class Mlflow(SpecModel):
    """Credentials come from the environment: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD."""

    uri: f.HttpUrl | None = Field(None, description="Of the server. Default: MLFLOW_TRACKING_URI.")
    experiment: f.Text | None = Field(None, description="Default: the pipeline's name.")


class Wandb(SpecModel):
    """The key comes from the environment: WANDB_API_KEY. Needs the package: `pip install 'mlpipe[wandb]'`."""

    project: f.Text | None = Field(None, description="Default: the pipeline's name.")
    entity: f.Text | None = Field(None, description="User or team. Default: the key's.")
    mode: Literal["online", "offline"] = Field(
        "online", description="`offline` writes files for `wandb sync`."
    )


class MlflowTracker(SpecModel):
    """MLflow, with settings."""

    mlflow: Mlflow = Field(description="Where its server is, and under what name runs stand there.")


class WandbTracker(SpecModel):
    """Weights & Biases, with settings."""

    wandb: Wandb = Field(description="Whose project it is.")


if TYPE_CHECKING:
    Tracker = str | MlflowTracker | WandbTracker
else:
    Tracker = f.name_or_settings(
        "a tracker",
        NAMES,
        {"mlflow": MlflowTracker, "wandb": WandbTracker},
        alone="[{}]",
        several="write each as an item of its own: [tensorboard, mlflow]",
    )


def settings_of(tracker: Tracker) -> tuple[str, dict[str, Any]]:
    """Its name, and what was said of it."""
    if isinstance(tracker, MlflowTracker):
        return "mlflow", tracker.mlflow.model_dump(mode="json", exclude_none=True)
    if isinstance(tracker, WandbTracker):
        return "wandb", tracker.wandb.model_dump(mode="json", exclude_none=True)
    return tracker, {}


def problems(train: Node) -> Iterator[Problem]:
    """One that stands there twice."""
    seen: dict[str, Node] = {}
    for item in items_of(train, "track"):
        names = [item.value] if isinstance(item.value, str) else item.value
        name = next(iter(names), None) if isinstance(names, list | dict) else None
        if not isinstance(name, str) or name not in NAMES:
            continue
        if name in seen:
            place = seen[name].place
            yield Problem.at(item.place, f"a second {name!r}, first at {place}", "keep one of them")
        seen.setdefault(name, item)
