"""A log in numbered objects, as a bucket keeps it, reads as one, whoever wrote it and whatever failed."""

from __future__ import annotations

import pytest
from kit.command_runs import until

from mlpipe._core.errors import StoreError
from mlpipe.store import s3_log
from mlpipe.store.folder import FolderStore
from mlpipe.store.s3 import S3Store

pytestmark = pytest.mark.unit
LOG = "a/c/logs/rank-0.log"


class Bucket(FolderStore):
    """A folder with the logs of a bucket. `away`: what its writes fail with."""

    open_log, read_log, list_logs = S3Store.open_log, S3Store.read_log, S3Store.list_logs  # type: ignore[assignment]
    away = None

    def put(self, key, data):
        if self.away is not None:
            raise self.away
        super().put(key, data)

    def put_if_absent(self, key, data):
        if self.away is not None:
            raise self.away
        return super().put_if_absent(key, data)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(s3_log, "FLUSH_SECONDS", 300.0)
    return Bucket(tmp_path)


def chunks(store):
    return {info.key.removeprefix(f"{LOG}/"): store.get(info.key) for info in store.list(LOG)}


def test_a_chunk_grows_until_it_is_full_and_the_next_writer_begins_its_own(store, monkeypatch):
    monkeypatch.setattr(s3_log, "_FULL_BYTES", 8)
    first = store.open_log(LOG)
    for line in (b"one\n", b"two\n", b"three\n", b"four\n"):
        first.write(line)
        assert line not in b"".join(chunks(store).values())
        first.flush()
        first.flush()  # nothing more
    assert chunks(store) == {"c000001": b"one\ntwo\n", "c000002": b"three\nfour\n"}
    second = store.open_log(LOG)
    second.write(b"other\n")
    second.close()
    first.write(b"five\n")
    first.close()  # which finds c000003 taken
    assert chunks(store) == {
        "c000001": b"one\ntwo\n", "c000002": b"three\nfour\n", "c000003": b"other\n", "c000004": b"five\n"
    }  # fmt: skip
    whole = b"one\ntwo\nthree\nfour\nother\nfive\n"
    for offset in range(len(whole) + 1):
        assert store.read_log(LOG, offset=offset) == (whole[offset:], len(whole))
    assert store.read_log("a/c/logs/none", offset=3) == (b"", 3)


def test_what_could_not_be_stored_waits_and_is_stored_once(store, monkeypatch):
    monkeypatch.setattr(s3_log, "_MAX_PENDING_BYTES", 10)
    log = store.open_log(LOG)
    log.write(b"one\n")
    store.away = StoreError("away")
    with pytest.raises(StoreError, match="away"):
        log.flush()
    log.write(b"more\nx")
    with pytest.raises(StoreError, match="the log's memory is full") as caught:
        log.write(b"y")
    assert caught.value.where == LOG
    store.away = None
    log.flush()
    log.write(b"\n")
    store.away = StoreError("away again")
    with pytest.raises(StoreError, match="away again"):
        log.close()
    store.away = None
    log.close()  # over: it does nothing more
    assert store.read_log(LOG) == (b"one\nmore\nx", 10)


def test_what_nobody_flushes_is_stored_soon_also_after_a_failure(store, monkeypatch):
    monkeypatch.setattr(s3_log, "FLUSH_SECONDS", 0.01)
    tried = []
    real = Bucket.put_if_absent

    def fails_once(self, key, data):
        tried.append(key)
        if len(tried) == 1:
            raise StoreError("away")
        return real(self, key, data)

    monkeypatch.setattr(Bucket, "put_if_absent", fails_once)
    log = store.open_log(LOG)
    log.write(b"line\n")
    until(lambda: store.read_log(LOG)[0] == b"line\n", "the line")
    assert len(tried) == 2
    log.close()
    log._thread.join(300)
    assert not log._thread.is_alive()
    assert log._thread.daemon


def test_chunks_are_in_the_order_of_their_numbers_and_logs_lie_right_below(store):
    for key in (
        f"{LOG}/c1000000",
        f"{LOG}/c999999",
        "a/c/logs/x/y/c000001",
        "a/c/logs/b/c000001",
        "a/c/logs/c12",
    ):
        store.put(key, key[-2:].encode())
    store.put(f"{LOG}/other", b"not a chunk")
    store.put(f"{LOG}/c000001x", b"neither")
    store.put(f"{LOG}/below/c000001", b"of another log")
    assert store.read_log(LOG)[0] == b"9900"
    assert store.list_logs("a/c/logs") == store.list_logs("a/c/logs/") == ["a/c/logs/b", LOG]
    assert store.list_logs("a/c/logs/x") == ["a/c/logs/x/y"]
    assert store.list_logs("a/c") == []
    log = store.open_log(LOG)
    log.write(b"!")
    log.close()
    assert store.read_log(LOG)[0] == b"9900!"
    for call in (store.open_log, store.read_log):
        with pytest.raises(StoreError, match="is not a key"):
            call("../log")


def test_a_chunk_that_grows_while_it_is_read_is_read_as_far_as_it_was_listed(store, monkeypatch):
    """Else the next reader's offset would begin behind what nobody has read."""
    log = store.open_log(LOG)
    log.write(b"one\n")
    log.flush()
    listed = list(store.list(LOG))
    log.write(b"two\n")
    log.close()
    monkeypatch.setattr(store, "list", lambda *_, **__: iter(listed))
    assert store.read_log(LOG, offset=1) == (b"ne\n", 4)
    monkeypatch.undo()
    assert store.read_log(LOG, offset=4) == (b"two\n", 8)
