"""Weights of few bits: what they say, how far that is from what they were, and what is computed with them."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpipe._core.quantized import BLOCK, NF4, STEPS, Base, row_bytes
from mlpipe.plan.model import AdapterPlan
from mlpipe.train.export_merged import in_few_bits
from mlpipe.train.models import quantized_linear
from mlpipe.train.models.quantized_linear import QuantizedLinear, dequantize, quantize, quantized_layers
from mlpipe.train.parallel import lora

pytestmark = pytest.mark.torch
LEVELS: dict[Base, list[float]] = {
    "nf4": list(NF4),
    "int8": [step / STEPS for step in range(-STEPS, STEPS + 1)],
}


def test_nf4_has_the_quantiles_of_a_normal_distribution():
    """Half of them on either side of 0, as bitsandbytes' `create_normal_map` has it: equally likely up to
    where 1 - 0.9677083 is left."""
    sides = [[0.5 + 0.4677083 * part / number for part in range(number + 1)] for number in (7, 8)]
    below, above = ([NormalDist().inv_cdf(share) for share in side] for side in sides)
    largest = above[-1]
    expected = [-value / below[-1] for value in below[:0:-1]] + [value / largest for value in above]
    assert pytest.approx(expected, abs=2e-7) == NF4


@settings(max_examples=30, deadline=None)
@given(
    base=st.sampled_from(list(LEVELS)),
    rows=st.integers(1, 5),
    columns=st.integers(1, 3 * BLOCK),
    exponent=st.integers(-20, 20),
    seed=st.integers(0, 2**31),
)
def test_each_weight_becomes_the_nearest_of_its_block(base, rows, columns, exponent, seed):
    """Times the largest of the block, which is rounded to bf16; blocks of zeros stay zeros. The export,
    which has no torch, says the same to the bit."""
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weights[:, :BLOCK] *= seed % 2
    codes = quantize(weights, base)
    assert codes.shape == (rows, row_bytes(columns, base))
    made = dequantize(codes, columns, base)
    assert torch.equal(torch.from_numpy(in_few_bits(weights.numpy(), base).copy()), made)
    levels = torch.tensor(LEVELS[base], dtype=torch.float64)
    half_gap = (levels[1:] - levels[:-1]).max() / 2
    for start in range(0, columns, BLOCK):
        block = weights[:, start : start + BLOCK].double()
        largest = block.abs().amax(1, keepdim=True)
        scale = largest.float().bfloat16().double()
        own = made[:, start : start + BLOCK].double()
        exact = own * largest / scale.where(scale > 0, 1.0)  # were the scale not rounded
        nearest = (block[..., None] - largest[..., None] * levels).abs().amin(-1)
        assert ((exact - block).abs() <= nearest + 1e-6 * largest).all()
        assert ((own - block).abs() <= largest * (half_gap + 2.0**-8)).all()


class Traced(torch.Tensor):
    """In the place of torch's FakeTensor."""


def test_the_table_of_nf4_is_made_once_and_not_by_a_trace(monkeypatch):
    """A trace before leaves no tensor of its own behind, and one after it finds none of ours."""
    made, make = [], quantized_linear._made_pairs
    monkeypatch.setattr(quantized_linear, "_kept_pairs", {})
    monkeypatch.setattr(quantized_linear, "_made_pairs", lambda device: made.append(device) or make(device))
    codes = quantize(torch.randn(3, 100), "nf4")
    first = dequantize(codes.as_subclass(Traced), 100, "nf4")
    with torch.inference_mode():
        dequantize(codes, 100, "nf4")
    assert torch.equal(dequantize(codes, 100, "nf4"), first)
    assert len(made) == 2
    assert not quantized_linear._kept_pairs[codes.device].is_inference()
    dequantize(codes.as_subclass(Traced), 100, "nf4")
    assert len(made) == 3


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("base", LEVELS)
def test_gradients_are_those_beside_the_weights_that_the_codes_say(base, dora):
    """Of layers with biases; for the backward pass the codes are kept, no weights."""
    made: list[list[torch.Tensor]] = []
    kept: list[torch.Tensor] = []
    quantized: list[tuple[str, QuantizedLinear]] = []
    for adapter in (AdapterPlan(4, 6.0, dora=dora, base=base), AdapterPlan(4, 6.0, dora=dora)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(100, 96), torch.nn.Linear(96, 7))
        if adapter.base is None:
            with torch.no_grad():
                for layer, (_, other) in zip(model, quantized, strict=True):
                    layer.weight.copy_(other.weight)
        adapted = lora._adapt(model, list(model), adapter)
        quantized += quantized_layers(model)
        assert len(quantized) == 2
        torch.manual_seed(1)
        lora._fill(adapted)
        with torch.no_grad():
            for layer in adapted:
                layer.lora_B.normal_()
        x = torch.randn(3, 100, requires_grad=True)

        def keep(tensor: torch.Tensor) -> Any:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = model(x)
        if adapter.base is not None:
            assert not [one for one in kept if one.is_floating_point() and one.numel() in (9600, 672)]
            assert sum(one.dtype == torch.uint8 for one in kept) == 2
        y.square().sum().backward()
        trained = [one for one in model.parameters() if one.requires_grad]
        assert len(trained) == 2 * (3 if dora else 2)
        made.append([y.detach(), x.grad, *(one.grad for one in trained)])
    for own, other in zip(*made, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4)


def test_under_autocast_it_computes_in_its_dtype():
    layer = QuantizedLinear(torch.nn.Linear(64, 8), "nf4")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 64)).dtype == torch.bfloat16
    assert layer(torch.randn(2, 64, dtype=torch.float64)).dtype == torch.float64
