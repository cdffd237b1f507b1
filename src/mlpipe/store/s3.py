"""A store in a bucket of any S3 server that honours conditional PUTs (MinIO, versitygw, AWS, ...).

Objects are ordinary PUTs, never multipart: nothing of ours can be left half-uploaded. Big blobs are cut by
`store.blobs`, logs into chunks by `store.s3_log`.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from mlpipe._core import environment
from mlpipe._core.errors import StoreError
from mlpipe._core.ids import BUCKET_RULE, is_bucket
from mlpipe.store import s3_identity
from mlpipe.store.base import Buffer, LogWriter, ObjectInfo, check_key, check_prefix
from mlpipe.store.checksum import crc32c as sum_of
from mlpipe.store.s3_http import Endpoint, Reply, Request, S3Client
from mlpipe.store.s3_log import S3LogWriter, chunks_of, logs_in

DEADLINE_SECONDS = 90.0
PROBE_SECONDS = 15.0
PART_BYTES = 64 * 2**20
_DELETE_AT_ONCE = 1000


class S3Store:
    """See `Store`. `url`: s3://bucket/prefix."""

    part_bytes: int | None = PART_BYTES

    def __init__(self, endpoint: Endpoint, prefix: str, *, seconds: float = DEADLINE_SECONDS) -> None:
        """`seconds`: deadline of each call, longer for large bodies."""
        self._prefix = check_prefix(prefix)
        self._client = S3Client(endpoint, deadline_seconds=seconds)
        self.url = f"s3://{endpoint.bucket}/{self._prefix}".rstrip("/")

    @staticmethod
    def from_environment(url: str, environ: Mapping[str, str] = os.environ) -> S3Store:
        """The usual AWS names; MLPIPE_STORE_DEADLINE_SECONDS bounds each call (90)."""
        parts = urlsplit(url)
        if not is_bucket(parts.netloc):
            hint = f"write s3://bucket/prefix; {BUCKET_RULE}"
            raise StoreError(f"{url!r} names no bucket", hint=hint, kind="input")
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        address = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
        address = address or f"https://s3.{region}.amazonaws.com"
        if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).netloc:
            hint = "write http://host:port or https://host:port"
            raise StoreError(f"AWS_ENDPOINT_URL_S3 is {address!r}", hint=hint, kind="input")
        seconds = environ.get(environment.STORE_DEADLINE_SECONDS, str(DEADLINE_SECONDS))
        try:
            deadline_seconds = float(seconds)
        except ValueError:
            deadline_seconds = 0.0
        if not 0 < deadline_seconds < math.inf:
            words, hint = f"{environment.STORE_DEADLINE_SECONDS} is {seconds!r}", "write seconds, such as 90"
            raise StoreError(words, hint=hint, kind="input")
        endpoint = Endpoint(
            url=address,
            region=region,
            bucket=parts.netloc,
            credentials=s3_identity.from_environment(environ, region, address),
            ca_file=environ.get("AWS_CA_BUNDLE"),
        )
        return S3Store(endpoint, parts.path.strip("/"), seconds=deadline_seconds)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    # writing

    def put(self, key: str, data: Buffer) -> None:
        self.put_pieces(key, [data])

    def put_pieces(self, key: str, pieces: Iterable[Buffer], *, crc32c: int | None = None) -> int:
        body = list(pieces)
        self._client.call(Request("PUT", self._name(key), headers=_summed(body, crc32c), body=body))
        return sum(len(memoryview(piece).cast("B")) for piece in body)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        headers = {"If-None-Match": "*", **_summed([data])}
        reply = self._client.call(
            Request("PUT", self._name(key), headers=headers, body=[data], accept=(200, 204, 412))
        )
        if reply.status != 412:
            return True
        return reply.ambiguous and self._holds(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        headers = {"If-Match": etag, **_summed([data])}
        reply = self._client.call(
            Request("PUT", self._name(key), headers=headers, body=[data], accept=(200, 204, 404, 412))
        )
        if reply.status in (200, 204):
            return True
        if reply.status == 404 and b"NoSuchBucket" in reply.data:
            raise StoreError("there is no such bucket", where=self.url)
        return reply.ambiguous and self._holds(key, data)

    def _holds(self, key: str, data: bytes) -> bool:
        """Whether our own write, whose reply was lost, is what stands there."""
        return self.exists(key) and self.get(key) == data

    def copy(self, source: str, target: str) -> None:
        where = quote(f"/{self._client.endpoint.bucket}/{self._name(source)}", safe="/-_.~")
        reply = self._client.call(Request("PUT", self._name(target), headers={"x-amz-copy-source": where}))
        if b"<Error>" in reply.data:  # S3 may find out after it has answered 200
            raise StoreError(f"copying failed: {reply.data[:200].decode(errors='replace')}", where=source)

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _DELETE_AT_ONCE):
            names = [self._name(key) for key in keys[start : start + _DELETE_AT_ONCE]]
            objects = "".join(f"<Object><Key>{escape(name)}</Key></Object>" for name in names)
            body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
            digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
            reply = self._client.call(
                Request("POST", query={"delete": ""}, headers={"Content-MD5": digest}, body=[body])
            )
            for error in _elements(reply.data, "Error"):
                if error.get("Code") != "NoSuchKey":
                    message = f"cannot delete: {error.get('Code')} {error.get('Message')}"
                    raise StoreError(message, where=f"{self.url}: {error.get('Key')}")

    # reading

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        if start == 0 and length is None:
            return self._client.call(Request("GET", self._name(key))).data
        end = "" if length is None else str(start + length - 1)
        headers = {"Range": f"bytes={start}-{end}"}
        reply = self._client.call(Request("GET", self._name(key), headers=headers, accept=(200, 206, 416)))
        if reply.status == 416:
            return b""  # starts at or after the end
        data = reply.data
        self._check_start(key, reply, start)
        return data if reply.status == 206 else data[start : None if length is None else start + length]

    def get_into(self, key: str, buffer: Buffer, *, start: int = 0) -> None:
        view = memoryview(buffer).cast("B")
        if len(view):
            headers = {"Range": f"bytes={start}-{start + len(view) - 1}"}
            reply = self._client.call(
                Request("GET", self._name(key), headers=headers, into=view, accept=(206,))
            )
            self._check_start(key, reply, start)

    def _check_start(self, key: str, reply: Reply, start: int) -> None:
        """Raises StoreError for a part that lies elsewhere."""
        given = reply.headers.get("Content-Range", "")
        if reply.status == 206 and given and not given.startswith(f"bytes {start}-"):
            words = f"asked for the bytes from {start} on, the server gave {given!r}"
            raise StoreError(words, where=f"{self.url}/{key}", hint="look at what stands between")

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        reply = self._client.call(Request("GET", self._name(key)))
        etag = reply.headers.get("ETag")
        if etag is None:
            raise self._stranger("an object without an ETag")
        return reply.data, etag

    def exists(self, key: str) -> bool:
        return self._client.call(Request("HEAD", self._name(key), accept=(200, 404))).status == 200

    def list(self, prefix: str, *, recursive: bool = True) -> Iterator[ObjectInfo]:
        query = {"list-type": "2", "prefix": self._prefix + check_prefix(prefix)}
        if not recursive:
            query["delimiter"] = "/"
        while True:
            data = self._client.call(Request("GET", query=query)).data
            try:
                page = next(_elements(data, "ListBucketResult"))
                listed = [self._info(item) for item in _elements(data, "Contents")]
                listed += [
                    ObjectInfo(item["Prefix"][len(self._prefix) :], 0, 0.0)
                    for item in _elements(data, "CommonPrefixes")
                ]
                more = page["NextContinuationToken"] if page.get("IsTruncated") == "true" else None
                if more is not None and more == query.get("continuation-token"):
                    raise ValueError("the same page again")
            except (StopIteration, KeyError, ValueError):
                raise self._stranger("no list of objects") from None
            # some servers leave markers of empty folders behind
            yield from sorted(
                (info for info in listed if info.size_bytes or not info.key.endswith("/") or not recursive),
                key=lambda info: info.key,
            )
            if more is None:
                return
            query["continuation-token"] = more

    def _stranger(self, what: str) -> StoreError:
        hint = "is AWS_ENDPOINT_URL_S3 the address of an S3 server, and nothing between that answers instead?"
        return StoreError(f"{self._client.endpoint.url} answered with {what}", where=self.url, hint=hint)

    def _info(self, item: Mapping[str, str]) -> ObjectInfo:
        modified = datetime.fromisoformat(item["LastModified"]).timestamp()
        return ObjectInfo(item["Key"][len(self._prefix) :], int(item["Size"]), modified)

    def local_path(self, key: str) -> Path | None:
        return None

    # logs

    def open_log(self, key: str) -> LogWriter:
        return S3LogWriter(self, check_key(key))

    def read_log(self, key: str, *, offset: int = 0) -> tuple[bytes, int]:
        pieces = []
        start = 0
        for chunk in chunks_of(self, check_key(key)):
            end = start + chunk.size_bytes
            if end > offset:
                pieces.append(
                    self.get(chunk.key, start=max(offset - start, 0), length=end - max(offset, start))
                )
            start = end
        data = b"".join(pieces)
        return data, offset + len(data)

    def list_logs(self, prefix: str) -> Sequence[str]:
        return logs_in(self, prefix)

    # keeping house

    def probe(self) -> None:
        seconds = min(PROBE_SECONDS, self._client.deadline_seconds)
        S3Store(self._client.endpoint, self._prefix, seconds=seconds)._probe()

    def _probe(self) -> None:
        key = f"probe/{secrets.token_hex(8)}"
        try:
            written = self.put_if_absent(key, b"1")
            again = self.put_if_absent(key, b"2")
            data, etag = self.get_with_etag(key)
            if not written or again or data != b"1":
                raise self._ignores("If-None-Match")
            stale = self.put_if_match(key, b"3", '"0123456789abcdef0123456789abcdef"')
            if stale or not self.put_if_match(key, b"4", etag) or self.get(key) != b"4":
                raise self._ignores("If-Match")
        finally:
            self.delete([key])

    def _ignores(self, condition: str) -> StoreError:
        return StoreError(
            f"{self._client.endpoint.url} ignores conditional writes ({condition})",
            where=self.url,
            hint="checkpoints would not be safe there: use MinIO from 2025-09 on, versitygw, or AWS S3",
        )


def _summed(body: Sequence[Buffer], crc32c: int | None = None) -> dict[str, str]:
    """The header by which the server verifies the bytes that reach it."""
    if crc32c is None:
        crc32c = 0
        for piece in body:
            crc32c = sum_of(piece, crc32c)
    return {"x-amz-checksum-crc32c": base64.b64encode(crc32c.to_bytes(4, "big")).decode()}


def _elements(data: bytes, name: str) -> Iterator[dict[str, str]]:
    """Each XML element of that name as {child: text}, namespaces dropped."""
    try:
        root = ElementTree.fromstring(data) if data else None
    except ElementTree.ParseError as error:
        raise StoreError(f"the server's answer is not XML: {error}") from error
    for element in root.iter() if root is not None else ():
        if element.tag.rpartition("}")[2] == name:
            yield {child.tag.rpartition("}")[2]: child.text or "" for child in element}
