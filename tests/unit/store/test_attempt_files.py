"""What the processes of an attempt tell each other through the store: how it ended, what its machines can do,
what is to be profiled, how many replicas are wanted and where they meet."""

from __future__ import annotations

import json
import math

import pytest

from mlpipe._core.errors import DamagedError
from mlpipe.store import outcome, preflight, profiles, replicas, wanted
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome
from mlpipe.store.preflight import Checked
from mlpipe.store.profiles import Profile, ProfileRequest

pytestmark = pytest.mark.unit
STAGE = "runs/r/stages/train"
ATTEMPT = f"{STAGE}/attempt-1"


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path)


def keys(store, below=""):
    return [info.key for info in store.list(below)]


ENDED = AttemptOutcome(
    "failed", "infrastructure", outcome.NODE_FAULT, "m", "w", "h", 7, "c", 2, 6, 1.5, {"rank": 3, "more": [1]}
)


def test_an_outcome_is_read_as_it_was_written_and_of_another_version_as_far_as_it_goes(store):
    key = f"{ATTEMPT}/outcome.json"
    assert outcome.read_outcome(store, key) is None
    outcome.write_outcome(store, key, ENDED)
    assert outcome.read_outcome(store, key) == ENDED
    document = json.loads(store.get(key))
    assert (document["outcome"], document["rank"], "details" in document) == ("failed", 3, False)
    for name in ("cause", "restarts", "rank"):
        del document[name]
    store.put(key, json.dumps({**document, "new": 1}).encode())
    older = outcome.read_outcome(store, key)
    assert (older.cause, older.restarts, older.step) == (None, 0, 7)
    assert older.details == {"more": [1], "new": 1}


CHECKED = Checked(
    {"n0": {"flops": 1.0}, "n1": {}},
    {"n1": ["slow", "hot"]},
    [("n2", "n3", "slow link")],
    2.5,
    {"n4": ["busy"]},
    unread={"n1": ["nvidia-smi knows no field"]},
)


def test_a_preflight_is_read_with_who_got_slow_since(store):
    assert preflight.read_checked(store, ATTEMPT) is None
    preflight.write_slow(store, ATTEMPT, b'{"n0": 2.5}')
    assert preflight.read_checked(store, ATTEMPT) is None
    preflight.write_checked(store, ATTEMPT, CHECKED)
    found = preflight.read_checked(store, ATTEMPT)
    assert found.slow == {"n0": 2.5}
    assert preflight.to_avoid([found], 0.5) == ("n0", "n1", "n3")
    assert found.words == ["n1: slow; hot", "n2 and n3: slow link"]
    assert [name for name in ("n0", "n1", "n2", "n3", "n4", "n5") if found.names(name)] == [
        "n1", "n2", "n3", "n4"
    ]  # fmt: skip
    preflight.write_slow(store, ATTEMPT, b'{"n0": Infinity, "n5": NaN, "n6": "3"}')
    assert preflight.read_checked(store, ATTEMPT).slow == {"n6": 3.0}
    assert keys(store) == [f"{ATTEMPT}/preflight.json", f"{ATTEMPT}/preflight/slow.json"]
    assert preflight.probe_key(ATTEMPT, 3) == f"{ATTEMPT}/preflight/node-3"
    store.delete([f"{ATTEMPT}/preflight/slow.json"])
    assert preflight.read_checked(store, ATTEMPT) == CHECKED
    document = json.loads(store.get(f"{ATTEMPT}/preflight.json"))
    del document["busy"], document["unread"]  # as an older version wrote it
    older = preflight.checked_from(document)
    assert (older.busy, older.unread) == ({}, {})
    for odd in (b"{", b"[]", b"{}", b"[" * 10_000, json.dumps({**document, "seconds": None}).encode()):
        store.put(f"{ATTEMPT}/preflight.json", odd)
        assert preflight.read_checked(store, ATTEMPT) is None


