"""Adafactor (Shazeer and Stern, 2018) as `torch.optim.Adafactor` computes it: of the second moment of a
matrix only the means of its rows and of its columns are kept, and the step is relative to the size of the
weights.

A matrix's rows may lie on several ranks. Its columns' means and the three norms of a tensor are of all rows:
two all-reduces a step, of as many numbers as the matrices have columns, and of one a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mlpipe.train.optim.update import scaled_gradients
from mlpipe.train.shards import LocalShard, Split

_Pair = tuple[LocalShard, torch.Tensor]


class Adafactor:
    """Matrices decay, vectors (norms, biases) do not. Of a tensor with more dims the last two are factored,
    and all before them are so many matrices. One count of updates serves all parameters."""

    def __init__(
        self,
        shards: Sequence[LocalShard],
        *,
        beta2_decay: float,
        eps: float,
        clip_threshold: float,
        weight_decay: float,
    ) -> None:
        self.shards = shards
        self.beta2_decay = beta2_decay
        self.eps = eps
        self.clip_threshold = clip_threshold
        self.weight_decay = weight_decay
        self.num_updates = 0
        self._kept = {shard.name: _moments(shard) for shard in shards}

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`. Takes the place of the gradients, which are no
        longer there afterwards."""
        self.num_updates += 1
        pairs = scaled_gradients(self.shards, scale)
        sums = self._sums(pairs)
        norms = [
            self._updated(shard, gradient, *of) for (shard, gradient), of in zip(pairs, sums, strict=True)
        ]
        squares = _summed([(shard.split, norm) for (shard, _), norm in zip(pairs, norms, strict=True)])
        step = min(lr, self.num_updates**-0.5)
        for (shard, update), (_, of_weights, _), of_update in zip(pairs, sums, squares, strict=True):
            size = max(1, math.prod(shard.shape))
            rms = (of_weights / size).sqrt().clamp_(min=self.eps)
            clipped = ((of_update / size).sqrt() / self.clip_threshold).clamp_(min=1.0)
            if shard.is_decayed and self.weight_decay:
                shard.local.mul_(1 - lr * self.weight_decay)
            shard.local.sub_(update.mul_(rms / clipped * step))

    def _sums(self, pairs: Sequence[_Pair]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each tensor, over the rows of all ranks: the squares of the gradient by column, those of the
        weights, and the moments of the rows, which have been updated; empty where nothing is split."""
        share = self.num_updates**self.beta2_decay
        parts: list[tuple[Split | None, torch.Tensor]] = []
        for shard, gradient in pairs:
            kept = self._kept[shard.name]
            columns, rows = gradient.new_empty(0), gradient.new_empty(0)
            if "row_var" in kept:
                of_rows = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).square_()
                kept["row_var"].lerp_(of_rows.div_(gradient.shape[-1]), share)
            if len(shard.shape) == 2:
                columns = torch.linalg.vector_norm(gradient, dim=0).square_()
                rows = kept["row_var"].sum().view(1)
            weights = torch.linalg.vector_norm(shard.local).square_().view(1)
            parts.append((shard.split, torch.cat([columns, weights, rows])))
        sums = []
        for (shard, _), whole in zip(pairs, _summed(parts), strict=True):
            number = shard.shape[1] if len(shard.shape) == 2 else 0
            sums.append((whole[:number], whole[number], whole[number + 1 :]))
        return sums

    def _updated(
        self, shard: LocalShard, gradient: torch.Tensor, columns: torch.Tensor, _: Any, rows: torch.Tensor
    ) -> torch.Tensor:
        """The square of the norm of the update, which takes the place of the gradient."""
        kept, share = self._kept[shard.name], self.num_updates**self.beta2_decay
        eps = torch.finfo(gradient.dtype).eps
        if "variance" in kept:
            kept["variance"].lerp_(gradient.square(), share)
            variance = kept["variance"].clone()
        else:
            row_var, col_var = kept["row_var"], kept["col_var"]
            if len(shard.shape) == 2:
                col_var.lerp_((columns / shard.shape[0]).view(1, -1), share)
                mean = rows / shard.shape[0]
            else:
                of_columns = torch.linalg.vector_norm(gradient, dim=-2, keepdim=True).square_()
                col_var.lerp_(of_columns.div_(gradient.shape[-2]), share)
                mean = row_var.mean(dim=-2, keepdim=True)
            variance = (row_var @ col_var).div_(mean.clamp(min=eps))
        gradient.mul_(variance.clamp_(min=eps * eps).rsqrt_())
        return torch.linalg.vector_norm(gradient).square_()

    def state(self) -> list[LocalShard]:
        """The moments of rows, split as they are, and of columns, which a matrix has whole on every rank."""
        shards = []
        for shard in self.shards:
            for kind, moment in self._kept[shard.name].items():
                if kind == "variance":
                    shards.append(shard.state(kind, moment))
                elif kind == "col_var" and len(shard.shape) == 2:
                    shards.append(shard.whole_state(kind, moment))
                else:
                    cut = -1 if kind == "row_var" else -2
                    shape, offset = list(shard.shape), list(shard.offset)
                    shape[cut], offset[cut] = 1, 0
                    shards.append(shard.state_like(kind, moment, tuple(shape), tuple(offset)))
        return shards

    def scalars(self) -> dict[str, Any]:
        """The number of updates."""
        return {"num_updates": self.num_updates}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them."""
        self.num_updates = scalars["num_updates"]


def _moments(shard: LocalShard) -> dict[str, torch.Tensor]:
    local = shard.local
    if len(shard.shape) < 2:
        return {"variance": torch.zeros_like(local)}
    lead, (rows, columns) = local.shape[:-2], local.shape[-2:]
    return {
        "row_var": local.new_zeros((*lead, rows, 1)),
        "col_var": local.new_zeros((*lead, 1, columns)),
    }


def _summed(parts: Sequence[tuple[Split | None, torch.Tensor]]) -> list[torch.Tensor]:
    """Each vector (or number) summed over the ranks of its split, all of them in one all-reduce."""
    split = next((split for split, _ in parts if split is not None), None)
    if split is None:
        return [tensor for _, tensor in parts]
    together = torch.cat([tensor.reshape(-1) for own, tensor in parts if own is not None])
    split.timed(dist.all_reduce)(together, group=split.group)
    sizes = [tensor.numel() if own is not None else 0 for own, tensor in parts]
    return [
        tensor if own is None else whole.view_as(tensor)
        for (own, tensor), whole in zip(parts, together.split(sizes), strict=True)
    ]
