"""Many files of tokens in a bucket, of which a few at a time lie on the disk."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import plans

from mlpipe.plan.data import DataPlan
from mlpipe.plan.mesh import Mesh
from mlpipe.store.s3 import S3Store
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.data.token_shards import WINDOW
from mlpipe.train.world import World

pytestmark = pytest.mark.services

NUM_SHARDS, SAMPLES, SEQ_LEN = 200, 4, 32  # 25 windows
SIZE = SAMPLES * SEQ_LEN + 1
CACHE_BYTES = 3 * WINDOW * SIZE * 2


@pytest.fixture
def bucket(store, url, server, tmp_path, monkeypatch) -> str:
    for name, value in {**server.environment(), "MLPIPE_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    tokens = S3Store.from_environment(f"{url}/tokens", server.environment())
    draw = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", NUM_SHARDS), ("validation", 2)):
        shards = []
        for number in range(count):
            data = draw.integers(0, 256, SIZE, dtype=np.uint16).tobytes()
            tokens.put(f"{split}-{number}.bin", data)
            shards.append(
                {
                    "file": f"{split}-{number}.bin",
                    "num_tokens": SIZE,
                    "sha256": hashlib.sha256(data).hexdigest(),
                }
            )
        splits[split] = {"num_tokens": count * SIZE, "num_bytes": count * SIZE, "shards": shards}
    manifest = {"format": 2, "dtype": "uint16", "vocab_size": 256, "tokenizer": None, "splits": splits}
    tokens.put("manifest.json", json.dumps(manifest).encode())
    return f"{url}/tokens"


def bytes_of(folder: Path) -> int:
    """Of the copies in it."""
    total = 0
    for path in folder.rglob("shards/*"):
        with suppress(FileNotFoundError):  # just deleted
            total += 0 if path.name.startswith(".") else path.stat().st_size
    return total


@pytest.mark.parametrize("server", ["minio"], indirect=True)
def test_each_sample_comes_once_and_the_disk_holds_a_few(bucket, tmp_path):
    """Through one epoch on two ranks; then a training, interrupted and resumed on another number of ranks."""
    data = DataPlan(bucket, None, None, cache_bytes=CACHE_BYTES)
    most, seen = 0, set()
    loaders = []
    for rank in range(2):
        dataset = open_dataset(data, split="train", seq_len=SEQ_LEN)
        world = World(Mesh(dp_replicate=2), rank, torch.device("cpu"))
        loaders.append(
            MicrobatchLoader(dataset, world, seed=1, global_batch=40, micro_batch=20, seq_len=SEQ_LEN)
        )
    assert len(dataset) == NUM_SHARDS * SAMPLES
    for position in range(0, NUM_SHARDS * SAMPLES, 40):
        for loader in loaders:
            seen |= {tuple(row) for one in loader.step(position) for row in one.batch["inputs"].tolist()}
        if position % 80 == 0:
            most = max(most, bytes_of(tmp_path / "cache"))
    assert len(seen) == NUM_SHARDS * SAMPLES
    assert 2 * WINDOW * SIZE < most <= CACHE_BYTES

    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=3_000)

    def training(run_id: str, steps: int, ranks: int, attempt: int = 1):
        made = plans.train_plan(
            tmp_path / "store", tokens, run_id=run_id, steps=steps, every=3, attempt=attempt, world_size=ranks
        )
        return replace(made, work=made.work._replace(data=data))

    plans.run_together([training("whole", 6, 1), training("cut", 3, 1)], tmp_path / "one")
    plans.run_together([training("cut", 6, 2, attempt=2)], tmp_path / "two")
    whole = plans.losses(tmp_path / "store", training("whole", 6, 1))
    assert plans.losses(tmp_path / "store", training("cut", 3, 1)) == whole[:3]
    second = plans.losses(tmp_path / "store", training("cut", 6, 2, attempt=2))
    assert second == pytest.approx(whole[3:], rel=1e-5)
