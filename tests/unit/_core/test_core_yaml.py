"""What is written reads back the same: by PyYAML (YAML 1.1), by mlpipe's own reader, and by kubectl's."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlpipe._core.errors import RenderError
from mlpipe._core.yaml import documents, to_yaml
from mlpipe.spec.tree import parse

pytestmark = pytest.mark.unit
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
NASTY = [
    "a\n---\nkind: Secret", "---", "...", "a\n  b\n", " a\nb", "a\n\n", "a\n \n", "\ta\nb", "a: b", "# a",
    "a # b", "{{x}}", "*a", "&a", "!!str a", "%YAML 1.1", "yes", "0x1f", "1e3", "1_000", "22:22",
    "2026-01-01", ".inf", "~", "null", "=", "<<", "- a", "? a", "'", '"', "\\", "a\r\nb", "a\u2028b",
    "\ufeffa", "\x85", "",
    "a\n#b\n", "|\n", ">-\na", '{\n  "a": [1]\n}\n', "é\nb\n", "a\nb ", "x" * 200, "x y " * 60,
    "\x07", "\U0001f600",
]  # fmt: skip
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**17), 10**17), TEXT, st.sampled_from(NASTY),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(TEXT | st.sampled_from(NASTY), inner, max_size=4)
    ),
    max_leaves=20,
)  # fmt: skip
RELAXED = settings(max_examples=80)


@RELAXED
@given(st.lists(st.dictionaries(TEXT | st.sampled_from(NASTY), VALUES, min_size=1, max_size=4), max_size=3))
@example([{"a": value} for value in NASTY] + [{value: [value, [value], {"b": value}]} for value in NASTY])
def test_parsers_read_back_what_was_written(objects: list[dict[str, Any]]) -> None:
    text = documents(objects)
    assert text == documents(objects)
    assert text.isascii()
    assert list(yaml.safe_load_all(text)) == objects
    for found in objects:
        root, problems = parse(documents([found]).removeprefix("---\n"), "x")
        assert not problems
        assert root is not None
        assert root.plain() == found


def test_kubectl_reads_back_what_was_written(tmp_path: Path) -> None:
    """Its parser is the one that matters; without a server it changes a label and prints JSON."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    data = {f"key-{number}": value for number, value in enumerate(NASTY)}
    found = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}
    (tmp_path / "a.yaml").write_text(documents([found]))
    argv = [kubectl, "label", "--local", "-f", str(tmp_path / "a.yaml"), "b=c", "-o", "json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"] == data


def test_long_text_stands_as_a_block_that_people_read() -> None:
    text = documents([{"data": {"plan.json": '{\n  "a": 1,\n\n  "b": "x"\n}\n'}}])
    assert text == '---\ndata:\n  plan.json: |\n    {\n      "a": 1,\n\n      "b": "x"\n    }\n'


def test_a_key_that_yaml_cannot_say_is_refused() -> None:
    with pytest.raises(RenderError, match="a key of 2000 characters"):
        documents([{"a": {"k" * 2000: 1}}])


def test_the_bytes_that_digests_are_of() -> None:
    """A run's digest is the sha256 of this form, and stands in stores since the first version."""
    data: dict[str, Any] = {
        "a": "word/of-two.parts", "b": "two words", "on": "Off", "x y": None, "f": [1e-05, 1e17, 0.5, True],
        "empty": {}, "none": [], "lists": [[1, "a b"], [[]]], "flow": [[{"k": [1, {}], "b c": "no"}]],
        "é\n\"\\\x7f": "\t\u2028\U0001f600",
        "things": [{"name": "one", "args": [{}, {"deep": [{"k": "v"}]}]}, "word", [1, {"in": "list"}]],
        "k" * 200: "x " * 90,
    }  # fmt: skip
    assert to_yaml(data).splitlines() == [
        "a: word/of-two.parts",
        'b: "two words"',
        '"on": "Off"',
        '"x y": null',
        "f: [1.0e-05, 1.0e+17, 0.5, true]",
        "empty: {}",
        "none: []",
        'lists: [[1, "a b"], [[]]]',
        'flow: [[{k: [1, {}], "b c": "no"}]]',
        r'"\xe9\x0a\"\\\x7f": "\x09\u2028\U0001f600"',
        "things:",
        "  - name: one",
        "    args:",
        "      - {}",
        "      - deep:",
        "          - k: v",
        "  - word",
        "  -",
        "    - 1",
        "    - in: list",
        f'{"k" * 200}: "{"x " * 90}"',
    ]


def test_a_list_stands_on_one_line_if_it_fits() -> None:
    head = "a:\n  b: "
    fits, too_long = ["x" * 40, "y" * 48], ["x" * 40, "y" * 49]
    assert documents([{"a": {"b": fits}}]) == f"---\n{head}[{', '.join(fits)}]\n"
    assert len(f"  b: [{', '.join(fits)}]") + 3 == 100  # the last that fits has 100
    assert documents([{"a": {"b": too_long}}]).count("\n") == 2 + 1
    longer = ["x" * 40, "y" * 52]
    assert (
        documents([{"a": {"b": longer}}]) == f"---\n{head.rstrip()}\n    - {longer[0]}\n    - {longer[1]}\n"
    )
    assert (
        documents([{"a": [[1], [{"b": "c\nd"}]]}])
        == "---\na:\n  -\n    - 1\n  -\n    - b: |-\n        c\n        d\n"
    )


def test_a_thing_that_stands_twice_is_written_twice() -> None:
    shared = {"b": ["c"]}
    assert to_yaml({"p": shared, "q": shared}) == "p:\n  b: [c]\nq:\n  b: [c]\n"
