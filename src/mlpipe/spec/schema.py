"""The JSON Schema of a pipeline, or of places, for editors. It says all that concerns one value; rules
between values (`spec/rules.py`) and what YAML itself may not hold are the loader's."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from mlpipe.spec.model import Pipeline


def json_schema(kind: type[BaseModel] = Pipeline) -> dict[str, Any]:
    """Draft 2020-12."""
    schema: dict[str, Any] = _tidy(kind.model_json_schema(by_alias=True))
    title = f"mlpipe {kind.__name__.lower()}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title} | schema


def _tidy(node: Any) -> Any:
    """Without pydantic's titles and without null: a key that has no value is a mistake, except in `args`,
    whose values the schema leaves open."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy: dict[str, Any] = {
        key: _tidy_properties(value) if key in ("properties", "$defs") else _tidy(value)
        for key, value in node.items()
        if key != "title" and not (key == "default" and value is None)
    }
    options = [option for option in tidy.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del tidy["anyOf"]
        tidy = {**options[0], **tidy}
    elif options:
        tidy["anyOf"] = options
    return tidy


def _tidy_properties(properties: dict[str, Any]) -> dict[str, Any]:
    return {name: _tidy(value) for name, value in properties.items()}
