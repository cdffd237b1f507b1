from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from mlpipe._core import files
from mlpipe._core.errors import PlanError
from mlpipe.api.pipeline import load
from mlpipe.plan import calibration
from mlpipe.spec import overrides as override_rules
from mlpipe.spec.load import load_pipeline, load_pipeline_text
from mlpipe.spec.model import Pipeline
from mlpipe.spec.problems import Place, SpecErrors

pytestmark = pytest.mark.unit
QUICKSTART = Path(__file__).parents[3] / "pipelines" / "quickstart.yaml"


def at(pipeline: Pipeline, stage: str, path: str) -> Any:
    value: Any = pipeline.stage(stage)
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.mark.parametrize(
    ("override", "stage", "path", "value"),
    [
        ("stages.train.train.strategy=fsdp", "train", "train.strategy", "fsdp"),
        ("stages.train.strategy=fsdp", "train", "train.strategy", "fsdp"),
        ("train.strategy=fsdp", "train", "train.strategy", "fsdp"),
        ("train.train.steps=20", "train", "train.steps", 20),
        ("train.steps= 20 ", "train", "train.steps", 20),
        ("train.optimizer.lr=1e-4", "train", "train.optimizer.lr", 1e-4),
        ("train.optimizer.betas=[0.8, 0.9]", "train", "train.optimizer.betas", (0.8, 0.9)),
        ("train.optimizer={lr: 1e-2}", "train", "train.optimizer.schedule", "cosine"),
        ("train.resources.workers_per_node=4", "train", "resources.workers_per_node", 4),
        ("train.compile=off", "train", "train.compile", "off"),
        ("train.metrics_port=off", "train", "train.metrics_port", "off"),
        ("train.checkpoint.every=10 steps", "train", "train.checkpoint.every", "10 steps"),
        ("train.timeout=2 h", "train", "timeout", "2 h"),
        ("train.env.DEBUG=1", "train", "env.DEBUG", "1"),
        ("train.env.DEBUG=on", "train", "env.DEBUG", "on"),
        ("train.env.DEBUG=0123", "train", "env.DEBUG", "0123"),
        ("train.env.X=a=b", "train", "env.X", "a=b"),
        ("train.data.tokens=2026-11-21", "train", "train.data.tokens", "2026-11-21"),
        ("evaluate.train=train", "evaluate", "evaluate.train", "train"),
        ("evaluate.evaluate.gate=val_loss < 3", "evaluate", "evaluate.gate", "val_loss < 3"),
        ("evaluate.prompt=5", "evaluate", "evaluate.prompt", "5"),
        ("promote.evaluate=evaluate", "promote", "promote.evaluate", "evaluate"),
        ("corpus.command=[x, 1, on]", "corpus", "command", ("x", "1", "on")),
    ],
)
def test_value_lands_typed_by_the_schema(override: str, stage: str, path: str, value: object) -> None:
    assert at(load_pipeline(QUICKSTART, overrides=[override]), stage, path) == value


def test_top_level_and_several() -> None:
    overrides = ["store=s3://bucket/x", "name=other", "train.steps=1"]
    overrides += ["train.optimizer.warmup_steps=0", "train.steps=2"]
    pipeline = load_pipeline(QUICKSTART, overrides=overrides)
    assert (pipeline.store, pipeline.name) == ("s3://bucket/x", "other")
    assert at(pipeline, "train", "train.steps") == 2


def test_a_mistake_in_the_file_can_be_overridden() -> None:
    text = re.sub(r"^      steps: .*$", "      steps: many", QUICKSTART.read_text(), flags=re.M)
    with pytest.raises(SpecErrors):
        load_pipeline_text(text, "x")
    assert at(load_pipeline_text(text, "x", overrides=["train.steps=30"]), "train", "train.steps") == 30


