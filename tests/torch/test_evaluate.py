"""What an evaluation tells of values that are no numbers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlpipe._core.serial import write_json
from mlpipe.train import evaluate as module
from mlpipe.train.validation import Measured

pytestmark = pytest.mark.torch


def test_a_loss_that_is_not_finite_fails_its_gate_in_words_and_is_null_in_the_store(monkeypatch):
    part = SimpleNamespace(precision="fp32", model=None, seed=0, steps=7, adapter=None, pipeline=None)
    plan: Any = SimpleNamespace(
        train=part, train_stage="fit", checkpoint="latest", weights="raw", metrics=(),
        data=SimpleNamespace(chat=None),
        max_tokens=8, prompt=None, generate_tokens=0, track=(),
        gate="val_loss < 3",
    )  # fmt: skip
    written: list[Any] = []
    session: Any = SimpleNamespace(
        plan=SimpleNamespace(run_id="r", stage="evaluate", store_url="s"), store=None, rank=0, world=None,
        device=torch.device("cpu"), record_start=lambda *_, **__: None,
        recorder=SimpleNamespace(write=written.append),
    )  # fmt: skip
    values = {"loss": math.nan, "perplexity": math.inf, "top_five": 0.5}
    held_out = SimpleNamespace(measure=lambda *_: Measured(values, 8, 1))
    replaced: dict[str, Any] = {
        "build_model": lambda *_, **__: SimpleNamespace(module=torch.nn.Identity()),
        "parallelize": lambda *_: SimpleNamespace(shards=[]),
        "load_or_damage": lambda *_: (None, ""),
        "make_schedule": lambda *_: None,
        "HeldOut": lambda *_: held_out,
    }
    for name, replacement in replaced.items():
        monkeypatch.setattr(module, name, replacement)
    monkeypatch.setattr(module.catalogue, "latest", lambda *_: SimpleNamespace(key="k", step=7))
    outcome = module.evaluate(session, plan)
    assert (outcome.outcome, outcome.kind) == ("failed", "failed")
    assert "the gate `val_loss < 3` does not hold: val_loss = nan" in outcome.message
    told = json.loads(write_json(outcome.details))["metrics"]
    assert told["val_loss"] is told["val_perplexity"] is None
    assert told["top_five"] == 0.5
    plan.gate = "top_five > 0.4"
    assert module.evaluate(session, plan).outcome == "done"
