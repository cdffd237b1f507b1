"""Lightning Fabric under torchrun.

tuned: bf16-mixed, gradients as views of DDP's buckets, and torch.compile before `setup`, as its page says
(https://lightning.ai/docs/fabric/stable/advanced/compile.html); `setup` then compiles what DDP has wrapped.
"""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.peers.work import read_work, turns, usual_loss


def main() -> None:
    work = read_work()
    strategy = "ddp"
    if work.settings != "default":
        strategy = DDPStrategy(gradient_as_bucket_view=True, broadcast_buffers=False)
    fabric = Fabric(
        accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed" if work.bf16 else "32-true"
    )
    fabric.launch()
    model = work.build()
    optimizer = work.adamw(model.parameters())
    if work.compiled:
        model = torch.compile(model)
    model, optimizer = fabric.setup(model, optimizer)
    batches = fabric.setup_dataloaders(DataLoader(work.dataset(), batch_size=work.batch))
    waiting = turns(work, fabric.global_rank, fabric.world_size, model)
    for batch in batches:
        waiting.before_step()
        loss = usual_loss(model(batch["inputs"]), batch["targets"])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=work.grad_clip)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
