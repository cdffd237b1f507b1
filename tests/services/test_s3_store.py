"""The S3 store keeps the promises of `Store` on real servers of two makes."""

from __future__ import annotations

import base64
import threading

import pytest
from kit.faultproxy import Fault
from kit.store_race import race

from mlpipe._core.errors import StoreError
from mlpipe.store.blobs import read_blob, write_blob
from mlpipe.store.open import open_store
from mlpipe.store.s3 import S3Store
from mlpipe.store.s3_http import Request

pytestmark = pytest.mark.services


def through(proxy, server, url, seconds=30.0):
    environment = {**server.environment(proxy.endpoint), "MLPIPE_STORE_DEADLINE_SECONDS": str(seconds)}
    return S3Store.from_environment(url, environment)


def test_probe_accepts_the_server_and_leaves_nothing(store):
    store.probe()
    assert list(store.list("")) == []


def test_objects_come_back_whole_and_in_ranges(store):
    data = bytes(range(256)) * 20
    store.put("a/b c/ü+&.bin", memoryview(data))
    assert store.get("a/b c/ü+&.bin") == data
    assert store.get("a/b c/ü+&.bin", start=10, length=20) == data[10:30]
    assert store.get("a/b c/ü+&.bin", start=5100, length=999) == data[5100:]
    assert store.get("a/b c/ü+&.bin", start=9999, length=1) == b""
    buffer = bytearray(100)
    store.get_into("a/b c/ü+&.bin", buffer, start=300)
    assert bytes(buffer) == data[300:400]
    with pytest.raises(StoreError, match="ends"):
        store.get_into("a/b c/ü+&.bin", buffer, start=5100)
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.get("empty", start=0, length=10) == b""
    assert store.exists("empty")
    assert not store.exists("nothing")
    with pytest.raises(StoreError, match="no such object") as caught:
        store.get("nothing")
    assert caught.value.kind == "input"


def test_list_is_sorted_and_pages_are_joined(store, monkeypatch):
    keys = sorted(f"l/{i % 7}/{i:04d}" for i in range(1050))
    threads = [
        threading.Thread(target=lambda part: [store.put(key, b"x") for key in part], args=(keys[i::4],))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    store.put("l.x", b"1")
    assert [info.key for info in store.list("l")] == keys
    assert [info.key for info in store.list("", recursive=False)] == ["l.x", "l/"]
    assert [info.key for info in store.list("l", recursive=False)] == [f"l/{i}/" for i in range(7)]
    assert {info.size_bytes for info in store.list("l")} == {1}
    store.delete([*keys, "l/never-there"])
    assert [info.key for info in store.list("")] == ["l.x"]


def test_conditions_hold(store):
    assert store.put_if_absent("k", b"1")
    assert not store.put_if_absent("k", b"1")
    data, etag = store.get_with_etag("k")
    assert data == b"1"
    assert store.put_if_match("k", b"2", etag)
    assert not store.put_if_match("k", b"3", etag)
    assert not store.put_if_match("absent", b"3", etag)
    assert store.get("k") == b"2"


def test_of_many_writers_exactly_one_creates_and_no_update_is_lost(store):
    race(store, updates=5)


def test_the_server_refuses_bytes_that_changed_on_the_way(store):
    wrong = base64.b64encode(b"\0\0\0\1").decode()
    client = store._client
    headers = {"x-amz-checksum-crc32c": wrong}
    request = Request("PUT", store._name("x"), headers=headers, body=[b"data"], accept=(200, 400))
    reply = client.call(request)
    assert reply.status == 400
    assert not store.exists("x")


def test_copy_stays_in_the_store(store):
    store.put("from/ü x", b"data")
    store.copy("from/ü x", "to/y")
    assert store.get("to/y") == b"data"
    with pytest.raises(StoreError, match="no such object"):
        store.copy("from/absent", "to/z")


def test_blobs_are_cut_uploaded_side_by_side_and_read_in_ranges(store, monkeypatch):
    monkeypatch.setattr(store, "part_bytes", 2**20)
    data = bytes(i * 31 % 251 for i in range(5 * 2**20 + 333))
    chunks = [data[:100], memoryview(data)[100 : 3 * 2**20], bytearray(data[3 * 2**20 :])]
    blob = write_blob(store, "b/model", chunks, block_bytes=2**18)
    assert len(list(store.list("b/model"))) == 6
    buffer = bytearray(len(data))
    read_blob(store, blob, 0, buffer)
    assert bytes(buffer) == data
    part = bytearray(2**20)
    read_blob(store, blob, 2**20 - 77, part)
    assert bytes(part) == data[2**20 - 77 : 2**21 - 77]
    store.put("b/model/p00002", b"\0" * 2**20)
    with pytest.raises(StoreError, match="b/model/p00002: block 8 is corrupt"):
        read_blob(store, blob, 2**21, bytearray(10))
    store.delete(["b/model/p00003"])
    with pytest.raises(StoreError, match="b/model/p00003: is missing"):
        read_blob(store, blob, 3 * 2**20, bytearray(10))


def test_logs_are_chunks_that_read_as_one(store):
    key = "a/logs/rank-0.log"
    first = store.open_log(key)
    first.write(b"one\n")
    first.flush()
    first.write(b"two\n")
    first.close()
    second = store.open_log(key)  # a restarted worker
    second.write(b"three\n")
    second.close()
    assert [info.key for info in store.list(key)] == [f"{key}/c000001", f"{key}/c000002"]
    assert store.read_log(key) == (b"one\ntwo\nthree\n", 14)
    assert store.read_log(key, offset=6) == (b"o\nthree\n", 14)
    assert store.read_log(key, offset=14) == (b"", 14)
    assert store.read_log("a/logs/none") == (b"", 0)
    assert store.list_logs("a/logs") == [key]
    assert store.list_logs("a") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-wrong"}, "credentials are wrong"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "access key is unknown"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}, "did not serve"),
    ],
)
def test_what_is_wrong_with_the_connection_is_said_in_words(server, url, change, message):
    environment = {**server.environment(), "MLPIPE_STORE_DEADLINE_SECONDS": "2", **change}
    with pytest.raises(StoreError, match=message) as caught:
        S3Store.from_environment(url, environment).probe()
    assert caught.value.kind == "infrastructure"
    assert caught.value.hint


