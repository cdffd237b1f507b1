"""Trainings on conversations: samples of different lengths on any number of ranks, and going on at the very
sample."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import plans
from kit.conversations import SEQ_LEN, mixed, packed, write_chat

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import DataPlan
from mlpipe.plan.mesh import Mesh
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.data.order import samples_at
from mlpipe.train.data.uneven_loader import uneven_loader
from mlpipe.train.loss import IGNORED
from mlpipe.train.model import DOCUMENTS, LossModule
from mlpipe.train.models.llama import build_model
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations
from mlpipe.train.recording import of_samples
from mlpipe.train.world import World

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataPlan:
    return write_chat(tmp_path_factory.mktemp("chat"))


def samples_of(dataset, position: int, ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Inputs and targets of a step's samples, without their padding."""
    found = []
    for rank in range(ranks):
        world = World(Mesh(dp_replicate=ranks), rank, torch.device("cpu"))
        loader = MicrobatchLoader(dataset, world, seed=3, global_batch=6, micro_batch=2, seq_len=SEQ_LEN)
        for one in loader.step(position):
            assert one.num_tokens == one.batch["inputs"].numel()
            if one.counts:
                rows = zip(one.batch["inputs"].tolist(), one.batch["targets"].tolist(), strict=True)
                for inputs, targets in rows:
                    length = max(i for i, target in enumerate(targets) if target != IGNORED) + 1
                    assert not any(inputs[length:])
                    found.append((tuple(inputs[:length]), tuple(targets[:length])))
    return found


def test_the_samples_of_a_step_are_the_same_on_any_number_of_ranks(data):
    dataset = open_dataset(data, split="train", seq_len=SEQ_LEN)
    assert dataset.num_cut > 0
    assert dataset.lengths.max() == SEQ_LEN
    steps = [samples_of(dataset, 6 * step, 1) for step in range(8)]
    seen = [sample for step in steps for sample in step]
    everything = [tuple(map(tuple, map(np.ndarray.tolist, dataset.sample(i)))) for i in range(24)]
    assert sorted(seen[:24]) == sorted(seen[24:]) == sorted(everything)
    for ranks in (2, 3):
        assert [samples_of(dataset, 6 * step, ranks) for step in range(8)] == steps


