"""What a run has rented: written down before it is ordered, until it is known to be returned.

`runs/<run>/rentals/<stage>-<attempt>-<number>.json` outlives the driver, so that the next one counts the same
dollars, and finds the same machines. A machine carries its order's label, which is ours alone: after a lost
answer it is looked for before anything else is ordered, and one that comes too late is returned.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.plan.offers import HOUR, Quote
from mlpipe.store.base import Store
from mlpipe.submit.rented.vendor import LostError, Machine, Order, TakenError, Vendor

SETTLE_SECONDS = 60.0  # after a lost answer, for its machine to be listed
RETURN_SECONDS = 600.0  # for the vendor to take a machine back
_LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Rental:
    """One order. `asked`, `ended`: Unix seconds of the order, and since when nothing is paid any more; None:
    it is. `host`: the vendor's id of the machine itself, `machine`: of this rental of it, None as long as
    nobody knows it. `traffic_usd`: reserved, or as the machine counted it."""

    label: str
    host: str
    usd_per_hour: float
    usd_per_byte_down: float
    usd_per_byte_up: float
    traffic_usd: float
    asked: float
    machine: str | None = None
    ended: float | None = None
    failed: bool = False

    def usd(self, now: float) -> float:
        """Paid so far."""
        seconds = max(0.0, (self.ended if self.ended is not None else now) - self.asked)
        return seconds / HOUR * self.usd_per_hour + self.traffic_usd


class Rentals:
    """Of one run, in the hands of its driver."""

    def __init__(self, store: Store, run_id: str, vendor: Vendor) -> None:
        self._store, self._vendor = store, vendor
        self._folder = f"runs/{run_id}/rentals"
        self.prefix = f"mlpipe/{zlib.crc32(store.url.encode()):08x}/{run_id}/"

    def all(self) -> list[Rental]:
        """In the order of their names. Raises StoreError."""
        infos = self._store.list(self._folder)
        return [Rental(**json.loads(self._store.get(info.key))) for info in infos]

    def spent_usd(self) -> float:
        """By all of them, until now."""
        now = time.time()
        return sum(one.usd(now) for one in self.all())

    def rent(self, quote: Quote, order: Order) -> Rental | None:
        """`order.label` begins with `prefix`, and no other order has it. None: the offer was taken, or
        nothing came of an order whose answer was lost. Raises SubmitError."""
        offer = quote.offer
        rental = Rental(
            order.label,
            offer.machine,
            offer.usd_per_hour,
            offer.usd_per_byte_down,
            offer.usd_per_byte_up,
            quote.traffic_usd,
            time.time(),
        )
        self.keep(rental)
        try:
            machine: str | None = self._vendor.rent(offer, order)
        except TakenError:
            machine = None
            self._void(rental)
        except LostError:
            machine = self._arrived(order.label)
            if machine is None:
                self.keep(replace(rental, ended=time.time(), traffic_usd=0.0, failed=True))
        except SubmitError:
            self._void(rental)
            raise
        if machine is None:
            return None
        rental = replace(rental, machine=machine)
        try:
            self.keep(rental)
        except StoreError:  # nobody would find it by its name
            self._vendor.destroy(machine)
            raise
        return rental

    def give_back(self, rental: Rental, **known: Any) -> Rental:
        """Returns when the vendor lists it no more. `known`: of the rental, such as its traffic. Raises
        SubmitError when the vendor cannot be told, or keeps it for `RETURN_SECONDS`."""
        deadline = time.monotonic() + RETURN_SECONDS
        if rental.machine is not None:  # though it may not be listed yet
            self._vendor.destroy(rental.machine)
        while True:
            mine = [one for one in self._vendor.machines() if one.label == rental.label]
            if not mine:
                break
            if time.monotonic() > deadline:
                raise SubmitError(f"machine {mine[0].id} is still listed", hint="destroy it by hand")
            for machine in mine:
                self._vendor.destroy(machine.id)
            time.sleep(_LOOK_SECONDS)
        rental = replace(rental, **known, ended=time.time())
        self.keep(rental)
        return rental

    def return_others(self, label: str) -> list[Machine]:
        """Destroys what came too late of orders that were given up, which then count until now. `label`: of
        the machine that stays; "": none does. Returns that. Raises SubmitError."""
        ours = self.ours(self._vendor.machines())
        for late in ours:
            if late.label != label:
                self._vendor.destroy(late.id)
                for rental in self.all():
                    if rental.label == late.label:
                        self.keep(replace(rental, ended=time.time()))
        return [one for one in ours if one.label == label]

    def ours(self, machines: Iterable[Machine]) -> list[Machine]:
        """Those of this run, whoever ordered them."""
        return [one for one in machines if one.label.startswith(self.prefix)]

    def keep(self, rental: Rental) -> None:
        """Writes it down."""
        self._store.put(self._key(rental), json.dumps(asdict(rental), indent=2).encode())

    def _void(self, rental: Rental) -> None:
        """Costs nothing. It stays known: a refused bid may leave a machine all the same."""
        self.keep(replace(rental, ended=rental.asked, traffic_usd=0.0))

    def _key(self, rental: Rental) -> str:
        return f"{self._folder}/{rental.label.removeprefix(self.prefix).replace('/', '-')}.json"

    def _arrived(self, label: str) -> str | None:
        """After a lost answer: the machine that carries the label, as soon as it is listed."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            found = [one.id for one in self._vendor.machines() if one.label == label]
            if found:
                return found[0]
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_SECONDS)
