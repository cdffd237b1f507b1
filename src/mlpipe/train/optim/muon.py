"""Muon (Jordan et al., 2024): the momentum of a matrix is made orthogonal before it is a step, by five
Newton-Schulz iterations in bf16, as `torch.optim.Muon` computes it.

The iterations want whole matrices. Where their rows are split over ranks, each matrix has an owner: all send
it their rows, it computes, and sends them theirs of the result, two all-to-alls a step of 2 bytes a value.
Of experts, whose matrices lie in one tensor one below the other, each is a matrix of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, starmap
from typing import Any, NamedTuple

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
            shard.local.add_(update, alpha=-lr * 0.2 * math.sqrt(max(_shape(shard))))
        self.adamw.step(lr=lr, scale=scale)

    def _updates(
        self, pairs: list[tuple[LocalShard, torch.Tensor]]
    ) -> Iterator[tuple[LocalShard, torch.Tensor]]:
        """With whole tensors one after the other, so that copies of one are alive; else all that the same
        ranks share, which travel together."""
        shared: dict[int, list[tuple[LocalShard, torch.Tensor]]] = {}
        for shard, gradient in pairs:
            if shard.split is not None:
                shared.setdefault(id(shard.split), []).append((shard, gradient))
                continue
            stacked = self._direction(shard, gradient).view(-1, *_shape(shard))
            yield shard, orthogonalized(stacked).view(shard.local.shape)
        for some in shared.values():
            shards, split = [shard for shard, _ in some], some[0][0].split
            assert split is not None
            parts = list(starmap(self._direction, some))
            yield from zip(shards, _orthogonal(shards, parts, split), strict=True)

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


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """U S' V^T of each bf16 matrix U S V^T (..., rows, columns), with singular values S' between about 0.5
    and 1.5."""
    a, b, c = _COEFFICIENTS
    if matrices.dim() == 3 and len(matrices) == 1:  # a product of two matrices is faster than of stacks
        return orthogonalized(matrices[0])[None]
    plus_product = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    estimate = matrices.mT if is_tall else matrices
    estimate = estimate / estimate.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = estimate @ estimate.mT
        polynomial = plus_product(gram, gram, gram, beta=b, alpha=c)
        estimate = plus_product(estimate, polynomial, estimate, beta=a)
    return (estimate.mT if is_tall else estimate).contiguous()


def _shape(shard: LocalShard) -> tuple[int, int]:
    """Rows and columns of each of its matrices."""
    return shard.shape[0] // shard.num_matrices, shard.shape[1]


class _Matrix(NamedTuple):
    """Of the tensor number `tensor`, of which ranks share `num_rows`, the rows from `first` on."""

    tensor: int
    num_rows: int
    first: int
    rows: int
    columns: int

    def part(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """First and last + 1 of its rows that a rank has, as the rank counts its own."""
        start, stop = rows_of(self.num_rows, rank, num_ranks)
        begin = min(max(self.first, start), stop) - start
        return begin, max(begin, min(self.first + self.rows, stop) - start)


def _matrices(shards: Sequence[LocalShard]) -> list[_Matrix]:
    """One below the other in each tensor, of those that slices leave."""
    found = []
    for number, shard in enumerate(shards):
        rows, columns = _shape(shard)
        num_rows = shard.shape[0] // math.prod(cut.num_ranks for cut in shard.slices)
        found += [_Matrix(number, num_rows, first, rows, columns) for first in range(0, num_rows, rows)]
    return found


def _orthogonal(
    shards: Sequence[LocalShard], parts: Sequence[torch.Tensor], split: Split
) -> list[torch.Tensor]:
    """This rank's rows of each tensor, whose matrices were made orthogonal. `parts`: its rows, in bf16."""
    matrices, num_ranks = _matrices(shards), split.num_ranks
    owners = _owners(matrices, num_ranks)
    order = sorted(range(len(matrices)), key=lambda index: (owners[index], index))
    own = [slice(*matrix.part(split.rank, num_ranks)) for matrix in matrices]
    pieces = [parts[matrix.tensor][rows] for matrix, rows in zip(matrices, own, strict=True)]
    mine = [matrices[index] for index in order if owners[index] == split.rank]
    # Rows of every matrix by owner; and of those that are mine by the rank that has them.
    sent = [0] * num_ranks
    for index in order:
        sent[owners[index]] += pieces[index].numel()
    shapes = [
        [(stop - start, one.columns) for one in mine for start, stop in (one.part(rank, num_ranks),)]
        for rank in range(num_ranks)
    ]
    received = [sum(map(math.prod, of_rank)) for of_rank in shapes]
    arrived = _exchanged(torch.cat([pieces[index].reshape(-1) for index in order]), sent, received, split)
    came = iter(arrived.split([math.prod(shape) for of_rank in shapes for shape in of_rank]))
    by_rank = [[next(came).view(shape) for shape in of_rank] for of_rank in shapes]
    whole = zip(mine, map(torch.cat, zip(*by_rank, strict=True)), strict=True)
    results = [
        result
        for _, some in groupby(whole, key=lambda one: one[0].tensor)
        for result in orthogonalized(torch.stack([matrix for _, matrix in some]))
    ]
    cut = [result.split([of_rank[i][0] for of_rank in shapes]) for i, result in enumerate(results)]
    back = [rows[rank].reshape(-1) for rank in range(num_ranks) for rows in cut]
    returned = _exchanged(torch.cat(back) if back else arrived[:0], received, sent, split)
    updates = [torch.empty_like(part) for part in parts]
    for index, piece in zip(order, returned.split([pieces[i].numel() for i in order]), strict=True):
        updates[matrices[index].tensor][own[index]] = piece.view(pieces[index].shape)
    return updates


def _owners(matrices: Sequence[_Matrix], num_ranks: int) -> list[int]:
    """By matrix, so that the ranks compute for about as long: the largest first, to who has least to do."""
    loads, owners = [0.0] * num_ranks, [0] * len(matrices)
    costs = [newton_schulz_flops(matrix.rows, matrix.columns) for matrix in matrices]
    for index in sorted(range(len(matrices)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


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
