"""The page of what can be trained together: by the loader's own rules (a pipeline is written for each pair,
and refused or not) and by what the tests say that they combine: `@pytest.mark.combines("tp", "dp_shard")`,
read without importing them. `"optimizer *"` there stands for each of these, one at a time."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import combinations, product
from pathlib import Path
from typing import Any

from mlpipe._core.compression import COMPRESSIONS
from mlpipe._core.meshes import AXES
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe._core.pipelines import SCHEDULES
from mlpipe.spec.rounds import ROUNDS

TESTS = Path(__file__).resolve().parents[1] / "tests" / "torch"
_ABOUT_AXES = {
    "pp": "stages", "dp_replicate": "copies", "dp_shard": "shards", "cp": "parts of a sequence",
    "tp": "parts of a layer", "ep": "experts",
}  # fmt: skip
_DENSE, _EXPERTS = {"preset": "llama-8b", "seq_len": 32}, {"preset": "moe-2m", "seq_len": 32}
_OWN = {"entry": "package.models:build", "seq_len": 32}
# Keys below `train` (`resources`: groups of machines), and sizes of the mesh besides the axis in question.
_FEATURES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "strategy zero1": ({"strategy": "zero1"}, {"dp_replicate": 2}),
    "strategy zero2": ({"strategy": "zero2"}, {"dp_shard": 2}),
    **{
        f"pipeline {name}": ({"pipeline": {"schedule": name, "microbatches": 4}}, {"pp": 2})
        for name in SCHEDULES
    },
    "context ring": ({"context": {"exchange": "ring"}}, {"cp": 2}),
    "communication resident": ({"communication": "resident"}, {}),
    "communication on_demand": ({"communication": "on_demand"}, {"dp_shard": 2}),
    "stragglers move_load": ({"stragglers": "move_load"}, {}),
    "resources in groups": ({"resources": "groups"}, {"dp_replicate": 2}),
    "precision bf16": ({"precision": "bf16"}, {}),
    "precision fp16": ({"precision": "fp16"}, {}),
    "accumulation": ({"accumulation": 2}, {}),
    "activation_checkpointing selective": ({"activation_checkpointing": "selective"}, {}),
    "activation_checkpointing full": ({"activation_checkpointing": "full"}, {}),
    "offload activations": ({"offload": "activations", "activation_checkpointing": "full"}, {}),
    "offload optimizer": ({"offload": "optimizer"}, {}),
    "offload all": ({"offload": "all", "activation_checkpointing": "full"}, {}),
    "float8": ({"float8": True, "precision": "bf16"}, {}),
    "loss fused": ({"loss": "fused"}, {}),
    "compile": ({"compile": "block"}, {}),
    "deterministic": ({"deterministic": True}, {}),
    "freeze": ({"freeze": ["embed_tokens.*"]}, {}),
    "adapter lora": ({"adapter": {"lora": {"rank": 4}}, "init_from": {"path": "weights"}}, {}),
    "adapter base": (
        {"adapter": {"lora": {"rank": 4}, "base": "nf4"}, "init_from": {"path": "weights"}},
        {},
    ),
    "ema": ({"ema": {"decay": 0.99}}, {}),
    "validate": ({"validate": {"every": "10 steps"}}, {}),
    **{f"optimizer {name}": ({"optimizer": {"name": name}}, {}) for name in OPTIMIZERS},
    "your own optimizer": ({"optimizer": {"entry": "package.optim:Own", "lr": 1e-3}}, {}),
    "your own model": ({"model": _OWN}, {}),
    **{f"compress {name}": ({"compress": name}, {}) for name in COMPRESSIONS},
    "buckets auto": ({"buckets": "auto"}, {}),
    **{f"update {name}": ({"update": name}, {"dp_replicate": 2}) for name in ROUNDS},
    "model with experts": ({"model": _EXPERTS}, {}),
}  # fmt: skip
# No key of a training: what else is done with it. No rule refuses these.
_AFTERWARDS = ("resume under another mesh", "kill of a worker", "evaluate", "generate", "export")


def why_not(train: Mapping[str, Any], mesh: Mapping[str, int]) -> str | None:
    """The first thing that the loader has against it."""
    from mlpipe.spec.load import load_pipeline_text
    from mlpipe.spec.problems import SpecErrors

    num_workers = 1
    for axis, size in mesh.items():
        num_workers *= size if axis != "ep" else 1
    machines: Any = {"workers_per_node": num_workers}
    if "resources" in train:
        machines = [{"nodes": num_workers // 2}, {"nodes": num_workers // 2}]
    body = {
        "model": _EXPERTS if "ep" in mesh else _DENSE,
        "data": {"tokens": "tokens", "batch_size": 16},
        "steps": 100,
        **{key: value for key, value in train.items() if key != "resources"},
        "mesh": dict(mesh),
    }
    stage = {"name": "train", "train": body, "resources": machines}
    text = json.dumps({"version": 1, "name": "pair", "stages": [stage]}, sort_keys=True)
    try:
        load_pipeline_text(text, "pair.yaml")
    except SpecErrors as errors:
        return errors.problems[0].message
    return None


def tested() -> dict[frozenset[str], str]:
    """For each pair that a test of the ring `torch` names, the file of the first such test."""
    found: dict[frozenset[str], str] = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "combines":
                names = [_meant(ast.literal_eval(argument)) for argument in node.args]
                if not all(names):
                    raise ValueError(
                        f"{path.name}:{node.lineno}: no such thing to combine: {ast.unparse(node)}"
                    )
                for some in combinations(names, 2):
                    for pair in product(*some):
                        found.setdefault(frozenset(pair), path.name)
    return found


def _meant(name: str) -> list[str]:
    return [one for one in (*AXES, *_FEATURES, *_AFTERWARDS) if fnmatchcase(one, name)]


class _Cells:
    """Of the tables; `notes`: why not, numbered as they come."""

    def __init__(self) -> None:
        self.tested = tested()
        self.notes: dict[str, int] = {}

    def cell(self, pair: tuple[str, str], refused: str | None) -> str:
        test = self.tested.get(frozenset(pair))
        if refused is not None:
            if test is not None:
                raise ValueError(f"{test} combines {' and '.join(pair)}, which is refused: {refused}")
            return f"no ({self.notes.setdefault(refused, len(self.notes) + 1)})"
        return "accepted" if test is None else f"[tested](../../tests/torch/{test})"


def page(note: str) -> str:
    cells = _Cells()
    axes = _table(AXES, _axis_rows(cells))
    features = _table(AXES, _feature_rows(cells))
    notes = "".join(f"{number}. {text}.\n" for text, number in cells.notes.items())
    return f"""# What can be combined

