"""Hostile text in every field of a pipeline: it is refused with its line, or it is the very same text in what
a build gets, and the Jenkinsfile differs in its data alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.jenkinsfile import Build, jenkinsfile, read

from mlpipe._core.yaml import to_yaml
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.problems import SpecErrors
from mlpipe.spec.schema import json_schema

pytestmark = pytest.mark.unit
GOOD = Path(__file__).resolve().parents[1] / "spec/good"
HOSTILE = (
    'it\'s "$HOME" `id` $(id) ${params.X}' + "\\u0027 + 'x' \\\\u0027" + "'''",
    "a\nEND_OF_OVERRIDES\r\n} } pipeline { //",
    "a\0b",
    "\u202ecod\u2066",
)
MARK = "h0stile"
MAPS = {"env", "node_selector", "secret_env", "args"}  # whose keys are the user's
VOLCANO = """version: 1
name: v
image: registry.example.com/team/mlpipe@sha256:0123abcd
store: s3://ml-runs/v
kubernetes: {form: jobset, volcano_queue: q}
stages: [{name: a, command: [x], resources: {hardware: measured.json, disk: 20 GiB}}]
"""
REQUIRED = VOLCANO.replace("volcano_queue: q", "queue: q, topology: {required: example.com/rack}")
IDENTITY = VOLCANO.replace(
    "volcano_queue: q",
    "store: {web_identity: {role: arn:aws:iam::1:role/w, driver_role: arn:aws:iam::1:role/d, endpoint: http://s}}",
)


def documents() -> list[Any]:
    texts = [path.read_text() for path in sorted(GOOD.glob("*.yaml"))]
    found = [load_pipeline_text(text, "p.yaml") for text in (*texts, VOLCANO, REQUIRED, IDENTITY)]
    return [yaml.safe_load(pipeline.resolved_yaml()) for pipeline in found]


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    """Where text may stand: each scalar, and (True) each key of a map of the user."""
    if isinstance(value, dict):
        for key, item in value.items():
            if path and path[-1] in MAPS:
                yield (*path, key), True
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))
    else:
        yield path, False


def changed(document: Any, path: tuple[str | int, ...], is_key: bool) -> str:
    """As YAML, with MARK there."""
    found = copy.deepcopy(document)
    inner = found
    for part in path[:-1]:
        inner = inner[part]
    if is_key:
        inner[MARK] = inner.pop(path[-1])
    else:
        inner[path[-1]] = MARK
    return to_yaml(found)


class ByLibyaml(yaml.CSafeLoader):
    """Reads a thousand documents in a tenth of the time; how text is read is asked in `tests/unit/spec`."""

    def get_event(self):
        event = super().get_event()
        if getattr(event, "style", None) == "":  # of a plain scalar, which PyYAML's own parser says with None
            event.style = None
        return event


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    return at(value[path[0]], path[1:]) if path else value


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, str):
        yield value


def built(text: str) -> tuple[Build, Any] | SpecErrors:
    """And the pipeline as the build gets it."""
    try:
        pipeline = load_pipeline_text(text, "p.yaml")
    except SpecErrors as errors:
        return errors
    found = jenkinsfile(pipeline, "p.yaml", [], pipeline.store)
    found.encode("ascii")
    return read(found), pipeline.model_dump(mode="json", by_alias=True)


def test_hostile_text_in_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "SafeLoader", ByLibyaml)
    written = {text: to_yaml(text).removesuffix("\n") for text in HOSTILE}
    taken, refused, seen = set(), set(), set()
    for document in documents():
        found = built(to_yaml(document))
        assert not isinstance(found, SpecErrors)
        plain = found[0]
        for path, is_key in places(document):
            field = (is_key, *(part for part in path if isinstance(part, str)))
            if field in seen:  # in a document before this one, or in another item of its list
                continue
            seen.add(field)
            marked = changed(document, path, is_key)
            for text in HOSTILE if is_key or isinstance(at(document, path), str) else HOSTILE[:1]:
                found = built(marked.replace(MARK, written[text]))
                if isinstance(found, SpecErrors):
                    assert all(problem.line > 0 for problem in found.problems), (path, found)
                    refused.add(path)
                    continue
                taken.add(path)
                build, resolved = found
                assert "\0" not in text, path
                assert (build.skeleton, build.commands) == (plain.skeleton, plain.commands), path
                assert text in set(texts(resolved)), path
    names = {part for path in taken | refused for part in path}
    assert names >= fields_of_text()
    assert {path[-1] for path in taken} >= {"tokens", "prompt", "store"}
    assert ("stages", 0, "name") in refused - taken


def fields_of_text() -> set[str]:
    """By the schema: those whose value, or whose items, are text of the user."""

    def is_text(found: dict[str, Any]) -> bool:
        if found.get("type") == "string":
            return "enum" not in found and "const" not in found
        inner = [found.get("items"), found.get("additionalProperties")]
        inner += [*found.get("anyOf", ()), *found.get("oneOf", ())]
        return any(is_text(one) for one in inner if isinstance(one, dict))

    schema = json_schema()
    bodies = [schema, *schema["$defs"].values()]
    return {name for body in bodies for name, found in body.get("properties", {}).items() if is_text(found)}
