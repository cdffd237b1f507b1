"""A plan.json of another version is read where it means the same, and refused in words where it may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.rendered import QUICKSTART, pipeline_of, plan_of

import mlpipe
from mlpipe.plan.plan import Plan, code_digest

pytestmark = pytest.mark.unit


def read_with(path: str, value: Any) -> Plan:
    """The plan, written with `value` at `path`; ...: without that key."""
    document = json.loads(PLAN.to_json())
    *parents, key = path.split(".")
    inner = document
    for name in parents:
        inner = inner[name]
    if value is ...:
        del inner[key]
    else:
        inner[key] = value
    return Plan.from_json(json.dumps(document))


PLAN = plan_of(pipeline_of("quickstart", *QUICKSTART), "train")
SAME = {
    "older: no key of a later default": ("inputs", ...),
    "older: null for each kind that it is not": ("evaluate", None),
    "newer: a kind that we lack, and that it is not": ("distill", None),
    "older: deeper": ("train.mesh.pp", ...),
    "newer: a feature that is off": ("train.model.lora", None),
    "newer: a switch that is off": ("launch.elastic", False),
    "newer: an empty list": ("cluster.sidecars", []),
    "newer: an empty object": ("launch.files", {}),
}
OTHER = {
    "newer: a feature that is on": ("train.model.lora", {"rank": 8}, r"train\.model: .*lora is unknown"),
    "newer: a port": ("launch.debug_port", 0, "debug_port is unknown"),
    "older: a key without a default": ("train.seed", ..., "seed is missing"),
    "newer: another value of an old key": ("train.strategy", "cp", "is not one of"),
    "newer: of another kind as well": ("promote", {}, "exactly one of command, train, .*'promote'"),
    "newer: of no kind that we know": ("train", ..., "exactly one of .* got none"),
    "newer: another meaning of all": ("schema_version", 2, "schema_version is 2, this mlpipe reads 1"),
}


@pytest.mark.parametrize("case", SAME)
def test_what_means_the_same_is_read(case: str) -> None:
    assert read_with(*SAME[case]) == PLAN


@pytest.mark.parametrize("case", OTHER)
def test_what_may_not_is_refused(case: str) -> None:
    path, value, words = OTHER[case]
    with pytest.raises(ValueError, match=words):
        read_with(path, value)


def before_flags(train: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As it was written before the flags and the axis of experts."""
    flags = ("reshard_after_forward", "shard_optimizer")
    train = {key: value for key, value in train.items() if key not in flags}
    return {**train, "mesh": {key: size for key, size in train["mesh"].items() if key != "ep"}, **changes}


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [("ddp", (True, False)), ("fsdp", (True, False)), ("zero1", (True, True)), ("zero2", (False, False))],
)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_plan_without_flags_means_what_its_strategy_meant(
    kind: str, strategy: str, flags: tuple[bool, bool]
) -> None:
    document = json.loads(plan_of(pipeline_of("quickstart", *QUICKSTART), kind).to_json())
    holder = document if kind == "train" else document["evaluate"]
    holder["train"] = before_flags(holder["train"], strategy=strategy)
    plan = Plan.from_json(json.dumps(document))
    train = plan.work.training
    assert (train.reshard_after_forward, train.shard_optimizer) == flags
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("changes", "scope"),
    [
        ({}, "model"),
        ({"mesh": {"dp_shard": 2}}, "block"),
        ({"activation_checkpointing": "full"}, "block"),
    ],
)
def test_a_plan_without_flags_is_compiled_as_it_was(changes: dict[str, Any], scope: str) -> None:
    document = json.loads(PLAN.to_json())
    plain = {"mesh": {}, "activation_checkpointing": "none", "compile": "model"}
    document["train"] = before_flags(document["train"], **{**plain, **changes})
    assert Plan.from_json(json.dumps(document)).work.training.compile == scope


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_plan_without_a_choice_of_optimizers_is_of_adamw(kind: str) -> None:
    """Its arguments stood beside the learning rate."""
    new = plan_of(pipeline_of("quickstart", *QUICKSTART, "train.optimizer.eps=1e-6"), kind)
    document = json.loads(new.to_json())
    optimizer = (document if kind == "train" else document["evaluate"])["train"]["optimizer"]
    optimizer |= optimizer.pop("args")
    del optimizer["entry"], optimizer["state_bytes_per_parameter"]
    for later in ("power", "own_schedule", "clip_value", "groups"):
        assert not optimizer.pop(later)
    assert optimizer == {
        "name": "adamw", "lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "grad_clip": 1.0,
        "schedule": "cosine", "warmup_steps": 15, "decay_steps": 0, "min_lr_ratio": 0.1,
    }  # fmt: skip
    assert Plan.from_json(json.dumps(document)) == new


def test_code_is_another_one_by_each_byte_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what ends a file begins the next one's name, and of files that are read in pieces."""
    long = "#" * (2**16 + 1)
    trees = [
        {"a.py": "foo", "x/b.py": ""},
        {"a.py": "foo/x", "b.py": ""},
        {"a.py": "foo", "x/c.py": ""},
        {"a.py": long, "b.py": ""},
        {"a.py": long[1:], "b.py": ""},
    ]
    digests = set()
    for number, tree in enumerate(trees):
        for name, text in {**tree, "notes.txt": str(number), "__pycache__/a.py": str(number)}.items():
            file = tmp_path / str(number) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(mlpipe, "__file__", str(tmp_path / str(number) / "__init__.py"))
        digests.add(code_digest.__wrapped__())
    assert len(digests) == len(trees)
    for name in ("notes.txt", "__pycache__/a.py"):
        (tmp_path / str(number) / name).write_text("another")
    assert code_digest.__wrapped__() in digests
