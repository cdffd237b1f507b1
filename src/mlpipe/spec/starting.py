"""`train.init_from`, `train.freeze` and `train.adapter`: weights that a training starts from, what of them
stays, and what is trained beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag

from mlpipe.spec.base import OnNeedOf, SpecModel
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, problem_of_key, text_of

if TYPE_CHECKING:
    from mlpipe.spec.weights import Adapter as Adapter
    from mlpipe.spec.weights import FileWeights, ModelWeights, RunWeights
else:
    _weights = OnNeedOf("weights")
    Adapter, FileWeights = _weights.Adapter, _weights.FileWeights
    ModelWeights, RunWeights = _weights.ModelWeights, _weights.RunWeights

# Compiled for files with a path of weights.
_OUTPUT = r"\{\{\s*stages\."
# below it without a way out: the output itself has no links
_BELOW = r"\{\{\s*stages\.[^{}]+\.output\s*\}\}(?:/(?!\.{1,2}(?:/|$))[^/{}]+)*/?"


def _tag(value: Any) -> str:
    if isinstance(value, SpecModel):
        return type(value).__name__
    keys = value if isinstance(value, dict) else {"path": value}
    return "FileWeights" if "path" in keys else "ModelWeights" if "model" in keys else "RunWeights"


InitFrom = Annotated[
    Annotated[FileWeights, Tag("FileWeights")]
    | Annotated[RunWeights, Tag("RunWeights")]
    | Annotated[ModelWeights, Tag("ModelWeights")],
    Discriminator(_tag),
]


def starts_outside(start: InitFrom | None) -> bool:
    """Whether the weights are not made by the run itself."""
    if start is None:
        return False
    from mlpipe.spec import weights

    return not isinstance(start, weights.RunWeights) or start.run is not None


def problems(stage: Node) -> Iterator[Problem]:
    """What is wrong in a training stage's `init_from`."""
    start = get(stage, "train", "init_from")
    if start is not None and get(stage, "train", "model", "pretrained") is not None:
        words = "model.pretrained says already which weights the training starts from"
        yield problem_of_key(start, words, "keep one of them")
    for path in (
        get(start, "path") if start is not None else None,
        get(stage, "train", "model", "pretrained"),
    ):
        text = text_of(path) or ""
        if path is not None and re.search(_OUTPUT, text) and not re.fullmatch(_BELOW, text):
            words = f"{text!r} is not below the stage's output"
            yield Problem.at(
                path.place, words, "write '{{stages.NAME.output}}', or '{{stages.NAME.output}}/sub'"
            )
    if start is not None and (place := text_of(start)) is not None:
        yield Problem.at(start.place, f"{place!r} does not say what it is", f'write {{path: "{place}"}}')
    if start is None or not isinstance(start.value, dict):
        return
    if not {"path", "model", "run", "stage"} & start.value.keys():
        yield problem_of_key(
            start,
            "init_from names no weights",
            "add 'path: ...', 'model: name@alias', 'run: ...' or 'stage: ...'",
        )
    other = get(start, "stage")
    name = text_of(other)
    if other is not None and name is not None and get(start, "run") is None and "path" not in start.value:
        needs = get(stage, "needs")
        listed = [text_of(item) for item in needs.value] if needs and isinstance(needs.value, list) else []
        if name not in listed:
            yield problem_of_key(
                other,
                f"stage {name!r} of this run must be done before",
                f"add 'needs: [{name}]', or say of which 'run' it is",
            )
    names = get(start, "map")
    for there, here in names.value.items() if names is not None and isinstance(names.value, dict) else ():
        if isinstance(here.value, str) and here.value.count("*") not in (0, there.count("*")):
            yield Problem.at(
                here.place,
                f"{here.value!r} has {here.value.count('*')} '*', {there!r} has {there.count('*')}",
                "write as many on both sides",
            )


def adapter_problems(stage: Node) -> Iterator[Problem]:
    """What does not go with a training stage's `adapter`."""
    train = get(stage, "train")
    adapter = get(train, "adapter") if train is not None else None
    if train is None or adapter is None:
        return
    if get(train, "init_from") is None and get(train, "model", "pretrained") is None:
        words = "an adapter is trained beside weights that are there, and this model begins with the seed's"
        yield problem_of_key(adapter, words, "add 'init_from', or write 'model: {pretrained: ...}'")
    if get(train, "model", "entry") is not None:
        for axis in ("tp", "pp"):
            size = get(train, "mesh", axis)
            if size is not None and size.value != 1:
                words = f"an adapter does not go with {axis} of a model of your own yet"
                yield Problem.at(
                    size.place, words, f"make {axis} 1, or take open weights by model.pretrained"
                )
    if (base := get(adapter, "base")) is not None:
        yield from _base_problems(train, base)
    freeze, mode = get(train, "freeze"), get(train, "activation_checkpointing")
    if freeze is not None:
        words = "beside an adapter all of the model is frozen already"
        yield problem_of_key(freeze, words, "remove freeze, or the adapter")
    if mode is not None and mode.value in ("selective", "auto"):
        words = f"{mode.value} does not go with an adapter yet: it tells a block's products by their order"
        yield Problem.at(mode.place, words, "write full or none")


def _base_problems(train: Node, base: Node) -> Iterator[Problem]:
    """What does not go with weights of few bits."""
    if get(train, "model", "entry") is not None:
        words = "a model of your own is built in full, so its weights cannot be read in few bits"
        yield problem_of_key(base, words, "remove base, or take open weights by model.pretrained")
    communication = get(train, "communication")
    if communication is not None and text_of(communication) == "on_demand":
        words = "on_demand shows other workers weights in full, and these are kept in few bits"
        yield Problem.at(communication.place, words, "write collective or resident")
