"""Muon (Jordan et al., 2024): the momentum of a matrix is made orthogonal before it is a step, by five
Newton-Schulz iterations in bf16, as `torch.optim.Muon` computes it.

The iterations want whole matrices. Where their rows are split over ranks, each matrix has an owner: all send
it their rows, it computes, and sends them theirs of the result, two all-to-alls a step of 2 bytes a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import Any

import torch
import torch.distributed as dist

from mlpipe._core.optimizers import NEWTON_SCHULZ_STEPS, newton_schulz_flops
from mlpipe.train.optim.adamw import AdamW
from mlpipe.train.optim.update import scaled_gradients
from mlpipe.train.shards import LocalShard, Split, rows_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Jordan's post, as those of torch
_EPS = 1e-7


class Muon:
    """Of the matrices of the model's blocks; all else (embeddings, heads, norms, biases) by AdamW. Updates
    are scaled to AdamW's size (Liu et al., Muon is Scalable for LLM Training, 2025), so that one learning
    rate and one weight decay serve both."""

    def __init__(
        self,
        shards: Sequence[LocalShard],
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        betas: Sequence[float],
        eps: float,
    ) -> None:
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.matrices = [shard for shard in shards if is_matrix(shard)]
        rest = [shard for shard in shards if not is_matrix(shard)]
        self.adamw = AdamW(rest, betas=betas, eps=eps, weight_decay=weight_decay)
        self._momenta = {shard.name: torch.zeros_like(shard.local) for shard in self.matrices}

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`."""
        for shard, update in self._updates(scaled_gradients(self.matrices, scale)):
            if shard.is_decayed and self.weight_decay:
                shard.local.mul_(1 - lr * self.weight_decay)
            shard.local.add_(update, alpha=-lr * 0.2 * math.sqrt(max(shard.shape)))
        self.adamw.step(lr=lr, scale=scale)

    def _updates(
        self, pairs: list[tuple[LocalShard, torch.Tensor]]
    ) -> Iterator[tuple[LocalShard, torch.Tensor]]:
        """With whole matrices one after the other, so that copies of one are alive; else all, which travel
        together."""
        split = next((shard.split for shard, _ in pairs if shard.split is not None), None)
        if split is None:
            for shard, gradient in pairs:
                yield shard, orthogonalized(self._direction(shard, gradient))
            return
        shards = [shard for shard, _ in pairs]
        yield from zip(shards, _orthogonal(shards, list(starmap(self._direction, pairs)), split), strict=True)

    def _direction(self, shard: LocalShard, gradient: torch.Tensor) -> torch.Tensor:
        """In bf16."""
        momentum = self._momenta[shard.name]
        momentum.lerp_(gradient, 1 - self.momentum)
        ahead = gradient.lerp_(momentum, self.momentum) if self.nesterov else momentum
        return ahead.to(torch.bfloat16)

    def state(self) -> list[LocalShard]:
        """The momenta of matrices, and AdamW's moments of all else."""
        momenta = [shard.state("momentum_buffer", self._momenta[shard.name]) for shard in self.matrices]
        return [*momenta, *self.adamw.state()]

    def scalars(self) -> dict[str, Any]:
        """AdamW's."""
        return self.adamw.scalars()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them."""
        self.adamw.load_scalars(scalars)


def is_matrix(shard: LocalShard) -> bool:
    """Whether Muon updates it."""
    return shard.in_block and len(shard.shape) == 2


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """U S' V^T of a bf16 matrix U S V^T, with singular values S' between about 0.5 and 1.5."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    estimate = matrix.T if is_tall else matrix
    estimate = estimate / estimate.norm().clamp(min=_EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = estimate @ estimate.T
        estimate = torch.addmm(estimate, torch.addmm(gram, gram, gram, beta=b, alpha=c), estimate, beta=a)
    return estimate.T if is_tall else estimate


def _orthogonal(
    shards: Sequence[LocalShard], parts: Sequence[torch.Tensor], split: Split
) -> list[torch.Tensor]:
    """This rank's rows of each matrix made orthogonal. `parts`: its rows of them, in bf16."""
    owners = _owners(shards, split.num_ranks)
    order = sorted(range(len(shards)), key=lambda index: (owners[index], index))
    mine = [index for index in order if owners[index] == split.rank]
    # Rows of every matrix by owner; and of those that are mine by the rank that has them.
    sent = [
        sum(parts[index].numel() for index in order if owners[index] == rank)
        for rank in range(split.num_ranks)
    ]
    shapes = [[_part(shards[index], rank, split) for index in mine] for rank in range(split.num_ranks)]
    received = [sum(map(math.prod, of_rank)) for of_rank in shapes]
    arrived = _exchanged(torch.cat([parts[index].reshape(-1) for index in order]), sent, received, split)
    pieces = iter(arrived.split([math.prod(shape) for of_rank in shapes for shape in of_rank]))
    by_rank = [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]
    results = [orthogonalized(torch.cat(rows)) for rows in zip(*by_rank, strict=True)]
    cut = [result.split([of_rank[i][0] for of_rank in shapes]) for i, result in enumerate(results)]
    back = [rows[rank].reshape(-1) for rank in range(split.num_ranks) for rows in cut]
    returned = _exchanged(torch.cat(back) if back else arrived[:0], received, sent, split)
    own_rows = list(parts)
    for index, piece in zip(order, returned.split([parts[i].numel() for i in order]), strict=True):
        own_rows[index] = piece.view(parts[index].shape)
    return own_rows


def _owners(shards: Sequence[LocalShard], num_ranks: int) -> list[int]:
    """By matrix, so that the ranks compute for about as long: the largest first, to who has least to do."""
    loads, owners = [0.0] * num_ranks, [0] * len(shards)
    costs = [newton_schulz_flops(*shard.shape) for shard in shards]
    for index in sorted(range(len(shards)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def _part(shard: LocalShard, rank: int, split: Split) -> tuple[int, int]:
    start, stop = rows_of(shard.shape[0], rank, split.num_ranks)
    return stop - start, shard.shape[1]


def _exchanged(flat: torch.Tensor, sent: list[int], received: list[int], split: Split) -> torch.Tensor:
    """So many values to each rank, and from each. As bytes, which every backend sends."""
    width = flat.element_size()
    arrived = flat.new_empty(sum(received))
    split.timed(dist.all_to_all_single)(
        arrived.view(torch.uint8),
        flat.view(torch.uint8),
        [width * number for number in received],
        [width * number for number in sent],
        group=split.group,
    )
    return arrived
