"""A folder behaves like an object store: whole objects, conditions that hold, nothing half-written listed."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kit.store_race import race

from mlpipe._core.errors import StoreError
from mlpipe.store import folder
from mlpipe.store.base import RESERVED
from mlpipe.store.folder import FolderStore
from mlpipe.store.open import full_url, open_store

pytestmark = pytest.mark.unit

_PART = st.sampled_from(["a", "a.b", "b", "Z", "step-1", "ü", "a b"])
_KEYS = st.builds("/".join, st.lists(_PART, min_size=1, max_size=2))


class FolderMachine(RuleBasedStateMachine):
    """Random operations against a dict. Keys where a file would stand in a folder's place are left out."""

    def __init__(self):
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.store = FolderStore(Path(self.temporary.name, "store"))
        self.model: dict[str, bytes] = {}

    def teardown(self):
        self.temporary.cleanup()

    def _fits(self, key):
        return not any(key.startswith(k + "/") or k.startswith(key + "/") for k in self.model)

    @rule(key=_KEYS, data=st.binary(max_size=50))
    def put(self, key, data):
        if self._fits(key):
            self.store.put(key, memoryview(data))
            self.model[key] = data

    @rule(key=_KEYS, data=st.binary(max_size=50))
    def put_if_absent(self, key, data):
        if self._fits(key):
            assert self.store.put_if_absent(key, data) == (key not in self.model)
            self.model.setdefault(key, data)

    @rule(key=_KEYS, data=st.binary(max_size=50), stale=st.booleans())
    def put_if_match(self, key, data, stale):
        if key in self.model:
            etag = self.store.get_with_etag(key)[1]
            assert self.store.put_if_match(key, data, "x" if stale else etag) == (not stale)
            if not stale:
                self.model[key] = data
        elif self._fits(key):
            assert not self.store.put_if_match(key, data, "x")

    @rule(key=_KEYS)
    def delete(self, key):
        if self._fits(key):
            self.store.delete([key])
            self.model.pop(key, None)

    @rule(source=_KEYS, to=_KEYS)
    def copy(self, source, to):
        if source in self.model and self._fits(to):
            self.store.copy(source, to)
            self.model[to] = self.model[source]

    @rule(key=_KEYS, start=st.integers(0, 60), length=st.none() | st.integers(0, 60))
    def get(self, key, start, length):
        if key in self.model:
            end = None if length is None else start + length
            assert self.store.get(key, start=start, length=length) == self.model[key][start:end]
        elif self._fits(key):
            with pytest.raises(StoreError, match="no such object"):
                self.store.get(key)

    @invariant()
    def lists_what_was_put(self):
        found = list(self.store.list(""))
        assert [info.key for info in found] == sorted(self.model)
        assert [info.size_bytes for info in found] == [len(self.model[key]) for key in sorted(self.model)]
        top = sorted({key.split("/")[0] + "/" * ("/" in key) for key in self.model})
        assert [info.key for info in self.store.list("", recursive=False)] == top


FolderMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestFolder = FolderMachine.TestCase


_ODD = ["", "../x", "a/../b", "/etc/passwd", "a//b", "a/.", ".mlpipe-x", "a\\b", "a\nb"]


def test_a_folder_that_cannot_be_looked_at_is_opened_and_says_so_when_it_is_used(tmp_path):
    url = str(tmp_path / ("a" * 300))
    assert full_url(url) == open_store(url).url
    with pytest.raises(StoreError):
        open_store(url).probe()


@given(key=st.text(max_size=30) | st.sampled_from(_ODD))
def test_a_key_never_leads_out_of_the_folder(tmp_path, key):
    store = FolderStore(tmp_path / "store")
    try:
        path = store.local_path(key)
    except StoreError:
        odd = key in _ODD or key.startswith(RESERVED) or key.strip(".") == ""
        assert odd or "/" in key or not key.isprintable() or "\\" in key
    else:
        assert os.path.normpath(path) == str(path)
        assert str(path).startswith(str(tmp_path / "store") + os.sep)


def test_of_many_writers_exactly_one_creates_and_no_update_is_lost(tmp_path):
    race(FolderStore(tmp_path), updates=20)


def test_a_reader_sees_the_old_or_the_new_object_never_a_mixture(tmp_path):
    store = FolderStore(tmp_path)
    store.put("x", b"a" * 100_000)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for letter in b"ab":
                store.put("x", bytes([letter]) * 100_000)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            assert store.get("x") in (b"a" * 100_000, b"b" * 100_000)
    finally:
        stop.set()
        thread.join(300)


def test_a_failed_write_leaves_the_old_object_and_no_file_behind(tmp_path):
    store = FolderStore(tmp_path)
    store.put("f/x", b"old")

    def pieces():
        yield b"new"
        raise RuntimeError("the producer died")

    with pytest.raises(RuntimeError):
        store.put_pieces("f/x", pieces())
    assert store.get("f/x") == b"old"
    assert os.listdir(tmp_path / "f") == ["x"]


def test_stray_temporary_files_are_never_listed_and_are_swept_by_age(tmp_path):
    store = FolderStore(tmp_path)
    store.put("f/x", b"1")
    for number in range(2):
        (tmp_path / "f" / f".mlpipe-tmp-{number}").write_bytes(b"half")
    assert [info.key for info in store.list("")] == ["f/x"]
    assert store.sweep("", older_than_seconds=3600) == 0
    assert store.sweep("", older_than_seconds=0) == 2
    assert os.listdir(tmp_path / "f") == ["x"]


