"""A download into the caller's buffer: a broken connection is tried again, a wrong length is an error."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlpipe._core.errors import StoreError
from mlpipe.store.s3 import S3Store

pytestmark = pytest.mark.unit

DATA = bytes(range(256)) * 10_000  # several pieces, the last one not whole


class Handler(BaseHTTPRequestHandler):
    """What the next replies are like stands in the server's `faults`; then they are sound."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        fault = self.server.faults.pop(0) if self.server.faults else ""
        body = DATA + b"more" if fault == "long" else DATA[:-4] if fault == "short" else DATA
        self.send_response(206)
        start = 1 if fault == "elsewhere" else 0
        self.send_header("Content-Range", f"bytes {start}-{start + len(DATA) - 1}/{2 * len(DATA)}")
        if fault == "endless":  # no length: the end of the connection ends it
            self.send_header("Connection", "close")
            body = DATA + b"more"
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if fault == "broken" else body)
        if fault in ("broken", "endless"):
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def store(server):
    environment = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.server_address[1]}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    return S3Store.from_environment("s3://bucket", environment)


@pytest.mark.parametrize("faults", [[], ["broken"], ["broken", "broken"]])
def test_a_broken_connection_is_tried_again(server, store, faults):
    server.faults = list(faults)
    target = bytearray(len(DATA))
    for _ in range(2):  # the second over the same connection
        store.get_into("object", target)
        assert target == DATA
        target[:] = bytes(len(DATA))
    assert server.faults == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [("long", "more than was asked"), ("endless", "more than"), ("short", "4 bytes early")],
)
def test_another_length_is_an_error(server, store, fault, message):
    server.faults = [fault]
    with pytest.raises(StoreError, match=message):
        store.get_into("object", bytearray(len(DATA)))
    target = bytearray(len(DATA))
    store.get_into("object", target)  # what was left of that reply is not read as the next
    assert target == DATA


def test_bytes_of_another_place_are_an_error(server, store):
    for read in (
        lambda: store.get_into("object", bytearray(len(DATA))),
        lambda: store.get("object", length=9),
    ):
        server.faults = ["elsewhere"]
        with pytest.raises(StoreError, match="asked for the bytes from 0 on, the server gave 'bytes 1-"):
            read()
