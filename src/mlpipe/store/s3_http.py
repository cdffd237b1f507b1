"""Requests to one bucket: signed, bounded in time, tried again only where that helps, errors in words.

minio-py signs (its `put_object` hashes every byte with SHA-256 and turns If-None-Match into metadata). The
payload is not signed: a signed `x-amz-checksum-crc32c` has the server verify what it got, at a tenth of the
cost. Path-style addresses, as every S3 server knows them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from xml.etree import ElementTree

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import Provider
from minio.signer import sign_v4_s3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    SSLError,
)

from mlpipe._core.errors import StoreError
from mlpipe._core.retry import AwayError, Tries
from mlpipe.store.base import Buffer
from mlpipe.store.s3_identity import LentKeys, TokenServiceAwayError
from mlpipe.store.s3_timely import timely_pool, until

CONNECT_SECONDS = 5.0
READ_SECONDS = 20.0
SLOWEST_BYTES_PER_SECOND = 2 * 2**20  # a transfer may take this much longer than the deadline
_TRANSIENT = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
_KEYS_OVER = frozenset(
    ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "InvalidTokenId", "InvalidAccessKeyId")
)
_TRANSIENT_CODES = frozenset(("RequestTimeout", "BadDigest", "XAmzContentChecksumMismatch"))
_MAX_PAUSE_SECONDS = 2.0  # what waits for the store is a training
_PIECE_BYTES = 2**20
_MAX_REPLY_BYTES = 2**30

_WORDS = {
    "InvalidAccessKeyId": ("the access key is unknown", "check AWS_ACCESS_KEY_ID"),
    "XAdminUserNotFound": ("the access key is unknown", "check AWS_ACCESS_KEY_ID"),
    "SignatureDoesNotMatch": ("the credentials are wrong", "check AWS_SECRET_ACCESS_KEY and AWS_REGION"),
    "AuthorizationHeaderMalformed": ("the region or credentials are wrong", "check AWS_REGION"),
    "ExpiredToken": ("the session token has expired", "renew AWS_SESSION_TOKEN"),
    "InvalidTokenId": ("the session token is wrong or has expired", "renew AWS_SESSION_TOKEN"),
    "InvalidToken": ("the session token is wrong", "renew AWS_SESSION_TOKEN"),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set the clock (NTP)"),
    "AccessDenied": ("access denied", "the credentials need list, get, put and delete on this bucket"),
    "NoSuchBucket": ("there is no such bucket", "create it, or check the store's URL"),
    "PermanentRedirect": ("the bucket is in another region", "check AWS_REGION and AWS_ENDPOINT_URL_S3"),
    "QuotaExceeded": ("the bucket's quota is used up", "prune checkpoints or raise the quota"),
    "XMinioAdminBucketQuotaExceeded": (  # MinIO's name for it
        "the bucket's quota is used up",
        "prune checkpoints or raise the quota",
    ),
    "XMinioStorageFull": ("the server's disks are full", "prune checkpoints or add disks"),
    "SlowDown": ("the server asks to slow down", None),
}


@dataclass(frozen=True)
class Endpoint:
    """Where the bucket is and who asks. `url`: scheme://host[:port]."""

    url: str
    region: str
    bucket: str
    credentials: Provider
    ca_file: str | None = None


@dataclass(frozen=True)
class Request:
    """`accept`: the statuses that are answers. With `into`, the reply's body fills it exactly."""

    method: str
    key: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[Buffer] = ()
    into: memoryview | None = None
    accept: Sequence[int] = (200, 204, 206)

    @property
    def sent_bytes(self) -> int:
        """Of the body."""
        return sum(len(memoryview(piece).cast("B")) for piece in self.body)


@dataclass(frozen=True)
class Reply:
    """`ambiguous`: an earlier try of the same call may have been applied though its reply was lost."""

    status: int
    headers: Mapping[str, str]
    data: bytes
    ambiguous: bool


