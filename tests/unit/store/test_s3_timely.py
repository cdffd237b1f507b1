"""A server whose answers trickle, a byte at a time, and a client that goes away in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mlpipe._core.errors import StoreError
from mlpipe.store import s3_http, s3_identity
from mlpipe.store.s3 import S3Store
from mlpipe.store.s3_identity import LentKeys, TokenServiceAwayError

pytestmark = pytest.mark.unit
HEAD = b"HTTP/1.1 200 OK\r\n"
WHOLE = HEAD + b"Content-Length: 4\r\n\r\ndata"
# what comes first, what trickles then, and how an answer would end after it
ANSWERS = {
    "a status line": (b"HTTP/1.1 200 ", b"O", b"\r\nContent-Length: 0\r\n\r\n"),
    "a header": (HEAD + b"X-A: ", b"a", b"\r\nContent-Length: 0\r\n\r\n"),
    "the size of a chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0", b"\r\n\r\n"),
}
_NUM_BYTES = 3000  # 30 s at least: whoever listens to all of them has no deadline


class Trickle:
    """Serves each connection: all of `first` at once, then `then` bytewise, then `end`. `pause_seconds`: of
    each byte."""

    def __init__(self, first: bytes, then: bytes, end: bytes, pause_seconds: float = 0.01) -> None:
        self._parts, self._pause_seconds = (first, then, end), pause_seconds
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                theirs = self._socket.accept()[0]
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(theirs,), daemon=True).start()

    def _serve(self, theirs: socket.socket) -> None:
        first, then, end = self._parts
        try:
            with theirs:
                while theirs.recv(65_536):
                    theirs.sendall(first)
                    for byte in then:
                        time.sleep(self._pause_seconds)
                        theirs.sendall(bytes([byte]))
                    theirs.sendall(end)
        except OSError:
            return  # it went away

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def trickle(request: pytest.FixtureRequest) -> Iterator[Trickle]:
    first, byte, end = ANSWERS[request.param]
    server = Trickle(first, byte * _NUM_BYTES, end)
    yield server
    server.close()


def store_at(url: str) -> S3Store:
    env = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "MLPIPE_STORE_DEADLINE_SECONDS": "0.3"}
    return S3Store.from_environment("s3://bucket/", {**env, "AWS_ENDPOINT_URL_S3": url})


@pytest.mark.parametrize("trickle", ANSWERS, indirect=True)
def test_what_trickles_ahead_of_a_body_meets_the_deadline(trickle: Trickle) -> None:
    """http.client waited anew for each byte."""
    with pytest.raises(StoreError, match="did not serve GET"):
        store_at(trickle.url).get("x")


@pytest.mark.parametrize("trickle", ["a header"], indirect=True)
def test_a_token_service_that_trickles_is_away(
    trickle: Trickle, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("t")
    monkeypatch.setattr(s3_identity, "READ_SECONDS", 0.3)
    keys = LentKeys(tmp_path / "token", trickle.url, None, "session", None)
    with pytest.raises(TokenServiceAwayError, match="no token service at"):
        keys.retrieve()


def test_a_connection_waits_as_long_for_the_next_answer() -> None:
    """What is left of one answer's time is none of the next one's."""
    server = Trickle(WHOLE[:10], WHOLE[10:20], WHOLE[20:])
    store = store_at(server.url)
    store._client.deadline_seconds = 1000.0
    assert [store.get("x"), store.get("x")] == [b"data"] * 2
    pool = store._client._pool.connection_from_url(server.url)
    connection = pool.pool.get_nowait()
    assert pool.num_connections == 1
    assert connection.sock.gettimeout() == s3_http.READ_SECONDS
    server.close()


def test_a_body_has_longer_than_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as all of the request: a slow line is none that trickles."""
    monkeypatch.setattr(s3_http, "READ_SECONDS", 0.3)
    server = Trickle(HEAD + b"Content-Length: 50\r\n\r\n", b"d" * 50, b"", pause_seconds=0.02)
    store = store_at(server.url)
    store._client.deadline_seconds = 30.0
    assert store.get("x") == b"d" * 50
    server.close()
