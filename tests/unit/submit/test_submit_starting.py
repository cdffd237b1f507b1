"""Which weights a run starts from: looked up once, kept in run.json, refused with the line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlpipe._core.errors import MlpipeError, StoreError, SubmitError
from mlpipe.cli.session import CliSession
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.model import InitPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.training import meaning_of
from mlpipe.spec.load import load_pipeline_text
from mlpipe.store import catalogue, outputs, registry, runs
from mlpipe.store.folder import FolderStore
from mlpipe.submit import backends
from mlpipe.submit.adopt import create
from mlpipe.submit.planning import planner
from mlpipe.submit.starting import find, look_ahead, with_weights
from mlpipe.submit.submission import Submission

pytestmark = pytest.mark.unit


def save(store: FolderStore, run: str, stage: str, step: int) -> str:
    key = catalogue.new_prefix(f"runs/{run}/stages/{stage}", step, 1)
    blob = catalogue.write_blob(store, f"{key}/model-0", [b"four"])
    chunk = {"offset": [0], "shape": [4], "blob": 0, "byte_offset": 0}
    manifest = {
        "format": 1, "step": step, "attempt": 1, "uuid": key[-8:], "time": 1.0, "code": {}, "scalars": {},
        "tensors": {"model.w": {"dtype": "uint8", "shape": [4], "chunks": [chunk]}}, "blobs": [blob],
    }  # fmt: skip
    assert catalogue.commit(store, key, manifest)
    return key


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """With the run `old` of two training stages, and its model `m`, version 1 being @good."""
    store = FolderStore(tmp_path / "store")
    runs.create_run(store, "old", "x", "d", ["base", "tune", "none"], "local", {})
    save(store, "old", "base", 10)
    key = save(store, "old", "base", 20)
    registry.promote(store, "m", "good", key, {})
    return store


def init(**asked: Any) -> InitPlan:
    return InitPlan(asked, asked.get("path"), {}, True)


def weights_file(path: Path) -> Path:
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"four")
    return path


def test_the_newest_checkpoint_of_a_run_or_the_one_of_a_step(store):
    found = find(store, "new", init(run="old"), ".")
    assert (found.words, found.step, found.format) == ("run old, stage base, step 20", 20, "checkpoint")
    assert found.key.startswith("runs/old/stages/base/checkpoints/step-000000020/")
    earlier = find(store, "new", init(run="old", step=10), ".")
    assert earlier.step == 10
    assert earlier.digest != found.digest
    assert find(store, "old", init(stage="base"), ".") == found  # a stage of this run
    save(store, "old", "tune", 5)
    assert find(store, "new", init(run="old", stage="tune"), ".").step == 5
    catalogue.mark_best(store, earlier.key, {})
    best = find(store, "new", init(run="old", stage="base", step="best"), ".")
    assert (best.key, best.words) == (earlier.key, "run old, stage base, step 10 (the best)")


@pytest.mark.parametrize(
    ("asked", "message", "hint"),
    [
        ({"run": "gone"}, "there is no run gone", "mlpipe list"),
        ({"run": "old", "stage": "bse"}, "has no stage 'bse'", "did you mean 'base'"),
        ({"run": "old", "stage": "none"}, "stage 'none' of run old has no checkpoint", "mlpipe status old"),
        ({"run": "old", "step": 11}, "no checkpoint of step 11", "it has 10, 20"),
        ({"run": "old", "step": "best"}, "stage 'base' of run old has no best checkpoint", "validate.best"),
        ({"model": "m@bad"}, "no model m, version bad", "mlpipe models list"),
        ({"model": "m/2"}, "no model m, version 2", "mlpipe models list"),
        ({"path": "w.safetensors"}, "no such file", ""),
        ({"path": "nowhere"}, "no \\*.safetensors is there", "name the file"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(store, tmp_path, asked, message, hint):
    with pytest.raises((SubmitError, StoreError), match=message) as caught:
        find(store, "new", init(**asked), str(tmp_path))
    assert caught.value.kind == "input"
    assert hint in (caught.value.hint or "")


def test_several_stages_with_checkpoints_need_a_name(store):
    save(store, "old", "tune", 5)
    with pytest.raises(SubmitError, match="several stages of run old have") as caught:
        find(store, "new", init(run="old"), ".")
    assert caught.value.hint == "name one: stage: base"


def test_a_version_by_alias_or_number_and_another_store(store, tmp_path):
    found = find(store, "new", init(model="m@good"), ".")
    assert (found.words, found.key, found.step) == ("model m@good (version 1)", "models/m/1", 20)
    assert find(store, "new", init(model="m/1"), ".") == found._replace(words="model m/1")
    empty = FolderStore(tmp_path / "empty")
    assert find(empty, "new", init(model="m@good", store="store"), str(tmp_path)) == found


def test_files_are_found_from_the_runs_folder_and_those_of_a_stage_are_taken_at_their_word(tmp_path):
    store = FolderStore(tmp_path / "store")
    weights_file(tmp_path / "here" / "w.safetensors")
    found = find(store, "new", init(path="./w.safetensors"), str(tmp_path / "here"))
    assert (found.store_url, found.key, found.step) == (str(tmp_path / "here"), "w.safetensors", None)
    assert found.digest
    made = InitPlan({"path": "{{stages.get.output}}/w.safetensors"}, "/pod/only/w.safetensors", {}, True)
    assert find(store, "new", made, ".").digest is None


def text(start: str, needs: str = "[]") -> str:
    return f"""\
