"""Connections whose answers end in time. http.client waits anew for each byte of a status line, of a header
or of the size of a chunk: one that trickles would be read for months."""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPResponse
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection


def timely_pool(**options: Any) -> urllib3.PoolManager:
    """A `urllib3.PoolManager` with these options. An answer, its body too, may take as long as one read
    (`timeout`) in all, unless `until` says otherwise once its headers are there."""
    pool = urllib3.PoolManager(**options)
    pool.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
    return pool


def until(response: urllib3.BaseHTTPResponse, deadline: float) -> None:
    """The body may come until `deadline` (of `time.monotonic`)."""
    answer = response._fp  # type: ignore[attr-defined]
    if isinstance(answer, _Answer):
        answer.reader.deadline = deadline


class _Reader(io.RawIOBase):
    """What `sock` receives until `deadline`; TimeoutError after it."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        super().__init__()
        self._raw, self._sock = raw, sock
        self._timeout = sock.gettimeout() or 0.0
        self.deadline = time.monotonic() + self._timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("receiving took too long")
        if left >= self._timeout:
            return self._raw.readinto(buffer)
        self._sock.settimeout(left)
        try:
            return self._raw.readinto(buffer)
        finally:
            self._sock.settimeout(self._timeout)  # of the next request

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.reader = _Reader(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self.reader)


class _Connection(HTTPConnection):
    response_class = _Answer


class _TlsConnection(HTTPSConnection):
    response_class = _Answer


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection
