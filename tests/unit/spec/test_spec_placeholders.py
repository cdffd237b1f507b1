from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe._core.errors import SpecError
from mlpipe.spec.placeholders import names, resolve, stage_of

pytestmark = pytest.mark.unit
PIECES = st.sampled_from(["{{output}}", "{{ store }}", "{{{{", "}}", "{", "}", "a", " "])
KNOWN = {"output": "/out", "store": "{{./runs"}


def test_known_names_are_replaced() -> None:
    assert resolve("--out={{output}}/{{ store }}", KNOWN) == "--out=/out/{{./runs"


def test_doubled_braces_are_literal() -> None:
    assert resolve("{{{{output}} }}", KNOWN) == "{{output}} }}"


def test_names() -> None:
    assert names("{{output}} {{{{no}} {{stages.a.b.output}} {{open") == ["output", "stages.a.b.output", ""]
    assert stage_of("stages.a.b.output") == "a.b"
    assert stage_of("output") is None


def test_unknown_names_are_errors() -> None:
    for text in ("{{nope}}", "{{}}", "{{ unclosed", "{{output.__class__}}"):
        with pytest.raises(SpecError, match="unknown placeholder"):
            resolve(text, KNOWN)


@given(st.lists(PIECES, max_size=8).map("".join))
def test_resolving_in_two_goes_is_resolving_at_once(text: str) -> None:
    def outcome(*mappings: dict[str, str]) -> str | None:
        result = text
        try:
            for mapping in mappings[:-1]:
                result = resolve(result, mapping, partial=True)
            return resolve(result, mappings[-1])
        except SpecError:
            return None

    assert outcome({"store": KNOWN["store"]}, {"output": "/out"}) == outcome(KNOWN)
