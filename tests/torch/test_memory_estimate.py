"""The planner's arithmetic against the real model: parameters exactly, saved activations within 5 %."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
import torch

from mlpipe._core.patterns import frozen
from mlpipe._core.presets import PRESETS, LlamaConfig
from mlpipe.plan.axes.axis import Layout, RankWork
from mlpipe.plan.memory import rank_tensors
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.settings import Precision
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.frozen import Frozen
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.tensors import total
from mlpipe.train.model import LossModule
from mlpipe.train.models import moe
from mlpipe.train.models.llama import build_model
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations
from mlpipe.train.parallel.fused_head import head_cross_entropy_sum
from mlpipe.train.precision import autocast
from mlpipe.train.trace import _Meter

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters(preset: str) -> None:
    build = moe.build_model if preset.startswith("moe-") else build_model
    with torch.device("meta"):
        model = build(**asdict(PRESETS[preset]))
    sizes = Dense(PRESETS[preset]).parameters
    assert sum(p.numel() for p in model.parameters()) == sizes.total
    assert sum(p.numel() for p in model.layers[0].parameters()) == sizes.block
    shapes = [(name, p.numel(), p.shape[0]) for name, p in model.named_parameters()]
    assert [(one.name, one.size, one.rows) for one in PRESETS[preset].named_tensors()] == shapes


@pytest.mark.parametrize(
    ("preset", "precision"),
    [*product(("llama-1m", "llama-4m"), ("fp32", "bf16")), ("llama-1m", "fp16")],
)
def test_saved_activations(preset: str, precision: Precision) -> None:
    config = PRESETS[preset]
    model = build_model(**asdict(config))
    model.init_weights()
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    ids = torch.randint(config.vocab_size, (2, 256))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast("cpu", precision):
        model(ids)
    copies = 0  # autocast's copies of the matrices: buffers of the strategy, not activations
    if precision != "fp32":
        copies = 2 * sum(p.numel() for p in model.parameters() if p.dim() == 2)
    seen = sum(storage.nbytes() for storage in saved.values()) - copies
    step = StepShape(256, 2, 1, precision, "none", compiled=False)
    assert total(Dense(config).activations(step, "cpu").saved) == pytest.approx(seen, rel=0.05)


def alive(config: LlamaConfig, step: StepShape, patterns: tuple[str, ...]) -> int:
    """Bytes at the peak of its micro-batches, without weights. `patterns`: of what is frozen."""
    model = build_model(**asdict(config))
    model.init_weights()
    named = dict(model.named_parameters())
    for name in frozen(patterns, named, ValueError) if patterns else ():
        named[name].requires_grad_(False)
    if step.checkpointing != "none":
        checkpoint_activations(list(model.layers), step.checkpointing)
    module = LossModule(model, "cpu", step.precision)
    module.head_loss = head_cross_entropy_sum if step.fused_head else None
    ids = torch.zeros((1, step.num_tokens), dtype=torch.int64)
    with _Meter([*module.parameters(), *module.buffers(), ids]) as meter:
        for _ in range(step.accumulation):
            module({"inputs": ids, "targets": ids})[0].backward()
    return meter.most


MANY, WIDE = {"num_layers": 8, "vocab_size": 512}, {"num_layers": 16, "vocab_size": 8192}
TIED, FREE = ({"num_layers": 2, "vocab_size": 8192, "tied": tied} for tied in (True, False))


@pytest.mark.parametrize(
    ("sizes", "precision", "mode", "loss", "tokens", "accumulation", "patterns"),
    [
        (MANY, "bf16", "full", "logits", 32, 1, ()),  # gradients, with the copies of one block
        (MANY, "bf16", "full", "logits", 32, 2, ()),  # the end of a forward pass, with all copies
        (MANY, "bf16", "selective", "logits", 32, 2, ()),
        (WIDE, "bf16", "full", "logits", 512, 1, ()),  # the loss
        (WIDE, "fp32", "full", "fused", 512, 1, ()),
        (MANY, "bf16", "none", "logits", 32, 2, ()),
        (FREE, "bf16", "none", "logits", 4, 1, ()),  # gradients, with the copies of one block
        (FREE, "bf16", "none", "logits", 256, 1, ()),  # the loss, with no copy of the embedding
        (FREE, "fp32", "none", "logits", 4, 2, ()),  # the gradient of the head, beside all others
        (TIED, "fp32", "none", "logits", 4, 1, ()),  # that of the embedding is added to it, and the sum
        (TIED, "fp32", "full", "logits", 4, 2, ()),
        # neither activations nor copies of the blocks below those that are trained
        (MANY, "fp32", "none", "logits", 128, 1, ("embed*", "layers.[0-4].*")),
        (MANY, "bf16", "none", "logits", 128, 1, ("embed*", "layers.[0-4].*")),
        # the gradient of an embedding alone, beside what it is added to
        (FREE, "bf16", "full", "logits", 4, 2, ("layers.*", "lm_head.*")),
    ],
)
def test_what_passes_make_is_counted_while_it_is_alive(
    sizes: dict[str, Any],
    precision: Precision,
    mode: str,
    loss: str,
    tokens: int,
    accumulation: int,
    patterns: tuple[str, ...],
) -> None:
    """Autocast has copies of weights in the forward pass, and autograd those of what is not recomputed until
    its backward pass."""
    config = replace(PRESETS["llama-1m"], **sizes)
    step = StepShape(tokens, 1, accumulation, precision, mode, compiled=False, fused_head=loss == "fused")
    shape = Frozen(Dense(config), patterns) if patterns else Dense(config)
    cost = OptimizerCost(0)
    work = RankWork(
        shape.parameters, shape.activations(step, "cpu"), step, Layout(Mesh()), cost, overlap=False
    )
    tensors = rank_tensors(work)
    expected = tensors.peak - total(tensors.parameters) - total(tensors.optimizer)
    assert alive(config, step, patterns) == pytest.approx(expected, rel=0.06)
