"""DeepSpeed ZeRO-1 on its CPU accelerator, under torchrun.

"same" in bf16 is its torch_autocast, which computes what the others do. tuned is its own bf16 (weights in
bf16; master copies stay in fp32 unless asked: deepspeed/runtime/precision_config.py), `engine.compile`, and a
core of its own for each rank, which its guide to CPUs recommends as `--bind_cores_to_rank`
(https://www.deepspeed.ai/tutorials/accelerator-setup-guide/); here without its launcher.
"""

from __future__ import annotations

import os

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.work import read_work, turns, usual_loss


def main() -> None:
    work = read_work()
    deepspeed.init_distributed("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_clipping": work.grad_clip,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1_000_000,
    }
    if work.bf16:
        low = {"enabled": True, "dtype": "bfloat16"}
        config |= {"bf16": {"enabled": True}} if work.compiled else {"torch_autocast": low}
    cores = sorted(os.sched_getaffinity(0))
    if work.compiled and len(cores) >= world_size:
        share = len(cores) // world_size
        os.sched_setaffinity(0, cores[share * rank : share * (rank + 1)])
    model = work.build()
    optimizer = work.adamw(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if work.compiled:
        engine.compile()
    dataset = work.dataset()
    batches = DataLoader(
        dataset, batch_size=work.batch, sampler=DistributedSampler(dataset, world_size, rank, shuffle=False)
    )
    waiting = turns(work, rank, world_size, engine)
    for batch in batches:
        waiting.before_step()
        loss = usual_loss(engine(batch["inputs"]), batch["targets"])
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
