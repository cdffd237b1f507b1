"""What a user does from the command line, on one real GPU: runs, a kill, profiles, a preflight, metrics, a
calibration. Real processes; `FIGURE` lines say what was seen. Others may use the GPU, too: little is asked of
its speed."""

from __future__ import annotations

import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.command_runs import Cli, until
from kit.on_gpu import figure, needs_gpu
from kit.plans import write_tokens

from mlpipe._core.errors import EXIT_CODES
from mlpipe._core.gpus import gpu_classes
from mlpipe.observe.gpu import find_gpu
from mlpipe.plan.hardware import GPUS
from mlpipe.store.folder import FolderStore
from mlpipe.store.preflight import read_checked
from mlpipe.train.preflight import machine

pytestmark = needs_gpu
SECONDS = 150.0  # for a wait
ROOM = 0.02  # of the data sheet's speeds, where others are at work on the same GPU
MODEL = {"preset": "llama-4m", "seq_len": 256}


def gpu_class() -> str:
    """As the catalogue calls the first GPU."""
    name = torch.cuda.get_device_name(0)
    known = [key for key, one in gpu_classes().items() if one.name == name]
    assert known, f"no class of _core/gpus.json is called {name!r}"
    return known[0]


def resources(**more: Any) -> dict[str, Any]:
    """Of one GPU."""
    return {"gpus_per_node": 1, "gpu": gpu_class(), **more}


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """All that it starts are new interpreters, which import no more than a user's."""
    monkeypatch.setattr("kit.command_runs.Popen", lambda _, argv, **given: subprocess.Popen(argv, **given))
    made = Cli(tmp_path)
    # whatever else the machine has, and where /dev does not show its GPU
    made.env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    made.env.pop("CUBLAS_WORKSPACE_CONFIG", None)  # a plan that needs it sets it
    known = os.environ.get("PYTHONPATH")
    made.env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *([known] if known else [])])
    return made


def write_training(cli: Cli, of: dict[str, Any], **train: Any) -> None:
    """One stage that trains on random tokens with some structure; `of`: its resources."""
    if not (tokens := cli.folder / "tokens").exists():
        write_tokens(tokens)
    given = {
        "model": MODEL,
        "data": {"tokens": str(tokens), "batch_size": 16},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "precision": "bf16",
        "steps": 30,
        "strategy": "single",
        "checkpoint": {"every": "1000 steps"},
        "max_restarts": 0,
        **train,
    }
    stage = {"name": "train", "train": given, "resources": of}
    spec = {"version": 1, "name": "gpu", "stages": [stage]}
    (cli.folder / "pipeline.yaml").write_text(json.dumps(spec))


def records(cli: Cli, run: str, kind: str, stage: str = "train") -> list[dict[str, Any]]:
    path = cli.store / f"runs/{run}/stages/{stage}/attempt-1/records/rank-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if line and (record := json.loads(line))["kind"] == kind]


def planned(cli: Cli, *options: str) -> dict[str, Any]:
    """What `mlpipe plan` says of the stage `train`."""
    stages = cli.json("plan", "pipeline.yaml", *options)["stages"]
    found: dict[str, Any] = next(one for one in stages if one["stage"] == "train")
    return found


