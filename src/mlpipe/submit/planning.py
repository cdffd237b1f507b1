"""From a run to the plans of its stages."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mlpipe._core.errors import SubmitError
from mlpipe.plan.build import Start, build_plan
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.plan import Plan
from mlpipe.plan.references import lender
from mlpipe.plan.work import TrainPlan
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline
from mlpipe.spec.placeholders import names, stage_of
from mlpipe.store import outputs, runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState


def scratch_folder(store_url: str, run_id: str) -> Path:
    """Of one run in one store on this machine; the same for every driver, so that it is found again."""
    return _scratch_folders() / f"{run_id}-{zlib.crc32(store_url.encode()):08x}"


def _scratch_folders() -> Path:
    return outputs.cache_folder() / "scratch"


def probe_scratch() -> None:
    """Raises SubmitError where no scratch folder can be made: a driver would leave its run half-begun."""
    probe = _scratch_folders() / f"probe-{secrets.token_hex(8)}"
    try:
        probe.mkdir(parents=True)
        probe.rmdir()
    except OSError as error:
        raise SubmitError(
            f"cannot be written: {error.strerror}",
            where=str(probe.parent),
            hint="let MLPIPE_CACHE name a folder that can be written",
        ) from error


def needs(pipeline: Pipeline) -> dict[str, tuple[str, ...]]:
    """By stage, in the order of the file."""
    return {stage.name: stage.needs for stage in pipeline.stages}


def check_needs(
    needs: Mapping[str, Sequence[str]], run: RunState, only: str, again: Collection[str] = ()
) -> None:
    """Raises SubmitError (input) unless the stage `only` may start, once those of `again` wait again."""
    if only not in needs:
        raise SubmitError(
            f"the pipeline has no stage {only!r}", hint=f"it has {', '.join(needs)}", kind="input"
        )
    missing = [need for need in needs[only] if run.stages[need].state != "done" or need in again]
    if missing:
        raise SubmitError(
            f"stage {only!r} needs {', '.join(missing)}, which this run has not done",
            hint="run that first, or leave --stage away",
            kind="input",
        )


def load_stored(store: Store, run_id: str, overrides: Sequence[str]) -> Pipeline:
    """The pipeline that the run was asked for, with `overrides`. Raises SpecError."""
    text = runs.read_pipeline(store, run_id)
    return load_pipeline_text(text, f"runs/{run_id}/pipeline.yaml", overrides=overrides)


def planner(
    store: Store,
    run_id: str,
    pipeline: Pipeline,
    hardware: Callable[[Pipeline, str], Hardware],
    *,
    fetch: bool,
) -> Callable[[str, int], Plan]:
    """Plans a stage, on its `hardware`, when its needs are done. `fetch`: the outputs that it names, to this
    machine; else only what planning itself reads of them."""

    def plan(stage_name: str, attempt: int) -> Plan:
        planned = build_plan(
            pipeline,
            stage_name,
            Start(
                run_id,
                attempt,
                store.url,
                _inputs(store, run_id, pipeline, stage_name, fetch=fetch),
                resume=True,
            ),
            hardware(pipeline, stage_name),
        )
        if (limits := planned.launch.preflight) is not None:
            from mlpipe.store.preflight import nodes_to_avoid

            avoid = nodes_to_avoid(store, planned.stage_key, attempt, limits.slow_ratio)
            planned = replace(planned, launch=planned.launch._replace(avoid=avoid))
        training = planned.part(TrainPlan)
        if training is None or training.init_from is None:
            return planned
        from mlpipe.submit.starting import with_weights

        return with_weights(store, planned)

    return plan


def _inputs(
    store: Store, run_id: str, pipeline: Pipeline, stage_name: str, *, fetch: bool
) -> Mapping[str, str]:
    wanted = _named(pipeline, stage_name)
    cache = outputs.cache_folder() / "outputs"
    get = outputs.fetch_output if fetch else _peek
    return {name: str(get(store, f"runs/{run_id}/stages/{name}", cache)) for name in sorted(wanted)}


def peek_inputs(
    store: Store, run_id: str, pipeline: Pipeline, stage_name: str, made: Collection[str]
) -> Mapping[str, str]:
    """For a look at what a stage reads of those that are `made`; no stage may read it, since only what
    planning reads is there."""
    cache = outputs.cache_folder() / "peeked"
    wanted = sorted(_named(pipeline, stage_name) & set(made))
    return {name: str(_peek(store, f"runs/{run_id}/stages/{name}", cache)) for name in wanted}


def _peek(store: Store, stage_key: str, cache: Path) -> Path:
    """What planning reads: of tokens, of open weights, and which of these the branch `main` is."""
    return outputs.peek_output(store, stage_key, cache, "manifest.json", "config.json", "main")


def _named(pipeline: Pipeline, stage_name: str) -> set[str]:
    """Stages whose outputs the stage names."""
    stage = pipeline.stage(stage_name)
    text = stage.model_dump_json()
    if (other := lender(pipeline, stage)) is not None:
        text += other.model_dump_json()
    return {name for placeholder in names(text) if (name := stage_of(placeholder)) is not None}
