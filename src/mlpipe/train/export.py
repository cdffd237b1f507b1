"""A committed checkpoint -> a folder with safetensors and tokenizer.json; of mlpipe's own models besides with
config.json, so that `transformers` loads it.

Needs no torch and no model: tensors are read from the store one at a time, verified, and written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlpipe._core.errors import StoreError, TrainError
from mlpipe._core.presets import LLAMA, MOE, LlamaConfig, MoeConfig, built_by
from mlpipe.store.base import Store
from mlpipe.store.catalogue import load_manifest
from mlpipe.store.manifest import Manifest, Tensor
from mlpipe.store.open import open_store
from mlpipe.train import expert_files
from mlpipe.train.data.tokenizer import END_OF_TEXT
from mlpipe.train.export_adapter import CONFIG, WEIGHTS, adapter_config, adapter_names
from mlpipe.train.export_merged import Merged
from mlpipe.train.write_safetensors import SHARD_BYTES, Reader, reader, write_file, write_json, write_weights

_PREFIX = "model."
_BESIDES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
_MAX_TOKENIZER_BYTES = 100_000_000


@dataclass(frozen=True)
class Exported:
    """`transformers`: whether `AutoModelForCausalLM.from_pretrained` loads the folder."""

    folder: Path
    files: tuple[str, ...]
    num_params: int
    step: int
    transformers: bool


def export_checkpoint(
    store: Store,
    key: str,
    out: Path,
    *,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    ema: bool = False,
) -> Exported:
    """Writes the weights of the checkpoint under the prefix `key` into the new folder `out`, all or nothing.

    `tokenizer`: a tokenizer.json to put beside them. `ema`: the average of the weights instead of the last
    ones; buffers, and what was not trained, as they are. A model that is not mlpipe's own gets its
    weights under their own names, tied ones under each of theirs as its `load_state_dict` expects, and no
    config.json (transformers ties by its own). Of a training with adapters it is these, as peft has them.
    Raises TrainError (input) when `out` is there and not empty, StoreError when the checkpoint is absent or
    damaged.
    """
    manifest, weights = _weights(store, key, ema)
    if "adapter" in manifest["scalars"]:
        return _export_adapter(store, manifest, weights, key, out)
    whole = _Whole(manifest, weights, reader(store, manifest["blobs"]))
    return _export_whole(whole, key, out, tokenizer, shard_bytes)


def export_merged(
    store: Store, key: str, out: Path, *, shard_bytes: int = SHARD_BYTES, ema: bool = False
) -> Exported:
    """As `export_checkpoint`, of a training with adapters: the weights that it started from, with what the
    adapters add to them, in their own dtype."""
    manifest, weights = _weights(store, key, ema)
    if "adapter" not in manifest["scalars"]:
        raise TrainError(
            "there is no adapter to merge: the checkpoint holds all weights",
            where=key,
            hint="export it without --merged",
            kind="input",
        )
    config = _llama_config(manifest)
    own = {_exported_name(name, config): tensor for name, tensor in weights.items()}
    merged = Merged(store, manifest, lambda name: _exported_name(f"{_PREFIX}{name}", config), own, key)
    stored = {_stored_name(name, config): tensor for name, tensor in merged.weights.items()}
    return _export_whole(_Whole(manifest, stored, merged.read), key, out, None, shard_bytes)


class _Whole(NamedTuple):
    """All weights of a model, by their names in a checkpoint, and who reads them."""

    manifest: Manifest
    weights: dict[str, Tensor]
    read: Reader


def _weights(store: Store, key: str, ema: bool) -> tuple[Manifest, dict[str, Tensor]]:
    manifest = load_manifest(store, key)
    weights = {name: tensor for name, tensor in manifest["tensors"].items() if name.startswith(_PREFIX)}
    if not weights:
        raise TrainError("this checkpoint holds no model", where=key, kind="input")
    return manifest, _averages(manifest, weights, key) if ema else weights


def _export_whole(whole: _Whole, key: str, out: Path, tokenizer: Path | None, shard_bytes: int) -> Exported:
    manifest, weights, read = whole
    config = _llama_config(manifest)
    if config:
        _check_names(weights, config, key)
    names = {_exported_name(name, config): tensor for name, tensor in weights.items()}
    if isinstance(config, MoeConfig):
        names = dict(expert_files.file_tensors(config, names, _model_type(manifest)))
    if config is None:
        tied = manifest["scalars"].get("tied") or {}
        for name, stored in tied.items():
            names.setdefault(name.removeprefix(_PREFIX), weights[stored])
    with _new_folder(out) as folder:
        write_weights(folder, names, read, shard_bytes)
        start = manifest["scalars"].get("init_from") or {}
        base = start.get("config") if config else None
        has_tokenizer = bool(base) and copy_tokenizer(folder, start)
        end = None
        if tokenizer and not has_tokenizer:
            end = _write_tokenizer(folder, tokenizer, config)
        if base:
            dtype = weights["model.embed_tokens.weight"]["dtype"]
            write_json(folder / "config.json", {**base, "dtype": dtype, "torch_dtype": dtype})
        elif config:
            write_json(folder / "config.json", _transformers_config(config, end, weights))
            write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        files = tuple(sorted(path.name for path in folder.iterdir()))
    num_params = sum(math.prod(tensor["shape"]) for tensor in weights.values())
    return Exported(out, files, num_params, manifest["step"], config is not None)


def _export_adapter(
    store: Store, manifest: Manifest, weights: dict[str, Tensor], key: str, out: Path
) -> Exported:
    config = _llama_config(manifest)
    exported = {_exported_name(name, config): tensor for name, tensor in weights.items()}
    names = adapter_names(exported, key)
    tensors = {names[name]: exported[name] for name in names}
    with _new_folder(out) as folder:
        write_file(folder / WEIGHTS, tensors, reader(store, manifest["blobs"]))
        told = adapter_config(manifest["scalars"], names, for_transformers=config is not None)
        write_json(folder / CONFIG, told)
    num_params = sum(math.prod(tensor["shape"]) for tensor in tensors.values())
    return Exported(out, (CONFIG, WEIGHTS), num_params, manifest["step"], transformers=False)


def _averages(manifest: Manifest, weights: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    averages = {
        name: manifest["tensors"].get(f"optim.{name}.ema", tensor) for name, tensor in weights.items()
    }
    if averages == weights:
        raise TrainError(
            "this checkpoint holds no average of the weights",
            where=key,
            hint="it is kept where the training says `ema: {decay: 0.999}`",
            kind="input",
        )
    return averages


def _is_known(model: Any) -> bool:
    """Whether `transformers` has this model of mlpipe's own as well."""
    if not isinstance(model, dict):
        return False
    of_experts = model.get("entry") == MOE and (model.get("args") or {}).get("num_experts", 0) > 1
    return of_experts or model.get("entry") == LLAMA


