"""A run that an mlpipe before the choice of optimizers (commit 5f0c121) began goes on under this one: its
plan.json and its checkpoint of step 2 of 4 lie in `older/` as that version wrote them, but for the places of
the store and the tokens."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from kit import plans

from mlpipe.plan.mesh import Mesh
from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

OLDER = Path(__file__).parent / "older"
LOSSES = [3.6002821922302246, 3.6444149017333984]  # of its steps 3 and 4, zero1 on 2 ranks


def test_what_an_older_version_began_goes_on(tmp_path: Path) -> None:
    """Under the same strategy to the last bit or nearly, under another to rounding; what is saved then names
    its tensors as before."""
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=4000, vocab_size=16)
    text = (OLDER / "plan.json").read_text()
    begun = Plan.from_json(text.replace("TOKENS", str(tokens)).replace("STORE", str(tmp_path / "zero1")))
    train = begun.work.training
    assert (train.strategy, train.shard_optimizer, train.optimizer.args["betas"]) == (
        "zero1",
        True,
        [0.9, 0.95],
    )
    same = replace(begun, attempt=2, work=train._replace(resume=True))
    alone = same.work.training._replace(
        strategy="single",
        shard_optimizer=False,
        mesh=Mesh(),
        micro_batch=train.global_batch,
    )
    launch = begun.launch._replace(nproc_per_node=1)
    other = replace(same, store_url=str(tmp_path / "single"), work=alone, launch=launch)
    for plan, world_size in ((same, 2), (other, 1)):
        folder = Path(plan.store_url) / plan.stage_key / "checkpoints"
        folder.mkdir(parents=True)
        shutil.copytree(OLDER / "step-000000002", folder / "step-000000002")
        plans.run_together([plan], tmp_path / f"run-{world_size}")
        assert plans.losses(Path(plan.store_url), plan) == pytest.approx(LOSSES, rel=1e-6)
        store = FolderStore(Path(plan.store_url))
        first, last = (
            catalogue.load_manifest(store, found.key)
            for found in catalogue.list_checkpoints(store, plan.stage_key)
        )
        assert (first["step"], last["step"]) == (2, 4)
        assert {name: tensor["shape"] for name, tensor in first["tensors"].items()} == {
            name: tensor["shape"] for name, tensor in last["tensors"].items()
        }
        assert last["scalars"]["optimizer"] == {"name": "adamw", "scalars": {"num_updates": 4}}
