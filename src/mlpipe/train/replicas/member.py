"""A rank's connection to the coordinator. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable

from mlpipe._core import environment
from mlpipe._core.errors import TrainError
from mlpipe.train.replicas.coordinator import BEAT_SECONDS
from mlpipe.train.replicas.membership import Message

# A coordinator that is not there for so long is gone.
_RECONNECT_SECONDS = 60.0


class Member:
    """`replica`: its number; `life`: differs when its ranks were started anew. `beat` is called each second
    of a wait."""

    def __init__(self, replica: int, rank: int, life: str, beat: Callable[[], None]) -> None:
        self.replica, self.rank, self.life = replica, rank, life
        self.beat = beat
        self._token, _, where = os.environ[environment.COORDINATOR].partition("@")
        host, _, port = where.rpartition(":")
        self._address = host, int(port)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._received = b""
        self._connect()
        threading.Thread(target=self._say_alive, name="alive", daemon=True).start()

    def ask(self, what: str, **fields: object) -> Message:
        """Its reply. Asked again where the connection was lost meanwhile: the coordinator took this process
        for dead while it was stopped. Raises TrainError (infrastructure) if the coordinator is gone."""
        line = json.dumps({"ask": what, **fields}).encode() + b"\n"
        while True:
            try:
                with self._lock:
                    assert self._socket is not None
                    self._socket.sendall(line)
                reply: Message = json.loads(self._line())
            except OSError:
                self._connect()
                continue
            if "failed" in reply:
                raise TrainError(reply["failed"], kind="infrastructure")
            return reply

    def _line(self) -> bytes:
        assert self._socket is not None
        while b"\n" not in self._received:
            try:
                data = self._socket.recv(2**16)
            except TimeoutError:
                self.beat()
                continue
            if not data:
                raise ConnectionError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _connect(self) -> None:
        deadline = time.monotonic() + _RECONNECT_SECONDS
        with self._lock:
            while True:
                with contextlib.suppress(OSError):
                    made = socket.create_connection(self._address, timeout=5.0)
                    made.settimeout(BEAT_SECONDS)
                    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    hello = {"hello": [self.replica, self.rank], "life": self.life}
                    made.sendall(self._token.encode() + json.dumps(hello).encode() + b"\n")
                    self._socket, self._received = made, b""
                    return
                if time.monotonic() > deadline:
                    raise TrainError(
                        f"the coordinator at {':'.join(map(str, self._address))} is gone",
                        hint="it ran beside the launchers; its log says why it ended",
                        kind="infrastructure",
                    )
                self.beat()
                time.sleep(0.2)

    def _say_alive(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with contextlib.suppress(OSError), self._lock:
                assert self._socket is not None
                self._socket.sendall(b"{}\n")
