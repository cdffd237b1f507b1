"""Floating-point operations of a model's training step, and the convention they are counted by."""

from __future__ import annotations

CONVENTION = (
    "6 x (parameters - input embedding; a tied head counts) + 6 x layers x heads x (qk + v dims) x seq_len "
    "per token, no causal discount, recomputation not counted (torchtitan)"
)


def num_flops_per_token(counted_params: int, attention_channels: int, seq_len: int) -> float:
    """Forward and backward, for one token of a sequence of `seq_len`. `counted_params`: those that take part
    in a token's matmuls. `attention_channels`: layers x heads x (qk + v dims).
    Source: pytorch/torchtitan, `models/utils.py`, `get_dense_model_nparams_and_flops`."""
    return float(6 * counted_params + 6 * attention_channels * seq_len)
