"""Records come back whole: over attempts and restarts, torn lines, and while they grow."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.synthetic_run import Life, life_records, write_records

from mlpipe._core.record_lines import decode_line, encode, parse
from mlpipe._core.records import EVENTS, OF_A_RANK, Record, Step
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


def record(kind: str, **told: object) -> Record:
    found = parse({"kind": kind, "time": 1.0, "rank": 0, **told})
    assert found is not None
    return found


def line(kind: str, **told: object) -> bytes:
    return encode(record(kind, **told))


STAGE = "runs/r/stages/train"


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def test_attempts_and_ranks_are_found_in_order(store):
    for attempt in (1, 2, 10):
        for rank in (0, 2, 11):
            write_records(
                store, f"{STAGE}/attempt-{attempt}", rank, [{"kind": "step", "time": 1.0, "step": 1}]
            )
    store.put(f"{STAGE}/checkpoints/step-000000001/1-ab/MANIFEST.json", b"{}")
    assert list_attempts(store, STAGE) == [1, 2, 10]
    assert list_ranks(store, f"{STAGE}/attempt-10") == [0, 2, 11]
    assert list_attempts(store, "runs/r/stages/other") == []
    assert list_ranks(store, f"{STAGE}/attempt-3") == []


def test_nothing_written_is_no_records(store):
    assert read_records(store, f"{STAGE}/attempt-1", 0) == []


def test_a_torn_line_loses_itself_only_also_when_a_successor_went_on_behind_it(store):
    log = store.open_log(records_key(f"{STAGE}/attempt-1", 0))
    log.write(line("step", restart=0, step=1))
    log.write(line("step", restart=0, step=2)[:30])
    log.write(line("start", restart=1, start_step=1))
    log.write(b"not ours\n[1]\n{}\n\xff\xfe\n")
    log.write(line("step", restart=1, step=2))
    log.write(line("step", restart=1, step=3)[:-5])
    log.close()
    found = read_records(store, f"{STAGE}/attempt-1", 0)
    assert [(record.kind, record.restart) for record in found] == [
        ("step", 0),
        ("start", 1),
        ("step", 1),
    ]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_nothing(data):
    record = decode_line(data)
    assert record is None or isinstance(record, Record)


def test_thinning_keeps_the_last_step_and_everything_that_is_no_step(store):
    key = f"{STAGE}/attempt-1"
    written = life_records(Life(1, 0, 0, 1234), 0, steps=2000)
    write_records(store, key, 0, written)
    thin = read_records(store, key, 0, max_steps=100)
    steps = [record.step for record in thin if isinstance(record, Step)]
    assert 90 <= len(steps) <= 101
    assert steps == sorted(steps)
    assert steps[-1] == 1234
    every = [parse(line) for line in written]
    assert [r for r in thin if not isinstance(r, Step)] == [r for r in every if not isinstance(r, Step)]
    assert read_records(store, key, 0, max_steps=1234) == every


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 40))
def test_a_follower_sees_each_record_once_however_the_bytes_arrive(tmp_path_factory, cuts, count):
    store = open_store(str(tmp_path_factory.mktemp("follow")))
    data = b"".join(line("step", restart=0, step=step) for step in range(count))
    follower, seen = Follower(store, f"{STAGE}/attempt-1"), []
    assert follower.poll() == []
    log, at = store.open_log(records_key(f"{STAGE}/attempt-1", 0)), 0
    for cut in [*cuts, len(data)]:
        log.write(data[at : at + cut])
        at += cut
        seen += follower.poll()
    log.close()
    assert [record.step for record in seen] == list(range(count))


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
    attempts: dict[int, list[Record]] = {}
    expected: dict[int, tuple[int, int]] = {}
    done = 0
    for attempt, restart, first, last in many:
        records = attempts.setdefault(attempt, [])
        records.append(record("start", start_step=first, restart=restart))
        expected = {step: who for step, who in expected.items() if step <= first}
        for step in range(first + 1, last + 1):
            records.append(record("step", step=step, restart=restart, tokens=attempt))
            expected[step] = (attempt, restart)
            done += 1
    timeline = merge(attempts)
    assert [(r.step, (r.tokens, r.restart)) for r in timeline.steps] == sorted(expected.items())
    assert timeline.num_rolled_back == done - len(expected)
    assert [(number, one.restart) for number, one in timeline.starts] == [(a, r) for a, r, _, _ in many]


def test_a_step_done_again_without_a_start_supersedes_too_and_a_start_without_a_step_begins_at_0():
    records = [record("step", step=1), record("step", step=2), record("step", step=2, tokens=7)]
    timeline = merge({1: records})
    assert [(step.step, step.tokens) for step in timeline.steps] == [(1, None), (2, 7)]
    assert merge({1: [*records, record("start")]}).steps == []


def test_lines_that_lie_are_read_as_far_as_they_are_true():
    for foreign in ([], "x", {}, {"kind": 3, "time": 1.0}, {"kind": "step", "time": 1.0}, {"kind": "start"}):
        assert parse(foreign) is None
    for number in ("x", True, 2.5, None):
        assert parse({"kind": "step", "time": 1.0, "step": number}) is None
    start = parse({"kind": "start", "time": 1, "steps": "many", "notes": ["a", 3], "mesh": "dp_shard=2"})
    assert (start.steps, start.notes, start.mesh, start.world_size) == (None, [], None, None)
    step = parse({"kind": "step", "time": 1.0, "step": 4, "loss": None, "grad_norm": "high", "seconds": 1})
    assert (math.isnan(step.loss), step.grad_norm, step.seconds, step.lr) == (True, None, 1, None)
    assert parse({"kind": "step", "time": 1.0, "step": 4}).loss is None, "not said is not: not finite"
    found = parse({"kind": "validation", "time": 1.0, "metrics": {"loss": None, "accuracy": 1}})
    assert math.isnan(found.metrics.pop("loss"))
    assert found.metrics == {"accuracy": 1}
    assert parse({"kind": "validation", "time": 1.0, "metrics": {"loss": "low"}}).metrics is None
    assert json.loads(encode(replace(found, metrics={"loss": math.nan})))["metrics"] == {"loss": None}
    endless = json.loads('{"kind": "step", "time": 1.0, "step": 4, "loss": 1e999, "seconds": NaN}')
    step = parse(endless | {"tokens": 10**400})
    assert (step.loss, step.seconds, step.tokens) == (None, None, None)
    for when in (-1.0, 1e308, math.inf, 10**60):  # no calendar has it
        assert parse({"kind": "step", "time": when, "step": 4}) is None
    assert parse({"kind": "validation", "time": 1.0, "metrics": {"loss": math.inf}}).metrics is None
    news = parse({"kind": "news", "time": 2.0, "rank": 1, "what": "of a later version"})
    assert (news.kind_name, news.rank, news.line["what"]) == ("news", 1, "of a later version")


@pytest.mark.parametrize("kind", [*OF_A_RANK, *EVENTS], ids=lambda kind: kind.kind)
def test_what_is_written_is_read_and_no_other_name_can_be(kind):
    told = {"int": 3, "float": 0.5, "MaybeNan": 0.5, "str": "x", "bool": True}
    told |= {
        "list[str]": ["x"],
        "list[int]": [3],
        "dict[str, int]": {"x": 3},
        "dict[str, float]": {"x": 0.5, "y": 1},
    }
    full = kind(**{field.name: told[field.type.removesuffix(" | None")] for field in fields(kind)})
    assert decode_line(encode(full)) == full
    assert json.loads(encode(full)).keys() == {"v", "kind", *(field.name for field in fields(kind))}
    page = (Path(__file__).parents[3] / "docs/reference/records.md").read_text()
    part = page[page.index(f"### {kind.kind}\n") :].partition("\n###")[0]
    for field in set(fields(kind)) - set(fields(Record)):
        assert re.search(rf"^\| `{field.name}` \| \w.* \| \S.* \|$", part, re.M), f"{field.name} has no words"
    with pytest.raises(TypeError):
        kind(**full.values(), lenght=1)


def test_a_loss_that_is_not_finite_is_null_in_its_line_and_what_nobody_said_is_not_in_it():
    bad = record("step", step=1, loss=None, tokens=5)
    assert json.loads(encode(bad)) == {
        "v": 1, "kind": "step", "time": 1.0, "rank": 0, "restart": 0, "step": 1, "loss": None,
        "grad_norm": None, "tokens": 5, "target_tokens": None, "seconds": None, "data_seconds": None,
        "compute_seconds": None, "collective_seconds": None, "memory_bytes": None,
    }  # fmt: skip
    assert math.isnan(decode_line(encode(bad)).loss)


def test_records_of_the_first_version_are_read():
    lines = (Path(__file__).parent / "records_v1.jsonl").read_bytes().split(b"\n")
    start, step, save, signal, end = filter(None, map(decode_line, lines))
    assert (start.strategy, start.start_step, start.notes) == ("fsdp", 100, [])
    assert (step.step, step.loss, step.tokens, step.target_tokens) == (101, 4.5, 2048, None)
    assert (save.key, save.error, signal.signal, end.outcome) == ("runs/r/c", None, "SIGTERM", "saved")
