"""What a save holds is the state at its step, whatever goes on while it is copied and written."""

from __future__ import annotations

import json
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train import checkpoint
from mlpipe.train.checkpoint import Checkpointer, Coordination, SaveSettings
from mlpipe.train.reshard import load
from mlpipe.train.shards import LocalShard

pytestmark = pytest.mark.torch
STAGE = "runs/r/stages/train"


def shard(name: str, tensor: torch.Tensor, **kind: bool) -> LocalShard:
    return LocalShard(name, tensor, tuple(tensor.shape), (0,) * tensor.dim(), **kind)


def test_a_buffer_that_the_next_forward_writes_is_saved_as_it_was(tmp_path, monkeypatch):
    """Parameters are copied under the next forward and backward; only the optimizer writes those."""
    store = FolderStore(tmp_path)
    written = threading.Event()
    share = checkpoint.share

    def after_the_forward(tensors):
        assert written.wait(300)
        return share(tensors)

    monkeypatch.setattr(checkpoint, "share", after_the_forward)
    saved = []
    checkpointer = Checkpointer(
        store,
        SaveSettings(STAGE, attempt=1, restart=0, code_digest="", keep=2, asynchronous=True),
        Coordination(dist.HashStore(), rank=0, world_size=1),
        on_saved=saved.append,
        while_waiting=lambda: None,
    )
    weight, mean = torch.arange(6.0).reshape(2, 3), torch.ones(3)
    checkpointer.save(1, [shard("model.w", weight), shard("model.mean", mean, is_buffer=True)], {"step": 1})
    mean.mul_(7)
    written.set()
    checkpointer.wait_for_staging()
    weight.zero_()
    checkpointer.finish()
    assert [found.error for found in saved] == [None]

    found = catalogue.latest(store, STAGE)
    load(
        store,
        found.key,
        catalogue.load_manifest(store, found.key),
        tensors := [shard("model.w", torch.empty(2, 3)), shard("model.mean", torch.empty(3), is_buffer=True)],
    )
    assert tensors[0].local.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert tensors[1].local.tolist() == [1.0, 1.0, 1.0]


def test_rank_0_stays_until_all_have_heard_of_the_commit(tmp_path):
    """Its process has the store by which the others hear: one that it leaves early saves in vain."""
    exchange, saved = dist.HashStore(), []
    settings = SaveSettings(STAGE, attempt=1, restart=0, code_digest="", keep=2, asynchronous=True)
    checkpointer = Checkpointer(
        FolderStore(tmp_path),
        settings,
        Coordination(exchange, rank=0, world_size=2),
        on_saved=saved.append,
        while_waiting=lambda: None,
    )
    checkpointer.save(1, [shard("model.w", torch.ones(3))], {"step": 1})
    of_step = dist.PrefixStore("1", checkpointer.coordination_store)
    of_step.set("rank-1", json.dumps({"parts": [], "problem": ""}))
    of_step.wait(["committed"], timedelta(minutes=5))
    save = checkpointer._current
    save.thread.join(0.2)
    assert save.thread.is_alive()
    of_step.set("heard-1", "")
    checkpointer.finish()
    assert [found.error for found in saved] == [None]


def test_what_was_just_saved_stays_whatever_another_hand_has_put_there(tmp_path):
    store = FolderStore(tmp_path)
    store.put(f"{STAGE}/checkpoints/step-000000099/1-0badf00d/MANIFEST.json", b"of a later step, it says")
    checkpointer = Checkpointer(
        store,
        SaveSettings(STAGE, attempt=1, restart=0, code_digest="", keep=1, asynchronous=False),
        Coordination(dist.HashStore(), rank=0, world_size=1),
        on_saved=lambda saved: None,
        while_waiting=lambda: None,
    )
    for step in (1, 2):
        checkpointer.save(step, [shard("model.w", torch.ones(3))], {"step": step})
    checkpointer.finish()
    assert [item.step for item in catalogue.list_checkpoints(store, STAGE)] == [2, 99]
