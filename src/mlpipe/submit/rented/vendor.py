"""What a vendor of machines must be able to do: the seam of `--to rented`.

The next vendor is one module like `vast.py` and a line in `VENDORS`. Who rents, watches and returns
(`market.py`, `rentals.py`, `handle.py`) knows no vendor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol

from mlpipe._core.errors import SubmitError

if TYPE_CHECKING:
    from mlpipe.plan.offers import Offer

VENDORS = {"vast": "mlpipe.submit.rented.vast:Vast"}
DEFAULT = next(iter(VENDORS))

# "starts": not yet running; "runs"; "gone": it was taken away, broke or ended by itself, and may still cost
State = Literal["starts", "runs", "gone"]


@dataclass(frozen=True)
class Need:
    """What offers are asked for. `num_gpus`: exactly; 0: any machine, for its cores. `spot`: also those that
    others may outbid."""

    num_gpus: int
    disk_bytes: int
    min_reliability: float
    spot: bool


@dataclass(frozen=True)
class Order:
    """What is to run on a machine. `label`: ours alone; the vendor keeps it with the machine. `script`: for
    `sh`, which is the container's only process. `env` holds secrets, none of them the account's."""

    label: str
    image: str
    script: str
    disk_bytes: int
    env: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Machine:
    """One that the account has now. `says`: the vendor's own words of its state."""

    id: str
    label: str
    state: State
    says: str


class TakenError(Exception):
    """The offer is gone, and nothing was rented."""


class LostError(SubmitError):
    """No answer, or half of one: the machine may have been rented."""


class Vendor(Protocol):
    """Every call has a deadline, raises SubmitError, and may be made from any thread. Those that change
    nothing, or that may be done twice, are repeated within; `rent` only where it certainly did nothing."""

    name: str

    def offers(self, need: Need) -> list[Offer]:
        """What can be rented now."""

    def rent(self, offer: Offer, order: Order) -> str:
        """The machine's id. Raises TakenError, LostError."""

    def machines(self) -> list[Machine]:
        """All that the account has."""

    def destroy(self, machine_id: str) -> None:
        """No error where it is gone already."""

    def give_back(self) -> str:
        """A command for `sh` by which a machine ends its own rental, with a key that the vendor gave it for
        nothing else."""


def connect(name: str) -> Vendor:
    """With the account's key from the environment. Raises SubmitError (input)."""
    if name not in VENDORS:
        raise SubmitError(
            f"there is no vendor {name!r}", hint=f"write one of {', '.join(VENDORS)}", kind="input"
        )
    module, _, attribute = VENDORS[name].partition(":")
    vendor: Vendor = getattr(import_module(module), attribute).from_environment()
    return vendor
