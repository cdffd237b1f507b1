"""A plan out of the quickstart, and mlpipe's real launcher with a benchmark's worker in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.plan import Plan
from mlpipe.spec.load import load_pipeline
from mlpipe.train.data.corpus import main as make_corpus

ROOT = Path(__file__).parents[1]


def corpus(folder: Path, *, vocab_size: int) -> Path:
    """2 MiB of Python's standard library as token files."""
    path = folder / "corpus"
    make_corpus(["--out", str(path), "--max-bytes", "2 MiB", "--vocab-size", str(vocab_size)])
    return path


def train_plan(folder: Path, tokens: Path, name: str, **overrides: Any) -> Plan:
    """Two workers, metrics on, no save by itself. `overrides`: of the train stage, dots as `__`."""
    settings = {
        "steps": 1_000_000,
        "precision": "fp32",
        "checkpoint__every": "1000000 steps",
        "optimizer__schedule": "constant",
        **overrides,
    }
    pipeline = load_pipeline(
        ROOT / "pipelines" / "quickstart.yaml",
        overrides=[f"train.{key.replace('__', '.')}={value}" for key, value in settings.items()],
    )
    plan = build_plan(
        pipeline,
        "train",
        Start(name, 1, str(folder / "store"), {"corpus": str(tokens)}),
        stage_hardware(pipeline, "train"),
    )
    # The corpus lies here already; there is no stage to fetch it from.
    return replace(plan, inputs=(), launch=plan.launch._replace(metrics_port=0))


def measure(plan: Plan, folder: Path, module: str, **asked: Any) -> dict[str, Any]:
    """Runs `module` as the workers of `plan`; what rank 0 left in answer.json."""
    folder.mkdir(parents=True)
    launch = plan.launch._replace(
        argv=("-m", module),
        env={**plan.launch.env, "BENCHMARK": json.dumps({"folder": str(folder), **asked})},
    )
    path = folder / "plan.json"
    path.write_text(replace(plan, launch=launch).to_json())
    argv = [
        sys.executable,
        "-m",
        "mlpipe.train.launcher",
        "--plan",
        str(path),
        "--scratch",
        str(folder / "scratch"),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    done = subprocess.run(argv, env=env, cwd=ROOT, timeout=3600, stdout=subprocess.DEVNULL)
    if done.returncode:
        logs = [log.read_text(errors="replace") for log in (folder / "scratch").rglob("stderr.log")]
        raise RuntimeError(
            f"{module} failed with {done.returncode}: " + "\n".join(log[-3000:] for log in logs)
        )
    return json.loads((folder / "answer.json").read_text())