version: 1
name: p
stages:
  - name: base
    train:
      model: {{preset: llama-1m, seq_len: 32}}
      data: {{entry: "a.b:c", batch_size: 8}}
      steps: 4
  - name: tune
    needs: {needs}
    train:
      init_from: {start}
      model: {{preset: llama-1m, seq_len: 32}}
      data: {{entry: "a.b:c", batch_size: 8}}
      steps: 4
"""


def submission(store: FolderStore, start: str, *overrides: str, needs: str = "[]") -> Submission:
    spec = text(start, needs)
    pipeline = load_pipeline_text(spec, "p.yaml", overrides=overrides)
    return Submission("p.yaml", spec, overrides, pipeline, store.url, str(store.root.parent))


def planned(store: FolderStore, asked: Submission) -> Plan:
    plan = build_plan(
        asked.pipeline,
        "tune",
        Start("new", 1, store.url, resume=True),
        stage_hardware(asked.pipeline, "tune"),
    )
    return with_weights(store, plan)


def test_an_alias_that_moves_makes_no_difference_to_a_run(store):
    asked = submission(store, "{model: m@good}")
    kept = look_ahead(asked, lambda place: True)
    runs.create_run(store, "new", "x", "d", ["base", "tune"], "local", {"init_from": kept})
    other = save(store, "old", "base", 30)
    registry.promote(store, "m", "good", other, {})
    found = planned(store, asked).work.training.init_from.found
    assert (found.key, found.step) == ("models/m/1", 20)
    assert Plan.from_json(planned(store, asked).to_json()) == planned(store, asked)
    # something else that is asked for is looked up anew, and kept, too
    again = submission(store, "{run: old}")
    assert planned(store, again).work.training.init_from.found.step == 30
    save(store, "old", "base", 40)
    assert planned(store, again).work.training.init_from.found.step == 30
    assert runs.read_run(store, "new").meta["init_from"]["tune"]["found"]["step"] == 30


def test_what_an_earlier_stage_makes_is_looked_up_when_it_is_done_and_kept(store):
    asked = submission(store, "{stage: base}", needs="[base]")
    assert look_ahead(asked, lambda place: True) == {}
    runs.create_run(store, "new", "x", "d", ["base", "tune"], "local", {})
    with pytest.raises(MlpipeError, match="stage 'base' of run new has no checkpoint"):
        planned(store, asked)
    save(store, "new", "base", 4)
    assert planned(store, asked).work.training.init_from.found.step == 4
    save(store, "new", "base", 8)
    assert planned(store, asked).work.training.init_from.found.step == 4


@pytest.mark.parametrize(
    ("start", "overrides", "where"),
    [
        ("{path: nowhere.safetensors}", (), "p.yaml:12:7"),
        ("{model: m@bad}", (), "p.yaml:12:7"),
        ("{run: old}", ("tune.init_from.run=gone",), "p.yaml:12:7"),
        ("{run: old}", ("tune.init_from={run: gone}",), "--set tune.init_from={run: gone}"),
    ],
)
def test_before_there_is_a_run_the_line_is_told(store, start, overrides, where):
    with pytest.raises(SubmitError) as caught:
        look_ahead(submission(store, start, *overrides), lambda place: True)
    assert (caught.value.where, caught.value.kind) == (where, "input")


def test_only_what_can_be_seen_from_here_is_looked_at(store):
    asked: list[str] = []

    def reaches(place: str) -> bool:
        asked.append(place)
        return False

    for start in ("{path: nowhere.safetensors}", "{model: m@bad}", "{run: gone, store: /elsewhere}"):
        assert look_ahead(submission(store, start), reaches) == {}
    assert asked == ["nowhere.safetensors", store.url, "/elsewhere"]
    assert look_ahead(submission(store, '{path: "{{store}}/w.safetensors"}'), reaches) == {}
    assert len(asked) == 3


def test_a_resume_is_compared_by_where_it_started_and_what_was_frozen(store):
    def meaning(start: str, *overrides: str) -> dict[str, Any]:
        return meaning_of(submission(store, start, *overrides).pipeline, "tune", {})

    first = meaning("{model: m@good}", 'tune.freeze=["embed*"]')
    assert first["init_from.model"] == "m@good"
    assert first["freeze"] == ["embed*"]
    assert meaning("{model: m@bad}")["init_from.model"] != first["init_from.model"]
    assert not [
        key for key in meaning_of(submission(store, "{run: old}").pipeline, "base", {}) if "init" in key
    ]


OPEN = """
version: 1
name: tune
stages:
  - name: train
    train:
      model: {pretrained: weights, seq_len: 8}
      data: {entry: "a.b:c", batch_size: 8}
      steps: 4
