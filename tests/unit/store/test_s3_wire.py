"""What goes over the wire for each call to a bucket, and what is made of its answers, without a server. That
servers of two makes take it so: tests/services/test_s3_store.py."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3
from kit import clock
from minio.credentials.credentials import Credentials
from minio.signer import sign_v4_s3
from urllib3.exceptions import NewConnectionError, ProtocolError, ReadTimeoutError, SSLError

from mlpipe._core.errors import StoreError
from mlpipe.store import s3_http
from mlpipe.store.base import ObjectInfo
from mlpipe.store.checksum import crc32c
from mlpipe.store.s3 import S3Store

pytestmark = pytest.mark.unit

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
ENVIRONMENT = {**KEYS, "AWS_ENDPOINT_URL_S3": "http://s3.example:9000/gate/", "AWS_REGION": "eu-x-1"}
BUCKET = "http://s3.example:9000/gate/bucket"
AT = f"{BUCKET}/pre/fix"
OK = (200, b"")
REFUSED = NewConnectionError(None, "refused")  # type: ignore[arg-type]
LOST = ProtocolError("the connection was reset")


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>because</Message></Error>".encode()


@dataclass
class Sent:
    method: str
    url: str
    headers: dict[str, str]
    body: bytes
    options: dict[str, Any]


class Slow(io.BytesIO):
    """Of each read a minute."""

    clock: Any = None

    def read(self, size: int | None = -1) -> bytes:
        raise AssertionError("it waits for all that is asked for, a byte of which may come each 19 s")

    readinto = read  # type: ignore[assignment]

    def read1(self, size: int | None = -1) -> bytes:
        self.clock.now += 60
        return super().read1(size)

    def readinto1(self, buffer: Any) -> int:
        piece = self.read1(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class Wire:
    """Stands where the pool of connections does: notes what is sent, and answers as it is told, in turn: with
    (status, body, headers), or with an error. `slow_seconds`: of each piece that is sent."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.sent: list[Sent] = []
        self.pools: list[dict[str, Any]] = []
        self.ends: list[str] = []  # of connections: kept, or closed
        self.pieces: list[int] = []
        self.slow_seconds = 0.0
        self.clock = clock.Clock()

    def urlopen(self, method: str, url: str, *, body: Any, headers: dict[str, str], **options: Any) -> Any:
        whole = b""
        self.sent.append(Sent(method, url, headers, whole, options))
        for piece in body or ():
            whole += piece
            self.pieces.append(len(piece))
            self.clock.now += self.slow_seconds
        self.sent[-1].body = whole
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status, data, more = (*answer, {})[:3]
        source = data if isinstance(data, io.BytesIO) else io.BytesIO(data)
        ends: list[str] = self.ends

        class Response(urllib3.HTTPResponse):
            ended = False

            def release_conn(self, how: str = "kept") -> None:
                if not self.ended:
                    ends.append(how)
                self.ended = True

            def close(self) -> None:  # as whatever collects it does, too
                self.release_conn("closed")

        return Response(source, more, status, preload_content=False, decode_content=False)


@pytest.fixture
def wire(monkeypatch):
    wire = Wire()

    def pool(**options: Any) -> Wire:
        wire.pools.append(options)
        return wire

    monkeypatch.setattr(s3_http.urllib3, "PoolManager", pool)
    wire.clock = clock.of_retries(monkeypatch)
    monkeypatch.setattr(s3_http, "time", wire.clock)
    return wire


@pytest.fixture
def store(wire):
    return S3Store.from_environment("s3://bucket/pre/fix/", ENVIRONMENT)


