"""Next-token cross-entropy, as a sum: the loop divides by the target tokens of the global batch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss in nats (fp32 scalar) and the number of targets that count (int64 scalar). Targets
    of -100 are ignored. Computed in fp32 whatever the logits' dtype."""
    logits = logits_BTV.flatten(0, -2).float()
    targets = targets_BT.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()
