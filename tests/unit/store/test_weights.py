"""Weights to start from, as they lie in a store: safetensors without their library, checkpoints, and what is
no weights."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe.store import catalogue, safetensors
from mlpipe.store.folder import FolderStore
from mlpipe.store.weights import of_checkpoint, of_files

pytestmark = pytest.mark.unit

TWO = {"a.weight": [1.0, 2.0, 3.0, 4.0], "b": [5.0]}


def write(path: Path, tensors: dict[str, list[float]], **changes: Any) -> None:
    """`changes`: of the entry of the first tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        packed = struct.pack(f"<{len(values)}f", *values)
        header[name] = {
            "dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(packed)]
        }  # fmt: skip
        data += packed
    header[next(iter(tensors))].update(changes)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@contextlib.contextmanager
def refused(words: str, where: object) -> Iterator[None]:
    """For what was asked, not for the store."""
    with pytest.raises(StoreError, match=words) as caught:
        yield
    assert (caught.value.kind, caught.value.where) == ("input", str(where))


def values(weights: Any, name: str, first: int, count: int) -> list[float]:
    """Some values of a tensor, by a read of their bytes alone."""
    tensor = weights.tensors[name]
    (chunk,) = tensor["chunks"]
    buffer = bytearray(4 * count)
    weights.read(weights.store, weights.blobs[chunk["blob"]], chunk["byte_offset"] + 4 * first, buffer)
    return list(struct.unpack(f"<{count}f", buffer))


def test_a_file_says_where_its_tensors_are(tmp_path):
    write(tmp_path / "w.safetensors", TWO)
    weights = of_files(FolderStore(tmp_path), "w.safetensors")
    assert {name: (tensor["dtype"], tensor["shape"]) for name, tensor in weights.tensors.items()} == {
        "a.weight": ("float32", [4]), "b": ("float32", [1])
    }  # fmt: skip
    assert values(weights, "a.weight", 1, 2) == [2.0, 3.0]
    assert values(weights, "b", 0, 1) == [5.0]


def test_a_set_is_read_by_its_index_and_a_folder_by_what_lies_in_it(tmp_path):
    store = FolderStore(tmp_path)
    write(tmp_path / "model-1.safetensors", {"a.weight": TWO["a.weight"]})
    write(tmp_path / "model-2.safetensors", {"b": TWO["b"]})
    index = {"weight_map": {"a.weight": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("model.safetensors.index.json", ""):
        weights = of_files(store, name)
        assert values(weights, "b", 0, 1) == [5.0]
        assert values(weights, "a.weight", 3, 1) == [4.0]
    (tmp_path / "model-2.safetensors").unlink()
    with refused(
        r"lists model-2.safetensors, which is not there \(1 of 2", tmp_path / "model.safetensors.index.json"
    ):
        of_files(store, "")


def test_of_several_files_in_a_folder_the_usual_name_counts_or_one_is_asked_for(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", TWO)
    with refused(r"several sets of weights: one\.safetensors, two\.safetensors", tmp_path):
        of_files(FolderStore(tmp_path), "")
    (tmp_path / "two.safetensors").unlink()
    write(tmp_path / "model.safetensors", {"c": [1.0]})
    assert list(of_files(FolderStore(tmp_path), "").tensors) == ["c"]
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "below").mkdir()
    write(tmp_path / "below" / "model.safetensors", {"d": [1.0]})  # another folder's
    assert list(of_files(FolderStore(tmp_path), "").tensors) == list(TWO)


def test_the_digest_follows_every_change(tmp_path):
    store, path = FolderStore(tmp_path), tmp_path / "w.safetensors"
    write(path, TWO)
    first = of_files(store, path.name).digest
    assert of_files(store, path.name).digest == first
    write(path, {**TWO, "b": [6.0]})
    os.utime(path, (1.0, 1.0))
    assert of_files(store, path.name).digest != first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 and so on", "a pickle, whatever its name says"),
        (b"\x80\x02}q\x00.", "a pickle, whatever its name says"),
        (b"", "cut off"),
        (b"\xff" * 16, "cut off"),
        ((2).to_bytes(8, "little") + b"[]", "not a file of safetensors"),
    ],
)
def test_what_is_no_safetensors_is_refused_in_words(tmp_path, content, message):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(StoreError, match=message) as caught:
        of_files(FolderStore(tmp_path), "w.safetensors")
    assert (caught.value.kind, caught.value.where) == ("input", f"{tmp_path}/w.safetensors")
    assert "pickle" not in message or "save_file" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "changes",
    [
        {"data_offsets": [0, 400]},
        {"data_offsets": [-8, 8]},
        {"shape": [5]},
        {"shape": [-4]},
        {"shape": [float("inf")]},
        {"dtype": None},
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path, changes):
    write(tmp_path / "w.safetensors", TWO, **changes)
    if changes == {"dtype": None}:  # a kind of number that is not known here: refused where it is asked for
        assert of_files(FolderStore(tmp_path), "w.safetensors").tensors["a.weight"]["dtype"] == "None"
        return
    with pytest.raises(DamagedError, match="not a file of safetensors"):
        of_files(FolderStore(tmp_path), "w.safetensors")


