"""The planner's seams: who may name what."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mlpipe._core import meshes
from mlpipe.plan.axes import AXES
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.strategies import ORDER

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3] / "src" / "mlpipe"


def test_only_its_own_files_name_the_shape_of_presets() -> None:
    naming = {p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if "LlamaConfig" in p.read_text()}
    assert naming == {
        "_core/presets.py",
        "plan/shapes/dense.py",
        "plan/shapes/presets.py",
        "plan/shapes/pretrained.py",  # reads it off a config.json
        "plan/reference.py",  # of calibrations
        "train/models/llama.py",
        "train/parallel/tensor.py",  # splits it
        "train/export.py",  # writes it as transformers' LlamaForCausalLM
    }


@pytest.mark.parametrize("name", ORDER)
def test_a_strategy_is_settings_and_nothing_else(name: str) -> None:
    """Without the planner's arithmetic: it imports the mesh alone."""
    tree = ast.parse((ROOT / "plan" / "strategies" / f"{name}.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "mlpipe.plan.mesh"}


def test_who_plans_for_a_gpu_never_meets_the_heap_of_a_cpu() -> None:
    words = ("glibc", "malloc", "trimming", "holes", "gloo")
    for path in [ROOT / "plan" / "allocators" / "cuda.py", *(ROOT / "plan" / "axes").glob("*.py")]:
        assert not [word for word in words if word in path.read_text()], path


def test_what_the_trainer_can_split_over_has_a_price() -> None:
    """And a mesh's axes are the file's, in its order."""
    assert set(AXES) == set(meshes.AXES)
    assert list(vars(Mesh())) == list(meshes.AXES)
    assert list(Mesh().axes) == list(meshes.FACTORS)