def test_the_quickstart_trains_evaluates_promotes_and_exports_in_bf16(cli: Cli):
    size = ["--vocab-size", "4096", "--max-bytes", "2 MiB"]
    spec = {
        "version": 1,
        "name": "quickstart",
        "stages": [
            {
                "name": "corpus",
                "command": [sys.executable, "-m", "mlpipe.train.data.corpus", "--out", "{{output}}", *size],
            },
            {
                "name": "train",
                "needs": ["corpus"],
                "train": {
                    "model": MODEL,
                    "data": {"tokens": "{{stages.corpus.output}}", "batch_size": 64},
                    "optimizer": {"lr": 2e-3, "schedule": "cosine", "warmup_steps": 5},
                    "steps": 30,
                    "precision": "bf16",
                    "checkpoint": {"every": "10 steps", "keep": 2},
                    "validate": {"every": "10 steps"},
                },
                "resources": resources(),
            },
            {
                "name": "evaluate",
                "needs": ["train"],
                "evaluate": {
                    "max_tokens": 16384,
                    "gate": "val_loss < 8",
                    "prompt": "def ",
                    "generate_tokens": 16,
                },
            },
            {"name": "promote", "needs": ["evaluate"], "promote": {"as": "stdlib-lm", "alias": "candidate"}},
        ],
    }
    (cli.folder / "pipeline.yaml").write_text(json.dumps(spec))
    told = planned(cli)
    assert (told["hardware"]["device"], told["hardware"]["name"]) == ("cuda", gpu_class())
    memory = torch.cuda.get_device_properties(0).total_memory
    figure("memory of the device", memory / 2**30, "GiB")
    figure("memory of its class in the catalogue", told["hardware"]["memory_bytes"] / 2**30, "GiB")
    assert told["hardware"]["memory_bytes"] == pytest.approx(memory, rel=0.02)
    figure("GPUs that doctor counts", found_by_doctor(cli))

    began = time.monotonic()
    done = cli.json("run", "pipeline.yaml", "--run-id", "r")
    figure("quickstart, whole run", time.monotonic() - began, "s")
    assert done["state"] == "done"
    (start,), steps = records(cli, "r", "start"), records(cli, "r", "step")
    assert start["device_type"] == "cuda"
    assert start["device"] == torch.cuda.get_device_name(0)
    assert start["precision"] == "bf16"
    figure("from a rank's spawn to its first step", start["seconds_since_spawn"], "s")
    peak = GPUS[gpu_class()].bf16
    assert start["peak_flops"] == peak
    losses = [step["loss"] for step in steps]
    figure("loss, first step", losses[0], "nats")
    figure("loss, last step", losses[-1], "nats")
    assert len(steps) == 30
    assert losses[-1] < losses[0] - 1.0
    kept = steps[10:]
    figure("step", 1e3 * statistics.median(step["seconds"] for step in kept), "ms")
    figure("MFU", statistics.median(step["mfu_ratio"] for step in kept), "ratio")
    figure("matmul beside the training", kept[-1]["achievable_flops"] / 1e12, "TFLOP/s")
    figure("peak of the allocator", kept[-1]["memory_bytes"] / 2**20, "MiB")
    assert all(0 < step["mfu_ratio"] < 1 for step in kept)
    assert ROOM * peak < kept[-1]["achievable_flops"] < 1.1 * peak
    assert 2**20 < kept[-1]["memory_bytes"] < memory
    evaluation = done["stages"]["evaluate"]["outcome"]
    figure("validation loss", evaluation["metrics"]["val_loss"], "nats")
    assert evaluation["passed"] is True
    (evaluated,) = records(cli, "r", "start", "evaluate")
    assert evaluated["device_type"] == "cuda"
    assert cli.json("models", "show", "stdlib-lm", "candidate")["step"] == 30
    assert cli.json("checkpoints", "verify", "r")["sound"]
    assert "model.safetensors" in cli.json("checkpoints", "export", "r", "--out", "model")["files"]


def found_by_doctor(cli: Cli) -> str:
    """By what stands in /dev: a machine that shows nothing there is told by CUDA_VISIBLE_DEVICES."""
    visible = cli.env.pop("CUDA_VISIBLE_DEVICES")
    findings = cli.json("doctor", code=None)["findings"]
    cli.env["CUDA_VISIBLE_DEVICES"] = visible
    return str(next(one["detail"] for one in findings if one["name"] == "gpus"))


