"""A stage on a rented machine, in made-up time: its budget, its interruptions, lost answers at any request.
The machine is a stand-in's, and does nothing but what the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit import vast as stand_in
from kit.clock import Clock
from kit.rendered import pipeline_of
from kit.vast import KEY, offer_row

from mlpipe._core import retry
from mlpipe._core.errors import SubmitError
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.plan import Plan
from mlpipe.spec.model import Pipeline
from mlpipe.store import runs
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.submit.executor import Ended
from mlpipe.submit.rented import clear as clearing
from mlpipe.submit.rented import handle, market, rentals, vast
from mlpipe.submit.rented.handle import RentedHandle
from mlpipe.submit.rented.keys import longest_seconds, worker_environment
from mlpipe.submit.rented.limits import Limits
from mlpipe.submit.rented.machine import BEAT, LEASE, relocated, traffic
from mlpipe.submit.rented.market import Market
from mlpipe.submit.rented.order import script, told
from mlpipe.submit.rented.vendor import Order

pytestmark = pytest.mark.unit
FAULTS = st.sampled_from([None, None, "lost", "unheard", "late", "busy", "limited"])
Fate = Literal["done", "interrupted", "hangs", "saves"]


@dataclass
class Life:
    """Of all machines of an account. `fate`: what happens `after_seconds` of a rental; one that hangs hears
    nothing, others save when they are asked to."""

    account: stand_in.Vast
    store: FolderStore
    fate: Fate
    after_seconds: float
    beat: bytes = b'{"received_bytes": 0, "sent_bytes": 0}'

    def look(self) -> None:
        for one in list(self.account.instances.values()):
            key = f"runs/r/stages/train/attempt-{one.body['label'].split('/')[4]}"
            passed = self.account.time() - one.began
            if passed > 60:
                self.store.put(f"{key}/{BEAT}", self.beat)
            asked = json.loads(self.store.get(f"{key}/{LEASE}"))["stop"]
            if self.fate == "done" and passed > self.after_seconds:
                write_outcome(self.store, f"{key}/outcome.json", AttemptOutcome("done"))
            elif self.fate == "interrupted" and passed > self.after_seconds:
                one.actual, one.granted = "exited", "stopped"
            elif self.fate != "hangs" and asked:
                write_outcome(self.store, f"{key}/outcome.json", AttemptOutcome("saved", message="at step 7"))


class Living(Clock):
    """Time in which machines live, though nobody asks for them."""

    def __init__(self, life: Life, clock: Clock) -> None:
        self.__dict__ = clock.__dict__
        self.life = life

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.life.look()


class Driver:
    """What of a driver concerns a machine."""

    def __init__(self, folder: Path, account: stand_in.Vast, clock: Clock) -> None:
        self.store, self.account, self.clock = FolderStore(folder), account, clock
        resources = "stages.train.resources={gpus_per_node: 1, gpu: RTX-4090}"
        self.pipeline: Pipeline = pipeline_of("quickstart", resources, "image=i")
        text, stages = "version: 1", ["corpus", "train"]
        runs.create_run(self.store, "r", text, self.pipeline.digest, stages, "rented", {})
        self.life = Life(account, self.store, "done", 0.0)
        answer: Callable[..., Any] = stand_in.Vast.answer

        def watched(*arguments: Any) -> Any:
            self.life.look()
            return answer(account, *arguments)

        account.answer = watched  # type: ignore[method-assign]

    def market(self, max_usd: float, **limits: Any) -> Market:
        run, client = runs.read_run(self.store, "r"), vast.Vast(self.account.url, KEY)
        return Market(self.store, run, client, Limits(max_usd, **limits))

    def plan(self, here: Market, attempt: int = 1) -> Plan:
        hardware = here.hardware(self.pipeline, "train")
        plan = build_plan(self.pipeline, "train", Start("r", attempt, self.store.url), hardware)
        self.store.put(f"{plan.attempt_key}/plan.json", plan.to_json().encode())
        return plan

    def run(self, here: Market, attempt: int = 1) -> Ended:
        made = RentedHandle(here, self.pipeline, self.plan(here, attempt))
        made._thread.join(300)
        ended = made.poll()
        assert ended is not None
        return ended


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (retry, rentals, handle, market):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(handle, "_POLL_SECONDS", 60.0)
    monkeypatch.setattr(handle, "_LOOK_SECONDS", 60.0)
    return made


@pytest.fixture
def account(clock: Clock) -> Iterator[stand_in.Vast]:
    offers = [offer_row(11), offer_row(12, dph_total=0.5)]
    with stand_in.vast(offers, runs=False, time=clock.time) as made:
        yield made


@pytest.fixture
def driver(tmp_path: Path, account: stand_in.Vast, clock: Clock) -> Driver:
    return Driver(tmp_path, account, clock)


@given(
    st.floats(0.3, 1.2),
    st.sampled_from(["done", "interrupted", "hangs", "saves"]),
    st.floats(0, 9000),
    st.lists(FAULTS, max_size=10),
    st.integers(0, 12),
)
@example(0.5, "hangs", 0.0, [], 0)
@example(0.5, "saves", 0.0, ["unheard"], 1)
@example(0.5, "saves", 0.0, ["late"], 1)
@settings(max_examples=8)
def test_never_over_budget_and_every_machine_goes_back(
    tmp_path_factory: pytest.TempPathFactory,
    clock: Clock,
    max_usd: float,
    fate: Fate,
    after_seconds: float,
    faults: list[str | None],
    at: int,
) -> None:
    offers = [offer_row(11), offer_row(12, dph_total=0.5)]
    with stand_in.vast(offers, runs=False, time=clock.time) as account:
        driver = Driver(tmp_path_factory.mktemp("store"), account, clock)
        driver.life = Life(account, driver.store, fate, after_seconds)
        account.faults = lambda number: faults[number - at] if 0 <= number - at < len(faults) else None
        here = driver.market(max_usd)
        ended = driver.run(here)
        assert account.instances == {}
        assert account.usd() <= max_usd
        assert here.rentals.spent_usd() >= account.usd() - 1e-9
        assert all(one.ended is not None for one in here.rentals.all())
        assert len(set(account.labels())) == len(account.labels())
        if not any(faults):
            expected = {"done": ("done", False), "interrupted": ("failed", True), "hangs": ("failed", False)}
            late = after_seconds > 1800 * max_usd  # before that the money may be over
            assert late or (ended.state, ended.lost) == expected.get(fate, ("failed", False))


LIES = [
    b"[]",
    b'{"received_bytes": "many", "sent_bytes": 0}',
    b'{"received_bytes": -1000000000000000, "sent_bytes": 0}',
    b'{"received_bytes": 1e999, "sent_bytes": 0}',
]


def test_what_the_owner_of_a_machine_says_of_its_bytes_frees_no_money_and_keeps_no_machine(
    driver: Driver, account: stand_in.Vast
) -> None:
    """Whose keys write there: it kept its machine rented, or had thousands of dollars added to the budget."""
    account.offers[:] = [row | {"inet_down_cost": 0.02} for row in account.offers]
    driver.life.after_seconds = 600.0
    here = driver.market(5.0)
    for number, driver.life.beat in enumerate(LIES, start=1):
        assert driver.run(here, attempt=number).state == "done"
        assert account.instances == {}
        assert [one.ended is not None for one in here.rentals.all()] == [True] * number
    assert 0.2 < account.usd() <= here.rentals.spent_usd() < 5.0


def test_a_save_for_want_of_money_says_how_to_go_on(driver: Driver, account: stand_in.Vast) -> None:
    driver.life.fate = "saves"
    ended = driver.run(driver.market(0.5))
    assert (ended.state, ended.kind) == ("failed", "infrastructure")
    assert "before $0.50 were spent (at step 7)" in ended.message
    assert "MLPIPE_MAX_USD" in ended.message
    assert 0.2 < account.usd() <= 0.5
    with pytest.raises(SubmitError, match="are more than"):
        driver.plan(driver.market(0.5))
    again = driver.run(driver.market(1.0), attempt=2)  # with more, what was spent counts
    assert "before $1.00" in again.message
    assert 0.5 < account.usd() <= 1.0


def test_a_machine_that_comes_late_is_returned_and_paid(driver: Driver, account: stand_in.Vast) -> None:
    driver.life.after_seconds = 3600.0
    account.faults = lambda number: "late" if number == 1 else None
    here = driver.market(5.0)
    assert driver.run(here).state == "done"
    assert [label.rpartition("/")[2] for label in account.labels()] == ["0", "1"]  # the late one went first
    assert account.instances == {}
    assert here.rentals.spent_usd() >= account.usd()


def test_time_ends_it_as_money_does(driver: Driver, account: stand_in.Vast, clock: Clock) -> None:
    driver.life.fate = "saves"
    began = clock.now
    ended = driver.run(driver.market(100.0, max_seconds=3600.0))
    assert "--max-time" in ended.message
    assert clock.now - began <= 3600


def test_at_the_end_of_an_offer_another_machine_goes_on(driver: Driver, account: stand_in.Vast) -> None:
    driver.life.fate = "saves"
    account.offers[0]["duration"] = 5000.0
    ended = driver.run(driver.market(5.0))
    assert (ended.state, ended.lost) == ("failed", True)
    assert driver.clock.now <= 1000.0 + 5000.0


def test_after_an_interruption_another_machine_is_taken(driver: Driver, account: stand_in.Vast) -> None:
    driver.life.fate, driver.life.after_seconds = "interrupted", 600.0
    here = driver.market(5.0)
    assert driver.run(here).lost
    driver.life.fate = "done"
    assert driver.run(here, attempt=2).state == "done"
    assert [one.offer["machine_id"] for one in account.past] == [1011, 1012]


def test_what_is_too_dear_is_refused_before_anything_is_rented(
    driver: Driver, account: stand_in.Vast
) -> None:
    with pytest.raises(SubmitError, match=r"the cheapest, 11, .* are more than"):
        driver.plan(driver.market(0.001))
    assert account.labels() == []


def test_a_kill_returns_the_machine_at_once(driver: Driver, account: stand_in.Vast, clock: Clock) -> None:
    driver.life.fate = "hangs"
    here = driver.market(50.0)
    made = RentedHandle(here, driver.pipeline, driver.plan(here))
    rented = threading.Event()
    answer: Callable[..., Any] = account.answer

    def watched(method: str, *arguments: Any) -> Any:
        if account.instances and method == "GET":
            rented.set()
        return answer(method, *arguments)

    account.answer = watched  # type: ignore[method-assign]
    assert rented.wait(60)
    made.kill()
    made._thread.join(60)
    assert account.instances == {}
    ended = made.poll()
    assert ended is not None
    assert ended.state == "cancelled"


def test_the_next_driver_returns_what_the_one_before_left(
    driver: Driver, account: stand_in.Vast, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = driver.market(5.0)
    plan = driver.plan(here)
    quote = here.candidates(plan)[0]
    left = RentedHandle.__new__(RentedHandle)  # one whose driver died
    left.__dict__.update(_plan=plan, _market=here, _pipeline=driver.pipeline, _store=driver.store)
    left.__dict__.update(_stopping=False, _beats=0, _renewed=0.0)
    term = left._term(quote)
    assert term is not None
    rental = left._rent(quote, term, 0)
    assert rental is not None
    assert account.instances
    driver.life.fate = "saves"
    monkeypatch.setattr(clearing, "time", Living(driver.life, clock))
    clearing.clear(driver.market(5.0), runs.read_run(driver.store, "r"), timeout_seconds=600)
    assert clock.now < 1100  # and nobody waited longer than for that
    assert account.instances == {}
    assert driver.store.exists(f"{plan.attempt_key}/outcome.json")  # it saved before
    assert [one.ended is not None for one in here.rentals.all()] == [True]


def test_the_term_ends_before_the_money(driver: Driver) -> None:
    here = driver.market(0.5)
    plan = driver.plan(here)
    term = here.term(here.candidates(plan)[0])
    seconds = term.seconds
    assert seconds * 0.42 / 3600 <= 0.5 < (seconds + 1) * 0.42 / 3600
    assert (term.deadline, term.ending) == (driver.clock.now + seconds, "money")
    text = script("true", term)
    assert f"left=$(( {int(term.deadline - 60)} - " in text
    assert f"left={int(seconds - 60)};" in text
    told_to = json.loads(told(plan, term, "/c", 900.0)["MLPIPE_RENTAL"])
    assert told_to["save_after_seconds"] == seconds - plan.launch.shutdown_seconds - 120


def test_a_machine_gets_no_keys_but_a_workers() -> None:
    mine = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "r"}
    worker = {"MLPIPE_WORKER_AWS_ACCESS_KEY_ID": "w", "MLPIPE_WORKER_AWS_SECRET_ACCESS_KEY": "s"}
    assert worker_environment("/a/folder", "r", 60, mine) == {}
    given = worker_environment("s3://bucket/p", "r", 60, {**mine, **worker})
    assert given == {"AWS_ACCESS_KEY_ID": "w", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "r"}
    nobody = {**mine, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}
    with pytest.raises(SubmitError, match="lends no keys") as refused:
        worker_environment("s3://bucket/p", "r", 60, nobody)
    assert "secret" not in str(refused.value)
    assert longest_seconds("s3://bucket/p", mine) == 12 * 3600  # of AWS
    assert longest_seconds("s3://bucket/p", nobody) == longest_seconds("/f", mine) == float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_usd": "five"},
        {"max_usd": "0"},
        {"max_usd": "nan"},
        {"max_usd": "-1"},
        {"max_usd": "1", "spot": "maybe"},
        {"max_usd": "1", "gpu": ["4090"]},
        {"max_usd": "1", "min_reliability": "1.5"},
        {"max_usd": "1", "max_time": "soon"},
        {"max_usd": "1", "vendor": "nobody"},
    ],
)
def test_a_limit_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SubmitError) as refused:
        Limits.of_place(wrong)
    assert refused.value.kind == "input"
    assert refused.value.hint


def test_more_money_stands_above_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Limits.of_place({"max_usd": "5", "gpu": ["any"]}) == Limits(5.0, gpus=())
    monkeypatch.setenv("MLPIPE_MAX_USD", "8")
    assert Limits.of_place({"max_usd": "5", "max_time": "2 h"}) == Limits(8.0, 7200.0)


def test_a_machine_that_is_gone_already_is_paid_no_longer(driver: Driver, account: stand_in.Vast) -> None:
    """It ended its own rental while nobody drove."""
    here = driver.market(5.0)
    order = Order(f"{here.rentals.prefix}train/1/0", "i", "", 1, {})
    assert here.rentals.rent(here.candidates(driver.plan(here))[0], order) is not None
    account.past.append(account.instances.popitem()[1])
    clearing.clear(driver.market(5.0), runs.read_run(driver.store, "r"), timeout_seconds=600)
    assert [one.ended is not None for one in here.rentals.all()] == [True]


def test_a_plan_is_of_the_machines_own_folders() -> None:
    pipeline = pipeline_of("quickstart")
    start = Start("r", 1, "s3://b/p", {"corpus": "/home/me/cache/outputs/t"})
    plan = build_plan(pipeline, "train", start, stage_hardware(pipeline, "train"))
    assert "/home/me" in plan.to_json()
    moved = relocated(plan.to_json(), "/home/me/cache", Path("/tmp/c"))
    assert "/tmp/c/outputs/t" in moved.to_json()
    assert "/home/me" not in moved.to_json()


def test_traffic_is_counted_without_the_loopback() -> None:
    text = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop\n"
        "    lo: 99 1 0 0 0 0 0 0 99 1 0 0 0 0 0 0\n"
        "  eth0: 1000 2 0 0 0 0 0 0 300 1 0 0 0 0 0 0\n"
    )
    assert traffic(text) == (1000, 300)