def test_the_longest_stage_name_wins() -> None:
    text = """
version: 1
name: dots
stages:
  - {name: a, command: [x]}
  - {name: a.env, command: [x]}
"""
    pipeline = load_pipeline_text(text, "x", overrides=["a.env.timeout=5 s", "a.timeout=6 s"])
    assert at(pipeline, "a.env", "timeout") == "5 s"
    assert at(pipeline, "a", "timeout") == "6 s"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.step=20", "unknown key 'step'; did you mean 'steps'?"),
        ("train.optimizer.lrr=20", "unknown key 'lrr'; did you mean 'lr'?"),
        ("trian.steps=20", "no stage 'trian'; did you mean 'train'?"),
        ("stages.trian.steps=20", "no stage 'trian'; did you mean 'train'?"),
        ("optimizer.lr=1e-3", "no stage 'optimizer'; did you mean train.optimizer.lr?"),
        ("stages.gate=val_loss < 3", "no stage 'gate'; did you mean evaluate.gate?"),
        ("sotre=x", "no stage 'sotre'; did you mean 'store'?"),
        ("train.steps=x", "expected a whole number, got the text 'x'; write a whole number"),
        ("train.steps=", "expected a whole number, got the text ''; write a whole number"),
        ("train.steps", "not KEY=VALUE; write like --set train.steps=20"),
        ("=5", "not KEY=VALUE; write like --set train.steps=20"),
        ("train=5", "a stage cannot be replaced; set its keys, like NAME.steps=20"),
        ("train.steps.x=3", "'steps' is a value, it has no keys; set steps as a whole"),
        ("corpus.command.0=3", "'command' is a list, it has no keys; set command as a whole"),
        ("train.strategy=fsdpp", "unknown value 'fsdpp'; did you mean 'fsdp'?"),
        ("train.optimizer.lr=-1", "-1 is out of bounds; write above 0.0"),
        (
            "train.mesh={dp_replicate: 1, dp_shard: 4}",
            "mesh dp_shard 4 is for 4 workers, but there are 2; write",
        ),
        ("train.data={tokens: *a}", "alias *a: a pipeline has no aliases; write the value out again"),
        ("train.checkpoint.every=5", "5 has no unit; write like '100 steps' or '15 min'"),
        ("train.data.tokens={{...}}", "unknown placeholder {{...}}; write one of store, run.id, output, "),
        ("train.mash=null", "unknown key 'mash'; did you mean 'mesh'?"),
        ("train.optimizer.lr.x=null", "unknown key 'x'; see 'mlpipe schema'"),
        ("store=s3:bucket/x", "'s3:bucket/x' is not a store; write a folder like './runs', or"),
        ("store=file:x", "'file:x' is not a store; write a folder like './runs', or"),
        ("store=FILE:x", "'FILE:x' is not a store; write a folder like './runs', or"),
        ('slurm.python=""', "'' is not a program; write its name or its path, like 'python3'"),
        ("corpus=null", "a stage cannot be replaced; set its keys, like NAME.steps=20"),
    ],
)
def test_mistakes_name_the_override(override: str, says: str) -> None:
    with pytest.raises(SpecErrors) as caught:
        load_pipeline(QUICKSTART, overrides=[override])
    assert str(caught.value).startswith(f"--set {override}: {says}")


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ("train.optimizer.warmup_steps=150", "train.optimizer.warmup_steps=151", "more than the 150 steps"),
        (
            "train.optimizer={schedule: wsd, decay_steps: 150}",
            "train.optimizer={schedule: wsd, decay_steps: 151}",
            "decay_steps 151 is more than the 150 steps",
        ),
        ("train.hang_timeout=1 s", "train.hang_timeout=999 ms", "'999 ms' would end any run"),
        ("train.data.batch_size=2", "train.data.batch_size=3", "cannot be split evenly over 2 workers"),
        (
            "train.data={tokens: x, batch_tokens: 256}",
            "train.data={tokens: x, batch_tokens: 100}",
            "batch_tokens 100 is not a multiple of seq_len 256; write 256",
        ),
        ("evaluate.train=train", "evaluate.train=corpus", "'corpus' is no train stage that 'evaluate' needs"),
        (
            "train.model={entry: 'm:f', seq_len: 8, args: {folder: '{{stages.corpus.output}}'}}",
            "train.model={entry: 'm:f', seq_len: 8, args: {folder: '{{stages.korpus.output}}'}}",
            "korpus",
        ),
    ],
)
def test_bounds_and_references_to_the_step(good: str, bad: str, says: str) -> None:
    """The last value that is accepted, and the first that is not."""
    load_pipeline(QUICKSTART, overrides=[good])
    with pytest.raises(SpecErrors) as caught:
        load_pipeline(QUICKSTART, overrides=[bad])
    assert says in str(caught.value)


HSDP = ["train.strategy=hsdp", "train.mesh={dp_replicate: 2, dp_shard: fill}"]


def test_a_long_value_is_named_without_its_middle() -> None:
    with pytest.raises(SpecErrors) as refused:
        load_pipeline(QUICKSTART, overrides=[f"train.steps=[{'1, ' * 5000}7]"])
    for text in (str(refused.value), str(refused.value.where)):
        assert re.match(r"--set train\.steps=\[1, 1, [1, ]+ \.\.\. [1, ]+7\]", text)
        assert len(text) < 600
    path = "a/" * 300 + "b.yaml"  # what is short is whole, as are names of files in which there is a line
    assert str(Place(path, 3, 1)) == f"{path}:3:1"


