"""The client of Vast.ai against a stand-in of its API (`kit/vast.py`): what is asked, and what is believed
when answers are lost. The vendor's own SDK has driven the stand-in; golden/vast-sdk.json has what it sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import vast as stand_in
from kit.clock import Clock
from kit.vast import KEY, offer_row

from mlpipe._core import retry
from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.plan.hardware import GPUS
from mlpipe.plan.offers import GIB, Offer, Quote, UnfitError, hardware_of
from mlpipe.spec.model import Resources
from mlpipe.store.folder import FolderStore
from mlpipe.submit.rented import rentals, vast
from mlpipe.submit.rented.rentals import Rental, Rentals
from mlpipe.submit.rented.vendor import LostError, Need, Order, TakenError

pytestmark = pytest.mark.unit
SDK = json.loads((Path(__file__).parents[2] / "golden" / "vast-sdk.json").read_text())
RESOURCES = Resources(gpus_per_node=1, gpu="RTX-4090")
NEED = Need(num_gpus=1, disk_bytes=40 * GIB, min_reliability=0.95, spot=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (retry, rentals):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def account(clock: Clock) -> Iterator[stand_in.Vast]:
    with stand_in.vast([offer_row(11), offer_row(12, num_gpus=2)], runs=False, time=clock.time) as made:
        yield made


def client_of(account: stand_in.Vast) -> vast.Vast:
    return vast.Vast(account.url, KEY)


def order(label: str = "mlpipe/0/r/train/1/0") -> Order:
    return Order(label, "registry.example.com/mlpipe:1", "echo $A", 40 * GIB, {"A": "b"})


def offer_11() -> Offer:
    made = vast.offer_of(offer_row(11), False)
    assert made is not None
    return made


def test_requests_are_those_of_the_vendors_own_sdk(account: stand_in.Vast) -> None:
    client = client_of(account)
    found = client.offers(NEED)
    machine = client.rent(found[0], order())
    client.machines()
    client.destroy(machine)
    assert client.machines() == []
    sent = [[method, path, body] for method, path, body in account.requests]
    assert sent == [one for one in SDK["requests"] if "owner=me" not in one[1]]
    assert SDK["understood"]["made"] == [True, int(machine)]


def test_an_offer_is_read_in_units_of_the_planner() -> None:
    made = offer_11()
    assert (made.gpu, made.gpu_memory_bytes) == ("RTX-4090", GPUS["RTX-4090"].memory_bytes)
    assert (made.usd_per_hour, made.download_bytes_per_second) == (0.42, 1e8)
    assert (made.link_bytes_per_second, made.disk_bytes) == (22e9, 500 * GIB)
    bid = vast.offer_of(offer_row(11), True)
    assert bid is not None
    assert (bid.bid_usd_per_hour, bid.usd_per_hour) == (0.24, 0.26)


@pytest.mark.parametrize(
    ("row", "gpu"),
    [
        ({"gpu_name": "A100 SXM4", "gpu_ram": 40960}, "A100-40GB"),
        ({"gpu_name": "A100 SXM4", "gpu_ram": 81920}, "A100-80GB"),
        ({"gpu_name": "H100 PCIE", "gpu_ram": 81559}, None),  # slower than the catalogue's
        ({"gpu_name": "H100 SXM", "gpu_ram": 81559}, "H100-80GB"),
    ],
)
def test_a_name_is_a_line_of_the_catalogue_or_none(row: dict[str, Any], gpu: str | None) -> None:
    made = vast.offer_of(offer_row(1, **row), False)
    assert made is not None
    assert made.gpu == gpu
    if gpu is None:
        with pytest.raises(UnfitError, match="not in the catalogue"):
            hardware_of(made, RESOURCES)


@pytest.mark.parametrize(
    "broken",
    [{"dph_total": -1}, {"inet_down": 0}, {"inet_up": None}, {"reliability": 0}, {"dph_total": float("nan")}],
)
def test_an_offer_that_nobody_can_compute_with_is_none(broken: dict[str, Any]) -> None:
    assert vast.offer_of(offer_row(1, **broken), False) is None


def test_a_state_is_what_the_container_does_and_the_vendor_grants() -> None:
    def state(**row: Any) -> str:
        return vast.machine_of({"id": 1, "label": "l", **row}).state

    assert state(actual_status=None, cur_state="unloaded") == "starts"
    assert state(actual_status="loading", cur_state="running") == "starts"
    assert state(actual_status="running", cur_state="running") == "runs"
    assert state(actual_status="running", cur_state="stopped") == "gone"  # outbid
    for ended in ("exited", "stopped", "offline"):
        assert state(actual_status=ended, cur_state="running") == "gone"


def test_a_search_and_a_list_are_asked_again_and_an_order_never(account: stand_in.Vast) -> None:
    client, faults = client_of(account), ["busy", "limited", "lost", "unheard"]
    for ask in (lambda: client.offers(NEED), client.machines):
        account.requests.clear()
        account.faults = lambda number: faults[number] if number < len(faults) else None
        ask()
        assert len(account.requests) == len(faults) + 1
    for fault in ("lost", "unheard", "busy"):
        account.requests.clear()
        account.faults = lambda number, fault=fault: fault
        with pytest.raises(LostError):
            client.rent(offer_11(), order())
        assert len(account.requests) == 1
    account.requests.clear()
    account.faults = lambda number: "limited" if number < 2 else None  # said before anything is done
    other = replace(offer_11(), id="12")
    assert client.rent(other, order())
    assert len(account.requests) == 3
    account.faults = lambda number: None
    with pytest.raises(TakenError, match="no such ask"):
        client.rent(other, order())


def test_the_key_is_not_sent_elsewhere_and_not_shown(account: stand_in.Vast) -> None:
    with pytest.raises(SubmitError, match="refused") as refused:
        vast.Vast(account.url, "wrong").offers(NEED)
    assert refused.value.kind == "input"
    assert "wrong" not in str(refused.value)
    account.requests.clear()
    account.faults = lambda number: "moved"
    with pytest.raises(SubmitError, match="302"):
        client_of(account).offers(NEED)
    assert [path for _, path, _ in account.requests] == ["/api/v0/bundles/"]


def test_without_a_key_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VAST_API_KEY", raising=False)
    with pytest.raises(SubmitError, match="VAST_API_KEY is not set"):
        vast.Vast.from_environment()


def quote_of(made: Offer) -> Quote:
    return Quote(made, hardware_of(made, RESOURCES), 100.0, 3600.0, 0.42, 0.0, 720.0)


def rent_and_return(held: Rentals, made: Offer, number: int) -> Rental | None:
    """As a handle does: whatever happens between, the machine goes back."""
    rental = held.rent(quote_of(made), order(f"{held.prefix}train/1/{number}"))
    return None if rental is None else held.give_back(rental)


@given(
    st.lists(st.sampled_from([None, "lost", "unheard", "busy", "limited"]), max_size=12),
    st.integers(0, 4),
)
@settings(max_examples=60)
def test_whatever_is_lost_one_machine_is_rented_and_returned(
    account: stand_in.Vast,
    clock: Clock,
    tmp_path_factory: pytest.TempPathFactory,
    faults: list[str | None],
    at: int,
) -> None:
    """Faults at any request. At no time are there two machines, what was ordered is counted to the cent, and
    at the end there is none."""
    store = FolderStore(tmp_path_factory.mktemp("store"))
    held = Rentals(store, "r", client_of(account))
    account.past.clear()
    account.requests.clear()
    account.faults = lambda number: faults[number - at] if 0 <= number - at < len(faults) else None
    most = watch_number_of_machines(account)
    made = [rent_and_return(held, offer_11(), number) for number in range(3)]
    account.faults = lambda number: None
    assert account.instances == {}
    assert max(most, default=0) <= 1
    assert len(account.past) >= sum(one is not None for one in made)
    assert len(set(account.labels())) == len(account.labels())  # no order was carried out twice
    assert all(one.ended is not None for one in held.all())
    assert held.spent_usd() >= account.usd() - 1e-9


def watch_number_of_machines(account: stand_in.Vast) -> list[int]:
    """After each request."""
    seen: list[int] = []
    answer: Callable[..., Any] = stand_in.Vast.answer

    def watched(*arguments: Any) -> Any:
        result = answer(account, *arguments)
        seen.append(len(account.instances))
        return result

    account.answer = watched  # type: ignore[method-assign]
    return seen


def test_what_is_rented_is_known_to_the_next_driver(
    account: stand_in.Vast, clock: Clock, tmp_path: Path
) -> None:
    store = FolderStore(tmp_path)
    rental = Rentals(store, "r", client_of(account)).rent(
        quote_of(offer_11()), order(f"{Rentals(store, 'r', client_of(account)).prefix}train/1/0")
    )
    assert rental is not None
    clock.now += 1800
    after = Rentals(store, "r", client_of(account))
    assert after.spent_usd() == pytest.approx(0.21, abs=1e-3)
    assert after.all() == [rental]
    assert [one.id for one in after.ours(client_of(account).machines())] == [rental.machine]
    assert Rentals(store, "other", client_of(account)).ours(client_of(account).machines()) == []
    after.give_back(after.all()[0])
    clock.now += 7200
    assert after.spent_usd() == pytest.approx(account.usd(), abs=0.005)


def test_what_came_late_is_returned_and_counts_until_then(
    account: stand_in.Vast, clock: Clock, tmp_path: Path
) -> None:
    held = Rentals(FolderStore(tmp_path), "r", client_of(account))
    late, stays = (order(f"{held.prefix}train/1/{number}") for number in range(2))
    for offer_id, one in (("11", late), ("12", stays)):
        assert held.rent(replace(quote_of(offer_11()), offer=replace(offer_11(), id=offer_id)), one)
    given_up = next(one for one in held.all() if one.label == late.label)
    held.keep(replace(given_up, ended=given_up.asked))
    stranger = client_of(account)
    clock.now += 3600
    assert [one.label for one in held.return_others(stays.label)] == [stays.label]
    assert [one.label for one in stranger.machines()] == [stays.label]
    assert [round(one.usd(clock.now), 2) for one in held.all()] == [0.42, 0.42]


def test_a_machine_that_cannot_be_written_down_is_destroyed(
    account: stand_in.Vast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    put = store.put

    def away(key: str, data: bytes) -> None:
        if account.instances:
            raise StoreError("the store is away")
        put(key, data)

    monkeypatch.setattr(store, "put", away)
    held = Rentals(store, "r", client_of(account))
    with pytest.raises(StoreError, match="away"):
        held.rent(quote_of(offer_11()), order(f"{held.prefix}train/1/0"))
    assert account.labels() == [f"{held.prefix}train/1/0"]
    assert account.instances == {}


def test_a_machine_that_is_not_listed_yet_is_destroyed(account: stand_in.Vast, tmp_path: Path) -> None:
    held = Rentals(FolderStore(tmp_path), "r", client_of(account))
    rental = held.rent(quote_of(offer_11()), order(f"{held.prefix}train/1/0"))
    assert rental is not None
    account._page = lambda query: {"instances": []}  # type: ignore[method-assign]
    held.give_back(rental)
    assert account.instances == {}


def test_a_machine_that_is_not_taken_back_is_named(account: stand_in.Vast, tmp_path: Path) -> None:
    held = Rentals(FolderStore(tmp_path), "r", client_of(account))
    rental = held.rent(quote_of(offer_11()), order(f"{held.prefix}train/1/0"))
    assert rental is not None
    assert rental.machine is not None
    account.faults = lambda number: "busy"
    with pytest.raises(SubmitError, match="cannot be reached"):
        held.give_back(rental)
    assert held.all()[0].ended is None  # it is still paid