def test_a_request_is_signed_and_says_what_its_bytes_sum_up_to(store, wire, monkeypatch):
    date = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    class Now:
        @staticmethod
        def now(zone: Any) -> datetime:
            assert zone is UTC
            return date

    monkeypatch.setattr(s3_http, "datetime", Now)
    wire.answers = [OK]
    data = memoryview(b"abcdefgh").cast("I")
    assert store.put_pieces("a/b c/ü+&.bin", [data, b"i"]) == 9
    (sent,) = wire.sent
    assert (sent.method, sent.body) == ("PUT", b"abcdefghi")
    assert sent.url == f"{AT}/a/b%20c/%C3%BC%2B%26.bin"
    headers = {
        "Host": "s3.example:9000",
        "x-amz-date": "20260102T030405Z",
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "x-amz-checksum-crc32c": base64.b64encode(crc32c(b"abcdefghi").to_bytes(4, "big")).decode(),
        "Content-Length": "9",
    }
    credentials = Credentials("key", "secret")
    assert sent.headers == sign_v4_s3(
        method=sent.method, url=urlsplit(sent.url), region="eu-x-1", headers=headers, credentials=credentials,
        content_sha256="UNSIGNED-PAYLOAD", date=date,
    )  # fmt: skip
    timeout = sent.options.pop("timeout")
    assert (timeout.connect_timeout, timeout.read_timeout) == (5, 20)
    assert sent.options == {"preload_content": False, "redirect": False, "decode_content": False}
    wire.answers = [OK] * 2
    assert store.put_pieces("x", [b"data"], crc32c=1) == 4  # the server is to compare it with what it got
    assert wire.sent[-1].headers["x-amz-checksum-crc32c"] == "AAAAAQ=="
    store.put("empty", b"")
    assert (wire.sent[-1].headers["Content-Length"], wire.sent[-1].body) == ("0", b"")


def test_the_environment_says_where_the_bucket_is(wire):
    def endpoint(**environment: str) -> tuple[Any, ...]:
        found = S3Store.from_environment("s3://bucket/", {**KEYS, **environment})._client.endpoint
        return found.url, found.region, found.bucket, found.ca_file

    aws = "https://s3.{}.amazonaws.com"
    assert endpoint() == (aws.format("us-east-1"), "us-east-1", "bucket", None)
    assert endpoint(AWS_DEFAULT_REGION="a") == (aws.format("a"), "a", "bucket", None)
    assert endpoint(AWS_DEFAULT_REGION="a", AWS_REGION="b")[1] == "b"
    assert endpoint(AWS_ENDPOINT_URL="https://all")[0] == "https://all"
    assert endpoint(AWS_ENDPOINT_URL="https://all", AWS_ENDPOINT_URL_S3="http://s3:1")[0] == "http://s3:1"
    assert endpoint(AWS_CA_BUNDLE="/ca.crt")[3] == wire.pools[-1]["ca_certs"] == "/ca.crt"
    assert (wire.pools[-1]["retries"], wire.pools[-1]["maxsize"]) == (False, 8)
    timeout = wire.pools[-1]["timeout"]
    assert (timeout.connect_timeout, timeout.read_timeout) == (5, 20)
    for change, words in (
        ({"AWS_ENDPOINT_URL_S3": "ftp://host"}, "AWS_ENDPOINT_URL_S3 is 'ftp://host'"),
        ({"AWS_ENDPOINT_URL_S3": "http://"}, "AWS_ENDPOINT_URL_S3 is 'http://'"),
        ({"MLPIPE_STORE_DEADLINE_SECONDS": "soon"}, "MLPIPE_STORE_DEADLINE_SECONDS is 'soon'"),
        ({"MLPIPE_STORE_DEADLINE_SECONDS": "nan"}, "is 'nan'"),
    ):
        with pytest.raises(StoreError, match=words) as caught:
            endpoint(**change)
        assert caught.value.kind == "input"
    assert S3Store.from_environment("s3://bucket/a/b/", KEYS).url == "s3://bucket/a/b"
    assert S3Store.from_environment("s3://bucket", KEYS).url == "s3://bucket"


CUT = (200, b"<", {"Content-Length": "9"})  # the end of its answer is lost
ABSENT, MATCH = {"If-None-Match": "*"}, {"If-Match": '"etag"'}


