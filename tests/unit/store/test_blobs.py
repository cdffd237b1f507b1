"""Blobs as the objects that they are cut into: which are written and read for one, and how many wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe.store import blobs
from mlpipe.store.blobs import missing_objects, read_blob, write_blob
from mlpipe.store.checksum import crc32c
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit
DATA = bytes(range(250))


class Cutting(FolderStore):
    """`put`, `got`: what was written and read of it. `refuses`: a key that it does not write."""

    part_bytes = 70

    def __init__(self, root):
        super().__init__(root)
        self.written, self.got, self.refuses = {}, [], ""

    def put_pieces(self, key, pieces, *, crc32c=None):
        if key == self.refuses:
            raise StoreError("refused")
        self.written[key] = (b"".join(map(bytes, pieces)), crc32c)
        return super().put_pieces(key, pieces)

    def get_into(self, key, buffer, *, start=0):
        self.got.append((key, start, len(buffer)))
        super().get_into(key, buffer, start=start)


class Pool:
    """Does what it is given when that is asked for; `most` was given at once."""

    most = waiting = 0
    ended = None

    def __init__(self, num_threads, **_):
        Pool.waiting = 0

    def submit(self, do, *arguments, **keywords):
        def result():
            Pool.waiting -= 1
            return do(*arguments, **keywords)

        Pool.waiting += 1
        Pool.most = max(Pool.most, Pool.waiting)
        return SimpleNamespace(result=result)

    def shutdown(self, **how):
        Pool.ended = how

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def store(tmp_path):
    return Cutting(tmp_path)


def test_parts_hold_whole_blocks_and_are_stored_with_their_own_sums(store):
    blob = write_blob(store, "b", [DATA[:1], DATA[1:200], b"", DATA[200:]], block_bytes=16)
    parts = {f"b/p{n:05d}": DATA[at : at + 64] for n, at in enumerate(range(0, 250, 64))}
    assert store.written == {key: (data, crc32c(data)) for key, data in parts.items()}
    assert blob == {
        "key": "b", "size_bytes": 250, "block_bytes": 16, "part_bytes": 64,
        "crc32c": [crc32c(DATA[at : at + 16]) for at in range(0, 250, 16)],
    }  # fmt: skip
    assert write_blob(store, "c", [DATA], block_bytes=100)["part_bytes"] == 100
    assert [data for key, (data, _) in store.written.items() if key > "c"] == [
        DATA[:100], DATA[100:200], DATA[200:]
    ]  # fmt: skip
    assert write_blob(store, "d", [DATA[:64]], block_bytes=16)["size_bytes"] == 64
    assert [key for key in store.written if key > "d"] == ["d/p00000"]
    empty = write_blob(store, "e", [])
    assert store.written["e/p00000"] == (b"", 0)
    assert missing_objects(empty, {"e/p00000": 0}) == []


def test_a_folder_holds_a_blob_as_one_file(tmp_path):
    blob = write_blob(FolderStore(tmp_path), "b", [DATA[:7], DATA[7:]], block_bytes=100)
    assert (tmp_path / "b").read_bytes() == DATA
    assert (blob["part_bytes"], blob["size_bytes"], blob["block_bytes"], len(blob["crc32c"])) == (
        0,
        250,
        100,
        3,
    )


def test_no_more_parts_wait_than_are_stored_side_by_side(store, monkeypatch):
    monkeypatch.setattr(blobs, "ThreadPoolExecutor", Pool)
    asked = []

    def chunks():
        for at in range(0, 250, 10):
            asked.append((at, len(store.written)))
            yield DATA[at : at + 10]

    Pool.most = 0
    write_blob(store, "b", chunks(), block_bytes=10)
    assert len(store.written) == 4
    store.written.clear()
    store.part_bytes = 10
    asked.clear()
    write_blob(store, "b", chunks(), block_bytes=10)
    assert list(store.written) == [f"b/p{n:05d}" for n in range(25)], "the oldest is waited for"
    assert Pool.most == 4
    assert all(at // 10 - done <= 5 for at, done in asked)
    store.refuses = "b/p00007"
    with pytest.raises(StoreError, match="refused"):
        write_blob(store, "b", chunks(), block_bytes=10)
    assert Pool.ended == {"wait": True, "cancel_futures": True}


@pytest.mark.parametrize(
    ("start", "end", "read"),
    [
        (0, 16, [("b/p00000", 0, 16)]),
        (5, 6, [("b/p00000", 0, 16)]),
        (15, 17, [("b/p00000", 0, 16), ("b/p00000", 16, 16)]),
        (48, 80, [("b/p00000", 48, 16), ("b/p00001", 0, 16)]),
        (63, 65, [("b/p00000", 48, 16), ("b/p00001", 0, 16)]),
        (245, 250, [("b/p00003", 48, 10)]),
        (240, 250, [("b/p00003", 48, 10)]),
        (64, 64, []),
        (250, 250, []),
    ],
)
def test_only_the_blocks_that_cover_a_range_are_read(store, start, end, read):
    blob = write_blob(store, "b", [DATA], block_bytes=16)
    buffer = bytearray(end - start)
    read_blob(store, blob, start, buffer)
    assert buffer == DATA[start:end]
    assert sorted(store.got) == read


@pytest.mark.parametrize(("start", "size"), [(-1, 2), (250, 1), (0, 251), (251, 0)])
def test_no_bytes_are_outside_of_a_blob(store, start, size):
    blob = write_blob(store, "b", [DATA], block_bytes=16)
    with pytest.raises(StoreError, match=f"bytes {start} to {start + size} are not within it") as caught:
        read_blob(store, blob, start, bytearray(size))
    assert caught.value.where == "b"
    assert store.got == []


def test_what_is_damaged_is_named_and_a_store_that_is_away_is_not_damage(store, monkeypatch):
    blob = write_blob(store, "b", [DATA], block_bytes=16)
    store.put("b/p00002", bytes(64))
    store.delete(["b/p00001"])
    for start, words in ((160, "b/p00002: block 10 is corrupt"), (70, "b/p00001: is missing")):
        with pytest.raises(DamagedError, match=words):
            read_blob(store, blob, start, bytearray(1))
    problems = ["b/p00001: is missing", "b/p00002: has 63 bytes, 64 were written"]
    sizes = {"b/p00000": 64, "b/p00002": 63, "b/p00003": 58, "c": 1}
    assert missing_objects(blob, sizes) == problems

    def away(*_, **__):
        raise StoreError("away")

    monkeypatch.setattr(store, "get_into", away)
    with pytest.raises(StoreError, match="away") as caught:
        read_blob(store, blob, 0, bytearray(250))
    assert not isinstance(caught.value, DamagedError)