{note.format("mlpipe.spec's rules and the marks of tests/torch")}

Each axis of the [mesh](../how-to/model-parallelism.md), of two, with each other axis and with what else a
training may say, of mlpipe's own models if nothing else is said. `tested`: a test has trained them together,
or computed a step's gradients, and compared what came of it with a training that has them not. `accepted`: no
rule refuses it, and no test trains this very pair. `no`: `mlpipe validate` refuses it with the file's line;
the reason stands below.

## Axes

{axes}
## Axes and the rest

{features}
## Why not

{notes}"""


def _table(columns: tuple[str, ...], rows: Iterator[tuple[str, list[str]]]) -> str:
    head = f"| | {' | '.join(f'`{axis}`' for axis in columns)} |\n|---|{'---|' * len(columns)}\n"
    return head + "".join(f"| {name} | {' | '.join(found)} |\n" for name, found in rows)


def _axis_rows(cells: _Cells) -> Iterator[tuple[str, list[str]]]:
    for first in AXES:
        found = []
        for second in AXES:
            mesh = {first: 2, second: 2}
            if "ep" in mesh and mesh.keys() <= {"ep", "dp_shard"}:
                mesh["dp_shard"] = 4 if first != second else 2
            elif "ep" in mesh:
                mesh["dp_shard"] = 2
            found.append("" if first == second else cells.cell((first, second), why_not({}, mesh)))
        yield f"`{first}`, {_ABOUT_AXES[first]}", found


def _feature_rows(cells: _Cells) -> Iterator[tuple[str, list[str]]]:
    for name, (train, beside) in _FEATURES.items():
        found = []
        for axis in AXES:
            mesh = {**beside, axis: 2}
            if axis == "ep":
                mesh["dp_shard"] = 2
            model = {"tensor": {"*.q": "column"}} if axis == "tp" and train.get("model") == _OWN else {}
            changed = {**train, "model": {**_OWN, **model}} if model else train
            if axis == "pp" and train.get("model") == _OWN:
                changed = {**train, "pipeline": {"cut": ["layers.1"]}}
            found.append(cells.cell((name, axis), why_not(changed, mesh)))
        yield name, found
    for name in _AFTERWARDS:
        yield name, [cells.cell((name, axis), None) for axis in AXES]
