"""What all mappings of a pipeline file have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, cast, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_built: ContextVar[type | None] = ContextVar("_built", default=None)  # whose validator is being made
_LOADER = "pydantic.plugin._loader"


class SpecModel(BaseModel):
    """Its validator is made when the first value is checked, and knows of the mappings in it only where they
    have theirs: of a hundred classes a file needs a dozen. Modules of such classes do without annotations
    from `__future__`, each of which pydantic would compile."""

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
        return _apart(lambda: cls, f"{cls.__module__}.{cls.__qualname__}:{id(cls)}")  # as pydantic's own name

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema if schema["type"] != "function-plain" else _whole(cls))


class _OfModule(type):
    def __instancecheck__(cls, value: Any) -> bool:
        """As of the class that it stands for, which has no instances before its module is imported."""
        meant = getattr(sys.modules.get(cls.__module__), cls.__name__, ())
        return meant is not cls and isinstance(value, meant)


class OnNeed(metaclass=_OfModule):
    """Stands in annotations for a class of mappings that is not made before the first of them comes; see
    `on_need`."""

    name: str
    load: Callable[[], type[SpecModel]]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _apart(cls.load, f"{cls.name}:{id(cls)}")

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(_whole(cls.load()))


def on_need(name: str, load: Callable[[], type[SpecModel]], module: str = "") -> Any:
    """The type of mappings of the class `name`, which `load` makes, or imports from `module`: then
    `isinstance` may be asked of it."""
    return _OfModule(name, (OnNeed,), {"__module__": module, "name": name, "load": staticmethod(cache(load))})


class OnNeedOf:
    """Stands for a module of this folder in annotations, and where `isinstance` is asked: it is imported for
    the files that have a mapping of one of its classes; see `on_need`."""

    def __init__(self, module: str) -> None:
        self._module = f"mlpipe.spec.{module}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        made = on_need(name, lambda: getattr(import_module(self._module), name), self._module)
        setattr(self, name, made)
        return made


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The class of the mappings that it allows; None: it is not of one class of them."""
    if not isinstance(annotation, type) or get_origin(annotation) is not None:
        return None
    if issubclass(annotation, OnNeed):
        return annotation.load()
    return annotation if issubclass(annotation, BaseModel) else None


def _apart(load: Callable[[], type[SpecModel]], name: str) -> CoreSchema:
    """Of a mapping within another one: its own validator, whatever that is by then. `name`: in the JSON
    Schema."""
    return core_schema.no_info_plain_validator_function(
        lambda value: load().__pydantic_validator__.validate_python(value), ref=name
    )


def _whole(model: type[SpecModel]) -> CoreSchema:
    """For the JSON Schema, where it has the name of what stands for it."""
    model.model_rebuild()
    schema: Any = {**model.__pydantic_core_schema__}
    inner = schema
    if schema["type"] == "definitions":
        inner = schema["schema"] = {**schema["schema"]}
    inner.pop("ref", None)
    return cast(CoreSchema, schema)


def one_of(*keys: str) -> dict[str, Any]:
    """The JSON Schema of a rule in `spec/rules.py`: exactly one of these keys."""
    return {"oneOf": [{"required": [key]} for key in keys]}
