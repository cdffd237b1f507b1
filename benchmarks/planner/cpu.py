"""This machine's CPU: each configuration trains in fresh processes under the real launcher.

Each is trained twice, the second time in the opposite order, every time shortly after a calibration. The mean
of its step times is compared with that of the predictions, its peak memory above that of a tiny model trained
the same way with the predicted bytes. A row keeps what was measured, and the file the calibrations:
predictions are arithmetic over them, made again whenever the results are written. The strategies of one work
are trained again for their ranking, in turns: minutes apart the machine's speed differs by more than they do.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from mlpipe._core.records import Step
from mlpipe.kinds.train.spec import Train
from mlpipe.observe.records import decode_lines
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.candidates import pick
from mlpipe.plan.choose import Candidate
from mlpipe.plan.plan import Plan
from mlpipe.plan.shapes.presets import planned
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline

_SPEC = """
version: 1
name: planner
store: {store}
stages:
  - name: train
    train:
      model: {{preset: {preset}, seq_len: {seq_len}, vocab_size: {vocab_size}{shape}}}
      data: {{tokens: {tokens}, batch_size: {batch}, micro_batch: {micro}}}
      steps: {steps}
      strategy: {strategy}
      precision: {precision}
      activation_checkpointing: {checkpointing}
      checkpoint: {{every: 10000 steps, keep: 1}}
      metrics_port: off
    resources: {{workers_per_node: {ranks}, cpus: {cpus}, memory: 64 GiB{hardware}}}
