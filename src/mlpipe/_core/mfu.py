"""Model FLOPs utilization: the share of the devices' peak that goes into what the model needs.

Source: Chowdhery et al., PaLM (arXiv:2204.02311), appendix B: tokens a second over those that the peak would
allow, of a model that needs so many FLOPs a token. Tokens are those that were computed, whether the loss is
over them or not; what activation checkpointing computes again is not counted (with it, it is HFU).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # planning needs the formula and no record
    from mlpipe._core.records import Step


def mfu_ratio(num_flops_per_token: float, tokens_per_second: float, peak_flops: float) -> float:
    """`tokens_per_second` and `peak_flops` (FLOP/s) of the same devices, one or all."""
    return num_flops_per_token * tokens_per_second / peak_flops


def throughput(steps: Iterable[Step]) -> tuple[float | None, float | None]:
    """Tokens per second and MFU over steps of rank 0, which knows them of all ranks: sums divided, not a mean
    of ratios. None where no step says."""
    seconds = tokens = used_seconds = used = 0.0
    for step in steps:
        took, rate, ratio = step.seconds, step.tokens_per_second, step.mfu_ratio
        if took and rate is not None:
            seconds, tokens = seconds + took, tokens + rate * took
        if took and ratio is not None:
            used_seconds, used = used_seconds + took, used + ratio * took
    return (tokens / seconds if seconds else None, used / used_seconds if used_seconds else None)


def utilization_query(
    flops: str = "mlpipe_train_model_flops_total",
    peak: str = "mlpipe_train_peak_flops",
    *,
    by: str = "",
    where: str = "",
    window: str,
) -> str:
    """PromQL: the same out of the counters of all ranks, a quotient of sums `by` some labels. Of other
    counters and peaks HFU, or the share of what is achievable."""
    group = f" by ({by})" if by else ""
    matched = f"{{{where}}}" if where else ""
    return f"sum{group} (rate({flops}{matched}[{window}])) / sum{group} ({peak}{matched})"
