"""What will run and why, in Python: the same as `mlpipe plan`. Needs no torch, store or network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlpipe.plan.ahead import StagePlan, named, plan_stage
from mlpipe.store.open import default_url, full_url

if TYPE_CHECKING:
    from mlpipe.api.pipeline import LoadedPipeline


def plan(
    pipeline: LoadedPipeline, *, stage: str | None = None, store: str | None = None
) -> dict[str, StagePlan]:
    """Of every stage, or of `stage` alone, by name in the order of the file. Raises PlanError."""
    url = full_url(default_url(store, pipeline.spec.store))
    names = named(pipeline.spec, stage, where=pipeline.path)
    return {name: plan_stage(pipeline.spec, name, url) for name in names}
