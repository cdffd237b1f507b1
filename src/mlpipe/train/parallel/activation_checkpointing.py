"""Activation checkpointing: trade the memory of activations for computing them again in the backward.

What is kept says `plan/recomputation.py`. Names of parameters do not change.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mlpipe.plan.recomputation import keeps_matmul
from mlpipe.plan.work import TrainPlan
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World

_PART_OF_SUM = torch.ops.aten.mm.dtype  # with an output wider than its inputs
_MATMULS = {
    torch.ops.aten.mm.default,
    _PART_OF_SUM,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
# FSDP names what it does for the experts inside of a block, which it does not do twice alike.
SAC_IGNORED_OPS |= {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
# Of parallel/context_attention.py and models/documents.py, which are imported only where they are needed.
_ATTENTION_BY_NAME = {"mlpipe::context_attention", "torch_attn::_varlen_attn"}


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """On each block."""
    if plan.activation_checkpointing != "none":
        checkpoint_activations(model.built.blocks, plan.activation_checkpointing)


def checkpoint_activations(blocks: list[nn.Module], mode: Literal["selective", "full"]) -> None:
    """Changes the forward of each block, in place."""
    forward = _full if mode == "full" else _selective
    for block in blocks:
        # On the instance: the module's class, name and parameters stay as the user wrote them. The same
        # method for all blocks: dynamo compiles it once and serves them all, where it skips a partial of
        # `checkpoint` without a word.
        block.__dict__["_uncheckpointed"] = block.__dict__.get("forward")
        block.forward = MethodType(forward, block)  # type: ignore[method-assign]


def compile_what_is_recomputed(block: nn.Module) -> None:
    """Of a block with a checkpoint, which itself stays as it is: for one that is no whole graph."""
    own = block.__dict__["_uncheckpointed"] or MethodType(type(block).forward, block)
    block.__dict__["_uncheckpointed"] = torch.compile(own)


def _full(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _uncached(args, kwargs)
    return checkpoint(_forward, self, *args, use_reentrant=False, **kwargs)


def _selective(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _uncached(args, kwargs)
    return checkpoint(_forward, self, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)


def _uncached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Without what a class of `transformers` collects keys and values in for further tokens: a block that is
    computed again would add to it twice. As its own checkpointing does, but where text is generated."""
    if not torch.is_grad_enabled():
        return args, kwargs
    return tuple(map(_no_cache, args)), {key: _no_cache(value) for key, value in kwargs.items()}


def _no_cache(argument: Any) -> Any:
    return None if hasattr(argument, "get_seq_length") else argument


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The block's own: of its class, unless somebody gave this instance another."""
    own = block.__dict__["_uncheckpointed"]
    return type(block).forward(block, *args, **kwargs) if own is None else own(*args, **kwargs)


def _selective_contexts() -> Any:
    num_matmuls = {"forward": 0, "recompute": 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _ATTENTION or op.name() in _ATTENTION_BY_NAME:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATMULS:
            phase = "recompute" if ctx.is_recompute else "forward"
            index = num_matmuls[phase]
            num_matmuls[phase] += 1
            if keeps_matmul(index) and op != _PART_OF_SUM:  # which is wide, and nothing reads it
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
