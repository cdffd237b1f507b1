"""A user's `entry: package.module:function`, checked before anything starts and without running any of it.

Importing the user's module would import torch, which takes seconds and which the submitting side may not
have. So the module is found as Python would find it, and its source is parsed. What only running it can show
(that it returns a module, say) the workers check as soon as torch is there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from mlpipe._core.errors import SubmitError
from mlpipe._core.meshes import UNSPLIT
from mlpipe.plan.entry import Entry, search_path
from mlpipe.plan.plan import Plan

_OF_PYTHON = sys.stdlib_module_names | {"test"}  # which is there as well
_PLAIN = sys.stdlib_module_names - {"importlib"} | {"torch", "numpy"}


def check_entries(plans: Iterable[Plan], folder: str) -> None:
    """Of all plans, as seen from the working folder `folder` and the stages' PYTHONPATH. Raises SubmitError
    (input)."""
    for plan in plans:
        if plan.kind.runs != "workers":
            continue
        training = plan.work.training
        path = search_path(plan.launch.env, folder)
        if training.model.preset is None:
            tree = _check(training.model.build, path)
            if tree is not None and training.mesh.tp > 1 and not training.model.tensor:
                _check_split(training.model.build, tree)
        for source in training.data.sources:
            if source.dataset is not None:
                _check(source.dataset, path, passed=("split",), offered=("rank", "world_size"))
        if training.data.collate is not None:  # called with the samples in front
            _check(Entry(training.data.collate, {}), path, num_positional=1)
        own = training.optimizer.entry
        if own is not None:  # called with the parameters in front, whatever their name is there
            _check(Entry(own, training.optimizer.args), path, num_positional=1)
        for callback in training.callbacks:
            _check(Entry(callback.entry, callback.args), path, offered=("context",))
        if training.optimizer.own_schedule is not None:  # with the step and the number of steps in front
            _check(training.optimizer.own_schedule, path, num_positional=2)


def _check(
    entry: Entry,
    search: Sequence[str],
    passed: Sequence[str] = (),
    num_positional: int = 0,
    offered: Sequence[str] = (),
) -> ast.Module | None:
    """What the module says, where it is Python. `passed`, `num_positional`: arguments that mlpipe adds to the
    user's, by name and in front; `offered`: those that it adds for a function that takes them."""
    module, _, name = entry.entry.partition(":")
    top = module.partition(".")[0]
    if top in _OF_PYTHON and PathFinder.find_spec(top, search[-1:]) is not None:
        words = f"Python has a module {top!r} of its own, which stands before that of {search[-1]}"
        raise _broken(entry, words, "give yours another name")
    spec = _find(module, search)
    if spec is None:
        raise _broken(
            entry,
            f"there is no module {module!r} to import",
            f"start mlpipe where `python -c 'import {module}'` works, or install the package",
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None  # compiled, or a namespace: nothing to read
    path = Path(spec.origin)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise SubmitError(
            f"this is not Python: {error}", where=f"{path}:{line}" if line else str(path), kind="input"
        ) from error
    if name not in _top_level_names(tree):
        raise _broken(
            entry, f"module {module} has no function {name!r}", f"define `def {name}(...)` in {path}"
        )
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name and not node.decorator_list:
            del node.args.args[:num_positional]
            named = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
            _check_arguments(entry, node, path, {*entry.args, *passed, *named.intersection(offered)})
    return tree


def _check_split(entry: Entry, tree: ast.Module) -> None:
    """Over tp, of a model for which the file has no patterns: a class of `transformers` brings them. It comes
    out of no module that imports nothing but torch and what Python has itself."""
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {
        "." if node.level else str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    is_plain = {name.partition(".")[0] for name in imported} <= _PLAIN
    if is_plain and "base_model_tp_plan" not in ast.dump(tree):
        raise _broken(entry, UNSPLIT.message, UNSPLIT.remedy)


def _find(module: str, search: Sequence[str]) -> ModuleSpec | None:
    """As Python finds it with `search` ahead of what is installed, but parents are not executed."""
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top, search) or find_spec(top)
    for part in rest:
        if spec is None:
            return None
        # by its last name: a namespace package asks sys.modules for the parent that its full name has
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    return spec


def _top_level_names(tree: ast.Module) -> _Names:
    names = _Names()
    for node in ast.walk(tree):  # also inside `if` and `try`
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                names.any |= alias.name == "*"
                names.add(alias.asname or alias.name)
    return names


class _Names(set[str]):
    """`any`: a star import may have brought more."""

    any = False

    def __contains__(self, name: object) -> bool:
        return self.any or super().__contains__(name)


def _check_arguments(entry: Entry, node: ast.FunctionDef, path: Path, given: set[str]) -> None:
    arguments = node.args
    named = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    required = [argument.arg for argument in arguments.args[: len(arguments.args) - len(arguments.defaults)]]
    required += [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    where = f"{path}:{node.lineno}"
    unknown = sorted(given - set(named)) if arguments.kwarg is None else []
    missing = [name for name in required if name not in given]
    if arguments.posonlyargs:
        raise SubmitError(f"{node.name} takes arguments by position only", where=where, kind="input")
    if unknown:
        raise SubmitError(
            f"{node.name} takes no argument {', '.join(map(repr, unknown))}",
            where=where,
            hint=f"it takes {', '.join(named) or 'none'}; {entry.entry} is called with `args`"
            + (", and a data set with split=" if "split" in unknown else ""),
            kind="input",
        )
    if missing:
        raise SubmitError(
            f"{node.name} needs the argument {', '.join(map(repr, missing))}",
            where=where,
            hint=f"write it under the `args` of {entry.entry}",
            kind="input",
        )


def _broken(entry: Entry, message: str, hint: str) -> SubmitError:
    return SubmitError(message, where=entry.entry, hint=hint, kind="input")
