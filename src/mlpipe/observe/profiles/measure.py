"""A trace to a RankProfile: where the time of a step went on one rank. Seconds and counts are of one step.

On a CPU the device is the thread that trains: it is busy while an operator runs. On a GPU it is busy while a
kernel runs, and a cause is what the host did meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.observe.profiles.trace import PART, Event, Span, Trace, both, length, minus, union

_MOST_OPERATORS = 20
TINY_MICROSECONDS = 20.0
_CLASSES = (
    ("communication", ("nccl", "gloo", "c10d", "all_gather", "reduce_scatter", "allreduce", "wait_tensor")),
    ("attention", ("attention", "flash", "fmha", "sdpa")),
    # both have "mm" in their names on CUDA: layer norms' kernels, and FusedAdamMathFunctor
    ("norm", ("gammabeta",)),
    ("optimizer", ("multi_tensor",)),
    ("matmul", ("mm", "gemm", "gemv", "splitk", "linear", "matmul", "einsum", "conv", "cutlass", "nvjet")),
    ("optimizer", (*OPTIMIZERS, "_foreach")),
    ("loss", ("softmax", "cross_entropy", "nll", "logsumexp")),
    ("norm", ("norm", "rsqrt")),
    ("allocation", ("empty",)),
    ("copy", ("copy", "cat", "clone", "contiguous", "memcpy", "memset", "fill", "zero", "stack")),
    ("embedding", ("embedding", "index", "gather", "scatter")),
)
_SYNCS = ("aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")
_RUNTIME_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "bool": 1}


@dataclass(frozen=True)
class LayerTime:
    """`forward`, `backward`: seconds, without those of the layers in it. `operators`: that start no other."""

    forward: float
    backward: float
    operators: float
    operator_seconds: float
    calls: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class OperatorTime:
    name: str
    count: float
    seconds: float  # its own, without the operators in it


@dataclass(frozen=True)
class Place:
    """Where something happens: so often and for so long in a step."""

    layer: str
    what: str
    count: float
    seconds: float
    num_bytes: float = 0.0


@dataclass(frozen=True)
class RankProfile:
    """`busy`: seconds in which the device computes; `idle` by cause, and `busy` and `idle` together are
    `seconds`. `parts`: seconds of the thread that trains. `facts`: see `train/profiler.py`."""

    rank: int
    device: str
    first_step: int
    num_steps: int
    seconds: float
    busy: float
    idle: dict[str, float]
    parts: dict[str, float]
    classes: dict[str, float]
    layers: dict[str, LayerTime]
    operators: tuple[OperatorTime, ...]
    communication: float
    hidden_communication: float
    tiny_count: float
    tiny_seconds: float
    syncs: tuple[Place, ...]
    copies: tuple[Place, ...]
    facts: dict[str, Any] = field(default_factory=dict)


def measure(trace: Trace) -> RankProfile:
    """Raises ValueError where no step was profiled."""
    if not trace.steps:
        raise ValueError("no step in the trace")
    device = str(trace.facts.get("device", "cuda" if trace.kernels else "cpu"))
    own = [one for one in trace.operators if one.thread == trace.main or one.is_backward]
    work = trace.kernels if trace.kernels else own
    num = trace.num_steps
    whole = union(trace.steps)
    waiting = set() if trace.kernels else _around_communication(own)
    busy_spans = union(_span(one) for one in work if not _communicates(one) and id(one) not in waiting)
    busy, idle = _busy_and_idle(trace, whole, busy_spans)
    wire = union([_span(one) for one in (trace.kernels or trace.gloo) if _communicates(one)])
    tiny = [one for one in work if _is_tiny(one, bool(trace.kernels))]
    return RankProfile(
        rank=int(trace.facts.get("rank", 0)),
        device=device,
        first_step=int(trace.facts.get("first_step", 0)),
        num_steps=num,
        seconds=length(whole) / num,
        busy=busy / num,
        idle={cause: seconds / num for cause, seconds in idle.items()},
        parts=_parts(trace, whole),
        classes=_classes(work, num),
        layers=_layers(trace, num),
        operators=_operators(work, num),
        communication=length(wire) / num,
        hidden_communication=length(both(wire, busy_spans)) / num,
        tiny_count=len(tiny) / num,
        tiny_seconds=_tiny_seconds(trace, tiny) / num,
        syncs=_syncs(trace, num),
        copies=_copies(trace, num),
        facts=trace.facts,
    )


def _span(one: Event) -> Span:
    return one.start, one.end


def _communicates(one: Event) -> bool:
    return class_of(one.name) == "communication"


def _around_communication(operators: Iterable[Event]) -> set[int]:
    """Operators of ours that send and wait within: what they do besides, operators in them do."""
    around: set[int] = set()
    for one in operators:
        above = one.parent if _communicates(one) else None
        while above is not None and id(above) not in around:
            around.add(id(above))
            above = above.parent
    return around


def _is_of_stages(one: Event) -> bool:
    return "send" in one.name.lower() or "recv" in one.name.lower()


@cache
def class_of(name: str) -> str:
    """Of an operator or a kernel: of a trace's 100,000 events there are a few hundred."""
    lowered = name.lower()
    return next((kind for kind, words in _CLASSES if any(word in lowered for word in words)), "elementwise")


