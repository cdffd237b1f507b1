"""Which GPUs can do what a stage asks of them: slices and shared ones are for who waits for nobody, and the
trainer computes on some vendors' alone. Reads the raw tree, like `spec/rules.py`."""

from __future__ import annotations

from collections.abc import Iterator

from mlpipe._core.gpus import gpu_classes, slices_of
from mlpipe.kinds import KINDS
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, problem_of_key, text_of

ALONE = "write gpus_per_node: 1 and nodes: 1, or take whole GPUs of its own"


def check(stages: list[Node]) -> Iterator[Problem]:
    """`stages`: those that are mappings."""
    for stage in stages:
        resources = get(stage, "resources")
        if resources is None or not isinstance(resources.value, dict):
            continue
        gpus, part, sharing = (get(resources, key) for key in ("gpus_per_node", "slice", "gpu_sharing"))
        if gpus is not None and isinstance(gpus.value, int) and gpus.value > 0:
            yield from _gpus(stage, resources, part)
            if sharing is not None:
                yield from _shared(sharing, resources)
            continue
        gpu = get(resources, "gpu") if gpus is None else None  # 0 says that none are meant
        for node, key in ((gpu, "gpu"), (part, "slice"), (sharing, "gpu_sharing")):
            if node is not None:
                words = f"{key} is of GPUs, and there are none"
                yield problem_of_key(node, words, "remove it, or set gpus_per_node")


def _gpus(stage: Node, resources: Node, part: Node | None) -> Iterator[Problem]:
    gpu = get(resources, "gpu")
    name = text_of(gpu)
    known = gpu_classes().get(name or "")
    has_ranks = any(kind.runs == "workers" for key, kind in KINDS.items() if key in stage.value)
    if gpu is not None and known is not None and not known.vendor.trains and has_ranks:
        words = f"the trainer computes on GPUs of CUDA and ROCm, not on {name}"
        yield Problem.at(gpu.place, words, "train elsewhere; a command may use them")
    if part is None:
        return
    if known is None or text_of(part) not in known.slices:
        yield Problem.at(part.place, f"{name} has no slice {text_of(part)!r}", slices_of(name))
    elif has_ranks and num_ranks(resources) > 1:
        yield problem_of_key(part, "slices have no links to each other: one worker trains alone", ALONE)


def _shared(sharing: Node, resources: Node) -> Iterator[Problem]:
    """Whoever waits for a rank whose GPU others use waits for those."""
    name = text_of(get(resources, "gpu"))
    known = gpu_classes().get(name or "")
    if known is not None and not known.vendor.sharing_label:
        yield problem_of_key(
            sharing, f"GPUs like {name} have no label that says they are shared", "remove it"
        )
    if (count := num_ranks(resources)) > 1:
        words = f"{count} GPUs that others use, too: each step waits for the one in use"
        yield problem_of_key(sharing, words, ALONE)


def num_ranks(resources: Node) -> int:
    """Of a stage with GPUs; of a range of nodes, two are enough to know."""
    gpus, nodes = get(resources, "gpus_per_node"), get(resources, "nodes")
    each = gpus.value if gpus is not None and isinstance(gpus.value, int) else 1
    if nodes is None:
        return each
    return each * (nodes.value if isinstance(nodes.value, int) else 2)
