"""Shapes of the Llama-style presets, from 1M to 70B parameters, and of those with a mixture of experts. No
torch: the planner counts with them, `train/models/` builds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

from mlpipe._core.feasibility import Infeasible, indivisible, too_many_experts

LLAMA = "mlpipe.train.models.llama:build_model"  # the entries of mlpipe's own models
MOE = "mlpipe.train.models.moe:build_model"
OWN = (LLAMA, MOE)
OF_EXPERTS = ("num_experts", "experts_per_token", "num_shared_experts", "balance_rate", "capacity_factor")


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

    All that follows is of open weights. `head_channels`: of a head, where they are not dim / num_heads.
    `qkv_bias`, `o_bias`, `mlp_bias`: whether these projections have one. `qk_norm`: RMSNorm of each head's
    query and key. `rope_scaling`: how the rotary frequencies are stretched, by `rope_factor`; `llama3` those
    below `rope_low` turns in `rope_original` positions, none above `rope_high`, and in between in part.
    """

    entry: ClassVar[str] = LLAMA  # what builds it, with these fields

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
    _: KW_ONLY
    head_channels: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 8192

    def args(self) -> dict[str, Any]:
        """What builds the model again; of open weights' fields those that say something."""
        silent = {one.name: one.default for one in fields(self) if one.kw_only}
        return {
            name: value for name, value in asdict(self).items() if name not in silent or value != silent[name]
        }

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.head_channels or self.dim // self.num_heads

    @property
    def q_dim(self) -> int:
        """Channels of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Channels of all key heads."""
        return self.num_kv_heads * self.head_dim

    def num_layer_params(self) -> int:
        """Of one block: q and o, k and v, feed-forward, norms and biases."""
        q_and_o = 2 * self.dim * self.q_dim
        k_and_v = 2 * self.dim * self.kv_dim
        return q_and_o + k_and_v + self.num_ffn_params() + sum(size for _, size in self.block_vectors())

    def block_vectors(self) -> list[tuple[str, int]]:
        """Norms and biases of a block, with their sizes."""
        vectors = [("input_layernorm.weight", self.dim), ("post_attention_layernorm.weight", self.dim)]
        if self.qkv_bias:
            sizes = (("q", self.q_dim), ("k", self.kv_dim), ("v", self.kv_dim))
            vectors += [(f"self_attn.{name}_proj.bias", size) for name, size in sizes]
        if self.o_bias:
            vectors.append(("self_attn.o_proj.bias", self.dim))
        if self.qk_norm:
            vectors += [(f"self_attn.{name}_norm.weight", self.head_dim) for name in ("q", "k")]
        if self.mlp_bias:
            sizes = (("gate", self.ffn_dim), ("up", self.ffn_dim), ("down", self.dim))
            vectors += [(f"mlp.{name}_proj.bias", size) for name, size in sizes]
        return vectors

    def num_ffn_params(self) -> int:
        """Of a block's feed-forward: gate, up, down."""
        return 3 * self.dim * self.ffn_dim

    def num_embedding_params(self) -> int:
        """Of the input embedding (which is also the head when `tied`)."""
        return self.vocab_size * self.dim

    def num_params(self) -> int:
        """Of the whole model; a tied matrix counts once."""
        embeddings = self.num_embedding_params() * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.num_layer_params() + self.dim

    def num_active_params(self) -> int:
        """Of these, those that take part in computing one token."""
        return self.num_params()

    def tensors(self) -> list[tuple[int, int, int]]:
        """Rows, parameters a row, and how many such tensors there are."""
        outside = (self.vocab_size, self.dim, 1 if self.tied else 2)
        vectors = Counter({self.dim: 1})  # the last norm
        for _, size in self.block_vectors():
            vectors[size] += self.num_layers
        return [outside, *self.block_matrices(), *((size, 1, number) for size, number in vectors.items())]

    def named_tensors(self) -> Iterator[Named]:
        """What `named_parameters()` gives of the model in `train/models/`, in its order."""
        dim, q_dim, kv_dim = self.dim, self.q_dim, self.kv_dim
        sizes = dict(self.block_vectors())

        def vectors(*names: str) -> list[tuple[str, int, int]]:
            return [(name, sizes[name], 1) for name in names if name in sizes]

        def matrix(name: str, rows: int, columns: int) -> list[tuple[str, int, int]]:
            return [(f"{name}.weight", rows, columns), *vectors(f"{name}.bias")]

        of_block = (
            *vectors("input_layernorm.weight"),
            *matrix("self_attn.q_proj", q_dim, dim),
            *matrix("self_attn.k_proj", kv_dim, dim),
            *matrix("self_attn.v_proj", kv_dim, dim),
            *matrix("self_attn.o_proj", dim, q_dim),
            *vectors("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
            *vectors("post_attention_layernorm.weight"),
            *(
                one
                for name, rows, columns in self.ffn_tensors()
                for one in (
                    (f"mlp.{name}", rows, columns),
                    *vectors(f"mlp.{name.removesuffix('.weight')}.bias"),
                )
            ),
        )
        yield Named("embed_tokens.weight", self.vocab_size, dim, None)
        for block in range(self.num_layers):
            for name, rows, columns in of_block:
                yield Named(f"layers.{block}.{name}", rows, columns, block)
        yield Named("norm.weight", dim, 1, None)
        if not self.tied:
            yield Named("lm_head.weight", self.vocab_size, dim, None)

    def ffn_tensors(self) -> list[tuple[str, int, int]]:
        """Of these a feed-forward's, with rows and columns."""
        return _projections(self.dim, self.ffn_dim)

    def matrices_in(self, name: str) -> int:
        """How many lie one below the other in the tensor of this name."""
        return 1

    def block_matrices(self) -> list[tuple[int, int, int]]:
        """Of these the blocks' matrices."""
        dim, q_dim, layers = self.dim, self.q_dim, self.num_layers
        q_and_o = Counter([(q_dim, dim), (dim, q_dim)])
        attention = [(rows, columns, number * layers) for (rows, columns), number in q_and_o.items()]
        return [*attention, (self.kv_dim, dim, 2 * layers), *self.ffn_matrices()]

    def ffn_matrices(self) -> list[tuple[int, int, int]]:
        """Of these the feed-forwards'."""
        numbers = Counter((rows, columns) for _, rows, columns in self.ffn_tensors())
        return [(rows, columns, number * self.num_layers) for (rows, columns), number in numbers.items()]

    def matmuls(self) -> list[tuple[int, int]]:
        """Channels in and out of a block's: q, k, v, o, and those of the feed-forward."""
        dim, q_dim = self.dim, self.q_dim
        return [(dim, q_dim), *[(dim, self.kv_dim)] * 2, (q_dim, dim), *self.ffn_matmuls()]

    def ffn_matmuls(self) -> list[tuple[int, int]]:
        """Of these the feed-forward's: gate, up, down."""
        return _swiglu(self.dim, self.ffn_dim)

    def conflicts(self) -> list[Infeasible]:
        """Why these numbers make no model; empty if they do."""
        heads, kv_heads = ("num_heads", self.num_heads), ("num_kv_heads", self.num_kv_heads)
        even = None if self.head_channels else indivisible(heads, ("dim", self.dim))
        conflicts = [even, indivisible(kv_heads, heads)]
        if even is None and self.head_dim % 2:
            odd = f"dim/num_heads={self.head_dim} is odd; rotary positions turn pairs"
            conflicts.append(Infeasible(odd, "choose num_heads so that dim is an even multiple of it"))
        return [conflict for conflict in conflicts if conflict is not None]


def built_by(entry: str, args: dict[str, Any]) -> LlamaConfig:
    """The sizes of a model of mlpipe's own. Raises TypeError for other fields than this version's."""
    return (MoeConfig if entry == MOE else LlamaConfig)(**args)


def _projections(dim: int, ffn_dim: int) -> list[tuple[str, int, int]]:
    """Names, rows and columns of a feed-forward's weights."""
    return [
        ("gate_proj.weight", ffn_dim, dim),
        ("up_proj.weight", ffn_dim, dim),
        ("down_proj.weight", dim, ffn_dim),
    ]


def _swiglu(dim: int, width: int) -> list[tuple[int, int]]:
    return [(dim, width), (dim, width), (width, dim)]


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """The same, with a mixture of experts in each block instead of one feed-forward (DeepSeek-V3, 2024): of
    `num_experts` feed-forwards of `ffn_dim` channels each token has the `experts_per_token` that its router
    likes best; `num_shared_experts` more, which are one as wide as all of them, every token has.
    `balance_rate`: by which a step moves the bias of an expert that had more, or fewer, tokens than the mean
    (Wang et al., Auxiliary-Loss-Free Load Balancing, 2024); 0: never. `capacity_factor`: tokens of a
    micro-batch that an expert computes at most, over the mean, when it learns (GShard, 2020); None: all.

    Of open weights: `router`: what makes affinities of its products; of `softmax`, over all experts, there is
    no bias to balance with. `normalised`: whether a token's affinities are made to sum to 1.
    """

    entry = MOE

    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    balance_rate: float
    router: Literal["sigmoid", "softmax"] = field(default="sigmoid", kw_only=True)
    normalised: bool = field(default=True, kw_only=True)
    capacity_factor: float | None = field(default=None, kw_only=True)

    @property
    def shared_dim(self) -> int:
        """Channels of the shared expert."""
        return self.num_shared_experts * self.ffn_dim

    def num_ffn_params(self) -> int:
        """All experts, and the router."""
        return self._num_ffn_params(self.num_experts)

    def _num_ffn_params(self, num_experts: int) -> int:
        width = num_experts * self.ffn_dim + self.shared_dim
        return 3 * self.dim * width + self.dim * self.num_experts

    def num_active_params(self) -> int:
        """Those outside the experts, and of these as many as a token has."""
        idle = self.num_ffn_params() - self._num_ffn_params(self.experts_per_token)
        return self.num_params() - self.num_layers * idle

    def ffn_tensors(self) -> list[tuple[str, int, int]]:
        """Router, experts, one below the other, shared expert."""
        dim, ffn_dim, stacked = self.dim, self.ffn_dim, self.num_experts
        experts = [("gate_proj", stacked * ffn_dim, dim), ("up_proj", stacked * ffn_dim, dim)]
        experts.append(("down_proj", stacked * dim, ffn_dim))
        shared = _projections(dim, self.shared_dim) if self.num_shared_experts else []
        return [
            ("gate.weight", self.num_experts, dim),
            *((f"experts.{name}", rows, columns) for name, rows, columns in experts),
            *((f"shared_experts.{name}", rows, columns) for name, rows, columns in shared),
        ]

    def matrices_in(self, name: str) -> int:
        """Of experts all."""
        return self.num_experts if ".experts." in name else 1

    def ffn_matmuls(self) -> list[tuple[int, int]]:
        """Router, shared expert, experts: those of one token, side by side."""
        shared = _swiglu(self.dim, self.shared_dim) if self.num_shared_experts else []
        routed = _swiglu(self.dim, self.experts_per_token * self.ffn_dim)
        return [(self.dim, self.num_experts), *shared, *routed]

    def conflicts(self) -> list[Infeasible]:
        """Why these numbers make no model; empty if they do."""
        too_many = too_many_experts(self.experts_per_token, self.num_experts)
        return super().conflicts() + ([too_many] if too_many else [])


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


def _moe(
    dense: LlamaConfig, num_experts: int, experts_per_token: int, num_shared: int, balance_rate: float = 1e-3
) -> MoeConfig:
    return MoeConfig(
        **vars(dense),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        num_shared_experts=num_shared,
        balance_rate=balance_rate,
    )


# The four smallest have a vocabulary that the quickstart's BPE fills; a corpus' own size replaces it anyway.
# From 1b on: config.json of meta-llama/Llama-3.2-1B, Llama-3.2-3B, Meta-Llama-3-8B and Meta-Llama-3-70B,
# with 8,192 positions, since 3.2's 131,072 need its scaled rotary frequencies.
# The large ones with experts have the sizes of allenai/OLMoE-1B-7B, deepseek-ai/deepseek-moe-16b-base (with
# experts in its first block, too) and mistralai/Mixtral-8x7B. What is fast enough to balance the experts of a
# short training, in the small ones, would be noise in a long one.
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
    "moe-2m": _moe(_llama(2_048, 128, 4, 4, 2, 112, 1_024), 8, 2, 1, 2e-2),
    "moe-8m": _moe(_llama(4_096, 256, 4, 4, 2, 224, 1_024), 8, 2, 1, 2e-2),
    "moe-7b": _moe(_llama(50_304, 2_048, 16, 16, 16, 1_024, 4_096, tied=False), 64, 8, 0),
    "moe-16b": _moe(_llama(102_400, 2_048, 28, 16, 16, 1_408, 4_096, tied=False), 64, 6, 2),
    "moe-8x7b": _moe(
        _llama(32_000, 4_096, 32, 32, 8, 14_336, 32_768, rope_theta=1_000_000.0, tied=False), 8, 2, 0
    ),
}
