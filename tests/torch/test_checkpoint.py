"""What a save holds is the state at its step, whatever goes on while it is copied and written."""

from __future__ import annotations

import threading

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
