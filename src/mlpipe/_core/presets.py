"""Shapes of the Llama-style presets, from 1M to 70B parameters. No torch: the planner counts with them,
`train/models/llama.py` builds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mlpipe._core.feasibility import Infeasible, indivisible

LLAMA = "mlpipe.train.models.llama:build_model"  # the entry of mlpipe's own model


class Named(NamedTuple):
    """A parameter. `block`: the number of the block that it is in, if it is in one."""

    name: str
    rows: int
    columns: int
    block: int | None

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class LlamaConfig:
    """RMSNorm, rotary positions, SwiGLU, grouped-query attention; no biases.

    `num_kv_heads` divides `num_heads` divides `dim`. `tied`: the head is the input embedding's matrix.
    `max_seq_len`: longest sequence the positions were meant for.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    max_seq_len: int
    rope_theta: float
    norm_eps: float
    tied: bool

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.dim // self.num_heads

    def num_layer_params(self) -> int:
        """Of one block: q and o, k and v, gate/up/down, two norms."""
        q_and_o = 2 * self.dim * self.dim
        k_and_v = 2 * self.dim * self.num_kv_heads * self.head_dim
        return q_and_o + k_and_v + 3 * self.dim * self.ffn_dim + 2 * self.dim

    def num_embedding_params(self) -> int:
        """Of the input embedding (which is also the head when `tied`)."""
        return self.vocab_size * self.dim

    def num_params(self) -> int:
        """Of the whole model; a tied matrix counts once."""
        embeddings = self.num_embedding_params() * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.num_layer_params() + self.dim

    def tensors(self) -> list[tuple[int, int, int]]:
        """Rows, parameters a row, and how many such tensors there are."""
        outside = (self.vocab_size, self.dim, 1 if self.tied else 2)
        return [outside, *self.block_matrices(), (self.dim, 1, 2 * self.num_layers + 1)]

    def named_tensors(self) -> Iterator[Named]:
        """What `named_parameters()` gives of `train/models/llama.py`, in its order."""
        dim, kv_dim, ffn_dim = self.dim, self.num_kv_heads * self.head_dim, self.ffn_dim
        of_block = (
            ("input_layernorm", dim, 1),
            ("self_attn.q_proj", dim, dim),
            ("self_attn.k_proj", kv_dim, dim),
            ("self_attn.v_proj", kv_dim, dim),
            ("self_attn.o_proj", dim, dim),
            ("post_attention_layernorm", dim, 1),
            ("mlp.gate_proj", ffn_dim, dim),
            ("mlp.up_proj", ffn_dim, dim),
            ("mlp.down_proj", dim, ffn_dim),
        )
        yield Named("embed_tokens.weight", self.vocab_size, dim, None)
        for block in range(self.num_layers):
            for name, rows, columns in of_block:
                yield Named(f"layers.{block}.{name}.weight", rows, columns, block)
        yield Named("norm.weight", dim, 1, None)
        if not self.tied:
            yield Named("lm_head.weight", self.vocab_size, dim, None)

    def block_matrices(self) -> list[tuple[int, int, int]]:
        """Of these the blocks' matrices."""
        kv_dim, layers = self.num_kv_heads * self.head_dim, self.num_layers
        return [
            (self.dim, self.dim, 2 * layers),
            (kv_dim, self.dim, 2 * layers),
            (self.ffn_dim, self.dim, 2 * layers),
            (self.dim, self.ffn_dim, layers),
        ]

    def matmuls(self) -> list[tuple[int, int]]:
        """Channels in and out of a block's: q, k, v, o, gate, up, down."""
        dim, kv_dim, ffn_dim = self.dim, self.num_kv_heads * self.head_dim, self.ffn_dim
        return [(dim, dim), *[(dim, kv_dim)] * 2, (dim, dim), *[(dim, ffn_dim)] * 2, (ffn_dim, dim)]

    def conflicts(self) -> list[Infeasible]:
        """Why these numbers make no model; empty if they do."""
        heads, kv_heads = ("num_heads", self.num_heads), ("num_kv_heads", self.num_kv_heads)
        conflicts = [indivisible(heads, ("dim", self.dim)), indivisible(kv_heads, heads)]
        if conflicts[0] is None and self.head_dim % 2:
            odd = f"dim/num_heads={self.head_dim} is odd; rotary positions turn pairs"
            conflicts.append(Infeasible(odd, "choose num_heads so that dim is an even multiple of it"))
        return [conflict for conflict in conflicts if conflict is not None]


def _llama(
    vocab_size: int,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_dim: int,
    max_seq_len: int,
    *,
    rope_theta: float = 10_000.0,
    tied: bool = True,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size, dim, num_layers, num_heads, num_kv_heads, ffn_dim, max_seq_len, rope_theta, 1e-5, tied
    )


# The four smallest have a vocabulary that the quickstart's BPE fills; a corpus' own size replaces it anyway.
# From 1b on: config.json of meta-llama/Llama-3.2-1B, Llama-3.2-3B, Meta-Llama-3-8B and Meta-Llama-3-70B,
# with 8,192 positions, since 3.2's 131,072 need its scaled rotary frequencies.
PRESETS: dict[str, LlamaConfig] = {
    "llama-1m": _llama(2_048, 128, 4, 4, 2, 384, 1_024),
    "llama-4m": _llama(4_096, 256, 4, 4, 2, 704, 1_024),
    "llama-8m": _llama(4_096, 384, 4, 6, 2, 1_024, 1_024),
    "llama-25m": _llama(4_096, 512, 8, 8, 4, 1_408, 2_048),
    "llama-125m": _llama(50_304, 768, 12, 12, 12, 2_048, 2_048),
    "llama-350m": _llama(50_304, 1_024, 24, 16, 16, 2_816, 2_048),
    "llama-1b": _llama(128_256, 2_048, 16, 32, 8, 8_192, 8_192, rope_theta=500_000.0),
    "llama-3b": _llama(128_256, 3_072, 28, 24, 8, 8_192, 8_192, rope_theta=500_000.0),
    "llama-8b": _llama(128_256, 4_096, 32, 32, 8, 14_336, 8_192, rope_theta=500_000.0, tied=False),
    "llama-70b": _llama(128_256, 8_192, 80, 64, 8, 28_672, 8_192, rope_theta=500_000.0, tied=False),
}
