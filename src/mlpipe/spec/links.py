"""`train.compress` and `train.update`: what travels between workers whose links are slow, and how often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from mlpipe._core.compression import COMPRESSIONS, Argument
from mlpipe._core.feasibility import not_with_experts
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe._core.presets import PRESETS, MoeConfig
from mlpipe.spec import fields as f
from mlpipe.spec.base import OnNeedOf, SpecModel, on_need
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, problem_of_key, text_of


def _field(argument: Argument) -> Any:
    kind = int if isinstance(argument.default, int) else float
    bounds = Field(ge=argument.least, le=argument.most)
    return Annotated[kind, bounds], Field(argument.default, description=argument.about)


def _with_settings(name: str, title: str) -> type[SpecModel]:
    """`{name: {argument: ...}}`."""
    known = COMPRESSIONS[name]
    arguments: Any = {key: _field(argument) for key, argument in known.arguments.items()}
    settings = create_model(title, __base__=SpecModel, __doc__=known.about, **arguments)
    inner: Any = {name: (settings, Field(description=known.about))}
    words = f"{name}, with settings."
    made: type[SpecModel] = create_model(f"{title}Compression", __base__=SpecModel, __doc__=words, **inner)
    return made


def _settings_on_need(name: str) -> Any:
    title = "".join(part.title() for part in name.split("_"))
    return on_need(f"{title}Compression", lambda: _with_settings(name, title))


_OF_SETTINGS = {name: _settings_on_need(name) for name, one in COMPRESSIONS.items() if one.arguments}


if TYPE_CHECKING:
    Compress = str | SpecModel
else:
    Compress = f.name_or_settings("a compression", tuple(COMPRESSIONS), _OF_SETTINGS, alone="compress: {}")


def settings_of(compress: Compress) -> tuple[str, dict[str, float]]:
    """Its name in the table, and all of its arguments."""
    told = compress if isinstance(compress, str) else compress.model_dump(mode="json")
    name, said = (told, {}) if isinstance(told, str) else next(iter(told.items()))
    defaults = {key: argument.default for key, argument in COMPRESSIONS[name].arguments.items()}
    return name, {**defaults, **said}


_rounds = OnNeedOf("rounds")
_UPDATES = {
    "local_sgd": _rounds.LocalSgdUpdate,
    "diloco": _rounds.DiLoCoUpdate,
    "async": _rounds.AsyncUpdate,
}


if TYPE_CHECKING:
    Update = str | SpecModel
else:
    Update = f.name_or_settings("an update", tuple(_UPDATES), _UPDATES)


def round_of(update: Update) -> dict[str, Any]:
    """Figures of a round, as the plan has them: local SGD is an outer step of learning rate 1 without
    momentum."""
    if isinstance(update, str):
        from mlpipe.spec.rounds import ROUNDS

        return ROUNDS[update]().model_dump(mode="json")
    (settings,) = update.model_dump(mode="json").values()
    return dict(settings)


# What they keep from step to step an overflow of fp16 would spoil for good, or workers would not all see it.
UNSCALED = ("compress", "update")


def problems(train: Node, strategies: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Of a training: what does not go with `compress`, and with `update`. `strategies`: by key those that it
    goes with."""
    compress, update = get(train, "compress"), get(train, "update")
    yield from _of_buckets(train, strategies["buckets"])
    precision = get(train, "precision")
    if precision is not None and text_of(precision) == "fp16":
        for key, node in zip(UNSCALED, (compress, update), strict=True):
            if node is not None and node.value is not None:
                yield Problem.at(
                    precision.place,
                    f"fp16 does not go with {key}: workers skip a step that overflows together, and nothing "
                    "of it may be left in what they keep",
                    "write bf16 or fp32",
                )
    if compress is not None and compress.value is not None:
        yield from _needs_copies(train, "compress", strategies["compress"])
        if update is not None and update.value is not None:
            yield problem_of_key(
                compress,
                "compress is of gradients, which are not sent with update",
                "remove it, or write 'update: {diloco: {compress: int8}}'",
            )
    if update is None or update.value is None:
        return
    yield from _needs_copies(train, "update", strategies["update"])
    ema, optimizer = get(train, "ema"), get(train, "optimizer", "name")
    if ema is not None and ema.value is not None:
        yield problem_of_key(ema, "update keeps weights of its own to validate and save", "remove ema")
    known = OPTIMIZERS.get(text_of(optimizer) or "")
    if optimizer is not None and known is not None and known.averages:
        yield Problem.at(
            optimizer.place, f"{text_of(optimizer)} averages the weights itself, as update does", "take adamw"
        )
    yield from _of_rounds(train, update)


def _figures(update: Node) -> dict[str, tuple[Node | None, Any]]:
    """Of a round: where each is said, and what it is."""
    name = next((one for one in _UPDATES if text_of(update) == one or get(update, one) is not None), None)
    if name is None:
        return {}
    from mlpipe.spec.rounds import ROUNDS

    fields = ROUNDS[name].model_fields
    said = {key: get(update, name, key) for key in ("sync_every", "fragments", "staleness")}
    return {
        key: (node, node.value if node is not None else fields[key].default if key in fields else 1)
        for key, node in said.items()
    }


def is_stale(update: Node) -> bool:
    """Whether workers go on while what they told travels."""
    _, staleness = _figures(update).get("staleness", (None, 0))
    return bool(staleness)


def _of_rounds(train: Node, update: Node) -> Iterator[Problem]:
    """What has no room in one."""
    figures = _figures(update)
    said = {key: node for key, (node, _) in figures.items()}
    if not figures or not all(type(number) is int for _, number in figures.values()):
        return
    steps, fragments, staleness = (number for _, number in figures.values())
    if said["fragments"] is not None and fragments > steps:
        yield Problem.at(
            said["fragments"].place,
            f"{fragments} fragments have no turns of their own in {steps} steps",
            f"write {steps} at most",
        )
    if staleness >= steps >= 1:
        yield problem_of_key(
            said["staleness"] or said["sync_every"] or update,
            f"what was told {staleness} steps ago is not heard before more is told, every {steps} steps",
            "make staleness less than sync_every",
        )
    stragglers = get(train, "stragglers")
    if staleness and stragglers is not None and text_of(stragglers) == "move_load":
        yield problem_of_key(
            stragglers, "workers that need not be at the same step need not be as fast", "remove it"
        )


def _of_buckets(train: Node, strategies: Sequence[str]) -> Iterator[Problem]:
    """Nothing but DistributedDataParallel has any that can be set."""
    asked = get(train, "buckets")
    if asked is None or asked.value is None:
        return
    strategy, deterministic = get(train, "strategy"), get(train, "deterministic")
    name = text_of(strategy)
    if strategy is not None and name is not None and name not in ("auto", *strategies):
        yield Problem.at(
            strategy.place,
            f"{name} has no buckets of gradients: it sends them block by block",
            f"remove buckets, or write one of {', '.join(strategies)}",
        )
    if text_of(asked) == "auto" and deterministic is not None and deterministic.value is True:
        yield problem_of_key(
            asked, "buckets go by clocks, and the order of sums by buckets", "write a size, like 25 MiB"
        )
    for key, why in (
        ("compress", "compressed gradients have buckets of their own"),
        ("update", "gradients are not sent with update"),
    ):
        other = get(train, key)
        if other is not None and other.value is not None:
            yield problem_of_key(asked, why, "remove one of them")


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
        yield Problem.at(preset.place, not_with_experts(key).message, "take a llama-* preset")
