"""What a training of the torch ring has learnt."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.export import export_checkpoint


def weights(store: Path, plan: Plan, scratch: Path) -> dict[str, Tensor]:
    """After its last step, by the names of an export."""
    folder = FolderStore(store)
    latest = catalogue.latest(folder, plan.stage_key)
    assert latest is not None
    assert latest.step == plan.work.training.steps
    export_checkpoint(folder, latest.key, out := scratch / plan.run_id)
    return load_file(out / "model.safetensors")
