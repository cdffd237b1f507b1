"""Runs that others measured (`published.json`), as the planner prices them from the hardware catalogue. Split
by source into those that the time model was learned from and those that it is tested by."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlpipe._core.presets import PRESETS, LlamaConfig, MoeConfig
from mlpipe.plan.axes import active
from mlpipe.plan.axes.axis import Layout, Passes
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import Hardware, detect_hardware
from mlpipe.plan.kernels import Kernels, copy_seconds
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.pricing import Choices, Pricer, Training
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.experts import Experts
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.wire import Wire
from mlpipe.spec.model import Resources

PUBLISHED = Path(__file__).with_name("published.json")
_BF16_FLOPS = 989e12  # of which nanotron counts `mfu_percent`
_ENDLESS = 10**15
# An H100's best bf16 matmul over its best fp8 one: 794 and 1,403 TFLOP/s (stas00/ml-engineering,
# compute/accelerator/README.md).
_FP8_RATIO = 794 / 1402.6
_SHOWN_TP = 0.57  # as much as made torchtitan's two runs with asynchronous tensor parallelism faster


def published() -> list[dict[str, Any]]:
    return [predict_published(row) for row in json.loads(PUBLISHED.read_text())["rows"]]


def predict_published(row: dict[str, Any]) -> dict[str, Any]:
    """A row's tokens per second and device, and GiB, from the catalogue and what the source says of the
    machines (`device`)."""
    shape = shape_of(row)
    found = priced(row, shape)
    assert found.tokens_per_second is not None
    assert found.memory is not None
    rate, measured = found.tokens_per_second / row["devices"], measured_rate(row, shape)
    out = {
        **{key: row[key] for key in ("source", "name", "set")},
        "model_parallel": any(row["mesh"].get(axis, 1) > 1 for axis in ("tp", "cp", "pp", "ep")),
        "work": ", ".join([*row["name"].split(", ")[:2], f"{row['seq_len']} tokens"]),
        "predicted_tokens_per_second": rate,
        "measured_tokens_per_second": measured,
        "seconds_error": measured / rate - 1,
    }
    if row.get("memory_gib"):
        gib = found.memory.total / 2**30
        out |= {
            "predicted_gib": gib,
            "measured_gib": row["memory_gib"],
            "memory_error": gib / row["memory_gib"] - 1,
        }
    return out


class _Fp8(Dense):
    """The matmuls of its blocks are in fp8, which is cast from and to bf16; head and attention are not."""

    def _matmuls(self, step: StepShape, kernels: Kernels) -> list[float]:
        fast = copy(kernels)
        fast.peak /= _FP8_RATIO
        return super()._matmuls(step, fast)


class _Bf16(Dense):
    """Weights lie in bf16, and nothing casts them."""

    CAST = 0


class _Bf16Fp8(_Bf16, _Fp8):
    pass


class _ExpertsFp8(_Bf16Fp8, Experts):
    pass


@dataclass(frozen=True)
class _Latent(MoeConfig):
    """DeepSeek-V3's attention (its report, section 4.2): 1,536 channels of queries and 512 of keys and
    values, from which come, for each head, 128 of each and 64 with positions; of `head_channels` the mean of
    keys and values."""

    def _latent(self) -> list[tuple[int, int]]:
        dim, heads = self.dim, self.num_heads
        queries = [(dim, 1536), (1536, heads * (128 + 64))]
        return [*queries, (dim, 512 + 64), (512, heads * 2 * 128), (heads * 128, dim)]

    def matmuls(self) -> list[tuple[int, int]]:
        return [*self._latent(), *self.ffn_matmuls()]

    def num_layer_params(self) -> int:
        return sum(inner * outer for inner, outer in self._latent()) + self.num_ffn_params() + 2 * self.dim


def shape_of(row: dict[str, Any]) -> Dense:
    if "num_experts" in row.get("config", {}):
        return _ExpertsFp8((_Latent if row.get("attention") == "latent" else MoeConfig)(**row["config"]))
    shapes = (_Bf16, _Bf16Fp8) if "adding" in row else (Dense, _Fp8)
    shape = shapes[row.get("matmuls") == "fp8"]
    return shape(LlamaConfig(**row["config"]) if "config" in row else PRESETS[row["preset"]])


def measured_rate(row: dict[str, Any], shape: Dense) -> float:
    """Tokens per second and device. Sources that print FLOP/s count them as `plan/flops.py` does."""
    if "tokens_per_second" in row:
        return float(row["tokens_per_second"])
    flops = row["teraflops"] * 1e12 if "teraflops" in row else row["mfu_percent"] / 100 * _BF16_FLOPS
    return float(flops) / shape.flops_per_token(row["seq_len"])


def hardware_of(row: dict[str, Any]) -> Hardware:
    per_node = min(8, row["devices"])
    spec = {
        "gpus_per_node": per_node,
        "gpu": row["gpu"],
        "nodes": row["devices"] // per_node,
        **({"device": row["device"]} if row.get("device") else {}),
    }
    return detect_hardware(Resources.model_validate(spec))


class _Bf16Gradients(Wire):
    """Gradients are sent as they are computed, not in fp32."""

    def reduce_scatter(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        return super().reduce_scatter(num_bytes / 2, num_ranks, stride)


class _Others(Pricer):
    """What others do that mlpipe does not. `tp_shown`: of what tensor parallelism sends, the share that is
    not hidden behind pieces of the matrix products; `pp_shown`: of a pipeline's idle time, with more stages a
    rank; `ep_shown`: of what experts are sent. `adding`: where weights lie in bf16, the bytes a parameter
    that adding up gradients moves, in each micro-batch and in each but the first."""

    tp_shown = pp_shown = ep_shown = 1.0
    adding: tuple[int, int] | None = None
    wire = Wire

    def gradient_seconds(self, step: StepShape, num_params: float, layout: Layout) -> float:
        if self.adding is None:
            return super().gradient_seconds(step, num_params, layout)
        each, again = self.adding
        num_bytes = each * step.accumulation + again * (step.accumulation - 1)
        return copy_seconds(num_bytes * num_params, self.hardware.speed)

    def exposed_seconds(self, step_passes: Passes, layout: Layout, mesh: Mesh) -> float:
        shown, wire = (
            {"tp": self.tp_shown, "pp": self.pp_shown, "ep": self.ep_shown},
            self.wire(self.hardware),
        )
        return sum(
            shown.get(axis.__name__.rpartition(".")[2], 1.0) * axis.exposed_seconds(step_passes, wire, layout)
            for axis in active(mesh)
        )


def priced(row: dict[str, Any], shape: Dense) -> Candidate:
    """Where a source does not print the micro-batch (`samples` of a data rank alone), the fastest of 1, 2 and
    4 that fits, as the planner would choose it. `reduces: last`: it says that gradients are sent once a step,
    so they did fit."""
    mesh, hardware = Mesh(**row["mesh"]), hardware_of(row)
    assert mesh.world_size == row["devices"], row["name"]
    samples = row.get("samples") or row["local_batch"] * row.get("accumulation", 1)
    if row.get("reduces") == "last":
        hardware = hardware._replace(memory_bytes=_ENDLESS)
    training = Training(
        global_batch=samples * mesh.num_data_ranks,
        seq_len=row["seq_len"],
        steps=1000,
        compiled=row["compile"],
        optimizer=OptimizerCost(8, "adamw"),
        save_steps=1000,
        save_seconds=None,
        schedule=row.get("schedule", "1f1b"),
    )
    pricer = _Others(shape, training, hardware)
    if row.get("hides_tp"):
        pricer.tp_shown = _SHOWN_TP
    if row.get("gradients") == "bf16":
        pricer.wire = _Bf16Gradients
    if row.get("hides_ep"):
        pricer.ep_shown = 0.0
    if "adding" in row:
        pricer.adding = row["adding"]
    pricer.pp_shown = 1 / row.get("stages_per_rank", 1)
    sizes = [row["local_batch"]] if "local_batch" in row else [n for n in (1, 2, 4) if samples % n == 0]
    choices = [Choices(size, row["checkpointing"], "bf16") for size in sizes]
    ways = [pricer.candidate(row["strategy"], mesh, each, asked=True) for each in choices]
    room = hardware_of(row).memory_bytes
    fitting = [way for way in ways if way.memory is not None and way.memory.total <= room]
    return min(fitting or ways[:1], key=lambda way: way.step_seconds)


def ranking(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of the works that were measured in several ways on as many devices: the rate of the way that is
    predicted to be the fastest over that of the fastest."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["work"]].append(row)
    found = {}
    for work, ways in groups.items():
        if len(ways) > 1:
            best = max(ways, key=lambda way: way["predicted_tokens_per_second"])
            fastest = max(way["measured_tokens_per_second"] for way in ways)
            found[work] = best["measured_tokens_per_second"] / fastest
    return found


def bias(rows: list[dict[str, Any]]) -> float:
    """Median of the signed errors of the seconds."""
    return statistics.median(row["seconds_error"] for row in rows)


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
