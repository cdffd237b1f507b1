"""Head and loss in one, `loss: fused`, are the loss of whole logits, in the memory that the plan counts."""

from __future__ import annotations

import weakref
from dataclasses import asdict, replace

import pytest
import torch
from kit import plans
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlpipe._core.errors import TrainError
from mlpipe._core.presets import PRESETS
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.sizes import HEAD_CHUNK_ELEMENTS
from mlpipe.train.loss import IGNORED, cross_entropy_sum
from mlpipe.train.models import moe
from mlpipe.train.models.llama import build_model
from mlpipe.train.parallel.fused_head import head_cross_entropy_sum

pytestmark = pytest.mark.torch

ROWS, VOCAB, DIM = 150, 97, 16


def problem(dtype):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, ROWS // 3, DIM, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, generator=draw).requires_grad_()
    targets = (torch.arange(ROWS) % VOCAB).reshape(3, -1).int()
    targets[:, ::7] = IGNORED
    return hidden, weight, targets


@pytest.mark.parametrize("elements", [1, VOCAB * 8, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, torch.tensor(4.0)])
def test_loss_and_gradients_are_those_of_whole_logits(monkeypatch, elements, dtype, scale):
    monkeypatch.setitem(HEAD_CHUNK_ELEMENTS, "cpu", elements)
    hidden, weight, targets = problem(dtype)
    logits = hidden @ weight.to(dtype).T
    expected, expected_count = cross_entropy_sum(logits, targets.long(), scale=scale)
    (expected / 7).backward()
    expected_grads, hidden.grad, weight.grad = (hidden.grad, weight.grad), None, None
    total, count = head_cross_entropy_sum(hidden, weight, targets, scale)
    (total / 7).backward()
    assert total.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    assert count == expected_count
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    tolerance = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(hidden.grad, expected_grads[0], **tolerance)
    torch.testing.assert_close(weight.grad, expected_grads[1], **tolerance)


def test_what_is_not_trained_has_no_gradient_and_a_second_backward_is_refused():
    hidden, weight, targets = problem(torch.float32)
    head_cross_entropy_sum(hidden, weight.detach(), targets)[0].backward()
    head_cross_entropy_sum(hidden.detach(), weight, targets)[0].backward()
    with pytest.raises(TrainError, match="do not fit targets"):
        head_cross_entropy_sum(hidden, weight, targets.float())
    total, _ = head_cross_entropy_sum(hidden, weight, targets)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made, now and at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        for tensor in tree_leaves(made):
            if not torch.is_tensor(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in given or storage._cdata in self.seen:
                continue
            self.seen.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self.died, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def died(self, key, num_bytes):
        self.seen.discard(key)
        self.now -= num_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("chunks", [1, 8])
def test_the_peak_is_within_5_percent_of_the_plans_and_logits_are_never_whole(monkeypatch, precision, chunks):
    config = replace(PRESETS["llama-1m"], vocab_size=4096)
    num_tokens, dtype = 512, {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    monkeypatch.setitem(HEAD_CHUNK_ELEMENTS, "cpu", num_tokens * config.vocab_size // chunks)
    hidden = torch.randn(2, num_tokens // 2, config.dim).to(dtype).requires_grad_()
    weight = torch.randn(config.vocab_size, config.dim).to(dtype).float().requires_grad_()
    with Alive() as alive:
        total, _ = head_cross_entropy_sum(hidden, weight, torch.zeros(2, num_tokens // 2, dtype=torch.int64))
    step = StepShape(num_tokens // 2, 2, 1, precision, "none", compiled=False, fused_head=True)
    planned = Dense(config).activations(step, "cpu").logit_bytes
    whole = Dense(config).activations(step._replace(fused_head=False), "cpu").logit_bytes
    copies = 2 * weight.numel() if precision == "bf16" else 0  # which the plan counts among the strategy's
    within = 4 * weight.numel() if precision == "bf16" else 0  # a kernel that adds bf16 to fp32 makes a copy
    assert alive.most - copies + within == pytest.approx(planned, rel=0.05)
    assert chunks == 1 or planned - within < 0.6 * whole
    assert total.requires_grad
    with torch.no_grad(), Alive() as alive:
        head_cross_entropy_sum(hidden, weight, torch.zeros(2, num_tokens // 2, dtype=torch.int64))
    assert alive.most - copies < planned - 2 * weight.numel()  # half of its gradient


@pytest.mark.parametrize(
    ("build", "config"),
    [(build_model, replace(plans.CONFIG, tied=False)), (moe.build_model, PRESETS["moe-2m"])],
)
def test_models_give_their_own_head(build, config):
    torch.manual_seed(0)
    model = build(**asdict(config))
    model.init_weights()
    tokens = torch.randint(model.config.vocab_size, (2, 33))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected, _ = cross_entropy_sum(model(inputs), targets)
    expected.backward()
    expected_grads = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    total, _ = model(inputs, head=lambda x, weight: head_cross_entropy_sum(x, weight, targets))
    total.backward()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, expected_grads[name], rtol=1e-4, atol=1e-5, msg=name)


SETTINGS = {
    "ddp": {"micro_batch": 4, "accumulation": 2},
    "fsdp": {"precision": "bf16", "activation_checkpointing": "full"},
    "zero1": {"precision": "fp16"},
    "cp": {"mesh": Mesh(cp=2), "micro_batch": 16},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    tokens = plans.write_tokens(folder / "tokens")
    made = {
        (name, loss): plans.train_plan(
            folder / "store",
            tokens,
            strategy="ddp" if name == "cp" else name,
            steps=4,
            every=4,
            loss=loss,
            run_id=f"{name}-{loss}",
            **settings,
        )
        for name, settings in SETTINGS.items()
        for loss in ("logits", "fused")
    }
    plans.run_together(list(made.values()), folder / "runs")
    return folder / "store", made


@pytest.mark.combines("dp_replicate", "loss fused")
@pytest.mark.combines("dp_shard", "loss fused")
@pytest.mark.combines("cp", "loss fused")
@pytest.mark.combines("loss fused", "accumulation")
@pytest.mark.combines("loss fused", "precision *16")
@pytest.mark.combines("loss fused", "activation_checkpointing full")
@pytest.mark.combines("loss fused", "strategy zero1")
@pytest.mark.parametrize("name", SETTINGS)
def test_trainings_have_the_same_losses(trained, name):
    store, made = trained
    tolerance = 1e-5 if name in ("ddp", "cp") else 2e-3
    for field in ("loss", "grad_norm"):
        whole, fused = (plans.by_step(store, made[name, loss], field) for loss in ("logits", "fused"))
        assert len(fused) == 4
        assert fused == pytest.approx(whole, rel=tolerance), field
