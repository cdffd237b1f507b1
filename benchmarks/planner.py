"""The planner against the world: predicted beside measured.

    python -m benchmarks.planner                 # both parts; about ten minutes on two cores
    python -m benchmarks.planner --only published    # seconds, and no torch

cpu: each configuration trains in fresh processes under the real launcher; its step time is compared with the
prediction from a calibration made just before (one for every few configurations, interleaved), its peak
memory above that of a tiny model under the same strategy with the predicted bytes.
published: `published.json`, runs that others measured, from the hardware catalogue, without fitting to them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, alone, document, write
from mlpipe._core.records import decode
from mlpipe.plan.build import build_plan, stage_hardware
from mlpipe.plan.candidates import pick
from mlpipe.plan.hardware import detect_hardware
from mlpipe.plan.plan import Plan
from mlpipe.plan.presets import PRESETS, LlamaConfig
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline, Resources, Train

PUBLISHED = Path(__file__).with_name("published.json")
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
_PLAIN = {"seq_len": 256, "precision": "fp32", "checkpointing": "none", "shape": "", "vocab_size": 4096}
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
# Of the same work, for the ranking: the first of the table that has these.
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


def train(case: dict[str, Any], folder: Path, name: str, steps: int, calibration: Path) -> dict[str, Any]:
    """Plan and run: predicted and measured bytes and seconds."""
    pipeline = pipeline_of(case, folder, steps, calibration)
    hardware = stage_hardware(pipeline, "train")
    plan = build_plan(
        pipeline,
        "train",
        run_id=name,
        attempt=1,
        store_url=str(folder / "store"),
        inputs={},
        hardware=hardware,
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
        raise SystemExit(f"{name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    seconds, memory = measured(folder / "store", plan)
    spec = pipeline.stage("train").train
    assert spec is not None
    chosen, _ = pick(spec, config_of(plan), hardware)
    assert chosen.memory is not None
    return {
        "case": {key: value for key, value in case.items() if value != _PLAIN.get(key)},
        "predicted_seconds": chosen.step_seconds,
        "measured_seconds": seconds,
        "predicted_tensor_bytes": chosen.memory.tensors + chosen.memory.slack,
        "measured_peak_bytes": memory,
        "load": os.getloadavg()[0],
    }


def config_of(plan: Plan) -> LlamaConfig:
    assert plan.train is not None
    return LlamaConfig(**plan.train.model.build.args)


def measured(store: Path, plan: Plan) -> tuple[float, float]:
    """Median seconds of a step after the first two, and the fullest rank's peak."""
    peak, seconds = 0.0, []
    for path in sorted((store / plan.attempt_key / "records").glob("rank-*.jsonl")):
        steps = [record for record in decode([path.read_bytes()]) if record["kind"] == "step"]
        peak = max(peak, steps[-1]["memory_bytes"])
        if path.name == "rank-0.jsonl":
            seconds = [record["seconds"] for record in steps[2:]]
    return statistics.median(seconds), peak


def calibrate(path: Path, ranks: int) -> None:
    argv = [
        sys.executable,
        "-m",
        "mlpipe.cli",
        "calibrate",
        "--quiet",
        "--out",
        str(path),
        "--ranks",
        str(ranks),
    ]
    subprocess.run([*argv, "--ranks", str(ranks)], check=True, timeout=600, stdout=subprocess.DEVNULL)


def cpu(cases: list[dict[str, Any]], steps: int, every: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="mlpipe-planner-") as name:
        folder = Path(name)
        write_tokens(folder / "tokens")
        baselines: dict[tuple[str, int], float] = {}
        calibration = folder / "hardware.json"
        for number, case in enumerate(cases):
            if number % every == 0:
                calibration = folder / f"hardware-{number}.json"
                calibrate(calibration, max(case["ranks"] for case in cases))
            kind = (case["strategy"], case["ranks"])
            if kind not in baselines:
                tiny = {**_TINY, "ranks": case["ranks"], "strategy": case["strategy"], "batch": 2}
                empty = train(tiny, folder, f"tiny-{number}", 3, calibration)
                baselines[kind] = empty["measured_peak_bytes"] - empty["predicted_tensor_bytes"]
            row = train(case, folder, f"case-{number}", steps, calibration)
            row["baseline_bytes"] = baselines[kind]
            row["measured_tensor_bytes"] = row["measured_peak_bytes"] - baselines[kind]
            row["seconds_error"] = row["predicted_seconds"] / row["measured_seconds"] - 1
            row["memory_error"] = row["predicted_tensor_bytes"] / row["measured_tensor_bytes"] - 1
            rows.append(row)
            print(text_of(row), flush=True)
    return rows


def text_of(row: dict[str, Any]) -> str:
    case = ", ".join(str(value) for value in row["case"].values())
    return (
        f"{case:<44} step {1000 * row['measured_seconds']:7.0f} ms {row['seconds_error']:+6.1%}   "
        f"memory {row['measured_tensor_bytes'] / 2**20:6.0f} MiB {row['memory_error']:+6.1%}   "
        f"load {row['load']:.1f}"
    )