def test_after_kill_9_the_losses_are_those_of_a_run_that_nobody_killed(cli: Cli):
    """To the bit, from the checkpoint on; the rank is killed after step 17, and starts once more. Its samples
    are read by forks of it, made when it has the device."""
    own = {"entry": "kit.own_data:texts", "collate": "kit.own_data:padded"}
    data = {**own, "batch_size": 8, "workers": 2}
    common = {"steps": 25, "deterministic": True, "checkpoint": {"every": "5 steps"}, "data": data}
    write_training(cli, resources(), **common)
    cli("run", "pipeline.yaml", "--run-id", "whole")
    kill = {"entry": "kit.heard:Kills", "args": {"rank": 0, "step": 17}, "ranks": "all"}
    write_training(cli, resources(), **common, max_restarts=1, callbacks=[kill])
    began = time.monotonic()
    done = cli.json("run", "pipeline.yaml", "--run-id", "killed")
    figure("run with one kill", time.monotonic() - began, "s")
    assert done["state"] == "done"
    starts = records(cli, "killed", "start")
    resumed = starts[-1]["start_step"]
    figure("killed after step 17, goes on behind step", resumed)
    assert len(starts) == 2
    assert resumed in (10, 15)  # the save of step 15 may have been under way
    whole = {step["step"]: step["loss"] for step in records(cli, "whole", "step")}
    killed = records(cli, "killed", "step")
    again = {step["step"]: step["loss"] for step in killed[-(25 - resumed) :]}
    assert sorted(again) == list(range(resumed + 1, 26))
    apart = [number for number in again if again[number] != whole[number]]
    figure("steps after the kill", len(again))
    figure("of these with another loss", len(apart))
    assert not apart, {number: (again[number], whole[number]) for number in apart}
    assert {step["step"] for step in killed} == set(whole)


