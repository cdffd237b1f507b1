"""Attention of each token to those before it.

B batch · T tokens · H query heads · K key/value heads · C channels of a head
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor) -> Tensor:
    """(B, H, T, C). Each group of H / K query heads shares a key/value head."""
    grouped = q_BHTC.shape[1] != k_BKTC.shape[1]
    if grouped and q_BHTC.is_cuda and q_BHTC.dtype == torch.float32:
        # the only kernel for fp32 that stores no T x T matrix knows no groups
        each = q_BHTC.shape[1] // k_BKTC.shape[1]
        k_BKTC, v_BKTC = (x.repeat_interleave(each, dim=1) for x in (k_BKTC, v_BKTC))
        grouped = False
    return F.scaled_dot_product_attention(q_BHTC, k_BKTC, v_BKTC, is_causal=True, enable_gqa=grouped)
