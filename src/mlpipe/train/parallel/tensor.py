"""The axis `tp`: the ranks share each matrix product, and the sequence between them.

Of mlpipe's Llama (Shoeybi et al., Megatron-LM, 2019) heads and the width of the MLP are split over the ranks:
q, k, v, gate and up by rows of their weights (columns of the matrix that x is multiplied with), o and down by
columns; experts by whole ones; embedding and head by the vocabulary, and no rank ever has all logits
(parallel/sharded_loss.py).
Between them, in norms and on the residual stream, each rank has its share of the tokens (sequence
parallelism, Korthikanti et al., 2022): not an all-reduce, but a reduce-scatter and, later, an all-gather.

Tokens of all samples of a microbatch lie one behind the other there, (B T) / tp on each rank, so that what is
gathered is in its place at once. The gradients of the norms are of a rank's own tokens only:
`sum_partial_gradients` sums them. Models of one's own are split by patterns (tensor_by_pattern.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe._core.adapters import A, B
from mlpipe._core.errors import TrainError
from mlpipe._core.meshes import TENSOR_WIDTHS, uneven_tensors
from mlpipe._core.presets import LlamaConfig, MoeConfig
from mlpipe.plan.work import TrainPlan
from mlpipe.train.models.llama import MLP, Attention, Llama, Part, RMSNorm
from mlpipe.train.parallel.exact_products import part_of_outputs, part_of_sum
from mlpipe.train.parallel.lora import added
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import RankGroup, embedded_here, gathered_rows, scattered_sum
from mlpipe.train.parallel.sharded_loss import ShardedLoss
from mlpipe.train.precision import low_dtype
from mlpipe.train.slices import Slice, keep_slice
from mlpipe.train.world import World

# By the name of a module in an attention, or a feed-forward, the dim of its weight that is cut.
_CUTS: dict[type[nn.Module], dict[str, int]] = {
    Attention: {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1},
    MLP: {"gate_proj": 0, "up_proj": 0, "down_proj": 1},
}


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Cuts the weights and changes the forwards, in place; parameters may still be on the meta device. Raises
    TrainError (input) for sizes that cannot be split like that."""
    llama = model.built.model
    assert isinstance(llama, Llama)
    _check(llama.config, plan.model.seq_len, world.mesh.tp, plan.model.build.entry)
    ranks = RankGroup.along("tp", world, model.waits, exact=plan.exact_sums)
    done: dict[int, nn.Parameter] = {}

    def cut(module: nn.Module, dim: int, name: str = "weight") -> None:
        keep_slice(module, name, Slice("tp", dim, ranks.rank, ranks.num_ranks, ranks.group), done)

    for part in (block.get_submodule(name) for block in llama.layers for name in ("self_attn", "mlp")):
        tokens = _Tokens(ranks)
        for module in part.modules():
            for name, dim in _CUTS.get(type(module), {}).items():
                projection = cast(nn.Linear, module.get_submodule(name))
                cut(projection, dim)
                if A in projection._parameters:  # of the product of both the same part
                    cut(projection, dim, B if dim == 0 else A)
                    model.partial.append((projection, A if dim == 0 else B))
                if projection.bias is not None and dim == 0:
                    cut(projection, 0, "bias")
                elif projection.bias is not None:
                    model.partial.append((projection, "bias"))
                if dim == 0 and ranks.exact:
                    projection.forward = partial(_column, projection, tokens)  # type: ignore[method-assign]
                elif dim == 1 and (ranks.exact or projection.bias is not None):
                    projection.forward = partial(_row, projection, ranks)  # type: ignore[method-assign]
        part.register_forward_pre_hook(tokens.gather)
        part.register_forward_hook(tokens.scatter)
        # also of a forward that ends half-way, as one for a backward pass does, which would keep all of it
        part.register_forward_hook(tokens.forget, always_call=True)
    cut(llama.embed_tokens, 0)
    llama.embed_tokens.forward = partial(_embed, llama.embed_tokens, ranks)  # type: ignore[method-assign]
    at_head = _Tokens(ranks)
    llama.norm.register_forward_hook(lambda module, args, x: at_head.of_all(x))
    if llama.lm_head is not None:
        cut(llama.lm_head, 0)
    llama.forward = partial(_forward, llama, at_head)  # type: ignore[method-assign]
    if isinstance(llama.config, MoeConfig):
        _split_experts(model, llama, ranks)
    model.partial += [(one, "weight") for one in llama.modules() if isinstance(one, RMSNorm)]
    loss = ShardedLoss(ranks)
    model.built.module.cross_entropy = loss.cross_entropy_sum
    model.built.module.whole_logits = loss.whole_logits


