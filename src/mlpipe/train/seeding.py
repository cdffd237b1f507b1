"""Randomness as a function of where the training stands: there is nothing to save."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_step(seed: int, *where: int) -> None:
    """Randomness (dropout, augmentation) as a function of the seed and of `where`: step and data rank, or
    part, epoch and sample of a stream. The same after a resume, and the same on all ranks that work on the
    same samples. Mixed by SeedSequence so that neighbouring steps do not correlate."""
    mixed = int(np.random.SeedSequence([seed, *where]).generate_state(1, np.uint64)[0])
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
