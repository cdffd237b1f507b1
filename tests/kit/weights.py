"""What a training of the torch ring has learnt."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.export import export_checkpoint
from mlpipe.train.reshard import load
from mlpipe.train.shards import LocalShard


def weights(store: Path, plan: Plan, scratch: Path) -> dict[str, Tensor]:
    """After its last step, by the names of an export."""
    folder = FolderStore(store)
    latest = catalogue.latest(folder, plan.stage_key)
    assert latest is not None
    assert latest.step == plan.work.training.steps
    export_checkpoint(folder, latest.key, out := scratch / plan.run_id)
    return load_file(out / "model.safetensors")


def held(store: Path, plan: Plan, *, optimizer: bool = True) -> dict[str, Tensor]:
    """All that the checkpoint after the last step holds, whole, by name; without the `optimizer`'s states the
    parameters and buffers."""
    folder = FolderStore(store)
    latest = catalogue.latest(folder, plan.stage_key)
    assert latest is not None
    assert latest.step == plan.work.training.steps
    manifest = catalogue.load_manifest(folder, latest.key)
    shards = []
    for name, one in manifest["tensors"].items():
        if optimizer or name.startswith("model."):
            shape, dtype = tuple(one["shape"]), getattr(torch, one["dtype"])
            empty = torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype)
            shards.append(LocalShard(name, empty, shape, (0,) * len(shape)))
    load(folder, latest.key, manifest, shards)
    return {shard.name: shard.local for shard in shards}