@pytest.mark.parametrize(
    ("call", "condition"),
    [
        (lambda store: store.put_if_absent("x", b"mine"), ABSENT),
        (lambda store: store.put_if_match("x", b"mine", '"etag"'), MATCH),
    ],
)
@pytest.mark.parametrize(
    ("answers", "written"),
    [
        ([OK], True),
        ([(204, b"")], True),
        ([(412, b"")], False),
        ([REFUSED, (412, b"")], False),  # nothing of it has arrived: it is another's
        ([(429, b""), (412, b"")], False),
        ([LOST, OK], True),
        ([LOST, (412, b""), OK, (200, b"mine")], True),
        ([(500, b""), (412, b""), OK, (200, b"mine")], True),
        ([ReadTimeoutError(None, "", "late"), (412, b""), OK, (200, b"others'")], False),  # type: ignore[arg-type]
        ([LOST, (412, b""), (404, b"")], False),
        ([CUT, (412, b""), OK, (200, b"mine")], True),
    ],
)
def test_a_conditional_write_whose_answer_was_lost_is_known_by_its_bytes(
    store, wire, call, condition, answers, written
):
    wire.answers = list(answers)
    assert call(store) is written
    assert wire.answers == []
    assert "".join(sent.method[0] for sent in wire.sent) in ("P", "PP", "PPH", "PPHG")
    for sent in wire.sent:
        assert sent.url == f"{AT}/x"
        if sent.method == "PUT":
            assert condition.items() <= sent.headers.items()
            assert sent.headers["x-amz-checksum-crc32c"]
            assert sent.body == b"mine"


def test_what_is_absent_matches_no_etag_unless_its_bucket_is_absent(store, wire):
    wire.answers = [(404, error("NoSuchKey")), (404, error("NoSuchBucket"))]
    assert store.put_if_match("x", b"1", "etag") is False
    with pytest.raises(StoreError, match="no such bucket") as caught:
        store.put_if_match("x", b"1", "etag")
    assert caught.value.where == "s3://bucket/pre/fix"


def test_a_copy_is_made_by_the_server_which_may_fail_after_its_status(store, wire):
    wire.answers = [(200, b"<CopyObjectResult/>"), (200, error("InternalError"))]
    store.copy("from/ü x", "to")
    (sent,) = wire.sent
    assert (sent.method, sent.url, sent.body) == ("PUT", f"{AT}/to", b"")
    assert sent.headers["x-amz-copy-source"] == "/bucket/pre/fix/from/%C3%BC%20x"
    assert sent.headers["Content-Length"] == "0"
    with pytest.raises(StoreError, match="copying failed: <Error><Code>InternalError") as caught:
        store.copy("from", "to")
    assert caught.value.where == "from"


def test_keys_are_deleted_by_the_thousand_and_none_is_forgotten(store, wire):
    keys = ["a&<b>", *(f"k{number:04d}" for number in range(2000))]
    wire.answers = [(200, b"<DeleteResult/>"), OK, OK]
    store.delete(keys)
    deleted = []
    for sent in wire.sent:
        assert (sent.method, sent.url) == ("POST", f"{BUCKET}?delete=")
        summed = hashlib.md5(sent.body, usedforsecurity=False).digest()
        assert sent.headers["Content-MD5"] == base64.b64encode(summed).decode()
        deleted.append(re.findall("<Object><Key>pre/fix/(.*?)</Key></Object>", sent.body.decode()))
        objects = "".join(f"<Object><Key>pre/fix/{key}</Key></Object>" for key in deleted[-1])
        assert sent.body.decode() == f"<Delete><Quiet>true</Quiet>{objects}</Delete>"
    assert [len(names) for names in deleted] == [1000, 1000, 1]
    assert [name for names in deleted for name in names] == ["a&amp;&lt;b&gt;", *keys[1:]]
    store.delete([])
    assert len(wire.sent) == 3