def test_files_that_are_mixed_give_their_shares_of_each_block_in_their_own_order(data):
    dataset = open_dataset(mixed(data), split="train", seq_len=SEQ_LEN)
    sources = [open_dataset(data, split=split, seq_len=SEQ_LEN) for split in ("train", "validation")]
    indices = samples_at(dataset, 3, np.arange(72))
    assert [int((block < 24).sum()) for block in indices.reshape(-1, 3)] == [2] * 24
    for own in (indices[indices < 24].reshape(-1, 24), indices[indices >= 24].reshape(-1, 24)):
        assert all(len(set(epoch.tolist())) == 24 for epoch in own)
    for index in range(48):
        source, own = sources[index // 24], index % 24
        assert dataset.lengths[index] == source.lengths[own]
        assert all(map(np.array_equal, dataset.sample(index), source.sample(own)))
    cut = [source.notes[0] for source in sources]
    assert dataset.notes == [f"{source.path}: {note}" for source, note in zip(sources, cut, strict=True)]
    assert dataset.identity == ", ".join(source.identity for source in sources)
    assert len(open_dataset(mixed(data), split="validation", seq_len=SEQ_LEN)) == 24


def test_data_of_which_nothing_is_learnt_and_data_that_differ_are_refused(data, tmp_path, monkeypatch):
    chat = write_chat(tmp_path).chat
    assert chat is not None
    Path(chat.path).write_text(json.dumps({"prompt": "x" * 50, "completion": "y"}) + "\n")
    with pytest.raises(TrainError, match="nothing in it is learnt: every sample is cut to seq_len 49"):
        open_dataset(data._replace(chat=chat), split="train", seq_len=49)
    assert open_dataset(data._replace(chat=chat), split="train", seq_len=50).notes == [
        "1 of 1 samples cut to 50 tokens"
    ]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)  # all have the same
    assert len(open_dataset(data, split="train", seq_len=SEQ_LEN)) == 24
    for other in (1, -1):  # in whose place this one may be

        def larger(bounds, op, other=other):
            assert op == torch.distributed.ReduceOp.MAX
            bounds.copy_(torch.maximum(bounds, torch.tensor([bounds[0] + other, bounds[1] - other])))

        monkeypatch.setattr(torch.distributed, "all_reduce", larger)
        with pytest.raises(TrainError, match=r"this one has 24 conversations"):
            open_dataset(data, split="train", seq_len=SEQ_LEN)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_samples_of_a_row_see_nothing_of_each_other(num_kv_heads):
    """Losses and gradients of a row are those of its samples, each for itself; however it is recomputed."""
    torch.manual_seed(0)
    lengths = [3, 1, 40, 7]
    inputs, targets = torch.randint(0, 64, (2, sum(lengths)))
    expected = None
    for mode in (None, "selective", "full"):
        model = build_model(
            vocab_size=64, dim=16, num_layers=2, num_heads=2, num_kv_heads=num_kv_heads, ffn_dim=32,
            max_seq_len=40, rope_theta=1e4, norm_eps=1e-5, tied=True,
        )  # fmt: skip
        torch.manual_seed(1)
        model.init_weights()
        module = LossModule(model, "cpu")
        if mode is not None:
            checkpoint_activations(list(model.layers), mode)
        rows = [{"inputs": inputs, "targets": targets, DOCUMENTS: torch.tensor(lengths)}]
        if mode is None:
            parts = zip(inputs.split(lengths), targets.split(lengths), strict=True)
            rows = [{"inputs": one, "targets": other} for one, other in parts]
        batches = [{key: x if key == DOCUMENTS else x[None] for key, x in row.items()} for row in rows]
        loss = sum(module(batch)[0] for batch in batches)
        loss.backward()
        found = [loss, *(parameter.grad for parameter in model.parameters())]
        expected = expected or found
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_packed_rows_are_the_samples_and_the_probe_sees_the_largest(data):
    """Nothing is padded; a rank for whom nothing is left computes one that does not count."""
    dataset = open_dataset(data, split="train", seq_len=SEQ_LEN)
    made = plans.train_plan("store", plans.write_tokens(Path(data.chat.path).parent / "tokens")).work
    model = plans.model_plan(vocab_size=320, max_seq_len=SEQ_LEN)._replace(seq_len=SEQ_LEN)
    work = made._replace(model=model, global_batch=3, data=packed(data, "balanced"))
    indices = samples_at(dataset, work.seed, np.arange(3))
    expected = sorted(tuple(map(tuple, map(np.ndarray.tolist, dataset.sample(i)))) for i in indices.tolist())
    found, counts = [], []
    worlds = [World(Mesh(dp_shard=4), rank, torch.device("cpu")) for rank in range(4)]
    for world in worlds:
        loader = uneven_loader(work, dataset, world, 1)
        counts.append([one.counts for one in loader.step(0)])
        for one in loader.step(0):
            assert one.num_padding == 0
            assert one.num_tokens == int(one.batch[DOCUMENTS].sum()) == one.batch["inputs"].numel()
            if one.counts:
                lengths = one.batch[DOCUMENTS].tolist()
                inputs, targets = (one.batch[key][0].split(lengths) for key in ("inputs", "targets"))
                found += [
                    (tuple(a.tolist()), tuple(b.tolist())) for a, b in zip(inputs, targets, strict=True)
                ]
    assert sorted(found) == expected
    assert sorted(counts) == [[False], [True], [True], [True]]
    told = [of_samples(uneven_loader(work, dataset, world, 1).step(0)) for world in worlds]
    idle = sorted(one["idle_predicted_ratio"] for one in told)
    assert [one["padding_tokens"] for one in told if one.get("padding_tokens") is not None] == [0, 0, 0]
    assert idle[0] == 0.0
    assert idle[1] > 0.0
    loader = uneven_loader(work, dataset, World(Mesh(), 0, torch.device("cpu")), 2)
    assert [one.num_tokens for one in loader.largest()] == [2 * SEQ_LEN] * 2
    many = work._replace(global_batch=8, model=model._replace(seq_len=8 * SEQ_LEN))  # that lie in one row
    loader = uneven_loader(many, dataset, World(Mesh(), 0, torch.device("cpu")), 1)
    assert [one.num_tokens for one in loader.largest()] == [np.sort(dataset.lengths)[-8:].sum()] * 2
    padded = uneven_loader(work._replace(data=data), dataset, World(Mesh(), 0, torch.device("cpu")), 3)
    [one] = padded.step(0)
    lengths = dataset.lengths[indices]
    assert one.num_padding == one.batch["inputs"].numel() - lengths.sum() > 0


def test_a_training_goes_on_at_the_very_sample_on_other_ranks(data, tmp_path):
    """And the losses are those of samples that are padded, however they are packed: four steps of two ranks
    with a sample a row; two balanced ones of two others, that share the weights, and two of one, packed. Two
    files are mixed."""
    data = mixed(data)
    model = plans.model_plan(vocab_size=320, max_seq_len=SEQ_LEN)._replace(seq_len=SEQ_LEN)
    whole, half = (
        plans.train_plan(
            tmp_path / "store",
            plans.write_tokens(tmp_path / "tokens"),
            run_id=name,
            steps=steps,
            every=2,
            model=model,
            data=data,
            global_batch=6,
            micro_batch=1,
            accumulation=3,
            strategy=strategy,
        )
        for name, steps, strategy in (("whole", 4, "ddp"), ("half", 2, "fsdp"))
    )
    half = replace(half, work=half.work._replace(data=packed(data, "balanced")))
    plans.run_together([whole, half], tmp_path / "two")
    work = half.work._replace(
        steps=4, resume=True, mesh=Mesh(), strategy="single", micro_batch=3, accumulation=2
    )
    rest = replace(half, attempt=2, work=work, launch=half.launch._replace(nproc_per_node=1))
    plans.run_together([rest], tmp_path / "one")
    expected = plans.losses(tmp_path / "store", whole)
    found = plans.losses(tmp_path / "store", half) + plans.losses(tmp_path / "store", rest)
    assert len(found) == 4
    assert found == pytest.approx(expected, abs=1e-5)
    dataset = open_dataset(data, split="train", seq_len=SEQ_LEN)
    of_steps = samples_at(dataset, half.work.seed, np.arange(12))
    learnt = sum(int((dataset.sample(i)[1] != IGNORED).sum()) for i in of_steps.tolist())
    of_ranks = [record for rank in (0, 1) for record in plans.records(tmp_path / "store", half, rank)]
    assert sum(record["target_tokens"] for record in of_ranks if record["kind"] == "step") == learnt