def test_what_replicas_say_of_their_nodes_is_read_and_may_be_anything(store):
    assert preflight.slow_replicas(store, ATTEMPT) == {}
    odd = [b"{", b"[1]", b'{"n1": "x"}', b'{"n1": Infinity}', b'{"a b": 3}', b"[" * 10_000, b"{}"]
    for number, words in enumerate([b'{"n1": 2.5}', *odd]):
        preflight.write_slow(store, ATTEMPT, words, number)
    preflight.write_slow(store, ATTEMPT, b'{"n2": 2.5}')
    expected = {0: ("n1", 2.5), **dict.fromkeys(range(1, 1 + len(odd)))}
    assert preflight.slow_replicas(store, ATTEMPT) == expected
    for node in ("n1", "n2"):
        replicas.leave_out(store, ATTEMPT, node)
    assert replicas.left_out(store, ATTEMPT) == ["n1", "n2"]


def test_of_the_attempts_before_it_one_avoids_who_was_at_fault(store):
    for number in (1, 3, 4):
        preflight.write_checked(store, f"{STAGE}/attempt-{number}", Checked(faults={f"n{number}": ["slow"]}))
    preflight.write_slow(store, f"{STAGE}/attempt-3", b'{"slow": 2.5, "fit": 1.9}')
    assert preflight.nodes_to_avoid(store, STAGE, 4, 0.5) == ("n1", "n3", "slow")
    assert preflight.nodes_to_avoid(store, STAGE, 1, 0.5) == ()
    assert preflight.to_avoid([Checked(slow={"a": 2.0, "b": math.nextafter(2.0, 3.0)})], 0.5) == ("b",)
    assert preflight.to_avoid([Checked(faults={"n" * 253: [], "n" * 254: []})], 0.5) == ("n" * 253,)


def test_of_each_pair_one_is_avoided():
    def pairs(*named):
        return Checked(pairs=[(*one, "slow") for one in named])

    assert preflight.to_avoid([pairs("ab", "cd")], 0.5) == ("b", "d")
    assert preflight.to_avoid([pairs("ab", "bc")], 0.5) == ("b",)
    assert preflight.to_avoid([pairs("ab"), pairs("ab")], 0.5) == ("a", "b")
    assert preflight.to_avoid([pairs("ab", "cd"), Checked(faults={"a": ["hot"]})], 0.5) == ("a", "d")


def test_a_profile_is_asked_for_once_taken_once_and_withdrawn_by_whoever_asked(store):
    request = ProfileRequest("mine", profiles.MOST_STEPS, tuple(range(profiles.MOST_NAMED_RANKS)), True)
    assert profiles.ask(store, ATTEMPT, request)
    assert not profiles.ask(store, ATTEMPT, ProfileRequest("other", 1))
    profiles.withdraw(store, ATTEMPT, "other")
    assert profiles.is_asked(store, ATTEMPT)
    assert keys(store) == [f"{ATTEMPT}/profiles/wanted.json"]
    assert profiles.take(store, ATTEMPT) == request
    assert not profiles.is_asked(store, ATTEMPT)
    assert profiles.take(store, ATTEMPT) is None
    assert profiles.ask(store, ATTEMPT, ProfileRequest("mine", 1))
    assert profiles.take(store, ATTEMPT) == ProfileRequest("mine", 1)
    assert profiles.ask(store, ATTEMPT, ProfileRequest("mine", 1))
    profiles.withdraw(store, ATTEMPT, "mine")
    profiles.withdraw(store, ATTEMPT, "mine")
    assert not profiles.is_asked(store, ATTEMPT)
    store.put(f"{ATTEMPT}/profiles/wanted.json", b"of another version")
    profiles.withdraw(store, ATTEMPT, "mine")
    assert profiles.is_asked(store, ATTEMPT)
    for steps, ranks in ((0, ()), (profiles.MOST_STEPS + 1, ()), (1, (*request.ranks, 99))):
        store.delete(keys(store))
        assert profiles.ask(store, ATTEMPT, ProfileRequest("mine", steps, tuple(ranks)))
        assert profiles.take(store, ATTEMPT) is None
        assert not profiles.is_asked(store, ATTEMPT)


