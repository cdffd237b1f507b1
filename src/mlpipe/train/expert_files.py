"""Mixtures of experts in files, as `transformers` reads and writes them: each expert's matrices apart, where
mlpipe's model has one matrix of all experts.

Open weights have the names of their own architecture. One of mlpipe's presets is a Glm4Moe there, with
experts in every block, rotary positions in all channels of a head and neither groups nor tokens predicted
ahead; without a shared expert Glm4Moe has one of no channels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mlpipe._core.presets import MoeConfig
from mlpipe.store.manifest import DTYPE_BYTES, Tensor

GLM = "glm4_moe"
# by `model_type`, what differs: the block's feed-forward, an expert's matrices
_FEED_FORWARD = {"mixtral": "block_sparse_moe"}
_MATRICES = {"mixtral": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}}
_STACKED = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
_SHARED = ("gate_proj", "up_proj", "down_proj")


def file_tensors(
    config: MoeConfig, weights: dict[str, Tensor], model_type: str
) -> Iterator[tuple[str, Tensor]]:
    """By their names in the file, of `weights` by their names there but for the experts'."""
    matrices = _MATRICES.get(model_type, {})
    for own, tensor in weights.items():
        name = own.replace(".mlp.", f".{_FEED_FORWARD.get(model_type, 'mlp')}.")
        if not name.endswith(_STACKED):
            yield name, tensor
            continue
        stem, _, projection = name.rpartition(".")
        projection = matrices.get(projection, projection)
        rows = tensor["shape"][0] // config.num_experts
        for expert in range(config.num_experts):
            yield f"{stem}.{expert}.{projection}.weight", _rows(tensor, expert * rows, (expert + 1) * rows)
    if model_type == GLM and not config.num_shared_experts:
        dtype = weights["model.embed_tokens.weight"]["dtype"]
        for block in range(config.num_layers):
            for projection in _SHARED:
                shape = [config.dim, 0] if projection == "down_proj" else [0, config.dim]
                name = f"model.layers.{block}.mlp.shared_experts.{projection}.weight"
                yield name, {"dtype": dtype, "shape": shape, "chunks": []}


def stack(config: MoeConfig, tensors: dict[str, Tensor], model_type: str) -> None:
    """In place, the other way: of the experts of each block, which have names of files, one tensor each.
    Experts that are not all there, or unlike, stay apart."""
    matrices = _MATRICES.get(model_type, {})
    feed_forward = _FEED_FORWARD.get(model_type, "mlp")
    for name in list(tensors):
        if 0 in tensors[name]["shape"]:
            del tensors[name]
        elif f".{feed_forward}." in name and feed_forward != "mlp":
            tensors[name.replace(f".{feed_forward}.", ".mlp.")] = tensors.pop(name)
    for block in range(config.num_layers):
        stem = f"model.layers.{block}.mlp.experts"
        for stacked in _STACKED:
            projection = stacked.rpartition(".")[2]
            word = matrices.get(projection, projection)
            names = [f"{stem}.{expert}.{word}.weight" for expert in range(config.num_experts)]
            experts = [tensors[name] for name in names if name in tensors]
            kinds = {(one["dtype"], tuple(one["shape"])) for one in experts}
            if len(experts) < len(names) or len(kinds) > 1 or len(experts[0]["shape"]) != 2:
                continue
            for name in names:
                del tensors[name]
            tensors[f"{stem}.{projection}"] = _below_each_other(experts)


def _below_each_other(matrices: list[Tensor]) -> Tensor:
    rows, columns = matrices[0]["shape"]
    chunks = [
        {**chunk, "offset": [number * rows + chunk["offset"][0], chunk["offset"][1]]}
        for number, one in enumerate(matrices)
        for chunk in one["chunks"]
    ]
    return {**matrices[0], "shape": [len(matrices) * rows, columns], "chunks": chunks}  # type: ignore[typeddict-item]


def _rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    """Those rows of it, out of the same chunks."""
    chunks = []
    for chunk in tensor["chunks"]:
        offset, length = chunk["offset"][0], chunk["shape"][0]
        low, high = max(offset, begin), min(offset + length, end)
        if low < high:
            row_bytes = math.prod(chunk["shape"][1:]) * DTYPE_BYTES[tensor["dtype"]]
            chunks.append(
                {
                    "blob": chunk["blob"],
                    "byte_offset": chunk["byte_offset"] + (low - offset) * row_bytes,
                    "offset": [low - begin, *chunk["offset"][1:]],
                    "shape": [high - low, *chunk["shape"][1:]],
                }
            )
    return {**tensor, "shape": [end - begin, *tensor["shape"][1:]], "chunks": chunks}  # type: ignore[typeddict-item]


def config_fields(config: MoeConfig) -> dict[str, Any]:
    """Of config.json, over those of a Llama."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "moe_intermediate_size": config.ffn_dim,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": config.num_shared_experts,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": 1.0,
        },
    }