"""
LLAMA = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8,
}  # fmt: skip


def write_index(folder: Path, file: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"), "is a pickle, which runs the code"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"PK\x03\x04" * 9), "a pickle, whatever"),
        (lambda folder: write_index(folder, "../store/x.safetensors"), "do not lie beside it"),
        (lambda folder: write_index(folder, "/etc/x.safetensors"), "do not lie beside it"),
        (lambda folder: write_index(folder, "model-2.safetensors"), "which is not there"),
        (lambda folder: os.truncate(weights_file(folder / "model.safetensors"), 60), "or cut off"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((10**10).to_bytes(8, "little") * 9),
            "or cut off",
        ),
        (lambda folder: None, r"no \*.safetensors is there"),
    ],
)
def test_a_folder_of_open_weights_that_harms_is_refused_with_the_line(
    store, tmp_path, monkeypatch, harm, words
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    harm(folder)
    pipeline = load_pipeline_text(OPEN, "p.yaml")
    submission = Submission("p.yaml", OPEN, (), pipeline, store.url, str(tmp_path))
    with pytest.raises(SubmitError, match=words) as caught:
        look_ahead(submission, lambda place: True)
    assert (caught.value.where, caught.value.kind) == ("p.yaml:7:15", "input")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "weights/config.json: cannot be read"),
        ("{", "weights/config.json: no JSON"),
        ('{"model_type": "llama"}', "weights/config.json: hidden_size 'None' cannot be"),
    ],
)
def test_open_weights_without_a_config_that_makes_a_model_are_refused_with_the_line(
    store, tmp_path, monkeypatch, config, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    if config is not None:
        (tmp_path / "weights" / "config.json").write_text(config)
    pipeline = load_pipeline_text(OPEN, "p.yaml")
    submission = Submission("p.yaml", OPEN, (), pipeline, store.url, str(tmp_path))
    with pytest.raises(SubmitError, match=words) as caught:
        look_ahead(submission, lambda place: True)
    assert (caught.value.where, caught.value.kind) == ("p.yaml:7:15", "input")


def test_the_revision_is_kept_and_a_branch_that_moves_is_told(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second, cache = "a" * 40, "b" * 40, tmp_path / "models--team--m"
    for commit in (first, second):
        weights_file(cache / "snapshots" / commit / "model.safetensors")
        (cache / "snapshots" / commit / "config.json").write_text(json.dumps(LLAMA))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(first)

    def asked(model: str) -> Submission:
        text = OPEN.replace("name: train", "name: tune").replace("{pretrained: weights", f"{{{model}")
        return Submission("p.yaml", text, (), load_pipeline_text(text, "p.yaml"), store.url, str(tmp_path))

    moving = asked(f"pretrained: {cache.name}")
    kept = look_ahead(moving, lambda place: True)
    assert kept["tune"]["found"]["revision"] == first
    assert kept["tune"]["found"]["store_url"].endswith(f"/snapshots/{first}")
    runs.create_run(store, "new", "x", "d", ["tune"], "local", {"init_from": kept})
    (cache / "refs" / "main").write_text(second)
    with pytest.raises(SubmitError, match=f"was of revision {first} .* and is of {second} now") as caught:
        planned(store, moving)
    assert f"--set tune.model.revision={first}" in (caught.value.hint or "")
    named = planned(store, asked(f"pretrained: {cache.name}, revision: {first}")).work.training.init_from
    assert (named.found.revision, named.found.digest) == (first, kept["tune"]["found"]["digest"])
    with pytest.raises(SubmitError, match="revision 'gone' is not there") as caught:
        look_ahead(asked(f"pretrained: {cache.name},\n        revision: gone"), lambda place: True)
    assert (caught.value.where, caught.value.kind) == ("p.yaml:8:9", "input")


class FarStore(FolderStore):
    """Like S3: without local paths."""

    def local_path(self, key: str) -> None:
        return None


@pytest.mark.parametrize("kind", [FolderStore, FarStore])
@pytest.mark.parametrize(
    ("more", "num_workers"),
    [("", 2), ("mesh: {tp: 2}", 2), ("mesh: {pp: 2}", 2), ("adapter: {lora: {}, base: nf4}", 1)],
)
def test_open_weights_below_the_output_of_a_stage_are_planned_when_they_are_there(
    tmp_path, monkeypatch, kind, more, num_workers
):
    config = {**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 2}
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))
    text = OPEN.replace(
        "  - name: train\n",
        "  - {name: get, command: [get]}\n  - name: tune\n    needs: [get]\n"
        f"    resources: {{workers_per_node: {num_workers}}}\n",
    ).replace("pretrained: weights", 'pretrained: "{{stages.get.output}}/models/m"')
    if more:
        text = text.replace("      steps: 4", f"      steps: 4\n      {more}")
    pipeline, store = load_pipeline_text(text, "p.yaml"), kind(tmp_path / "store")
    assert look_ahead(Submission("p.yaml", text, (), pipeline, store.url, "."), lambda place: True) == {}
    hardware = stage_hardware(pipeline, "tune")
    before = build_plan(pipeline, "tune", Start("new", 1, store.url), hardware).work.training
    assert (before.model.preset, before.init_from.config, before.predicted) == (None, {}, None)
    weights_file(tmp_path / "made" / "models" / "m" / "model.safetensors")
    (tmp_path / "made" / "models" / "m" / "config.json").write_text(json.dumps(config))
    runs.create_run(store, "new", "x", "d", ["get", "tune"], "local", {})
    outputs.commit_output(store, "runs/new/stages/get", tmp_path / "made")
    for fetch in (False, True):  # as the driver of a cluster, which has only what planning reads, and here
        plan = planner(store, "new", pipeline, stage_hardware, fetch=fetch)("tune", 1)
        train = plan.work.training
        assert (train.model.preset, train.init_from.config) == ("m", config)
        assert train.meaning["model.pretrained"] == "{{stages.get.output}}/models/m"
        assert (train.init_from.found.store_url, train.init_from.found.digest) == (train.init_from.path, None)
        assert plan.inputs == ("runs/new/stages/get",)
    assert (Path(train.init_from.path) / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["w.lora_A", "base_model.model.w.lora_A.weight"])
def test_adapters_are_no_start_of_another_training(tmp_path, name):
    """Of a checkpoint and of peft's file."""
    header = json.dumps({name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"four")
    with pytest.raises(StoreError, match="adapters, without the weights") as caught:
        find(FolderStore(tmp_path / "store"), "new", init(path=str(path)), ".")
    assert caught.value.hint is not None
    assert "--merged" in caught.value.hint


def test_a_run_tells_the_line_before_it_is_planned(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline = load_pipeline_text(OPEN, "p.yaml")
    asked = Submission("p.yaml", OPEN, (), pipeline, store.url, str(tmp_path))
    with pytest.raises(SubmitError, match=r"weights/config.json: cannot be read") as caught:
        create(store, backends.load(backends.DEFAULT)({}), asked, CliSession())
    assert caught.value.where == "p.yaml:7:15"
