"""Samples of a user's own set that differ in length, and that it tells the lengths of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kit import plans
from kit.weights import weights

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.train.data.datasets import open_dataset

pytestmark = pytest.mark.torch
SEQ_LEN = 80  # some samples are longer


def of(entry: str = "uneven", **args: Any) -> DataPlan:
    return DataPlan(None, Entry(f"kit.own_data:{entry}", args), None, packing="off")


def test_packed_and_padded_they_train_the_same(tmp_path):
    """Balanced with equally many microbatches, and with as many as it takes; the same batches: each token of
    each sample is trained on once."""
    tokens = plans.write_tokens(tmp_path / "tokens")
    model = plans.model_plan(max_seq_len=SEQ_LEN)._replace(seq_len=SEQ_LEN)
    common: dict[str, Any] = {
        "model": model, "steps": 4, "every": 4, "global_batch": 8, "micro_batch": 1, "accumulation": 4
    }  # fmt: skip
    ways: dict[str, dict[str, Any]] = {
        "padded": {"data": of()},
        "rows": {"data": of(what="lengths")._replace(packing="best_fit")},
        "balanced": {"data": of()._replace(packing="balanced"), "strategy": "fsdp"},
        "resident": {
            "data": of()._replace(packing="balanced"),
            "strategy": "fsdp", "communication": "resident", "reshard_after_forward": False,
        },
    }  # fmt: skip
    made = {
        name: plans.train_plan(tmp_path / "store", tokens, run_id=name, **common, **way)
        for name, way in ways.items()
    }
    plans.run_together(list(made.values()), tmp_path / "run")
    found = {name: weights(tmp_path / "store", plan, tmp_path / "out") for name, plan in made.items()}
    computed = {
        name: [
            record
            for rank in (0, 1)
            for record in plans.records(tmp_path / "store", plan, rank)
            if record["kind"] == "step"
        ]
        for name, plan in made.items()
    }
    for name in made:
        for tensor, value in found["padded"].items():
            torch.testing.assert_close(found[name][tensor], value, rtol=0, atol=1e-5, msg=f"{name} {tensor}")
        targets, padding = (
            sum(record[key] for record in computed[name]) for key in ("target_tokens", "padding_tokens")
        )
        assert targets == sum(record["target_tokens"] for record in computed["padded"])
        assert (padding > 0) == (name == "padded")


def test_samples_are_cut_and_padded_with_what_is_not_learnt():
    samples = open_dataset(of(), split="train", seq_len=SEQ_LEN)
    longest = max(range(24), key=lambda i: i * 37 % 88)
    assert samples.lengths.tolist() == [min(SEQ_LEN, 3 + i * 37 % 88) for i in range(24)]
    assert samples.notes == [
        f"{sum(3 + i * 37 % 88 > SEQ_LEN for i in range(24))} of 24 samples cut to 80 tokens"
    ]
    assert sum(samples.length_counts.values()) == 24
    batch = samples.padded(np.array([0, longest]))
    own = samples.dataset[longest]
    assert batch["inputs"].shape == (2, SEQ_LEN)
    assert batch["inputs"][0].tolist() == samples.dataset[0]["inputs"].tolist() + [0] * (SEQ_LEN - 3)
    assert batch["targets"][0].tolist() == samples.dataset[0]["targets"].tolist() + [-100] * (SEQ_LEN - 3)
    assert batch["targets"][1].tolist() == own["targets"][:SEQ_LEN].tolist()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (of(what="lies"), "sample 5 has 12 tokens, and its data set says 13"),
        (of(what="other"), r"sample 5 is inputs \(13,\) of int64, targets \(12,\) of int64"),
        (of(what="none"), "says that sample 5 has 0 tokens"),
        (of("numbers", size=9, base=3), "does not tell how long its samples are: AttributeError"),
        (of("texts"), "does not tell how long its samples are"),
        (of("forgetful"), "cannot tell how long its samples are"),
    ],
)
def test_a_set_that_does_not_keep_its_word_is_told_with_the_sample(data, told):
    def read() -> None:
        open_dataset(data, split="train", seq_len=SEQ_LEN).padded(np.arange(8))

    with pytest.raises(TrainError, match=told) as error:
        read()
    assert error.value.where.startswith("kit.own_data:")
    assert error.value.hint
    assert error.value.kind == "input"
