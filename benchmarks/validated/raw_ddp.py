"""Plain PyTorch under torchrun."""

import os
import sys
from importlib import import_module

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

work, folder = import_module(f"benchmarks.validated.{sys.argv[1]}"), sys.argv[2]
steps, every = int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(work.build())
optimizer = torch.optim.AdamW(model.parameters(), lr=work.LR, fused=True)
train = work.samples("train")
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=work.BATCH // world, sampler=sampler)
held_out = DataLoader(work.samples("validation")[rank::world], batch_size=work.BATCH // world)
board = SummaryWriter(folder) if rank == 0 else None


def validate():
    sums = torch.zeros(3)
    model.eval()
    with torch.no_grad():
        for batch in held_out:
            logits, targets = model(batch["inputs"]).flatten(0, -2), batch["targets"].flatten()
            right = (logits.argmax(-1) == targets).sum()
            loss = F.cross_entropy(logits, targets, reduction="sum")
            sums += torch.stack([loss, right.float(), torch.tensor(float(len(targets)))])
    model.train()
    dist.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()


step = 0
for epoch in range(10**6):
    sampler.set_epoch(epoch)
    for batch in loader:
        step += 1
        logits = model(batch["inputs"]).flatten(0, -2)
        loss = F.cross_entropy(logits, batch["targets"].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if board is not None:
            board.add_scalar("loss", loss.item(), step)
        if step % every == 0:
            val_loss, accuracy = validate()
            if board is not None:
                board.add_scalar("val_loss", val_loss, step)
                board.add_scalar("accuracy", accuracy, step)
                states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**states, "step": step}, f"{folder}/step-{step}.pt")
        if step == steps:
            if board is not None:
                board.close()
            dist.barrier()
            dist.destroy_process_group()
            os._exit(0)  # gloo's threads abort an interpreter that ends by itself once in about fifty
