"""The seal of a run: what whoever submitted it knows of it. Others may write into the store, so that what is
read there commands nobody who has a seal and finds something else.

The driver's Job has the digests as an argument (`Seal.digests`); the submitter's machine keeps the seal
itself (`store/known.py`). Whoever has the right to start drivers may seal a run anew, and says so: `resume
--set`, `submit` with the very pipeline, `resume --trust-store`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlpipe._core.errors import SpecError, SubmitError
from mlpipe._core.ids import spec_seal
from mlpipe._core.serial import differing_keys, from_json, to_json
from mlpipe.plan.plan import Plan
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline
from mlpipe.spec.network import written_out
from mlpipe.store import known, runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit import backends
from mlpipe.submit.backend import Backend
from mlpipe.submit.submission import Submission


@dataclass(frozen=True)
class Seal:
    """`pipeline`: the text of pipeline.yaml. `place`: how the backend is reached; of no meaning to a driver
    of its own, as is `folder`, where a local run's commands run."""

    pipeline: str
    overrides: tuple[str, ...]
    backend: str
    folder: str = ""
    place: dict[str, Any] | None = None

    def digests(self) -> str:
        """Of what a driver on a cluster drives."""
        return spec_seal(self.pipeline, self.overrides)

    def load(self, run_id: str, more: Sequence[str] = ()) -> Pipeline:
        """Raises SpecErrors."""
        name = f"runs/{run_id}/pipeline.yaml"
        return load_pipeline_text(self.pipeline, name, overrides=[*self.overrides, *more])


def of_submission(submission: Submission, backend: Backend) -> Seal:
    """Of the run that is made of it."""
    text, overrides, folder = submission.text, submission.overrides, submission.folder
    return Seal(text, overrides, backend.name, folder, backend.place or None)


def read(store: Store, run: RunState) -> Seal:
    """What the store says."""
    meta = run.meta
    return Seal(
        pipeline=runs.read_pipeline(store, run.run_id),
        overrides=tuple(map(str, meta.get("set", []))),
        backend=run.backend,
        folder=str(meta.get("folder", ".")),
        place=run.place or None,
    )


def keep(store: Store, run_id: str, seal: Seal) -> None:
    """On this machine."""
    known.keep_seal(store.url, run_id, to_json(seal))


def kept(store: Store, run_id: str) -> Seal | None:
    """None: this machine did not ask for the run."""
    text = known.read_seal(store.url, run_id)
    try:
        return None if text is None else from_json(Seal, text)
    except (ValueError, RecursionError):  # of another version of mlpipe
        return None


def verified(store: Store, run: RunState, *, digests: str | None, trust_store: bool = False) -> Seal:
    """What the run is, out of the store: compared with `digests` (the argument of a driver's Job), else with
    the seal that this machine keeps, else with run.json's own digest. Raises SubmitError (input) naming what
    differs."""
    stored = read(store, run)
    if trust_store:
        return stored
    if digests is not None:
        odd = _odd_digests(run, stored, digests)
    elif (sealed := kept(store, run.run_id)) is not None:
        odd = _odd_keys(run, stored, sealed)
    else:
        odd = _odd_digest(run, stored)
    if odd:
        raise SubmitError(
            f"run {run.run_id} is not what it was when it was submitted: {'; '.join(odd)}",
            where=f"{store.url}/runs/{run.run_id}",
            hint=f"somebody changed it in the store, and nothing of it was started; look at it with mlpipe "
            f"spec {run.run_id}, and if it shall be so: mlpipe resume {run.run_id} --trust-store",
            kind="input",
        )
    return stored


def vouched(store: Store, run: RunState, pipeline: Pipeline) -> Seal:
    """What the store says, if that is `pipeline`, which the caller has from elsewhere; this machine keeps it.
    Raises SubmitError (input) naming the keys that differ."""
    current = read(store, run)
    stored = current.load(run.run_id)
    if stored.digest != pipeline.digest:
        hint = f"choose another --run-id, or change it on the way: mlpipe resume {run.run_id} --set ..."
        if run.is_sweep:
            hint = f"choose another id, or go on with it as it is: mlpipe sweep --resume {run.run_id}"
        raise SubmitError(
            f"run {run.run_id} exists and was started with another pipeline: {_differing(pipeline, stored)}",
            where=store.url,
            hint=hint,
            kind="input",
        )
    keep(store, run.run_id, current)
    return current


def check_plan(store: Store, plan: Plan) -> None:
    """Of a stage that runs: a stored plan tells what was started and commands nothing. One of another version
    of mlpipe may differ; whether its gang is ours is known on the cluster. Raises SubmitError (input)."""
    key = f"{plan.attempt_key}/plan.json"
    try:
        stored = json.loads(store.get(key))
    except (ValueError, RecursionError):
        stored = None
    odd = differing_keys(json.loads(plan.to_json()), stored)
    if odd and "code_digest" not in odd:
        raise SubmitError(
            f"the plan of stage {plan.stage!r}, which runs, is not what the pipeline gives: "
            f"{', '.join(odd) if isinstance(stored, dict) else 'it is none'}",
            where=f"{store.url}/{key}",
            hint=f"somebody changed it in the store; cancel the run (mlpipe cancel {plan.run_id}: it saves), "
            "then resume it",
            kind="input",
        )


def changed(seal: Seal, more: Sequence[str]) -> Seal:
    """The seal with more overrides behind its own. Raises SpecErrors."""
    overrides = (*seal.overrides, *more)
    if any(one.lstrip().startswith("network") for one in more):
        overrides = written_out(seal.load("", more).network, overrides)
    return replace(seal, overrides=overrides)


def _odd_digests(run: RunState, stored: Seal, digests: str) -> list[str]:
    keys = ("pipeline.yaml", "set in run.json")
    pairs = zip(keys, stored.digests().split(":"), digests.split(":"), strict=False)
    odd = [key for key, ours, sealed in pairs if ours != sealed]
    if not backends.load(stored.backend).has_own_driver:  # its stages would run beside this driver's token
        odd.append("backend in run.json")
    return odd if digests.count(":") == 1 else list(keys)


def _odd_digest(run: RunState, stored: Seal) -> list[str]:
    try:
        same = stored.load(run.run_id).digest == run.spec_digest
    except SpecError:
        same = False
    return [] if same else ["spec_digest in run.json"]


def _odd_keys(run: RunState, stored: Seal, sealed: Seal) -> list[str]:
    odd = []
    if stored.pipeline != sealed.pipeline:
        try:
            old, new = sealed.load(run.run_id), replace(stored, overrides=sealed.overrides).load(run.run_id)
            odd.append(f"pipeline.yaml ({_differing(old, new)})")
        except SpecError:  # it is no pipeline any more
            odd.append("pipeline.yaml")
    for key, name in (("overrides", "set"), ("backend", "backend"), ("folder", "folder")):
        now, was = (json.dumps(getattr(one, key)) for one in (stored, sealed))
        if now != was:
            odd.append(f"{name} in run.json ({now}, and was {was})")
    if stored.place != sealed.place:
        odd.append(f"{sealed.backend} in run.json")
    return odd


def _differing(old: Pipeline, new: Pipeline) -> str:
    """Their keys, or that there are none."""
    ours, theirs = (one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in (old, new))
    return ", ".join(differing_keys(ours, theirs)) or "comments or layout"
