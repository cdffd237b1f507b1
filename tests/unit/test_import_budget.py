"""How many modules a command imports before it does anything: what a person waits for at every call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit import budget

pytestmark = pytest.mark.unit

PIPELINES = Path(__file__).parents[2] / "pipelines"


# Mappings of the file, and rules between them, that few files have: not this one.
_OF_FEW_FILES = (
    "callbacks", "chat", "kubernetes_parts", "layout", "machines", "metric", "mixture", "models", "network",
    "optimizer_parts", "overrides", "own_data", "profile", "rounds", "slurm", "sweep", "trackers", "validate",
    "weights",
)  # fmt: skip
# What only a search over all axes, or a model of experts, needs.
_UNASKED = ("search", "pipelining", "axes.tp", "axes.cp", "axes.pp", "axes.ep", "shapes.experts")


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "validate",
        "plan",
        "render --for kubernetes",
        "render --for slurm",
        "submit --dry-run --to kubernetes",
        "list",
    ],
)
def test_a_command_imports_no_more_than_it_needs(tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("MLPIPE_CALIBRATE", "on")  # as it is where nobody says otherwise
    words = arguments.split()
    if words[0] in ("validate", "plan", "render", "submit"):
        words.append(str(PIPELINES / "llm.yaml"))
    modules, num_dataclasses = imported_by(tmp_path, *words)
    budget.within("modules imported", {f"mlpipe {arguments}": len(modules)})
    # each takes a third of a millisecond, in which ten NamedTuples are made
    budget.within("dataclasses made", {f"mlpipe {arguments}": num_dataclasses})
    assert not {f"mlpipe.spec.{name}" for name in _OF_FEW_FILES if name not in words} & modules
    if words[0] == "plan":  # nothing of it is this machine's: no backend is asked whether to measure it
        assert not {name for name in modules if name.startswith(("mlpipe.submit.", "mlpipe.observe."))}


def test_a_plan_whose_strategy_is_named_knows_nothing_of_other_axes(tmp_path):
    words = ("plan", str(PIPELINES / "quickstart.yaml"), "--set", "train.strategy=ddp")
    modules, _ = imported_by(tmp_path, *words)
    assert "mlpipe.plan.axes.dp_replicate" in modules
    assert not {f"mlpipe.plan.{name}" for name in _UNASKED} & modules


def test_validators_are_made_of_the_mappings_that_a_file_has(tmp_path):
    script = (
        "from mlpipe.spec.base import SpecModel\nfrom mlpipe.spec.load import load_pipeline\n"
        f"load_pipeline({str(PIPELINES / 'llm.yaml')!r})\n"
        "of = lambda kind: [kind, *(one for child in kind.__subclasses__() for one in of(child))]\n"
        "kinds = {*of(SpecModel)}\n"
        "print(len(kinds), *{kind.__name__ for kind in kinds if kind.__pydantic_complete__})"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    number, *complete = found.stdout.split()
    budget.within("classes of mappings made", {"pipelines/llm.yaml": int(number)})
    assert set(complete) == {
        "Pipeline", "Kubernetes", "Volume", "Stage", "Resources",
        "Train", "PresetModel", "TokenData", "AdamW", "Checkpoint", "Evaluate", "Promote",
    }, found.stderr  # fmt: skip


def imported_by(folder: Path, *words: str) -> tuple[set[str], int]:
    """All modules that a command has imported when it ends, and how many dataclasses are in ours."""
    script = (
        "import sys\nfrom mlpipe.cli.app import run_app\n"
        f"try:\n    run_app({list(words)})\nexcept SystemExit as ended:\n    code = ended.code\n"
        "ours = {name: vars(one) for name, one in sys.modules.items() if name.startswith('mlpipe')}\n"
        "kinds = {one for held in ours.values() for one in held.values() if isinstance(one, type)}\n"
        "made = [one for one in kinds if one.__module__ in ours and '__dataclass_fields__' in vars(one)]\n"
        "print(len(made), *sys.modules, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    number, *modules = done.stderr.splitlines()[-1].split()
    return set(modules), int(number)
