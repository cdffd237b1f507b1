"""Loss scaling for fp16 (Micikevicius et al., Mixed Precision Training, 2018): the gradient of the loss is
multiplied by so much that what flows back is not too small for fp16, and not too large. How much is found
while it trains, by the rule and the figures of `torch.amp.GradScaler`: halved where a gradient overflows, in
a step that then updates nothing, and doubled after so many steps without.

Whether one has overflowed on any rank follows from the gradient's norm, which all ranks add up in any case.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mlpipe.train.model import LossModule

INITIAL, MOST, LEAST = 2.0**16, 2.0**127, 1.0
_GROWTH_STEPS = 2_000
_KEY = "loss_scale"  # in the scalars of a checkpoint


class LossScale:
    """`scale`: of a loss that is the mean over a rank's targets of a step, as GradScaler has it, of which
    `num_targets` are expected; `factor`: of the sum that `module` gives. Powers of two, which change no digit
    of what neither overflows nor vanishes."""

    def __init__(self, module: LossModule, num_targets: int, growth_steps: int = _GROWTH_STEPS) -> None:
        self.scale = INITIAL
        self.good_steps = 0
        self.num_skipped = 0
        self._growth_steps = growth_steps
        self._unit = 2.0 ** math.ceil(math.log2(num_targets))
        device = next(module.parameters()).device
        # in place, so that a compiled module sees it change
        self._tensor = module.gradient_scale = torch.full((), self.factor, device=device)

    @property
    def factor(self) -> float:
        """By which gradients are too large."""
        return self.scale / self._unit

    def is_hopeless(self) -> bool:
        """Whether nothing smaller would help: what overflows is not the scale's fault."""
        return self.scale <= LEAST

    def update(self, *, overflowed: bool) -> None:
        """After each step."""
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.num_skipped += 1
            self._set(self.scale / 2)
        elif self.good_steps == self._growth_steps:
            self.good_steps = 0
            self._set(min(2 * self.scale, MOST))

    def scalars(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        return {_KEY: {"scale": self.scale, "good_steps": self.good_steps, "num_skipped": self.num_skipped}}

    def load(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them; of a training in another precision none."""
        if (saved := scalars.get(_KEY)) is not None:
            self.good_steps, self.num_skipped = saved["good_steps"], saved["num_skipped"]
            self._set(saved["scale"])

    def _set(self, scale: float) -> None:
        self.scale = scale
        self._tensor.fill_(self.factor)
