"""Lightning's Trainer under torchrun."""

import sys
from importlib import import_module

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

work, folder = import_module(f"benchmarks.validated.{sys.argv[1]}"), sys.argv[2]
steps, every = int(sys.argv[3]), int(sys.argv[4])


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = work.build()

    def training_step(self, batch):
        logits = self.model(batch["inputs"]).flatten(0, -2)
        loss = F.cross_entropy(logits, batch["targets"].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        logits, targets = self.model(batch["inputs"]).flatten(0, -2), batch["targets"].flatten()
        self.log("val_loss", F.cross_entropy(logits, targets), sync_dist=True)
        self.log("accuracy", (logits.argmax(-1) == targets).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=work.LR, fused=True)


trainer = L.Trainer(
    accelerator="cpu", strategy="ddp", devices=2, max_steps=steps, val_check_interval=every,
    check_val_every_n_epoch=None, gradient_clip_val=1.0, log_every_n_steps=1, num_sanity_val_steps=0,
    logger=TensorBoardLogger(folder), enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint(folder, monitor="accuracy", mode="max", save_top_k=-1)],
)  # fmt: skip
share = work.BATCH // 2
train = DataLoader(work.samples("train"), batch_size=share, shuffle=True)
trainer.fit(Module(), train, DataLoader(work.samples("validation"), batch_size=share))
