"""Which weights a training starts from: looked up once for a run, before anything is trained, and kept in
run.json: an alias that moves and a run that goes on make no difference to what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mlpipe._core.errors import MlpipeError, PlanError, SubmitError
from mlpipe._core.files import expand_user
from mlpipe._core.serial import from_plain, to_plain
from mlpipe.kinds.train.spec import Train
from mlpipe.plan.model import FoundWeights, InitPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.shapes.pretrained import NO_REVISION
from mlpipe.plan.training import init_plan, trainings
from mlpipe.plan.work import TrainPlan
from mlpipe.spec import overrides as override_rules
from mlpipe.spec.placeholders import names
from mlpipe.spec.problems import closest
from mlpipe.spec.tree import get, items_of, parse, text_of
from mlpipe.store import catalogue, registry, runs, safetensors, weights
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.runs import RunState
from mlpipe.submit.submission import Submission


def with_weights(store: Store, plan: Plan) -> Plan:
    """The plan with what its `init_from` led to when the run looked first. Raises MlpipeError where it leads
    nowhere."""
    training = plan.part(TrainPlan)
    if training is None or training.init_from is None:
        return plan
    init = training.init_from
    run = runs.read_run(store, plan.run_id)
    source = _kept(run, plan.stage, init)
    if source is None:
        source = find(store, plan.run_id, init, str(run.meta.get("folder", ".")))
        entry = kept_as(init, source)
        runs.update_run(
            store,
            plan.run_id,
            lambda now: replace(
                now, meta={**now.meta, "init_from": {**now.meta.get("init_from", {}), plan.stage: entry}}
            ),
        )
    if source.revision not in (None, init.revision):
        said = f"--set {plan.stage}.model.revision={source.revision}"
        raise SubmitError(
            f"{init.asked['path']} was of revision {source.revision} when the run was asked for, and is of "
            f"{init.revision} now",
            where=plan.stage,
            hint=f"say which: mlpipe resume {plan.run_id} {said}",
            kind="input",
        )
    return replace(plan, work=training._replace(init_from=init._replace(found=source)))


def _kept(run: RunState, stage: str, init: InitPlan) -> FoundWeights | None:
    entry = run.meta.get("init_from", {}).get(stage)
    if entry is None or entry["asked"] != init.asked:
        return None
    return from_plain(FoundWeights, entry["found"])


def kept_as(init: InitPlan, source: FoundWeights) -> dict[str, Any]:
    """What run.json says of a stage."""
    return {"asked": init.asked, "found": to_plain(source)}


def look_ahead(submission: Submission, reaches: Callable[[str], bool]) -> dict[str, Any]:
    """Of all training stages, before there is a run: what can be found already, as run.json keeps it.
    `reaches(place)`: whether a path or the URL of a store is to be looked at from here. Raises SubmitError
    (input), with the line, for what is not there; a store that does not answer is asked later."""
    kept: dict[str, Any] = {}
    for stage, training in trainings(submission.pipeline).items():
        init = asked_for(submission, stage, training)
        if init is None or not ({"path", "model", "run"} & init.asked.keys()):
            continue
        place = init.path or init.asked.get("store", submission.store_url)
        if names(place) or not reaches(place):
            continue
        try:
            kept[stage] = kept_as(init, find(open_store(submission.store_url), "", init, submission.folder))
        except MlpipeError as error:
            if error.kind == "input":
                where = _line(submission, stage)
                raise SubmitError(error.told, where=where, hint=error.hint, kind="input") from None
    return kept


def asked_for(submission: Submission, stage: str, training: Train) -> InitPlan | None:
    """Where a stage's weights come from. Raises SubmitError (input), with the line, for open weights whose
    config.json makes no model."""
    try:
        return init_plan(training, {})
    except PlanError as error:
        where = _line(submission, stage, error.where == NO_REVISION)
        raise SubmitError(error.told, where=where, hint=error.hint, kind="input") from None


def _line(submission: Submission, stage: str, of_revision: bool = False) -> str:
    """Where the stage's `init_from` stands, or which revision."""
    root, _ = parse(submission.text, submission.spec)
    if root is None:
        return submission.spec
    for override in submission.overrides:
        override_rules.apply(root, override)
    for each in items_of(root, "stages"):
        node = get(each, "train", "init_from") or get(each, "train", "model", "pretrained")
        node = (get(each, "train", "model", "revision") if of_revision else None) or node
        if text_of(get(each, "name")) == stage and node is not None:
            return str(node.key or node.place)
    return submission.spec


