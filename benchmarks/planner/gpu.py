"""A GPU at hand: is the predicted peak right, and is "fits" right at the edge?

Every configuration trains three steps in fresh processes under the real launcher, on one device.
`--device cpu` rehearses the same code on tiny models: a worker's share of memory stands for the card, the
refusal of the warm-up for running out of memory. Its figures mean nothing.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.planner.cpu import chosen, measured, pipeline_of, run_plan, write_tokens
from mlpipe.plan.hardware import detect_hardware
from mlpipe.plan.plan import Plan
from mlpipe.spec.model import Pipeline, Resources

_STEPS = 3
_CARD = {"seq_len": 2048, "vocab_size": 32_768, "precision": "bf16", "ranks": 1, "strategy": "single"}
_TINY = {"seq_len": 64, "vocab_size": 512, "precision": "fp32", "ranks": 1, "strategy": "single"}
_MODES = ("none", "selective", "full")
_MOST_BATCH = 4096


def case(device: str, preset: str, micro: int, mode: str, **more: Any) -> dict[str, Any]:
    plain = _CARD if device == "cuda" else _TINY
    return {
        **plain,
        "preset": preset,
        "batch": micro,
        "micro": micro,
        "checkpointing": mode,
        "shape": "",
        **more,
    }


def cases(device: str, quick: bool) -> list[dict[str, Any]]:
    if device == "cpu":
        return [case(device, "llama-1m", 2, "none")]
    sizes = [("llama-125m", 8), ("llama-350m", 4)] + ([] if quick else [("llama-1b", 4), ("llama-3b", 1)])
    found = [case(device, preset, micro, mode) for preset, micro in sizes for mode in _MODES]
    return [*found, case(device, "llama-350m", 4, "none", precision="fp32")]


def memory(device: str, quick: bool) -> list[dict[str, Any]]:
    """Peak of the allocator beside the predicted tensors and slack; on CPU of the process beside all."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="mlpipe-planner-") as name:
        folder = Path(name)
        write_tokens(folder / "tokens")
        for number, found in enumerate(cases(device, quick)):
            pipeline = on_device(pipeline_of(found, folder, _STEPS, None), device)
            best = chosen(pipeline)
            assert best.memory is not None
            told = best.memory.total - (best.memory.context if device == "cuda" else 0)
            row: dict[str, Any] = {"case": found, "predicted_bytes": told, "fits": best.fits}
            if best.fits:
                _, peak = measured(folder / "store", run_plan(pipeline, folder, f"case-{number}"))
                row |= {"measured_bytes": peak, "memory_error": told / peak - 1}
            rows.append(row)
            print(row, flush=True)
    return rows


def edges(device: str, quick: bool) -> list[dict[str, Any]]:
    """The largest microbatch that the planner says fits, found by bisection, must train; of the device it
    leaves `unused_ratio`."""
    rows = []
    preset = "llama-350m" if device == "cuda" else "llama-1m"
    with tempfile.TemporaryDirectory(prefix="mlpipe-planner-") as name:
        folder = Path(name)
        write_tokens(folder / "tokens")
        for mode in _MODES[:1] if quick else _MODES:

            def planned(micro: int, mode: str = mode) -> Pipeline:
                found = pipeline_of(case(device, preset, micro, mode), folder, _STEPS, None)
                return on_device(found, device)

            low, high = 1, 2
            while high < _MOST_BATCH and chosen(planned(high)).fits:
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if chosen(planned(middle)).fits else (low, middle)
            row: dict[str, Any] = {"preset": preset, "checkpointing": mode, "micro_batch": low}
            rows.append(row | outcome(planned(low), folder, f"edge-{mode}", device))
            print(rows[-1], flush=True)
    return rows


def outcome(pipeline: Pipeline, folder: Path, name: str, device: str) -> dict[str, Any]:
    best = chosen(pipeline)
    assert best.memory is not None
    try:
        plan: Plan = run_plan(pipeline, folder, name, may_fail=True)
    except subprocess.CalledProcessError as error:
        text = error.stdout + error.stderr
        if "out of memory" not in text and "warm-up" not in text:
            raise SystemExit(f"{name} failed:\n{text[-3000:]}") from None
        return {"out_of_memory": True, "unused_ratio": 0.0}
    _, peak = measured(folder / "store", plan)
    memory_bytes = plan.work.training.memory_bytes
    assert memory_bytes is not None
    used = peak + (best.memory.context if device == "cuda" else 0)
    return {"out_of_memory": False, "unused_ratio": max(0.0, 1 - used / memory_bytes)}


def on_device(pipeline: Pipeline, device: str) -> Pipeline:
    """With the stage on the card that is there, or on a worker of the size of a small one."""
    if device == "cpu":
        resources = Resources.model_validate({"cpus": 1, "memory": "1 GiB"})
    else:
        resources = Resources.model_validate({"gpus_per_node": 1, **card()})
    stage = pipeline.stage("train").model_copy(update={"resources": resources})
    return pipeline.model_copy(update={"stages": (stage,)})


def card() -> dict[str, Any]:
    """Of the catalogue the one that the driver names, with the memory that it reports."""
    from mlpipe.plan.hardware import GPUS

    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    name, mebibytes = done.stdout.splitlines()[0].rsplit(",", 1)
    parts = name.replace("-", " ").split()
    known = [key for key in GPUS if key.partition("-")[0] in parts]
    if not known:
        raise SystemExit(f"{name} is not in the catalogue: {', '.join(GPUS)}")
    device = {"memory": f"{int(mebibytes)} MiB"}
    found = {"gpu": known[0], "device": device}
    detect_hardware(Resources.model_validate({"gpus_per_node": 1, **found}))
    return found
