"""The planner's arithmetic against the real model: parameters exactly, saved activations within 5 %."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product

import pytest
import torch

from mlpipe._core.presets import PRESETS
from mlpipe.plan.settings import Precision
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.tensors import total
from mlpipe.train.models import moe
from mlpipe.train.models.llama import build_model
from mlpipe.train.precision import autocast

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