"""
_AFTER_ONE = 2  # runs after one calibration
_PLAIN = {"seq_len": 256, "precision": "fp32", "checkpointing": "none", "shape": "", "vocab_size": 4096}
_KIND = ("strategy", "ranks", "precision", "checkpointing")  # of what the memory without a model depends on
_TINY = {**_PLAIN, "preset": "llama-1m", "vocab_size": 256, "seq_len": 32, "batch": 2, "micro": 1}
# preset, ranks, strategy, batch over all ranks, microbatch of one, and what differs from _PLAIN
CASES: list[dict[str, Any]] = [
    {**_PLAIN, "preset": preset, "ranks": ranks, "strategy": strategy, "batch": batch, "micro": micro, **more}
    for preset, ranks, strategy, batch, micro, more in (
        ("llama-4m", 1, "single", 8, 8, {}),
        ("llama-8m", 2, "ddp", 8, 4, {}),
        ("llama-8m", 2, "fsdp", 8, 4, {}),
        ("llama-8m", 1, "single", 4, 4, {"seq_len": 512}),
        ("llama-8m", 2, "zero1", 8, 4, {}),
        ("llama-8m", 2, "zero2", 8, 4, {}),
        ("llama-8m", 1, "single", 8, 8, {"checkpointing": "full"}),
        ("llama-8m", 2, "ddp", 8, 4, {"precision": "bf16"}),
        ("llama-8m", 2, "fsdp", 8, 2, {}),
        ("llama-25m", 1, "single", 4, 4, {"precision": "bf16"}),
        ("llama-25m", 2, "ddp", 4, 2, {}),
        ("llama-25m", 2, "fsdp", 4, 2, {}),
    )
]
# Of the same work, for the ranking.
RANKED = {"preset": "llama-8m", "ranks": 2, "batch": 8, "micro": 4, "precision": "fp32"}


def write_tokens(folder: Path) -> Path:
    """Noise: what is trained does not matter here. A vocabulary of 256, so that any model's holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    splits = {}
    for name, count in (("train", 200_000), ("validation", 10_000)):
        data = array("H", [draw.randrange(256) for _ in range(count)]).tobytes()
        (folder / f"{name}.bin").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        splits[name] = {"file": f"{name}.bin", "num_tokens": count, "num_bytes": count, "sha256": digest}
    manifest = {"format": 1, "dtype": "uint16", "vocab_size": 256, "tokenizer": None, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def pipeline_of(case: dict[str, Any], folder: Path, steps: int, calibration: Path | None) -> Pipeline:
    text = _SPEC.format(
        **case,
        store=folder / "store",
        tokens=folder / "tokens",
        steps=steps,
        cpus=len(os.sched_getaffinity(0)),
        hardware=f", hardware: {calibration}" if calibration else "",
    )
    return load_pipeline_text(text, "planner.yaml")


def train(
    case: dict[str, Any], folder: Path, name: str, steps: int, calibration: Path | None
) -> dict[str, Any]:
    """Plan and run: what was measured."""
    pipeline = pipeline_of(case, folder, steps, calibration)
    plan = run_plan(pipeline, folder, name)
    seconds, memory = measured(folder / "store", plan)
    return {"seconds": seconds, "peak_bytes": memory, "load": os.getloadavg()[0]}


def run_plan(pipeline: Pipeline, folder: Path, name: str, *, may_fail: bool = False) -> Plan:
    """In fresh processes under the real launcher. Raises SystemExit with what it printed, if it fails; with
    `may_fail` CalledProcessError."""
    plan = build_plan(
        pipeline,
        "train",
        Start(name, 1, str(folder / "store")),
        stage_hardware(pipeline, "train"),
    )
    scratch = folder / name
    scratch.mkdir()
    (scratch / "plan.json").write_text(plan.to_json())
    argv = [sys.executable, "-m", "mlpipe.train.launcher", "--plan", str(scratch / "plan.json")]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MLPIPE_"))}
    done = subprocess.run(
        [*argv, "--scratch", str(scratch)], env=env, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        if may_fail:
            raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
        raise SystemExit(f"{name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return plan


def chosen(pipeline: Pipeline) -> Candidate:
    spec = pipeline.stage("train").part(Train)
    assert spec is not None
    plan = build_plan(
        pipeline,
        "train",
        Start("r", 1, "./runs"),
        stage_hardware(pipeline, "train"),
    )
    found, _ = pick(spec, planned(plan.work.training.model), stage_hardware(pipeline, "train"))
    return found


def measured(store: Path, plan: Plan) -> tuple[float, float]:
    """Median seconds of a step after the first two, and the fullest rank's peak."""
    peak, seconds = 0.0, []
    for path in sorted((store / plan.attempt_key / "records").glob("rank-*.jsonl")):
        steps = [one for one in decode_lines(path.read_bytes().split(b"\n")) if isinstance(one, Step)]
        peak = max(peak, steps[-1].memory_bytes)
        if path.name == "rank-0.jsonl":
            seconds = [step.seconds for step in steps[2:]]
    return statistics.median(seconds), peak


def calibrate(path: Path, ranks: int) -> None:
    argv = [sys.executable, "-m", "mlpipe.cli", "calibrate", "--quiet", "--out", str(path)]
    subprocess.run([*argv, "--ranks", str(ranks)], check=True, timeout=600, stdout=subprocess.DEVNULL)


def cpu(cases: list[dict[str, Any]], steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, and all calibrations by their keys."""
    runs: list[list[dict[str, Any]]] = [[] for _ in cases]
    baselines: dict[tuple[Any, ...], float] = {}
    calibrations = {}
    with tempfile.TemporaryDirectory(prefix="mlpipe-planner-") as name:
        folder = Path(name)
        write_tokens(folder / "tokens")
        order = [*range(len(cases)), *reversed(range(len(cases)))]
        for turn, number in enumerate(order):
            case = cases[number]
            if turn % _AFTER_ONE == 0:
                key = f"calibration-{int(time.time())}"
                ranks = max(cases[other]["ranks"] for other in order[turn : turn + _AFTER_ONE])
                calibrate(folder / key, ranks)
                calibrations[key] = json.loads((folder / key).read_text())
            kind = kind_of(case)
            if kind not in baselines:
                tiny = {**_TINY, **dict(zip(_KIND, kind, strict=True))}
                empty = train(tiny, folder, f"tiny-{number}", 3, folder / key)
                baselines[kind] = empty["peak_bytes"] - tensor_bytes(tiny, folder)
            run = train(case, folder, f"case-{turn}", steps, folder / key)
            runs[number].append({**run, "calibration": key})
            print(f"{case}: {run['seconds']:.3f} s, load {run['load']:.1f}", flush=True)
    rows = []
    for case, mine in zip(cases, runs, strict=True):
        peak, empty_bytes = statistics.mean(run["peak_bytes"] for run in mine), baselines[kind_of(case)]
        rows.append(
            {
                "case": {key: value for key, value in case.items() if value != _PLAIN.get(key)},
                "runs": mine,
                "measured_seconds": statistics.mean(run["seconds"] for run in mine),
                "measured_peak_bytes": peak,
                "baseline_bytes": empty_bytes,
                "measured_tensor_bytes": peak - empty_bytes,
            }
        )
    return rows, calibrations


def kind_of(case: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(case[key] for key in _KIND)


def tensor_bytes(case: dict[str, Any], folder: Path) -> int:
    memory = chosen(pipeline_of(case, folder, 3, None)).memory
    assert memory is not None
    return memory.tensors + memory.slack


def predict(rows: list[dict[str, Any]], calibrations: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with predictions from the calibrations that were made before their runs."""
    found = []
    with tempfile.TemporaryDirectory(prefix="mlpipe-planner-") as name:
        folder = Path(name)
        write_tokens(folder / "tokens")
        for key, data in calibrations.items():
            (folder / f"{key}.json").write_text(json.dumps(data))
        for row in rows:
            case = {**_PLAIN, **row["case"]}
            each = [
                chosen(pipeline_of(case, folder, 12, folder / f"{run['calibration']}.json"))
                for run in row["runs"]
            ]
            seconds, memory = statistics.mean(one.step_seconds for one in each), each[0].memory
            assert memory is not None
            tensors = memory.tensors + memory.slack
            found.append(
                {
                    **row,
                    "predicted_seconds": seconds,
                    "seconds_error": seconds / row["measured_seconds"] - 1,
                    "predicted_tensor_bytes": tensors,
                    "memory_error": tensors / row["measured_tensor_bytes"] - 1,
                }
            )
    return found


def text_of(row: dict[str, Any]) -> str:
    case = ", ".join(str(value) for value in row["case"].values())
    return (
        f"{case:<44} step {1000 * row['measured_seconds']:7.0f} ms {row['seconds_error']:+6.1%}   "
        f"memory {row['measured_tensor_bytes'] / 2**20:6.0f} MiB {row['memory_error']:+6.1%}   "
        f"load {max(run['load'] for run in row['runs']):.1f}"
    )


def is_ranked(case: dict[str, Any]) -> bool:
    return all({**_PLAIN, **case}[key] == value for key, value in RANKED.items())


def in_turns(steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each strategy of the same work: A B C C B A, twice."""
    cases = [case for case in CASES if is_ranked(case)]
    found: dict[str, list[float]] = {case["strategy"]: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="mlpipe-planner-") as name:
        folder = Path(name)
        write_tokens(folder / "tokens")
        for turn, case in enumerate(2 * [*cases, *reversed(cases)]):
            run = train(case, folder, f"turn-{turn}", steps, None)
            found[case["strategy"]].append(run["seconds"])
            print(f"ranking, {case['strategy']}: {run['seconds']:.3f} s, load {run['load']:.1f}", flush=True)
    return found


def ranking(rows: list[dict[str, Any]], measured: dict[str, list[float]]) -> float | None:
    """Speed of the strategy that is predicted to be the fastest, over that of the one that is."""
    if not measured:
        return None
    predicted = {row["case"]["strategy"]: row["predicted_seconds"] for row in rows if is_ranked(row["case"])}
    seconds = {strategy: statistics.median(taken) for strategy, taken in measured.items()}
    return min(seconds.values()) / seconds[min(predicted, key=lambda strategy: predicted[strategy])]
