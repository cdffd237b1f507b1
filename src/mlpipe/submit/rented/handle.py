"""A stage on a rented machine, from the order to the return.

The machine runs the stage by itself (`machine.py`) and leaves its outcome in the store. Here it is watched:
that it runs, what it costs, that it is asked to save in time, and that it is returned whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

from mlpipe._core.errors import MlpipeError, StoreError, SubmitError
from mlpipe._core.serial import from_json
from mlpipe.plan.offers import HOUR, IMAGE_BYTES, RETURN_SECONDS, Quote, reserve_seconds
from mlpipe.plan.plan import Plan
from mlpipe.spec.model import Pipeline
from mlpipe.store import outputs
from mlpipe.store.base import Store
from mlpipe.submit.executor import Ended, Slots
from mlpipe.submit.handle import ThreadedHandle, ended_by, outcomes_of
from mlpipe.submit.process_executor import ProcessExecutor
from mlpipe.submit.rented import machine
from mlpipe.submit.rented.keys import worker_environment
from mlpipe.submit.rented.market import Market
from mlpipe.submit.rented.order import (
    LAST_FIRST_BEAT_SECONDS,
    LEASE_SECONDS,
    Term,
    script,
    told,
)
from mlpipe.submit.rented.rentals import Rental
from mlpipe.submit.rented.vendor import Machine, Order

_POLL_SECONDS = 5.0
_LOOK_SECONDS = 0.2  # whether the stage was asked to stop
_GONE_POLLS = 3  # so many times a machine is gone before it is believed
_RENEW_SECONDS = 30.0
_AGAIN_SECONDS = 15.0  # between two tries to return a machine


class RentedExecutor:
    """Rents a machine for a stage of workers; a command runs here, beside its driver."""

    def __init__(self, market: Market, pipeline: Pipeline, here: ProcessExecutor) -> None:
        self._market, self._pipeline, self._here = market, pipeline, here

    def capacity(self) -> Slots:
        """Machines are rented one after the other by who rents them; commands share this one's cores."""
        return Slots(cpus=2**31, gpus=2**31)

    def check(self, plan: Plan) -> None:
        if plan.kind.runs == "command":
            self._here.check(plan)

    def start(self, plan: Plan, scratch: Path) -> ThreadedHandle:
        if plan.kind.runs == "command":
            return self._here.start(plan, scratch)
        return RentedHandle(self._market, self._pipeline, plan)


