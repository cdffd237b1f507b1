"""A Llama-style model in plain torch: RMSNorm, rotate-half RoPE, SwiGLU, grouped-query attention.

It knows nothing of meshes, strategies or mlpipe's loop. Parameters are named as in `transformers`' Llama,
less its leading "model.", so that an export is a rename. Under `torch.autocast` the matmuls run in bf16;
norms, rotations and the residual stream stay in fp32. Who casts the inputs of a block (FSDP2's
`cast_forward_inputs`) casts the rotary tables too: leave it off.

B batch · T tokens · D dim · H query heads · K key/value heads · C channels of a head · F ffn_dim · V vocab
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe._core.presets import LlamaConfig
from mlpipe.train.models.attention import causal_attention
from mlpipe.train.models.documents import Documents


class RMSNorm(nn.Module):
    """Normalises in fp32 and returns what the next matmul reads: under autocast its dtype, so that one
    cast serves all the projections behind it."""

    computes_in_fp32 = True  # who casts weights leaves these

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # which knows no meta
            return y.to(torch.get_autocast_dtype(kind))
        return y.to(x.dtype)


def rope_tables(config: LlamaConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position times frequency, each (max_seq_len, 1, C/2) in fp32."""
    if device.type == "meta":  # to compute nothing, torch imports sympy: 0.6 CPU seconds a rank
        shape = (config.max_seq_len, 1, config.head_dim // 2)
        return torch.empty(shape, device=device), torch.empty(shape, device=device)
    channels = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequencies = _stretched(1.0 / config.rope_theta ** (channels / config.head_dim), config)
    positions = torch.arange(config.max_seq_len, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)[:, None, :]
    return angles.cos(), angles.sin()


def _stretched(frequencies: Tensor, config: LlamaConfig) -> Tensor:
    """For more positions than the model was trained on first: all alike, or as Llama 3.1 has it (Dubey et
    al., The Llama 3 Herd of Models, 2024; `_compute_llama3_parameters` of `transformers`)."""
    if config.rope_scaling == "none":
        return frequencies
    slow = frequencies / config.rope_factor
    if config.rope_scaling == "linear":
        return slow
    turns = config.rope_original * frequencies / (2 * math.pi)
    share = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0.0, 1.0)
    return (1.0 - share) * slow + share * frequencies


def rotate(x_BTHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channel i against channel i + C/2 ("rotate half"), in fp32; dtype and shape of the input."""
    left, right = x_BTHC.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_BTHC.dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        # where the tokens lie on several ranks, what brings these together
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        self.q_proj = nn.Linear(config.dim, config.q_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, config.kv_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, config.kv_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.q_dim, config.dim, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC, k_BTKC = self.q_proj(x_BTD).view(heads), self.k_proj(x_BTD).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        q_BTHC, k_BTKC = rotate(q_BTHC, cos, sin), rotate(k_BTKC, cos, sin)
        v_BTKC = self.v_proj(x_BTD).view(heads)
        attend = self.attend if documents is None else documents.attend
        y_BHTC = attend(q_BTHC.transpose(1, 2), k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2))
        return self.o_proj(y_BHTC.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, mlp: type[nn.Module] = MLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = mlp(config)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos, sin, documents)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Part(NamedTuple):
    """Neighbouring blocks; the first part has the embedding, the last one norm and head."""

    is_first: bool
    is_last: bool
    blocks: Iterable[nn.Module]


class Llama(nn.Module):
    """`layers` is the list of blocks, `mlp` what makes their feed-forwards. With a tied head there is no
    `lm_head` module, so that nothing has to keep two names on one storage when the model leaves the meta
    device or is sharded."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: LlamaConfig, mlp: type[nn.Module] = MLP) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, mlp) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        cos, sin = rope_tables(config, self.embed_tokens.weight.device)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def init_weights(self) -> None:
        """Every parameter and buffer, as after leaving the meta device. The standard deviation is dim**-0.5:
        GPT-2's constant 0.02 is that of dim 2500, and cost llama-4m 0.2 nats after 80 steps. Projections that
        write into the residual stream start smaller by sqrt(2 * layers), so that its variance does not grow.
        """
        std = self.config.dim**-0.5
        residual_std = std / (2 * self.config.num_layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                writes_residual = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=residual_std if writes_residual else std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        cos, sin = rope_tables(self.config, self.rope_cos.device)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)

    def rotations(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Of the tokens' positions, cosines and sines: the first ones, where a rank has whole sequences."""
        if num_tokens > self.config.max_seq_len:
            raise ValueError(f"{num_tokens} tokens, but the model has {self.config.max_seq_len} positions")
        return self.rope_cos[:num_tokens], self.rope_sin[:num_tokens]

    def rotations_of(self, documents: Documents) -> tuple[Tensor, Tensor]:
        """Where each sample of a row begins anew."""
        return self.rope_cos[documents.positions_T], self.rope_sin[documents.positions_T]

    def forward(
        self,
        inputs: Tensor,
        part: Part | None = None,
        num_tokens: int | None = None,
        document_lengths: Tensor | None = None,
        head: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Any:
        """Token ids (B, T; int64) -> logits (B, T, V). T is at most `max_seq_len`. A `part` that is not the
        first takes the output of the part before (B, T, D), and one that is not the last gives such.
        `num_tokens`: T, for whoever has the residual stream in another shape. `document_lengths`: of several
        samples in one row (B = 1), of at most `max_seq_len` tokens each. `head`: what to give instead of
        logits, of the last norm's output and the head's weights (V, D)."""
        part = part or Part(True, True, self.layers)
        num_tokens = num_tokens or inputs.shape[1]
        documents = None if document_lengths is None else Documents(document_lengths, num_tokens)
        cos, sin = self.rotations(num_tokens) if documents is None else self.rotations_of(documents)
        x_BTD = self.embed_tokens(inputs) if part.is_first else inputs
        for block in part.blocks:
            x_BTD = block(x_BTD, cos, sin) if documents is None else block(x_BTD, cos, sin, documents)
        if not part.is_last:
            return x_BTD
        x_BTD = self.norm(x_BTD)
        if head is not None:
            return head(x_BTD, (self.lm_head or self.embed_tokens).weight)
        if self.lm_head is None:
            return F.linear(x_BTD, self.embed_tokens.weight)
        return self.lm_head(x_BTD)


def build_model(**fields: Any) -> Llama:
    """The fields of `LlamaConfig`. Raises ValueError when they do not fit together."""
    config = LlamaConfig(**fields)
    if conflicts := config.conflicts():
        raise ValueError("; ".join(conflict.message for conflict in conflicts))
    return Llama(config)