def _llama_config(manifest: Manifest) -> LlamaConfig | None:
    model = manifest["scalars"].get("model")
    if model is None or not _is_known(model):
        return None
    try:
        return built_by(model["entry"], model["args"])
    except (KeyError, TypeError) as error:
        raise TrainError(f"the checkpoint's model has other fields than this mlpipe's: {error}") from error


def _model_type(manifest: Manifest) -> str:
    """Of open weights their own."""
    start = manifest["scalars"].get("init_from") or {}
    return str((start.get("config") or {}).get("model_type", expert_files.GLM))


def _check_names(weights: Iterable[str], config: LlamaConfig, where: str) -> None:
    """`transformers` draws at random what it does not find."""
    expected = {f"{_PREFIX}{one.name}" for one in config.named_tensors()}
    if isinstance(config, MoeConfig) and config.router == "sigmoid":
        bias = "mlp.gate.e_score_correction_bias"
        expected |= {f"{_PREFIX}layers.{block}.{bias}" for block in range(config.num_layers)}
    missing = sorted(expected - set(weights))
    if missing:
        raise TrainError(
            f"the checkpoint lacks {len(missing)} tensors of its model, like {missing[0]}",
            where=where,
            hint="it was written by another version or program",
            kind="input",
        )


def _exported_name(name: str, config: LlamaConfig | None) -> str:
    """`transformers` keeps the head beside `model`, we keep all of the model under it."""
    return name if config and not name.startswith("model.lm_head.") else name.removeprefix(_PREFIX)


def _stored_name(name: str, config: LlamaConfig | None) -> str:
    """What a checkpoint calls a tensor that is exported as `name`."""
    return name if name.startswith(_PREFIX) and config else f"{_PREFIX}{name}"


def _transformers_config(config: LlamaConfig, end: int | None, weights: dict[str, Tensor]) -> dict[str, Any]:
    dtype = weights["model.embed_tokens.weight"]["dtype"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": dtype,  # transformers 4
        "dtype": dtype,
        **(expert_files.config_fields(config) if isinstance(config, MoeConfig) else {}),
    }


def copy_tokenizer(folder: Path, start: dict[str, Any]) -> bool:
    """What lies beside open weights besides these and config.json, where they still are. `start`: an
    InitPlan, as a checkpoint says it. Whether a tokenizer is among it."""
    try:
        base = open_store(start["found"]["store_url"])
        there = {
            info.key for info in base.list("", recursive=False) if info.size_bytes <= _MAX_TOKENIZER_BYTES
        }
        for name in sorted(there & set(_BESIDES)):
            (folder / name).write_bytes(base.get(name, length=_MAX_TOKENIZER_BYTES))
    except (StoreError, KeyError, TypeError):
        return False
    return bool(there & {"tokenizer.json", "tokenizer.model", "vocab.json"})


def _write_tokenizer(folder: Path, tokenizer: Path, config: LlamaConfig | None) -> int | None:
    """Returns the id of END_OF_TEXT, if the tokenizer has it."""
    try:
        text = tokenizer.read_text(encoding="utf-8")
        added = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainError(
            "this is no tokenizer.json", where=str(tokenizer), hint=str(error), kind="input"
        ) from error
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if config:
        settings["model_max_length"] = config.max_seq_len
    if END_OF_TEXT in added:
        settings |= {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    write_json(folder / "tokenizer_config.json", settings)
    return added.get(END_OF_TEXT)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name when the block ends well, and goes when it does not."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainError(
            "there is something here already", where=str(out), hint="name a new folder", kind="input"
        )
    out = out.absolute()
    temporary = out.parent / f".{out.name}.tmp-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(out)
    except OSError as error:
        where = str(error.filename or out)
        raise TrainError(
            f"cannot be written: {error.strerror or error}", where=where, kind="infrastructure"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
