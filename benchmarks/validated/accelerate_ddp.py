"""Accelerate under torchrun."""

import sys
from importlib import import_module

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

work, folder = import_module(f"benchmarks.validated.{sys.argv[1]}"), sys.argv[2]
steps, every = int(sys.argv[3]), int(sys.argv[4])
accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
accelerator.init_trackers("validated")
model = work.build()
optimizer = torch.optim.AdamW(model.parameters(), lr=work.LR, fused=True)
share = work.BATCH // accelerator.num_processes
loader = DataLoader(work.samples("train"), batch_size=share, shuffle=True)
held_out = DataLoader(work.samples("validation"), batch_size=share)
model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)


def validate():
    losses, right = [], []
    model.eval()
    with torch.no_grad():
        for batch in held_out:
            logits, targets = model(batch["inputs"]).flatten(0, -2), batch["targets"].flatten()
            found = F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
            loss, hits = accelerator.gather_for_metrics(found)
            losses.append(loss)
            right.append(hits)
    model.train()
    return {"val_loss": torch.cat(losses).mean().item(), "accuracy": torch.cat(right).float().mean().item()}


step = 0
while step < steps:
    for batch in loader:
        step += 1
        logits = model(batch["inputs"]).flatten(0, -2)
        loss = F.cross_entropy(logits, batch["targets"].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
        if step % every == 0:
            accelerator.log(validate(), step=step)
            accelerator.save_state(f"{folder}/step-{step}")
        if step == steps:
            break
accelerator.end_training()
