"""The axis `cp`: each of its ranks has two chunks of every sequence, so that activations and logits take a
share of the memory; attention brings the chunks together (context_attention.py).

Batches are cut as they are read (data.own_part). Those without targets, of text that is generated, are whole
on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mlpipe._core.errors import TrainError
from mlpipe._core.meshes import uneven_context
from mlpipe.plan.settings import ContextExchange
from mlpipe.plan.work import TrainPlan
from mlpipe.train.model import Batch
from mlpipe.train.models.attention import causal_attention
from mlpipe.train.models.llama import Attention, Llama
from mlpipe.train.parallel.context_attention import RANKS, context_attention
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Gives the model its part of the positions, and an attention that sees the other ranks' tokens."""
    llama = model.built.model
    if not isinstance(llama, Llama):
        raise TrainError(
            "only mlpipe's own Llama can be split along the sequence: of other models nobody knows which "
            "operations look at several tokens",
            where=plan.model.build.entry,
            hint="leave cp out of the mesh",
            kind="input",
        )
    if world.device.type == "cuda" and (plan.precision == "fp32" or llama.config.head_dim % 8):
        raise TrainError(
            "on a GPU the attention of cp takes bf16, and heads of a multiple of 8 channels",
            where=f"precision {plan.precision}, {llama.config.head_dim} channels a head",
            hint="write precision: bf16 and another num_heads, or leave cp out of the mesh",
            kind="input",
        )
    parts = _Parts(
        llama, RankGroup.along("cp", world, model.waits, exact=plan.exact_sums), plan.context_exchange
    )
    model.built.module.register_forward_pre_hook(parts.look)
    llama.rotations = parts.rotations  # type: ignore[method-assign]
    for module in llama.modules():
        if isinstance(module, Attention):
            module.attend = parts.attend


class _Parts:
    """What the model computes with: this rank's part, or whole sequences of a batch without targets."""

    def __init__(self, llama: Llama, ranks: RankGroup, exchange: ContextExchange) -> None:
        self.whole = False
        self.ranks = ranks
        self.number = len(RANKS)
        self.all_rotations = llama.rotations
        RANKS[self.number] = ranks, exchange

    def look(self, module: nn.Module, args: tuple[Batch]) -> None:
        """Before the forward of `LossModule`."""
        self.whole = "targets" not in args[0]

    def rotations(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        if self.whole:
            return self.all_rotations(num_tokens)
        rank, num_ranks = self.ranks.rank, self.ranks.num_ranks
        cos, sin = self.all_rotations(num_tokens * num_ranks)
        return cut(cos, 0, rank, num_ranks), cut(sin, 0, rank, num_ranks)

    def attend(self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor) -> Tensor:
        if self.whole:
            return causal_attention(q_BHLC, k_BKLC, v_BKLC)
        return context_attention(q_BHLC, k_BKLC, v_BKLC, self.number)


def cut(x: Tensor, dim: int, rank: int, num_ranks: int) -> Tensor:
    """The late and the early chunk of a rank, of all tokens along `dim`."""
    chunks = x.chunk(2 * num_ranks, dim)
    return torch.cat((chunks[-1 - rank], chunks[rank]), dim)


def cut_batch(batch: Batch, world: World) -> Batch:
    """This rank's part of each sequence: of all tensors that begin with the dims of the inputs, (B, T).
    Raises TrainError (input) for a T that cannot be cut evenly."""
    rank, num_ranks = world.place("cp")
    dims = batch["inputs"].shape[:2]
    if problem := uneven_context(num_ranks, dims[1], world.mesh.tp):
        raise TrainError(problem.message, where="mesh.cp", hint=problem.remedy, kind="input")
    return {
        name: cut(tensor, 1, rank, num_ranks) if tensor.shape[:2] == dims else tensor
        for name, tensor in batch.items()
    }