def find(store: Store, run_id: str, init: InitPlan, folder: str) -> FoundWeights:
    """Looks, reads no values. `store`: the run's own; `folder`: where paths begin. Raises StoreError and
    SubmitError (input)."""
    asked = init.asked
    if init.path is not None:
        found = _files(init.path, folder, is_made=bool(names(asked["path"])))
        return found._replace(revision=init.revision)
    other = open_store(_from(folder, asked["store"])) if "store" in asked else store
    if "model" in asked:
        return _model(other, asked["model"])
    return _checkpoint(other, asked.get("run", run_id), asked.get("stage"), asked.get("step"))


def _from(folder: str, place: str) -> str:
    return place if "://" in place else str(Path(folder, expand_user(place)))


def _files(path: str, folder: str, *, is_made: bool) -> FoundWeights:
    """`is_made`: by another stage, whose output has a digest of its own and may not be on this machine."""
    url, key = safetensors.split(_from(folder, path))
    store = open_store(url)
    if is_made:
        return FoundWeights(path, "safetensors", store.url, key, None, None)
    there = weights.of_files(store, key)
    return FoundWeights(path, "safetensors", store.url, key, None, there.digest, there.files)


def _model(store: Store, name: str) -> FoundWeights:
    model = registry.show_model(store, *name.replace("@", "/").split("/", 1))
    words = f"model {name}" + (f" (version {model.version})" if "@" in name else "")
    digest = weights.of_checkpoint(store, model.key).digest
    return FoundWeights(words, "checkpoint", store.url, model.key, model.step, digest)


def _checkpoint(
    store: Store, run_id: str, stage: str | None, step: int | Literal["best"] | None
) -> FoundWeights:
    stages = runs.read_run(store, run_id).stages
    if stage is not None and stage not in stages:
        raise SubmitError(
            f"run {run_id} has no stage {stage!r}", hint=closest(stage, list(stages)), kind="input"
        )
    listed = {
        name: catalogue.list_checkpoints(store, f"runs/{run_id}/stages/{name}")
        for name in stages
        if stage in (None, name)
    }
    there = {name: checkpoints for name, checkpoints in listed.items() if checkpoints}
    if len(there) != 1:
        of = f"stage {stage!r} of run {run_id}" if stage is not None else f"run {run_id}"
        raise SubmitError(
            f"{of} has no checkpoint" if not there else f"several stages of {of} have checkpoints",
            where=store.url,
            hint=f"name one: stage: {next(iter(there))}" if there else f"see mlpipe status {run_id}",
            kind="input",
        )
    ((name, checkpoints),) = there.items()
    chosen = [one for one in checkpoints if one.best or step != "best"]
    if not chosen:
        raise SubmitError(
            f"stage {name!r} of run {run_id} has no best checkpoint",
            where=store.url,
            hint="its training says none: it has no validate.best",
            kind="input",
        )
    chosen = [one for one in chosen if step in (None, "best", one.step)]
    if not chosen:
        steps = ", ".join(str(one.step) for one in checkpoints)
        raise SubmitError(
            f"run {run_id} has no checkpoint of step {step}",
            where=store.url,
            hint=f"it has {steps}",
            kind="input",
        )
    last = chosen[-1]
    digest = weights.of_checkpoint(store, last.key).digest
    return FoundWeights(
        f"run {run_id}, stage {name}, step {last.step}{' (the best)' if step == 'best' else ''}",
        "checkpoint",
        store.url,
        last.key,
        last.step,
        digest,
    )
