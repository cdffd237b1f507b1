"""What a machine remembers of stores and runs, and in which of them it finds a run."""

from __future__ import annotations

import os
import threading
from typing import ClassVar

import pytest

from mlpipe._core.errors import StoreError
from mlpipe._core.files import state_folder
from mlpipe.store import known
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit


def test_stores_are_remembered_the_one_that_was_used_last_first(monkeypatch):
    for number, url in enumerate(("s3://a/x", "s3://a/y", "/runs")):
        known.remember(url)
        (path,) = [one for one in state_folder().glob("stores/*/url") if one.read_text() == url]
        os.utime(path, (0.0, 100.0 + number))
    (state_folder() / "stores/odd").mkdir()
    (state_folder() / "stores/odd/url").write_bytes(b"\xff")
    assert known.stores() == ["/runs", "s3://a/y", "s3://a/x"]
    monkeypatch.setattr(known, "_MAX_STORES", 2)
    assert known.stores() == ["/runs", "s3://a/y"]


def test_a_seal_is_of_one_run_in_one_store():
    known.keep_seal("s3://a/x", "r", "sealed ü")
    assert known.read_seal("s3://a/x", "r") == "sealed ü"
    assert known.read_seal("s3://a/x", "s") is None
    assert known.read_seal("s3://a/y", "r") is None
    assert known.stores() == ["s3://a/x"]
    (path,) = state_folder().glob("stores/*/r.json")
    path.write_bytes(b"\xff")
    assert known.read_seal("s3://a/x", "r") is None


def test_a_machine_that_cannot_remember_works_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    known.remember("s3://a/x")
    known.keep_seal("s3://a/x", "r", "")
    assert known.read_seal("s3://a/x", "r") is None
    monkeypatch.setattr(known, "remember", lambda url: None)
    known.keep_seal("s3://a/x", "r", "")


class Thread(threading.Thread):
    """`waits`: for how long each was waited for, and whether it would keep the process from its end."""

    waits: ClassVar[list[object]] = []

    def join(self, timeout=None):
        self.waits.append((timeout, self.daemon))
        super().join(timeout)


def test_a_run_is_found_by_whatever_claims_it_and_who_did_not_say_is_named(tmp_path, monkeypatch):
    urls = []
    for name in ("run.json", "pipeline.yaml", "jenkins.json", "other.json"):
        store = FolderStore(tmp_path / name)
        store.put(f"runs/r/{name}", b"")
        urls.append(store.url)
        assert known.is_claimed(store, "r") == (name in ("run.json", "pipeline.yaml"))
        assert known.is_known(store, "r") == (name != "other.json")
        assert not known.is_known(store, "s")
    ways, real, go = (StoreError("away"), OSError("gone")), known.open_store, threading.Event()

    def open_store(url):
        if url == "late":
            go.wait(300)
        if url.isdecimal():
            raise ways[int(url)]
        return real(url)

    monkeypatch.setattr(known, "open_store", open_store)
    monkeypatch.setattr(known.threading, "Thread", Thread)
    monkeypatch.setattr(Thread, "waits", [])
    found, silent = known.find("r", [*urls, "0", "1"], timeout_seconds=300)
    assert [store.url for store in found] == urls[:3]
    assert silent == ["0", "1"]
    assert all(0 < seconds <= 300 and daemon for seconds, daemon in Thread.waits)
    Thread.waits.clear()
    assert known.find("r", ["late"], timeout_seconds=0) == ([], ["late"])
    assert Thread.waits == [(0, True)]
    go.set()
