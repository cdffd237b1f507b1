"""The Llama of `llama.py` with a mixture of experts in each block (DeepSeek-V3, 2024, section 2.1.2).

A token's affinity to an expert is the sigmoid of a dot product, of some open weights (Mixtral, Jiang et al.,
2024; Qwen3) the softmax of all of them. It goes to the experts of the largest sum of
affinity and bias; their results are added by affinities that are made to sum to 1. Tokens are sorted by
expert, and each expert computes all that it has. The bias, which no gradient reaches, balances the experts
(`train/parallel/balance_experts.py`).

With a `capacity_factor` an expert has as many places in every micro-batch that it learns from (Lepikhin et
al., GShard, 2020). The tokens in whose sums it weighs most take them; who finds none is not computed by it,
and goes on with what its other experts and the residual stream make of it.

Parameters are named as in `transformers`' Glm4Moe, which computes the same with sigmoids; but the matrices of
all experts are one, one below the other, so that any number of ranks can share its rows.

B batch · T tokens · D dim · N = B x T · k experts_per_token · S = N x k rows · E experts · F ffn_dim
C places of an expert · P = E x C
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe._core.presets import MoeConfig
from mlpipe.train.models.llama import MLP, Llama

Compute = Callable[[Tensor, Tensor], Tensor]
Exchange = Callable[[Compute, Tensor, Tensor], Tensor]


class Router(nn.Module):
    """Computes in fp32 whatever the precision: which experts are the largest is no continuous function."""

    e_score_correction_bias: Tensor
    updated_buffers = ("e_score_correction_bias",)
    computes_in_fp32 = True

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.softmax, self.normalised = config.router == "softmax", config.normalised
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        bias = torch.empty(config.num_experts)  # of softmax always 0
        self.register_buffer("e_score_correction_bias", bias, persistent=not self.softmax)

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts of each token count (N, k), and which they are (N, k)."""
        device, dtype = x_ND.device.type, torch.promote_types(x_ND.dtype, torch.float32)
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            product_NE = F.linear(x_ND.to(dtype), self.weight.to(dtype))
            affinity_NE = product_NE.softmax(-1) if self.softmax else product_NE.sigmoid()
        biased_NE = affinity_NE.detach() + self.e_score_correction_bias
        experts_Nk = biased_NE.topk(self.experts_per_token, dim=-1).indices
        chosen_Nk = affinity_NE.gather(-1, experts_Nk)
        if self.normalised:
            chosen_Nk = chosen_Nk / chosen_Nk.sum(-1, keepdim=True)
        return chosen_Nk, experts_Nk


class Experts(nn.Module):
    """SwiGLU of each expert for its own rows. `exchange`: of a technique that has put the experts on several
    ranks; called with `compute`, the rows and their ends, it gives results, or this rank's part of sums."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.stacked_matrices = rows = config.num_experts
        self.ffn_dim = config.ffn_dim
        self.gate_proj = nn.Parameter(torch.empty(rows * config.ffn_dim, config.dim))
        self.up_proj = nn.Parameter(torch.empty(rows * config.ffn_dim, config.dim))
        self.down_proj = nn.Parameter(torch.empty(rows * config.dim, config.ffn_dim))
        self.exchange: Exchange | None = None

    def forward(self, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Rows in the order of their experts, and where those of each end -> rows."""
        if self.exchange is not None:
            return self.exchange(self.compute, x_SD, ends_E)
        return self.compute(x_SD, ends_E)

    def compute(self, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Of the experts that are here."""
        gate_SF = matmul_by_expert(x_SD, _own(self.gate_proj), ends_E)
        up_SF = matmul_by_expert(x_SD, _own(self.up_proj), ends_E)
        return matmul_by_expert(F.silu(gate_SF) * up_SF, _own(self.down_proj), ends_E)


def _own(parameter: Any) -> Tensor:
    """The experts of this rank: all, or those that a technique left it."""
    own: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return own


def matmul_by_expert(x_SI: Tensor, stacked: Tensor, ends_E: Tensor) -> Tensor:
    """Rows times the matrix of their expert, (O, I), of which `stacked` has E, one below the other -> (S, O),
    of the rows' dtype. One kernel where there is one for these shapes, else one for each expert."""
    weight_EOI = stacked.to(x_SI.dtype).view(ends_E.shape[0], -1, stacked.shape[1])
    if _has_kernel(x_SI, weight_EOI):
        return F.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=ends_E)
    numbers = _numbers(x_SI, ends_E)
    rows = zip(x_SI.split(numbers), weight_EOI.unbind(), strict=True)
    return torch.cat([F.linear(own, weight_OI) for own, weight_OI in rows])


