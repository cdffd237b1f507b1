"""A promoted model is complete, numbered once, and knows where it came from."""

from __future__ import annotations

import threading
import time

import pytest
from kit.command_runs import Cli

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe.store import catalogue, registry
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit
STAGE = "runs/r/stages/train"


class CuttingStore(FolderStore):
    part_bytes = 64


@pytest.fixture(params=[FolderStore, CuttingStore])
def store(request, tmp_path):
    return request.param(tmp_path)


def tensor(blob, size):
    chunk = {"offset": [0], "shape": [size], "blob": blob, "byte_offset": 0}
    return {"dtype": "uint8", "shape": [size], "chunks": [chunk]}


def checkpoint(store, step=7):
    """Optimizer in blob 0, model in blob 1."""
    prefix = catalogue.new_prefix(STAGE, step, 1)
    blobs = [
        catalogue.write_blob(store, f"{prefix}/optim-0", [b"o" * 300], block_bytes=16),
        catalogue.write_blob(store, f"{prefix}/model-0", [b"m" * 100], block_bytes=16),
    ]
    manifest = {
        "format": 1, "step": step, "attempt": 1, "uuid": "0", "time": 1.0, "code": {}, "scalars": {"rng": 1},
        "tensors": {"optim.w.exp_avg": tensor(0, 300), "model.w": tensor(1, 100)}, "blobs": blobs,
    }  # fmt: skip
    assert catalogue.commit(store, prefix, manifest)
    return prefix


def test_only_the_model_is_promoted_and_outlives_its_checkpoint(store):
    prefix = checkpoint(store)
    assert registry.promote(store, "lm", "candidate", prefix, {"run": "r"}) == 1
    catalogue.discard(store, prefix)
    model = registry.show_model(store, "lm", "candidate")
    assert (model.version, model.step, model.size_bytes, model.aliases) == (1, 7, 100, ("candidate",))
    assert model.lineage == {"run": "r", "checkpoint": prefix}
    manifest = catalogue.load_manifest(store, model.key)
    assert list(manifest["tensors"]) == ["model.w"]
    buffer = bytearray(100)
    catalogue.read_blob(store, manifest["blobs"][0], 0, buffer)
    assert bytes(buffer) == b"m" * 100
    assert catalogue.verify(store, model.key) == []
    assert not any("optim" in info.key for info in store.list("models"))


