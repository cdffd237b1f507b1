"""Which tensor goes to which, by names and shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe._core.errors import TrainError
from mlpipe._core.patterns import matching, nearest
from mlpipe.train.matching import Here, hint, match, rename

pytestmark = pytest.mark.unit
NAMES = st.lists(st.text("ab.1", min_size=1, max_size=8), unique=True, max_size=8)


def there(*shape: int, dtype: str = "float32") -> Any:
    return {"dtype": dtype, "shape": list(shape), "chunks": []}


def here(*shape: int, dtype: str = "float32", others: tuple[str, ...] = ()) -> Here:
    return Here(dtype, shape, others)


def test_alike_names_and_shapes_are_paired_and_floats_are_converted():
    found = match(
        {"w": here(2, 3), "b": here(3), "count": here(dtype="int64")},
        {"w": there(2, 3, dtype="bfloat16"), "b": there(3, dtype="float64"), "count": there(dtype="int64")},
        {},
    )
    assert found.pairs == [("w", "w"), ("b", "b"), ("count", "count")]
    assert found.words() == []


def test_what_does_not_fit_is_told_by_name():
    found = match(
        {"w": here(2, 3), "head": here(4), "count": here(dtype="int64"), "low": here(1)},
        {
            "w": there(3, 2), "old": there(4), "count": there(dtype="int32"),
            "low": there(1, dtype="float8_e4m3fn"),
        },
        {},
    )  # fmt: skip
    assert (found.pairs, found.missing, found.left_over) == ([], ["head"], ["old"])
    assert found.unlike == [
        "w (float32[2, 3] here, float32[3, 2] there)",
        "count (int64[] here, int32[] there)",
        "low (float32[1] here, float8_e4m3fn[1] there)",
    ]
    assert found.words()[0] == "missing there: head"


def test_long_lists_are_cut():
    found = match({f"w{i}": here(1) for i in range(20)}, {}, {})
    assert found.words() == ["missing there: w0, w1, w2, w3, w4, w5 and 14 more"]
    words = {n: match({f"w{i}": here(1) for i in range(n)}, {}, {}).words()[0] for n in (6, 7)}
    assert (words[6][-2:], words[7][-13:]) == ("w5", "w5 and 1 more")


def test_a_tied_parameter_is_found_under_any_name_and_two_of_them_are_compared():
    tied = {"embed": here(2, others=("head",))}
    one = there(2)
    assert match(tied, {"head": one}, {}).pairs == [("embed", "head")]
    same = match(tied, {"embed": one, "head": one}, {})
    assert (same.pairs, same.doubles, same.words()) == ([("embed", "embed")], [], [])
    two = match(tied, {"embed": there(2), "head": there(2)}, {})
    assert (two.pairs, two.doubles, two.words()) == ([("embed", "embed")], [("embed", "head")], [])


@pytest.mark.parametrize(
    ("pattern", "target", "name", "new"),
    [
        ("old.*", "new.*", "old.a.b", "new.a.b"),
        ("old.*", "new.*", "older.a", "older.a"),
        ("*.attn.*", "*.mixer.*", "layers.0.attn.q.weight", "layers.0.mixer.q.weight"),
        ("model.*", "*", "model.norm", "norm"),
        ("*", "model.*", "norm", "model.norm"),
        ("a.b", "c", "a.b", "c"),
        ("a.b", "c", "axb", "axb"),
        (r"x+*", r"\1*", "x+y", r"\1y"),
    ],
)
def test_patterns_rename(pattern, target, name, new):
    assert rename([name], {pattern: target}) == {new: name}


def test_the_longest_pattern_counts_whatever_the_order():
    rules = {"*": "rest.*", "a.*": "short.*", "a.long.*": "x.*"}
    for names in (rules, dict(reversed(rules.items()))):
        assert rename(["a.long.w", "a.w", "b"], names) == {"x.w": "a.long.w", "short.w": "a.w", "rest.b": "b"}


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(TrainError, match=r"a\.w and b\.w there would both be w") as caught:
        rename(["a.w", "b.w"], {"a.*": "*", "b.*": "*"})
    assert caught.value.kind == "input"


@given(NAMES)
def test_no_name_is_lost_and_a_renaming_can_be_undone(names):
    assert rename(names, {}) == {name: name for name in names}
    forth = rename(names, {"*": "x.*"})
    assert rename(forth, {"x.*": "*"}) == {name: f"x.{name}" for name in names}


@given(NAMES.filter(bool))
def test_a_common_beginning_is_hinted_at_and_the_hint_is_right(names):
    model = {name: here(1) for name in names}
    wrapped = {f"module.{name}": there(1) for name in names}
    told = hint(match(model, wrapped, {}))
    assert not set(names) & set(wrapped)
    assert 'map: {"' in told
    assert match(model, wrapped, {"module.*": "*"}).words() == []
    inner = {name.removeprefix("module."): there(1) for name in wrapped}
    outer = {f"model.{name}": here(1) for name in names}
    assert match(outer, inner, {"*": "model.*"}).words() == []


def test_the_hint_names_the_map():
    model, files = {"a": here(1), "b.a": here(1)}, {"module.a": there(1), "module.b.a": there(1)}
    assert hint(match(model, files, {})).endswith('map: {"module.*": "*"}')
    outer = {f"net.{name}": one for name, one in model.items()}
    assert hint(match(outer, {"a": there(1), "b.a": there(1)}, {})).endswith('map: {"*": "net.*"}')
    other = {"z.w": there(1), "z.v": there(1), "a.q.w": there(1)}
    assert 'map: {"z.*": "*"}' in hint(match({"w": here(1), "v": here(1)}, other, {}))
    assert "strict: false" in hint(match(model, {"x": there(1)}, {}))
    assert hint(match(model, {"x": there(1)}, {})).startswith("map: ")
    for one in (match({"a": here(2)}, {"a": there(1)}, {}), match(model, {}, {})):
        assert hint(one).startswith("strict: false")


def test_patterns_of_names_are_those_of_a_shell_and_near_names_are_told():
    names = ["embed.weight", "layers.0.norm.weight", "layers.10.norm.bias", "Head.weight"]
    assert matching("layers.*.norm.*", names) == names[1:3]
    assert matching("layers.[0-9].*", names) == names[1:2]
    assert matching("head.*", names) == []  # names are as they are written
    assert "embed.weight" in nearest("embedding.*", names)
    assert nearest("zzz", names).endswith("(1 more)")
