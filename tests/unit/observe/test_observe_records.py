"""Records come back whole: over attempts and restarts, torn lines, and while they grow."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.synthetic_run import Life, life_records, write_records

from mlpipe._core.records import decode_line, encode
from mlpipe.observe.records import (
    Follower,
    list_attempts,
    list_ranks,
    merge,
    read_records,
    records_key,
)
from mlpipe.store.open import open_store

pytestmark = pytest.mark.unit

STAGE = "runs/r/stages/train"


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def test_attempts_and_ranks_are_found_in_order(store):
    for attempt in (1, 2, 10):
        for rank in (0, 2, 11):
            write_records(store, f"{STAGE}/attempt-{attempt}", rank, [{"kind": "step", "step": 1}])
    store.put(f"{STAGE}/checkpoints/step-000000001/1-ab/MANIFEST.json", b"{}")
    assert list_attempts(store, STAGE) == [1, 2, 10]
    assert list_ranks(store, f"{STAGE}/attempt-10") == [0, 2, 11]
    assert list_attempts(store, "runs/r/stages/other") == []
    assert list_ranks(store, f"{STAGE}/attempt-3") == []


def test_nothing_written_is_no_records(store):
    assert read_records(store, f"{STAGE}/attempt-1", 0) == []


def test_a_torn_line_loses_itself_only_also_when_a_successor_went_on_behind_it(store):
    log = store.open_log(records_key(f"{STAGE}/attempt-1", 0))
    log.write(encode("step", rank=0, restart=0, step=1))
    log.write(encode("step", rank=0, restart=0, step=2)[:30])
    log.write(encode("start", rank=0, restart=1, start_step=1))
    log.write(b"not ours\n[1]\n{}\n\xff\xfe\n")
    log.write(encode("step", rank=0, restart=1, step=2))
    log.write(encode("step", rank=0, restart=1, step=3)[:-5])
    log.close()
    found = read_records(store, f"{STAGE}/attempt-1", 0)
    assert [(record["kind"], record["restart"]) for record in found] == [
        ("step", 0),
        ("start", 1),
        ("step", 1),
    ]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_nothing(data):
    record = decode_line(data)
    assert record is None or "kind" in record


def test_thinning_keeps_the_last_step_and_everything_that_is_no_step(store):
    key = f"{STAGE}/attempt-1"
    written = life_records(Life(1, 0, 0, 1234), 0, steps=2000)
    write_records(store, key, 0, written)
    thin = read_records(store, key, 0, max_steps=100)
    steps = [record["step"] for record in thin if record["kind"] == "step"]
    assert 90 <= len(steps) <= 101
    assert steps == sorted(steps)
    assert steps[-1] == 1234
    assert [r for r in thin if r["kind"] != "step"] == [r for r in written if r["kind"] != "step"]
    assert read_records(store, key, 0, max_steps=1234) == written


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 40))
def test_a_follower_sees_each_record_once_however_the_bytes_arrive(tmp_path_factory, cuts, count):
    store = open_store(str(tmp_path_factory.mktemp("follow")))
    data = b"".join(encode("step", rank=0, restart=0, step=step) for step in range(count))
    follower, seen = Follower(store, f"{STAGE}/attempt-1"), []
    assert follower.poll() == []
    log, at = store.open_log(records_key(f"{STAGE}/attempt-1", 0)), 0
    for cut in [*cuts, len(data)]:
        log.write(data[at : at + cut])
        at += cut
        seen += follower.poll()
    log.close()
    assert [record["step"] for record in seen] == list(range(count))


@st.composite
def lives(draw):
    """Starts that go on from any step reached before, as (attempt, restart, first, last)."""
    reached, attempt, restart, out = 0, 1, 0, []
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.integers(0, reached))
        last = draw(st.integers(first, first + 12))
        out.append((attempt, restart, first, last))
        reached = max(first, last)
        if draw(st.booleans()):
            attempt, restart = attempt + 1, 0
        else:
            restart += 1
    return out


@given(lives())
def test_a_merged_timeline_holds_each_step_as_it_was_done_last(many):
    attempts: dict[int, list[dict]] = {}
    expected: dict[int, tuple[int, int]] = {}
    done = 0
    for attempt, restart, first, last in many:
        records = attempts.setdefault(attempt, [])
        records.append({"kind": "start", "start_step": first, "restart": restart})
        expected = {step: who for step, who in expected.items() if step <= first}
        for step in range(first + 1, last + 1):
            records.append({"kind": "step", "step": step, "who": (attempt, restart)})
            expected[step] = (attempt, restart)
            done += 1
    timeline = merge(attempts)
    assert [(r["step"], r["who"]) for r in timeline.steps] == sorted(expected.items())
    assert timeline.num_rolled_back == done - len(expected)
    assert [(s["attempt"], s["restart"]) for s in timeline.starts] == [(a, r) for a, r, _, _ in many]


def test_a_step_done_again_without_a_start_supersedes_too_and_odd_records_do_no_harm():
    records = [
        {"kind": "step", "step": 1}, {"kind": "step", "step": 2}, {"kind": "step", "step": 2, "again": True},
        {"kind": "step", "step": "x"}, {"kind": "step"}, {"kind": "start"}, {"kind": "news"},
    ]  # fmt: skip
    timeline = merge({1: records[:3]})
    assert timeline.steps == [{"kind": "step", "step": 1}, {"kind": "step", "step": 2, "again": True}]
    assert merge({1: records}).steps == [], "a start without a step begins at 0"
    json.dumps(merge({1: records}).others)