def test_get_into_reads_ranges_and_names_what_is_too_short(tmp_path):
    store = FolderStore(tmp_path)
    store.put("x", bytes(range(100)))
    buffer = bytearray(10)
    store.get_into("x", buffer, start=20)
    assert bytes(buffer) == bytes(range(20, 30))
    assert store.get("x", start=20, length=5) == bytes(range(20, 25))
    assert store.get("x", start=98, length=5) == bytes([98, 99])
    with pytest.raises(StoreError, match="ends at byte 100, 105 were expected"):
        store.get_into("x", buffer, start=95)


def test_logs_append_and_are_read_on_from_an_offset(tmp_path):
    store = FolderStore(tmp_path)
    assert store.read_log("logs/rank-0.log") == (b"", 0)
    first = store.open_log("logs/rank-0.log")
    first.write(b"one\n")
    data, offset = store.read_log("logs/rank-0.log")
    assert data == b"one\n"
    second = store.open_log("logs/rank-0.log")  # a restarted worker goes on
    second.write(b"two\n")
    assert store.read_log("logs/rank-0.log", offset=offset) == (b"two\n", 8)
    store.put("logs/older/rank-0.log", b"")
    assert store.list_logs("logs") == ["logs/rank-0.log"]
    first.close()
    second.close()
    second.close()


def test_probe_accepts_a_folder_and_leaves_nothing(tmp_path):
    FolderStore(tmp_path / "new").probe()
    assert os.listdir(tmp_path / "new") == []


def test_a_folder_that_does_not_keep_conditions_is_refused_and_left_clean(tmp_path):
    lies = {
        "put_if_absent": [lambda key, data: True, lambda key, data: False],
        "put_if_match": [lambda key, data, etag: True, lambda key, data, etag: False],
        "get_with_etag": [lambda key: (b"other", FolderStore.get_with_etag(store, key)[1])],
    }
    for name, answers in lies.items():
        for answer in answers:
            store = FolderStore(tmp_path)
            setattr(store, name, answer)
            with pytest.raises(StoreError, match=r"ignores conditions|does not read back") as caught:
                store.probe()
            assert caught.value.where == str(tmp_path)
            assert os.listdir(tmp_path) == []


def test_what_is_deleted_takes_its_empty_folders_along_and_no_other(tmp_path):
    store = FolderStore(tmp_path)
    for key in ("a/b/c/x", "a/b/y", "z"):
        store.put(key, b"1")
    store.delete(["z/below", "a/b/c/x"])
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["y"]
    store.delete(["a/b/y"])
    assert os.listdir(tmp_path) == ["z"]
    store.delete(["z"])
    assert os.listdir(tmp_path) == []


def test_every_error_says_where(tmp_path, monkeypatch):
    store = FolderStore(tmp_path)
    for read in (store.get, lambda key: store.get_into(key, bytearray(1)), lambda key: store.copy(key, "y")):
        with pytest.raises(StoreError, match="no such object") as caught:
            read("f/x")
        assert (caught.value.where, caught.value.kind) == (str(tmp_path / "f" / "x"), "input")
    log = store.open_log("full")
    os.dup2(os.open("/dev/full", os.O_WRONLY), log._fd)
    with pytest.raises(StoreError, match="no space left") as caught:
        log.write(b"x")
    assert caught.value.where == str(tmp_path / "full")
    log.close()
    (tmp_path / "link").symlink_to(tmp_path / "mine")  # by others who write here
    with pytest.raises(StoreError, match="one where a log is written"):
        store.open_log("link")
    assert not (tmp_path / "mine").exists()

    def gone(path, flags):
        raise FileNotFoundError(path)

    store.put("f/x", b"1")
    etag = store.get_with_etag("f/x")[1]
    monkeypatch.setattr(folder, "_open", gone)
    for write in (
        lambda key: store.put(key, b""),
        lambda key: store.put_if_absent(key, b""),
        lambda key: store.put_if_match(key, b"", etag),
        store.open_log,
    ):
        with pytest.raises(StoreError, match="somebody deleted the folder") as caught:
            write("f/x")
        assert (caught.value.where, caught.value.kind) == (str(tmp_path / "f" / "x"), "infrastructure")


@pytest.mark.parametrize(
    "url", ["", "http://x/y", "file://elsewhere/x", "gs://b", "s3:b/x", "S3:b", "file:x"]
)
def test_urls_that_are_no_store_are_bad_input(url):
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert caught.value.kind == "input"
    assert open_store("./s3:b").url.endswith("/s3:b")


def test_a_home_folder_that_nobody_has_is_bad_input():
    """It was a bug of mlpipe's."""
    with pytest.raises(StoreError, match="'~nobody-here' is nobody's home folder") as caught:
        open_store("~nobody-here/runs")
    assert caught.value.kind == "input"


def test_a_folder_is_opened_by_path_or_by_url(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/runs").url == str(tmp_path / "runs")
    assert open_store(f"file://{tmp_path}").url == open_store(str(tmp_path)).url == str(tmp_path)


def test_a_folder_has_one_name_whatever_it_was_reached_by(tmp_path):
    """Behind a link `..` is the folder above its target; one that is given by a link keeps that name."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a/b")
    for url, found in (("none/../runs", "runs"), ("link/../runs", "a/runs"), ("link/runs", "link/runs")):
        assert open_store(f"{tmp_path}/{url}").url == full_url(f"{tmp_path}/{url}") == f"{tmp_path}/{found}"
