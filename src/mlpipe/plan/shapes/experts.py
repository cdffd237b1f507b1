"""A preset with a mixture of experts in each block, read off `train/models/moe.py`, of one rank that has all
experts: all lie in memory and are read, and a token is computed by those that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlpipe._core.presets import MoeConfig
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import StepShape


@dataclass(frozen=True)
class Experts(Dense):
    """With these sizes. Experts are taken to have equally many tokens, which is what balances them."""

    config: MoeConfig

    @property
    def widths(self) -> Mapping[str, int]:
        config = self.config
        of_experts = {"num_experts": config.num_experts, "experts_per_token": config.experts_per_token}
        return {**super().widths, **of_experts}

    @property
    def _ffn_channels(self) -> int:
        return self.config.experts_per_token * self.config.ffn_dim + self.config.shared_dim

    def _saved_in_ffn(self, width: int) -> list[int]:
        """As a feed-forward's; besides what comes to and from the experts of a token, the router's affinities
        in fp32 with what is biased of them, and the order of the rows and its inverse."""
        config, k = self.config, self.config.experts_per_token
        shared = 4 * [width * config.shared_dim] if config.num_shared_experts else []
        routed = [*4 * [width * k * config.ffn_dim], *2 * [width * k * config.dim]]
        return [*shared, *routed, *2 * [4 * config.num_experts], *2 * [8 * k]]

    def _matmuls(self, step: StepShape, kernels: Kernels) -> list[float]:
        """Of the experts' each is of few rows, and all weights are read."""
        config, tokens = self.config, step.num_tokens
        *others, _, _, _ = config.matmuls()
        rows = -(-tokens * config.experts_per_token // config.num_experts)
        routed = config.num_experts * kernels.matmul(rows, config.dim, config.ffn_dim)
        return [*(kernels.matmul(tokens, inner, outer) for inner, outer in others), *3 * [routed]]
