"""By which address others reach this machine."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

_OUTSIDE = "192.0.2.1"  # of nobody (RFC 5737): a route leads there, nothing is sent
_ROUTES = Path("/proc/net/route")


def own_address() -> str:
    """That of its host name, as gloo takes it; where that is of this machine alone (Debian's installer writes
    127.0.1.1 into /etc/hosts), that from which it reaches others."""
    named = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    if not ipaddress.ip_address(named.partition("%")[0]).is_loopback:
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_OUTSIDE, 9))
        except OSError:  # it reaches nobody
            return named
        return str(probe.getsockname()[0])


def outward_interface() -> str | None:
    """Name of the network interface that gloo must be told, since by the host name it would listen on the
    loopback, where no other node reaches it. None: it need not be told, or there is none."""
    try:
        named = socket.gethostbyname(socket.gethostname())
        lines = _ROUTES.read_text().splitlines()[1:]
    except OSError:
        return None
    if not ipaddress.ip_address(named).is_loopback:
        return None
    return next((name for name, destination, *_ in map(str.split, lines) if int(destination, 16) == 0), None)
