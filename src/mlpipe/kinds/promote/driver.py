"""Gives a checkpoint that passed its gate a version in the registry."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from mlpipe._core.errors import DamagedError, MlpipeError, SubmitError
from mlpipe._core.retry import AwayError
from mlpipe.kinds.promote.plan import PromotePlan
from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue, registry, runs
from mlpipe.store.base import Store
from mlpipe.store.catalogue import Checkpoint
from mlpipe.store.registry import Model

_log = logging.getLogger(__name__)


def run(store: Store, plan: Plan, raise_if_stopped: Callable[[], None]) -> dict[str, Any]:
    """The outcome of the stage in run.json. A driver that died may have made the version and not said so, in
    this attempt or one before: then the next one makes no other. Raises what `promote` raises."""
    promotion = plan.part(PromotePlan)
    assert promotion is not None
    if promotion.dry_run:
        step = _chosen(store, plan.run_id, promotion)[0].step
        return {"step": step, "message": "dry run: nothing was registered"}
    made = _made(store, plan, promotion)
    if made is None:
        version, checkpoint = promote(
            store, plan.run_id, promotion, attempt=plan.attempt_key, raise_if_stopped=raise_if_stopped
        )
        step = checkpoint.step
    else:
        version, step = made.version, made.step
        if promotion.alias is not None:
            registry.set_alias(store, promotion.model_name, promotion.alias, version)
    outcome = {"model": promotion.model_name, "version": version, "alias": promotion.alias, "step": step}
    return outcome | _told(store, plan, promotion, version)


def _made(store: Store, plan: Plan, promotion: PromotePlan) -> Model | None:
    """The version that this stage made of the same checkpoint."""
    name, created = promotion.model_name, runs.read_run(store, plan.run_id).created
    checkpoint = _chosen(store, plan.run_id, promotion)[0].key
    attempts = [f"{plan.stage_key}/attempt-{number}" for number in range(1, plan.attempt + 1)]
    lineage = {"attempt": attempts, "checkpoint": [checkpoint]}
    return registry.find_version(store, name, lineage, since=created)


def _told(store: Store, plan: Plan, promotion: PromotePlan, version: int) -> dict[str, Any]:
    """The version's page in each registry that heard of it; why not, where one did not: the model is promoted
    all the same."""
    pages: dict[str, Any] = {}
    for tracker in promotion.track:
        from mlpipe.observe.tracking.mlflow_registry import register

        model = registry.show_model(store, promotion.model_name, version)
        try:
            pages[tracker.name] = register(tracker.settings, plan.pipeline, store.url, model, promotion.alias)
        except (AwayError, MlpipeError) as error:
            pages[tracker.name] = f"not registered: {error}"
            _log.warning("%s: %s is %s", plan.stage, tracker.name, pages[tracker.name])
    return pages


def promote(
    store: Store,
    run_id: str,
    plan: PromotePlan,
    *,
    attempt: str | None = None,
    raise_if_stopped: Callable[[], None] = lambda: None,
) -> tuple[int, Checkpoint]:
    """Promote the checkpoint that `plan.evaluate_stage` evaluated (without one: the latest). Returns the
    version and the checkpoint. `attempt`: key of the attempt of the stage that does so; None: a person.
    Raises SubmitError if there is no checkpoint, or its gate did not pass; what `registry.promote` does."""
    run = runs.read_run(store, run_id)
    stage_key = f"runs/{run_id}/stages/{plan.train_stage}"
    chosen, metrics = _chosen(store, run_id, plan)
    lineage = {
        "run": run_id,
        "stage": plan.train_stage,
        "step": chosen.step,
        "checkpoint": chosen.key,
        "pipeline": run.pipeline,
        "spec_digest": run.spec_digest,
        "git_commit": run.meta.get("git_commit"),
        "data_digest": _data_digest(store, f"{stage_key}/attempt-{chosen.attempt}"),
        "outputs": {
            name: stage.outcome["digest"]
            for name, stage in run.stages.items()
            if stage.outcome and "digest" in stage.outcome
        },
        "metrics": metrics,
        "attempt": attempt,
    }
    if (start := run.meta.get("init_from", {}).get(plan.train_stage)) is not None:
        lineage["init_from"] = start["found"]
    try:
        version = registry.promote(store, plan.model_name, plan.alias, chosen.key, lineage, raise_if_stopped)
    except DamagedError as error:
        again = f"resume {run_id}"
        if attempt is None:  # a resume of a run that is done trains nothing
            alias = "" if plan.alias is None else f" --alias {plan.alias}"
            again = f"models promote {run_id} --as {plan.model_name}{alias} --stage {plan.train_stage}"
        error.hint = f"mlpipe checkpoints discard {run_id} {chosen.step}, then mlpipe {again}"
        raise
    return version, chosen


def _chosen(store: Store, run_id: str, plan: PromotePlan) -> tuple[Checkpoint, dict[str, Any]]:
    """With its metrics, as they were evaluated, or validated. Raises SubmitError."""
    run = runs.read_run(store, run_id)
    stage_key = f"runs/{run_id}/stages/{plan.train_stage}"
    checkpoints = catalogue.list_checkpoints(store, stage_key)
    metrics: dict[str, Any] = {}
    if plan.evaluate_stage is not None:
        evaluation = run.stages[plan.evaluate_stage].outcome or {}
        metrics = evaluation.get("metrics") or {}
        if not evaluation.get("passed"):
            raise SubmitError(
                f"the gate of stage {plan.evaluate_stage!r} has not passed",
                hint=f"look at `mlpipe status {run_id}`",
                kind="failed",
            )
        checkpoints = [one for one in checkpoints if one.step == evaluation["step"]]
    if not checkpoints:
        raise SubmitError(
            f"stage {plan.train_stage!r} has no checkpoint to promote", where=stage_key, kind="failed"
        )
    chosen = checkpoints[-1]
    if not metrics:  # nobody evaluated it: what its training measured at that step, if it did
        told = catalogue.load_manifest(store, chosen.key)["scalars"].get("validation") or {}
        metrics = told.get("metrics", {}) if told.get("step") == chosen.step else {}
    return chosen, metrics


def _data_digest(store: Store, attempt_key: str) -> str | None:
    """Of the tokens that the checkpoint was trained on; None for a user's own data set."""
    key = f"{attempt_key}/plan.json"
    plan = json.loads(store.get(key)) if store.exists(key) else {}
    digest: str | None = ((plan.get("train") or {}).get("data") or {}).get("digest")
    return digest
