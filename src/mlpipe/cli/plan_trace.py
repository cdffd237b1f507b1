"""`mlpipe plan --trace`: a user's own model in numbers, by a child process that has torch. Kept in the cache
under a digest of all that it depends on, so that a second look costs nothing and never shows an old model."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from mlpipe._core.errors import PlanError
from mlpipe._core.presets import OWN
from mlpipe._core.serial import from_json, to_json
from mlpipe.plan.entry import package_of, search_path
from mlpipe.plan.plan import Plan, code_digest
from mlpipe.plan.shapes.traced import Traced
from mlpipe.plan.work import TrainPlan
from mlpipe.store.outputs import cache_folder

_DEADLINE_SECONDS = 300.0


def traced(plan: Plan) -> Traced | None:
    """Of a stage that trains a model of the user's own; None for any other. Raises PlanError."""
    train = plan.part(TrainPlan)
    if train is None or train.model.preset is not None or train.model.build.entry in OWN:
        return None
    asked = to_json(
        {
            "model": train.model,
            "data": train.data,
            "pipeline": train.pipeline,
            "num_ranks": train.mesh.pp,
            "tp": train.mesh.tp,
        }
    )
    kept = cache_folder() / "traces" / f"{_digest(plan, asked)}.json"
    if kept.is_file():
        try:
            return from_json(Traced, kept.read_bytes())
        except ValueError:  # half a file: traced anew
            pass
    shape = _run(plan, asked)
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = kept.with_suffix(f".{os.getpid()}")
    scratch.write_text(to_json(shape))
    scratch.replace(kept)
    return shape


def _digest(plan: Plan, asked: str) -> str:
    """Of what is asked, mlpipe, torch, and the Python files of the packages that the entries lie in."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        raise PlanError("--trace needs torch", hint="pip install 'mlpipe[train]'") from None
    digest = hashlib.sha256(f"{asked}{code_digest()}{torch}".encode())
    train = plan.work.training
    entries = [train.model.build, *train.data.functions]
    for top in sorted({package_of(entry.entry) for entry in entries}):
        for path in _sources(top, search_path(plan.launch.env, os.getcwd())):
            digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _sources(top: str, search: list[str]) -> list[Path]:
    spec = PathFinder.find_spec(top, search) or find_spec(top)
    if spec is None:
        return []  # the child says so, and what to do
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if folders:
        return sorted(path for folder in folders for path in folder.rglob("*.py"))
    return [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []


def _run(plan: Plan, asked: str) -> Traced:
    with tempfile.TemporaryDirectory(prefix="mlpipe-trace-") as name:
        given, written = Path(name) / "model.json", Path(name) / "traced.json"
        given.write_text(asked)
        argv = [sys.executable, "-P", "-m", "mlpipe.train.trace", str(given), str(written)]
        env = {**os.environ, **plan.launch.env}
        try:
            done = subprocess.run(
                argv, env=env, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise PlanError(
                f"tracing took over {_DEADLINE_SECONDS:.0f} s", hint="plan without --trace"
            ) from None
        if done.returncode == 0:
            return from_json(Traced, written.read_bytes())
        if written.is_file():
            said = json.loads(written.read_bytes())
            raise PlanError(said["message"], where=said["where"], hint=said["hint"])
        raise PlanError(f"tracing failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
