"""A user's entry is checked before anything starts, and nothing of it runs."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import pytest
from kit.command_runs import Cli

from mlpipe._core.errors import MlpipeError
from mlpipe.plan.entry import Entry
from mlpipe.submit.entries import _check, _check_split

pytestmark = pytest.mark.unit

SOURCE = """
raise SystemExit("nobody may run this")
def build(dim, *, depth=2): ...
def anything(**args): ...
def sized(length, split="train"): ...
def unsplit(length): ...
def told(path, context): ...
def untold(path): ...
if True:
    made = build
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").write_text('raise SystemExit("nor this")')
    (package / "model.py").write_text(SOURCE)
    (package / "star.py").write_text("from somewhere import *\n")
    (package / "broken.py").write_text("def build(:\n")
    inner = tmp_path / "spaces" / "inner"  # folders without __init__.py
    inner.mkdir(parents=True)
    (inner / "model.py").write_text(SOURCE)
    return str(tmp_path)


def test_what_is_called_as_a_module_of_pythons_own_is_refused(folder: str):
    Path(folder, "random.py").write_text(SOURCE)
    words = f"random:build: Python has a module 'random' of its own, which stands before that of {folder}"
    with pytest.raises(MlpipeError, match=words):
        _check(Entry("random:build", {"dim": 1}), [folder])
    _check(Entry("own.model:build", {"dim": 1}), [folder])


@pytest.mark.parametrize(
    ("entry", "args"),
    [
        ("own.model:build", {"dim": 1}),
        ("own.model:build", {"dim": 1, "depth": 3}),
        ("own.model:anything", {"whatever": 1}),
        ("own.model:made", {}),
        ("own.star:build", {}),
        ("json:loads", {"s": "{}"}),
        ("spaces.inner.model:build", {"dim": 1}),
    ],
)
def test_what_may_work_passes(folder: str, entry: str, args: dict[str, object]):
    _check(Entry(entry, args), [folder])


@pytest.mark.parametrize(
    ("imports", "known"),
    [
        ("import math\nimport torch.nn as nn\nfrom torch import Tensor", True),
        ("from transformers import LlamaForCausalLM", False),
        ("from .parts import Base", False),  # which may well be a class of transformers
        ("import torch\nimport importlib", False),
        ("import torch\nPLAN = {'base_model_tp_plan': {}}", False),
    ],
)
def test_a_model_that_nothing_splits_over_tp_is_refused_before_it_starts(imports: str, known: bool):
    tree = ast.parse(f"{imports}\ndef build(): ...\n")
    refused = pytest.raises(MlpipeError, match="nobody says how to split this model over tp")
    with refused if known else contextlib.nullcontext():
        _check_split(Entry("own.model:build", {}), tree)


def test_an_optimizer_is_given_the_parameters_in_front(folder: str):
    _check(Entry("own.model:build", {"depth": 3}), [folder], num_positional=1)
    with pytest.raises(MlpipeError, match="takes no argument 'dim'"):
        _check(Entry("own.model:build", {"dim": 3}), [folder], num_positional=1)


@pytest.mark.parametrize(
    ("entry", "args", "says"),
    [
        ("own.nowhere:build", {}, "no module 'own.nowhere'"),
        ("nobodys_package.model:build", {}, "no module 'nobodys_package.model'"),
        ("own.model:built", {}, "no function 'built'"),
        ("own.model:build", {}, "needs the argument 'dim'"),
        ("own.model:build", {"dim": 1, "width": 2}, "takes no argument 'width'"),
        ("own.broken:build", {}, "broken.py:1"),
    ],
)
def test_what_cannot_work_is_told(folder: str, entry: str, args: dict[str, object], says: str):
    with pytest.raises(MlpipeError) as caught:
        _check(Entry(entry, args), [folder])
    assert says in str(caught.value)
    assert caught.value.kind == "input"


def test_a_data_set_is_called_with_its_split(folder: str):
    _check(Entry("own.model:sized", {"length": 1}), [folder], passed=("split",))
    with pytest.raises(MlpipeError, match="'split'"):
        _check(Entry("own.model:unsplit", {"length": 1}), [folder], passed=("split",))


@pytest.mark.parametrize("function", ["told", "untold"])
def test_a_callback_is_given_its_context_if_it_takes_one(folder: str, function: str):
    _check(Entry(f"own.model:{function}", {"path": "x"}), [folder], offered=("context",))
    with pytest.raises(MlpipeError, match="'path'"):
        _check(Entry(f"own.model:{function}", {}), [folder], offered=("context",))


def test_run_refuses_before_it_makes_a_run(tmp_path: Path):
    (tmp_path / "pipeline.yaml").write_text(
        """
version: 1
name: own
stages:
  - name: train
    train:
      model: {entry: "my_model:build", seq_len: 8}
      data: {entry: "my_data:build", batch_size: 2}
      steps: 1
"""
    )
    cli = Cli(tmp_path)
    assert "no module 'my_model'" in cli("run", "pipeline.yaml", code=2).stderr
    assert not list(cli.store.glob("runs/*"))
