"""Plans for a cluster, of the shipped pipelines and of others, as the driver makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.plan import Plan
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
IMAGE = "registry.example.com/team/mlpipe@sha256:" + "0" * 64
RUN_ID = "demo-20260101-000000-0000"
# On two pods and a store that pods can reach.
QUICKSTART = (
    f"image={IMAGE}",
    "store=s3://ml-runs/quickstart",
    "train.resources.nodes=2",
    "train.resources.workers_per_node=1",
    "kubernetes.store.endpoint=http://minio.storage:9000",
)


def pipeline_of(name: str, *overrides: str) -> Pipeline:
    """A shipped pipeline."""
    text = (PIPELINES / f"{name}.yaml").read_text()
    return load_pipeline_text(text, f"{name}.yaml", overrides=overrides)


def plan_of(pipeline: Pipeline, stage: str, *, run_id: str = RUN_ID, attempt: int = 1) -> Plan:
    plan = build_plan(
        pipeline,
        stage,
        Start(run_id, attempt, pipeline.store, resume=True),
        stage_hardware(pipeline, stage, cluster=True),
    )
    return replace(plan, code_digest="0" * 64)