class S3Client:
    """One bucket. Safe to share between threads; not across a fork."""

    def __init__(self, endpoint: Endpoint, *, deadline_seconds: float, num_connections: int = 8) -> None:
        self.endpoint = endpoint
        self.deadline_seconds = deadline_seconds
        self._base = urlsplit(endpoint.url)
        self._pool = timely_pool(
            maxsize=num_connections,
            retries=False,
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
            ca_certs=endpoint.ca_file,
        )

    def call(self, request: Request) -> Reply:
        """One request, repeated while the store is away or busy, until the deadline. A status that it does
        not accept becomes StoreError."""
        method, key, accept = request.method, request.key, request.accept
        size_bytes = request.sent_bytes + (len(request.into) if request.into else 0)
        allowed = self.deadline_seconds + size_bytes / SLOWEST_BYTES_PER_SECOND
        where = f"s3://{self.endpoint.bucket}/{key}"
        tries = Tries(allowed, max_pause_seconds=_MAX_PAUSE_SECONDS)
        while True:
            try:
                keys = self._keys()
                status, reply_headers, data = self._once(request, tries.deadline, keys)
                if status in accept:
                    return Reply(status, reply_headers, data, tries.ambiguous)
                code, detail = _error_code(data)
                lender = self.endpoint.credentials
                if isinstance(lender, LentKeys) and code in _KEYS_OVER and tries.num_failed == 0:
                    lender.refused(keys)
                    raise AwayError(code, applied=False)
                if status == 403 and method in ("GET", "HEAD") and self._is_absent(key, code):
                    status, code = 404, "NoSuchKey"
                    if status in accept:
                        return Reply(status, reply_headers, data, tries.ambiguous)
                if status not in _TRANSIENT and code not in _TRANSIENT_CODES:
                    raise _in_words(status, code, detail, where, self.endpoint.url)
                raise AwayError(f"{status} {code or detail}".strip(), applied=status >= 500)
            except AwayError as error:
                if not tries.again(error):
                    raise StoreError(
                        f"{self.endpoint.url} did not serve {method} {tries}, the last: {error}",
                        where=where,
                        hint="is the server running, and AWS_ENDPOINT_URL_S3 right?",
                    ) from None

    def _once(
        self, request: Request, deadline: float, keys: Credentials
    ) -> tuple[int, Mapping[str, str], bytes]:
        url = self._url(request.key, request.query)
        left = max(deadline - time.monotonic(), 0.1)
        timeout = urllib3.Timeout(connect=min(CONNECT_SECONDS, left), read=min(READ_SECONDS, left))
        try:
            response = self._pool.urlopen(
                request.method,
                url.geturl(),
                body=_sent(request.body, deadline) if request.body else None,
                headers=self._signed(request, url, keys),
                timeout=timeout,
                preload_content=False,
                redirect=False,
                decode_content=False,
            )
        except (NameResolutionError, NewConnectionError, ConnectTimeoutError) as error:
            raise AwayError(_short(error), applied=False) from error
        except SSLError as error:
            hint = "for a private authority set AWS_CA_BUNDLE or SSL_CERT_FILE to its certificate"
            if "WRONG_VERSION_NUMBER" in str(error):
                hint = "does it speak TLS? Else write http:// in AWS_ENDPOINT_URL_S3"
            raise StoreError(f"TLS failed: {_short(error)}", where=self.endpoint.url, hint=hint) from error
        except (HTTPError, OSError) as error:
            raise AwayError(_short(error), applied=True) from error
        sound = False
        until(response, deadline)
        try:
            if request.into is not None and response.status in request.accept:
                _receive_into(response, request.into, deadline, f"s3://{self.endpoint.bucket}/{request.key}")
                data = b""
            else:
                data = _receive(response, deadline)
            sound = True
            return response.status, response.headers, data
        except (HTTPError, HTTPException, OSError) as error:
            raise AwayError(_short(error), applied=True) from error
        finally:
            if sound:
                response.release_conn()
            else:
                response.close()

    def _url(self, key: str, query: Mapping[str, str]) -> SplitResult:
        path = quote(f"{self._base.path.rstrip('/')}/{self.endpoint.bucket}/{key}".rstrip("/"), safe="/-_.~")
        text = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted(query.items()))
        return SplitResult(self._base.scheme, self._base.netloc, path, text, "")

    def _is_absent(self, key: str, code: str) -> bool:
        """AWS answers 403 for an absent key to whoever may list below a prefix only: the list tells."""
        if not key or code not in ("", "AccessDenied"):
            return False
        query = {"list-type": "2", "prefix": key, "max-keys": "1"}
        try:
            listed = ElementTree.fromstring(self.call(Request("GET", query=query)).data)
        except (StoreError, ElementTree.ParseError):
            return False
        return all(element.text != key for element in listed.iterfind(".//{*}Key"))

    def _keys(self) -> Credentials:
        try:
            return self.endpoint.credentials.retrieve()
        except TokenServiceAwayError as error:
            raise AwayError(str(error), applied=False) from None

    def _signed(self, request: Request, url: SplitResult, keys: Credentials) -> dict[str, str]:
        now = datetime.now(UTC)
        signed: dict[str, Any] = {
            "Host": url.netloc,
            "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ"),
            "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
            **request.headers,
        }
        if request.body or request.method in ("PUT", "POST"):
            signed["Content-Length"] = str(request.sent_bytes)
        if keys.session_token:
            signed["x-amz-security-token"] = keys.session_token
        sign_v4_s3(
            method=request.method,
            url=url,
            region=self.endpoint.region,
            headers=signed,
            credentials=keys,
            content_sha256="UNSIGNED-PAYLOAD",
            date=now,
        )
        return signed


