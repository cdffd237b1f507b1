"""A committed checkpoint -> a folder with safetensors and tokenizer.json; of mlpipe's own models besides with
config.json, so that `transformers` loads it.

Needs no torch and no model: tensors are read from the store one at a time, verified, and streamed into the
safetensors format (huggingface/safetensors, README "Format"), which has no streaming writer of its own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mlpipe._core.errors import StoreError, TrainError
from mlpipe._core.presets import LLAMA, MOE, LlamaConfig, MoeConfig, built_by
from mlpipe.store import safetensors
from mlpipe.store.base import Store
from mlpipe.store.catalogue import load_manifest, read_blob
from mlpipe.store.manifest import DTYPE_BYTES, Blob, Manifest, Tensor
from mlpipe.store.open import open_store
from mlpipe.train import export_experts
from mlpipe.train.export_adapter import CONFIG, WEIGHTS, adapter_config, adapter_names
from mlpipe.train.tokenizer import END_OF_TEXT

_SHARD_BYTES = 5_000_000_000  # what the Hub's tools cut at
_CACHED_BLOCKS = 32  # of 16 MiB: small tensors share a block, and sharded ones have one in each blob
_DTYPES = {ours: theirs for theirs, ours in safetensors.DTYPES.items()}
_PREFIX = "model."
_BESIDES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
_MAX_TOKENIZER_BYTES = 100_000_000

Reader = Callable[[Blob, int, memoryview], None]


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
    shard_bytes: int = _SHARD_BYTES,
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
    manifest = load_manifest(store, key)
    weights = {name: tensor for name, tensor in manifest["tensors"].items() if name.startswith(_PREFIX)}
    if not weights:
        raise TrainError("this checkpoint holds no model", where=key, kind="input")
    if ema:
        weights = _averages(manifest, weights, key)
    config = _llama_config(manifest)
    if "adapter" in manifest["scalars"]:
        return _export_adapter(store, manifest, weights, key, out)
    if config:
        _check_names(weights, config, key)
    names = {_exported_name(name, config): tensor for name, tensor in weights.items()}
    if isinstance(config, MoeConfig):
        names = dict(export_experts.file_tensors(config, names))
    if config is None:
        tied = manifest["scalars"].get("tied") or {}
        names |= {name.removeprefix(_PREFIX): weights[stored] for name, stored in tied.items()}
    with _new_folder(out) as folder:
        _write_weights(folder, names, manifest["blobs"], _cached_reader(store), shard_bytes)
        start = manifest["scalars"].get("init_from") or {}
        base = start.get("config") if config else None
        has_tokenizer = bool(base) and copy_tokenizer(folder, start)
        end = None
        if tokenizer and not has_tokenizer:
            end = _write_tokenizer(folder, tokenizer, config)
        if base:
            dtype = weights["model.embed_tokens.weight"]["dtype"]
            _write_json(folder / "config.json", {**base, "dtype": dtype, "torch_dtype": dtype})
        elif config:
            _write_json(folder / "config.json", _transformers_config(config, end, weights))
            _write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
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
        _write_safetensors(folder / WEIGHTS, tensors, manifest["blobs"], _cached_reader(store))
        told = adapter_config(manifest["scalars"], names, for_transformers=config is not None)
        _write_json(folder / CONFIG, told)
    num_params = sum(math.prod(tensor["shape"]) for tensor in tensors.values())
    return Exported(out, (CONFIG, WEIGHTS), num_params, manifest["step"], transformers=False)


def _averages(manifest: Manifest, weights: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    found = {name: manifest["tensors"].get(f"optim.{name}.ema", tensor) for name, tensor in weights.items()}
    if found == weights:
        raise TrainError(
            "this checkpoint holds no average of the weights",
            where=key,
            hint="it is kept where the training says `ema: {decay: 0.999}`",
            kind="input",
        )
    return found


def is_for_transformers(manifest: Manifest) -> bool:
    """Whether the export of this checkpoint is what `AutoModelForCausalLM.from_pretrained` loads."""
    model = manifest["scalars"].get("model")
    return "adapter" not in manifest["scalars"] and _is_known(model)


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


def _check_names(weights: Iterable[str], config: LlamaConfig, where: str) -> None:
    """`transformers` draws at random what it does not find."""
    expected = {f"{_PREFIX}{one.name}" for one in config.named_tensors()}
    if isinstance(config, MoeConfig):
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
        **(export_experts.config_fields(config) if isinstance(config, MoeConfig) else {}),
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
    _write_json(folder / "tokenizer_config.json", settings)
    return added.get(END_OF_TEXT)


def _write_weights(
    folder: Path, tensors: dict[str, Tensor], blobs: list[Blob], read: Reader, shard_bytes: int
) -> None:
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        _write_safetensors(folder / "model.safetensors", tensors, blobs, read)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(folder / file, {name: tensors[name] for name in names}, blobs, read)
        weight_map |= dict.fromkeys(names, file)
    total = sum(_num_bytes(tensor) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _shards(tensors: dict[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut before `shard_bytes` are passed (a larger tensor stands alone)."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _num_bytes(tensor) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _num_bytes(tensor)
    return shards


def _num_bytes(tensor: Tensor) -> int:
    return math.prod(tensor["shape"]) * DTYPE_BYTES[tensor["dtype"]]


def _write_safetensors(path: Path, tensors: dict[str, Tensor], blobs: list[Blob], read: Reader) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + _num_bytes(tensor)
        dtype = _DTYPES.get(tensor["dtype"])
        if dtype is None:
            raise TrainError(f"safetensors knows no {tensor['dtype']}", where=name, kind="input")
        header[name] = {"dtype": dtype, "shape": tensor["shape"], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_assemble(tensor, blobs, read))
        file.flush()
        os.fsync(file.fileno())


def _assemble(tensor: Tensor, blobs: list[Blob], read: Reader) -> memoryview:
    """The whole tensor's bytes, row-major, out of its chunks."""
    item = np.dtype(f"V{DTYPE_BYTES[tensor['dtype']]}")
    whole = np.empty(tensor["shape"], dtype=item)
    for chunk in tensor["chunks"]:
        box = np.empty(chunk["shape"], dtype=item)
        read(blobs[chunk["blob"]], chunk["byte_offset"], _bytes_of(box))
        where = tuple(slice(o, o + n) for o, n in zip(chunk["offset"], chunk["shape"], strict=True))
        whole[where] = box
    return _bytes_of(whole)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _cached_reader(store: Store) -> Reader:
    """`read_blob`, but what is smaller than a block comes out of the last blocks read."""
    blobs: dict[str, Blob] = {}

    @lru_cache(maxsize=_CACHED_BLOCKS)
    def block(key: str, index: int) -> memoryview:
        start = index * blobs[key]["block_bytes"]
        data = memoryview(bytearray(min(blobs[key]["block_bytes"], blobs[key]["size_bytes"] - start)))
        read_blob(store, blobs[key], start, data)
        return data

    def read(blob: Blob, start: int, buffer: memoryview) -> None:
        size = blob["block_bytes"]
        if len(buffer) >= size:
            read_blob(store, blob, start, buffer)
            return
        blobs[blob["key"]] = blob
        filled = 0
        while filled < len(buffer):
            index, offset = divmod(start + filled, size)
            part = block(blob["key"], index)[offset : offset + len(buffer) - filled]
            buffer[filled : filled + len(part)] = part
            filled += len(part)

    return read


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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
