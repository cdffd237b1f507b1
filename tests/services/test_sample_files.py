"""Parquet files and tars in a real bucket: what their folder gives, by requests and through the cache."""

from __future__ import annotations

import numpy as np
import pytest
from kit import sample_files

from mlpipe.plan.data import DataPlan, FilesPlan
from mlpipe.store.s3 import S3Store
from mlpipe.train.data import tar_index
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.order import samples_at

pytestmark = pytest.mark.services


@pytest.mark.parametrize("server", ["minio"], indirect=True)
def test_a_bucket_gives_what_its_folder_gives(store, url, server, tmp_path, monkeypatch):
    for name, value in {**server.environment(), "MLPIPE_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    bucket = S3Store.from_environment(f"{url}/files", server.environment())
    made = tmp_path / "files"
    sample_files.write_parquet(made / "deep/parquet")
    sample_files.write_tars(made / "tars")
    for path in (path for path in made.rglob("*") if path.is_file()):
        bucket.put(path.relative_to(made).as_posix(), path.read_bytes())
    assert tar_index.main([f"{url}/files/tars"]) == 0
    for kind, path, columns in (
        ("parquet", "**/*.parquet", {"x": "x", "index": "index"}),
        ("tars", "tars", {"x": "x.npy", "index": "cls"}),
    ):
        found = []
        for base in (made, f"{url}/files"):
            files = FilesPlan(kind, f"{base}/{path}", None, columns, None)
            data = open_dataset(
                DataPlan(None, None, None, files=files, cache_bytes=10**6), split="train", seq_len=1
            )
            order = samples_at(data, 5, np.arange(2 * len(data)))
            found.append([sample_files.plain(data[int(index)]) for index in order])
        assert found[0] == found[1]
        assert sorted(one["index"] for one in found[0][:16]) == list(range(16))