def test_a_folder_of_pickles_and_an_empty_one(tmp_path):
    with refused(r"no \*\.safetensors is there", tmp_path):
        of_files(FolderStore(tmp_path), "")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(StoreError, match=r"pytorch_model\.bin is a pickle") as caught:
        of_files(FolderStore(tmp_path), "")
    assert "save_file" in (caught.value.hint or "")
    assert (caught.value.kind, caught.value.where) == ("input", str(tmp_path))
    for files in ({"a": "../other.safetensors"}, {"a": "w.pt"}, {}, []):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        words = "not an index" if files == [] else "an index of files that do not lie beside it"
        with refused(words, tmp_path / "model.safetensors.index.json"):
            of_files(FolderStore(tmp_path), "")


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("/data/model.safetensors", ("/data", "model.safetensors")),
        ("/model.safetensors", ("/", "model.safetensors")),
        ("model.safetensors", (".", "model.safetensors")),
        ("/data/llama/", ("/data/llama", "")),
        ("s3://b/x/model.safetensors.index.json", ("s3://b/x", "model.safetensors.index.json")),
        ("s3://b/model.safetensors", ("s3://b", "model.safetensors")),
        ("s3://b/llama", ("s3://b/llama", "")),
    ],
)
def test_a_place_is_a_store_and_a_key(place, parts):
    assert safetensors.split(place) == parts


def save(store: FolderStore, key: str, scalars: dict[str, Any], names=("model.a", "optim.a.mean")) -> None:
    blob = catalogue.write_blob(store, f"{key}/model-0", [struct.pack("<4f", *TWO["a.weight"])])
    chunk = {"offset": [0], "shape": [4], "blob": 0, "byte_offset": 0}
    tensor = {"dtype": "float32", "shape": [4], "chunks": [chunk]}
    manifest = {
        "format": 1, "step": 3, "attempt": 1, "uuid": key[-8:], "time": 1.0, "code": {}, "scalars": scalars,
        "tensors": dict.fromkeys(names, tensor), "blobs": [blob],
    }  # fmt: skip
    assert catalogue.commit(store, key, manifest)


def test_a_checkpoint_gives_its_weights_alone_and_tied_names_are_one_tensor(tmp_path):
    store = FolderStore(tmp_path)
    key = catalogue.new_prefix("runs/r/stages/train", 3, 1)
    save(store, key, {"tied": {"model.head": "model.a"}})
    weights = of_checkpoint(store, key)
    assert set(weights.tensors) == {"a", "head"}
    assert weights.tensors["a"] is weights.tensors["head"]
    assert weights.where == f"{tmp_path}/{key}"
    assert values(weights, "a", 1, 2) == [2.0, 3.0]
    other = catalogue.new_prefix("runs/r/stages/train", 3, 1)
    save(store, other, {})
    assert of_checkpoint(store, other).digest != weights.digest


