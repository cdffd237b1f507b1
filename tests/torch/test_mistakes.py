"""What a user or the disk gets wrong is told in one clear message, with the exit code of its kind."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit import plans

from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.worker import _repeats

pytestmark = pytest.mark.torch

# what stands in the plan -> (model entry, args, blocks, words of the message)
MODELS = {
    "no module": ("kit.absent:build", {}, (), "cannot be imported: No module named 'kit.absent'"),
    "no function": ("kit.models:absent", {}, (), "module kit.models has no function 'absent'"),
    "wrong args": ("kit.models:misbehaving", {"width": 3}, (), "does not take these args"),
    "fails": ("kit.models:plain", {"dim": "wide"}, (), "failed to build the model: TypeError"),
    "not a module": ("kit.models:not_a_module", {}, (), "returned str, not an nn.Module"),
    "two inputs": ("kit.models:two_inputs", {}, (), "forward needs inputs, mask"),
    "a dict": ("kit.own:gives", {"what": "dict"}, (), "forward returns a dict with hidden, not logits"),
    "unknown block": ("kit.models:plain", {}, ("layers",), "no module 'layers' to use as a block"),
}
DATASETS = {
    "no such data": ("kit.models:not_a_module", "does not take these args"),
    "a stream of numbers": ("kit.models:endless", "gives int, not a dict of tensors"),
    "neither": ("kit.models:not_a_set", "not map-style"),
    "nothing in it": ("kit.models:empty", "its data set for the split 'train' has no samples"),
    "not tensors": ("kit.models:words", "not a dict of tensors"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    plans.write_tokens(folder / "tokens")
    return folder


def model(entry: str, args: dict, blocks: tuple[str, ...] = ()) -> ModelPlan:
    return ModelPlan(Entry(entry, args), None, 32, blocks)


def small(folder: Path, run_id: str, **changes):
    base = {"strategy": "single", "world_size": 1, "steps": 2, "every": 2, "run_id": run_id, **changes}
    return plans.train_plan(folder / "store", folder / "tokens", **base)


def left(folder: Path, number: int) -> dict:
    """What the only worker of plan `number` left."""
    return json.loads((folder / f"scratch-{number}" / "outcome-0.json").read_text())


@pytest.fixture(scope="module")
def refused(folder):
    made = [
        small(folder, name.replace(" ", "-"), model=model(entry, args, blocks))
        for name, (entry, args, blocks, _) in MODELS.items()
    ]
    made += [
        small(
            folder,
            name.replace(" ", "-"),
            model=model("kit.models:plain", {}),
            data=DataPlan(tokens=None, dataset=Entry(entry, {}), digest=None),
        )
        for name, (entry, _) in DATASETS.items()
    ]
    plans.run_together(made, folder / "refused", may_fail=True)
    names = [*MODELS, *DATASETS]
    return {name: left(folder / "refused", number) for number, name in enumerate(names)}


@pytest.mark.parametrize("name", [*MODELS, *DATASETS])
def test_an_entry_that_breaks_the_contract_is_told_what_to_write(refused, name):
    words = MODELS[name][3] if name in MODELS else DATASETS[name][1]
    found = refused[name]
    assert words in found["message"]
    assert (found["kind"], found["step"]) == ("input", 0)
    assert found["hint"]
    assert found["where"].startswith("kit.")


def test_a_broken_contract_ends_the_run_without_a_restart(folder):
    plan = small(
        folder,
        "launched",
        strategy="ddp",
        world_size=2,
        model=model("kit.models:absent", {}),
        launch={"max_restarts": 3},
    )
    assert plans.launch(plan, folder / "launched") == 2
    found = plans.outcome(folder / "store", plan)
    assert (found["kind"], found["restarts"]) == ("input", 0)
    log = plans.log_of(folder / "launched")
    assert "error: kit.models:absent: module kit.models has no function 'absent'\n  hint: define" in log


def test_a_mistake_that_only_the_first_pass_shows_is_not_tried_again(folder):
    plan = small(
        folder,
        "raises",
        strategy="ddp",
        world_size=2,
        model=model("kit.own:raises", {}),
        num_flops_per_token=None,
        launch={"max_restarts": 3},
    )
    assert plans.launch(plan, folder / "raises") == 3
    found = plans.outcome(folder / "store", plan)
    assert (found["kind"], found["restarts"], found["step"]) == ("failed", 0, 0)
    assert "mat1 and mat2 shapes cannot be multiplied" in found["message"]
    assert re.search(r"\n  \| \S+kit/own\.py:\d+ in forward: ", found["message"])
    assert "in wrapped_call" not in found["message"]  # nothing of torch
    assert re.search(r"kit/own\.py:\d+$", found["where"])


@pytest.mark.parametrize(
    ("error", "repeats"),
    [
        (KeyError("inputs"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (dist.DistNetworkError("the port is taken"), False),
        (FileNotFoundError("a share that comes back"), False),
    ],
)
def test_what_a_machine_did_is_tried_again(error, repeats):
    assert _repeats(error) is repeats


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def blob_files(prefix: Path) -> list[Path]:
    return sorted(path for path in prefix.iterdir() if path.name != "MANIFEST.json")


def flip(prefix: Path) -> Path:
    path = blob_files(prefix)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def truncate(prefix: Path) -> Path:
    path = blob_files(prefix)[-1]
    os.truncate(path, path.stat().st_size - 5)
    return path


def delete(prefix: Path) -> Path:
    path = blob_files(prefix)[0]
    path.unlink()
    return path


def garble(prefix: Path) -> Path:
    path = prefix / "MANIFEST.json"
    path.write_bytes(b"\x00garbage" * 100)
    return path


def pickle_blobs(prefix: Path) -> Path:
    for path in blob_files(prefix):
        path.write_bytes(pickle.dumps(Bomb(prefix.parent / "exploded")))
    return blob_files(prefix)[0]


def pickle_manifest(prefix: Path) -> Path:
    path = prefix / "MANIFEST.json"
    path.write_bytes(pickle.dumps(Bomb(prefix.parent / "exploded")))
    return path


DAMAGES = {
    "flipped byte": (flip, "corrupt"),
    "cut short": (truncate, ""),
    "deleted": (delete, "missing"),
    "garbage manifest": (garble, "corrupt"),
    "pickles for blobs": (pickle_blobs, ""),
    "pickle for manifest": (pickle_manifest, "corrupt"),
}
OTHER_MODELS = {
    "other shapes": (model("kit.models:plain", {"dim": 24}), "the checkpoint does not fit the model"),
    "other tensors": (model("kit.models:odd", {}), "the checkpoint does not fit the model"),
}


@pytest.fixture(scope="module")
def damaged(folder):
    """Copies of a store with one checkpoint, each damaged in its way or resumed by another model."""
    sound = replace(
        small(folder, "sound", model=model("kit.models:plain", {})), store_url=str(folder / "sound")
    )
    plans.run_together([sound], folder / "sound-run")
    key = catalogue.latest(FolderStore(folder / "sound"), sound.stage_key).key
    made, objects = [], {}
    for name in [*DAMAGES, *OTHER_MODELS]:
        store = folder / name.replace(" ", "-")
        shutil.copytree(folder / "sound", store)
        if name in DAMAGES:
            objects[name] = DAMAGES[name][0](store / key).name
        used = OTHER_MODELS[name][0] if name in OTHER_MODELS else sound.work.model
        train = sound.work._replace(resume=True, steps=4, model=used)
        made.append(replace(sound, store_url=str(store), attempt=2, work=train))
    plans.run_together(made, folder / "damaged", may_fail=True)
    found = {name: left(folder / "damaged", n) for n, name in enumerate([*DAMAGES, *OTHER_MODELS])}
    return folder, found, objects, key


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_nothing_of_it_is_executed(damaged, name):
    folder, found, objects, key = damaged
    outcome = found[name]
    assert (outcome["outcome"], outcome["kind"]) == ("failed", "infrastructure")
    assert f"{key}/{objects[name]}" in (outcome["where"] or "") + outcome["message"]
    assert DAMAGES[name][1] in outcome["message"]
    assert not list(folder.rglob("exploded"))


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_a_checkpoint_of_another_model_is_refused(damaged, name):
    outcome = damaged[1][name]
    assert outcome["kind"] == "input"
    assert OTHER_MODELS[name][1] in outcome["message"]
    assert "resume with the model that wrote it" in outcome["hint"]


def test_a_corrupt_checkpoint_exits_4_from_the_launcher(damaged):
    folder, _, objects, key = damaged
    store = folder / "flipped-byte"
    plan = replace(
        small(folder, "sound", model=model("kit.models:plain", {}), steps=4, attempt=3), store_url=str(store)
    )
    assert plans.launch(plan, folder / "launched-flipped") == 4
    assert f"{key}/{objects['flipped byte']}" in plans.log_of(folder / "launched-flipped")