def test_of_what_a_server_did_not_delete_only_the_absent_is_no_error(store, wire):
    one = "<Error><Key>pre/fix/{0}</Key><Code>{1}</Code><Message>no</Message></Error>"
    found = '<DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{}</DeleteResult>'
    absent, denied = one.format("a", "NoSuchKey"), one.format("b", "AccessDenied")
    wire.answers = [(200, found.format(text).encode()) for text in (absent, absent + denied)]
    store.delete(["a"])
    with pytest.raises(StoreError, match="cannot delete: AccessDenied no") as caught:
        store.delete(["a", "b"])
    assert caught.value.where == "s3://bucket/pre/fix: pre/fix/b"


@pytest.mark.parametrize(
    ("asked", "range_", "answer", "data"),
    [
        ({}, None, (200, b"abcdef"), b"abcdef"),
        ({"start": 2}, "bytes=2-", (206, b"cdef", {"Content-Range": "bytes 2-5/6"}), b"cdef"),
        ({"length": 3}, "bytes=0-2", (206, b"abc"), b"abc"),
        ({"start": 2, "length": 3}, "bytes=2-4", (206, b"cde", {"Content-Range": "bytes 2-4/6"}), b"cde"),
        ({"start": 2, "length": 3}, "bytes=2-4", (200, b"abcdef"), b"cde"),  # what knows no ranges
        ({"start": 2}, "bytes=2-", (200, b"abcdef"), b"cdef"),
        ({"start": 6, "length": 1}, "bytes=6-6", (416, error("InvalidRange")), b""),
        ({"start": 1, "length": 1}, "bytes=1-1", (206, b"b"), b"b"),
    ],
)
def test_a_part_is_asked_for_and_found_where_it_should_be(store, wire, asked, range_, answer, data):
    wire.answers = [answer]
    assert store.get("x", **asked) == data
    (sent,) = wire.sent
    assert (sent.method, sent.url, sent.body) == ("GET", f"{AT}/x", b"")
    assert sent.headers.get("Range") == range_
    assert "Content-Length" not in sent.headers
    assert wire.ends == ["kept"]
    if range_ and answer[0] == 206:
        wire.answers = [(206, data, {"Content-Range": "bytes 11-19/20"})]
        with pytest.raises(
            StoreError, match=f"bytes from {asked.get('start', 0)} on, the server gave"
        ) as caught:
            store.get("x", **asked)
        assert caught.value.where == "s3://bucket/pre/fix/x"


def test_nothing_is_asked_for_no_bytes(store, wire):
    assert store.get("x", length=0) == b""
    store.get_into("x", bytearray())
    assert wire.sent == []


def test_a_part_fills_the_callers_memory_or_is_an_error(store, wire):
    data = bytes(range(250)) * 10_000  # some pieces
    wire.answers = [(206, data, {"Content-Length": str(len(data)), "Content-Range": "bytes 7-9/10"})]
    buffer = bytearray(len(data))
    store.get_into("x", memoryview(buffer).cast("B"), start=7)
    assert buffer == data
    assert wire.sent[0].headers["Range"] == f"bytes=7-{7 + len(data) - 1}"
    assert wire.ends == ["kept"]
    for answer, words in (
        ((200, data), "answered 200"),  # the whole object is not the part
        ((416, b""), "ends before the bytes that were asked for"),
        ((206, data[:-3], {"Content-Length": str(len(data) - 3)}), "ends 3 bytes early"),
        ((206, data + b"x"), "more than was asked for"),
        ((206, data, {"Content-Length": str(len(data) + 1)}), "more than was asked for"),
    ):
        wire.answers = [answer]
        with pytest.raises(StoreError, match=words) as caught:
            store.get_into("x", buffer, start=7)
        assert caught.value.where == "s3://bucket/pre/fix/x"
    wire.ends.clear()
    wire.answers = [(206, data[:9], {"Content-Length": str(len(data))}), (206, data)]
    buffer[:] = bytes(len(data))
    store.get_into("x", buffer)
    assert buffer == data
    assert wire.ends == ["closed", "kept"]


