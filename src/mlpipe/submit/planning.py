"""From a pipeline to a run, and from a run to the plans of its stages."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlpipe._core.files import check_name
from mlpipe._core.ids import new_run_id
from mlpipe.plan.ahead import plan_ahead
from mlpipe.plan.build import build_plan, stage_hardware
from mlpipe.plan.plan import Plan
from mlpipe.plan.references import lender
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline
from mlpipe.spec.placeholders import names, stage_of
from mlpipe.store import outputs, runs
from mlpipe.store.base import Store
from mlpipe.submit import seal
from mlpipe.submit.entries import check_entries
from mlpipe.submit.local import check_fits, gpu_ids

_GIT_SECONDS = 5.0


def scratch_folder(store: Store, run_id: str) -> Path:
    """Of one run in one store on this machine; the same for every driver, so that it is found again."""
    return outputs.cache_folder() / "scratch" / f"{run_id}-{zlib.crc32(store.url.encode()):08x}"


def needs(pipeline: Pipeline) -> dict[str, tuple[str, ...]]:
    return {stage.name: stage.needs for stage in pipeline.stages}


def preview(pipeline: Pipeline, store_url: str, run_id: str, folder: str) -> list[Plan]:
    """All plans ahead. Raises PlanError, and SubmitError for what this machine cannot do and for entries that
    are not there, as seen from `folder`."""
    plans = [plan_ahead(pipeline, stage.name, store_url, run_id) for stage in pipeline.stages]
    for plan in plans:
        check_fits(plan, len(gpu_ids()))
    check_entries(plans, folder)
    return plans


def create(
    store: Store,
    pipeline: Pipeline,
    *,
    spec: str,
    overrides: Sequence[str],
    folder: str,
    run_id: str | None,
    cluster: Mapping[str, Any] | None = None,
) -> str:
    """A pending run of `pipeline` (read from the file `spec`), to be driven in `folder`, or on the cluster
    that `cluster` says how to reach (it was rendered before); its id. Raises what `preview` raises, before
    anything is written, and StoreError (input) when the id is taken."""
    run_id = run_id or new_run_id(pipeline.name)
    for name in (folder, spec):
        check_name(name)
    if cluster is None:
        preview(pipeline, store.url, run_id, folder)
    store.probe()
    stages = [stage.name for stage in pipeline.stages]
    meta: dict[str, Any] = {
        "pipeline": pipeline.name,
        "spec": spec,
        "set": list(overrides),
        "folder": folder,
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "git_commit": git_commit(folder),
        "jenkins_build": os.environ.get("BUILD_TAG"),
        "jenkins_url": build_address(os.environ.get("BUILD_URL", "")),
    }
    if cluster is not None:
        meta["kubernetes"] = dict(cluster)
    backend = "local" if cluster is None else "kubernetes"
    asked = seal.of_file(spec, overrides, backend, folder=folder, place=meta.get("kubernetes"))
    runs.create_run(store, run_id, asked.pipeline, pipeline.digest, stages, backend, meta)
    seal.keep(store, run_id, asked)
    return run_id


def build_address(url: str) -> str | None:
    """Of a build, for links on boards and pages: without a user, a password or a query, whoever wrote them
    there; None for what is no address."""
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
    except ValueError:
        return None
    return f"{parts.scheme}://{host}{parts.path}" if parts.scheme in ("http", "https") and host else None


def load_stored(store: Store, run_id: str, overrides: Sequence[str]) -> Pipeline:
    """The pipeline that the run was asked for, with `overrides`. Raises SpecError."""
    text = runs.read_pipeline(store, run_id)
    return load_pipeline_text(text, f"runs/{run_id}/pipeline.yaml", overrides=overrides)


def planner(
    store: Store, run_id: str, pipeline: Pipeline, *, cluster: bool = False
) -> Callable[[str, int], Plan]:
    """Plans a stage whose needs are done; fetches the outputs that it names to this machine, or, for pods,
    only what planning itself reads of them."""

    def plan(stage_name: str, attempt: int) -> Plan:
        return build_plan(
            pipeline,
            stage_name,
            run_id=run_id,
            attempt=attempt,
            store_url=store.url,
            inputs=_inputs(store, run_id, pipeline, stage_name, fetch=not cluster),
            hardware=stage_hardware(pipeline, stage_name, cluster=cluster),
            resume=True,  # from the latest checkpoint of the stage, if it has one
        )

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
    """For a look at what a stage reads of those that are `made`; no stage may read it, since only the
    manifests of tokens are there."""
    cache = outputs.cache_folder() / "peeked"
    wanted = sorted(_named(pipeline, stage_name) & set(made))
    return {name: str(_peek(store, f"runs/{run_id}/stages/{name}", cache)) for name in wanted}


_peek = partial(outputs.peek_output, name="manifest.json")


def _named(pipeline: Pipeline, stage_name: str) -> set[str]:
    """Stages whose outputs the stage names."""
    stage = pipeline.stage(stage_name)
    text = stage.model_dump_json()
    if (other := lender(pipeline, stage)) is not None:
        text += other.model_dump_json()
    return {name for placeholder in names(text) if (name := stage_of(placeholder)) is not None}


def git_commit(folder: str) -> str | None:
    """Of the checkout that `folder` lies in, with `-dirty` when it has changes; None outside of one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None