def test_the_first_eight_ranks_are_traced_or_those_that_there_are_of_the_named():
    assert ProfileRequest("a", 1).ranks_of(9) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ProfileRequest("a", 1).ranks_of(2) == [0, 1]
    assert ProfileRequest("a", 1, (3, 0, -1, 4)).ranks_of(4) == [3, 0]


def test_profiles_are_listed_by_their_steps_with_who_has_finished(store):
    late, early = (
        Profile("a", step, 2, (0, 2, 1), memory=False, time=float(-step)) for step in (1_000_000, 20)
    )
    profiles.write_profile(store, ATTEMPT, late)
    profiles.write_profile(store, ATTEMPT, early)
    assert profiles.ask(store, ATTEMPT, ProfileRequest("mine", 1))
    assert profiles.list_profiles(store, ATTEMPT) == [early, late]
    folder = f"{ATTEMPT}/profiles/step-000020"
    assert profiles.folder_of(ATTEMPT, 20) == folder
    assert profiles.trace_key(ATTEMPT, 20, 3) == f"{folder}/rank-3.json.gz"
    assert profiles.memory_key(ATTEMPT, 20, 3) == f"{folder}/rank-3.memory.pickle"
    for rank in (1, 2, 5):
        store.put(profiles.summary_key(ATTEMPT, 20, rank), b"{}")
    store.put(profiles.trace_key(ATTEMPT, 20, 0), b"")
    assert profiles.finished_ranks(store, ATTEMPT, early) == [2, 1]
    assert profiles.finished_ranks(store, ATTEMPT, late) == []


def test_how_many_replicas_are_wanted_and_how_each_ended(store):
    assert replicas.wanted(store, ATTEMPT) is None
    replicas.want(store, ATTEMPT, 3)
    replicas.want(store, ATTEMPT, 12)
    assert replicas.wanted(store, ATTEMPT) == 12
    assert replicas.outcomes(store, ATTEMPT) == {}
    for name in ("outcome-replica-0", "outcome-replica-11", "outcome", "outcome-replica-x", "1"):
        outcome.write_outcome(store, f"{ATTEMPT}/{name}.json", AttemptOutcome("done", message=name))
    outcome.write_outcome(store, f"{ATTEMPT}/below/outcome-replica-2.json", AttemptOutcome("done"))
    found = replicas.outcomes(store, ATTEMPT)
    assert {number: one.message for number, one in found.items()} == {
        0: "outcome-replica-0", 11: "outcome-replica-11"
    }  # fmt: skip
    assert {f"{ATTEMPT}/replicas"} == {key for key in keys(store, ATTEMPT) if key.endswith("replicas")}


def test_the_seat_is_taken_by_one_and_by_another_only_when_it_was_not_renewed(store):
    assert replicas.coordinator(store, ATTEMPT) == ""
    first, second = (replicas.Seat(store, ATTEMPT, where) for where in ("t1@a:1", "t2@b:2"))
    taken, _ = first.try_to_take("")
    assert taken
    assert replicas.coordinator(store, ATTEMPT) == "t1@a:1"
    assert keys(store) == [f"{ATTEMPT}/coordinator"]
    taken, seen = second.try_to_take("")
    assert not taken
    assert first.renew()
    taken, newer = second.try_to_take(seen)  # it was renewed meanwhile
    assert not taken
    assert newer != seen
    assert second.try_to_take(newer)[0]
    assert replicas.coordinator(store, ATTEMPT) == "t2@b:2"
    etags = []
    for _ in range(3):
        assert second.renew()
        etags.append(store.get_with_etag(f"{ATTEMPT}/coordinator")[1])
    assert len(set(etags)) == 3, "who waits sees each renewal"
    assert not first.renew()
    assert replicas.coordinator(store, ATTEMPT) == "t2@b:2"


