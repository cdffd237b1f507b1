"""What the trainer may know: techniques by their table, ranks by the World, and no strategy by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlpipe
from mlpipe.plan.plan import STRATEGIES

pytestmark = pytest.mark.unit
TRAIN = Path(mlpipe.__file__).parent / "train"


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Of all modules of the trainer, each with where it stands."""
    for path in sorted(TRAIN.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield f"{path.relative_to(TRAIN)}:{getattr(node, 'lineno', 0)}", node


def test_no_strategy_is_named_or_asked_for() -> None:
    named = [at for at, node in nodes() if isinstance(node, ast.Constant) and node.value in STRATEGIES]
    asked = [
        at
        for at, node in nodes()
        if isinstance(node, ast.Compare | ast.Match)
        and any(isinstance(part, ast.Attribute) and part.attr == "strategy" for part in ast.walk(node))
    ]
    assert named == asked == []


def test_the_table_of_techniques_has_each_file_once() -> None:
    folder = TRAIN / "parallel"
    table = ast.parse((folder / "apply.py").read_text())
    calls = [node for node in ast.walk(table) if isinstance(node, ast.Call)]
    named = [
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "Technique"
    ]
    have = [
        path.stem
        for path in folder.glob("*.py")
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "apply"
            for node in ast.parse(path.read_text()).body
        )
    ]
    assert sorted(named) == sorted(have)


def test_who_a_rank_is_stands_in_the_world_alone() -> None:
    """A session counts the processes that torchrun started, to compare them with the plan; a calibration
    measures machines and has no mesh."""
    asked = {
        at.partition(":")[0]
        for at, node in nodes()
        if isinstance(node, ast.Attribute) and node.attr in ("get_rank", "get_world_size")
    }
    assert asked <= {"session.py", "calibrate.py"}
