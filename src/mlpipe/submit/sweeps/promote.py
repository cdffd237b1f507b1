"""The best trial's model into the registry."""

from __future__ import annotations

from typing import Any

from mlpipe._core.errors import SubmitError
from mlpipe.kinds.promote.driver import promote
from mlpipe.kinds.promote.plan import PromotePlan
from mlpipe.store import catalogue, registry, runs, sweeps
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState


def promote_best(store: Store, sweep: RunState, name: str, alias: str | None) -> dict[str, Any]:
    """What was made: model, version, alias, trial. A controller that died may have made the version and not
    said so: then the next one makes no other. Raises SubmitError (failed) if there is nothing to promote."""
    best = sweeps.best(sweep)
    if best is None:
        raise SubmitError(f"sweep {sweep.run_id} has no best trial yet", kind="failed")
    run = runs.read_run(store, sweeps.trial_run_id(sweep.run_id, best))
    trained = [
        stage
        for stage in run.stages
        if catalogue.latest(store, f"runs/{run.run_id}/stages/{stage}") is not None
    ]
    if not trained:
        raise SubmitError(f"trial {best} has no checkpoint to promote", where=run.run_id, kind="failed")
    evaluated = [stage for stage, state in run.stages.items() if (state.outcome or {}).get("passed")]
    mark = f"runs/{sweep.run_id}"
    made = registry.find_version(store, name, {"attempt": [mark], "run": [run.run_id]}, since=sweep.created)
    if made is None:
        evaluation = evaluated[-1] if evaluated else None
        version, _ = promote(
            store, run.run_id, PromotePlan(trained[-1], evaluation, name, alias), attempt=mark
        )
    else:
        version = made.version
        if alias is not None:
            registry.set_alias(store, name, alias, version)
    return {"model": name, "version": version, "alias": alias, "trial": best}
