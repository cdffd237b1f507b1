"""The plan of a stage before anything has run. Apart from `submit`, so that a command which only looks ahead
imports no store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlpipe.plan.build import build_plan, stage_hardware
from mlpipe.plan.plan import Plan
from mlpipe.spec.model import Pipeline

if TYPE_CHECKING:
    from mlpipe.plan.shapes.traced import Traced


def plan_ahead(
    pipeline: Pipeline,
    stage_name: str,
    store_url: str,
    run_id: str,
    *,
    cluster: bool = False,
    traced: Traced | None = None,
) -> Plan:
    """The plan as far as it is known before anything has run, for this machine or for a cluster's. Raises
    PlanError."""
    return build_plan(
        pipeline,
        stage_name,
        run_id=run_id,
        attempt=1,
        store_url=store_url,
        inputs={},
        hardware=stage_hardware(pipeline, stage_name, cluster=cluster),
        resume=True,
        traced=traced,
    )