def test_a_missing_bucket_and_missing_credentials_are_said_in_words(server, monkeypatch):
    absent = S3Store.from_environment("s3://no-such-bucket-here/x", server.environment())
    for call in (absent.probe, lambda: list(absent.list("")), lambda: absent.put("x", b"1")):
        with pytest.raises(StoreError, match="no such bucket"):
            call()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID not set"):
        open_store("s3://bucket/x")


@pytest.mark.parametrize("how", ["drop", "503", "cut", "lose"])
def test_one_fault_on_the_way_is_survived_by_every_call(proxy, server, url, how):
    store = through(proxy, server, url)

    def under(call):
        proxy.arm(Fault(at=1, how=how))
        result = call()
        assert len(proxy.requests) >= 2
        return result

    under(lambda: store.put("x", b"data" * 1000))
    assert under(lambda: store.get("x")) == b"data" * 1000
    assert under(lambda: store.put_if_absent("y", b"mine"))  # 412 after a lost reply is our own write
    data, etag = under(lambda: store.get_with_etag("y"))
    assert data == b"mine"
    assert under(lambda: store.put_if_match("y", b"changed", etag))
    assert not under(lambda: store.put_if_absent("y", b"other"))
    assert not under(lambda: store.put_if_match("y", b"other", etag))
    under(lambda: store.copy("y", "z"))
    assert [info.key for info in under(lambda: list(store.list("")))] == ["x", "y", "z"]
    under(lambda: store.delete(["x", "y", "z"]))
    assert list(store.list("")) == []


def test_a_server_that_ignores_conditions_is_refused(proxy, server, url, monkeypatch):
    store = through(proxy, server, url)
    forward = proxy._forward

    def deaf(head, body):
        """As older servers are: the header is not part of what they know."""
        return forward(head, body).replace(b"412 Precondition Failed", b"200 OK")

    monkeypatch.setattr(proxy, "_forward", deaf)
    with pytest.raises(StoreError, match="ignores conditional writes"):
        store.probe()


@pytest.mark.parametrize("how", ["refuse", "hang"])
def test_a_store_that_stays_away_is_one_clear_error(proxy, server, url, how):
    store = through(proxy, server, url, seconds=1.5)
    proxy.away(how)
    with pytest.raises(StoreError, match="did not serve PUT within 2 s") as caught:
        store.put("x", b"1")
    assert "AWS_ENDPOINT_URL_S3" in caught.value.hint