def _split_experts(model: ParallelizedModel, llama: Llama, ranks: RankGroup) -> None:
    """Whole ones: like a feed-forward's channels, those of each rank see all tokens. So does the router,
    whose gradient on each rank is of its own experts' part."""
    from mlpipe.train.models.moe import Experts, Router
    from mlpipe.train.parallel.experts import OwnRows, keep_experts

    for module in llama.modules():
        if isinstance(module, Experts):
            keep_experts(module, "tp", ranks)
            module.exchange = OwnRows(ranks)
        elif isinstance(module, Router):
            model.partial.append((module, "weight"))


def _check(config: LlamaConfig, seq_len: int, tp: int, entry: str) -> None:
    figures = {name: getattr(config, name, None) for name in TENSOR_WIDTHS} | {"seq_len": seq_len}
    conflict = uneven_tensors(tp, {name: figure for name, figure in figures.items() if figure})
    if conflict is not None:
        raise TrainError(conflict.message, where=entry, hint=conflict.remedy, kind="input")


def _forward(
    llama: Llama, at_head: _Tokens, inputs: Tensor, part: Part | None = None, num_tokens: int | None = None
) -> Tensor:
    """Token ids (B, T) -> this rank's part of the vocabulary's logits (B, T, V / tp); between parts of a
    pipeline this rank's tokens ((B T) / tp, D), of which `num_tokens` says T. A sequence that the ranks
    cannot share evenly, as of a text that is generated, is longer meanwhile: nothing looks ahead."""
    num_tokens = num_tokens or inputs.shape[1]
    missing = -num_tokens % at_head.ranks.num_ranks
    if missing and (part is None or part.is_first):
        inputs = F.pad(inputs, (0, missing))
    of_head = llama.lm_head or llama.embed_tokens
    head = (lambda x, _: at_head.product(x, of_head)) if at_head.ranks.exact else None
    output = Llama.forward(llama, inputs, part, num_tokens + missing, head=head)
    at_head.forget()
    if part is not None and not part.is_last:
        return output
    return output.view(-1, num_tokens + missing, output.shape[-1])[:, :num_tokens]


def _embed(embedding: nn.Embedding, ranks: RankGroup, inputs_BT: Tensor) -> Tensor:
    """This rank's tokens ((B T) / tp, D), each out of the rows of whichever rank has it."""
    return scattered_sum(embedded_here(embedding, inputs_BT.flatten(), ranks), ranks)


def _row(projection: nn.Linear, ranks: RankGroup, x: Tensor) -> Tensor:
    """A part of the sum: each rank adds as much of the bias as makes one of it in all."""
    bias = projection.bias
    if ranks.exact:
        y = part_of_sum(x, projection)
        y = y if bias is None else y + bias.to(low_dtype(x)).float() / ranks.num_ranks
    else:
        y = F.linear(x, projection.weight, None if bias is None else bias / ranks.num_ranks)
    return y + added(projection, x) if A in projection._parameters else y


def _column(projection: nn.Linear, tokens: _Tokens, x: Tensor) -> Tensor:
    y = tokens.product(x, projection)
    return y + added(projection, x) if A in projection._parameters else y


class _Tokens:
    """Brings all ranks' tokens to a part of a block, or to the head, and adds up what comes out of it. Ranks
    that add exactly give it fp32, for gradients that are not rounded, and keep their `own` tokens, and all of
    them in the dtype of products, `low`."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self.own: Tensor | None = None
        self.low: Tensor | None = None

    def gather(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of a part of a block, whose other arguments begin with the cosines of each position."""
        x_ND = self.of_all(args[0])
        if len(args) == 1:
            return (x_ND,)
        return (x_ND.view(-1, args[1].shape[0], x_ND.shape[-1]), *args[1:])

    def of_all(self, own: Tensor) -> Tensor:
        """All tokens, of this rank's."""
        x_ND = gathered_rows(own, self.ranks)
        if self.ranks.exact:
            self.own, self.low = own, x_ND.detach().to(own.dtype)
        return x_ND

    def product(self, x: Tensor, linear: nn.Module) -> Tensor:
        """Of these tokens, `x`, with this rank's rows of a matrix. One rank rounds the gradient that each
        product gives of them: so each is added up by itself."""
        assert self.own is not None
        assert self.low is not None
        return part_of_outputs(self.own, self.low.view(x.shape), linear, self.ranks.reduce_scatter)

    def scatter(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        """This rank's tokens of the sum of what the ranks' parts give."""
        dtype = y.dtype if self.low is None else self.low.dtype
        return scattered_sum(y.flatten(0, -2), self.ranks, dtype)

    def forget(self, *_: Any) -> None:
        self.own = self.low = None
