"""A preset with a mixture of experts in each block, read off `train/models/moe.py`, of one rank that has all
experts: all lie in memory and are read, and a token is computed by those that it has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from mlpipe._core.presets import MoeConfig
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.shapes.dense import Dense, split
from mlpipe.plan.shapes.shape import Part, StepShape


@dataclass(frozen=True)
class Experts(Dense):
    """With these sizes. Experts are taken to have equally many tokens, which is what balances them."""

    WIDTHS: ClassVar[tuple[str, ...]] = (
        *Dense.WIDTHS,
        "num_experts",
        "experts_per_token",
        "num_shared_experts",
    )

    config: MoeConfig

    @property
    def _places(self) -> float:
        """Of experts, for each token: with a capacity also those that stay empty are computed."""
        config, k = self.config, self.config.experts_per_token
        return k if config.capacity_factor is None else min(config.num_experts, k * config.capacity_factor)

    @property
    def _ffn_channels(self) -> int:
        return self.config.experts_per_token * self.config.ffn_dim + self.config.shared_dim

    @property
    def _linear_ffn_channels(self) -> int:
        return self.config.shared_dim

    def _saved_in_ffn(self, width: int, tp: int) -> list[int]:
        """As a feed-forward's; besides what comes to and from the experts of a token, the router's affinities
        in fp32 with what is biased of them, and the order of the rows and its inverse. Under `tp` each rank
        has its experts, and all tokens with all that stands around the experts."""
        config, k, places = self.config, self.config.experts_per_token, self._places
        shared = 4 * [width * config.shared_dim // tp] if config.num_shared_experts else []
        routed = [
            *4 * [int(width * places * config.ffn_dim) // tp],
            *2 * [int(width * max(k, places) * config.dim)],
        ]
        return [*shared, *routed, *2 * [4 * config.num_experts], *2 * [8 * k]]

    def _matmuls(self, step: StepShape, kernels: Kernels) -> list[float]:
        """Of the experts' each is of few rows, and all weights are read. Under `tp` and `ep` a rank has whole
        experts of its own, with `ep` for the tokens of so many ranks, and the router of all."""
        config, tokens, tp, ep = self.config, step.num_tokens, step.part.tp, step.part.ep
        others, router = config.matmuls()[:-3], (config.dim, config.num_experts)
        rows = math.ceil(ep * tokens * self._places / config.num_experts)
        routed = kernels.matmul(rows, config.dim, config.ffn_dim, config.num_experts // (tp * ep))
        parts = [one if one == router else split(*one, config.dim, tp) for one in others]
        return [*(kernels.matmul(tokens, inner, outer) for inner, outer in parts), *3 * [routed]]

    def _params_of_a_block(self, part: Part) -> float:
        experts = 3 * self.config.num_experts * self.config.dim * self.config.ffn_dim
        return (self.parameters.block - experts * (1 - 1 / part.ep)) / part.tp

    def _moving(self, step: StepShape, kernels: Kernels) -> float:
        """Rows are gathered by their experts and back, with `ep` once more where they come, and added up in
        fp32 by what the router gave them."""
        channels, width = step.num_tokens * self._places * self.config.dim, kernels.width
        gathers = 4 if step.part.ep > 1 else 2
        gathering = kernels.stream(channels * gathers * 2 * width, fuse=False)
        return gathering + kernels.stream(channels * (width + 8))
