"""Several samples behind each other in one row: none sees another, and each begins at position 0.

B batch, 1 here · T tokens of the row · N samples in it · H query heads · K key/value heads · C channels
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlpipe.train.models.attention import causal_attention

_GQA = "enable_gqa"


class Documents:
    """Of one row. `lengths_N`: tokens of each sample, which add up to T; int64, on the device of the row.
    `positions_T`: of each token in its own sample."""

    def __init__(self, lengths_N: Tensor, num_tokens: int) -> None:
        ends_N = lengths_N.cumsum(0)
        starts_T = (ends_N - lengths_N).repeat_interleave(lengths_N, output_size=num_tokens)
        self.positions_T = torch.arange(num_tokens, device=lengths_N.device) - starts_T
        self.lengths_N = lengths_N
        on_host = lengths_N.device.type == "cpu"  # else the host would wait for the device to tell them
        self.lengths: list[int] | None = lengths_N.tolist() if on_host else None
        self.borders = F.pad(ends_N, (1, 0)).to(torch.int32)

    def attend(self, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor) -> Tensor:
        """Causal, within each sample: (B, H, T, C). On CUDA in one kernel, but for fp32 and odd widths, which
        it does not take; else sample by sample, twice as fast on a CPU as a mask over the whole row."""
        if q_BHTC.is_cuda and q_BHTC.dtype != torch.float32 and not q_BHTC.shape[-1] % 8:
            from torch.nn.attention import SDPBackend, sdpa_kernel
            from torch.nn.attention.varlen import varlen_attn

            q_THC, k_TKC, v_TKC = (x[0].transpose(0, 1) for x in (q_BHTC, k_BKTC, v_BKTC))
            longest = q_BHTC.shape[2]  # at the most
            borders = self.borders, self.borders, longest, longest
            # torch 2.11 shares heads unasked, and knows no word for it
            grouped = q_BHTC.shape[1] != k_BKTC.shape[1]
            asked: dict[str, Any] = {_GQA: grouped} if _GQA in varlen_attn.__kwdefaults__ else {}
            # cuDNN's, which torch 2.15 takes on Hopper, adds gradients in any order
            exact = torch.are_deterministic_algorithms_enabled()
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if exact else nullcontext():
                y_THC: Any = varlen_attn(q_THC, k_TKC, v_TKC, *borders, window_size=(-1, 0), **asked)
            return y_THC.transpose(0, 1)[None]
        if self.lengths is None:
            self.lengths = self.lengths_N.tolist()
        parts = (x.split(self.lengths, dim=2) for x in (q_BHTC, k_BKTC, v_BKTC))
        return torch.cat([causal_attention(q, k, v) for q, k, v in zip(*parts, strict=True)], dim=2)
