"""Runs that others measured (`published.json`), from the hardware catalogue, without fitting to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlpipe._core.presets import PRESETS, LlamaConfig
from mlpipe.kinds.train.spec import Train
from mlpipe.plan.candidates import pick
from mlpipe.plan.hardware import detect_hardware
from mlpipe.plan.shapes.dense import Dense
from mlpipe.spec.model import Resources

PUBLISHED = Path(__file__).with_name("published.json")


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
    found, _ = pick(asked, Dense(config), hardware)
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
