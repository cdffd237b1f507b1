"""Seconds of single kernels against what others measured of them."""

from __future__ import annotations

import dataclasses

import pytest

from mlpipe.plan.hardware import detect_hardware
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.time import slowest_ratio
from mlpipe.spec.model import Resources

pytestmark = pytest.mark.unit
EIGHT = detect_hardware(Resources.model_validate({"gpus_per_node": 8, "gpu": "H100-80GB"}))
KERNELS = Kernels("bf16", False, "cuda", EIGHT.speed)


@pytest.mark.parametrize(
    ("seq_len", "teraflops"), [(1024, 260), (2048, 298), (4096, 319), (8192, 333), (16384, 335)]
)
def test_attention_is_slower_over_short_sequences(seq_len: int, teraflops: float) -> None:
    """FlashAttention-2 on an H100, causal, 128 channels a head: Shah et al. 2024, figure 5."""
    assert 1e15 / KERNELS.attention(1e15, seq_len) == pytest.approx(teraflops * 1e12, rel=0.04)


def test_smaller_matmuls_reach_less_of_the_peak() -> None:
    rates = [2 * n**3 / KERNELS.matmul(n, n, n) / 989e12 for n in (1024, 2048, 4096, 8192, 65536)]
    assert rates == sorted(rates)
    assert rates[2] == pytest.approx(0.66, abs=0.005)
    assert rates[-1] == pytest.approx(0.80, abs=0.01)


def test_all_wait_for_the_slowest_device() -> None:
    """Expected largest of 8 and 1,024 samples of a normal distribution: 1.42 and 3.2 standard deviations."""
    many = dataclasses.replace(EIGHT, num_nodes=128)
    assert slowest_ratio(EIGHT) == pytest.approx(1 + 1.42 * 0.05 / 2.85, abs=0.004)
    assert slowest_ratio(many) == pytest.approx(1 + 3.2 * 0.05 / 2.85, abs=0.004)
    assert slowest_ratio(dataclasses.replace(EIGHT, devices_per_node=1)) == 1
    assert slowest_ratio(dataclasses.replace(EIGHT, device="cpu")) == 1
