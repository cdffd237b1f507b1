"""A rank of `benchmarks.reshard`: `torchrun -m benchmarks.reshard_worker FOLDER ROUNDS SCALE`."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.measure import Figures, rounds
from mlpipe.store import catalogue
from mlpipe.store.open import open_store
from mlpipe.train.checkpoint import Checkpointer, Coordination, SaveSettings
from mlpipe.train.reshard import load
from mlpipe.train.shards import LocalShard

_WRITERS, _READERS = 2, 4


def shapes(scale: int) -> dict[str, tuple[int, ...]]:
    """A Llama of 12 layers and its two moments: 1.0 GiB in fp32 at scale 1, less by its square above."""
    dim, inner = 768 // scale, 2048 // scale
    model: dict[str, tuple[int, ...]] = {"embedding": (4096, dim), "norm": (dim,)}
    for layer in range(12):
        model |= {f"{layer}.{name}": (dim, dim) for name in ("q", "k", "v", "o")}
        model |= {f"{layer}.up": (inner, dim), f"{layer}.gate": (inner, dim), f"{layer}.down": (dim, inner)}
        model |= {f"{layer}.norm": (dim,)}
    return {
        f"{kind}.{name}": shape for kind in ("model", "optim.m", "optim.v") for name, shape in model.items()
    }


def shards_of(found: dict[str, tuple[int, ...]], rank: int, num_ranks: int) -> list[LocalShard]:
    """Rank's rows of each tensor, zero."""
    owned = []
    for name, shape in found.items():
        rows = shape[0] // num_ranks
        owned.append(
            LocalShard(name, torch.zeros(rows, *shape[1:]), shape, (rank * rows,) + (0,) * (len(shape) - 1))
        )
    return owned


def values(owned: LocalShard) -> torch.Tensor:
    """What stands in the shard: a function of the name and the place alone."""
    first = owned.offset[0] * owned.local[0].numel()
    numbers = torch.arange(first, first + owned.local.numel(), dtype=torch.float32)
    return (numbers + sum(owned.name.encode())).reshape(owned.local.shape)


def as_dtensors(owned: list[LocalShard], mesh: DeviceMesh) -> dict[str, DTensor]:
    return {
        one.name: DTensor.from_local(one.local, mesh, [Shard(0)], run_check=False, shape=one.shape,
                                     stride=torch.empty(one.shape, device="meta").stride())
        for one in owned
    }  # fmt: skip


def write(folder: Path, found: dict[str, tuple[int, ...]], rank: int) -> None:
    """The same tensors by mlpipe and by DCP at its defaults, each from two ranks."""
    mesh = DeviceMesh("cpu", list(range(_WRITERS)))
    if rank < _WRITERS:
        owned = shards_of(found, rank, _WRITERS)
        for one in owned:
            one.local.copy_(values(one))
        dcp.save(as_dtensors(owned, mesh), checkpoint_id=folder / "dcp", process_group=mesh.get_group())
        failed: list[BaseException | None] = []
        saver = Checkpointer(
            open_store(str(folder / "store")),
            SaveSettings("stage", attempt=1, restart=0, code_digest="", keep=1, asynchronous=False),
            Coordination(dist.FileStore(str(folder / "coordination"), _WRITERS), rank, _WRITERS),
            on_saved=lambda saved: failed.append(saved.error),
            while_waiting=lambda: None,
        )
        saver.save(1, owned, {})
        if failed != [None]:
            raise RuntimeError(f"not saved: {failed}")
    dist.barrier()


def main() -> None:
    warnings.simplefilter("ignore")
    folder, num_rounds, scale = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = shapes(scale)
    write(folder, found, rank)
    store = open_store(str(folder / "store"))
    mesh = DeviceMesh("cpu", list(range(_READERS)))
    owned = shards_of(found, rank, _READERS)
    sharded = as_dtensors(owned, mesh)

    def ours() -> None:
        last = catalogue.latest(store, "stage")
        load(store, last.key, catalogue.load_manifest(store, last.key), owned)

    def theirs() -> None:
        dcp.load(sharded, checkpoint_id=folder / "dcp")

    def turn(read: Callable[[], None]) -> Callable[[], Figures]:
        """The slowest rank's wall time, from a barrier on; the CPU time of all ranks."""

        def run() -> Figures:
            dist.barrier()
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            read()
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            worst, total = torch.tensor([seconds]), torch.tensor([cpu])
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            dist.all_reduce(total)
            return {"seconds": float(worst), "cpu": float(total)}

        return run

    for read in (ours, theirs):  # both give what was saved; also the warm-up
        for one in owned:
            one.local.zero_()
        read()
        wrong = [one.name for one in owned if not torch.equal(one.local, values(one))]
        if wrong:
            raise RuntimeError(f"{read.__name__}: not what was saved: {wrong[:3]}")
    measured = rounds({"mlpipe": turn(ours), "DCP": turn(theirs), "DCP again": turn(theirs)}, num_rounds)
    if rank == 0:
        size_bytes = sum(4 * torch.Size(shape).numel() for shape in found.values())
        (folder / "answer.json").write_text(json.dumps({"rounds": measured, "gib": size_bytes / 2**30}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads abort an interpreter that ends by itself once in about fifty
