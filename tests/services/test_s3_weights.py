"""Weights to start from that lie in a bucket: found by a folder, a file or an index, read by parts."""

from __future__ import annotations

import json
import struct

import pytest

from mlpipe._core.errors import StoreError
from mlpipe.plan.model import InitPlan
from mlpipe.store.folder import FolderStore
from mlpipe.store.open import open_store
from mlpipe.store.weights import of_files
from mlpipe.submit.starting import find

pytestmark = pytest.mark.services


def test_weights_in_a_bucket_are_found_and_read_by_parts(server, url, tmp_path, monkeypatch):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    bucket, own = open_store(url), FolderStore(tmp_path)

    def look(place: str):
        path = f"{url}/{place}"
        return find(own, "r", InitPlan({"path": path}, path, {}, True), ".")

    for number, values in ((1, (1.0, 2.0, 3.0)), (2, (4.0,))):
        size = 4 * len(values)
        entry = {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, size]}
        header = json.dumps({f"w{number}": entry}).encode()
        data = len(header).to_bytes(8, "little") + header + struct.pack(f"<{len(values)}f", *values)
        bucket.put(f"llama/model-{number}.safetensors", data)
    files = {"w1": "model-1.safetensors", "w2": "model-2.safetensors"}
    bucket.put("llama/model.safetensors.index.json", json.dumps({"weight_map": files}).encode())
    found = look("llama")
    assert look("llama/model.safetensors.index.json").digest == found.digest
    assert found.store_url == f"{url}/llama"
    weights = of_files(open_store(found.store_url), found.key)
    (chunk,) = weights.tensors["w1"]["chunks"]
    part = bytearray(8)
    weights.read(weights.store, weights.blobs[chunk["blob"]], chunk["byte_offset"] + 4, part)
    assert struct.unpack("<2f", part) == (2.0, 3.0)
    one = look("llama/model-2.safetensors")
    assert list(of_files(open_store(one.store_url), one.key).tensors) == ["w2"]
    with pytest.raises(StoreError, match="no such file"):
        look("llama/gone.safetensors")
    bucket.put("old/pytorch_model.bin", b"PK\x03\x04")
    with pytest.raises(StoreError, match=r"pytorch_model\.bin is a pickle"):
        look("old")
