"""The shape of a preset, whichever it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mlpipe._core.presets import PRESETS, LlamaConfig, MoeConfig, built_by
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.shapes.dense import Dense


def preset(name: str, changes: Mapping[str, Any]) -> Dense:
    """The preset of this name with other sizes. Shapes that make no model are refused by
    `spec/feasibility.py` and its callers."""
    return of(dataclasses.replace(PRESETS[name], **changes))


def of(config: LlamaConfig) -> Dense:
    """The shape of a model with these sizes."""
    if isinstance(config, MoeConfig):
        from mlpipe.plan.shapes.experts import Experts  # which most plans do without

        return Experts(config)
    return Dense(config)


def model_plan(shape: Dense, name: str, seq_len: int) -> ModelPlan:
    """What builds it."""
    return ModelPlan(Entry(shape.config.entry, shape.config.args()), name, seq_len, ())


def planned(model: ModelPlan) -> Dense | None:
    """The shape of a planned model; None: a user's own."""
    return None if model.preset is None else of(built_by(model.build.entry, model.build.args))
