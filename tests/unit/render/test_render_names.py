"""Whatever a run is called, its objects have names that the API server takes and that no other run's have."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.rendered import QUICKSTART, pipeline_of, plan_of

import mlpipe
from mlpipe._core.ids import NAME_PATTERN
from mlpipe.render.names import config_name, driver_name, gang_name, label_value, labels

pytestmark = pytest.mark.unit
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035: a Service's name begins with a letter
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
PLAN = plan_of(pipeline_of("quickstart", *QUICKSTART), "train")
# Few letters, so that different parts often join to the same text.
NAMES = st.one_of(
    st.from_regex(NAME_PATTERN, fullmatch=True),
    st.lists(st.sampled_from(["a", "a1", "b", "-", ".", "_", "driver", "x", "0"]), min_size=1, max_size=6)
    .map("".join)
    .filter(lambda text: re.fullmatch(NAME_PATTERN, text)),
)
WHO = st.one_of(
    st.tuples(st.just("gang"), NAMES, NAMES, st.integers(1, 12_345_678)),
    st.tuples(st.just("driver"), NAMES, st.none() | NAMES, st.just(0)),
)


def near(who: tuple[str, str, Any, int]) -> list[tuple[str, str, Any, int]]:
    """Told from it by a sign between letters, or by where the run's id ends."""
    kind, run_id, stage, attempt = who
    text = run_id if stage is None else f"{run_id}-{stage}"
    ends = [at for at, letter in enumerate(text) if letter == "-"]
    others = [(text[:at], text[at + 1 :]) for at in ends] + [(run_id.translate(SIGNS), stage)]
    return [(kind, run, of, attempt) for run, of in others if of is None or re.fullmatch(NAME_PATTERN, of)]


SIGNS = str.maketrans("-._", "._-")
PAIRS = st.one_of(
    st.tuples(WHO, WHO), WHO.flatmap(lambda one: st.tuples(st.just(one), st.sampled_from(near(one))))
)


def name_of(who: tuple[str, str, Any, int]) -> str:
    kind, run_id, stage, attempt = who
    if kind == "driver":
        return driver_name(run_id, stage)
    return gang_name(replace(PLAN, run_id=run_id, stage=stage, attempt=attempt))


@given(WHO)
@example(("gang", "r" * 63, "s" * 63, 10**9))
@example(("gang", "0" + "-" * 62, "-"[:0] + "0" + "_" * 62, 1))
def test_names_are_dns_labels_with_room_for_the_pods(who: tuple[str, str, Any, int]) -> None:
    name = name_of(who)
    assert DNS_LABEL.fullmatch(name)
    assert len(f"{name}-worker-0-99999-abcde") <= 63
    assert len(config_name(name, "{}")) <= 253


@given(PAIRS)
@example((("gang", "a-b", "c", 1), ("gang", "a", "b-c", 1)))
@example((("gang", "a", "b", 1), ("gang", "a-b-a1", "b", 1)))
@example((("driver", "a-b", None, 0), ("driver", "a", "b", 0)))
@example((("driver", "a-b", "c", 0), ("driver", "a", "b-c", 0)))
@example((("gang", "a.b", "c", 1), ("gang", "a_b", "c", 1)))
@example((("gang", "r" * 60, "s", 1), ("gang", "r" * 61, "s", 1)))
@example((("gang", "a", "x", 12345678), ("gang", "a", "x", 1234567)))
def test_two_never_share_a_name(pair: tuple[tuple[str, str, Any, int], tuple[str, str, Any, int]]) -> None:
    one, other = pair
    assert (name_of(one) == name_of(other)) == (one == other)


def test_usual_names_are_plain() -> None:
    who = replace(PLAN, run_id="demo-20260101-000000-0000", stage="train", attempt=2)
    assert gang_name(who) == "demo-20260101-000000-0000-train-a2"
    assert driver_name("demo-20260101-000000-0000") == "demo-20260101-000000-0000-driver"
    long = replace(who, run_id="a-team-with-a-long-name-20260101-000000-0000")
    assert gang_name(long) == "a-team-with-a-long-name-train-a2-x" + gang_name(long)[-8:]


@given(NAMES, NAMES)
@example("a.", "a.x1c0d5f2e")
def test_label_values_are_valid_and_tell_apart(one: str, other: str) -> None:
    assert LABEL_VALUE.fullmatch(label_value(one))
    assert (label_value(one) == label_value(other)) == (one == other)
    assert label_value(label_value(one)) != label_value(one) or label_value(one) == one


@given(NAMES, NAMES)
def test_labels_of_a_driver_are_among_those_of_its_stage(run_id: str, stage: str) -> None:
    own = labels(run_id, stage, 3, "worker")
    assert own.items() >= {"mlpipe.dev/attempt": "3", "app.kubernetes.io/part-of": "mlpipe"}.items()
    assert own["mlpipe.dev/run"] == labels(run_id, None, None, "driver")["mlpipe.dev/run"]
    assert all(LABEL_VALUE.fullmatch(value) for value in own.values())


@pytest.mark.parametrize(
    ("run_id", "stage", "name"),
    [
        ("run--", None, "run---driver"),
        ("a" * 35, None, f"{'a' * 35}-driver"),  # as long as may be
        ("a" * 36, None, f"{'a' * 25}-driver-x"),
        ("demo", "train", "demo-train-driver-xd1bb0ff0"),
        ("Team.A_run", "train", "team-a-run-train-driver-x28750057"),
        ("0--run", "train", "r-0-run-train-driver-x77a49a26"),
        ("r" * 40, "train", f"{'r' * 19}-train-driver-xf0c336b0"),
        (f"{'a' * 14}-----{'b' * 20}", "s_t.a", f"{'a' * 14}-bbbb-s-t-a-driver-x26f7c569"),
        ("a-team-20260101-000000-0000", "a-stage-of-a-long-name", "a-team-20260101-long-name-driver-x"),
    ],
)
def test_names_stay_what_they_were(run_id: str, stage: str | None, name: str) -> None:
    """A newer mlpipe finds what an older one made."""
    assert driver_name(run_id, stage).startswith(name)


def test_labels_stay_what_they_were() -> None:
    found = labels("demo", "train", 2, "worker")
    assert {key.partition("/")[2]: value for key, value in found.items() if key.startswith("app.")} == {
        "name": "mlpipe", "instance": "demo", "version": label_value(mlpipe.__version__),
        "component": "worker", "part-of": "mlpipe", "managed-by": "mlpipe",
    }  # fmt: skip
    assert config_name("demo", "{}") == "demo-plan-44136fa3"
    assert label_value("a/B C") == "a-B-C.x" + label_value("a/B C")[-8:]
    assert label_value("x-" * 32) == f"{'x-' * 26}x.x" + label_value("x-" * 32)[-8:]
    assert label_value("Ok_1.x") == "Ok_1.x"
