"""A stage's output comes back file for file, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe._core.errors import StoreError
from mlpipe.store import outputs
from mlpipe.store.folder import FolderStore
from mlpipe.store.manifest import add_checksum, strip_checksum

pytestmark = pytest.mark.unit
STAGE = "runs/r/stages/corpus"


class FarStore(FolderStore):
    """A folder that behaves like S3: small objects, no local path."""

    part_bytes = 2**20

    def local_path(self, key):
        return None


@pytest.fixture(params=[FolderStore, FarStore])
def store(request, tmp_path):
    return request.param(tmp_path / "store")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "made"
    (folder / "sub" / "one").mkdir(parents=True)
    (folder / "MANIFEST.json").write_bytes(b"the user's own")
    (folder / "sub" / "one" / "a b.bin").write_bytes(bytes(range(256)) * 10_000)
    (folder / "empty").write_bytes(b"")
    return folder


@contextlib.contextmanager
def refused(words, where):
    """For what was asked, not for the store."""
    with pytest.raises(StoreError, match=words) as caught:
        yield
    assert (caught.value.kind, caught.value.where) == ("input", where)


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_output_comes_back_file_for_file(store, folder, tmp_path, monkeypatch):
    digest = outputs.commit_output(store, STAGE, folder)
    monkeypatch.setattr(outputs, "_READ_BYTES", 1_000_000)  # a file is read by pieces
    fetched = outputs.fetch_output(store, STAGE, tmp_path / "cache")
    assert contents(fetched) == contents(folder)
    lines = [
        f"{hashlib.sha256(data).hexdigest()} {len(data)} {path}\n" for path, data in contents(folder).items()
    ]
    assert digest == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert outputs.load_output(store, STAGE)["digest"] == digest
    assert outputs.peek_output(store, STAGE, tmp_path / "cache", "empty") == fetched
    assert (tmp_path / "cache").exists() == isinstance(store, FarStore)  # a folder store copies nothing


def test_a_repeated_commit_is_accepted_and_another_content_refused(store, folder):
    digest = outputs.commit_output(store, STAGE, folder)
    assert outputs.commit_output(store, STAGE, folder) == digest
    (folder / "empty").write_bytes(b"no more")
    with refused("other content", f"{store.url}/{STAGE}/outputs"):
        outputs.commit_output(store, STAGE, folder)


def test_what_a_dead_attempt_left_is_not_part_of_the_output(store, folder, tmp_path):
    store.put(f"{STAGE}/outputs/files/stale", b"half")
    with refused("no output yet", f"{store.url}/{STAGE}"):
        outputs.fetch_output(store, STAGE, tmp_path / "cache")
    outputs.commit_output(store, STAGE, folder)
    assert "stale" not in contents(outputs.fetch_output(store, STAGE, tmp_path / "cache"))


def test_an_attempt_that_was_given_up_commits_nothing_and_harms_nothing(store, folder, tmp_path, monkeypatch):
    """It comes back while it writes, or when it is about to commit, or much later."""
    late = tmp_path / "late"
    late.mkdir()
    (late / "empty").write_bytes(b"late")

    def cut_off(*blob):
        monkeypatch.undo()
        assert outputs.give_up(store, STAGE, 1) is None
        outputs.commit_output(store, STAGE, folder, 2)
        return write(*blob)

    write = outputs.write_blob
    monkeypatch.setattr(outputs, "write_blob", cut_off)
    with pytest.raises(StoreError, match="was given up"):
        outputs.commit_output(store, STAGE, late, 1)
    with pytest.raises(StoreError, match="was given up"):
        outputs.commit_output(store, STAGE, late, 1)
    assert contents(outputs.fetch_output(store, STAGE, tmp_path / "cache")) == contents(folder)
    assert outputs.give_up(store, STAGE, 2) == outputs.load_output(store, STAGE)["digest"]


def test_links_and_special_files_are_refused(store, folder):
    (folder / "link").symlink_to("/etc/passwd")
    with refused("symbolic link", f"{folder}/link"):
        outputs.commit_output(store, STAGE, folder)
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")
    with refused("special file", f"{folder}/pipe"):
        outputs.commit_output(store, STAGE, folder)
    with refused("not a folder", f"{folder}/absent"):
        outputs.commit_output(store, STAGE, folder / "absent")


def test_an_empty_output_is_an_empty_folder(store, tmp_path):
    (tmp_path / "none").mkdir()
    outputs.commit_output(store, STAGE, tmp_path / "none")
    fetched = outputs.fetch_output(store, STAGE, tmp_path / "cache")
    assert contents(fetched) == {}
    assert outputs.peek_output(store, STAGE, tmp_path / "cache", "x") == fetched


def test_what_is_discarded_is_gone_first_its_manifest_and_may_be_made_again(store, folder, monkeypatch):
    outputs.give_up(store, STAGE, 3)
    digest = outputs.commit_output(store, STAGE, folder)
    store.put("runs/r/stages/corpus-2/outputs/files/x", b"another stage's")
    deleted, delete = [], store.delete
    monkeypatch.setattr(store, "delete", lambda keys: (deleted.append(list(keys)), delete(keys)))
    outputs.discard(store, STAGE)
    assert deleted[0] == [f"{STAGE}/outputs/MANIFEST.json"]
    assert [info.key for info in store.list("runs")] == [
        "runs/r/stages/corpus-2/outputs/files/x", f"{STAGE}/outputs/fence-3"
    ]  # fmt: skip
    with pytest.raises(StoreError, match="was given up"):
        outputs.commit_output(store, STAGE, folder, 3)
    assert outputs.commit_output(store, STAGE, folder, 4) == digest
    assert outputs.load_output(store, STAGE)["place"] == "files-4"


def test_the_cache_is_where_it_is_said_to_be_else_the_users(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for variables, place in (
        ({}, "/home/me/.cache/mlpipe"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/mlpipe"),
        ({"XDG_CACHE_HOME": "/x", "MLPIPE_CACHE": "c"}, f"{tmp_path}/c"),
    ):
        for name in ("XDG_CACHE_HOME", "MLPIPE_CACHE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert str(outputs.cache_folder()) == place


def test_many_readers_of_a_node_download_once(folder, tmp_path, monkeypatch):
    store = FarStore(tmp_path / "store")
    outputs.commit_output(store, STAGE, folder)
    downloads = []
    real = outputs._download
    monkeypatch.setattr(outputs, "_download", lambda *a: (downloads.append(1), real(*a)))
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(outputs.fetch_output(store, STAGE, tmp_path / "cache"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(results) == 4
    assert len(set(results)) == len(downloads) == 1


def test_a_look_at_some_files_stands_in_no_readers_way(folder, tmp_path):
    """Whoever plans for other machines looks where a stage of this one may read it all."""
    store, cache = FarStore(tmp_path / "store"), tmp_path / "cache"
    outputs.commit_output(store, STAGE, folder)
    looked = []
    threads = [
        threading.Thread(target=lambda: looked.append(outputs.peek_output(store, STAGE, cache, "a b.bin")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    whole = contents(folder)
    assert len(looked) == 2
    assert contents(looked[0]) == {"sub/one/a b.bin": whole["sub/one/a b.bin"]}
    assert outputs.fetch_output(store, STAGE, cache) == looked[0] == looked[1]
    assert contents(looked[0]) == whole
    (looked[0] / "sub" / "one" / "a b.bin").unlink()  # as who tidies caches does
    (looked[0] / "sub" / "one").rmdir()
    assert contents(outputs.fetch_output(store, STAGE, cache)) == whole
    assert outputs.peek_output(store, STAGE, cache, "empty") == looked[0]
    assert {path.name for path in cache.iterdir()} == {looked[0].name, f".{looked[0].name}.lock"}


def test_damage_is_named_and_nothing_incomplete_is_kept(folder, tmp_path):
    store = FarStore(tmp_path / "store")
    outputs.commit_output(store, STAGE, folder)
    key = f"{STAGE}/outputs/files/sub/one/a b.bin/p00000"
    data = bytearray(store.get(key))
    data[5] ^= 1
    store.put(key, data)
    with pytest.raises(StoreError, match="p00000: block"):
        outputs.fetch_output(store, STAGE, tmp_path / "cache")
    assert [name for name in os.listdir(tmp_path / "cache") if not name.endswith(".lock")] == []
    place = FolderStore(tmp_path / "other")
    outputs.commit_output(place, STAGE, folder)
    os.truncate(place.local_path(f"{STAGE}/outputs/files/sub/one/a b.bin"), 10)
    with pytest.raises(StoreError, match="is damaged"):
        outputs.fetch_output(place, STAGE, tmp_path / "cache")


def test_a_copy_that_cannot_be_kept_is_said_with_its_place(folder, tmp_path):
    store = FarStore(tmp_path / "store")
    outputs.commit_output(store, STAGE, folder)
    (tmp_path / "file").touch()
    for read in (outputs.fetch_output, lambda *of: outputs.peek_output(*of, "empty")):
        with pytest.raises(StoreError, match=f"cannot keep a copy of the output of {STAGE}: ") as caught:
            read(store, STAGE, tmp_path / "file" / "cache")
        assert (caught.value.kind, caught.value.where) == ("infrastructure", f"{tmp_path}/file/cache")
        assert "free some space" in caught.value.hint
    assert contents(outputs.fetch_output(store, STAGE, tmp_path / "new" / "cache")) == contents(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "its format is not 1"),
        ({"files": {}}, "its format is not 1"),
        ({"files": [1]}, "a file has no path"),
        ({"files": [{"path": 1}]}, "a file has no path"),
        ({"files": [{"path": "f"}]}, "file 'f'"),
        ({"place": "../files"}, r"its files lie elsewhere, in '\.\./files'"),
        ({"place": "files-2"}, "file 'f' lies elsewhere"),
        ({"digest": "0" * 64}, "its digest does not fit"),
        (None, "its format is not 1"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, change, words):
    store, source, where = FarStore(tmp_path / "store"), tmp_path / "one", f"{STAGE}/outputs/MANIFEST.json"
    source.mkdir()
    (source / "f").write_bytes(b"data")
    outputs.commit_output(store, STAGE, source)
    manifest = strip_checksum(store.get(where), where)
    store.put(where, add_checksum([] if change is None else {**manifest, **change}))
    with pytest.raises(StoreError, match=f"not a sound manifest: .*{words}") as caught:
        outputs.load_output(store, STAGE)
    assert (caught.value.kind, caught.value.where) == ("infrastructure", where)
    del manifest["place"]  # as older ones are
    store.put(where, add_checksum(manifest))
    assert contents(outputs.fetch_output(store, STAGE, tmp_path / "cache")) == {"f": b"data"}
    del manifest["files"][0]["sha256"]
    store.put(where, add_checksum(manifest))
    with pytest.raises(StoreError, match="file 'f' lies elsewhere"):
        outputs.load_output(store, STAGE)


@given(path=st.sampled_from(["../../x", "/etc/cron.d/x", "a/../../x", "", ".", "a\0b"]) | st.text(max_size=8))
def test_a_manifest_cannot_make_a_reader_write_elsewhere(tmp_path, path):
    store = FarStore(tmp_path / "evil")
    where = f"{STAGE}/outputs/MANIFEST.json"
    source = tmp_path / "one"
    source.mkdir(exist_ok=True)
    (source / "f").write_bytes(b"data")
    if not store.exists(where):
        outputs.commit_output(store, STAGE, source)
    manifest = strip_checksum(store.get(where), where)
    manifest["files"][0]["path"] = path
    manifest["digest"] = outputs._digest(manifest["files"])
    store.put(where, add_checksum(manifest))
    if path != "f":
        with pytest.raises(StoreError, match="not a sound manifest"):
            outputs.fetch_output(store, STAGE, tmp_path / "cache")
    manifest["files"][0]["path"] = "f"
    manifest["digest"] = outputs._digest(manifest["files"])
    store.put(where, add_checksum(manifest))
