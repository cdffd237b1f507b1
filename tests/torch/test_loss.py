"""The chunked cross-entropy is torch's own, in less memory."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

from mlpipe.train import loss
from mlpipe.train.loss import IGNORED, cross_entropy_sum

pytestmark = pytest.mark.torch


def problem(dtype, ignored=True):
    logits = (torch.randn(3, 50, 97, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    targets = torch.arange(150).reshape(3, 50) % 97
    if ignored:
        targets[:, ::7] = IGNORED
        targets[1] = IGNORED
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("elements", [1, 97 * 8, 97 * 50, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loss_and_gradient_are_those_of_torch(monkeypatch, elements, dtype):
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS_CPU", elements)
    logits, targets = problem(dtype)
    expected = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    (expected / 7).backward()
    expected_grad, logits.grad = logits.grad, None
    total, count = cross_entropy_sum(logits, targets)
    (total / 7).backward()
    assert total.dtype == torch.float32
    assert int(count) == int((targets != IGNORED).sum())
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    tolerance = {"rtol": 2**-6, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(logits.grad, expected_grad, **tolerance)


def test_nothing_to_predict_is_zero_and_has_no_gradient():
    logits, targets = problem(torch.float32)
    total, count = cross_entropy_sum(logits, torch.full_like(targets, IGNORED))
    total.backward()
    assert (total.item(), count.item()) == (0.0, 0)
    assert not logits.grad.any()


def test_without_gradients_none_are_kept():
    logits, targets = problem(torch.float32)
    with torch.no_grad():
        total, _ = cross_entropy_sum(logits, targets)
    assert not total.requires_grad


def test_a_loss_that_is_not_finite_stays_so():
    logits, targets = problem(torch.float32, ignored=False)
    with torch.no_grad():
        logits[0, 0, 0] = float("nan")
    assert not torch.isfinite(cross_entropy_sum(logits, targets)[0])


def test_a_second_backward_is_refused_not_wrong():
    logits, targets = problem(torch.float32)
    total, _ = cross_entropy_sum(logits, targets)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_is_the_chunked_one(monkeypatch, dtype):
    """Traced and run operator by operator: what is compiled for a GPU must be right before it is fast."""
    traced = tuple(torch.compile(f, backend="aot_eager") for f in (loss.fused_loss, loss.fused_gradient))
    monkeypatch.setattr(loss, "_compiled", lambda: traced)
    logits, targets = problem(dtype)
    expected, _ = cross_entropy_sum(logits, targets)
    (expected / 7).backward()
    expected_grad, logits.grad = logits.grad, None
    total, _ = cross_entropy_sum(logits, targets, fused=True)
    (total / 7).backward()
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad, expected_grad, rtol=2**-7, atol=1e-7)


def test_rows_of_any_number_are_compiled_twice(monkeypatch):
    """As they come of packed samples: dynamo gives up on a function of which it has made eight graphs."""
    counters = torch._dynamo.utils.counters
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(loss, "_compiled", cache(loss._compiled.__wrapped__))
    torch._dynamo.reset()
    counters.clear()
    logits, targets = problem(torch.float32)
    for number in range(30, 50):
        total, _ = cross_entropy_sum(logits[:, :number], targets[:, :number], fused=True)
        total.backward()
    assert counters["stats"]["unique_graphs"] == 4  # of the loss and of its gradient
