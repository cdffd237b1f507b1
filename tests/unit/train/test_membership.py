"""Who takes part in an elastic training, under any sequence of deaths, returns and silences."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.command_runs import until

from mlpipe.train.replicas.coordinator import LOST_SECONDS, Coordinator
from mlpipe.train.replicas.membership import Membership

pytestmark = pytest.mark.unit
STEPS = 4


@dataclass
class Replica:
    """What the ranks of a replica do, one rank a replica more or less: `done` has the steps that were
    committed while it was there, or that it was healed to."""

    number: int
    num_ranks: int
    life: int = 0
    alive: bool = True
    step: int = 0
    quorum: int = 0
    waits: dict[int, dict[str, Any]] = field(default_factory=dict)
    next: dict[int, str] = field(default_factory=dict)


class World:
    """Replicas around a Membership. `committed`: by step the quorum in which it was."""

    def __init__(self, num_replicas: int, num_ranks: int, fewest: int) -> None:
        self.membership = Membership(num_ranks, fewest, num_replicas, fewest)
        self.num_ranks = num_ranks
        self.replicas = [Replica(number, num_ranks) for number in range(num_replicas)]
        self.committed: dict[int, int] = {}
        self.heard: dict[tuple[int, int], set[bool]] = {}
        for one in self.replicas:
            self.begin(one)

    def begin(self, one: Replica) -> None:
        one.alive, one.life, one.step, one.waits = True, one.life + 1, 0, {}
        one.next = dict.fromkeys(range(self.num_ranks), "join")
        for rank in range(self.num_ranks):
            self.membership.connect(one.number, rank, str(one.life))

    def kill(self, one: Replica) -> None:
        one.alive = False
        for rank in range(self.num_ranks):
            self.membership.disconnect(one.number, rank, "killed")

    def act(self, one: Replica, rank: int, ok: bool = True) -> None:
        """The rank asks what comes next, unless it waits for an answer."""
        if not one.alive or rank in one.waits or rank not in one.next:
            return
        what = one.next[rank]
        message: dict[str, Any] = {"ask": what, "step": one.step if what == "join" else one.step + 1}
        if what != "join":
            message["quorum"] = one.quorum
        if what == "vote":
            message |= {"ok": ok, "leaves": False}
        one.waits[rank] = message
        self.membership.receive(one.number, rank, message)

    def hear(self) -> None:
        for (number, rank), reply in self.membership.take_replies():
            one = self.replicas[number]
            asked = one.waits.pop(rank)
            what = asked["ask"]
            if what == "vote":
                self.heard.setdefault((asked["quorum"], asked["step"]), set()).add(reply.get("commit", False))
                if reply.get("commit"):
                    before = self.committed.setdefault(asked["step"], asked["quorum"])
                    assert before == asked["quorum"], "a step is committed once"
            one.next[rank] = {"join": "ready", "ready": "vote", "vote": "ready"}[what]
            if reply.get("void"):
                one.next[rank] = "join"
            if what == "join":
                if max(reply["steps"]) < max(self.committed, default=0):
                    assert not self.anyone_had(), "who has done more is listened to"
                    # all who had it are gone: it is computed again
                    self.committed = {
                        step: quorum for step, quorum in self.committed.items() if step <= max(reply["steps"])
                    }
                one.quorum, one.step = reply["quorum"], max(reply["steps"])  # healed
            elif what == "vote" and reply.get("commit") and asked["step"] > one.step:
                one.step = asked["step"]

    def anyone_had(self) -> bool:
        """Whether a replica that has what was committed last is still there."""
        return any(one.alive and one.step >= max(self.committed, default=0) for one in self.replicas)

    def settle(self) -> None:
        """Nobody dies any more."""
        for one in self.replicas:
            if not one.alive:
                self.begin(one)
        self.hear()
        for _ in range(200):
            for one in self.replicas:
                for rank in range(self.num_ranks):
                    self.act(one, rank)
                    self.hear()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["act", "act", "act", "act", "fails", "kill", "begin"]),
        st.integers(0, 2),
        st.integers(0, 1),
    ),
    max_size=120,
)  # fmt: skip


@settings(max_examples=150)
@given(events=EVENTS, num_ranks=st.integers(1, 2), fewest=st.integers(1, 3))
def test_a_step_is_committed_by_all_of_a_quorum_or_none_and_the_training_goes_on(events, num_ranks, fewest):
    world = World(3, num_ranks, fewest)
    for what, number, rank in events:
        one = world.replicas[number]
        if what in ("act", "fails"):
            world.act(one, rank % num_ranks, ok=what == "act")
        elif what == "kill" and one.alive:
            world.kill(one)
        elif what == "begin" and not one.alive:
            world.begin(one)
        world.hear()
    world.settle()
    assert all(len(said) == 1 for said in world.heard.values()), "commit for all that heard, or for none"
    assert len({one.step for one in world.replicas}) == 1, "nobody is left behind"
    assert world.replicas[0].step > 50, "it goes on"
    assert world.membership.quorum is not None
    assert set(world.membership.quorum.members) == {0, 1, 2}


def replies(membership: Membership) -> dict[tuple[int, int], dict[str, Any]]:
    return dict(membership.take_replies())


def formed(members: int = 3) -> Membership:
    membership = Membership(1, 2, 4, members)
    for number in range(members):
        membership.connect(number, 0, "a")
        membership.receive(number, 0, {"ask": "join", "step": 0})
    assert set(replies(membership)) == {(number, 0) for number in range(members)}
    return membership


def vote(membership: Membership, number: int, **fields: Any) -> None:
    membership.receive(
        number, 0, {"ask": "vote", "quorum": 1, "step": 1, "ok": True, "leaves": False, **fields}
    )


def test_too_few_wait_and_say_for_whom():
    membership = formed(2)
    membership.disconnect(1, 0, "replica 1 was lost")
    membership.receive(0, 0, {"ask": "join", "step": 0})
    assert replies(membership) == {}
    assert membership.waits_for() == "1 of at least 2 replicas are there (replica 1 was lost)"
    membership.fail("nobody came")
    assert replies(membership) == {(0, 0): {"failed": "nobody came"}}


def test_who_missed_the_commit_hears_it_on_asking_again():
    membership = formed()
    for number in range(3):
        vote(membership, number)
    membership.take_replies()  # lost on the way to replica 2, which was stopped
    membership.disconnect(2, 0, "silent")
    membership.connect(2, 0, "a")
    vote(membership, 2)
    assert replies(membership)[2, 0] == {"commit": True, "void": True, "leaving": []}


def test_who_missed_the_commit_hears_it_though_the_others_have_gone_on():
    """Else it would take the step again, for whom another rank of its replica waits that has heard."""
    membership = formed()
    for number in range(3):
        vote(membership, number)
    membership.disconnect(2, 0, "silent")
    for number in (0, 1):
        membership.receive(number, 0, {"ask": "join", "step": 1})
    for number in (0, 1):
        vote(membership, number, quorum=2, step=2)
    membership.take_replies()
    membership.connect(2, 0, "a")
    vote(membership, 2, step=2)  # which was never
    assert replies(membership)[2, 0] == {"void": True}
    vote(membership, 2)
    assert replies(membership)[2, 0] == {"commit": True, "void": True, "leaving": []}


def test_one_that_leaves_and_one_that_comes_change_the_quorum_after_a_committed_step():
    membership = formed()
    membership.connect(3, 0, "a")
    membership.receive(3, 0, {"ask": "join", "step": -1})
    for number in range(3):
        vote(membership, number, leaves=number == 0)
    said = replies(membership)
    assert said == {(number, 0): {"commit": True, "void": True, "leaving": [0]} for number in range(3)}
    for number in (1, 2):
        membership.receive(number, 0, {"ask": "join", "step": 1})
    assert replies(membership)[1, 0] == {"quorum": 2, "members": [1, 2, 3], "steps": [1, 1, -1]}
    assert membership.quorums[-1].step == 1


def test_nobody_comes_or_leaves_in_the_midst_of_a_step():
    membership = formed()
    membership.connect(3, 0, "a")
    membership.receive(3, 0, {"ask": "join", "step": -1})
    for half, void, leaving in ((True, False, []), (False, True, [0])):
        for number in range(3):
            vote(membership, number, half=half, leaves=number == 0)
        assert list(replies(membership).values()) == 3 * [{"commit": True, "void": void, "leaving": leaving}]
        vote(membership, 1, half=half)
        assert replies(membership)[1, 0]["commit"], "asked again"
        assert membership.committed == (1, 0.5 if half else 1)


def test_a_sum_that_failed_on_one_replica_counts_on_none():
    membership = formed()
    for number in range(3):
        vote(membership, number, ok=number != 1)
    assert {one["commit"] for one in replies(membership).values()} == {False}
    assert (membership.quorum, membership.committed) == (None, None)


def test_who_asks_again_over_another_connection_has_one_reply():
    membership = formed()
    vote(membership, 0)
    membership.connect(0, 0, "a")  # before it is known that the one before has ended
    for number in (1, 2):
        vote(membership, number)
    assert replies(membership) == {}
    vote(membership, 0)
    assert {number for number, _ in replies(membership)} == {0, 1, 2}
    vote(membership, 0)
    assert replies(membership) == {(0, 0): {"commit": True, "void": False, "leaving": []}}


def test_who_missed_that_one_leaves_hears_it_too():
    membership = formed()
    for number in range(3):
        vote(membership, number, leaves=number == 2)
    membership.take_replies()
    vote(membership, 1)
    assert replies(membership) == {(1, 0): {"commit": True, "void": True, "leaving": [2]}}


def test_nobody_waits_for_a_rank_that_could_not_reach_the_others():
    membership = formed()
    membership.receive(0, 0, {"ask": "ready", "quorum": 1, "step": "all are whole"})
    membership.receive(1, 0, {"ask": "spoil", "quorum": 1})
    assert replies(membership) == {(0, 0): {"void": True}, (1, 0): {}}
    membership.receive(2, 0, {"ask": "spoil", "quorum": 1})  # it had not heard
    assert replies(membership) == {(2, 0): {}}


def test_strangers_do_no_harm_to_a_coordinator_and_are_not_heard():
    membership = Membership(1, 1, 2, 1)
    coordinator = Coordinator(membership, "127.0.0.1", 900.0)
    token, _, where = coordinator.where.partition("@")
    host, _, port = where.partition(":")
    hello = b'{"hello": [0, 0], "life": "a", "heard": [0, 0, null, []]}\n'
    join = b'{"ask": "join", "step": 0}\n'
    known = token.encode()
    all_garbage = [b"\0" * 100, b"x" * len(token) + hello, b"GET / HTTP/1.1\r\n\r\n" * 9]
    all_garbage += [known + b"[]\n", known + b'{"hello": []}\n', known + b"7\n"]
    for garbage in all_garbage:
        with socket.create_connection((host, int(port)), timeout=10.0) as stranger:
            stranger.sendall(garbage)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b"", "closed, without a word"
    assert membership.quorums == []
    assert membership.waits_for().startswith("0 of")
    with socket.create_connection((host, int(port)), timeout=10.0) as rank:
        rank.sendall(known + hello + join)
        lines = rank.makefile("rb")
        assert b'"quorum": 1' in next(line for line in lines if line != b"{}\n"), (
            "after what says it is there"
        )


def test_who_takes_over_learns_from_the_ranks_what_was_committed():
    """One rank of a replica has heard that its step counts, the other one has not."""
    membership = Membership(2, 1, 2, 2)
    membership.connect(0, 1, "a")
    membership.inherit(7, 2, [6, 40], [])
    membership.receive(0, 1, {"ask": "vote", "quorum": 7, "step": 41, "ok": True, "leaves": False})
    assert replies(membership) == {}, "until the other one has said what it heard"
    membership.connect(0, 0, "a")
    membership.inherit(7, 2, [7, 41], [])
    assert replies(membership) == {(0, 1): {"commit": True, "void": True, "leaving": []}}
    for rank in range(2):
        membership.receive(0, rank, {"ask": "join", "step": 41})
    assert replies(membership) == {}, "the other replica of that quorum is still to come"
    membership.hurry()
    assert {one["quorum"] for one in replies(membership).values()} == {8}, "no number twice"


def test_who_takes_over_voids_what_nobody_heard():
    membership = Membership(2, 1, 2, 1)
    vote = {"ask": "vote", "quorum": 7, "step": 41, "ok": True, "leaves": False}
    for rank in range(2):
        membership.connect(0, rank, "a")
        membership.inherit(7, 1, [7, 40], [])
        membership.receive(0, rank, vote)
    assert replies(membership) == {(0, 0): {"void": True}, (0, 1): {"void": True}}


def test_who_is_alone_and_told_to_stop_may_leave_but_not_alone_of_its_ranks():
    membership = Membership(2, 2, 3, 2)
    for rank in range(2):
        membership.connect(0, rank, "a")
        membership.receive(0, rank, {"ask": "join", "step": 5, "n": 1})
    membership.receive(0, 0, {"ask": "join", "step": 5, "leaves": True, "n": 2})
    assert replies(membership) == {}
    membership.receive(0, 1, {"ask": "join", "step": 5, "leaves": True, "n": 2})
    assert replies(membership) == {(0, rank): {"leave": True, "n": 2} for rank in range(2)}


def test_a_coordinator_that_looks_at_its_clock_no_more_is_noticed(monkeypatch):
    one = Coordinator(Membership(1, 1, 2, 1), "127.0.0.1", 900.0)
    assert not one.is_hung()
    one._loop.call_soon_threadsafe(one._ticking.cancel)
    until(one._ticking.done, "its end")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + LOST_SECONDS + 1)
    assert one.is_hung()
