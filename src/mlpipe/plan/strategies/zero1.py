"""DDP whose optimizer states are split over the workers; updated slices are gathered through buffers that
hold the model once more, and a slice."""

from __future__ import annotations

import dataclasses

from mlpipe.plan.memory import ADAM_BYTES, WEIGHT_BYTES, Counts, MemoryEstimate, Work, sparing_holes
from mlpipe.plan.plan import Mesh
from mlpipe.plan.strategies import ddp
from mlpipe.plan.time import Passes, Wire, copy_seconds

SHARDS = "the optimizer states"
FLAGS = {"shard_optimizer": True}
_BUCKET_BYTES = 64 * 2**20  # of parallel/shard_optimizer.py


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    return ddp.mesh(num_nodes, devices_per_node)


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    whole = ddp.memory(counts, work, mesh)
    share = counts.share(mesh.world_size)
    gathered = WEIGHT_BYTES * share * mesh.world_size
    # gloo gathers into one flat tensor more, when the activations are gone
    copied = max(0, min(gathered, _BUCKET_BYTES) - work.held - work.logits) if work.gloo else 0
    sent_away = ADAM_BYTES // WEIGHT_BYTES * (counts.small(1) - counts.small(mesh.world_size))
    return dataclasses.replace(
        whole,
        optimizer=ADAM_BYTES * share,
        buffers=whole.buffers + gathered + WEIGHT_BYTES * share + copied,
        holes=whole.holes if work.roomy is not None else whole.holes - sparing_holes(sent_away),
    )


def exposed(passes: Passes, wire: Wire, mesh: Mesh) -> float:
    """DDP's, and the gathering of the updated slices, which nothing hides: packed, sent and unpacked."""
    num_bytes = WEIGHT_BYTES * passes.num_params
    gathered = wire.gather(num_bytes, mesh.num_data_ranks)
    if not wire.hardware.speed.gather_bytes_per_second:
        gathered += copy_seconds(2 * num_bytes, wire.hardware)
    return ddp.exposed(passes, wire, mesh) + gathered


def updated(counts: Counts, mesh: Mesh) -> int:
    return counts.share(mesh.world_size)