def _busy_and_idle(trace: Trace, whole: list[Span], busy_spans: list[Span]) -> tuple[float, dict[str, float]]:
    data = union(_span(one) for one in trace.host if one.name == f"{PART}data")
    sent = [*trace.gloo, *(one for one in (*trace.kernels, *trace.operators) if _communicates(one))]
    wire = union(_span(one) for one in sent if not _is_of_stages(one))
    stages = union(_span(one) for one in sent if _is_of_stages(one))
    syncs = union(_span(one) for one in trace.runtime if one.name in _RUNTIME_SYNCS)
    # on a CPU reading is done by the thread that trains: its operators are no training either
    computing = both(minus(busy_spans, data) if not trace.kernels else busy_spans, whole)
    left, idle = minus(whole, computing), {}
    causes = (("data", data), ("collectives", wire), ("stages", stages), ("synchronisation", syncs))
    for cause, spans in causes:
        idle[cause] = length(both(left, spans))
        left = minus(left, spans)
    idle["host"] = length(left)
    return length(computing), idle


def _parts(trace: Trace, whole: list[Span]) -> dict[str, float]:
    """What no part has is the agreement of the ranks, records, and the like."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for one in trace.host:
        if one.name.startswith(PART) and one.thread == trace.main:
            spans[one.name.removeprefix(PART)].append(_span(one))
    num = trace.num_steps
    parts = {name: length(union(of_part)) / num for name, of_part in spans.items()}
    others = union(span for of_part in spans.values() for span in of_part)
    return {**parts, "other": length(minus(whole, others)) / num}


def _classes(work: Iterable[Event], num: int) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for one in work:
        seconds[class_of(one.name)] += _own(one) / num
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _own(one: Event) -> float:
    """Seconds: nothing stands in a kernel."""
    return (one.own if one.kind == "cpu_op" else one.end - one.start) / 1e6


def _operators(work: Iterable[Event], num: int) -> tuple[OperatorTime, ...]:
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for one in work:
        counts[one.name] += 1
        seconds[one.name] += _own(one)
    names = sorted(seconds, key=lambda name: -seconds[name])[:_MOST_OPERATORS]
    return tuple(OperatorTime(name, counts[name] / num, seconds[name] / num) for name in names)


def _layers(trace: Trace, num: int) -> dict[str, LayerTime]:
    """On a CPU with what Python does between the operators of a forward pass; on a GPU of the kernels."""
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    leaves: dict[str, int] = defaultdict(int)
    leaf_seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for one in trace.host:
        if one.layer and one.name == f"layer: {one.layer}" and not one.is_backward:
            calls[one.layer] += 1
        if not one.layer or (trace.kernels and one.kind != "cpu_op"):
            continue
        if not trace.kernels:
            (backward if one.is_backward else forward)[one.layer] += one.own / 1e6
        if one.kind == "cpu_op" and one.is_leaf:
            leaves[one.layer] += 1
            leaf_seconds[one.layer] += (one.end - one.start) / 1e6
    for kernel in trace.kernels:
        if kernel.layer:
            (backward if kernel.is_backward else forward)[kernel.layer] += kernel.seconds
    return {
        name: LayerTime(
            forward[name] / num, backward[name] / num, leaves[name] / num, leaf_seconds[name] / num,
            calls[name] / num,
        )
        for name in dict.fromkeys((*calls, *forward, *backward))
    }  # fmt: skip


def _is_tiny(one: Event, on_device: bool) -> bool:
    top = on_device or one.parent is None or one.parent.kind != "cpu_op" or one.parent.name.startswith("auto")
    return top and one.end - one.start < TINY_MICROSECONDS and not one.name.startswith("auto")


def _tiny_seconds(trace: Trace, tiny: list[Event]) -> float:
    """With the pause behind each, as far as nothing else runs in it: so long does it take to start one."""
    work = trace.kernels or trace.operators
    busy = union(_span(one) for one in work)
    reach = union((one.start, one.end + TINY_MICROSECONDS) for one in tiny)
    others = minus(busy, union(_span(one) for one in tiny))
    return length(both(minus(reach, others), union(trace.steps)))


def _syncs(trace: Trace, num: int) -> tuple[Place, ...]:
    """In the layers only: what the loop itself reads, it reads once a step."""
    syncs: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for one in trace.host:
        named = one.name in _SYNCS or one.name in _RUNTIME_SYNCS
        if named and one.layer and one.part == "forward and backward":
            syncs[one.layer, one.name].append(one)
    return _places(syncs, num)


def _copies(trace: Trace, num: int) -> tuple[Place, ...]:
    copies: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for one in trace.operators:
        if one.name in ("aten::copy_", "aten::cat") and one.part == "forward and backward":
            copies[one.layer, one.name].append(one)
    for one in trace.kernels:
        if one.kind == "gpu_memcpy" and "DtoD" not in one.name:
            copies[one.layer, one.name].append(one)
    return _places(copies, num)[:_MOST_OPERATORS]


def _places(by_place: dict[tuple[str, str], list[Event]], num: int) -> tuple[Place, ...]:
    places = [
        Place(
            layer,
            name,
            len(events) / num,
            sum(one.seconds for one in events) / num,
            sum(map(_num_bytes, events)) / num,
        )
        for (layer, name), events in by_place.items()
    ]
    return tuple(sorted(places, key=lambda place: -place.seconds))


def _num_bytes(one: Event) -> float:
    """Of the first tensor that it was given, or as CUDA says."""
    if "bytes" in one.args:
        return float(one.args["bytes"])
    shapes, types = one.args.get("Input Dims") or [[]], one.args.get("Input type") or [""]
    count = 1.0
    for size in shapes[0] if shapes and isinstance(shapes[0], list) else ():
        count *= size if isinstance(size, int) else 1
    return count * _BYTES.get(types[0] if types else "", 4)