def test_an_object_comes_with_its_etag_and_is_there_or_not(store, wire):
    wire.answers = [(200, b"data", {"ETag": '"e"'}), OK, (404, b"")]
    assert store.get_with_etag("x") == (b"data", '"e"')
    assert store.exists("x")
    assert not store.exists("x")
    assert [(sent.method, sent.url) for sent in wire.sent] == [
        ("GET", f"{AT}/x"), ("HEAD", f"{AT}/x"), ("HEAD", f"{AT}/x")
    ]  # fmt: skip


def page(contents: dict[str, int], *prefixes: str, more: str = "") -> tuple[int, bytes]:
    """Keys with their sizes."""
    text = "".join(
        f"<Contents><Key>pre/fix/{key}</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified>"
        f"<Size>{size}</Size></Contents>"
        for key, size in contents.items()
    )
    text += "".join(f"<CommonPrefixes><Prefix>pre/fix/{one}</Prefix></CommonPrefixes>" for one in prefixes)
    truncated = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{more}</NextContinuationToken>"
    text += truncated if more else "<IsTruncated>false</IsTruncated>"
    return (
        200,
        f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{text}</ListBucketResult>'.encode(),
    )


@pytest.mark.parametrize(
    "answers",
    [
        [(200, b"<html><body>log in</body></html>")],
        [(200, b"")],
        [(200, page({"l/a": 1})[1].replace(b"Size>1<", b"Size>many<"))],
        [(200, page({}, more="x")[1].replace(b"ContinuationToken", b"Marker"))],
        [page({"l/a": 1}, more="same")] * 3,  # without end
    ],
)
def test_what_answers_in_place_of_a_store_is_no_list(store, wire, answers):
    wire.answers = answers
    with pytest.raises(StoreError, match="answered with no list of objects") as caught:
        list(store.list("l"))
    assert (caught.value.kind, caught.value.where) == ("infrastructure", "s3://bucket/pre/fix")
    wire.answers = [(200, b"<html></html>")]
    with pytest.raises(StoreError, match="an object without an ETag"):
        store.get_with_etag("x")


def test_pages_of_a_list_are_joined_and_markers_of_folders_left_out(store, wire):
    wire.answers = [page({"l/b": 2, "l/a": 1}, more="to/ken="), page({"l/sub/": 0, "l/z": 0, "l/full/": 1})]
    modified = datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC).timestamp()
    assert list(store.list("l")) == [
        ObjectInfo(key, size, modified) for key, size in (("l/a", 1), ("l/b", 2), ("l/full/", 1), ("l/z", 0))
    ]
    query = "list-type=2&prefix=pre%2Ffix%2Fl%2F"
    assert [sent.url for sent in wire.sent] == [
        f"{BUCKET}?{query}", f"{BUCKET}?continuation-token=to%2Fken%3D&{query}"
    ]  # fmt: skip
    wire.answers = [page({"l/z": 1}, "l/a/", "l/b/")]
    assert list(store.list("l/", recursive=False)) == [
        ObjectInfo("l/a/", 0, 0.0), ObjectInfo("l/b/", 0, 0.0), ObjectInfo("l/z", 1, modified)
    ]  # fmt: skip
    assert wire.sent[-1].url == f"{BUCKET}?delimiter=%2F&{query}"
    wire.answers = [page({})]
    assert list(store.list("")) == []
    assert wire.sent[-1].url == f"{BUCKET}?list-type=2&prefix=pre%2Ffix%2F"
    assert {sent.method for sent in wire.sent} == {"GET"}
    wire.answers = [(200, b"<html><br>a proxy")]
    with pytest.raises(StoreError, match="the server's answer is not XML"):
        list(store.list(""))


ETAG = {"ETag": '"e"'}
HOLDS = [OK, (412, b""), (200, b"1", ETAG), (412, b""), OK, (200, b"4"), (200, b"<DeleteResult/>")]


