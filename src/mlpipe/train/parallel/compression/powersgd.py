"""PowerSGD (Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression, 2019): a matrix
M as P Q^T with few columns. One step of power iteration a time: P = M Q is averaged and orthogonalised,
Q = M^T P averaged, and Q is where the next time begins (warm start)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlpipe._core.compression import is_factored
from mlpipe.train.buckets import views
from mlpipe.train.parallel.compression.averager import (
    Averager,
    Link,
    MakeAverager,
    code_of,
    coded_mean,
    padded,
)


def powersgd(rank: float) -> MakeAverager:
    """Of buckets with matrices; `rank`: columns of the factors."""
    return lambda tensors: _PowerSgd(tensors, int(rank))


class _PowerSgd(Averager):
    """`tensors`: as they lie in a bucket, one behind the other. Those of more than two dims count as matrices
    of their first dim. What is too small for factors travels with the Ps, in fp16 itself."""

    def __init__(self, tensors: Sequence[Tensor], rank: int) -> None:
        self.sizes = [tensor.numel() for tensor in tensors]
        self.matrices: dict[int, tuple[int, int]] = {}
        self.qs: dict[int, Tensor] = {}
        for index, tensor in enumerate(tensors):
            rows = tensor.shape[0] if tensor.dim() > 1 else 1
            if rows and is_factored(rows, columns := tensor.numel() // rows, rank):
                self.matrices[index] = rows, columns
                generator = torch.Generator().manual_seed(index)  # the same on every rank
                q = torch.randn(columns, rank, generator=generator)
                self.qs[index] = q.to(tensor.device)
        self.code = code_of("fp16")

    def states(self) -> dict[int, Tensor]:
        """The Qs (columns, rank)."""
        return self.qs

    def mean(self, unsent: Tensor, link: Link) -> Tensor:
        """As the protocol says."""
        parts = list(unsent[: sum(self.sizes)].split(self.sizes))
        matrices = {index: parts[index].view(shape) for index, shape in self.matrices.items()}
        others = [index for index in range(len(parts)) if index not in matrices]
        ps = {index: matrix @ self.qs[index] for index, matrix in matrices.items()}
        means = self._means([*ps.values(), *(parts[index] for index in others)], link)
        ps = {index: _orthogonal(p) for index, p in zip(ps, means, strict=False)}
        qs = self._means([matrix.T @ ps[index] for index, matrix in matrices.items()], link)
        result = torch.zeros_like(unsent)
        told = list(result[: sum(self.sizes)].split(self.sizes))
        for index, q in zip(matrices, qs, strict=True):
            self.qs[index].copy_(q)
            torch.mm(ps[index], q.T, out=told[index].view(self.matrices[index]))
        for index, mean in zip(others, means[len(ps) :], strict=True):
            told[index].copy_(mean)
        unsent.sub_(result)
        return result

    def _means(self, tensors: list[Tensor], link: Link) -> list[Tensor]:
        """Rounded to fp16: what that lacks stays in the matrices' own errors."""
        if not tensors:
            return []
        num_values = sum(tensor.numel() for tensor in tensors)
        flat = torch.zeros(padded(num_values, link.ranks.num_ranks), device=tensors[0].device)
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat[:num_values])
        return views(coded_mean(flat, self.code, link), tensors)


def _orthogonal(p: Tensor) -> Tensor:
    """An orthonormal basis of the columns. Of what is not finite nan: LAPACK may refuse it, and asking here
    would make the host wait for the device."""
    finite = p.isfinite().all()
    basis: Tensor = torch.linalg.qr(torch.where(finite, p, 1.0)).Q
    return torch.where(finite, basis, torch.nan)
