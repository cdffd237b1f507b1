"""Products in float8 are those of the rounded operands, and a training with them learns as bf16 does."""

from __future__ import annotations

import pytest
import torch
from kit import plans
from torch import nn

from mlpipe._core.errors import TrainError
from mlpipe.plan.mesh import Mesh
from mlpipe.train.model import BuiltModel
from mlpipe.train.parallel import float8
from mlpipe.train.parallel.float8 import quantized
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World

pytestmark = pytest.mark.torch
CPU = World(Mesh(), 0, torch.device("cpu"))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(tensor, dtype):
    """As float8 has it, in fp32."""
    low, scale = quantized(tensor, dtype)
    return low.float() * scale


@pytest.mark.parametrize("num_tokens", [32, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_rounded_operands(num_tokens, bias):
    torch.manual_seed(0)
    layer = nn.Linear(48, 64, bias=bias)
    plain = nn.Linear(48, 64, bias=bias)
    plain.load_state_dict(layer.state_dict())
    layer.forward = float8._forward.__get__(layer)
    x = (3 * torch.randn(1, num_tokens, 48)).bfloat16().requires_grad_()
    upstream = torch.randn(1, num_tokens, 64).bfloat16()
    y = layer(x)
    y.backward(upstream)
    weight, grad = rounded(layer.weight.detach(), E4M3), rounded(upstream[0], E5M2)
    expected = rounded(x[0].detach(), E4M3) @ weight.T + (layer.bias.detach() if bias else 0)
    low = {"rtol": 2**-7, "atol": 2**-6}  # bf16 comes out
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y[0].float(), expected, **low)
    torch.testing.assert_close(x.grad[0].float(), grad @ weight, **low)
    of_weight = grad.T @ rounded(x[0].detach(), E4M3)
    if num_tokens % 16:  # which the kernel cannot sum along
        of_weight = upstream[0].float().T @ x[0].detach().float()
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, of_weight, rtol=2**-7, atol=2**-4)
    exact = plain(x.detach().float())[0]
    assert 0 < (y[0].float() - exact).norm() < 0.05 * exact.norm()


def test_a_scale_brings_the_largest_value_to_the_end_of_the_range():
    for tensor in (torch.tensor([1e-4, -3e-5]), torch.tensor([7e4, 1.0]), torch.zeros(2)):
        low, scale = quantized(tensor, E4M3)
        assert low.float().abs().max() == (torch.finfo(E4M3).max if tensor.any() else 0)
        torch.testing.assert_close((low.float() * scale)[0], tensor[0], rtol=1e-6, atol=0)


def test_layers_that_the_kernel_cannot_take_stay_as_they_are():
    fits, odd, outside = nn.Linear(16, 32), nn.Linear(16, 33), nn.Linear(16, 16)
    model = nn.ModuleList([fits, odd, outside])

    def apply(blocks):
        float8.apply(ParallelizedModel(BuiltModel(None, model, blocks, False, None), None), CPU, None)

    with pytest.raises(TrainError, match="no block has a linear layer whose sides are multiples of 16"):
        apply([odd])
    apply([nn.ModuleList([fits, odd])])
    x = torch.randn(16, 16)
    assert [layer(x).dtype for layer in model] == [torch.bfloat16, torch.float32, torch.float32]
    assert fits(x[:0]).shape == (0, 32), "an expert without a token"


SETTINGS = {
    "ddp": {"micro_batch": 4, "accumulation": 2},
    "fsdp": {"activation_checkpointing": "full"},
    "cp": {"mesh": Mesh(cp=2), "micro_batch": 16},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float8")
    tokens = plans.write_tokens(folder / "tokens")
    made = {
        (name, low): plans.train_plan(
            folder / "store",
            tokens,
            strategy="ddp" if name == "cp" else name,
            steps=20,
            every=10,
            precision="bf16",
            float8=low,
            run_id=f"{name}-{low}".lower(),
            **settings,
        )
        for name, settings in SETTINGS.items()
        for low in (False, True)
    }
    half = {"strategy": "fsdp", "precision": "bf16", "float8": True, "run_id": "again", **SETTINGS["fsdp"]}
    first = plans.train_plan(folder / "store", tokens, steps=10, every=10, **half)
    made["again"] = plans.train_plan(folder / "store", tokens, steps=20, every=10, attempt=2, **half)
    plans.run_together([first, *made.values()], folder / "runs")
    return folder / "store", made


@pytest.mark.combines("dp_replicate", "float8")
@pytest.mark.combines("dp_shard", "float8")
@pytest.mark.combines("cp", "float8")
@pytest.mark.combines("float8", "accumulation")
@pytest.mark.combines("float8", "precision bf16")
@pytest.mark.combines("float8", "activation_checkpointing full")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_learns_as_in_bf16(trained, name):
    store, made = trained
    plain, low = (plans.by_step(store, made[name, low], "loss") for low in (False, True))
    assert low != plain
    assert low[0] == pytest.approx(plain[0], rel=2e-3)
    fallen = plain[0] - plain[-1]
    assert low[-1] == pytest.approx(plain[-1], abs=0.1 * fallen)


@pytest.mark.combines("float8", "dp_shard")
def test_a_resumed_training_has_the_same_losses(trained):
    store, made = trained
    whole = plans.by_step(store, made["fsdp", True], "loss")
    assert plans.by_step(store, made["again"], "loss")[-10:] == whole[10:]
