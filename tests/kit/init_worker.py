"""`python -m kit.init_worker`, one rank of tests/torch/test_init.py: initialises models under every split and
prints what came out, as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from mlpipe._core.errors import TrainError
from mlpipe.train.init import initialize
from mlpipe.train.models.llama import build_model


class Own(nn.Module):
    """A user's model; `how` is what its init_weights does. Sizes that no world size divides."""

    table: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 5))
        self.scale = nn.Parameter(torch.empty(2))
        self.bias = nn.Parameter(torch.empty(1))
        self.register_buffer("table", torch.empty(3))
        self.how = how

    def init_weights(self) -> None:
        self.scale.fill_(2.0)
        self.bias.zero_()
        self.table.copy_(torch.arange(3))
        INITS[self.how](self.weight)


def rows(weight: torch.Tensor) -> None:
    for row in range(7):
        weight[row].fill_(row)


def padded(weight: torch.Tensor) -> None:
    weight.normal_()
    weight[3].zero_()
    weight[5:].T[1].normal_()


def columns(weight: torch.Tensor) -> None:
    weight[:, :2].normal_()
    weight[:, 2:].uniform_()


INITS: dict[str, Callable[[torch.Tensor], object]] = {
    "trunc_normal": nn.init.trunc_normal_,
    "orthogonal": nn.init.orthogonal_,
    "kaiming": lambda weight: nn.init.kaiming_uniform_(weight, a=5**0.5),
    "bernoulli": lambda weight: weight.bernoulli_(0.5),
    "exponential": lambda weight: weight.exponential_().mul_(3),
    "transposed": lambda weight: weight.T.normal_(),
    "columns": columns,
    "copied": lambda weight: weight.copy_(torch.arange(5.0)),
    "own generator": lambda weight: nn.init.normal_(weight, generator=torch.Generator().manual_seed(5)),
    "rows": rows,
    "padded": padded,
    "factory": lambda weight: weight.copy_(torch.randn(7, 5)),
}


def meshes(world_size: int) -> Iterator[tuple[str, DeviceMesh]]:
    yield "fsdp", init_device_mesh("cpu", (world_size,))
    yield "fsdp alone", init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("ranks", "one"))["one"]
    if world_size == 4:
        yield "hsdp", init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def result(model: nn.Module, mesh: DeviceMesh | None, seed: int) -> str:
    if mesh is not None:
        for block in getattr(model, "layers", []):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    try:
        initialize(model, seed)
    except TrainError as error:
        return f"{error.kind}: {error.message}"
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(full.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, str] = {}
    fields: dict[str, Any] = {
        "vocab_size": 259, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 101,
        "max_seq_len": 32, "rope_theta": 1e4, "norm_eps": 1e-5,
    }  # fmt: skip
    for name, mesh in [("plain", None), *meshes(dist.get_world_size())]:
        for seed in (0, 1):
            for tied in (True, False):
                with torch.device("meta"):
                    llama = build_model(**fields, tied=tied)
                found[f"llama {seed} {tied}/{name}"] = result(llama, mesh, seed)
        for how in INITS:
            with torch.device("meta"):
                own = Own(how)
            found[f"{how}/{name}"] = result(own, mesh, 0)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps({"same_on_all_ranks": all(f == found for f in everyone), "found": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an interpreter that ends by itself once in about fifty