def raw(path: Path, header: dict[str, Any], data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_every_shape_fills_its_place_and_the_file_exactly(tmp_path, monkeypatch):
    entries = {
        "s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "m": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
        "e": {"dtype": "I64", "shape": [0, 7], "data_offsets": [16, 16]},
    }
    raw(tmp_path / "w.safetensors", entries, bytes(16))
    weights = of_files(FolderStore(tmp_path), "w.safetensors")
    begin = 8 + len(json.dumps(entries))
    assert weights.tensors == {
        name: {"dtype": dtype, "shape": shape, "chunks": [
            {"offset": [0] * len(shape), "shape": shape, "blob": 0, "byte_offset": begin + first}
        ]}
        for name, dtype, shape, first in (
            ("s", "float32", [], 0), ("m", "bfloat16", [2, 3], 4), ("e", "int64", [0, 7], 16)
        )
    }  # fmt: skip
    (blob,) = weights.blobs
    assert (blob["key"], blob["size_bytes"], blob["part_bytes"], blob["crc32c"]) == (
        "w.safetensors", begin + 16, 0, []
    )  # fmt: skip
    assert weights.where == f"{tmp_path}/w.safetensors"
    assert of_files(FolderStore(tmp_path), "").where == f"{tmp_path}"
    raw(tmp_path / "w.safetensors", {})
    assert of_files(FolderStore(tmp_path), "w.safetensors").tensors == {}
    monkeypatch.setattr(safetensors, "_MAX_HEADER_BYTES", 1)
    with pytest.raises(DamagedError, match="cut off"):
        of_files(FolderStore(tmp_path), "w.safetensors")


def test_one_name_stands_in_one_file_and_files_are_there(tmp_path):
    store = FolderStore(tmp_path)
    index = {"weight_map": {"a.weight": "one.safetensors", "b": "two.safetensors"}}
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", {"b": [1.0]})
    (tmp_path / "set.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match=r"b stands in two files") as caught:
        of_files(store, "set.safetensors.index.json")
    assert (caught.value.kind, caught.value.where) == ("input", f"{tmp_path}/two.safetensors")
    with pytest.raises(StoreError, match="no such file") as missing:
        of_files(store, "other.safetensors")
    assert (missing.value.kind, missing.value.where) == ("input", f"{tmp_path}/other.safetensors")


def test_the_digest_is_of_names_sizes_times_and_headers(tmp_path):
    store, path = FolderStore(tmp_path), tmp_path / "w.safetensors"
    seen = set()
    for name, tensors, seconds in (
        ("w", {"a": [1.0]}, 1.0), ("w", {"a": [1.0]}, 2.0), ("w", {"b": [1.0]}, 1.0), ("v", {"a": [1.0]}, 1.0)
    ):  # fmt: skip
        path = tmp_path / f"{name}.safetensors"
        write(path, tensors)
        os.utime(path, (seconds, seconds))
        seen.add(of_files(store, path.name).digest)
    assert len(seen) == 4


def test_adapters_alone_are_no_weights_and_neither_is_an_optimizer(tmp_path):
    store = FolderStore(tmp_path)
    write(tmp_path / "w.safetensors", {"a.weight": [1.0], "a.lora_A.weight": [2.0]})
    with pytest.raises(StoreError, match="these are adapters") as caught:
        of_files(store, "w.safetensors")
    assert (caught.value.kind, caught.value.where) == ("input", f"{tmp_path}/w.safetensors")
    for name, words in (("model.a.lora_A", "these are adapters"), ("optim.a", "holds no model")):
        key = catalogue.new_prefix("runs/r/stages/train", 3, 1)
        save(store, key, {}, [name])
        manifest = f"{key}/MANIFEST.json"
        with refused(words, manifest if "adapters" in words else key):
            of_checkpoint(store, key)
