"""Activation checkpointing: trade the memory of activations for computing them again in the backward.

full: a block keeps only its input. selective: it also keeps the results of every second matmul and of
attention, the expensive ones (after torchtitan's per-op policy). Names of parameters do not change.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def checkpoint_activations(blocks: list[nn.Module], mode: Literal["selective", "full"]) -> None:
    for block in blocks:
        arguments: dict[str, Any] = {"use_reentrant": False}
        if mode == "selective":
            arguments["context_fn"] = _selective_contexts
        # On the instance: the module's class, name and parameters stay as the user wrote them.
        block.forward = partial(checkpoint, block.forward, **arguments)  # type: ignore[method-assign]


def _selective_contexts() -> Any:
    num_matmuls = {"forward": 0, "recompute": 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATMULS:
            phase = "recompute" if ctx.is_recompute else "forward"
            num_matmuls[phase] += 1
            if num_matmuls[phase] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
