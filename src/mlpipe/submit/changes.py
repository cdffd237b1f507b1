"""What a resume changes, and what of the run is done again because of it.

A training goes on from its checkpoints when it has fewer steps than are asked for now; evaluations and
promotions are done again when they are asked for otherwise; and so is all that needs what is done again. The
rest stays. What would make a training go on as something else (`plan/meaning.py`) is refused unless it is
allowed by name; so are fewer steps than are done, what a done stage cannot take up any more, and what changes
nothing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlpipe._core.errors import DamagedError, SpecError, SubmitError
from mlpipe.kinds.train.spec import Train
from mlpipe.plan.training import meaning_of, trainings
from mlpipe.spec.model import Pipeline
from mlpipe.spec.network import written_out
from mlpipe.spec.problems import Place
from mlpipe.store import catalogue, outputs, runs
from mlpipe.store.base import Store
from mlpipe.store.catalogue import Checkpoint
from mlpipe.store.runs import RunState
from mlpipe.submit import backends, planning
from mlpipe.submit.seal import Seal

_log = logging.getLogger(__name__)
_TOKENS = re.compile(r"\.data(\.mix\.\d+)?\.tokens$")  # their digest: None before they exist


@dataclass(frozen=True)
class Changes:
    """What is asked for besides going on. `overrides`: `KEY=VALUE`, added to those of before. `allow`: keys
    of settings that may make another training of it. `from_step`: the checkpoint to go back to, 0: none."""

    overrides: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    from_step: int | None = None

    def __bool__(self) -> bool:
        return self != NONE


NONE = Changes()


@dataclass(frozen=True)
class Prepared:
    """`overrides`: all of them. `allowed`: values by key, of this time and before. `again`: stages that are
    done and are to be done again. `behind`: checkpoints that `from_step` goes back behind."""

    pipeline: Pipeline
    overrides: list[str]
    allowed: dict[str, Any]
    again: frozenset[str]
    behind: tuple[Checkpoint, ...]


def prepare(store: Store, run: RunState, asked: Seal, changes: Changes, only: str | None = None) -> Prepared:
    """Reads, and writes nothing. `asked`: what the run is. `only`: the stage that is asked for. Without
    changes only a whole run does stages again, and only while none is under way. Raises SpecError for
    overrides that make no pipeline, SubmitError (input) for changes that cannot be made."""
    pipeline = asked.load(run.run_id, changes.overrides)
    overrides = [*written_out(pipeline.network, (*asked.overrides, *changes.overrides))]
    before = _before(asked, run) if changes.overrides else pipeline
    if {stage.name for stage in pipeline.stages} != set(run.stages):
        raise _refused("the stages of a run keep their names", "start a new run")
    if before is not None and pipeline.store != before.store:
        raise _refused(
            "a run stays in its store", "copy it there, and name the copy: mlpipe resume --store ..."
        )
    back = _stage_of(pipeline, only) if changes.from_step is not None else None
    known, again, behind = dict[str, Any](), set[str](), list[Checkpoint]()
    allowed = dict(run.meta.get("allowed", {}))
    named = {_normal(pipeline, key) for key in changes.allow}
    for name, training in trainings(pipeline).items():
        checkpoints = catalogue.list_checkpoints(store, f"runs/{run.run_id}/stages/{name}")
        if name == back:
            checkpoints, behind = _split(run, checkpoints, changes.from_step or 0)
        now = _meaning(store, run, pipeline, name)
        known |= now
        allowed |= {key: now.get(key) for key in named if key.startswith(f"{name}.")}
        known |= _check_meaning(store, pipeline, checkpoints, now, allowed, overrides)
        at = checkpoints[-1].step if checkpoints else 0
        asks_fewer = before is None or training.steps < trainings(before)[name].steps
        if changes.overrides and training.steps < at and asks_fewer:
            raise _refused(
                f"the training {name!r} has done {at} steps already, {training.steps} are asked for",
                f"train.steps={at} ends it there, a higher one goes on; --from-step goes back, to one of "
                f"{', '.join(str(one.step) for one in checkpoints)}, or 0",
            )
        if name == back:
            if at < training.steps:
                again.add(name)
        elif 0 < at < training.steps and not _ended_early(store, checkpoints[-1], training):
            again.add(name)
    if unknown := sorted(named - known.keys()):
        hint = f"it takes {', '.join(sorted(known))}" if known else "the run has no training"
        raise _refused(f"--allow-change {unknown[0]}: no such setting", hint)
    again |= _asked_otherwise(before, pipeline, run)
    again = _with_what_needs_them(again, planning.needs(pipeline))
    again = {name for name in again if run.stages[name].state == "done"}
    if not changes and (
        only is not None or (backends.load(run.backend).outlives_driver and run.is_under_way)
    ):
        again = set()
    if changes and run.state == "done" and not again:
        raise _refused(
            f"run {run.run_id} is done, and what is asked for changes nothing of it",
            f"train on with a higher train.steps; for anything else start a new run, from "
            f"`mlpipe spec {run.run_id}`",
        )
    return Prepared(pipeline, overrides, allowed, frozenset(again), tuple(behind))


def apply(store: Store, run_id: str, prepared: Prepared) -> RunState:
    """To be called by whoever may drive the run, before anything of it starts. Overrides are kept last: if
    this dies on the way, the same resume still finds what they change, and does the rest."""
    for checkpoint in prepared.behind:
        catalogue.give_up(store, checkpoint.key, "a resume went back behind it")
    if prepared.behind:
        steps = ", ".join(str(checkpoint.step) for checkpoint in prepared.behind)
        _log.warning("the checkpoints of step %s count no more", steps)
    for stage in prepared.pipeline.stages:
        if stage.name in prepared.again and stage.kind.has_output:
            outputs.discard(store, f"runs/{run_id}/stages/{stage.name}")
    if prepared.again:
        runs.reopen(store, run_id, (), again=prepared.again, forget_cancel=False)
    kept = {"set": prepared.overrides, "allowed": prepared.allowed}
    digest = prepared.pipeline.digest
    return runs.update_run(
        store, run_id, lambda run: replace(run, spec_digest=digest, meta={**run.meta, **kept})
    )


def under_way(run_id: str) -> SubmitError:
    """The refusal of a change to a run that somebody drives."""
    return _refused(
        f"run {run_id} is under way, and what it was asked for does not change meanwhile",
        f"mlpipe cancel {run_id} (it saves), then resume it",
    )


def _refused(message: str, hint: str, where: str | None = None) -> SubmitError:
    return SubmitError(message, where=where, hint=hint, kind="input")


def _before(asked: Seal, run: RunState) -> Pipeline | None:
    """None: what the run was asked with does not load any more, and the new overrides mend it."""
    try:
        return asked.load(run.run_id)
    except SpecError:
        return None


def _stage_of(pipeline: Pipeline, only: str | None) -> str:
    names = [name for name in trainings(pipeline) if only in (None, name)]
    if len(names) != 1:
        raise _refused("--from-step is of one training stage", "name it with --stage")
    return names[0]


def _split(
    run: RunState, checkpoints: list[Checkpoint], step: int
) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """What counts when the training goes back to `step`, and what does not."""
    if step and step not in {item.step for item in checkpoints}:
        steps = ", ".join(str(item.step) for item in checkpoints) or "none"
        raise _refused(f"run {run.run_id} has no checkpoint of step {step}", f"it has {steps}; 0 begins anew")
    behind = [item for item in checkpoints if item.step > step]
    return [item for item in checkpoints if item.step <= step], behind


def _meaning(store: Store, run: RunState, pipeline: Pipeline, stage: str) -> dict[str, Any]:
    """Of the training as it is asked for now: by `STAGE.KEY`."""
    made = {name for name, state in run.stages.items() if state.state == "done"}
    inputs = planning.peek_inputs(store, run.run_id, pipeline, stage, made)
    plain = json.loads(json.dumps(meaning_of(pipeline, stage, inputs)))
    return {f"{stage}.{key}": value for key, value in plain.items()}


def _check_meaning(
    store: Store,
    pipeline: Pipeline,
    checkpoints: Sequence[Checkpoint],
    now: Mapping[str, Any],
    allowed: Mapping[str, Any],
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Compares `now` with the newest checkpoint's manifest that can be read; what that says."""
    stage = next(iter(now)).partition(".")[0]
    for checkpoint in reversed(checkpoints):
        try:
            scalars = catalogue.load_manifest(store, checkpoint.key)["scalars"]
        except DamagedError:
            continue
        break
    else:
        return {}
    before = {f"{stage}.{key}": value for key, value in _recorded(scalars).items()}
    keys = sorted(before.keys() | now.keys()) if "meaning" in scalars else sorted(before.keys() & now.keys())
    changed = [
        key
        for key in keys
        if before.get(key) != now.get(key)
        and not (key in allowed and allowed[key] == now.get(key))
        and not (key in before and key in now and _TOKENS.search(key) and None in (before[key], now[key]))
    ]
    if changed:
        lines = [
            f"\n  {key}: {_show(before, key)} there, {_show(now, key)} now{_where(pipeline, key, overrides)}"
            for key in changed
        ]
        raise _refused(
            f"the checkpoint of step {checkpoint.step} is of another training:{''.join(lines)}",
            "leave it as it was, start a new run, or mean it: "
            + " ".join(f"--allow-change {key}" for key in changed),
            where=checkpoint.key,
        )
    return before


