"""`python -m mlpipe.train.coordinate --plan PLAN --scratch DIR`: where the replicas of an elastic training
meet, as a process of its own: on a cluster each replica is launched by itself, and none by this one.

Whoever finds another one's seat in the store waits until that is not renewed any more; the ranks look there
for who has it. It knows nothing that the ranks do not, so that another one can take over: one that is told to
end while they go on (its node is drained, a queue takes it back) gives its seat up. One that is not sure of
its seat (the store was away, it was stopped) begins anew as a process. No torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from mlpipe._core.addresses import own_address
from mlpipe._core.errors import SAVED_CODE, StoreError
from mlpipe._core.records import Launched, LaunchEnded
from mlpipe.plan.plan import Plan
from mlpipe.plan.process import main_of_stage
from mlpipe.store import replicas
from mlpipe.store.open import open_store
from mlpipe.store.runs import append_event, cancel_requested
from mlpipe.train.replicas.coordinator import ALONE_SECONDS, LONELY_SECONDS, Coordinator
from mlpipe.train.replicas.membership import Membership
from mlpipe.train.replicas.telling import best, tell_quorums

_LOOK_SECONDS = 1.0
_RENEW_SECONDS = 3.0
# Before another one may take the seat: a request that is under way then is the last one.
_HOLDS_SECONDS = 0.8 * replicas.SEAT_SECONDS


def main(argv: list[str] | None = None) -> int:
    return main_of_stage("mlpipe.train.coordinate", __doc__, argv, _run)


def _run(plan: Plan, path: Path, scratch: Path) -> int:
    return Coordinating(plan).run()


class Coordinating:
    """One attempt."""

    def __init__(self, plan: Plan) -> None:
        assert plan.launch.replicas is not None
        limits = plan.launch.replicas
        self.run_id, self.key, self.store = plan.run_id, plan.attempt_key, open_store(plan.store_url)
        expected = replicas.wanted(self.store, self.key) or limits.most
        self.membership = Membership(plan.launch.nproc_per_node, limits.fewest, limits.most, expected)
        self.renewed = float("-inf")
        self.coordinator = Coordinator(self.membership, own_address(), LONELY_SECONDS, self.check)
        self.seat = replicas.Seat(self.store, self.key, self.coordinator.where)
        self.num_signals = 0
        self.told_at = math.inf  # when the first of them came
        self.heard: tuple[int, float] | None = None  # the commit that was looked at last since a signal
        self.num_heard = 0  # commits since then after which nobody left

    def check(self) -> None:
        """Does not return unless the seat is this one's for sure. Before it was taken nobody comes."""
        if self.renewed > 0 and time.monotonic() - self.renewed > _HOLDS_SECONDS:
            _begin_anew("the seat was not renewed in time")

    def run(self) -> int:
        """Until the replicas have ended, or a signal after which none is connected, or those that are go
        on without having heard one: then another one has the seat."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        if not self._take():
            return SAVED_CODE
        if not self.store.read_log(f"{self.key}/events.jsonl")[0]:
            append_event(self.store, self.key, Launched())
        # process 1 of a pod hears no signal before it listens; replicas that go on find us in this time
        unwanted = cancel_requested(self.store, self.run_id) is not None
        told, until = 0, time.monotonic() + ALONE_SECONDS
        while True:
            time.sleep(_LOOK_SECONDS)
            if unwanted and not self.coordinator.num_connected and time.monotonic() > until:
                return SAVED_CODE
            if self.coordinator.is_hung():
                _begin_anew("its thread hangs")
            try:
                self._renew()
                told = tell_quorums(self.membership, told, self.store, self.key)
                if not self.coordinator.num_connected and (told or self.num_signals) and self._ended():
                    return SAVED_CODE if self.num_signals else 0
                if self.num_signals and self._others_go_on():
                    self.coordinator.close()
                    with contextlib.suppress(StoreError):  # it lapses by itself
                        self.seat.give_up()
                    print("the coordinator gives up its seat: it was told to end", flush=True)  # noqa: T201
                    return SAVED_CODE
            except StoreError as error:
                print(f"the store is away: {error}", flush=True)  # noqa: T201

    def _take(self) -> bool:
        """False: a signal came first."""
        seen, since = "", time.monotonic()
        while not self.num_signals:
            old = seen if time.monotonic() - since > replicas.SEAT_SECONDS else ""
            try:
                began = time.monotonic()
                taken, etag = self.seat.try_to_take(old)
            except StoreError as error:
                print(f"the store is away: {error}", flush=True)  # noqa: T201
                taken, etag = False, seen
            if taken:
                self.renewed = began
                print(f"replicas meet at {self.coordinator.where.partition('@')[2]}", flush=True)  # noqa: T201
                return True
            if etag != seen:
                seen, since = etag, time.monotonic()
            time.sleep(_LOOK_SECONDS)
        return False

    def _renew(self) -> None:
        began = time.monotonic()
        if began - self.renewed < _RENEW_SECONDS:
            return
        if not self.seat.renew():
            _begin_anew("another one has taken over")
        self.renewed = began

    def _others_go_on(self) -> bool:
        """Whether ranks have committed steps since the signal, and would have left after one if they had been
        told to end as well; those who leave meet here to do so. Two, and not at once: a queue or a drain that
        takes all of them back does not tell them in one moment."""
        if self.num_heard == 0 and self.heard is None:
            self.heard = self.membership.committed
        if self.membership.committed != self.heard:
            self.heard = self.membership.committed
            self.num_heard = 0 if self.membership.left else self.num_heard + 1
        return self.num_heard > 1 and time.monotonic() - self.told_at > ALONE_SECONDS

    def _ended(self) -> bool:
        """Whether one replica has done the training, or all were told to end."""
        found = replicas.outcomes(self.store, self.key)
        ended = best(found.values()) if found else None
        if ended is not None and (self.num_signals or ended.outcome == "done"):
            append_event(self.store, self.key, LaunchEnded(outcome=ended.outcome, message=ended.message))
            return True
        return bool(self.num_signals)

    def _on_signal(self, signum: int, frame: object) -> None:
        self.num_signals += 1
        self.told_at = min(self.told_at, time.monotonic())


def _begin_anew(why: str) -> NoReturn:
    """This process, from its start: its connections end, and ranks look for who has the seat."""
    print(f"the coordinator begins anew: {why}", flush=True)  # noqa: T201
    os.execv(sys.executable, [sys.executable, "-P", "-m", "mlpipe.train.coordinate", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