def _has_kernel(x_SI: Tensor, weight_EOI: Tensor) -> bool:
    """It wants rows of whole 16 bytes. For fp32 there is none on GPUs: what torch 2.11 does there came
    out wrong by 6 % on an H200, and it cannot be traced at all."""
    widths = weight_EOI.shape[1:]
    is_traced = torch.compiler.is_compiling() and torch.__version__.startswith("2.11.")
    dtypes = (torch.bfloat16,) if is_traced or x_SI.is_cuda else (torch.float32, torch.bfloat16)
    return x_SI.dtype in dtypes and not x_SI.is_meta and not any(n % 8 for n in widths)


def _numbers(x_SI: Tensor, ends_E: Tensor) -> list[int]:
    """Rows of each expert; on the meta device, which knows shapes only, equally many."""
    num_experts = ends_E.shape[0]
    if x_SI.is_meta:
        each, rest = divmod(x_SI.shape[0], num_experts)
        return [each + (expert < rest) for expert in range(num_experts)]
    numbers: list[int] = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return numbers


class Rows(torch.autograd.Function):
    """Row `order[s] // k` of what came in, for each s; every row is wanted k times. `places`: the inverse of
    `order`. So the backward pass gathers, too, where autograd's would scatter."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_S: Tensor, places_S: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places_S)
        ctx.k = k
        return x_ND[order_S // k if k > 1 else order_S]

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (places_S,) = ctx.saved_tensors
        grad = grad_SD[places_S]
        return (grad.unflatten(0, (-1, ctx.k)).sum(1) if ctx.k > 1 else grad), None, None, None


class Places(torch.autograd.Function):
    """Row `taken[p] // k` of what came in, for each p, or 0 where it is not `wanted`; every row goes to the
    places `given` of it, k of them, where these are `room`. The backward pass is the same the other way."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, to: tuple[Tensor, Tensor], back: tuple[Tensor, Tensor], k: int
    ) -> Tensor:
        taken_P, wanted_P = to
        ctx.save_for_backward(*back)
        ctx.k = k
        return x_ND[taken_P // k].masked_fill(~wanted_P.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        given_S, room_S = ctx.saved_tensors
        grad = grad_PD[given_S].masked_fill(~room_S.unsqueeze(-1), 0)
        return (grad.unflatten(0, (-1, ctx.k)).sum(1) if ctx.k > 1 else grad), None, None, None


class MoE(nn.Module):
    """`counted`: int64 (E,), to which each training forward adds the rows of each expert, with a
    `capacity_factor` (E + 1,), behind them those that it drops; None: nobody wants to know."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = replace(config, ffn_dim=config.shared_dim)
        self.shared_experts = MLP(shared) if config.num_shared_experts else None
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token
        self.capacity_factor = config.capacity_factor
        self.counted: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Tokens of any number of dims in front of the last."""
        x_ND = x_BTD.flatten(0, -2)
        share_Nk, experts_Nk = self.gate(x_ND)
        shared_ND = self.shared_experts(x_ND) if self.shared_experts is not None else None
        routed = self._all if self.capacity_factor is None or not self.training else self._with_capacity
        y_NkD = routed(x_ND, share_Nk, experts_Nk).unflatten(0, share_Nk.shape)
        y_ND = (y_NkD * share_Nk.unsqueeze(-1)).sum(1).to(x_ND.dtype)
        if shared_ND is not None:
            y_ND = y_ND + shared_ND
        return y_ND.view_as(x_BTD)

    def _all(self, x_ND: Tensor, share_Nk: Tensor, experts_Nk: Tensor) -> Tensor:
        """What the experts of each token make of it (S, D)."""
        experts_S, order_S = experts_Nk.flatten().sort(stable=True)
        places_S, ends_E = order_S.argsort(), self._ends(experts_S)
        self._count(ends_E)
        y_SD = self.experts(Rows.apply(x_ND, order_S, places_S, self.experts_per_token), ends_E)
        back: Tensor = Rows.apply(y_SD, places_S, order_S, 1)
        return back

    def _with_capacity(self, x_ND: Tensor, share_Nk: Tensor, experts_Nk: Tensor) -> Tensor:
        """Likewise, of those that find a place; of others 0. The shapes are the same for every batch."""
        num_rows, num_experts, k = experts_Nk.numel(), self.num_experts, self.experts_per_token
        capacity = min(len(x_ND), math.ceil((self.capacity_factor or 1) * num_rows / num_experts))
        best_S = share_Nk.detach().flatten().argsort(descending=True, stable=True)
        experts_S, within_S = experts_Nk.flatten()[best_S].sort(stable=True)
        order_S, ends_E = best_S[within_S], self._ends(experts_S)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        begins_E, numbers_C = ends_E - counts_E, torch.arange(capacity, device=x_ND.device)
        wanted_P = (numbers_C < counts_E.unsqueeze(1)).flatten()
        sorted_P = (begins_E.unsqueeze(1) + numbers_C).flatten().clamp(max=num_rows - 1)
        to = order_S[sorted_P], wanted_P
        number_S = torch.arange(num_rows, device=x_ND.device) - begins_E[experts_S]
        given_S = experts_S * capacity + number_S.clamp(max=capacity - 1)
        places_S = order_S.argsort()
        back = given_S[places_S], (number_S < capacity)[places_S]
        self._count(ends_E, num_rows - wanted_P.sum())
        full_E = capacity * torch.arange(1, num_experts + 1, dtype=torch.int32, device=x_ND.device)
        y_PD = self.experts(Places.apply(x_ND, to, back, k), full_E)
        y_SD: Tensor = Places.apply(y_PD, back, to, 1)
        return y_SD

    def _ends(self, experts_S: Tensor) -> Tensor:
        """Where the rows of each expert end, of sorted ones (E,)."""
        numbers = torch.arange(self.num_experts, device=experts_S.device)
        return torch.searchsorted(experts_S, numbers, right=True, out_int32=True)

    def _count(self, ends_E: Tensor, dropped: Tensor | None = None) -> None:
        if self.counted is not None and self.training:
            torch.ops.mlpipe.count_rows(ends_E, dropped, self.counted)


def _count_rows(ends_E: Tensor, dropped: Tensor | None, counted: Tensor) -> None:
    # the graph task tells a forward pass from one that is computed again in a backward pass
    if torch._C._current_graph_task_id() == -1:
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        counted += counts_E if dropped is None else torch.cat([counts_E, dropped[None]])


# An operator of its own: torch.compile takes it as one node of its graph, and cannot ask for the task itself.
_library = torch.library.Library("mlpipe", "FRAGMENT")
_library.define("count_rows(Tensor ends, Tensor? dropped, Tensor(a!) counted) -> ()")
for _device in ("CPU", "CUDA"):
    _library.impl("count_rows", _count_rows, _device)
_library.impl("count_rows", lambda *_: None, "Meta")


class MoeLlama(Llama):
    """The blocks' feed-forwards are mixtures of experts."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config, MoE)

    def init_weights(self) -> None:
        """As Llama's; an expert like a feed-forward, biases 0."""
        super().init_weights()
        std = self.config.dim**-0.5
        for module in self.modules():
            if isinstance(module, Router):
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.e_score_correction_bias)
            elif isinstance(module, Experts):
                for projection in (module.gate_proj, module.up_proj):
                    nn.init.normal_(projection, std=std)
                nn.init.normal_(module.down_proj, std=std / (2 * self.config.num_layers) ** 0.5)


def build_model(**fields: int | float | bool | str) -> MoeLlama:
    """The fields of `MoeConfig`. Raises ValueError when they do not fit together."""
    config = MoeConfig(**fields)  # type: ignore[arg-type]
    if conflicts := config.conflicts():
        raise ValueError("; ".join(conflict.message for conflict in conflicts))
    return MoeLlama(config)
