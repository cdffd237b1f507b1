"""A loopback HTTP proxy in front of an S3 server that numbers requests and makes one of them go wrong.

    with FaultProxy(server.host_port) as proxy:
        child = subprocess.Popen(..., env=server.environment(proxy.endpoint))
        proxy.arm(Fault(at=3, how="kill-lose", pid=child.pid))     # numbering starts again at 1
        ...
        proxy.requests                                             # ["PUT /bucket/key", ...] since arm

What a fault does to request `at` (1-based, in the order in which the requests arrive):

    drop         connection closed, nothing forwarded
    cut          half of the body forwarded, then both connections closed
    503          answered 503, nothing forwarded
    lose         forwarded and applied, connection closed instead of the reply
    kill         `pid` gets SIGKILL before anything is forwarded (so: after request at-1)
    kill-cut     `pid` gets SIGKILL when half of the body is forwarded
    kill-lose    forwarded and applied, `pid` gets SIGKILL, no reply
    kill-after   forwarded, applied and answered, then `pid` gets SIGKILL

After a kill nothing is forwarded any more, whatever the dying client still sends. `proxy.away("refuse")` or
`("hang")` takes the store away from the next request on, `proxy.back()` brings it back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

How = Literal["drop", "cut", "503", "lose", "kill", "kill-cut", "kill-lose", "kill-after"]
_SECONDS = 60.0


@dataclass(frozen=True)
class Fault:
    at: int
    how: How
    pid: int | None = None


class FaultProxy:
    """Listens on a free port of 127.0.0.1 from its construction until it is closed."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._requests: list[str] = []
        self._away: Literal["refuse", "hang"] | None = None
        self._killed = False
        self._fired = threading.Event()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._listener.close()

    def arm(self, fault: Fault | None = None) -> None:
        """Start numbering again, with this fault ahead (or none)."""
        with self._lock:
            self._fault, self._requests, self._killed = fault, [], False
            self._fired.clear()

    @property
    def requests(self) -> list[str]:
        with self._lock:
            return list(self._requests)

    def wait_fired(self, seconds: float) -> bool:
        """Whether the armed fault has happened by then."""
        return self._fired.wait(seconds)

    def away(self, how: Literal["refuse", "hang"] = "refuse") -> None:
        with self._lock:
            self._away = how

    def back(self) -> None:
        with self._lock:
            self._away = None

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(_SECONDS)
        with client, contextlib.suppress(OSError, EOFError), client.makefile("rb") as stream:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                line = stream.readline(65536)
                if not line:
                    return
                head += line
            self._handle(client, head, stream.read(_content_length(head)))

    def _handle(self, client: socket.socket, head: bytes, body: bytes) -> None:
        with self._lock:
            away, killed = self._away, self._killed
            if not away and not killed:
                self._requests.append(head.partition(b"\r\n")[0].decode().rpartition(" ")[0])
            fault = self._fault if self._fault and self._fault.at == len(self._requests) else None
            if fault and not killed and not away:
                self._fault = None  # it happens once
                if fault.how.startswith("kill"):
                    self._killed = True
        if away == "hang":
            self._closed.wait(_SECONDS)
            return
        if away or killed:
            _reset(client)
            return
        if fault is None:
            client.sendall(self._forward(head, body))
            return
        try:
            self._go_wrong(fault, client, head, body)
        finally:
            self._fired.set()

    def _go_wrong(self, fault: Fault, client: socket.socket, head: bytes, body: bytes) -> None:
        if fault.how == "503":
            client.sendall(
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            return
        if fault.how in ("cut", "kill-cut"):
            with socket.create_connection(self._target, _SECONDS) as server:
                server.sendall(_closing(head) + body[: len(body) // 2])
                if fault.how == "kill-cut":
                    _kill(fault)
        elif fault.how == "kill":
            _kill(fault)
        elif fault.how in ("lose", "kill-lose", "kill-after"):
            reply = self._forward(head, body)
            if fault.how == "kill-after":
                with contextlib.suppress(OSError):
                    client.sendall(reply)
            if fault.how != "lose":
                _kill(fault)
        _reset(client)

    def _forward(self, head: bytes, body: bytes) -> bytes:
        """The server's whole reply, with the promise to close the connection."""
        with socket.create_connection(self._target, _SECONDS) as server:
            server.sendall(_closing(head) + body)
            pieces = []
            while piece := server.recv(2**18):
                pieces.append(piece)
        return b"".join(pieces)


def _closing(head: bytes) -> bytes:
    lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


def _kill(fault: Fault) -> None:
    if fault.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(fault.pid, signal.SIGKILL)


def _reset(client: socket.socket) -> None:
    """Close without the courtesy of FIN, as a crashed server or a firewall does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