def test_a_probe_tries_what_checkpoints_rest_on_and_leaves_nothing(store, wire):
    wire.answers = list(HOLDS)
    store.probe()
    assert wire.answers == []
    assert [sent.method for sent in wire.sent] == ["PUT", "PUT", "GET", "PUT", "PUT", "GET", "POST"]
    (url,) = {sent.url for sent in wire.sent[:-1]}
    assert url.startswith(f"{AT}/probe/")
    assert f"<Key>{url.removeprefix(BUCKET + '/')}</Key>".encode() in wire.sent[-1].body
    bodies = [sent.body for sent in wire.sent if sent.method == "PUT"]
    assert len(set(bodies)) == 4
    assert [sent.headers.get("If-None-Match") for sent in wire.sent[:2]] == ["*", "*"]
    stale, fresh = (sent.headers["If-Match"] for sent in wire.sent[3:5])
    assert fresh == '"e"' != stale


@pytest.mark.parametrize(
    ("at", "answer", "condition"),
    [
        (0, (412, b""), "If-None-Match"),
        (1, OK, "If-None-Match"),
        (2, (200, b"2", ETAG), "If-None-Match"),
        (3, OK, "If-Match"),
        (4, (412, b""), "If-Match"),
        (5, (200, b"3"), "If-Match"),
    ],
)
def test_a_store_that_ignores_a_condition_is_refused(store, wire, at, answer, condition):
    found = [*HOLDS[:at], answer, *HOLDS[at + 1 : -1]]
    cut = 3 if condition == "If-None-Match" else {3: 4, 4: 5, 5: 6}[at]
    wire.answers = [*found[:cut], HOLDS[-1]]
    with pytest.raises(
        StoreError, match=rf"http://s3.example:9000/gate/ ignores .*\({condition}\)"
    ) as caught:
        store.probe()
    assert wire.sent[-1].method == "POST"
    assert caught.value.where == "s3://bucket/pre/fix"
    assert "checkpoints would not be safe" in (caught.value.hint or "")


def test_a_probe_does_not_wait_as_long_as_a_training(wire):
    for seconds, words in (("90", "within 15 s"), ("2", "within 2 s")):
        environment = {**ENVIRONMENT, "MLPIPE_STORE_DEADLINE_SECONDS": seconds}
        wire.answers = [REFUSED] * 1000
        with pytest.raises(StoreError, match=words):
            S3Store.from_environment("s3://bucket", environment).probe()


@pytest.mark.parametrize(
    "answer",
    [
        *((status, b"") for status in (408, 409, 425, 429, 500, 502, 503, 504)),
        *((400, error(code)) for code in ("RequestTimeout", "BadDigest", "XAmzContentChecksumMismatch")),
        REFUSED,
        LOST,
        ReadTimeoutError(None, "", "late"),  # type: ignore[arg-type]
        OSError("gone"),
    ],
)
def test_what_may_pass_is_tried_again(store, wire, answer):
    wire.answers = [answer] * 2 + [(200, b"data")]
    assert store.get("x") == b"data"
    assert len(wire.clock.pauses) == 2


@pytest.mark.parametrize(
    ("answer", "words", "hint"),
    [
        ((400, b"what?"), "http://s3.example:9000/gate/ answered 400  what?", None),
        ((400, error("Odd")), "answered 400 Odd because", None),
        ((301, b""), "answered 301", None),
        ((404, b""), "no such object", None),
        ((404, error("NoSuchKey")), "no such object", None),
        ((404, b"<html><p>nothing</p></html>"), "no such object", None),
        ((404, error("NoSuchBucket")), "there is no such bucket", "create it"),
        (
            (404, b'<Error xmlns="x"><Code>NoSuchBucket</Code></Error>'),
            "there is no such bucket",
            "create it",
        ),
        ((403, b""), r"access denied \(AccessDenied\)", "the credentials need"),
        ((403, error("SignatureDoesNotMatch")), r"are wrong \(SignatureDoesNotMatch\)", "check AWS_SECRET"),
        ((416, error("InvalidRange")), "ends before the bytes", None),
        ((400, error("XMinioAdminBucketQuotaExceeded")), "the bucket's quota is used up", "prune"),
        ((507, error("XMinioStorageFull")), "the server's disks are full", "prune checkpoints"),
        (SSLError("a: b: unknown authority"), "TLS failed: unknown authority", "for a private authority"),
        (SSLError("[SSL: WRONG_VERSION_NUMBER] wrong version"), "TLS failed: wrong version", "does it speak"),
    ],
)
def test_what_will_not_pass_is_said_at_once_in_words(store, wire, answer, words, hint):
    wire.answers = [answer]
    with pytest.raises(StoreError, match=words) as caught:
        store.put("x", b"")
    assert wire.clock.pauses == []
    assert caught.value.where == (
        "http://s3.example:9000/gate/" if isinstance(answer, Exception) else "s3://bucket/pre/fix/x"
    )
    assert caught.value.kind == ("input" if words == "no such object" else "infrastructure")
    assert (caught.value.hint or "").startswith(hint or "")
    assert (caught.value.hint is None) == (hint is None)


