"""Raw torchrun and DistributedDataParallel, with a checkpoint by torch.save where one is asked for.

tuned: gradients are views of the buckets, constant buffers stay where they are, bf16 autocast, and the module
is compiled in place before DDP wraps it, since torch.compile does not cope well with wrappers
(https://docs.pytorch.org/docs/stable/compile/programming_model.where_to_apply_compile.html, of 2025). The
older https://docs.pytorch.org/docs/stable/notes/ddp.html compiles around DDP, which cuts the graph at the
buckets so that they are reduced meanwhile: what Fabric and Trainer do here.
"""

from __future__ import annotations

import json
import os
import time
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.work import read_work, turns, usual_loss


def main() -> None:
    work = read_work()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = work.build()
    quick = (
        {} if work.settings == "default" else {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    )
    if work.compiled:
        model.compile()
    module = DistributedDataParallel(model, **quick)
    optimizer = work.adamw(model.parameters())
    dataset = work.dataset()
    sampler = DistributedSampler(dataset, shuffle=False)
    batches = DataLoader(dataset, batch_size=work.batch, sampler=sampler)
    number, loading = 0, 0.0
    if work.checkpoint and os.path.exists(work.checkpoint):
        began = time.perf_counter()
        saved = torch.load(work.checkpoint, mmap=True, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        number, loading = saved["step"], time.perf_counter() - began

    def forward(inputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=work.bf16):
            return module(inputs)

    waiting = turns(work, rank, world_size, forward) if work.socket else None
    log = open(work.log, "a", buffering=1) if work.log and rank == 0 else None  # noqa: SIM115
    for batch in islice(batches, number, None):
        if waiting:
            waiting.before_step()
        with torch.autocast("cpu", torch.bfloat16, enabled=work.bf16):
            loss = usual_loss(module(batch["inputs"]), batch["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if log:
            line = {"step": number, "loss": loss.item(), "time": time.time(), "restore_seconds": loading}
            log.write(json.dumps(line) + "\n")
        if work.checkpoint and number % work.save_every == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
            torch.save(state, work.checkpoint + ".new")
            os.replace(work.checkpoint + ".new", work.checkpoint)


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads abort an interpreter that ends by itself once in about fifty
