"""What all mappings of a pipeline file have in common."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_built: ContextVar[type | None] = ContextVar("_built", default=None)  # whose validator is being made
_LOADER = "pydantic.plugin._loader"


class SpecModel(BaseModel):
    """Its validator is made when the first value is checked, and knows of the mappings in it only where they
    have theirs: of a hundred classes a file needs a dozen."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        populate_by_name=False,
        defer_build=True,
    )

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Without pydantic's search of all installed packages for plugins, which imports thirty modules of
        the standard library for it: a tenth of a command. Should the search move, it takes place again."""
        before = _built.set(cls)
        none: Any = ModuleType(_LOADER)
        none.get_plugins = tuple
        is_known = sys.modules.setdefault(_LOADER, none) is not none
        try:
            return super().model_rebuild(**options)
        finally:
            _built.reset(before)
            if not is_known:  # whoever else uses pydantic in this process has its plugins
                del sys.modules[_LOADER]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if _built.get() is cls:
            return handler(source)
        name = f"{cls.__module__}.{cls.__qualname__}:{id(cls)}"  # as pydantic's own, for the JSON Schema
        return core_schema.no_info_plain_validator_function(
            lambda value: cls.__pydantic_validator__.validate_python(value), ref=name
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        if schema["type"] == "function-plain":
            cls.model_rebuild()
            schema = cls.__pydantic_core_schema__
        return handler(schema)


def one_of(*keys: str) -> dict[str, Any]:
    """The JSON Schema of a rule in `spec/rules.py`: exactly one of these keys."""
    return {"oneOf": [{"required": [key]} for key in keys]}
