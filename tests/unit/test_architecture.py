"""What can be extended is known by name in one place: its own file, its table, the enumeration of what the
pipeline's file may say. Whoever branches on a name elsewhere makes the next one expensive."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from mlpipe._core.meshes import STRATEGIES
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.kinds import KINDS, Kind
from mlpipe.spec.part import spec_part
from mlpipe.submit.backends import TABLE

pytestmark = pytest.mark.unit
SOURCE = Path(__file__).resolve().parents[2] / "src" / "mlpipe"
Modules = dict[Path, ast.Module]

# Where a name may stand as text, besides files and folders that are called by it.
HOMES = {
    "strategy": {
        "plan/strategies/__init__.py",  # the table
        "_core/meshes.py",  # the enumeration
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
        "spec/slurm_rules.py",
    },
}
# A backend's own folder, the specification's section, and what is rendered of it.
OF_BACKEND = {
    "kubernetes": ("submit/kubernetes/", "spec/", "render/", "plan/pods.py", "plan/cluster.py"),
    "jenkins": ("submit/jenkins/", "render/jenkins.py"),
    "local": ("submit/local/",),
    "slurm": ("submit/slurm/", "spec/slurm", "render/slurm.py", "plan/slurm.py"),
    "rented": ("submit/rented/",),
}
MOST_PARAMETERS = 6
# Those with more, and why no dataclass says it better; a verb has as many as it has options.
MANY_PARAMETERS = {
    "_core/presets.py:_llama": "a row of a table of figures",
    "store/runs.py:create_run": "what a run's first state is made of, in one place",
    "submit/sweeps/controller.py:drive_sweep": "switches of `mlpipe sweep`, beside what every driver has",
    "train/data/corpus.py:build_corpus": "the options of mlpipe-corpus",
    "train/parallel/attention_blocks.py:attend_backward": "the tensors of an attention",
    "train/parallel/context_attention.py:_backward": "an operator of torch, whose schema has no structures",
    "train/parallel/context_attention.py:_backward_shapes": "of that operator",
    "train/parallel/exact_attention.py:backward": "the tensors of an attention",
    "train/parallel/gathered_attention.py:backward": "of that operator",
    "train/parallel/ring_attention.py:backward": "of that operator",
}
NAMES = {"strategy": set(STRATEGIES), "optimizer": set(OPTIMIZERS), "backend": set(TABLE)}


@pytest.fixture(scope="module")
def modules() -> Iterator[Modules]:
    yield {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    nodes_of.cache_clear()


@cache
def nodes_of(module: ast.Module) -> list[ast.AST]:
    """All, listed once for all tests: to walk the tree is most of what they do."""
    return list(ast.walk(module))


def texts(module: ast.Module) -> Iterator[str]:
    """String literals, less docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in nodes_of(module)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes_of(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("what", NAMES)
def test_a_name_stands_in_its_own_file_its_table_and_the_enumeration(modules: Modules, what: str) -> None:
    elsewhere = {
        f"{path}: {text}"
        for path, module in modules.items()
        if path.as_posix() not in HOMES[what]
        for text in texts(module)
        if text in NAMES[what] and text not in {*path.parts, path.stem}
    }
    assert elsewhere == set()


def test_only_a_backend_and_what_is_rendered_of_it_name_it(modules: Modules) -> None:
    """As a text, as an attribute (`pipeline.kubernetes`), or by importing its modules."""
    assert set(OF_BACKEND) == set(TABLE)
    named = [
        f"{path}:{line} {name}"
        for path, module in modules.items()
        if path.as_posix() != "submit/backends.py"
        for line, name in backends_named(module)
        if not path.as_posix().startswith(OF_BACKEND[name])
    ]
    assert named == []


def backends_named(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in nodes_of(module):
        match node:
            case (
                ast.Constant(value=str(name)) | ast.Attribute(attr="kubernetes" | "jenkins" | "slurm" as name)
            ):
                pass
            case ast.ImportFrom(module=str(imported)) if imported.startswith("mlpipe.submit."):
                name = imported.split(".")[2]
            case _:
                continue
        if name in OF_BACKEND:
            yield node.lineno, name


def test_the_trainer_asks_for_no_strategy(modules: Modules) -> None:
    """Nor has its name, as no other file has: what is applied follows from the mesh and the plan's flags."""
    trainer = {path: module for path, module in modules.items() if path.parts[0] == "train"}
    named = [
        f"{path}:{node.lineno}"
        for path, module in trainer.items()
        for node in nodes_of(module)
        if isinstance(node, ast.Constant) and node.value in STRATEGIES
    ]
    asked = [
        f"{path}:{node.lineno}"
        for path, module in trainer.items()
        for node in nodes_of(module)
        if isinstance(node, ast.Compare | ast.Match)
        and any(isinstance(part, ast.Attribute) and part.attr == "strategy" for part in ast.walk(node))
    ]
    assert named == asked == []


def test_the_table_of_techniques_has_each_file_once(modules: Modules) -> None:
    folder = Path("train/parallel")
    named = [
        ast.literal_eval(call.args[0])
        for call in nodes_of(modules[folder / "apply.py"])
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Technique"
    ]
    have = [
        path.stem
        for path, module in modules.items()
        if path.parent == folder
        and any(isinstance(node, ast.FunctionDef) and node.name == "apply" for node in module.body)
    ]
    assert sorted(named) == sorted(have)


def test_who_a_rank_is_stands_in_the_world_alone(modules: Modules) -> None:
    """A session counts the processes that torchrun started, to compare them with the plan; a calibration
    measures machines and has no mesh."""
    asked = {
        path.name
        for path, module in modules.items()
        if path.parts[0] == "train"
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and node.attr in ("get_rank", "get_world_size")
    }
    assert asked <= {"session.py", "calibrate.py"}


def test_a_function_has_few_parameters(modules: Modules) -> None:
    many = {
        f"{path}:{node.name}"
        for path, module in modules.items()
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and num_parameters(node) > MOST_PARAMETERS
        and not any(ast.unparse(one).startswith("click.") for one in node.decorator_list)
    }
    assert many == set(MANY_PARAMETERS)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Less `self` and `cls`."""
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(one.arg not in ("self", "cls") for one in given)


def branches(module: ast.Module) -> Iterator[str]:
    """Comparisons with the name of a kind where something called `kind` is compared, and chains of
    `stage.<kind> is not None`."""
    for node in nodes_of(module):
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


def outside(modules: Modules, folders: Iterable[str]) -> Modules:
    return {path: module for path, module in modules.items() if path.parts[0] not in folders}


def test_nobody_asks_of_which_kind_a_stage_is(modules: Modules) -> None:
    asked = {
        f"{path}:{one}" for path, module in outside(modules, ["kinds"]).items() for one in branches(module)
    }
    assert asked == set()


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_every_kind_of_stages_has_its_parts(kind: Kind) -> None:
    assert kind.part("plan").PLAN.kind == kind.name
    assert spec_part(kind).description
    parts = {path.stem for path in (SOURCE / "kinds" / kind.name).glob("*.py")} - {"__init__"}
    runs = {"workers": {"worker"}, "driver": {"driver"}, "command": set()}[kind.runs]
    assert parts == {"spec", "plan", "build", "report"} | runs


def test_an_import_within_a_function_spares_its_module_something(modules: Modules) -> None:
    """What the module's own imports load in any case stands at its top, where it is looked for."""
    by_name = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in modules}
    at_top = {path: ours(module.body, by_name) for path, module in modules.items()}
    needless = []
    for path, module in modules.items():
        loaded, left = {path}, at_top[path]
        while left:
            loaded |= left
            left = {below for one in left for below in at_top[one]} - loaded
        for function in nodes_of(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                needless += [f"{path}: {one}" for one in ours(function.body, by_name) & loaded]
    assert needless == []


def ours(statements: Iterable[ast.AST], by_name: dict[str, Path]) -> set[Path]:
    """Modules of ours that are imported where these run, outside of functions."""
    found: set[Path] = set()
    for statement in statements:
        match statement:
            case ast.ImportFrom(module=str(module), names=names):
                inside = module.removeprefix("mlpipe.")
                submodules = {by_name[name] for one in names if (name := f"{inside}.{one.name}") in by_name}
                found |= submodules or ({by_name[inside]} if inside in by_name else set())
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.expr():  # holds no import, but most of a tree
                pass
            case _:
                found |= ours(ast.iter_child_nodes(statement), by_name)
    return found
