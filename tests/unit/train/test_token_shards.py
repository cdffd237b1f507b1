"""Tokens in many files: an order that needs few of them at a time, and a cache that holds no more."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpipe._core.errors import MlpipeError, TrainError
from mlpipe.train.data import shard_cache, tokens
from mlpipe.train.data.corpus import build_corpus
from mlpipe.train.data.shard_cache import CachedFile, ShardCache
from mlpipe.train.data.token_shards import WINDOW, ShardedTokens
from mlpipe.train.data.tokens import Shard, Split, TokenFolder

pytestmark = pytest.mark.unit
GIB = 2**30


def sharded(folder: Path, sizes: list[int], seq_len: int, limit: int = GIB) -> ShardedTokens:
    """Token i of file k is 100 k + i."""
    shards = []
    source = folder / "source"
    source.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        data = (100 * number + np.arange(size)).astype(np.uint16).tobytes()
        (source / f"train-{number}.bin").write_bytes(data)
        shards.append(Shard(f"train-{number}.bin", size, hashlib.sha256(data).hexdigest()))
    split = Split("", sum(sizes), sum(sizes), "", tuple(shards))
    tokens = TokenFolder(folder / "cache", "uint16", 9999, None, {"train": split}, "", str(source))
    return ShardedTokens(tokens, split, seq_len, limit)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3 * WINDOW),
    seed=st.integers(0, 5),
    draw=st.randoms(use_true_random=False),
)
def test_an_epoch_has_each_sample_once_and_a_window_few_files(tmp_path_factory, sizes, seed, draw):
    sizes = [1 + 4 * size for size in sizes]
    if not any(size > 1 for size in sizes):
        sizes[0] = 5
    data = sharded(tmp_path_factory.mktemp("shards"), sizes, 4)
    data.cache.expect = lambda files: None  # type: ignore[method-assign]
    num_samples = len(data)
    assert num_samples == sum((size - 1) // 4 for size in sizes)
    positions = np.arange(3 * num_samples)
    found = data.order_at(seed, positions)
    for epoch in range(3):
        own = found[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(own.tolist()) == list(range(num_samples))
        files = np.searchsorted(data._offsets, own, side="right") - 1
        _, ends = data._windows_of(seed, epoch)
        for begin, end in zip([0, *ends], ends, strict=False):
            assert len(set(files[begin:end].tolist())) <= WINDOW
    some = np.array(draw.sample(positions.tolist(), min(5, len(positions))))
    assert data.order_at(seed, some).tolist() == found[some].tolist()
    if num_samples > 30:
        assert found[:num_samples].tolist() != found[num_samples : 2 * num_samples].tolist()
        assert found.tolist() != data.order_at(seed + 1, positions).tolist()


def test_a_sample_is_what_lies_in_its_file(tmp_path):
    data = sharded(tmp_path, [9, 13, 4], 4)
    assert len(data) == 5
    rows = data.windows(np.array([4, 0, 1, 2]))
    expected = [[108, 109, 110, 111, 112], [0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [100, 101, 102, 103, 104]]
    assert rows.tolist() == expected


def cached(folder: Path, limit: int, count: int = 6, size: int = 100) -> tuple[ShardCache, list[CachedFile]]:
    source = folder / "source"
    source.mkdir()
    files = []
    for number in range(count):
        data = bytes([number]) * size
        (source / f"{number}").write_bytes(data)
        files.append(CachedFile(f"{number}", size, hashlib.sha256(data).hexdigest()))
    return ShardCache(str(source), folder / "cache", limit), files


def test_the_cache_holds_no_more_than_it_may_and_what_was_used_last(tmp_path):
    cache, files = cached(tmp_path, limit=350)
    for number, file in enumerate(files):
        assert cache.get(file).read_bytes() == bytes([number]) * 100
        held = [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]
        assert sum(path.stat().st_size for path in held) <= 350
        if number == 2:
            assert len(held) == 3
        cache.get(files[0])  # stays
    assert (tmp_path / "cache" / files[0].sha256).exists()
    assert not (tmp_path / "cache" / files[2].sha256).exists()
    (tmp_path / "source" / "5").unlink()
    assert cache.get(files[5]).read_bytes() == b"\5" * 100  # from the disk
    cache.expect(files[1:3])
    assert cache.get(files[2]).read_bytes() == b"\2" * 100
    assert ShardCache(cache.url, cache.folder, 350).get(files[5]).exists()


def test_other_bytes_than_those_of_the_manifest_are_refused(tmp_path):
    cache, files = cached(tmp_path, limit=350)
    (tmp_path / "source" / "3").write_bytes(b"x" * 100)
    with pytest.raises(MlpipeError, match="not those of the manifest") as caught:
        cache.get(files[3])
    assert caught.value.where == f"{cache.url}/3"
    assert [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_a_lock_ends_with_its_block_though_a_fork_has_it_too(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_cache, "_FETCH_SECONDS", 0.5)
    cache, files = cached(tmp_path, limit=350)
    cache.get(files[0])
    name = f".{files[0].sha256[:16]}.lock"
    open_files = Path("/proc/self/fd")
    with cache._locked(name):
        (mine,) = (fd for fd in open_files.iterdir() if fd.is_symlink() and fd.readlink().name == name)
        shared = os.dup(int(mine.name))  # as a fork has it
    with cache._locked(name), cache._locked(name, unless=cache.folder / files[0].sha256):
        pass  # the second would wait for what is there
    os.close(shared)


def test_what_killed_processes_left_is_deleted_and_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_cache, "_FETCH_SECONDS", 100.0)
    cache, files = cached(tmp_path, limit=350)
    cache.get(files[0])
    cache.get(files[1])
    old, new = cache.folder / ".partial-old", cache.folder / ".partial-new"
    for path, age in ((old, 200), (new, 50)):
        path.write_bytes(bytes(100 if path is old else 10))
        os.utime(path, (time.time() - age,) * 2)
    cache.get(files[2])
    assert (old.exists(), new.exists()) == (False, True)
    assert all((cache.folder / file.sha256).exists() for file in files[:3])


def test_what_could_not_be_fetched_ahead_is_fetched_again_and_a_hit_counts_as_use(tmp_path):
    cache, files = cached(tmp_path, limit=350)
    source = tmp_path / "source/0"
    source.rename(tmp_path / "away")
    cache.expect(files[:1])
    with suppress(MlpipeError):
        cache._coming[files[0].sha256].result()
    (tmp_path / "away").rename(source)
    path = cache.get(files[0])
    assert path.read_bytes() == b"\0" * 100
    os.utime(path, (0, 0))
    cache.expect(files[:1])
    cache._coming[files[0].sha256].result()
    assert path.stat().st_mtime > 0


@pytest.mark.parametrize("digest", ["../../x", "/home/u/.ssh/id_rsa", "A" * 64, "a" * 63, 5, "a" * 64 + "\n"])
def test_a_manifest_names_digests_and_no_paths(tmp_path, monkeypatch, digest):
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path))
    build_corpus(tmp_path / "cut", max_bytes=4_000, tokenizer_kind="bytes", shard_bytes=5_001)
    manifest = tmp_path / "cut/manifest.json"
    tokens._open_bucket(str(tmp_path / "cut"))
    content = json.loads(manifest.read_text())
    content["splits"]["train"]["shards"][0]["sha256"] = digest
    manifest.write_text(json.dumps(content))
    with pytest.raises(TrainError, match="no manifest of token files") as caught:
        tokens._open_bucket(str(tmp_path / "cut"))
    assert caught.value.kind == "input"


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(TrainError, match="no file has one sample"):
        sharded(tmp_path, [4, 4], 4)
    with pytest.raises(TrainError, match="two windows of 8 files are") as caught:
        sharded(tmp_path, [1000] * 20, 4, limit=8 * 2000)
    assert "data.cache" in (caught.value.hint or "")


def test_a_corpus_is_cut_into_files_that_say_all_that_one_did(tmp_path):
    whole = build_corpus(tmp_path / "whole", max_bytes=40_000, tokenizer_kind="bytes")
    build_corpus(tmp_path / "cut", max_bytes=40_000, tokenizer_kind="bytes", shard_bytes=5_001)
    manifest = json.loads((tmp_path / "cut/manifest.json").read_text())
    train = manifest["splits"]["train"]
    assert manifest["format"] == 2
    assert set(train) == {"num_tokens", "num_bytes", "shards"}
    assert train["num_tokens"] == whole["train"].num_tokens == sum(s["num_tokens"] for s in train["shards"])
    data = b"".join((tmp_path / "cut" / shard["file"]).read_bytes() for shard in train["shards"])
    assert data == (tmp_path / "whole/train.bin").read_bytes()
    assert {shard["num_tokens"] for shard in train["shards"][:-1]} == {2500}
    assert not (tmp_path / "cut/train.bin").exists()
    assert set(json.loads((tmp_path / "whole/manifest.json").read_text())["splits"]["train"]) == {
        "file", "num_tokens", "num_bytes", "sha256",
    }  # fmt: skip