def test_a_call_ends_and_a_larger_one_has_longer(store, wire, monkeypatch):
    monkeypatch.setattr(s3_http, "SLOWEST_BYTES_PER_SECOND", 100)
    for call, words in (
        (
            lambda: store.put("x", b"1"),
            r"not serve PUT within 90 s \(\d\d+ tries\), the last: 503 SlowDown",
        ),
        (lambda: store.put("x", bytes(1000)), "within 100 s"),
        (lambda: store.get_into("x", bytearray(1000)), "did not serve GET within 100 s"),
    ):
        wire.answers = [(503, error("SlowDown"))] * 1000
        before = wire.clock.now
        with pytest.raises(StoreError, match=words) as caught:
            call()
        assert 85 < wire.clock.now - before <= 100
        assert caught.value.where == "s3://bucket/pre/fix/x"
        assert "AWS_ENDPOINT_URL_S3 right?" in (caught.value.hint or "")
        assert max(wire.clock.pauses) <= 2
    last = wire.sent[-1].options["timeout"]  # a try does not outlast them all
    assert 0.1 <= last.connect_timeout == last.read_timeout < 5


@pytest.mark.parametrize("call", ["put", "get", "get_into"])
def test_a_connection_that_trickles_meets_the_deadline(store, wire, call):
    """A minute each piece, of which there are three."""
    data = bytes(3 * 2**20)
    Slow.clock = wire.clock
    wire.slow_seconds = 60 if call == "put" else 0
    wire.answers = [(206 if call == "get_into" else 200, Slow(data))] * 9
    does = {
        "put": lambda: store.put("x", data),
        "get": lambda: store.get("x"),
        "get_into": lambda: store.get_into("x", bytearray(len(data))),
    }
    with pytest.raises(StoreError, match="took too long"):
        does[call]()
    assert len(wire.sent) == 1
    assert all(size <= 2**20 for size in wire.pieces)
    assert wire.ends == ([] if call == "put" else ["closed"])


def test_whether_what_is_hidden_is_absent_the_list_of_that_key_alone_says(store, wire):
    wire.answers = [(403, error("AccessDenied")), page({"x2": 1})]
    assert not store.exists("x")
    assert wire.sent[-1].url == f"{BUCKET}?list-type=2&max-keys=1&prefix=pre%2Ffix%2Fx"
    wire.answers = [(403, error("AccessDenied")), page({"x": 1})]
    with pytest.raises(StoreError, match="access denied"):
        store.exists("x")


def test_an_answer_has_a_limit(store, wire, monkeypatch):
    monkeypatch.setattr(s3_http, "_MAX_REPLY_BYTES", 3)
    monkeypatch.setattr(s3_http, "_PIECE_BYTES", 2)
    wire.answers = [(200, b"abc"), (200, b"abcd")]
    assert store.get("x") == b"abc"
    with pytest.raises(StoreError, match="a reply larger than 3 bytes"):
        store.get("x")
    assert wire.ends == ["kept", "closed"]
