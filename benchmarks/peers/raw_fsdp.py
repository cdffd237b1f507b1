"""Raw torchrun and FSDP2.

tuned: as torchtitan does it (torchtitan/models/llama3/infra/parallelize.py): each block compiled as one graph
before it is sharded, bf16 by the mixed-precision policy with fp32 reductions, the embedding on its own, norm
and head together and not resharded after the forward pass. "same": bf16 as autocast means it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.work import read_work, turns, usual_loss


def main() -> None:
    work = read_work()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = work.build()
    mesh = init_device_mesh("cpu", (world_size,))
    if work.compiled:
        for layer in model.layers:
            layer.compile(fullgraph=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if work.compiled else MixedPrecisionPolicy()
    if work.compiled:
        fully_shard(model.embed, mesh=mesh, mp_policy=policy)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if work.compiled:
        fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = work.adamw(model.parameters())
    dataset = work.dataset()
    batches = DataLoader(dataset, batch_size=work.batch, sampler=DistributedSampler(dataset, shuffle=False))
    autocast = work.bf16 and not work.compiled

    def forward(inputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(inputs)

    waiting = turns(work, rank, world_size, forward)
    for batch in batches:
        waiting.before_step()
        loss = usual_loss(forward(batch["inputs"]), batch["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.grad_clip)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads abort an interpreter that ends by itself once in about fifty