def _ended_early(store: Store, checkpoint: Checkpoint, training: Train) -> bool:
    """Whether the training gave up hope at `checkpoint`, and would again: it is asked for as many steps, and
    no more patience (`train/validation.py`, Judge)."""
    validate = training.validate_
    if validate is None or validate.stop is None:
        return False
    try:
        scalars = catalogue.load_manifest(store, checkpoint.key)["scalars"]
    except DamagedError:
        return False
    match scalars:
        case {"steps": training.steps, "validation": {"judge": {"num_without": int(without), **judge}}}:
            best = validate.best
            is_same = best is not None and judge.get("metric") == best.metric
            return is_same and without >= validate.stop.patience
    return False


def _recorded(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says of the training; older ones say less."""
    if isinstance(meaning := scalars.get("meaning"), dict) and meaning:
        return meaning
    known = {"seed": scalars.get("seed"), "model.seq_len": scalars.get("seq_len")}
    known["data.tokens"] = scalars.get("data_digest")
    match scalars.get("model"):
        case {"preset": str(), "args": dict(args)}:
            known |= {f"model.{name}": value for name, value in args.items()}
        case {"entry": str(entry)}:
            known["model.entry"] = entry
    return {key: value for key, value in known.items() if value is not None}


def _show(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not set"
    text = json.dumps(values[key], ensure_ascii=True)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _where(pipeline: Pipeline, key: str, overrides: Sequence[str]) -> str:
    for override in reversed(overrides):
        name = _normal(pipeline, override.partition("=")[0].strip())
        if key == name or key.startswith(f"{name}.") or name == f"{key.rpartition('.')[0]}.preset":
            return f" ({Place(f'--set {override}')})"
    return ""


def _normal(pipeline: Pipeline, key: str) -> str:
    """`STAGE.KEY`, whether or not `stages.` and the stage's kind were written."""
    key = key.removeprefix("stages.")
    names = [name for name in trainings(pipeline) if key.startswith(f"{name}.")]
    if not names:
        return key
    name = max(names, key=len)
    return f"{name}.{key.removeprefix(f'{name}.').removeprefix('train.')}"


def _asked_otherwise(before: Pipeline | None, now: Pipeline, run: RunState) -> set[str]:
    """Stages that are done and would do something else now."""
    if before is None:
        return set()
    apart = {"resources", "timeout"}  # how, not what
    changed = {
        stage.name
        for stage in now.stages
        if run.stages[stage.name].state == "done"
        and stage.name not in trainings(now)
        and stage.model_dump(exclude=apart) != before.stage(stage.name).model_dump(exclude=apart)
    }
    for name in changed:
        if now.stage(name).kind.has_output:
            raise _refused(
                f"stage {name!r} is done, and others may have read what it made",
                "start a new run for another output",
            )
    return changed


def _with_what_needs_them(names: set[str], needs: Mapping[str, Sequence[str]]) -> set[str]:
    grown = names | {name for name, before in needs.items() if names & set(before)}
    return grown if grown == names else _with_what_needs_them(grown, needs)
