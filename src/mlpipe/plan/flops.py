"""Floating-point operations of a model's training step, and the convention they are counted by."""

from __future__ import annotations

from mlpipe._core.presets import LlamaConfig

CONVENTION = (
    "6 x (parameters - input embedding; a tied head counts) + 6 x layers x heads x (qk + v dims) x seq_len "
    "per token, no causal discount, recomputation not counted (torchtitan)"
)


def counted_params(config: LlamaConfig) -> int:
    """Parameters that take part in matmuls: all but the input embedding, unless it is the head as well."""
    return config.num_params() - (0 if config.tied else config.num_embedding_params())


def num_flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Forward and backward, for one token of a sequence of `seq_len`.
    Source: pytorch/torchtitan, `models/utils.py`, `get_dense_model_nparams_and_flops`."""
    attention = 6 * config.num_layers * config.num_heads * 2 * config.head_dim * seq_len
    return float(6 * counted_params(config) + attention)