def test_a_seat_is_kept_when_only_an_answer_was_lost(store, monkeypatch):
    seat = replicas.Seat(store, ATTEMPT, "t@a:1")
    assert seat.try_to_take("")[0]
    real = store.put_if_match
    monkeypatch.setattr(store, "put_if_match", lambda *what: (real(*what), False)[1])
    assert seat.renew()
    assert seat.renew()
    monkeypatch.setattr(store, "exists", lambda key: False)
    late = replicas.Seat(store, ATTEMPT, "t@b:2")  # another was quicker
    assert late.try_to_take("") == (False, "")
    monkeypatch.undo()
    assert replicas.coordinator(store, ATTEMPT) == "t@a:1"


@pytest.mark.parametrize(
    "junk", [b"", b"\xff", b"null", b"{", b"[" * 9000, b'{"where": {}}', b"[1, null, []]"]
)
def test_what_workers_write_beside_replicas_is_no_bug_and_no_word_of_what_is_submitted(store, junk):
    """Their driver, who reads it, ended with a bug."""
    for name in ("replicas", "left-out", "coordinator"):
        store.put(f"{ATTEMPT}/{name}", junk)
    assert replicas.wanted(store, ATTEMPT) is None
    assert replicas.left_out(store, ATTEMPT) == []
    assert "@" not in replicas.coordinator(store, ATTEMPT)
    seat = replicas.Seat(store, ATTEMPT, "t@a:1")
    assert seat.try_to_take(seat.try_to_take("")[1])[0]
    store.put(f"{ATTEMPT}/coordinator", junk)
    assert not seat.renew()
    store.put(f"{ATTEMPT}/left-out", b'["node-1", "a b", "x\\ny", "--wrap=rm", 7]')
    replicas.leave_out(store, ATTEMPT, "node-2")
    assert replicas.left_out(store, ATTEMPT) == ["node-1", "node-2"]
    store.put(f"{ATTEMPT}/profiles/step-000001/profile.json", junk)
    with pytest.raises(DamagedError, match="not of a profile") as caught:
        profiles.list_profiles(store, ATTEMPT)
    assert str(caught.value.where).endswith("step-000001/profile.json")


def test_a_stage_is_asked_for_until_it_is_taken_up(store):
    for stage in ("train", "corpus", "train"):
        wanted.ask(store, "r", stage)
    wanted.ask(store, "other", "evaluate")
    store.put("runs/r/wanted/below/evaluate", b"by another hand")  # which nobody would ever take away
    assert wanted.asked(store, "r") == ["corpus", "train"]
    store.delete(["runs/r/wanted/below/evaluate"])
    wanted.take(store, "r", ["train", "evaluate"])
    assert [wanted.is_asked(store, "r", stage) for stage in ("train", "corpus")] == [False, True]
    assert wanted.asked(store, "other") == ["evaluate"]
    assert keys(store, "runs/r") == ["runs/r/wanted/corpus"]


@pytest.mark.parametrize(
    "lie",
    [
        "",
        "[]",
        "{",
        '{"outcome": 3}',
        '{"outcome": "done", "step": "x"}',
        '{"outcome": "done", "time": 1e999}',
    ],
)
def test_an_outcome_that_no_launcher_wrote_is_damaged(store, lie):
    outcome.write_outcome(store, "o", AttemptOutcome("done", step=3, details={"passed": True}))
    assert outcome.read_outcome(store, "o") == AttemptOutcome("done", step=3, details={"passed": True})
    store.put("o", lie.encode())
    with pytest.raises(DamagedError, match="not an attempt's outcome"):
        outcome.read_outcome(store, "o")
