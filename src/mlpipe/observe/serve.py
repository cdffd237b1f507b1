"""`/metrics` over HTTP from a daemon thread: read-only, and a slow or dead scraper holds nobody up."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

_SCRAPER_SECONDS = 10.0  # a scraper that is silent for so long is hung up on
_AT_ONCE = 16  # connections; the oldest makes room, so that nobody takes all files of a training


class Serving:
    """A running server of what `collector.collect()` yields. Raises OSError when the port cannot be had,
    ImportError without prometheus_client. Port 0: any free one; the real one is `.port`. Address 0.0.0.0: all
    of this machine, those of IPv6 as well."""

    def __init__(self, collector: Any, address: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, MetricsHandler

        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        served = MetricsHandler.factory(registry)
        handler = type("Handler", (served,), {"timeout": _SCRAPER_SECONDS})
        self._server = _Server((address, port), handler)
        self.port = self._server.server_address[1]
        poll_seconds = 0.1  # close() waits so long at most
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(poll_seconds,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the server; the port is free then."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._open: list[socket.socket] = []
        host, port = address
        if host == "0.0.0.0" and socket.has_dualstack_ipv6():  # a pod may have one of IPv6 alone
            host = "::"
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, as ever."""
        self._open.append(request)
        if len(self._open) > _AT_ONCE:
            with contextlib.suppress(OSError, IndexError):
                self._open.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """It is over, also where its client left."""
        with contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not of one that left before its answer: whoever may connect would fill a rank's log."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def server_bind(self) -> None:
        """As HTTPServer does, without a look-up."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer's own looks up the host's full name, which waits for a name server that may be away.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
