"""Whatever the bytes, the loader gives a Pipeline or SpecErrors, soon; and what it gives reads back equal,
also through a YAML 1.1 parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlpipe._core.yaml import to_yaml
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.problems import SpecErrors
from mlpipe.spec.schema import json_schema
from mlpipe.spec.tree import MAX_BYTES, MAX_VALUES, parse

pytestmark = pytest.mark.unit
HERE = Path(__file__).parent
EXAMPLES = [path.read_bytes() for path in sorted(HERE.glob("*/*.yaml")) if path.name != "deep.yaml"]
RELAXED = settings(max_examples=80)


def load_or_refuse(data: bytes | str, overrides: tuple[str, ...] = ()) -> None:
    refusal: SpecErrors | None = None
    try:
        pipeline = load_pipeline_text(data, "fuzz.yaml", overrides=overrides)
    except SpecErrors as error:
        refusal = error
    if refusal is None:
        assert load_pipeline_text(pipeline.resolved_yaml(), "again") == pipeline
    else:
        assert refusal.problems
        lines = str(refusal).split("\n")
        assert all(line.isprintable() and ":" in line for line in lines)


@RELAXED
@given(st.binary(max_size=300))
@example(b"%YAML 1." + b"9" * 5000 + b"\n---\na: 1")
@example(b'a: "\\UFFFFFFFF"')
@example(b"\xef\xbb\xbfversion: 1")
@example(b"a: " + b"9" * 10000)
@example(b"1: 2\n1: 3\n[a]: 4\n? {b: c}\n: d\n*x : 3")
@example("a: \U0001f600\n\u2028 b: \x85".encode())
def test_any_bytes(data: bytes) -> None:
    load_or_refuse(data)


@RELAXED
@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    load_or_refuse(text)


@RELAXED
@given(
    st.sampled_from(EXAMPLES),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 30), st.binary(max_size=12)), max_size=4),
)
def test_damaged_pipelines(data: bytes, edits: list[tuple[int, int, bytes]]) -> None:
    for start, length, new in edits:
        start %= len(data) + 1
        data = data[:start] + new + data[start + length :]
    load_or_refuse(data)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["on", "{{output}}", "{{", "auto", "off", "15 min", "9 steps", "a:b", "train"]),
)  # fmt: skip


def keys_of(schema: Any) -> set[str]:
    found: set[str] = set()
    if isinstance(schema, dict):
        found |= set(schema.get("properties", {}))
        for value in schema.values():
            found |= keys_of(value)
    return found


KEYS = st.sampled_from(sorted(keys_of(json_schema())))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=6)),
    max_leaves=30,
)


@RELAXED
@given(
    st.dictionaries(KEYS, TREES, max_size=8), st.lists(st.dictionaries(KEYS, TREES, max_size=8), max_size=4)
)
def test_known_keys_with_wrong_values(top: dict[str, Any], stages: list[dict[str, Any]]) -> None:
    load_or_refuse(yaml.safe_dump({"version": 1, "name": "x", **top, "stages": stages}, allow_unicode=True))


@RELAXED
@given(st.text(max_size=40), st.text(max_size=40))
@example("train.optimizer", "{betas: [0.9, *a]}")
@example("stages", "{a: 1}")
@example("train.train", "5")
@example("version.x", "[")
def test_any_override(key: str, value: str) -> None:
    load_or_refuse((HERE / "good" / "everything.yaml").read_bytes(), (f"{key}={value}",))
    load_or_refuse((HERE / "good" / "everything.yaml").read_bytes(), (f"train.{key}={value}",))


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**17), 10**17),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
        st.sampled_from(
            ["1e3", "0x1", "22:22", "on", "Off", "null", "~", "-", "2026-11-21", "a: b", "#", "<<"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=20,
)


@RELAXED
@given(st.dictionaries(st.sampled_from(["a", "on", "1", "b c"]), JSON, min_size=1, max_size=4))
def test_what_we_write_reads_the_same_in_yaml_1_1_and_here(data: dict[str, Any]) -> None:
    text = to_yaml(data)
    assert text.isascii()
    assert yaml.safe_load(text) == data
    root, problems = parse(text, "x")
    assert root is not None
    assert not problems
    assert root.plain() == data


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1]\nb: [" + "*x, " * 300_000 + "]",
        "[" * 500_000,
        "- " * 400_000,
        "{a: " * 200_000,
        "a: [" + "1, " * 300_000 + "]",
        "\n".join(f"k{i}: 1" for i in range(90_000)),
        "#" * (MAX_BYTES + 1),
        '"' + "x" * MAX_BYTES,
    ],
    ids=["aliases", "flow", "block", "mappings", "items", "keys", "bytes", "string"],
)
def test_bombs_are_refused(text: str) -> None:
    with pytest.raises(SpecErrors) as caught:
        load_pipeline_text(text, "bomb.yaml")
    assert len(str(caught.value)) < 20_000
    assert len(caught.value.problems) <= MAX_VALUES


def test_a_file_of_too_many_values_is_read_no_further_than_the_limit() -> None:
    """Half a second of reading, instead of three for 90,000 keys."""
    with pytest.raises(SpecErrors) as caught:
        load_pipeline_text("\n".join(f"k{i}: 1" for i in range(90_000)), "bomb.yaml")
    assert [problem.line for problem in caught.value.problems] == [MAX_VALUES // 2]