def scraped(port: int) -> dict[str, float]:
    """The samples that a rank serves, by name and labels of their own."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            reason = labels.partition('reason="')[2].partition('"')[0]
            samples[f"{name} {reason}".strip()] = float(value)
    return samples


def test_a_run_is_scraped_and_profiled_as_it_goes(cli: Cli):
    write_training(cli, resources(), steps=1_000_000)
    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    try:
        until(lambda: len(records(cli, "r", "step")) > 30 or running.poll() is not None, "30 steps", SECONDS)
        assert running.poll() is None, running.communicate()
        (start,) = records(cli, "r", "start")
        _check_metrics(scraped(start["metrics_port"]))
        began = time.monotonic()
        cli("profile", "r", "--steps", "3", "--memory", "--out", "traces", "--timeout", "120")
        figure("profile of 3 steps with memory, asked to told", time.monotonic() - began, "s")
    finally:
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=SECONDS)
    assert running.returncode == EXIT_CODES["interrupted"], err
    _check_profile(cli)


def _check_metrics(samples: dict[str, float]) -> None:
    gpu = {name: value for name, value in samples.items() if name.startswith("mlpipe_gpu_")}
    for name, value in sorted(gpu.items()):
        figure(name.replace(" ", ":"), value)
    assert find_gpu(str(torch.cuda.get_device_properties(0).uuid)) is not None, "NVML does not know the GPU"
    assert 0 <= gpu["mlpipe_gpu_utilization_ratio"] <= 1
    assert 2**28 < gpu["mlpipe_gpu_memory_used_bytes"] < 1.02 * GPUS[gpu_class()].memory_bytes
    assert 10 < gpu["mlpipe_gpu_power_watts"] < 1200
    assert 10 < gpu["mlpipe_gpu_temperature_celsius"] < 110
    assert gpu.get("mlpipe_gpu_ecc_errors", 0) == 0
    throttled = {name: value for name, value in gpu.items() if name.startswith("mlpipe_gpu_throttled")}
    assert len(throttled) == 5
    assert set(throttled.values()) <= {0.0, 1.0}
    assert gpu.get("mlpipe_gpu_xid_errors_total", 0) == 0
    assert samples["mlpipe_train_peak_flops"] == GPUS[gpu_class()].bf16
    assert samples["mlpipe_train_gpu_memory_bytes"] > 2**20
    assert 0 < samples["mlpipe_train_mfu_ratio"] < 1


def _check_profile(cli: Cli) -> None:
    files = sorted(path.relative_to(cli.store) for path in cli.store.rglob("*") if "profile" in str(path))
    (trace,) = [path for path in files if path.name.endswith(".json.gz")]
    document = json.loads(gzip.decompress((cli.store / trace).read_bytes()))
    kinds = {str(one.get("cat")) for one in document["traceEvents"]}
    figure("kinds of the trace's events", ",".join(sorted(kinds)))
    assert "kernel" in kinds, "CUPTI gave no kernels"
    memory = [path for path in files if path.suffix == ".pickle"]
    assert len(memory) == 1, files
    figure("memory snapshot", (cli.store / memory[0]).stat().st_size / 2**10, "KiB")
    told = cli.json("profile", "r")
    (rank,) = told["ranks"]
    assert rank["device"] == "cuda"
    assert rank["num_steps"] == 3
    seconds, idle = rank["seconds"], rank["idle"]
    figure("profiled step", 1e3 * seconds, "ms")
    figure("idle share", sum(idle.values()) / seconds, "ratio")
    for cause, part in idle.items():
        figure(f"idle share, {cause}", part / seconds, "ratio")
    figure("launch-bound share", rank["tiny_seconds"] / seconds, "ratio")
    for kind, part in rank["classes"].items():
        figure(f"kernels, {kind}", 1e3 * part, "ms")
    assert rank["busy"] > 0
    assert sum(idle.values()) + rank["busy"] == pytest.approx(seconds)
    assert all(0 <= part <= seconds for part in idle.values())
    assert 0 <= rank["tiny_seconds"] <= seconds
    assert {"matmul", "attention", "optimizer"} <= rank["classes"].keys()
    forward = {name: one["forward"] for name, one in rank["layers"].items()}
    assert forward["layers.0.mlp.up_proj"] > 0, forward
    assert rank["layers"]["layers.0.mlp.up_proj"]["backward"] > 0


def test_a_sound_gpu_passes_the_preflight_within_a_minute(cli: Cli):
    write_training(cli, resources(preflight={"slow_ratio": ROOM, "disk": "1 MiB"}), steps=2)
    began = time.monotonic()
    cli("run", "pipeline.yaml", "--run-id", "r")
    whole = time.monotonic() - began
    checked = read_checked(FolderStore(cli.store), "runs/r/stages/train/attempt-1")
    assert checked is not None
    figure("preflight", checked.seconds, "s")
    figure("run of two steps with a preflight", whole, "s")
    assert checked.words == []
    assert checked.seconds < 60
    (figures,) = checked.nodes.values()
    for name, value in figures.items():
        figure(f"preflight: {name}", value)
    card = GPUS[gpu_class()]
    assert card.bf16 is not None
    assert ROOM * card.bf16 < figures["flops"] < 1.1 * card.bf16
    limit = card.memory_bytes_per_second
    assert ROOM * limit < figures["memory_bytes_per_second"] < 1.1 * limit
    assert machine.gpus(1) == []
    errors = machine._watch_errors([torch.device("cuda", 0)])
    assert errors() == []


def test_a_calibrated_plan_knows_seconds_and_memory_of_a_step(cli: Cli):
    model = {"preset": "llama-25m", "seq_len": 1024}
    data = {"tokens": str(cli.folder / "tokens"), "batch_size": 16}
    write_training(cli, resources(), model=model, data=data, steps=30)
    began = time.monotonic()
    cli("calibrate", "--ranks", "1", "--force", "--out", "hardware.json")
    figure("calibrate", time.monotonic() - began, "s")
    measured = json.loads((cli.folder / "hardware.json").read_text())
    assert measured["device"] == "cuda"
    (ranks,) = measured["ranks"].values()
    for name, rates in ranks["kernels"].items():
        figure(f"calibrate: matmul {name}", rates["peak_flops"] / 1e12, "TFLOP/s")
        figure(f"calibrate: attention {name}", rates["attention_flops"] / 1e12, "TFLOP/s")
    figure("calibrate: memory", ranks["memory_bytes_per_second"] / 1e9, "GB/s")
    figure("calibrate: one small kernel", 1e6 * ranks["kernel_seconds"], "us")
    card = GPUS[gpu_class()]
    assert card.bf16 is not None
    assert ranks["kernels"]["bf16"]["peak_flops"] < 1.1 * card.bf16
    assert ranks["memory_bytes_per_second"] < 1.1 * card.memory_bytes_per_second

    plain, calibrated = planned(cli), planned(cli, "--hardware", "hardware.json")
    cli("run", "pipeline.yaml", "--run-id", "r")
    steps = records(cli, "r", "step")[10:]
    seconds = sorted(step["seconds"] for step in steps)[len(steps) // 5]  # others only ever add
    held = max(step["memory_bytes"] for step in steps)
    figure("step, fastest fifth", 1e3 * seconds, "ms")
    figure("step, median", 1e3 * statistics.median(step["seconds"] for step in steps), "ms")
    for name, told in (("the catalogue", plain), ("calibrate", calibrated)):
        predicted = predicted_of(told)
        figure(f"step, predicted by {name}", 1e3 * predicted["step_seconds"], "ms")
        figure(f"step, predicted by {name} over measured", predicted["step_seconds"] / seconds, "ratio")
    cli("calibrate", "--out", "hardware.json", "--from-run", "r")
    (compared,) = json.loads((cli.folder / "hardware.json").read_text())["runs"]
    figure("memory, predicted with context", predicted_of(plain)["memory_bytes"] / 2**20, "MiB")
    figure("memory of the allocator, predicted", compared["predicted_memory_bytes"] / 2**20, "MiB")
    figure("memory of the allocator, measured", compared["measured_memory_bytes"] / 2**20, "MiB")
    ratio = compared["predicted_memory_bytes"] / compared["measured_memory_bytes"]
    figure("memory, predicted over measured", ratio, "ratio")
    assert compared["measured_memory_bytes"] == held
    assert 0.85 < ratio < 1.15
    slow = sorted(step["seconds"] for step in steps)[-1 - len(steps) // 5]
    assert (
        0.5 * seconds < predicted_of(calibrated)["step_seconds"] < 2.0 * slow
    )  # others were there then, too


def predicted_of(told: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = told["plan"]["train"]["predicted"]
    return found


def test_more_than_the_gpu_has_is_one_clear_error(cli: Cli):
    """Of a plan that was told a lie about the memory: its first tensor is larger than any GPU, so that others
    on this one miss nothing."""
    model = {
        "preset": "llama-1m", "seq_len": 2048, "max_seq_len": 2048,
        "dim": 4096, "num_layers": 1, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 512,
    }  # fmt: skip
    data = {"tokens": str(cli.folder / "tokens"), "batch_size": 8192, "micro_batch": 8192}
    lie = {"memory": "20 TiB"}
    write_training(cli, resources(device=lie), model=model, data=data, steps=2, max_restarts=1)
    began = time.monotonic()
    process = cli("run", "pipeline.yaml", "--run-id", "r", code=EXIT_CODES["input"])
    figure("out of memory, run", time.monotonic() - began, "s")
    words = process.stdout + process.stderr
    print(words)
    assert "micro-batch size 8192 needs more than there is of 20.0 TiB" in words
    assert "write activation_checkpointing: full, or use more or larger devices" in words
    assert "Traceback" not in words
    outcome = json.loads((cli.store / "runs/r/stages/train/attempt-1/outcome.json").read_text())
    assert (outcome["kind"], outcome["restarts"]) == ("input", 0)
