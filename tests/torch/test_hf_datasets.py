"""Objects of Hugging Face's `datasets` as they are, and others that keep to the same protocol."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import hf, plans

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.data.streams import StreamReader
from mlpipe.train.data.workers import DataWorkers
from mlpipe.train.world import World

pytestmark = pytest.mark.torch
BATCH = 8


def data_of(function: str, **changes: Any) -> DataPlan:
    return DataPlan(None, Entry(f"kit.hf:{function}", {}), None)._replace(**changes)


def test_a_table_gives_tensors_unless_a_function_makes_the_batch():
    sample = open_dataset(data_of("plain"), split="train", seq_len=1)[3]
    assert (sample["x"].tolist(), sample["index"].item()) == ([3.0, 1.0, 2.0], 3)
    with pytest.raises(TrainError, match="not a dict of tensors") as caught:
        open_dataset(data_of("with_text"), split="train", seq_len=1)
    assert "data.collate" in (caught.value.hint or "")
    own = open_dataset(data_of("with_text", collate="kit.hf:texts"), split="train", seq_len=1)
    assert own[3]["x"] == [3.0, 1.0, 2.0]
    assert own.batch([own[0], own[1]])["inputs"].tolist() == [[97], [97]]


def readers(data: DataPlan, ranks: int, workers: int = 0, saved: Any = None) -> list[StreamReader]:
    dataset = open_dataset(data, split="train", seq_len=1)

    def workers_of(serve: Any) -> DataWorkers:
        return DataWorkers(serve, patience_seconds=60.0, beat=lambda: None, packages=frozenset())

    made = []
    for rank in range(ranks):
        world = World(Mesh(dp_replicate=ranks), rank, torch.device("cpu"))
        loader = MicrobatchLoader(dataset, world, seed=2, global_batch=BATCH, micro_batch=3, seq_len=1)
        made.append(
            StreamReader(
                loader, dataset, num_steps=1000, num_workers=workers, saved=saved, workers_of=workers_of
            )
        )
    return made


def stepped(made: list[StreamReader], number: int) -> list[int]:
    batches = [one for reader in made for one in reader.step(number, BATCH * (number - 1)) if one.counts]
    return sorted(index for one in batches for index in one.batch["index"].tolist())


@pytest.mark.parametrize("function", ["streamed", "shuffled", "duck"])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_stream_goes_on_at_its_sample_on_other_ranks_and_processes(function, splits):
    """In the second epoch, too."""
    data = data_of(function, splits=splits)
    alone = readers(data, 1)
    expected = [stepped(alone, number) for number in range(1, 11)]
    for epoch in (expected[:5], expected[5:]):
        assert sorted(index for step in epoch for index in step) == list(range(hf.NUM))
    for stop, ranks, workers in ((2, 2, 0), (3, 1, 3), (7, 2, 1)):
        before = readers(data, 1)
        for number in range(1, stop + 1):
            stepped(before, number)
        saved = before[0].state(stop)
        after = readers(data, ranks, workers, saved)
        found = [stepped(after, number) for number in range(stop + 1, 11)]
        for reader in after:
            if reader.workers is not None:
                reader.workers.close()
        assert found == expected[stop:]


def test_a_training_of_each_goes_on_as_if_nothing_had_happened(tmp_path):
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=3_000)

    def training(function: str, run_id: str, steps: int, attempt: int = 1):
        made = plans.train_plan(
            tmp_path / "store", tokens, run_id=run_id, steps=steps, every=4, attempt=attempt, world_size=1
        )
        model = ModelPlan(Entry("kit.own:stateless", {}), None, 1, ())
        data = DataPlan(None, Entry(f"kit.hf:{function}", {}), None, workers=attempt - 1)
        return replace(made, work=made.work._replace(model=model, data=data))

    made = []
    for function in ("plain", "shuffled"):
        made += [training(function, function, 8), training(function, f"{function}-cut", 4)]
        made.append(training(function, f"{function}-cut", 8, attempt=2))
    plans.run_together(made, tmp_path / "one")
    for whole, first, second in (made[:3], made[3:]):
        losses = [plans.losses(tmp_path / "store", one) for one in (whole, first, second)]
        assert losses[1] + losses[2] == losses[0]
        assert len(set(losses[0])) == 8
