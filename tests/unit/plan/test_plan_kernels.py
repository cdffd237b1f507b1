"""Seconds of single kernels against what others measured of them."""

from __future__ import annotations

from typing import Literal, cast

import pytest

from mlpipe._core.presets import PRESETS, MoeConfig
from mlpipe.plan.axes.axis import Layout
from mlpipe.plan.hardware import detect_hardware
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.shapes.experts import Experts
from mlpipe.plan.shapes.shape import Part, StepShape
from mlpipe.plan.time import gradient_seconds, slowest_ratio
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
    assert rates[2] == pytest.approx(0.66, abs=0.02)
    assert rates[-1] == pytest.approx(0.80, abs=0.01)


def test_all_wait_for_the_slowest_device() -> None:
    """Expected largest of 8 and 1,024 samples of a normal distribution: 1.42 and 3.2 standard deviations."""
    many = EIGHT._replace(num_nodes=128)
    assert slowest_ratio(EIGHT) == pytest.approx(1 + 1.42 * 0.05 / 2.85, abs=0.004)
    assert slowest_ratio(many) == pytest.approx(1 + 3.2 * 0.05 / 2.85, abs=0.004)
    assert slowest_ratio(EIGHT._replace(devices_per_node=1)) == 1
    assert slowest_ratio(EIGHT._replace(device="cpu")) == 1


@pytest.mark.parametrize(
    ("mesh", "sends", "precision", "device", "num_bytes"),
    [
        (Mesh(tp=8), "last", "bf16", "cuda", 3 * 6 + 2 * 12),
        (Mesh(dp_shard=8), "last", "bf16", "cuda", 3 * 6 + 2 * 12),
        (Mesh(dp_shard=8), "every", "bf16", "cuda", 3 * 6),
        (Mesh(dp_replicate=8), "last", "fp32", "cuda", 2 * 12),
        (Mesh(tp=8), "last", "bf16", "cpu", 0),
    ],
)
def test_gradients_are_cast_and_added_up(
    mesh: Mesh,
    sends: Literal["last", "every"],
    precision: str,
    device: Literal["cpu", "cuda"],
    num_bytes: int,
) -> None:
    """Of three micro-batches, at 0.8 of the memory's bandwidth."""
    step = StepShape(128, 1, 3, precision, "none", compiled=False)
    hardware = EIGHT._replace(device=device)
    seconds = gradient_seconds(step, 10**9, Layout(mesh, reduce_gradients=sends), hardware)
    assert seconds == pytest.approx(num_bytes * 1e9 / (0.8 * 3.35e12))


def test_experts_that_ranks_divide_have_longer_products() -> None:
    """Of moe-16b each of 8 ranks has 8 of 64 experts, and 8 times the rows for each: as many FLOPs, and an
    eighth of the weights to read. Rows move twice as often."""
    shape = Experts(cast(MoeConfig, PRESETS["moe-16b"]))
    config = shape.config
    steps = [StepShape(4096, 1, 1, "bf16", "none", False, Part(ep=ep)) for ep in (1, 8)]
    alone, divided = (sum(shape._matmuls(step, KERNELS)) for step in steps)
    spared = 3 * (64 - 8) * config.dim * config.ffn_dim * 2
    assert alone - divided == pytest.approx(spared / (0.8 * 3.35e12))
    moving, more = (shape._moving(step, KERNELS) for step in steps)
    assert more - moving == pytest.approx(2 * 4 * 4096 * 6 * config.dim / (0.8 * 3.35e12))