def ranking(rows: list[dict[str, Any]]) -> float | None:
    """Speed of the strategy that is predicted to be the fastest, over that of the one that is."""
    mine = [row for row in rows if all({**_PLAIN, **row["case"]}[key] == RANKED[key] for key in RANKED)]
    if len(mine) < 2:
        return None
    chosen = min(mine, key=lambda row: row["predicted_seconds"])
    return min(row["measured_seconds"] for row in mine) / chosen["measured_seconds"]


def summary(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    errors = sorted(abs(row[key]) for row in rows if row.get(key) is not None)
    return {"rows": len(errors), "median": statistics.median(errors), "worst": errors[-1]} if errors else {}


def published() -> list[dict[str, Any]]:
    return [predict_published(row) for row in json.loads(PUBLISHED.read_text())["rows"]]


def predict_published(row: dict[str, Any]) -> dict[str, Any]:
    """A row's tokens per second and device, and GiB, from the catalogue and what the source says of the
    machines (`device`)."""
    spec = {
        "gpus_per_node": row.get("per_node", 8),
        "gpu": row["gpu"],
        "nodes": max(1, row["devices"] // row.get("per_node", 8)),
        **({"device": row["device"]} if row.get("device") else {}),
    }
    if row["devices"] < 8:
        spec |= {"gpus_per_node": row["devices"], "nodes": 1}
    hardware = detect_hardware(Resources.model_validate(spec))
    config = LlamaConfig(**row["config"]) if "config" in row else PRESETS[row["preset"]]
    asked = Train.model_validate(
        {
            "model": {"preset": "llama-1m", "seq_len": row["seq_len"]},
            "data": {
                "tokens": "x",
                "batch_size": row["local_batch"] * row["devices"] * row.get("accumulation", 1),
                "micro_batch": row["local_batch"],
            },
            "steps": 1000,
            "strategy": row["strategy"],
            "precision": "bf16",
            "activation_checkpointing": row["checkpointing"],
            "compile": "block" if row["compile"] else "off",
            "checkpoint": {"every": "1000 steps"},
        }
    )
    found, _ = pick(asked, config, hardware)
    assert found.tokens_per_second is not None
    assert found.memory is not None
    rate = found.tokens_per_second / row["devices"]
    out = {
        **{key: row[key] for key in ("source", "name", "set")},
        "predicted_tokens_per_second": rate,
        "measured_tokens_per_second": row["tokens_per_second"],
        "seconds_error": row["tokens_per_second"] / rate - 1,
    }
    if row.get("memory_gib"):
        gib = found.memory.total / 2**30
        out |= {
            "predicted_gib": gib,
            "measured_gib": row["memory_gib"],
            "memory_error": gib / row["memory_gib"] - 1,
        }
    return out


def published_text(row: dict[str, Any]) -> str:
    memory = (
        f"   memory {row['measured_gib']:5.1f} GiB {row['memory_error']:+6.1%}"
        if "measured_gib" in row
        else ""
    )
    return (
        f"{row['set']:<5} {row['name']:<58} {row['measured_tokens_per_second']:8,.0f} tok/s/GPU, step "
        f"{row['seconds_error']:+6.1%}{memory}"
    )


def rows_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    summaries = {"planner, this CPU": body.get("cpu_summary", {})}
    for name, found in body.get("published_summary", {}).items():
        summaries[f"planner, published runs ({name})"] = found
    return [
        alone(work, f"error of {figure}, {kind}", "ratio", [found[figure][kind]])
        for work, found in summaries.items()
        for figure in ("seconds", "memory")
        if found.get(figure)
        for kind in ("median", "worst")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["cpu", "published"])
    parser.add_argument("--quick", action="store_true", help="two cases, few steps: figures mean nothing")
    parser.add_argument("--steps", type=int, default=12, help="of each cpu configuration")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    body: dict[str, Any] = {}
    before = arguments.results / "planner.json"
    if arguments.only and before.exists():  # the other part stays, with its own time and load
        other = "published" if arguments.only == "cpu" else "cpu"
        kept = json.loads(before.read_text())
        body = {key: kept[key] for key in (other, f"{other}_summary", f"{other}_run") if key in kept}
    if arguments.only != "published":
        cases = CASES[:2] if arguments.quick else CASES
        rows = cpu(cases, steps=4 if arguments.quick else arguments.steps, every=4)
        body["cpu"] = rows
        body["cpu_run"] = {"load_before": load, "steps": arguments.steps, "quick": arguments.quick}
        body["cpu_summary"] = {
            "seconds": summary(rows, "seconds_error"),
            "memory": summary(rows, "memory_error"),
            "ranking": ranking(rows),
        }
        print(f"cpu: {json.dumps(body['cpu_summary'])}")
    if arguments.only != "cpu":
        found = published()
        for row in found:
            print(published_text(row))
        body["published"] = found
        body["published_summary"] = {
            name: {
                key: summary([r for r in found if r["set"] == name], f"{key}_error")
                for key in ("seconds", "memory")
            }
            for name in ("seen", "test")
        }
        print(f"published: {json.dumps(body['published_summary'])}")
    path = write("planner", {**document(rows_of(body), load_before=load), **body}, arguments.results)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
