"""Open weights as their folder describes them (Hugging Face's layout): of its config.json the sizes of the
model that mlpipe builds. No value of a weight is read.

Where the folder lies in the layout of Hugging Face's cache, it tells its commit (huggingface_hub, "Understand
caching"): `models--ORG--NAME/snapshots/COMMIT/config.json`, and `refs/main` is a file with the commit's name.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mlpipe._core.errors import PlanError, StoreError
from mlpipe._core.files import expand_user
from mlpipe._core.presets import LlamaConfig, MoeConfig

FILE = "config.json"
_MAX_BYTES = 2**20
_IN_CACHE = "models--"
_COMMIT = re.compile(r"[0-9a-f]{40}")
NO_REVISION = "model.revision"  # `where` of errors that are about it
_NEVER_STRETCHED = {None, "default"}
# What the architectures of mlpipe's own model say, by `model_type`, where their config.json is silent.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "qwen2": {"qkv_bias": True, "num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "qwen3": {
        "qk_norm": True,
        "head_dim": 128,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen3_moe": {
        "qk_norm": True,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
_OF_EXPERTS = ("mixtral", "qwen3_moe")
_COMMON = {
    "max_position_embeddings": 2_048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_LARGEST = 2**31  # of any size
_LARGEST_NUMBER = 1e30
_MOST_LAYERS = 10_000  # each is planned by itself


def located(folder: str, revision: str | None) -> tuple[str, str | None]:
    """The folder that has config.json, and its commit where the layout of a cache tells it. `revision`: as in
    the file. Raises PlanError for one that is not there, or that nothing tells."""
    real = folder.rstrip("/") if folder.startswith("s3://") else str(_local(folder).resolve())
    cache, _, commit = real.rpartition("/snapshots/")
    if PurePosixPath(real).name.startswith(_IN_CACHE):
        commit = _commit(real, revision or "main")
        return f"{folder.rstrip('/')}/snapshots/{commit}", commit
    if PurePosixPath(cache).name.startswith(_IN_CACHE) and _COMMIT.fullmatch(commit):
        if revision is not None and (other := _commit(cache, revision)) != commit:
            raise PlanError(
                f"revision {revision!r} is {other}, and the folder is of {commit}",
                where=NO_REVISION,
                hint=f"name {PurePosixPath(cache).name}, or leave revision away",
            )
        return folder, commit
    if revision is not None:
        raise PlanError(
            f"nothing tells whether {folder} is of revision {revision!r}",
            where=NO_REVISION,
            hint="leave it away, or name a folder in the layout of Hugging Face's cache: models--ORG--NAME",
        )
    return folder, None


def _commit(cache: str, revision: str) -> str:
    """Of a commit, branch or tag that is in `cache`, a folder `models--ORG--NAME`."""
    try:
        commit = revision
        if not _COMMIT.fullmatch(revision):
            commit = _bytes(cache, f"refs/{revision}", "")[0][:100].decode(errors="replace").strip()
        if not _COMMIT.fullmatch(commit):
            raise PlanError(f"refs/{revision} says {commit[:40]!r}, which is no commit", where=cache)
        _bytes(f"{cache}/snapshots/{commit}", FILE, "")
    except PlanError as error:
        raise PlanError(
            f"revision {revision!r} is not there: {error.told}",
            where=NO_REVISION,
            hint=f"fetch it: hf download {PurePosixPath(cache).name[len(_IN_CACHE) :].replace('--', '/')} "
            f"--revision {revision}",
        ) from None
    return commit


def described(folder: str) -> tuple[dict[str, Any], LlamaConfig]:
    """What `read_config` gives of `folder`, and the sizes that it says."""
    config = read_config(folder)
    return config, sizes_of(config, _file(folder))


def read_config(folder: str) -> dict[str, Any]:
    """The config.json of `folder`, a path or an `s3://` URL. Raises PlanError for what is none, StoreError
    for a bucket that does not answer."""
    hint = "name a folder with config.json and *.safetensors, as `save_pretrained` writes it"
    if not folder.startswith(("/", "~", "s3://", "file://")):
        hint += f"; {folder} begins in {Path.cwd()}: go where the run was started, or write the whole path"
    data, where = _bytes(folder, FILE, hint)
    if len(data) > _MAX_BYTES:
        raise PlanError(f"{FILE} has more than {_MAX_BYTES} bytes", where=where)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"no JSON: {error}", where=where, hint="copy the folder again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise PlanError("this config.json does not say which model it is of (model_type)", where=where)
    return config


def _file(folder: str) -> str:
    return f"{folder.rstrip('/')}/{FILE}"


def _local(folder: str) -> Path:
    return expand_user(folder.removeprefix("file://"))


def _bytes(folder: str, name: str, hint: str) -> tuple[bytes, str]:
    """Of the file `name` the first `_MAX_BYTES` and one more, and where they are from."""
    if folder.startswith("s3://"):
        from mlpipe.store.open import open_store

        where = f"{folder.rstrip('/')}/{name}"
        try:
            return open_store(folder.rstrip("/")).get(name, length=_MAX_BYTES + 1), where
        except StoreError as error:
            if error.kind != "input":
                raise
            raise PlanError(f"cannot be read: {error.message}", where=where, hint=hint) from None
    path = _local(folder) / name
    try:
        # a pipe that nobody writes into would be waited for
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PlanError("cannot be read: it is no regular file", where=str(path), hint=hint)
            return file.read(_MAX_BYTES + 1), str(path)
    except OSError as error:
        raise PlanError(f"cannot be read: {error.strerror}", where=str(path), hint=hint) from None


def sizes_of(config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Raises PlanError for an architecture that mlpipe's own model does not compute, and for what makes no
    model."""
    family = str(config["model_type"])
    if family not in _FAMILIES:
        raise PlanError(
            f"{family!r} is none of the architectures that mlpipe's own model computes",
            where=where,
            hint=f"these are {', '.join(_FAMILIES)}; of another name a function that builds it: entry",
        )
    given = {key: value for key, value in config.items() if value is not None}
    if "num_key_value_heads" in config:  # null: as many as query heads
        given.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    said = _Said({**_COMMON, **_FAMILIES[family], **given}, where)
    said.only("hidden_act", ("silu", "swish"))
    for key in ("quantization_config", "auto_map"):
        if config.get(key):
            raise PlanError(f"{key} is not supported", where=where, hint="save the model in bf16 or fp32")
    has_bias = said.flag("attention_bias") and family in ("llama", "qwen3", "qwen3_moe")
    dim, num_heads = said.size("hidden_size"), said.size("num_attention_heads")
    head_dim = said.size("head_dim") if "head_dim" in said.values else None
    common: dict[str, Any] = dict(
        vocab_size=said.size("vocab_size"),
        dim=dim,
        num_layers=said.size("num_hidden_layers", largest=_MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=said.size("num_key_value_heads", num_heads),
        ffn_dim=said.size("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        max_seq_len=said.size("max_position_embeddings"),
        rope_theta=said.rope("rope_theta", 10_000.0),
        norm_eps=said.number("rms_norm_eps"),
        tied=said.flag("tie_word_embeddings"),
        head_channels=None if head_dim is None or head_dim * num_heads == dim else head_dim,
        qkv_bias=said.flag("qkv_bias") or has_bias,
        o_bias=has_bias,
        mlp_bias=said.flag("mlp_bias") and family == "llama",
        qk_norm=said.flag("qk_norm"),
        **said.stretch(),
    )
    sizes = LlamaConfig(**common) if family not in _OF_EXPERTS else _with_experts(common, said)
    if conflicts := sizes.conflicts():
        raise PlanError(conflicts[0].message, where=where, hint="copy the folder again")
    return sizes


def _with_experts(common: dict[str, Any], said: _Said) -> MoeConfig:
    """A mixture of experts in every block."""
    for key, plain in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if said.values.get(key, plain) != plain:
            raise PlanError(f"blocks without experts ({key}) are not supported", where=said.where)
    number = "num_experts" if "num_experts" in said.values else "num_local_experts"
    return MoeConfig(
        **common,
        num_experts=said.size(number),
        experts_per_token=said.size("num_experts_per_tok"),
        num_shared_experts=0,
        balance_rate=0.0,
        router="softmax",
        normalised=said.flag("norm_topk_prob"),
    )


def longest(config: Mapping[str, Any], sizes: LlamaConfig) -> int:
    """Tokens of a sequence that mlpipe's model computes as `transformers` does: attention that looks back
    without a limit is the same below the window."""
    window = config.get("sliding_window")
    slides = config.get("use_sliding_window", config["model_type"] in ("mistral", "mixtral"))
    return min(sizes.max_seq_len, window) if slides and isinstance(window, int) else sizes.max_seq_len


class _Said:
    """What a config.json says, by its keys, checked."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where
        # transformers 5 has all of the rotation in one, 4 apart
        scaling = values.get("rope_parameters", values.get("rope_scaling")) or {}
        if not isinstance(scaling, dict):
            raise self._wrong("rope_scaling", scaling)
        self.scaling: dict[str, Any] = scaling

    def _wrong(self, key: str, value: Any) -> PlanError:
        told = f"{key} {str(value)[:40]!r} cannot be"
        return PlanError(told, where=self.where, hint="copy the folder again")

    def size(self, key: str, otherwise: int | None = None, *, largest: int = _LARGEST) -> int:
        value = self.values.get(key, otherwise)
        if type(value) is not int or not 0 < value < largest:
            raise self._wrong(key, value)
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, value)
        return value

    def number(self, key: str) -> float:
        return self._positive(key, self.values.get(key))

    def rope(self, key: str, otherwise: float) -> float:
        return self._positive(key, self.scaling.get(key, self.values.get(key, otherwise)))

    def _positive(self, key: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not 0 < value < _LARGEST_NUMBER:  # NaN is in no range
            raise self._wrong(key, value)
        return float(value)

    def only(self, key: str, allowed: tuple[str, ...]) -> None:
        if self.values.get(key) not in allowed:
            value = str(self.values.get(key))[:40]
            raise PlanError(
                f"{key} {value!r} is not what mlpipe's model computes ({allowed[0]})", where=self.where
            )

    def stretch(self) -> dict[str, Any]:
        """The fields of `LlamaConfig` that say how the rotary frequencies are scaled."""
        kind = self.scaling.get("rope_type", self.scaling.get("type"))
        if kind in _NEVER_STRETCHED:
            return {}
        if kind not in ("linear", "llama3"):
            raise PlanError(
                f"rotary frequencies scaled as {str(kind)[:40]!r} are not supported",
                where=self.where,
                hint="linear and llama3 are",
            )
        scaling: dict[str, Any] = {"rope_scaling": kind, "rope_factor": self.rope("factor", 0.0)}
        if kind == "llama3":
            original = self.scaling.get("original_max_position_embeddings")
            if type(original) is not int or not 0 < original < _LARGEST:
                raise self._wrong("original_max_position_embeddings", original)
            low, high = self.rope("low_freq_factor", 0.0), self.rope("high_freq_factor", 0.0)
            if low >= high:
                raise self._wrong("high_freq_factor", high)
            scaling |= {"rope_original": original, "rope_low": low, "rope_high": high}
        return scaling