class RentedHandle(ThreadedHandle):
    """One attempt. An interruption gives it up; the next attempt looks for another machine, and goes on from
    the last checkpoint."""

    def __init__(self, market: Market, pipeline: Pipeline, plan: Plan) -> None:
        super().__init__(market.store, plan)
        self._market, self._pipeline = market, pipeline
        self._out_of = ""
        self._renewed, self._beats = 0.0, 0
        self._gone, self._heard = 0, False
        self._thread.daemon = False  # a driver does not end before its machine is returned
        self._thread.start()

    def _work(self) -> Ended:
        self._note = "waits for the run's other machine to be returned: one at a time keeps to the budget"
        while not self._market.one_at_a_time.acquire(timeout=_LOOK_SECONDS):
            if self._stopping:
                return Ended("cancelled", "stopped before a machine was rented")
        try:
            return self._on_a_machine()
        finally:
            self._market.one_at_a_time.release()

    def _on_a_machine(self) -> Ended:
        quotes = self._market.candidates(self._plan)
        for number, quote in enumerate(quotes):
            if self._stopping:
                return Ended("cancelled", "stopped before a machine was rented")
            self._note = (
                f"rents {quote.offer.id}, {quote.hardware}, at ${quote.offer.usd_per_hour:.3f} an hour"
            )
            term = self._term(quote)
            if term is None:
                return self._too_little()
            rental = self._rent(quote, term, number)
            if rental is not None:
                return self._watched(rental, term)
        with contextlib.suppress(SubmitError):
            self._market.rentals.return_others("")
        words = f"{len(quotes)} machines were for rent, and none could be had"
        return Ended("failed", words, kind="infrastructure", lost=True)

    def _term(self, quote: Quote) -> Term | None:
        """None: what is left does not even pay the preparation and a save."""
        term = self._market.term(quote)
        needed = quote.prepare_seconds + reserve_seconds(self._plan)
        return term if term.seconds >= needed else None

    def _too_little(self) -> Ended:
        words = (
            f"${self._market.left_usd():.2f} of ${self._market.limits.max_usd:.2f} are left, too little to "
            "rent a machine, prepare it and save what it does"
        )
        return Ended("failed", words, kind="infrastructure")

    def _rent(self, quote: Quote, term: Term, number: int) -> Rental | None:
        plan, market = self._plan, self._market
        self._renew(force=True)
        order = Order(
            f"{market.rentals.prefix}{plan.stage}/{plan.attempt}/{number}",
            self._pipeline.image or "",
            script(market.vendor.give_back(), term),
            quote.disk_bytes,
            {
                **told(plan, term, str(outputs.cache_folder()), LEASE_SECONDS),
                **worker_environment(plan.store_url, plan.run_id, term.seconds),
            },
        )
        return market.rentals.rent(quote, order)

    def _watched(self, rental: Rental, term: Term) -> Ended:
        """Until it has ended; the machine is returned in any case."""
        try:
            ended = self._follow_machine(rental, term)
        except BaseException:
            self._give_back(rental, term)
            raise
        self._give_back(rental, term, failed=ended.lost)
        return ended

    def _follow_machine(self, rental: Rental, term: Term) -> Ended:
        self._gone, self._heard = 0, False
        while True:
            if self._killing:
                return Ended("cancelled", "its machine was returned at once")
            left = self._left_seconds(rental, term)
            if left < RETURN_SECONDS:
                words = f"machine {rental.machine} did not save before the end of what was to be spent"
                return Ended("failed", words, kind="infrastructure")
            if not self._stopping and left < reserve_seconds(self._plan):
                self._out_of = term.ending
                self._stopping = True
            try:
                if (ended := self._look(rental)) is not None:
                    return ended
            except StoreError as error:  # the machine goes on without it for a while, and so does this
                self._note = error.message
            self._wait(_POLL_SECONDS)

    def _left_seconds(self, rental: Rental, term: Term) -> float:
        """For which the machine may be paid: to the end of its term, or less, where bytes cost more than was
        thought, or a machine came that nobody expected."""
        left = term.deadline - time.time()
        with contextlib.suppress(StoreError):
            counted = traffic_usd_of(self._store, self._plan.attempt_key, rental)
            more = max(0.0, counted - rental.traffic_usd)
            left = min(left, (self._market.left_usd() - more) / rental.usd_per_hour * HOUR)
        return left

    def _look(self, rental: Rental) -> Ended | None:
        """Once; how it ended, if it has. Raises StoreError."""
        if outcomes := outcomes_of(self._store, self._plan):
            return self._judged(ended_by(outcomes[0]))
        self._renew()
        name, limits = f"machine {rental.machine}", self._market.limits
        mine = self._machine(rental)
        self._gone = 0 if mine is not None and mine.state != "gone" else self._gone + 1
        if self._gone >= _GONE_POLLS:
            what = "was taken away" if mine is None else f"is gone: {mine.says}"
            return Ended("failed", f"{name} {what}", kind="infrastructure", lost=True)
        says = mine.says if mine is not None else "not listed"
        self._heard = self._heard or self._store.exists(f"{self._plan.attempt_key}/{machine.BEAT}")
        if not self._heard and time.time() - rental.asked > LAST_FIRST_BEAT_SECONDS:
            return Ended("failed", f"{name} did not begin: {says}", kind="infrastructure", lost=True)
        spent = self._market.rentals.spent_usd()
        doing = "runs" if self._heard else f"is prepared ({says})"
        self._note = f"{name} {doing}; ${spent:.2f} of ${limits.max_usd:.2f} spent"
        return None

    def _judged(self, ended: Ended) -> Ended:
        """A save that the budget asked for is a failure that more of it mends. After one that nobody asked
        for, by a machine that did not hear of us, or at the end of an offer, another machine goes on."""
        if ended.state != "cancelled" or (self._stopping and not self._out_of):
            return ended
        if self._out_of in ("", "offer"):
            return replace(ended, state="failed", kind="infrastructure", lost=True)
        limits = self._market.limits
        words = (
            f"saved and stopped before ${limits.max_usd:.2f} were spent ({ended.message}); go on with "
            "MLPIPE_MAX_USD=MORE mlpipe resume RUN"
            if self._out_of == "money"
            else f"saved and stopped before --max-time was over ({ended.message})"
        )
        return Ended("failed", words, "infrastructure", ended.exit_code, ended.outcome)

    def _machine(self, rental: Rental) -> Machine | None:
        """Ours. A vendor that does not answer says nothing: the rental's end bounds how long."""
        try:
            return next(iter(self._market.rentals.return_others(rental.label)), None)
        except SubmitError as error:
            return Machine(rental.machine or "", rental.label, "starts", error.message)

    def _renew(self, *, force: bool = False) -> None:
        """The lease that the machine reads; at once when it is to save."""
        now = time.monotonic()
        if not force and not self._stopping and now - self._renewed < _RENEW_SECONDS:
            return
        self._beats += 1
        lease = {"beat": self._beats, "stop": self._stopping}
        try:
            self._store.put(f"{self._plan.attempt_key}/{machine.LEASE}", json.dumps(lease).encode())
            self._renewed = now
        except MlpipeError as error:
            self._note = error.message

    def _wait(self, seconds: float) -> None:
        """Less when the stage is asked to stop meanwhile."""
        state = self._stopping, self._killing
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and state == (self._stopping, self._killing):
            time.sleep(_LOOK_SECONDS)

    def _give_back(self, rental: Rental, term: Term, *, failed: bool = False) -> None:
        """As often as it takes, until the machine has ended its rental itself; and what came late with it."""
        market = self._market
        while True:
            self._note = f"returns machine {rental.machine}"
            try:
                counted = traffic_usd_of(self._store, self._plan.attempt_key, rental)
                market.rentals.give_back(rental, traffic_usd=counted, failed=failed)
                market.rentals.return_others("")
                return
            except MlpipeError as error:
                self._note = f"machine {rental.machine} is not returned yet: {error.message}"
                if time.time() > term.deadline:
                    return
                time.sleep(_AGAIN_SECONDS)


def traffic_usd_of(store: Store, attempt_key: str, rental: Rental) -> float:
    """As the machine counted its bytes, its image besides; as reserved, where it said nothing that can be:
    its owner has its keys, and may write there what they like, too much as well."""
    try:
        beat = from_json(machine.Beat, store.get(f"{attempt_key}/{machine.BEAT}"))
    except (MlpipeError, ValueError):
        return rental.traffic_usd
    if min(beat.received_bytes, beat.sent_bytes) < 0:
        return rental.traffic_usd
    down = (beat.received_bytes + IMAGE_BYTES) * rental.usd_per_byte_down
    return down + beat.sent_bytes * rental.usd_per_byte_up
