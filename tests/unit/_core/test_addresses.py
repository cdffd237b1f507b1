"""The address by which others reach a machine whose own name leads to its loopback."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from kit.rendered import pipeline_of, plan_of

from mlpipe._core import addresses
from mlpipe._core.addresses import outward_interface, own_address
from mlpipe.submit.slurm import node

pytestmark = pytest.mark.unit
ROUTES = "Iface\tDestination\tGateway\nlo0\t0000FEA9\t00000000\nib0\t00000000\t0100000A\neth1\t00000000\t0\n"


class Probe:
    """A socket that has asked for a route."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        if address[1] == 0:
            raise OSError

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.7", 4242


@pytest.mark.parametrize(
    ("named", "address", "interface"),
    [("127.0.1.1", "10.0.0.7", "ib0"), ("10.1.2.3", "10.1.2.3", None)],
)
def test_a_name_that_leads_to_the_loopback_is_not_told_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str, address: str, interface: str | None
) -> None:
    """127.0.1.1 is what Debian's installer writes into /etc/hosts."""
    (tmp_path / "route").write_text(ROUTES)
    monkeypatch.setattr(addresses, "_ROUTES", tmp_path / "route")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (named, 0))])
    monkeypatch.setattr(socket, "gethostbyname", lambda _: named)
    monkeypatch.setattr(socket, "socket", Probe)
    assert own_address() == address
    assert outward_interface() == interface
    plan, env = plan_of(pipeline_of("llm"), "train"), {"SLURM_NODEID": "1", "SLURMD_NODENAME": "n1"}
    assert node.variables(plan, env).get("GLOO_SOCKET_IFNAME") == interface
    assert node.variables(plan, {**env, "GLOO_SOCKET_IFNAME": "x"})["GLOO_SOCKET_IFNAME"] == "x"
