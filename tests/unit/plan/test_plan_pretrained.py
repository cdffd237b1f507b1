"""Open weights: what their config.json says of the model, and what of it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlpipe._core.errors import MlpipeError, SpecError
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.model import AdapterPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.shapes import frozen, presets, pretrained, trained
from mlpipe.spec.load import load_pipeline_text
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit

QWEN: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
TEXT = """
version: 1
name: tune
stages:
  - name: train
    train:
      model: {{pretrained: {folder}, seq_len: {seq_len}}}
      data: {{tokens: tokens, batch_size: 8}}
      steps: 3
"""


def planned(folder: Path, config: Any, seq_len: int = 32, text: str = TEXT) -> Plan:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return planned_as(str(folder), seq_len, text)


def planned_as(folder: str, seq_len: int = 32, text: str = TEXT) -> Plan:
    pipeline = load_pipeline_text(text.format(folder=folder, seq_len=seq_len), "tune.yaml")
    hardware = stage_hardware(pipeline, "train")
    return build_plan(pipeline, "train", Start("r", 1, "runs"), hardware)


def test_the_plan_has_the_models_sizes_and_starts_from_its_folder(tmp_path: Path) -> None:
    """Numbers by hand: embedding 256 x 64; a block's q and o 2 x 64 x 128, k and v 2 x 64 x 64, feed-forward
    3 x 64 x 96, norms 2 x 64 + 2 x 32; the last norm 64."""
    plan = planned(tmp_path / "qwen", QWEN)
    train = plan.work.training
    sizes = pretrained.sizes_of(QWEN, "")
    block = 2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 32
    assert sizes.num_params() == 256 * 64 + 2 * block + 64
    assert sum(rows * columns * number for rows, columns, number in sizes.tensors()) == sizes.num_params()
    assert sum(one.size for one in sizes.named_tensors()) == sizes.num_params()
    assert train.model.preset == "qwen"
    assert train.model.build.args == sizes.args()
    assert train.init_from is not None
    assert (train.init_from.path, train.init_from.config) == (str(tmp_path / "qwen"), QWEN)
    assert train.meaning["model.qk_norm"] is True
    assert train.meaning["model.pretrained"] == str(tmp_path / "qwen")
    assert train.predicted is not None
    assert train.num_flops_per_token == 6 * sizes.num_params() + 12 * 2 * 4 * 32 * 32
    assert Plan.from_json(plan.to_json()) == plan


def test_rotations_of_both_spellings_are_read() -> None:
    old = {**QWEN, "rope_theta": 5e5, "rope_scaling": {**LLAMA3}}
    del old["rope_parameters"]
    new = {**QWEN, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    assert pretrained.sizes_of(old, "") == pretrained.sizes_of(new, "")
    assert pretrained.sizes_of(new, "").args()["rope_original"] == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is none of the architectures"),
        ({"model_type": 7}, "does not say which model"),
        ({"hidden_size": "64"}, "hidden_size '64' cannot be"),
        ({"hidden_size": 2**31}, "cannot be"),
        ({"num_hidden_layers": True}, "num_hidden_layers 'True' cannot be"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"num_hidden_layers": 2**20}, "num_hidden_layers '1048576' cannot be"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not what"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' are not supported"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": {**LLAMA3, "factor": float("nan")}}, "factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map is not supported"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(MlpipeError, match=words) as caught:
        planned(tmp_path / "m", {**QWEN, **change})
    assert caught.value.kind == "input"


def test_as_many_key_heads_as_query_heads_where_the_config_says_null() -> None:
    old = {**QWEN, "model_type": "mistral", "num_key_value_heads": None}
    assert pretrained.sizes_of(old, "").num_kv_heads == 4
    with pytest.raises(MlpipeError, match="num_kv_heads 8 does not divide"):  # mistral's own default
        pretrained.sizes_of({key: one for key, one in old.items() if key != "num_key_value_heads"}, "")


MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "intermediate_size": 7, "max_position_embeddings": 128,
}  # fmt: skip


def test_experts_are_planned_by_what_the_config_says(tmp_path: Path) -> None:
    """By hand: a block's attention 2 x 64 x 64 + 2 x 64 x 32, norms 2 x 64 + 2 x 16, router 64 x 8, experts
    8 x 3 x 64 x 96; adapters beside attention alone."""
    plan = planned(tmp_path / "m", MOE)
    sizes = pretrained.sizes_of(MOE, "")
    block = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 + 2 * 16 + 64 * 8 + 8 * 3 * 64 * 96
    assert sizes.num_params() == 2 * 256 * 64 + 2 * block + 64
    args = plan.work.training.model.build.args
    assert (args["router"], args["balance_rate"], "normalised" in args) == ("softmax", 0.0, False)
    assert pretrained.sizes_of({**MOE, "norm_topk_prob": False}, "").args()["normalised"] is False
    adapted = trained.without(presets.planned(plan.work.training.model), (), AdapterPlan(4, 4.0))
    assert isinstance(adapted, frozen.Adapted)
    assert sum(one.size for one in adapted.trained) == 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32))


@pytest.mark.parametrize(
    "key", ["compress: int8", "update: local_sgd", "update: diloco", "update: {{async: {{staleness: 2}}}}"]
)
def test_what_presets_with_experts_are_refused_open_weights_are_too(tmp_path: Path, key: str) -> None:
    text = TEXT + f"      {key}\n"
    with pytest.raises(MlpipeError, match="does not go with experts"):
        planned(tmp_path / "m", MOE, text=text)
    planned(tmp_path / "dense", QWEN, text=text)


@pytest.mark.parametrize("key", ["optimizer: {{name: muon}}", "compile: block"])
def test_what_presets_with_experts_may_do_open_weights_may_too(tmp_path: Path, key: str) -> None:
    text = TEXT + f"      {key}\n"
    for name, model in (("m", MOE), ("dense", QWEN)):
        train = planned(tmp_path / name, model, text=text).work.training
        assert (train.optimizer.name, train.compile) in (("muon", "off"), ("adamw", "block"))
    if "compile" in key:
        text += "      activation_checkpointing: selective\n      mesh: {{dp_shard: 2, ep: 2}}\n"
        with pytest.raises(MlpipeError, match="the rows that are sent to experts cut a block's graph"):
            planned(tmp_path / "m", MOE, text=text + "    resources: {{workers_per_node: 2}}\n")


def test_open_weights_with_experts_are_not_elastic(tmp_path: Path) -> None:
    text = TEXT + "    resources: {{nodes: 1..2}}\n"
    with pytest.raises(MlpipeError, match="loads of experts are counted over all workers"):
        planned(tmp_path / "m", MOE, text=text)
    assert planned(tmp_path / "dense", QWEN, text=text).launch.replicas is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder_sparse_step": 2}, r"blocks without experts \(decoder_sparse_step\)"),
        ({"mlp_only_layers": [0]}, r"blocks without experts \(mlp_only_layers\)"),
        ({"num_experts": 1, "num_experts_per_tok": 2}, "experts_per_token 2"),
        ({"num_experts": "8"}, "num_experts '8' cannot be"),
    ],
)
def test_mixtures_of_experts_that_are_others_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MlpipeError, match=words):
        pretrained.sizes_of({**MOE, **change}, "")


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(MlpipeError, match="cannot be read") as caught:
        pretrained.read_config(str(tmp_path))
    assert (caught.value.kind, caught.value.where) == ("input", str(path))


@pytest.mark.parametrize(
    ("config", "words"),
    [("{", "no JSON"), ("[]", "model_type"), ("[" * 10**5, "no JSON"), (" " * 2**21, "bytes")],
)
def test_what_is_no_config_is_refused(tmp_path: Path, config: str, words: str) -> None:
    with pytest.raises(MlpipeError, match=words):
        planned(tmp_path / "m", config)


def test_a_folder_without_one_is_refused_by_name(tmp_path: Path) -> None:
    pipeline = load_pipeline_text(TEXT.format(folder=tmp_path, seq_len=8), "tune.yaml")
    with pytest.raises(MlpipeError, match="cannot be read") as caught:
        build_plan(pipeline, "train", Start("r", 1, "runs"), stage_hardware(pipeline, "train"))
    assert caught.value.where == f"{tmp_path}/config.json"
    with pytest.raises(MlpipeError, match="cannot be read") as caught:
        pretrained.read_config("not/here")
    assert caught.value.hint is not None
    assert f"not/here begins in {Path.cwd()}" in caught.value.hint


A, B = "a" * 40, "b" * 40


def in_cache(root: Path, **refs: str) -> Path:
    """As `hf download` leaves it: files of a snapshot are links to blobs."""
    folder = root / "models--team--qwen"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "0").write_text(json.dumps(QWEN))
    for commit in (A, B):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").symlink_to("../../blobs/0")
    for name, text in refs.items():
        path = folder / "refs" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("below", "revision", "commit"),
    [
        ("", None, A),
        ("/", "pr/1", B),
        ("", B, B),
        (f"/snapshots/{B}", None, B),
        (f"/snapshots/{B}/", B, B),
        (f"/snapshots/{B}", "pr/1", B),
    ],
)
def test_the_layout_of_a_cache_tells_the_commit(
    tmp_path: Path, below: str, revision: str | None, commit: str
) -> None:
    folder = f"{in_cache(tmp_path, main=A, pr__1=B)}{below}"
    said = f", revision: {revision}" if revision else ""
    train = planned_as(f"{folder}{said}")
    init = train.work.training.init_from
    assert init.revision == commit
    assert Path(init.path) == tmp_path / "models--team--qwen" / "snapshots" / commit
    assert init.asked == {"path": folder, **({"revision": revision} if revision else {})}
    # what moves is among what a resume is compared by; a path that names the commit says it itself
    moves = train.work.training.meaning.get("model.revision")
    assert moves == (None if below.startswith("/snapshots") else commit)


def test_a_bucket_tells_the_commit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By objects alone: it has no links."""
    folder = in_cache(tmp_path, main=A)

    def open_store(url: str) -> FolderStore:
        return FolderStore(tmp_path / url.removeprefix("s3://bucket/"))

    monkeypatch.setattr("mlpipe.store.open.open_store", open_store)
    url = f"s3://bucket/{folder.name}"
    assert pretrained.located(f"{url}/", None) == (f"{url}/snapshots/{A}", A)
    assert pretrained.located(f"{url}/snapshots/{B}", None) == (f"{url}/snapshots/{B}", B)
    assert pretrained.located("s3://bucket/qwen", None) == ("s3://bucket/qwen", None)
    with pytest.raises(MlpipeError, match=r"revision 'gone' is not there: s3://bucket/.*/refs/gone: cannot"):
        pretrained.located(url, "gone")


