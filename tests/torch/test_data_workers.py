"""Samples that are read by processes beside the rank: the same ones, in the same order, drawn alike; and what
is said when one of those processes fails, dies or stands still."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kit import own_data, plans

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import DataPlan, SourcePlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.first_samples import changes, digest, digests
from mlpipe.train.data.loader import MicrobatchLoader, ReadAhead
from mlpipe.train.data.microbatch import Collated, Microbatch, collate, samples_of
from mlpipe.train.prepare import _other_firsts
from mlpipe.train.steps_ahead import Growth, StepsAhead, steps_ahead
from mlpipe.train.world import World

pytestmark = pytest.mark.torch


def loader(dataset, rank: int = 0, *, ranks: int = 2, batch: int = 7) -> MicrobatchLoader:
    world = World(Mesh(dp_replicate=ranks), rank, torch.device("cpu"))
    return MicrobatchLoader(dataset, world, seed=1, global_batch=batch, micro_batch=2, seq_len=3)


def plan(workers, *, steps: int = 8, patience: float = 60.0):
    data = DataPlan(None, Entry("kit.own_data:drawn", {}), None, workers=workers)
    made = plans.train_plan("store", plans.write_tokens(TOKENS), steps=steps, hang_timeout_seconds=patience)
    return made.work._replace(data=data)


@pytest.fixture(autouse=True, scope="module")
def tokens(tmp_path_factory):
    global TOKENS
    TOKENS = tmp_path_factory.mktemp("tokens")


@pytest.fixture
def reading():
    """A StepsAhead of these settings, which ends with the test."""
    begun: list[StepsAhead] = []

    def begin(source: MicrobatchLoader, workers, **settings) -> StepsAhead:
        begun.append(steps_ahead(source, plan(workers, **settings), 1, lambda: None))
        return begun[-1]

    yield begin
    for one in begun:
        one.workers.close()


def values(batches: list[Microbatch]) -> list[tuple]:
    return [(one.counts, one.num_tokens, *(t.tolist() for t in one.batch.values())) for one in batches]


def test_any_number_of_workers_reads_and_draws_what_the_rank_would(reading):
    for rank in range(2):
        source = loader(own_data.Drawn(20), rank)
        alone = ReadAhead(source)
        expected = [values(alone.take(step, 7 * (step - 1))) for step in range(1, 9)]
        assert len({str(one) for one in expected}) == 8
        for workers in (1, 3):
            ahead = ReadAhead(source, reading(source, workers))
            found = []
            for step in range(1, 9):
                torch.rand(step)  # dropout
                found.append(values(ahead.take(step, 7 * (step - 1))))
            assert found == expected
            assert len(ahead.reader.workers) == 0  # nothing is left after the last step


@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(
    attempts=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 3])), min_size=2, max_size=4),
    ranks=st.integers(1, 3),
)
def test_no_sample_comes_twice_and_none_is_lost(attempts, ranks):
    """However often it is interrupted, and whoever reads: what comes is one run through the data after the
    other, and what is read ahead and not taken is no loss."""
    size, batch, position = 11, 5, 0
    seen: list[int] = []
    for steps, workers in attempts:
        number = position // batch
        for rank in range(ranks):
            source = loader(own_data.Drawn(size), rank, ranks=ranks, batch=batch)
            ahead = steps_ahead(source, plan(workers, steps=100), 1, lambda: None) if workers else None
            reader = ReadAhead(source, ahead)
            for step in range(number, number + steps):
                for one in reader.take(step + 1, batch * step):
                    seen += one.batch["index"].tolist() if one.counts else []
            if ahead is not None:
                ahead.workers.close()
        position += batch * steps
    rounds, rest = divmod(position, size)
    counts = Counter(seen)
    assert sum(counts.values()) == position
    assert set(counts.values()) <= {rounds, rounds + 1}
    assert sum(count - rounds for count in counts.values()) + rounds * (len(counts) - size) == rest


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("raise", "failed", r"data worker 0 failed at sample 5: LookupError: no such picture"),
        ("kill", "infrastructure", r"data worker 0 \(process \d+\) was killed by SIGKILL at sample 5"),
        ("exit", "infrastructure", r"data worker 0 \(process \d+\) ended with code 7 at sample 5"),
        ("hang", "failed", r"data worker 0 \(process \d+\) gave nothing for \d s at sample 5"),
    ],
)
def test_a_worker_that_fails_is_named_with_its_sample(reading, capfd, what, kind, words):
    ahead = reading(
        loader(own_data.Drawn(12, what, at=5), ranks=1, batch=12), 1, patience=1.5 if what == "hang" else 60.0
    )
    with pytest.raises(TrainError, match=words) as caught:
        ahead.step(1, 0)
    assert caught.value.kind == kind
    assert caught.value.hint
    said = capfd.readouterr().err
    if what == "raise":
        (told,) = caught.value.__notes__
        assert re.search(r'own_data.py", line \d+, in strike\n.*\n.*LookupError', told)
        assert re.fullmatch(r".*own_data.py:\d+", caught.value.where or "")
        assert isinstance(caught.value.original, LookupError)
    if what == "hang":
        assert (caught.value.cause, caught.value.fatal) == ("hang", True)
        assert re.search(r"own_data.py\", line \d+ in strike", said)  # its stack
    if what == "kill":
        assert "memory" in caught.value.hint


def test_a_worker_that_is_slow_but_moves_is_no_hang(reading, monkeypatch):
    """Each look at it comes half a patience after the one before; it takes 9 of them for 3 samples, and then
    one for ever."""
    ahead = reading(loader(own_data.Drawn(12)), 1)
    (worker,) = ahead.workers.workers
    worker.sample, now, looks = [5], [0.0], iter([5, 5, 6, 6, 6, 7, 7, 7, 8])

    def look(connections, timeout):
        now[0] += ahead.workers.patience_seconds / 2
        worker.sample[0] = next(looks, 8)
        return []

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("mlpipe.train.data.workers.connection.wait", look)
    monkeypatch.setattr("mlpipe.train.data.workers.time", clock)
    with pytest.raises(TrainError, match="gave nothing for 90 s at sample 8"):
        ahead.workers.answer(0)
    assert next(looks, None) is None


def test_a_signal_to_the_whole_session_ends_no_worker(reading):
    """As torchrun sends it to the rank, which has a checkpoint to write before it goes."""
    ahead = reading(loader(own_data.Drawn(12)), 1)
    ahead.step(1, 0)
    (worker,) = ahead.workers.workers
    for signum in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.process.pid, signum)
    assert ahead.step(2, 7)


def test_workers_come_as_they_are_needed(reading, monkeypatch):
    clock = SimpleNamespace(perf_counter=map(float, itertools.count()).__next__)  # each step takes a second
    monkeypatch.setattr("mlpipe.train.steps_ahead.time", clock)
    source = loader(own_data.Drawn(20))
    ahead = reading(source, "auto", steps=60)
    ahead.growth = Growth(3)
    expected, found, numbers = [], [], []
    for step in range(1, 41):
        expected.append(values(ReadAhead(source).take(step, 7 * (step - 1))))
        found.append(values(ahead.step(step, 7 * (step - 1))))
        ahead.waited(0.5 ** len(ahead.workers))
        numbers.append(len(ahead.workers))
    assert found == expected
    assert numbers == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 16


def grown(ratios: list[float], limit: int = 8) -> list[int]:
    """Numbers of workers after windows in which so much of the time was waited."""
    growth = Growth(limit)
    growth.after_step(10.0, 10.0)
    return [[growth.after_step(ratio, 1.0) for _ in range(8)][-1] for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "numbers"),
    [
        ([0.04, 0.04], [0, 0]),
        ([0.6, 0.5, 0.3, 0.04, 0.04], [1, 2, 4, 4, 4]),
        ([0.6, 0.59, 0.59], [1, 1, 1]),  # the disk, say
        ([0.6, 0.02, 0.3, 0.02], [1, 1, 2, 2]),
        ([0.9, 0.8, 0.7, 0.6, 0.5], [1, 2, 4, 8, 8]),
    ],
)
def test_the_number_doubles_while_that_helps(ratios, numbers):
    assert grown(ratios) == numbers


def test_a_function_of_ones_own_makes_the_batch():
    data = DataPlan(None, Entry("kit.own_data:texts", {}), None, collate="kit.own_data:padded")
    dataset = open_dataset(data, split="train", seq_len=1)
    batch = collate(dataset, torch.tensor([0, 3]).numpy())
    assert {name: tuple(ids.shape) for name, ids in batch.items()} == {"inputs": (2, 8), "targets": (2, 8)}
    assert batch["inputs"][0].tolist() == [97, 98] + [32] * 6
    with pytest.raises(TrainError, match="it made list, not a dict of tensors") as caught:
        open_dataset(data._replace(collate="kit.own_data:unbatched"), split="train", seq_len=1)
    assert (caught.value.where, caught.value.kind) == ("kit.own_data:unbatched", "input")
    with pytest.raises(TrainError, match="not a dict of tensors") as caught:
        open_dataset(data._replace(collate=None), split="train", seq_len=1)
    assert "data.collate" in (caught.value.hint or "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("workers")


def training(folder, run_id: str, workers, *, steps: int = 12, data=None, **changes):
    made = plans.train_plan(
        folder / "store",
        plans.write_tokens(folder / "tokens"),
        run_id=run_id,
        steps=steps,
        every=4,
        **changes,
    )
    entry = Entry("kit.own_data:drawn", data or {})
    work = made.work._replace(
        model=ModelPlan(Entry("kit.own:normed", {}), None, 1, ()),
        data=DataPlan(None, entry, None, workers=workers),
        micro_batch=4,
        accumulation=2,
    )
    return replace(made, work=work)


@pytest.fixture(scope="module")
def curves(folder):
    """Losses by step: with other numbers of workers, and of a run that was resumed with another one."""
    made = [training(folder, f"with-{workers}", workers) for workers in (0, 1, 3, "auto")]
    made.append(training(folder, "interrupted", 3, steps=8))
    made.append(training(folder, "interrupted", 1, attempt=2))
    plans.run_together(made, folder / "runs")
    return {f"{one.run_id} {one.attempt}": plans.losses(folder / "store", one) for one in made}


def test_losses_are_equal_bit_by_bit_and_go_on_with_another_number_of_workers(curves):
    expected = curves["with-0 1"]
    assert len(set(expected)) == 12
    assert all(curves[f"with-{workers} 1"] == expected for workers in (1, 3, "auto")), curves
    assert curves["interrupted 1"] == expected[:8]
    assert curves["interrupted 2"] == expected[8:]


def test_a_killed_worker_costs_a_restart(folder, curves):
    """In the same attempt, with the losses of a run in which nobody was killed."""
    struck = folder / "struck"
    data = {"what": "kill", "at": 5, "once": str(struck)}
    plan = training(folder, "killed", 2, data=data, launch={"max_restarts": 1})
    assert plans.launch(plan, folder / "killed") == 0, plans.log_of(folder / "killed")
    assert plans.outcome(folder / "store", plan)["restarts"] == 1
    assert struck.exists()
    assert plans.losses(folder / "store", plan) == curves["with-0 1"]


def test_a_resume_with_another_first_sample_says_so_and_goes_on(folder):
    """One that is drawn anew each time tells nothing."""
    made = []
    for attempt, base in ((1, 100), (2, 100), (3, 200)):
        plan = training(folder, "changed", 0, steps=4 * attempt, attempt=attempt)
        entry = Entry("kit.own_data:numbers", {"size": 48, "base": base})
        made.append(replace(plan, work=plan.work._replace(data=plan.work.data._replace(dataset=entry))))
    plans.run_together(made, folder / "changed")
    starts = [plans.records(folder / "store", plan)[0] for plan in made]
    assert [start["kind"] for start in starts] == ["start"] * 3
    assert [start["notes"] for start in starts][:2] == [[], []]
    assert starts[2]["start_step"] == 8
    assert "the first sample is another one than at the checkpoint" in starts[2]["notes"][0]
    twice = {"x": torch.ones(2, 3), "index": torch.tensor([4, 4])}
    assert digest(twice, 2) not in ("-", digest({**twice, "index": torch.tensor([5, 5])}, 2))
    for odd in (torch.tensor([1.0, 2.0]), torch.ones(4), torch.tensor(1.0), torch.ones(2, 2).to_sparse()):
        assert digest({**twice, "x": odd}, 2) == "-"
    assert "-" not in {digest({"x": torch.tensor([[nan]] * 2)}, 2) for nan in (float("nan"), 0.0)}
    assert digest({"x": torch.tensor([float("nan"), 0.0])}, 2) == "-"
    alike = torch.ones(2, 2), torch.ones(2, 2, 1), torch.ones(2, 2).view(torch.int32)  # in their bytes
    assert len({digest({"x": values}, 2) for values in alike}) == 3
    rows = torch.ones(2, 3)  # a column of it, and a turned one, lie apart in memory
    assert digest({"x": rows[:, -1], "y": torch.ones(3, 2).T}, 2) != "-"


def mixed(*sources: Entry):
    """A mixture, its plan, and what a checkpoint keeps of its first samples."""
    data = DataPlan(None, None, None, mix=tuple(SourcePlan(1.0, None, one, None) for one in sources))
    dataset = open_dataset(data, split="train", seq_len=1)
    return dataset, data, digests(dataset, data, collate(dataset, np.zeros(2, np.int64)))


def test_of_a_mixture_each_source_is_known_by_its_first_sample():
    """But one that is drawn at random."""

    def numbers(base: int) -> Entry:
        return Entry("kit.own_data:numbers", {"size": 9, "base": base})

    drawn = Entry("kit.own_data:drawn", {})
    *_, before = mixed(numbers(100), drawn, numbers(200))
    dataset, data, now = mixed(numbers(100), drawn, numbers(300))
    assert [word == "-" for word in before.split()] == [False, True, False]
    (note,) = changes(dataset, data, before, now)
    assert note.startswith("the first sample of source 2 is another one than at the checkpoint")
    assert changes(dataset, data, before.replace("-", "0"), now) == [note]
    assert changes(dataset, data, now, now) == changes(dataset, data, "- - -", now) == []
    assert mixed(drawn, drawn)[2] is None
    plan = SimpleNamespace(meaning={}, data=data)
    assert _other_firsts({"first_samples": before}, dataset, plan, now) == [note]
    assert _other_firsts({"first_sample": before}, dataset, plan, now) == []  # an older checkpoint's


class Flipped:
    def __init__(self, flips) -> None:
        self.flips = iter(flips)

    def __getitem__(self, i: int):
        return {"x": torch.tensor([1.0, 2.0][:: -1 if next(self.flips) else 1])}


@pytest.mark.parametrize(("more", "num_notes"), [([False] * 16, 1), ([False] * 15 + [True], 0)])
def test_a_sample_that_is_flipped_at_random_is_no_other_one(more, num_notes):
    """Though it was flipped each time at the checkpoint, and neither time that a resume had looked."""
    data = DataPlan(None, Entry("kit.own_data:drawn", {}), None)
    dataset = Flipped([True, True, False, False, *more])
    before, now = (digests(dataset, data, collate(dataset, np.zeros(2, np.int64))) for _ in range(2))
    assert len(changes(dataset, data, before, now)) == num_notes


def test_a_function_that_refuses_to_put_more_looks_together_hinders_nothing():
    """No training may have asked for such a batch: of one source alone, or of so many samples."""

    def numbers(base: int) -> Entry:
        return Entry("kit.own_data:numbers", {"size": 9, "base": base})

    dataset, data, now = mixed(numbers(100), numbers(200))
    *_, before = mixed(numbers(300), numbers(400))
    assert len(changes(dataset, data, before, now)) == 2

    def refuse(samples):
        raise ValueError(f"room for 1 sample, not {len(samples)}")

    picky = Collated(samples_of(dataset), refuse, "own:refuse")
    assert changes(picky, data, before, now) == []
    assert digests(picky, data, collate(dataset, np.zeros(2, np.int64))).split()[1] == "-"
