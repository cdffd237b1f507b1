"""Expressions over runs: what holds, and what is said of one that cannot be understood."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe._core.errors import SubmitError
from mlpipe._core.where import parse

pytestmark = pytest.mark.unit
MIDNIGHT = 1795392000  # of 2026-11-23 in UTC
FIELDS: dict[str, Any] = {
    "a": 1,
    "b.c": 2.5,
    "d-e": "word",
    "yes": True,
    "text": "two words",
    "nothing": None,
}

OPERATORS = {
    "<": lambda x, y: x < y, "<=": lambda x, y: x <= y, ">": lambda x, y: x > y, ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y, "=": lambda x, y: x == y, "!=": lambda x, y: x != y,
}  # fmt: skip


def holds(text: str) -> bool:
    return parse(text).holds(FIELDS.get)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a == 1", True),
        ("a=1", True),
        ("a != 1", False),
        ("b.c < 1e1", True),
        ("b.c >= 2.5 and a > .5", True),
        ("a > 1 or d-e == word", True),
        ("a > 1 or d-e == word and yes == false", False),
        ("(a > 1 or d-e == word) and yes == true", True),
        ("not a == 1", False),
        ("not not a == 1", True),
        ("text == 'two words'", True),
        ('text == "two"', False),
        ("d-e < x", True),
        ("nothing == null", True),
        ("nothing < 3", False),
        ("nothing > 3", False),
        ("nothing != 3", True),
        ("a == null", False),
        ("a != none", True),
        ("absent == 1", False),
        ("a < text", False),  # a number and a text have no order
        ("a == '1'", True),
        ("yes == 1", False),
        ("yes != 1", True),
    ],
)
def test_what_holds(text, expected):
    assert holds(text) is expected


def test_times_are_this_machines_unless_they_say_otherwise(monkeypatch):
    monkeypatch.setenv("TZ", "UTC-02:00")
    time.tzset()
    try:
        for text, expected in {
            "created >= 2026-11-23": True,
            "created > '2026-11-23 02:00'": False,
            "created == 2026-11-23T00:00Z": True,
            "created < '2026-11-23 01:00+00:00'": True,
            "created < 2026-11-23": False,
            f"created == {MIDNIGHT}": True,
            "created != null": True,
        }.items():
            assert parse(text, {"created"}).holds({"created": MIDNIGHT}.get) is expected, text
    finally:
        monkeypatch.undo()
        time.tzset()
    for wrong in ("yesterday", "2026-13-01", "5m"):
        with pytest.raises(SubmitError, match=r"column 17: .* where a time, such as 2026-11-23"):
            parse(f"a>1 or created> {wrong}", {"created"})


comparisons = st.tuples(
    st.sampled_from(["a", "b.c"]), st.sampled_from(sorted(OPERATORS)), st.floats(-4, 4, allow_nan=False)
)
trees = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner), st.tuples(st.sampled_from(["and", "or"]), inner, inner)
    ),
    max_leaves=8,
)


def written(tree: Any) -> str:
    if tree[0] == "not":
        return f"not ({written(tree[1])})"
    if tree[0] in ("and", "or"):
        return f"({written(tree[1])}) {tree[0]} ({written(tree[2])})"
    return f"{tree[0]} {tree[1]} {tree[2]!r}"


def meant(tree: Any) -> bool:
    if tree[0] == "not":
        return not meant(tree[1])
    if tree[0] in ("and", "or"):
        sides = [meant(tree[1]), meant(tree[2])]
        return all(sides) if tree[0] == "and" else any(sides)
    return OPERATORS[tree[1]](FIELDS[tree[0]], tree[2])


@given(trees)
def test_any_expression_means_what_it_says(tree):
    assert holds(written(tree)) is meant(tree)


@given(st.text(alphabet=" ab.<>=!()'\"1eandortx\n", max_size=30))
def test_whatever_is_written_is_understood_or_refused(text):
    with contextlib.suppress(SubmitError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "column 1: it ends where a field"),
        ("a <", "column 4: it ends where a value should follow"),
        ("a", "column 2: it ends where one of <, <="),
        ("(a < 3 b", "column 8: 'b' where `)` should stand"),
        ("a == 1 and " * 30 + "not " * 60 + "a < 3", "more than 50"),
        ("a 3", "column 3: '3' where one of <, <="),
        ("a < 3 b", "column 7: 'b' where `and`, `or` or the end"),
        ("3 < a", "column 1: '3' where a field"),
        ("(a < 3", "column 7: it ends where `)` should follow"),
        ("a == 'x", "column 6: a quote that is not closed"),
        ("a ! 3", "column 3: '!' means nothing"),
        ("a < true", "column 5: 'true' where a number or a text behind <"),
        ("and < 3", "column 1: 'and' where a field"),
        ("a < and", "column 5: 'and' where a value"),
        ("not " * 60 + "a < 3", "more than 50"),
        ("a < 3 " * 200, "longer than 1000"),
    ],
)
def test_a_mistake_is_told_with_its_place(text, words):
    with pytest.raises(SubmitError) as caught:
        parse(text)
    assert words in caught.value.message
    assert caught.value.kind == "input"


def test_the_limits_are_within_what_is_understood():
    assert parse("not " * 49 + "a < 3").holds({"a": 5}.get)
    assert parse("a < 3" + " " * 995).holds({"a": 2}.get)
    with pytest.raises(SubmitError) as caught:
        parse("a < 3 b")
    assert caught.value.message.splitlines()[1:] == ["  a < 3 b", "        ^"]


def test_no_more_is_asked_for_than_decides():
    asked = []
    where = parse("a == 2 and b.c < 3 or text == x and d-e == y")
    assert where.fields == ("a", "b.c", "text", "d-e")
    assert not where.holds(lambda name: asked.append(name) or FIELDS.get(name))
    assert asked == ["a", "text"]
    assert parse(" and ".join(["a == 1"] * 60)).holds(FIELDS.get)  # depth is not length
