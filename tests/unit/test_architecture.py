"""What can be extended is known by name in one place: its own file, its table, the enumeration of what the
pipeline's file may say. Whoever branches on a name elsewhere makes the next one expensive."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.kinds import KINDS
from mlpipe.plan.plan import STRATEGIES
from mlpipe.submit.backends import TABLE

pytestmark = pytest.mark.unit
SOURCE = Path(__file__).resolve().parents[2] / "src" / "mlpipe"
MODULES = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}

# Where a name may stand as text, besides files and folders that are called by it.
HOMES = {
    "strategy": {
        "plan/strategies/__init__.py",  # the table
        "plan/plan.py",  # the enumeration
        "plan/older.py",  # what plans of earlier versions meant by it
        "kinds/train/spec.py",  # rules of the pipeline's file
    },
    "optimizer": {
        "_core/optimizers.py",  # the table, by which the pipeline's file is read
        "train/resuming.py",  # whose states checkpoints of earlier versions are
    },
    "backend": {
        "submit/backends.py",  # the table
        "spec/kubernetes_rules.py",  # a key of the pipeline's file is called so, too
    },
}
NAMES = {"strategy": set(STRATEGIES), "optimizer": set(OPTIMIZERS), "backend": set(TABLE)}


def texts(module: ast.Module) -> Iterator[str]:
    """String literals, less docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("what", NAMES)
def test_a_name_stands_in_its_own_file_its_table_and_the_enumeration(what: str) -> None:
    elsewhere = {
        f"{path}: {text}"
        for path, module in MODULES.items()
        if path.as_posix() not in HOMES[what]
        for text in texts(module)
        if text in NAMES[what] and text not in {*path.parts, path.stem}
    }
    assert elsewhere == set()


def branches(module: ast.Module) -> Iterator[str]:
    """Comparisons with the name of a kind where something called `kind` is compared, and chains of
    `stage.<kind> is not None`."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        words = {word for side in sides for part in ast.walk(side) if (word := name_of(part)) is not None}
        said = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
        of_kind = "kind" in words and "runs" not in words and said & set(KINDS)
        chain = None in said and any(isinstance(side, ast.Attribute) and side.attr in KINDS for side in sides)
        if of_kind or chain:
            yield f"{node.lineno}: {ast.unparse(node)}"


def name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def outside(folders: Iterable[str]) -> dict[Path, ast.Module]:
    return {path: module for path, module in MODULES.items() if path.parts[0] not in folders}


def test_nobody_asks_of_which_kind_a_stage_is() -> None:
    found = {f"{path}:{one}" for path, module in outside(["kinds"]).items() for one in branches(module)}
    assert found == set()
