"""A sweep in the store: a run whose stages are its trials, each of which is a run of its own.

    runs/<sweep>/run.json         RunState; `stages`: the trials by number; `meta["trials"]`: their values
    runs/<sweep>/pipeline.yaml    the file with its `sweep`
    runs/<sweep>-<number>/        a trial: an ordinary run; its `meta["sweep"]` names the sweep

So a sweep has what a run has: a lease of whoever drives it, states that only move forward, a key in the index
for each of them, a request to cancel. A trial's state there follows its own run.json, which is the truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlpipe.store.base import Store
from mlpipe.store.leases import undriven_since
from mlpipe.store.runs import RUN_ENDED, RunState, StageState, StageStatus, sweep_of_trial


def trial_name(number: int) -> str:
    """Of the stage: `007`."""
    return f"{number:03d}"


def trial_run_id(sweep_id: str, trial: str) -> str:
    """Of the run that the trial is."""
    return f"{sweep_id}-{trial}"


def unbegun(store: Store, run_id: str) -> tuple[StageStatus, str] | None:
    """Of a trial that is no run (yet): where it stands in its sweep, and what it waits for, in words."""
    if store.exists(f"runs/{run_id}/run.json") or (sweep := sweep_of_trial(store, run_id)) is None:
        return None
    name = run_id.removeprefix(f"{sweep.run_id}-")
    trial, called = sweep.stages[name], f"trial {name} of sweep {sweep.run_id}"
    if trial.state not in ("pending", "running"):
        return trial.state, f"{called} never began: {trial.message or trial.state}"
    if sweep.state in RUN_ENDED or undriven_since(sweep) is not None:
        on = f"mlpipe sweep --resume {sweep.run_id}"
        return "pending", f"{called} has not begun, and nobody drives the sweep; go on with {on}"
    if trial.message:
        return "pending", f"{called} has not begun: {trial.message}"
    others = [one for one, other in sweep.stages.items() if other.state == "running" and one != name]
    if trial.state == "running" or not others:
        return "pending", f"{called} is about to begin"
    return "pending", f"{called} has not begun: it waits for one of those that run ({', '.join(others)})"


def values_of(sweep: RunState, trial: str) -> Mapping[str, Any]:
    """By full key, in the order of the file, which JSON objects, written by sorted keys, do not keep. Empty
    of one that is to learn from others first."""
    values: Mapping[str, Any] = sweep.meta["trials"].get(trial, {})
    return {key: values[key] for key in sweep.meta.get("over", values) if key in values}


def value_of(stage: StageState) -> float | None:
    """Of a trial's metric, as far as it is known."""
    value = stage.outcome.get("value")
    return float(value) if isinstance(value, int | float) else None


def best(sweep: RunState) -> str | None:
    """The trial that has ended with the best value of the metric; the first of equal ones."""
    ended = {
        name: value
        for name, stage in sweep.stages.items()
        if stage.state == "done" and (value := value_of(stage)) is not None
    }
    least = min if sweep.meta.get("metric", {}).get("mode") != "max" else max
    return least(ended, key=lambda name: ended[name], default=None)


def ranked(sweep: RunState) -> Sequence[str]:
    """All trials: those that are done by their metric, then those that were stopped with one, the rest."""
    sign = -1.0 if sweep.meta.get("metric", {}).get("mode") == "max" else 1.0

    def order(name: str) -> tuple[int, float, str]:
        stage = sweep.stages[name]
        value = value_of(stage)
        return (2 if value is None else 0 if stage.state == "done" else 1, sign * (value or 0.0), name)

    return sorted(sweep.stages, key=order)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each key by as many of its last words as tell it from the others."""
    words = {key: key.split(".") for key in keys}
    named = {}
    for key, parts in words.items():
        for length in range(1, len(parts) + 1):
            tail = parts[-length:]
            if sum(other[-length:] == tail for other in words.values()) == 1:
                break
        named[key] = ".".join(tail)
    return named