def _sent(body: Sequence[Buffer], deadline: float) -> Iterator[memoryview]:
    """Small pieces, so that a trickling connection meets the deadline."""
    for part in body:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            if time.monotonic() > deadline:
                raise TimeoutError("sending took too long")
            yield view[start : start + _PIECE_BYTES]


def _receive(response: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := response.read1(_PIECE_BYTES):  # `read` would wait for all of it, however slowly it came
        pieces.append(piece)
        size += len(piece)
        if time.monotonic() > deadline:
            raise TimeoutError("receiving took too long")
        if size > _MAX_REPLY_BYTES:
            raise StoreError(f"a reply larger than {_MAX_REPLY_BYTES} bytes")
    return b"".join(pieces)


def _receive_into(response: urllib3.BaseHTTPResponse, into: memoryview, deadline: float, where: str) -> None:
    """From the socket into the caller's memory, as it comes: `readinto` would wait for a whole piece, however
    slowly it came. `_fp` is the http.client response under urllib3's, which counts the bytes of
    Content-Length."""
    expected = int(response.headers.get("Content-Length", len(into)))
    if expected > len(into):
        raise StoreError("the server sent more than was asked for", where=where)
    source = response._fp  # type: ignore[attr-defined]
    filled = 0
    while filled < expected:
        count = source.readinto1(into[filled : filled + _PIECE_BYTES])
        if not count:
            raise ProtocolError(f"the connection ended {expected - filled} bytes early")
        filled += count
        if time.monotonic() > deadline:
            raise TimeoutError("receiving took too long")
    if filled != len(into):
        raise StoreError(f"ends {len(into) - filled} bytes early", where=where)
    if source.read(1):  # without a Content-Length
        raise StoreError("the server sent more than was asked for", where=where)


def _error_code(data: bytes) -> tuple[str, str]:
    """(code, message) of S3's error document; ("", start of the text) of anything else."""
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return "", data[:100].decode(errors="replace")
    texts = {child.tag.rpartition("}")[2]: child.text or "" for child in root}
    return texts.get("Code", ""), texts.get("Message", "")


def _in_words(status: int, code: str, detail: str, where: str, endpoint: str) -> StoreError:
    if status == 404 and code in ("", "NoSuchKey"):
        return StoreError("no such object", where=where, kind="input")
    if status == 403 and not code:  # HEAD has no body to say why
        code = "AccessDenied"
    if status == 416:
        return StoreError("ends before the bytes that were asked for", where=where)
    message, hint = _WORDS.get(code, ("", None))
    if not message:
        message = f"{endpoint} answered {status} {code} {detail}".strip()
    elif status == 403:
        message = f"{message} ({code})"
    return StoreError(message, where=where, hint=hint)


def _short(error: Exception) -> str:
    """urllib3 wraps the cause several times; the last part is what a reader needs."""
    text = str(error.args[-1] if error.args else error) or type(error).__name__
    return text.rpartition(": ")[2].rpartition("] ")[2][:200] if isinstance(error, HTTPError) else text[:200]