def test_a_pipe_is_read_to_its_end_or_for_a_minute_and_a_device_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for a writer waited for ever."""
    pipe, text = tmp_path / "p.yaml", QUICKSTART.read_bytes()
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(text,), daemon=True)
    writer.start()
    assert load_pipeline(pipe) == load_pipeline(QUICKSTART)
    writer.join(60)
    assert not writer.is_alive()
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.2)
    with pytest.raises(SpecErrors, match="cannot be read: nobody has written all of it into this pipe"):
        load_pipeline(pipe)
    with open(os.open(pipe, os.O_RDWR), "wb", buffering=0) as half:
        half.write(text[:100])
        with pytest.raises(SpecErrors, match="cannot be read: nobody has written all of it into this pipe"):
            load_pipeline(pipe)
        with pytest.raises(PlanError, match="nobody has written all of it into this pipe"):
            calibration.load(pipe)
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(SpecErrors, match=f"{device}: cannot be read: it is a device, not a file"):
            load_pipeline(device)
    with pytest.raises(SpecErrors, match="cannot be read: Is a directory"):
        load_pipeline(tmp_path)


def test_a_placeholder_needs_no_quotes() -> None:
    pipeline = load_pipeline(QUICKSTART, overrides=["train.data.tokens={{stages.corpus.output}}"])
    assert at(pipeline, "train", "train.data.tokens") == "{{stages.corpus.output}}"


def test_null_removes_a_key() -> None:
    pipeline = load_pipeline(
        QUICKSTART, overrides=["train.optimizer=null", "evaluate.prompt=~", "image=null"]
    )
    assert at(pipeline, "train", "train.optimizer.lr") == 3e-4
    assert at(pipeline, "evaluate", "evaluate.prompt") is None
    again = load_pipeline(QUICKSTART, overrides=[*HSDP, "train.mesh=null"])
    assert at(again, "train", "train.mesh") is None
    with pytest.raises(SpecErrors, match=r"quickstart\.yaml:\d+:\d+: 'steps' is missing"):
        load_pipeline(QUICKSTART, overrides=["train.steps=null"])


def test_a_key_that_holds_dots_is_one_key_where_it_is_there() -> None:
    both = "kubernetes.node_selector={example.com/gpu: a, example.com/gpu.kind: b}"
    one = "kubernetes.node_selector.example.com/gpu"
    for override, left in {
        f"{one}=c": {"example.com/gpu": "c", "example.com/gpu.kind": "b"},
        f"{one}.kind=c": {"example.com/gpu": "a", "example.com/gpu.kind": "c"},
        f"{one}=null": {"example.com/gpu.kind": "b"},
    }.items():
        kubernetes = load_pipeline(QUICKSTART, overrides=[both, override]).kubernetes
        assert kubernetes is not None
        assert kubernetes.node_selector == left


def test_null_is_a_value_among_arguments() -> None:
    own = ["train.model={entry: 'm:f', seq_len: 256}", "train.model.args.bias=null", "train.env.X=null"]
    pipeline = load_pipeline(QUICKSTART, overrides=own)
    assert at(pipeline, "train", "train.model.args") == {"bias": None}
    assert at(pipeline, "train", "env") == {}


@pytest.mark.parametrize("strategy", ["fsdp", "auto"])
def test_another_strategy_drops_the_mesh_and_says_so(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    override_rules._warn.cache_clear()
    pipeline = load_pipeline(QUICKSTART, overrides=[*HSDP, f"train.strategy={strategy}"])
    assert at(pipeline, "train", "train.mesh") is None
    (said,) = caplog.messages
    assert said == f"--set train.strategy={strategy}: drops the stage's mesh, which is of another strategy"


def test_a_strategy_and_a_mesh_of_one_command_have_no_order() -> None:
    for strategy in ("hsdp", "auto"):
        both = [f"train.strategy={strategy}", "train.mesh={dp_replicate: 2}", "train.mesh.dp_shard=fill"]
        pipelines = [
            load(QUICKSTART, order).spec for order in (both, both[::-1], [both[1], both[0], both[2]])
        ]
        assert at(pipelines[0], "train", "train.mesh") is not None
        assert pipelines[0] == pipelines[2]
    once = load(QUICKSTART, HSDP)
    assert at(once.override("train.strategy=fsdp").spec, "train", "train.mesh") is None  # another command


def test_a_strategy_keeps_a_mesh_that_is_its_own() -> None:
    for mesh, strategy in (
        ("{dp_shard: 2}", "fsdp"),
        ("{dp_shard: fill}", "zero2"),
        ("{dp_replicate: 2}", "ddp"),
    ):
        pipeline = load_pipeline(QUICKSTART, overrides=[f"train.mesh={mesh}", f"train.strategy={strategy}"])
        assert at(pipeline, "train", "train.mesh") is not None
    for order in (["train.strategy=fsdp", HSDP[1]], [HSDP[1], "train.strategy=fsdp"]):
        with pytest.raises(SpecErrors, match="fsdp has no dp_replicate"):  # asked for beside it: a mistake
            load(QUICKSTART, order)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.yaml", "nul\0byte"):
        with pytest.raises(SpecErrors, match="cannot be read"):
            load_pipeline(path)
    with pytest.raises(PlanError, match=r"absent.yaml: cannot be read: No such file or directory"):
        calibration.load(tmp_path / "absent.yaml")
    (large := tmp_path / "large.json").write_bytes(b"{}".ljust(calibration._MAX_BYTES + 1))
    with pytest.raises(PlanError, match="not a calibration: larger than 16777216 bytes"):
        calibration.load(large)
