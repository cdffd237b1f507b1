"""The `track` of a training: each tracker by its name, or a mapping of its name to settings, as
`spec/trackers.py` has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mlpipe.spec import fields as f
from mlpipe.spec.base import OnNeedOf
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, items_of

NAMES = ("tensorboard", "mlflow", "wandb")


if TYPE_CHECKING:
    from mlpipe.spec.trackers import MlflowTracker, WandbTracker

    Tracker = str | MlflowTracker | WandbTracker
else:
    _trackers = OnNeedOf("trackers")
    MlflowTracker, WandbTracker = _trackers.MlflowTracker, _trackers.WandbTracker
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
