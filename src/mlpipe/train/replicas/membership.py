"""Who takes part in an elastic training: the state machine behind the coordinator, without I/O or clock.

The ranks of a replica live and die together; replicas come and go. Those that take part in a step are a
quorum, which never changes: when one of them is lost, or another one waits to take part, it is void, and the
ranks that are there `join` the next one. A step goes through two meetings of all ranks of the quorum:

    ready    all have their gradients: the sum over replicas may begin, and nobody waits in it for a slow one
    vote     all have the sum, or some have not: the step is committed on all of them or on none

Islands (`optim/islands.py`) have four where a round ends: the first two are of `half` a step, after which
they have still to agree, and nobody comes or leaves.

A rank that comes to neither says `spoil`, so that nobody waits for it. One that waits in vain and is to leave
asks to `join` again, with `leaves`, and may.

A request and its reply have the same `n`, as whoever asks anew may hear the reply to what it asked before.

There is one coordinator, and a step counts only when it says so: two parts of a divided network cannot both
go on. Whoever missed what it said asks again (`vote` may be repeated), and is healed if it is behind. Who
takes over knows nothing but what the ranks have heard of the one before (`inherit`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Rank = tuple[int, int]  # number of the replica, rank within it


def done(vote: Message) -> float:
    """The steps that are, when it counts."""
    steps: int = vote["step"]
    return steps - 0.5 if vote.get("half") else steps


@dataclass(frozen=True)
class Quorum:
    """`members`: numbers of the replicas; the first one leads, which writes checkpoints. `step`: the most
    that one of them has done, perhaps a half more; below 0 where nobody has anything. `why`: there is a new
    one."""

    number: int
    members: tuple[int, ...]
    step: float
    why: str


class Membership:
    """`num_ranks`: of a replica. `fewest`, `most`: replicas that may take part. The first quorum is of
    `expected` replicas or more, unless `hurry` is called.

    `connect`, `disconnect` and `receive` say what happened; `take_replies` gives what to send, `quorums` each
    one that there was."""

    def __init__(self, num_ranks: int, fewest: int, most: int, expected: int) -> None:
        self.num_ranks, self.fewest, self.most = num_ranks, fewest, most
        self.expected = expected
        self.quorum: Quorum | None = None
        self.quorums: list[Quorum] = []
        self.committed: tuple[int, float] | None = None  # number of the quorum, step
        # the last of each quorum, who left after it: the others may have gone on when one asks for its vote
        self._commits: dict[int, tuple[float, list[int]]] = {}
        self.inherited = False  # the ranks were in a quorum of another coordinator
        self._number = 0  # of the quorum made last
        self.left: list[int] = []  # who left after the step that was committed last
        self.reason = "the training begins"
        self._last: tuple[int, ...] = ()  # members of the quorum before
        self._lives: dict[Rank, str] = {}  # which life of its replica a connected rank is of
        self._asked: dict[Rank, Message] = {}  # what has no reply yet
        self._values: dict[str, str] = {}
        self._replies: list[tuple[Rank, Message]] = []

    # -- what happens -------------------------------------------------------------------------------

    def connect(self, replica: int, rank: int, life: str) -> None:
        """A rank is there, or there again; `life` differs when its replica was started anew."""
        if any(other[0] == replica and known != life for other, known in self._lives.items()):
            for other in [other for other in self._lives if other[0] == replica]:
                self.disconnect(*other, why=f"replica {replica} was started again")
        self._lives[replica, rank] = life
        self._asked.pop((replica, rank), None)  # it asks again

    def inherit(self, quorum: int, size: int, committed: list[Any] | None, left: list[int]) -> None:
        """What a rank has heard of the coordinator before this one: its last quorum, how many were in it, and
        the last step that was committed (number of the quorum, step) with who left after it."""
        if self.quorums or not quorum:
            return
        self._number, self.inherited = max(self._number, quorum), True
        self.expected = max(self.fewest, size)
        self.reason = "another coordinator took over"
        if committed is not None and (self.committed is None or tuple(committed) > self.committed):
            self._count(committed[0], committed[1], left)
        for who, asked in list(self._asked.items()):
            if asked["ask"] == "vote":
                self.receive(*who, asked)

    def disconnect(self, replica: int, rank: int, why: str) -> None:
        """A rank is gone, or has been silent for too long."""
        self._lives.pop((replica, rank), None)
        self._asked.pop((replica, rank), None)
        if self.quorum is not None and replica in self.quorum.members:
            self._void(why)
        self._form()

    def receive(self, replica: int, rank: int, message: Message) -> None:
        """A rank asks. Every request has exactly one reply, unless the rank is gone before."""
        who = (replica, rank)
        what, current = message["ask"], self.quorum
        self._asked[who] = message
        if what == "set":
            self._reply(who, {})
            self._set(message)
        elif what == "spoil":
            self._reply(who, {})
            if current is not None and current.number == message["quorum"]:
                self._void_for(replica)
        elif what == "join":
            if current is not None and replica in current.members:
                self._void_for(replica)
            self._form()
            self._release(replica)
        elif what == "vote" and self._commits.get(message["quorum"], (None,))[0] == done(message):
            void = current is None or current.number != message["quorum"]
            left = self._commits[message["quorum"]][1]
            self._reply(who, {"commit": True, "void": void, "leaving": left})  # it had missed that
        elif what == "vote" and self.inherited and not self.quorums and not self._is_whole(replica):
            pass  # another rank of this replica may have heard that it counts
        elif current is None or message["quorum"] != current.number:
            self._reply(who, {"void": True})
        elif what == "get":
            if message["key"] in self._values:
                self._reply(who, {"value": self._values[message["key"]]})
        elif all(self._at(other, message) for other in self._ranks(current.members)):
            self._meet(message)

    def hurry(self) -> None:
        """The first quorum waits no longer for more than the fewest."""
        self.expected = self.fewest
        self._form()

    def waits_for(self) -> str:
        """Why there is no quorum, in words; "" while there is one."""
        if self.quorum is not None:
            return ""
        joined = self._joined()
        needed = self.fewest if self.quorums else max(self.fewest, self.expected)
        return f"{len(joined)} of at least {needed} replicas are there ({self.reason})"

    def fail(self, message: str) -> None:
        """The same answer to whoever waits for a quorum: there will be none."""
        for who in [who for who, asked in self._asked.items() if asked["ask"] == "join"]:
            self._reply(who, {"failed": message})

    def take_replies(self) -> list[tuple[Rank, Message]]:
        """What is to be sent since the last call."""
        replies, self._replies = self._replies, []
        return replies

    # -- how it is decided --------------------------------------------------------------------------

    def _meet(self, message: Message) -> None:
        """All ranks of the quorum have come to the same point."""
        assert self.quorum is not None
        members = self.quorum.members
        asked = {who: self._asked[who] for who in self._ranks(members)}
        if message["ask"] == "ready":
            for who in asked:
                self._reply(who, {"void": False})
            return
        commit = all(one["ok"] for one in asked.values())
        ends = commit and not message.get("half")
        leaving = sorted({replica for (replica, _), one in asked.items() if one["leaves"]}) if ends else []
        staying = [replica for replica in members if replica not in leaving]
        newcomers = [replica for replica in self._joined() if replica not in members]
        grows = ends and bool(newcomers) and len(staying) < self.most
        if commit:
            self._count(self.quorum.number, done(message), leaving)
        void = not commit or grows or bool(leaving)
        for who in asked:
            self._reply(who, {"commit": commit, "void": void, "leaving": leaving})
        if void:
            names = ", ".join(map(str, leaving or newcomers))
            self._last = tuple(staying)
            why = f"replica {names} leaves" if leaving else f"replica {names} comes"
            self._void(why if commit else "a sum over the replicas failed")

    def _count(self, quorum: int, step: float, leaving: list[int]) -> None:
        """A step does, after which some leave."""
        self.committed, self.left = (quorum, step), leaving
        self._commits[quorum] = step, leaving

    def _void_for(self, replica: int) -> None:
        """One of the quorum cannot go on with the step."""
        assert self.quorum is not None
        has_begun = self.quorum.step >= 0
        self._void(f"replica {replica} has to begin again" if has_begun else self.quorum.why)

    def _void(self, why: str) -> None:
        assert self.quorum is not None
        number, self.reason = self.quorum.number, why
        if not self._last:
            self._last = self.quorum.members
        self.quorum = None
        self._values.clear()
        for who in [who for who, asked in self._asked.items() if asked.get("quorum") == number]:
            self._reply(who, {"void": True})

    def _form(self) -> None:
        """A quorum of all that are there, as soon as those of the one before have come, or are gone."""
        if self.quorum is not None:
            return
        joined = self._joined()
        if any(self._is_whole(replica) and replica not in joined for replica in self._last):
            return
        if len(joined) < (self.fewest if self.quorums else max(self.fewest, self.expected)):
            return
        known = [replica for replica in self._last if replica in joined]  # who leads goes on to lead
        members = [*known, *(replica for replica in joined if replica not in known)][: self.most]
        steps = [
            min(self._asked[replica, rank]["step"] for rank in range(self.num_ranks)) for replica in members
        ]
        self._number += 1
        self.quorum = Quorum(self._number, tuple(members), max(steps), self.reason)
        self.quorums.append(self.quorum)
        self._last = ()
        for who in [who for who, asked in self._asked.items() if asked["ask"] == "vote"]:
            self._reply(who, {"void": True})  # of a coordinator before this one
        reply = {"quorum": self.quorum.number, "members": members, "steps": steps}
        for who in self._ranks(members):
            self._reply(who, reply)

    def _release(self, replica: int) -> None:
        """All ranks of it wait to take part, and would rather leave."""
        asked = [self._asked.get(who, {}) for who in self._ranks([replica])]
        if all(one.get("ask") == "join" and one.get("leaves") for one in asked):
            for who in self._ranks([replica]):
                self._reply(who, {"leave": True})

    def _joined(self) -> list[int]:
        """Replicas all of whose ranks wait for a quorum."""
        asking = {who for who, asked in self._asked.items() if asked["ask"] == "join"}
        replicas = sorted({replica for replica, _ in asking})
        return [replica for replica in replicas if asking.issuperset(self._ranks([replica]))]

    def _is_whole(self, replica: int) -> bool:
        return set(self._ranks([replica])) <= self._lives.keys()

    def _ranks(self, replicas: Iterable[int]) -> list[Rank]:
        return [(replica, rank) for replica in replicas for rank in range(self.num_ranks)]

    def _at(self, who: Rank, message: Message) -> bool:
        """Whether that rank has come to the same point."""
        asked = self._asked.get(who, {})
        return all(asked.get(key) == message.get(key) for key in ("ask", "quorum", "step"))

    def _set(self, message: Message) -> None:
        if self.quorum is None or message["quorum"] != self.quorum.number:
            return
        self._values[message["key"]] = message["value"]
        for who, asked in list(self._asked.items()):
            if asked["ask"] == "get" and asked["key"] == message["key"]:
                self._reply(who, {"value": message["value"]})

    def _reply(self, who: Rank, message: Message) -> None:
        asked = self._asked.pop(who, {})
        numbered = {**message, "n": asked["n"]} if "n" in asked else message
        self._replies.append((who, numbered))
