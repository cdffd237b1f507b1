"""Data sets that are iterated over: every sample has a number, and a run goes on at the very one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kit import own_data, plans

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.data.microbatch import Collated
from mlpipe.train.data.streams import Share, StreamReader
from mlpipe.train.data.workers import DataWorkers
from mlpipe.train.world import World

pytestmark = pytest.mark.torch
BATCH = 8


def data_of(function: str, splits: int = 1, **args: object) -> DataPlan:
    return DataPlan(None, Entry(f"kit.own_data:{function}", dict(args)), None, splits=splits)


def workers_of(serve) -> DataWorkers:
    return DataWorkers(serve, patience_seconds=60.0, beat=lambda: None, packages=frozenset({"kit"}))


def readers(data: DataPlan, ranks: int, workers: int = 0, saved=None) -> list[StreamReader]:
    dataset = open_dataset(data, split="train", seq_len=1)
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


def stepped(made: list[StreamReader], number: int) -> dict[int, list[float]]:
    """Samples of a step by their number as the set knows it, with what was drawn for them. All ranks have
    equally many microbatches."""
    found: list[tuple[int, list[float]]] = []
    batches = [reader.step(number, BATCH * (number - 1)) for reader in made]
    assert len({len(one) for one in batches}) == 1
    for one in (one for rank in batches for one in rank):
        if one.counts:
            found += zip(one.batch["index"].tolist(), one.batch["x"].tolist(), strict=True)
    assert len(found) == BATCH
    return dict(sorted(found))


def state_of(made: list[StreamReader], number: int) -> list:
    """As a checkpoint has it, of all ranks."""
    states: dict = {}
    for reader in made:
        states |= reader._states[number]
    return json.loads(json.dumps([states[part] for part in range(made[0].share.splits)]))


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(
    function=st.sampled_from(["stream", "forgetful"]),
    splits=st.sampled_from([1, 2, 4]),
    attempts=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4]), st.sampled_from([0, 1, 3])),
        min_size=1,
        max_size=3,
    ),
)
def test_on_any_number_of_ranks_and_workers_the_same_samples_come_and_none_twice(function, splits, attempts):
    data = data_of(function, splits)
    done, saved = 0, None
    alone = readers(data, 1)
    seen: Counter[int] = Counter()
    for steps, ranks, workers in attempts:
        made = readers(data, ranks, workers, saved)
        for number in range(done + 1, done + 1 + steps):
            found = stepped(made, number)
            assert found == stepped(alone, number)
            seen.update(list(found))
            saved = state_of(made, number)
        done += steps
        for reader in made:
            if reader.workers is not None:
                reader.workers.close()
    if function == "stream":
        rounds = BATCH * done // 40
        assert set(seen.values()) <= {rounds, rounds + 1}
        assert sum(seen.values()) == BATCH * done


def test_what_a_stream_draws_is_a_function_of_the_seed_the_part_and_the_sample():
    """In its function, in __iter__, at its first sample and at each; over epochs of 9 samples a part."""
    data, alone = data_of("shuffled", 2), readers(data_of("shuffled", 2), 1)
    steps = [stepped(alone, number) for number in range(1, 7)]
    two = readers(data, 2)
    assert [stepped(two, number) for number in range(1, 4)] == steps[:3]
    resumed = readers(data, 1, saved=state_of(two, 3))
    assert [stepped(resumed, number) for number in range(4, 7)] == steps[3:]
    drawn = [tuple(row) for step in steps for rows in step.values() for row in rows]
    of_a_sample = drawn[2::3]
    assert len(set(of_a_sample)) == len(of_a_sample)


def test_what_a_collate_draws_does_not_depend_on_who_reads():
    (reader,), (other,) = readers(data_of("stream"), 1), readers(data_of("stream"), 1, workers=1)
    for one in (reader, other):
        one.loader.dataset = Collated(one.loader.dataset, own_data.redrawn, "redrawn")
    for number in (1, 2):
        drawn = stepped([reader], number)
        assert stepped([other], number) == drawn
        assert len(set(drawn.values())) == BATCH
    other.workers.close()


def test_the_state_after_a_step_stays_while_others_are_read():
    saved = [{"epoch": 0, "count": 3, "state": {"at": 3}}]
    (reader,) = readers(data_of("live"), 1, saved=saved)
    assert reader.state(2) == saved  # a run that is resumed may validate, and save, before it reads anything
    reader.step(3, 3)
    state = json.dumps(reader.state(3))
    reader.step(4, 3 + BATCH)
    assert json.dumps(reader.state(3)) == state
    assert reader.state(4) != reader.state(3)


def test_who_reads_what():
    assert [Share(4, 2, rank).parts for rank in range(2)] == [[0, 2], [1, 3]]
    assert [Share(4, 2, rank).own(4, 4) for rank in range(2)] == [[4, 6], [5, 7]]
    assert Share(4, 3, 1).parts == [0, 1, 2, 3]
    assert [Share(1, 3, rank).own(10, 4) for rank in range(3)] == [[10], [11], [12, 13]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (data_of("once"), "gives nothing when it is iterated over once more"),
        (data_of("unsaved"), r"its state_dict\(\) cannot be saved: Object of type Tensor"),
    ],
)
def test_what_a_stream_has_to_keep_is_told(data, words):
    (reader,) = readers(data, 1)
    with pytest.raises(TrainError, match=words) as caught:
        reader.step(1, 0)
    assert (caught.value.kind, caught.value.where) == ("input", data.dataset.entry)


def test_what_cannot_be_is_refused():
    with pytest.raises(TrainError, match="cannot be cut into 2 parts") as caught:
        open_dataset(data_of("unsplittable", 2), split="train", seq_len=1)
    assert "rank and world_size" in (caught.value.hint or "")
    with pytest.raises(TrainError, match="map-style") as caught:
        open_dataset(data_of("numbers", 2, size=4, base=0), split="train", seq_len=1)
    assert "data.splits" in (caught.value.hint or "")
    with pytest.raises(TrainError, match="cannot be validated with"):
        open_dataset(data_of("stream"), split="validation", seq_len=1)
    with pytest.raises(TrainError, match="where each of 2 parts of the stream stands, and now there are 4"):
        readers(data_of("stream", 4), 1, saved=[None, None])


def test_a_run_is_resumed_on_another_number_of_ranks_with_the_same_losses(tmp_path):
    """In the middle of an epoch, in which a rank had read ahead."""
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=3_000)

    def training(run_id: str, steps: int, *, ranks: int, workers: int = 0, attempt: int = 1):
        made = plans.train_plan(
            tmp_path / "store", tokens, run_id=run_id, steps=steps, every=4, attempt=attempt, world_size=ranks
        )
        work = made.work._replace(
            model=ModelPlan(Entry("kit.own:stateless", {}), None, 1, ()),
            data=data_of("stream", 2, size=50)._replace(workers=workers),
        )
        return replace(made, work=work)

    plans.run_together([training("whole", 8, ranks=1), training("cut", 4, ranks=1)], tmp_path / "one")
    plans.run_together([training("cut", 8, ranks=2, workers=1, attempt=2)], tmp_path / "two")
    whole = plans.losses(tmp_path / "store", training("whole", 8, ranks=1))
    first = plans.losses(tmp_path / "store", training("cut", 4, ranks=1))
    second = plans.losses(tmp_path / "store", training("cut", 8, ranks=2, attempt=2))
    assert first == whole[:4]
    assert second == pytest.approx(whole[4:], rel=1e-5)
    assert len(set(whole)) == 8
