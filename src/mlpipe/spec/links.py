"""`train.compress` and `train.update`: what travels between workers whose links are slow, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Discriminator, Field, Tag, create_model

from mlpipe._core.compression import COMPRESSIONS, Argument, Compression
from mlpipe._core.presets import PRESETS, MoeConfig
from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.problems import Problem, closest
from mlpipe.spec.tree import Node, get, text_of


def _field(argument: Argument) -> Any:
    kind = int if isinstance(argument.default, int) else float
    bounds = Field(ge=argument.least, le=argument.most)
    return Annotated[kind, bounds], Field(argument.default, description=argument.about)


def _with_settings(name: str, known: Compression) -> type[SpecModel]:
    """`{name: {argument: ...}}`."""
    title = "".join(part.title() for part in name.split("_"))
    arguments: Any = {key: _field(argument) for key, argument in known.arguments.items()}
    settings = create_model(title, __base__=SpecModel, __doc__=known.about, **arguments)
    inner: Any = {name: (settings, Field(description=known.about))}
    words = f"{name}, with settings."
    made: type[SpecModel] = create_model(f"{title}Compression", __base__=SpecModel, __doc__=words, **inner)
    return made


_OF_SETTINGS = {name: _with_settings(name, one) for name, one in COMPRESSIONS.items() if one.arguments}


def _known(value: Any) -> Any:
    names = [value] if isinstance(value, str) else [*value] if isinstance(value, dict) else []
    for name in names:
        if name not in COMPRESSIONS:
            raise f.wrong(f"unknown compression {str(name)!r}", closest(str(name), [*COMPRESSIONS]))
    if isinstance(value, dict) and len(names) != 1:
        raise f.wrong("a compression is one name", "keep one of them")
    if isinstance(value, dict) and names[0] not in _OF_SETTINGS:
        raise f.wrong(f"{names[0]} has no settings", f"write the name alone: compress: {names[0]}")
    return value


def _tag(value: Any) -> str:
    if isinstance(value, SpecModel):
        return type(value).__name__
    if isinstance(value, dict):
        return next((_OF_SETTINGS[name].__name__ for name in value if name in _OF_SETTINGS), "name")
    return "name"


if TYPE_CHECKING:
    Compress = str | SpecModel
else:
    _TAGGED = tuple(Annotated[model, Tag(model.__name__)] for model in _OF_SETTINGS.values())
    _NAMES = Annotated[Literal[tuple(COMPRESSIONS)], Tag("name")]
    Compress = Annotated[Union[(_NAMES, *_TAGGED)], Discriminator(_tag), BeforeValidator(_known)]


def settings_of(compress: Compress) -> tuple[str, dict[str, float]]:
    """Its name in the table, and all of its arguments."""
    told = compress if isinstance(compress, str) else compress.model_dump(mode="json")
    name, said = (told, {}) if isinstance(told, str) else next(iter(told.items()))
    defaults = {key: argument.default for key, argument in COMPRESSIONS[name].arguments.items()}
    return name, {**defaults, **said}


def problems(train: Node, strategies: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Of a training: what does not go with `compress`. `strategies`: by key those that it goes with."""
    compress = get(train, "compress")
    if compress is None or compress.value is None:
        return
    yield from _needs_copies(train, "compress", strategies["compress"])


def _needs_copies(train: Node, key: str, strategies: Sequence[str]) -> Iterator[Problem]:
    """Of what is for workers that have whole copies of a model."""
    strategy, preset = get(train, "strategy"), get(train, "model", "preset")
    name = text_of(strategy)
    if strategy is not None and name is not None and name not in ("auto", *strategies):
        yield Problem.at(
            strategy.place,
            f"{key} does not go with {name}: it needs copies of the model",
            f"write one of {', '.join(strategies)}, or remove {key}",
        )
    if preset is not None and isinstance(PRESETS.get(str(preset.value)), MoeConfig):
        yield Problem.at(preset.place, f"{key} does not go with experts yet", "take a llama-* preset")
