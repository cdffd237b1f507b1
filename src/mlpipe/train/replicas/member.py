"""A rank's connection to the coordinator. Standard library only."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from mlpipe._core.errors import StoreError, TrainError
from mlpipe.train.replicas.coordinator import BEAT_SECONDS, LOST_SECONDS
from mlpipe.train.replicas.membership import Message, done

# A coordinator that is not there for so long is gone, and no other takes over.
_RECONNECT_SECONDS = 900.0


class Member:
    """`replica`: its number; `life`: differs when its ranks were started anew. `beat` is called each second
    of a wait. `find`: token@host:port of the coordinator that there is now, "" while there is none."""

    def __init__(
        self, replica: int, rank: int, life: str, beat: Callable[[], None], find: Callable[[], str]
    ) -> None:
        self.replica, self.rank, self.life = replica, rank, life
        self.beat, self.find = beat, find
        # last quorum, how many are in it; last commit (quorum, step), who left after it
        self.heard: list[Any] = [0, 0, None, []]
        self._number = 0
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._received = b""
        self._connect()
        threading.Thread(target=self._say_alive, name="alive", daemon=True).start()

    def ask(self, what: str, may_leave: Callable[[], bool] = lambda: False, **fields: object) -> Message:
        """Its reply. Asked again where the connection was lost meanwhile: the coordinator took this process
        for dead while it was stopped, or another one took over; and once `may_leave` becomes true in a wait.
        Raises TrainError (infrastructure) if the coordinator is gone."""
        while True:
            try:
                reply = self._ask({"ask": what, **fields}, may_leave)
            except OSError:
                self._connect()
                continue
            if reply is None:
                continue
            if "failed" in reply:
                raise TrainError(reply["failed"], kind="infrastructure")
            if "members" in reply:
                self.heard[:2] = reply["quorum"], len(reply["members"])
            elif reply.get("commit"):
                self.heard[2:] = [fields["quorum"], done(fields)], reply["leaving"]
            return reply

    def _ask(self, message: Message, may_leave: Callable[[], bool]) -> Message | None:
        """None: to be asked again, with `leaves`."""
        self._number += 1
        leaving = may_leave()
        message = {**message, "n": self._number, **({"leaves": True} if leaving else {})}
        with self._lock:
            assert self._socket is not None
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        silent = 0.0
        while True:
            try:
                reply = self._heard()
            except TimeoutError:
                silent += BEAT_SECONDS
                if silent > LOST_SECONDS:
                    raise ConnectionError from None
                reply = {}
            else:
                silent = 0.0
            if reply.get("n") == self._number:
                return reply
            self.beat()
            if not leaving and may_leave():
                return None

    def _heard(self) -> Message:
        """Raises OSError, TimeoutError after a second; ConnectionError too for what no coordinator says."""
        with contextlib.suppress(ValueError):
            said = json.loads(self._line())
            if isinstance(said, dict):
                return said
        raise ConnectionError("a stranger has the port of a coordinator that is gone")

    def _line(self) -> bytes:
        assert self._socket is not None
        while b"\n" not in self._received:
            data = self._socket.recv(2**16)
            if not data:
                raise ConnectionError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _connect(self) -> None:
        deadline = time.monotonic() + _RECONNECT_SECONDS
        with self._lock:
            while True:
                if self._socket is not None:
                    self._socket.close()
                where = ""
                with contextlib.suppress(OSError, StoreError, ValueError):
                    where = self.find()
                    token, _, address = where.partition("@")
                    host, _, port = address.rpartition(":")
                    made = socket.create_connection((host, int(port or 0)), timeout=5.0)
                    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    hello = {"hello": [self.replica, self.rank], "life": self.life, "heard": self.heard}
                    made.sendall(token.encode() + json.dumps(hello).encode() + b"\n")
                    self._socket, self._received = made, b""
                    self._heard()  # before that it may be anybody
                    made.settimeout(BEAT_SECONDS)
                    return
                if time.monotonic() > deadline:
                    raise TrainError(
                        f"no coordinator at {where.rpartition('@')[2] or 'any address'} within "
                        f"{_RECONNECT_SECONDS:.0f} s",
                        hint="the log of the supervisor, or of the coordinator's pod, says why",
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