def test_promoters_at_once_get_versions_of_their_own(store):
    prefix = checkpoint(store)
    versions = []
    threads = [
        threading.Thread(target=lambda: versions.append(registry.promote(store, "lm", "best", prefix, {})))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(versions) == [1, 2, 3, 4]
    store.local_path("models").joinpath("a\nb").mkdir()  # which no model can be called
    assert [model.version for model in registry.list_models(store)[0]] == [1, 2, 3, 4]
    assert registry.show_model(store, "lm", "best").version in versions


def test_a_promoter_that_dies_leaves_no_version(store, monkeypatch):
    prefix = checkpoint(store)
    monkeypatch.setattr(store, "copy", None)
    with pytest.raises(TypeError):
        registry.promote(store, "lm", "best", prefix, {})
    assert registry.list_models(store) == ([], [])
    monkeypatch.undo()
    assert registry.promote(store, "lm", "best", prefix, {}) == 2


@pytest.mark.parametrize(
    ("damage", "told"), [(b"!", "block 6 is corrupt"), (b"", "has [0-9]+ bytes"), (None, "is missing")]
)
def test_a_damaged_model_is_not_promoted(store, damage, told):
    """Nor does it leave anything; that the optimizer is damaged is no matter."""
    prefix = checkpoint(store)
    registry.promote(store, "lm", "best", prefix, {})
    before = list(store.list("models"))
    for key in [info.key for info in store.list(prefix) if not info.key.endswith("MANIFEST.json")]:
        if "optim" in key:
            store.put(key, b"!")
        elif key.endswith(("model-0", "model-0/p00001")):
            last = key
    data = store.get(last)
    store.delete([last]) if damage is None else store.put(last, data[:-1] + damage)
    with pytest.raises(DamagedError, match=told) as caught:
        registry.promote(store, "lm", "best", prefix, {})
    assert last in caught.value.told
    assert list(store.list("models")) == before
    store.put(last, data)
    assert registry.promote(store, "lm", "best", prefix, {}) == 2


def test_a_checkpoint_that_is_removed_while_it_is_promoted_is_not_called_damaged(store, monkeypatch):
    prefix, load = checkpoint(store), registry.load_manifest

    def removed(*of):
        manifest = load(*of)
        catalogue.discard(store, prefix)
        return manifest

    monkeypatch.setattr(registry, "load_manifest", removed)
    with pytest.raises(StoreError, match="removed while it was read") as caught:
        registry.promote(store, "lm", "best", prefix, {})
    assert (caught.value.kind, list(store.list("models"))) == ("input", [])


def test_a_version_is_found_by_where_it_came_from(store):
    prefix, began = checkpoint(store), time.time()
    for run in ("a", "b", "a"):
        registry.promote(store, "lm", None, prefix, {"run": run, "stage": "s"})
    last = registry.show_model(store, "lm", 3)
    assert (last.aliases, began <= last.time <= time.time()) == ((), True)
    assert catalogue.load_manifest(store, last.key)["scalars"] == {}  # no training goes on from it

    def found(*runs, since=began, stage="s"):
        model = registry.find_version(store, "lm", {"run": runs, "stage": [stage]}, since=since)
        return model and model.version

    assert (found("a"), found("b"), found("c"), found("b", "a"), found("c", "b")) == (3, 2, None, 3, 2)
    assert found("a", stage="t") is None
    assert found("b", since=last.time + 600) == 2  # by another machine's clock
    assert found("b", since=last.time + 7200) is None


def test_a_checkpoint_without_a_model_is_not_promoted(store):
    prefix = catalogue.new_prefix(STAGE, 1, 1)
    blob = catalogue.write_blob(store, f"{prefix}/optim-0", [b"o" * 100], block_bytes=16)
    manifest = {
        "format": 1, "step": 1, "attempt": 1, "uuid": "0", "time": 1.0, "code": {}, "scalars": {},
        "tensors": {"optim.w.exp_avg": tensor(0, 100)}, "blobs": [blob],
    }  # fmt: skip
    assert catalogue.commit(store, prefix, manifest)
    with pytest.raises(StoreError, match="holds no model") as caught:
        registry.promote(store, "lm", "best", prefix, {})
    assert (caught.value.kind, registry.list_models(store)) == ("input", ([], []))


def test_aliases_move_and_mistakes_are_bad_input(store):
    prefix = checkpoint(store)
    for _ in range(2):
        registry.promote(store, "lm", "best", prefix, {})
    assert registry.show_model(store, "lm", "best").version == 2
    registry.set_alias(store, "lm", "best", 1)
    assert registry.show_model(store, "lm", 1).aliases == ("best",)
    assert registry.show_model(store, "lm", "2").aliases == ()
    for call in (
        lambda: registry.show_model(store, "lm", 9),
        lambda: registry.show_model(store, "other", "best"),
        lambda: registry.set_alias(store, "lm", "best", 9),
        lambda: registry.set_alias(store, "lm", "12", 1),
        lambda: registry.promote(store, "../lm", None, prefix, {}),
        lambda: registry.promote(store, "lm", "Best!", prefix, {}),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.kind == "input"
    for name, told in (("lm", "lm, version 9"), ("other", "other")):
        with pytest.raises(StoreError) as caught:
            registry.show_model(store, name, 9)
        assert caught.value.message == f"there is no model {told}"


def test_what_is_damaged_is_listed_as_such_beside_all_others(store):
    prefix = checkpoint(store)
    for name in ("bad", "good"):
        registry.promote(store, name, "first", prefix, {})
        registry.promote(store, name, "last", prefix, {})
    store.put("models/bad/1/MANIFEST.json", b"{}")
    store.put("models/good/aliases/first", b"[]")
    models, damaged = registry.list_models(store)
    assert [(model.name, model.version, model.aliases) for model in models] == [
        ("bad", 2, ("last",)), ("good", 1, ()), ("good", 2, ("last",)),
    ]  # fmt: skip
    assert [error.where for error in damaged] == ["models/bad/1/MANIFEST.json", "models/good/aliases/first"]
    assert registry.show_model(store, "good", "last").version == 2
    store.put("models/good/2/MANIFEST.json", b"")
    assert registry.show_model(store, "bad", None).version == 2
    for name, version in (("good", "first"), ("good", None), ("bad", 1)):
        with pytest.raises(DamagedError):
            registry.show_model(store, name, version)
    with pytest.raises(StoreError, match=r"there is no model other\n"):
        registry.show_model(store, "other", None)
    if store.part_bytes is None:
        shown = Cli(store.root)("models", "show", "good", "--store", store.url, code=4)
        assert "models/good/2/MANIFEST.json: corrupt" in shown.stderr
        assert "mlpipe models show good VERSION" in shown.stderr
