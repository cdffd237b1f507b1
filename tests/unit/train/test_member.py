"""A rank finds its coordinator, whoever has the port of one that is gone."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from kit.command_runs import until

from mlpipe.train.replicas.coordinator import Coordinator
from mlpipe.train.replicas.member import Member
from mlpipe.train.replicas.membership import Membership

pytestmark = pytest.mark.unit


@pytest.fixture
def stranger():
    """Its port: answers the first line, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as made:
                        made.recv(2**16)
                        made.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def test_a_stranger_with_the_port_of_a_coordinator_that_is_gone_is_no_coordinator(stranger):
    """Asked where it is after each that was none. Else the rank dies of what the stranger said."""
    coordinator = Coordinator(Membership(1, 1, 1, 1), "127.0.0.1", 300.0)
    places = iter(["", f"{'0' * 32}@127.0.0.1:{stranger}", "none", coordinator.where])
    member = Member(0, 0, "life", lambda: None, lambda: next(places))
    assert member.ask("join", step=7)["members"] == [0]


def test_who_is_cut_off_from_its_coordinator_goes_on_with_it(stranger):
    """By way of a stranger, too."""
    coordinator = Coordinator(Membership(1, 1, 1, 1), "127.0.0.1", 300.0)
    places = iter([coordinator.where, f"{'0' * 32}@127.0.0.1:{stranger}", coordinator.where])
    member = Member(0, 0, "life", lambda: None, lambda: next(places))
    assert member.ask("join", step=7)["quorum"] == 1
    member._socket.shutdown(socket.SHUT_RDWR)
    assert member.ask("join", step=8)["members"] == [0]
    assert next(places, None) is None


def test_time_in_which_nobody_was_there_is_no_wait_for_others(monkeypatch):
    """Replicas that a queue lets in one after the other, long after their coordinator."""
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("mlpipe.train.replicas.coordinator.time", clock)
    one = Coordinator(Membership(1, 2, 2, 2), "127.0.0.1", 300.0)

    def tick(at: float) -> None:
        nonlocal now
        now = at
        until(lambda: one._ticked == at, "a tick")

    def join(replica: int) -> list[int]:
        return Member(replica, 0, "life", lambda: None, lambda: one.where).ask("join", step=0)["members"]

    tick(1000.0)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(join, 0)
        until(lambda: one.membership.waits_for().startswith("1 of"), "the first")
        tick(1001.0)
        tick(1002.0)  # the one before is over
        assert (join(1), first.result()) == ([0, 1], [0, 1])
