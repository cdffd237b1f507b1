"""How a model is measured on held-out samples: `metrics` of an evaluation or of a training's `validate`, and
the rules between their keys. `validate` itself: `spec/validate.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mlpipe._core.gate import BUILT_IN, METRICS, default_name, is_of, parse_gate
from mlpipe.spec.base import OnNeedOf
from mlpipe.spec.problems import Problem, closest
from mlpipe.spec.tree import Node, get, items_of, problem_of_key, text_of

if TYPE_CHECKING:
    from mlpipe.spec.metric import OwnMetric as OwnMetric
else:
    OwnMetric = OnNeedOf("metric").OwnMetric

BuiltIn = Literal["loss", "perplexity", "bits_per_byte", "accuracy"]


def _tag(value: Any) -> str:
    return "OwnMetric" if isinstance(value, dict | OwnMetric) else "BuiltIn"


Metric = Annotated[
    Annotated[BuiltIn, Tag("BuiltIn")] | Annotated[OwnMetric, Tag("OwnMetric")], Discriminator(_tag)
]
Metrics = Annotated[tuple[Metric, ...], Field(min_length=1, strict=False)]


def problems(train: Node) -> Iterator[Problem]:
    """What is wrong between the values of a training's `validate`, and with its data."""
    validate = get(train, "validate")
    if validate is None or not isinstance(validate.value, dict):
        return
    yield from metric_problems(validate, train)
    names = metric_names(validate) or ["loss"]
    best, stop = get(validate, "best"), get(validate, "stop")
    if stop is not None and best is None:
        yield problem_of_key(
            stop, "stop does not know which metric to look at", f"add 'best: {{metric: {names[0]}}}'"
        )
    metric = get(validate, "best", "metric")
    word = text_of(metric)
    if metric is not None and word is not None:
        known = [name for name in names if is_of(word, name)]
        if not known:
            yield Problem.at(metric.place, f"{word!r} is not among the metrics", closest(word, names))
        elif word not in BUILT_IN and get(validate, "best", "mode") is None and best is not None:
            yield problem_of_key(
                best,
                f"nobody knows whether more or less {word!r} is better",
                "add 'mode: max' or 'mode: min'",
            )
    sample = get(validate, "sample")
    sources = [("data", "tokens"), ("data", "tokenizer")]
    if get(train, "data", "chat") is not None:
        sources.append(("model", "pretrained"))  # whose tokenizer conversations are read with
    if sample is not None and not any(get(train, *path) is not None for path in sources):
        words = "a text is generated with a tokenizer only, that of token files or data.tokenizer"
        yield problem_of_key(sample, words, "remove sample")


def metric_problems(holder: Node, train: Node | None) -> Iterator[Problem]:
    """Of the list `metrics` of `holder`. `train`: the training that it stands in."""
    seen: dict[str, Node] = {}
    for node in items_of(holder, "metrics"):
        name = _name(node)
        if name is None:
            continue
        if name in seen:
            hint = "remove one, or give yours another name: 'name: ...'"
            yield Problem.at(node.place, f"a second metric {name!r}", hint)
        elif name in BUILT_IN and isinstance(node.value, dict):
            yield Problem.at(node.place, f"{name!r} is a metric of mlpipe's", "add 'name: ...' to yours")
        seen[name] = node
        if node.value == "bits_per_byte" and train is not None and get(train, "data", "tokens") is None:
            yield Problem.at(
                node.place, "bits_per_byte is of token files, which know their text", "write 'loss'"
            )


def metric_names(holder: Node) -> list[str]:
    """Of the list `metrics` of `holder`, as far as they can be read."""
    return [name for node in items_of(holder, "metrics") if (name := _name(node)) is not None]


def gate_problems(stage: Node) -> Iterator[Problem]:
    """What is wrong between `metrics` and `gate` of a stage that evaluates."""
    evaluate = get(stage, "evaluate")
    if evaluate is None or not isinstance(evaluate.value, dict):
        return
    yield from metric_problems(evaluate, None)
    gate = get(evaluate, "gate")
    try:
        metric = parse_gate(text_of(gate) or "").metric
    except ValueError:
        return  # its type says so
    known = [*METRICS, *metric_names(evaluate)]
    if gate is not None and not any(is_of(metric, name) for name in known):
        hint = closest(metric, known)
        if metric in BUILT_IN:
            hint = f"add 'metrics: [{metric}]'"
        yield Problem.at(gate.place, f"the gate's metric {metric!r} is not measured", hint)


def _name(node: Node) -> str | None:
    if isinstance(node.value, str):
        return node.value if node.value in BUILT_IN else None
    entry = text_of(get(node, "entry"))
    return text_of(get(node, "name")) or (default_name(entry) if entry else None)