@pytest.mark.parametrize(
    ("below", "revision", "words"),
    [
        ("", "gone", "revision 'gone' is not there: .*refs/gone: cannot be read"),
        ("", "c" * 40, "revision 'c+' is not there: .*config.json: cannot be read"),
        ("", "odd", "says '../../etc', which is no commit"),
        ("", "pipe", "it is no regular file"),
        (f"/snapshots/{B}", "main", f"revision 'main' is {A}, and the folder is of {B}"),
        ("/blobs", "main", "nothing tells whether .*/blobs is of revision 'main'"),
        ("", "../x", "is not a revision"),
    ],
)
def test_a_revision_that_is_not_there_is_refused(
    tmp_path: Path, below: str, revision: str, words: str
) -> None:
    folder = in_cache(tmp_path, main=A, odd="../../etc")
    os.mkfifo(folder / "refs" / "pipe")
    with pytest.raises(MlpipeError, match=words) as caught:
        planned_as(f"{folder}{below}, revision: {revision}")
    assert caught.value.kind == "input"


def test_sequences_are_as_long_as_positions_and_window_allow(tmp_path: Path) -> None:
    with pytest.raises(MlpipeError, match="seq_len 200 is more than the 128 positions"):
        planned(tmp_path / "m", QWEN, seq_len=200)
    mistral = {**QWEN, "model_type": "mistral", "sliding_window": 48}
    assert planned(tmp_path / "m", mistral, seq_len=48)
    with pytest.raises(MlpipeError, match="seq_len 49 is more than the 48"):
        planned(tmp_path / "m", mistral, seq_len=49)


def test_two_sources_of_weights_and_pickles_are_refused_with_the_line() -> None:
    both = TEXT.format(folder="base", seq_len=8) + "      init_from: {model: a@b}\n"
    with pytest.raises(SpecError, match=r"tune.yaml:10:7: model.pretrained says already which weights"):
        load_pipeline_text(both, "tune.yaml")
    with pytest.raises(SpecError, match="a pickle runs the code that it holds"):
        load_pipeline_text(TEXT.format(folder="base/model.bin", seq_len=8), "tune.yaml")
