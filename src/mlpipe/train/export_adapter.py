"""Adapters of a checkpoint in peft's format: adapter_config.json and adapter_model.safetensors, which
`peft.PeftModel.from_pretrained` puts beside the weights that the training started from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlpipe._core.adapters import MAGNITUDE, is_adapter
from mlpipe._core.errors import TrainError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapter_names(exported: Iterable[str], where: str) -> dict[str, str]:
    """What peft calls each of the names that an export of the whole model would have. Raises TrainError."""
    names = {
        name: f"base_model.model.{name}{'' if name.endswith(MAGNITUDE) else '.weight'}"
        for name in exported
        if is_adapter(name)
    }
    if not names:
        raise TrainError("the checkpoint lacks the adapters that it speaks of", where=where, kind="input")
    return names


def adapter_config(
    scalars: dict[str, Any], exported: Iterable[str], *, for_transformers: bool
) -> dict[str, Any]:
    """`scalars`: of the checkpoint. With `targets: auto` layers of mlpipe's own models, which `transformers`
    has as well, are named by their last word, all others each by its whole name."""
    adapter = scalars["adapter"]
    layers = sorted({name.rpartition(".")[0] for name in exported})
    if for_transformers and not adapter["targets"]:
        layers = sorted({name.rpartition(".")[2] for name in layers})
    base = (scalars.get("init_from") or {}).get("found") or {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if for_transformers else None,
        "base_model_name_or_path": base.get("words"),
        "r": adapter["rank"],
        "lora_alpha": adapter["alpha"],
        "lora_dropout": adapter["dropout"],
        "use_rslora": adapter["rslora"],
        "use_dora": adapter.get("dora", False),
        "target_modules": layers,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
