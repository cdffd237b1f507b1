"""A trace of torch.profiler, as it stands in the store: Chrome's JSON, gzipped.

Each event knows what it stands in, and whose layer it is. A backward operator has no span around it: it is of
the layer whose forward operator made its node of the graph, which has the same sequence number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

STEP, LAYER, PART = "ProfilerStep#", "layer: ", "part: "
_NODE = "autograd::engine::evaluate_function: "
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float]


@dataclass
class Event:
    """Times in microseconds. `own`: less what stands in it. `layer`: "" outside of any."""

    name: str
    kind: str
    start: float
    end: float
    thread: Any
    args: dict[str, Any]
    layer: str = ""
    part: str = ""
    is_backward: bool = False
    is_leaf: bool = True
    own: float = 0.0
    parent: Event | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e6


class Trace:
    """`events`: of the profiled steps; `steps`: their spans. `facts`: what the profiler knew besides."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.facts: dict[str, Any] = document.get("mlpipe") or {}
        events = [
            Event(
                str(one["name"]),
                str(one.get("cat", "")),
                float(one["ts"]),
                float(one["ts"]) + float(one.get("dur", 0.0)),
                one.get("tid"),
                one.get("args") or {},
            )
            for one in document.get("traceEvents", ())
            if one.get("ph") == "X"
        ]
        # the device's timeline has steps and annotations of its own, as copies
        steps = [one for one in events if one.name.startswith(STEP) and one.kind == "user_annotation"]
        self.steps: list[Span] = sorted((one.start, one.end) for one in steps)
        self.main = steps[0].thread if steps else None
        begin, end = (self.steps[0][0], self.steps[-1][1]) if steps else (0.0, 0.0)
        inside = [one for one in events if begin <= one.start < end]
        self.kernels = [one for one in inside if one.kind in _DEVICE]
        self.runtime = [one for one in inside if one.kind in ("cuda_runtime", "cuda_driver")]
        # an operation of gloo takes as long as it is under way, on no thread of ours
        self.gloo = [
            one for one in inside if one.name.startswith(("gloo:", "nccl:")) and one.kind != "kernel"
        ]
        known = {id(one) for one in (*self.kernels, *self.gloo)}
        shown = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
        self.host = [one for one in inside if one.kind in shown and id(one) not in known]
        _nest(self.host)
        self.operators = [one for one in self.host if one.kind == "cpu_op"]
        _launched_by(self.kernels, self.runtime)

    @property
    def num_steps(self) -> int:
        return len(self.steps)


def _nest(events: list[Event]) -> None:
    events.sort(key=lambda one: (str(one.thread), one.start, -one.end))
    stack: list[Event] = []
    for one in events:
        while stack and (stack[-1].thread != one.thread or stack[-1].end <= one.start):
            stack.pop()
        one.own = one.end - one.start
        if stack:
            above = one.parent = stack[-1]
            above.own -= one.own
            one.layer, one.part, one.is_backward = above.layer, above.part, above.is_backward
            if one.kind == "cpu_op":
                above.is_leaf = False
        if one.name.startswith(LAYER):
            one.layer = one.name.removeprefix(LAYER)
        elif one.name.startswith(PART):
            one.part = one.name.removeprefix(PART)
        elif one.name.startswith(_NODE):
            one.is_backward, one.layer = True, ""
        stack.append(one)
    _name_backward(events)


def _name_backward(events: list[Event]) -> None:
    """The last operator to begin under a sequence number is the one that made the node: those before it with
    the same made none."""
    made: dict[Any, tuple[float, str]] = {}
    for one in events:
        number = one.args.get("Sequence number")
        if number is None or one.args.get("Fwd thread id") or one.name.startswith(_NODE):
            continue
        if one.start >= made.get(number, (0.0, ""))[0]:
            made[number] = (one.start, one.layer)
    named: dict[int, str] = {}
    for one in events:  # parents stand before what is in them
        if one.name.startswith(_NODE):
            one.layer = made.get(one.args.get("Sequence number"), (0.0, ""))[1]
            named[id(one)] = one.layer
        elif one.parent is not None and id(one.parent) in named and not one.name.startswith(LAYER):
            one.layer = named[id(one)] = named[id(one.parent)]


def _launched_by(kernels: list[Event], runtime: list[Event]) -> None:
    """A kernel is of the layer in which it was launched."""
    launches = {one.args.get("correlation"): one for one in runtime}
    for kernel in kernels:
        launch = launches.get(kernel.args.get("correlation"))
        if launch is not None:
            kernel.layer, kernel.part = launch.layer, launch.part
            kernel.is_backward, kernel.parent = launch.is_backward, launch.parent


def union(spans: Iterable[Span]) -> list[Span]:
    """Joined where they touch, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def minus(spans: list[Span], others: list[Span]) -> list[Span]:
    """Of joined `spans` what lies in none of the joined `others`."""
    rest: list[Span] = []
    first = 0  # of the others, those before it end before what is left of the spans
    for start, end in spans:
        while first < len(others) and others[first][1] <= start:
            first += 1
        for at in range(first, len(others)):
            low, high = others[at]
            if low >= end:
                break
            if low > start:
                rest.append((start, low))
            start = max(start, high)
        if start < end:
            rest.append((start, end))
    return rest


def both(spans: list[Span], others: list[Span]) -> list[Span]:
    """What lies in joined `spans` and in the joined `others`."""
    return minus(spans, minus(spans, others))


def length(spans: Iterable[Span]) -> float:
    """In seconds."""
    return sum(end - start for start, end in spans) / 1e6
