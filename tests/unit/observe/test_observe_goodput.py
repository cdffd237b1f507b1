"""Every rank-second is in exactly one bucket, whatever the records of a run look like."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.synthetic_run import BEGIN, Life, stage_state, write_run, write_train_stage

from mlpipe._core.record_lines import parse
from mlpipe._core.records import Launched, Record, Submitted
from mlpipe.observe.buckets import NAMES
from mlpipe.observe.goodput import Attempt, Ledger, account, add
from mlpipe.observe.runview import view_run
from mlpipe.plan.mesh import Mesh
from mlpipe.store.folder import FolderStore
from mlpipe.store.runs import append_event

pytestmark = pytest.mark.unit


def line(kind: str, time: float, **fields: float | None) -> Record:
    record = parse({"kind": kind, "time": time, **fields})
    assert record is not None
    return record


def start(time: float, step: int = 0, spawn: float = 2.0, restore: float = 0.0) -> Record:
    return line("start", time, start_step=step, seconds_since_spawn=spawn, restore_seconds=restore)


def step(time: float, number: int, **parts: float | None) -> Record:
    return line("step", time, step=number, **{"loss": 1.0, "tokens": 10, **parts})


def test_one_attempt_second_by_second():
    records = [
        start(110, spawn=5, restore=2),
        step(120, 1, data_seconds=1, compute_seconds=6, collective_seconds=2),
        step(130, 2, data_seconds=1, compute_seconds=5, collective_seconds=2, bubble_seconds=1),
        line("checkpoint", 130, step=1, stall_seconds=0.5),
        step(
            140, 3, data_seconds=1, compute_seconds=4, collective_seconds=2, checkpoint_seconds=1,
            membership_seconds=1,
        ),
        line("end", 143),
    ]  # fmt: skip
    ledger = account([Attempt(100, 103, 145, 2, {0: records, 1: records})], price_usd_per_device_hour=36.0)
    one = {
        "queue": 3, "startup": 2, "init": 3, "restore": 2, "data": 3, "compute": 15, "communication": 6,
        "bubble": 1, "membership": 1, "save": 1 + 3, "validate": 0, "lost": 0, "hang": 0, "idle": 3 + 2,
        "stopped": 0,
    }  # fmt: skip
    assert ledger.seconds == pytest.approx({name: 2 * seconds for name, seconds in one.items()})
    assert ledger.tokens == 60
    assert ledger.goodput_ratio == pytest.approx(44 / 90)
    assert ledger.cost_usd == pytest.approx(0.9)
    assert ledger.badput_usd == pytest.approx(0.46)
    assert ledger.usd_per_million_tokens == pytest.approx(0.9 / 60 * 1e6)
    told = {
        "total_rank_seconds": ledger.total, "paid_rank_seconds": ledger.paid, "kept_tokens": 60,
        "goodput_ratio": ledger.goodput_ratio, "price_usd_per_device_hour": 36.0, "cost_usd": ledger.cost_usd,
        "badput_usd": ledger.badput_usd, "usd_per_million_tokens": ledger.usd_per_million_tokens,
    }  # fmt: skip
    assert ledger.document() == {"rank_seconds": ledger.seconds, **told}
    assert add([ledger, ledger]).tokens == 120


def test_tokens_are_those_of_the_ranks_that_count_them():
    """Of a pipeline the last stage, of 16 ranks that share samples one: those read stand for their like."""
    silent = [start(110), step(120, 1, tokens=0), line("end", 143)]
    tells = [start(110), step(120, 1), line("end", 143)]
    mesh = Mesh(pp=2, dp_shard=8, tp=2)
    counting = frozenset(filter(mesh.holds_loss, range(mesh.world_size)))
    assert counting == set(range(16, 32, 2))
    read = {**dict.fromkeys(range(15), silent), 16: tells}
    assert account([Attempt(100, 103, 145, 32, read, counting=counting)]).tokens == 80
    assert account([Attempt(100, 103, 145, 32, {**read, 18: tells}, counting=counting)]).tokens == 80


def test_a_save_between_steps_counts_if_its_step_was_kept():
    def saved(time: float, number: int, seconds: float) -> Record:
        return line("checkpoint", time, step=number, stall_seconds=seconds)

    life = [start(0, spawn=0), step(10, 1, compute_seconds=6), saved(10, 1, 1)]
    life += [step(20, 2, compute_seconds=6), saved(20, 2, 2)]
    again = [start(20, step=1, spawn=0), step(30, 2, compute_seconds=6)]
    ledger = account([Attempt(0, 0, 30, 1, {0: [*life, *again]})])
    assert (ledger.seconds["save"], ledger.seconds["idle"]) == (1, 3 + 4)


def test_validation_is_neither_a_step_nor_idle():
    """Before the next step, behind the last one, and of a step that was lost: then it is lost, too."""

    def validated(time: float, number: int, seconds: float) -> Record:
        return line("validation", time, step=number, seconds=seconds)

    life = [start(0, spawn=0), step(10, 1, compute_seconds=6), validated(13, 1, 3)]
    life += [step(20, 2, compute_seconds=6), validated(22, 2, 2)]
    again = [start(22, step=1, spawn=0), step(30, 2, compute_seconds=6), validated(34, 2, 4), line("end", 35)]
    ledger = account([Attempt(0, 0, 35, 1, {0: [*life, *again]})])
    assert ledger.seconds["validate"] == 3 + 4
    assert (ledger.seconds["compute"], ledger.seconds["lost"], ledger.seconds["save"]) == (12, 7 + 2, 1)
    assert ledger.total == 35


def test_a_killed_rank_loses_what_is_done_again_and_a_hang_is_told_from_it():
    life = [start(10), step(20, 1, compute_seconds=10), step(30, 2, compute_seconds=10)]
    again = [start(45, step=1), step(55, 2, compute_seconds=10)]
    ledger = account([Attempt(0, 0, 65, 1, {0: [*life, *again]})])
    assert ledger.seconds["lost"] == pytest.approx(10 + 13 + 10)  # step 2, to the new process, step 3's start
    assert ledger.seconds["compute"] == pytest.approx(20)
    assert ledger.tokens == 20
    hung = account([Attempt(0, 0, 65, 1, {0: [*life, *again]}, hung=True)])
    assert hung.seconds["hang"] == pytest.approx(10)
    resumed = account([Attempt(0, 0, 40, 1, {0: life}), Attempt(500, 510, 560, 2, {0: [start(520, step=1)]})])
    assert resumed.seconds["stopped"] == 2 * (500 - 40)
    assert resumed.total == pytest.approx(40 + 2 * 60 + 2 * (500 - 40))
    assert resumed.seconds["queue"] == pytest.approx(20)
    assert resumed.seconds["lost"] == pytest.approx(10 + 10 + 2 * 40)


def test_a_step_that_is_not_finite_is_lost_and_a_long_run_read_in_part_counts_whole():
    steps = [step(10 * n, n, compute_seconds=9) for n in range(1, 101)]
    whole = account([Attempt(0, 0, 1000, 4, {rank: [start(0, spawn=0), *steps] for rank in range(4)})])
    part = account([Attempt(0, 0, 1000, 4, {0: [start(0, spawn=0), *steps[9::10]]})])
    assert part.seconds == pytest.approx(whole.seconds)
    assert part.tokens == whole.tokens == 4000
    bad = step(20, 2, compute_seconds=9, loss=None)
    assert account([Attempt(0, 0, 20, 1, {0: [start(0), steps[0], bad]})]).seconds["lost"] == 10


def test_steps_that_updated_nothing_are_lost_wherever_they_lie():
    bad = [step(20, 2, compute_seconds=9, loss=None), step(30, 3, compute_seconds=9, skipped=True)]
    life = [start(0, spawn=0), step(10, 1, compute_seconds=9), *bad, step(40, 4, compute_seconds=9)]
    ledger = account([Attempt(0, 0, 40, 1, {0: life})])
    assert (ledger.seconds["lost"], ledger.seconds["compute"], ledger.tokens) == (20, 18, 20)


def test_all_saves_between_steps_count():
    saves = [line("checkpoint", 9, step=1, stall_seconds=seconds) for seconds in (1, 2)]
    ledger = account([Attempt(0, 0, 10, 1, {0: [start(0, spawn=0), *saves, step(10, 1, compute_seconds=5)]})])
    assert (ledger.seconds["save"], ledger.seconds["idle"]) == (3, 2)


def test_what_records_leave_out_is_nothing():
    """Of older versions, or cut: no time to load, to start or to stall, no tokens; a loss that is not there
    is not one that is not finite."""
    life = [
        line("start", 10),
        line("checkpoint", 12, step=1),
        line("step", 20, step=1, compute_seconds=4),
    ]
    ledger = account([Attempt(0, 10, 20, 1, {0: life, 1: [start(0), step(5, 1)]})])  # there is no rank 1
    told = {name: seconds for name, seconds in ledger.seconds.items() if seconds}
    assert told == {"queue": 10, "compute": 4, "idle": 6}
    assert ledger.tokens == 0


def test_an_attempt_without_a_record_has_only_begun():
    ledger = account([Attempt(0, 4, 10, 2, {}), Attempt(10, 10, 11, 2, {})])
    assert (ledger.seconds["queue"], ledger.seconds["startup"], ledger.total) == (8, 2 * (6 + 1), 22)


@st.composite
def attempts(draw):
    """Attempts of any shape, their clocks running backwards now and then."""
    moments = st.floats(0, 1e4, allow_nan=False)
    parts = ("data_seconds", "compute_seconds", "collective_seconds", "checkpoint_seconds", "stall_seconds")
    found = []
    for _ in range(draw(st.integers(1, 3))):
        num_ranks = draw(st.integers(1, 4))
        records = {}
        for rank in range(draw(st.integers(0, num_ranks))):
            lines: list[Record] = []
            for _ in range(draw(st.integers(0, 12))):
                kind = draw(st.sampled_from(["start", "step", "step", "step", "checkpoint", "end", "signal"]))
                told: dict[str, Any] = {"time": draw(moments), "step": draw(st.integers(0, 9))}
                if kind == "start":
                    told |= {"start_step": draw(st.integers(0, 9)), "seconds_since_spawn": draw(moments)}
                    told["restore_seconds"] = draw(moments)
                else:
                    told |= {part: draw(st.one_of(st.none(), moments)) for part in parts}
                lines.append(line(kind, **told))
            records[rank] = lines
        begin, end = sorted((draw(moments), draw(moments)))
        launched = draw(st.one_of(st.none(), moments))
        found.append(Attempt(begin, launched, end, num_ranks, records, draw(st.booleans())))
    return found


def test_attempts_fill_the_wall_time_of_a_run_and_only_they_are_paid():
    """Killed in its second step, gone on with five minutes later, cancelled, and ended the next day."""
    lives = [
        Attempt(
            0, 5, 40, 4, {0: [start(10), step(20, 1, compute_seconds=9), step(30, 2, compute_seconds=9)]}
        ),
        Attempt(340, 350, 400, 4, {0: [start(360, step=1), step(375, 2, compute_seconds=14)]}),
        Attempt(90_000, 90_010, 90_100, 4, {0: [start(90_020, step=2), step(90_050, 3, compute_seconds=29)]}),
    ]
    ledger = account(lives, price_usd_per_device_hour=3600.0)
    assert ledger.total == pytest.approx(4 * 90_100, rel=0.001)
    assert ledger.seconds["stopped"] == 4 * (300 + 89_600)
    assert ledger.cost_usd == pytest.approx(4 * (40 + 60 + 100))
    assert ledger.goodput_ratio == pytest.approx(4 * (9 + 14 + 29) / ledger.total)
    assert ledger.badput_usd == pytest.approx(4 * (200 - 9 - 14 - 29))
    assert add([ledger, ledger]).cost_usd == pytest.approx(2 * ledger.cost_usd)


STALLED = line("checkpoint", 5, step=1, stall_seconds=100)  # longer than there was time between steps


@example([Attempt(0, 0, 10, 1, {0: [start(0), STALLED, step(10, 1, compute_seconds=9)]})])
@settings(max_examples=60)
@given(attempts())
def test_the_buckets_sum_to_ranks_times_wall_time(many):
    ledger = account(many)
    expected = sum(one.num_ranks * (one.ended - one.submitted) for one in many)
    assert math.isclose(ledger.paid, expected, rel_tol=1e-9, abs_tol=1e-6)
    assert set(ledger.seconds) == set(NAMES)
    assert min(ledger.seconds.values()) >= -1e-9
    assert add([ledger, ledger]).total == pytest.approx(2 * ledger.total)


def test_without_a_price_there_is_no_cost_and_without_time_no_ratio():
    assert Ledger().document()["cost_usd"] is None
    assert Ledger().goodput_ratio is None
    hour = Attempt(0, 0, 3600, 1, {})
    assert add([account([hour], 1.0), account([hour], 3.0)]).cost_usd == pytest.approx(4.0)
    assert add([account([hour], 1.0), account([hour])]).cost_usd is None


def test_badput_of_several_prices_is_what_each_was_paid():
    good = Attempt(0, 0, 3600, 1, {0: [start(0, spawn=0.0), step(3600, 1, compute_seconds=3600.0)]})
    whole = add([account([good], 1.0), account([Attempt(0, 0, 3600, 1, {})], 3.0)])
    assert whole.cost_usd == pytest.approx(4.0)
    assert whole.badput_usd == pytest.approx(3.0)


@pytest.mark.parametrize(("outcome", "end"), [(None, 700), ({"outcome": "done", "time": BEGIN + 620}, 620)])
def test_what_its_driver_found_under_way_or_over_is_counted_from_launch_to_end(tmp_path, outcome, end):
    """A task of a sweep's array, which Slurm starts by itself, whoever drives the sweep; and is killed, or is
    done before somebody looks."""
    store = FolderStore(tmp_path)
    write_train_stage(store, "task", [Life(1, 0, 0, 20)], steps=20, outcome=outcome)
    write_run(store, "task", {"train": stage_state(begin=640, seconds=60)})
    for event in (Launched(time=BEGIN + 590), Submitted(time=BEGIN + 640)):
        append_event(store, "runs/task/stages/train/attempt-1", event)
    (stage,) = view_run(store, "task").stages
    assert stage.ledger is not None
    assert stage.ledger.total == pytest.approx(2 * (end - 590))
    assert stage.ledger.seconds["compute"] > 0
    assert stage.ledger.seconds["queue"] == 0
