"""Randomness as a function of where the training stands: there is nothing to save."""

from __future__ import annotations

import random

import numpy as np
import torch
from numpy.random import SeedSequence  # NumPy would import it at its first use, 10 ms in each rank


def seed_step(seed: int, step: int, data_rank: int) -> None:
    """Randomness (dropout, augmentation) as a function of these three: the same after a resume, and the same
    on all ranks that work on the same samples."""
    mixed = seed_host(seed, step, data_rank)
    # without a device torch.manual_seed notes it for one, with its caller's stack: 0.3 ms of each step
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(mixed)


def seed_host(seed: int, *where: int) -> int:
    """What is drawn on the CPU as a function of the seed and of `where`, such as the part, the epoch and the
    sample of a stream. Mixed by SeedSequence so that neighbours do not correlate. Returns the mixture. Looks
    for no devices, which takes torch.manual_seed most of its time: cheap enough for each sample."""
    mixed = int(SeedSequence([seed, *where]).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    return mixed
