"""The peer: a plain PyTorch loop on one device, a page and nothing else, over the same model object, so with
the same compiled blocks, batch, precision, clipping and fused AdamW.

At its best: the next batch is drawn while the device computes and comes out of pinned memory, gradients are
dropped, not zeroed, and nothing waits for the device within a step: the loss is read at the end of a block.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.tokens import DTYPES, open_folder


def usual_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


class RawLoop:
    def __init__(self, plan: TrainPlan, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        adam = plan.optimizer
        weights = [p for p in model.parameters() if p.requires_grad]  # with adapters, these alone
        self.weights = weights
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in weights if p.dim() >= 2], "weight_decay": adam.args["weight_decay"]},
                {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=adam.lr,
            betas=adam.args["betas"],
            eps=adam.args["eps"],
            fused=True,
        )
        self.clip = adam.grad_clip
        # compiled it is a few kernels; eager, its fp32 copies of the logits are what it costs
        self.loss = torch.compile(usual_loss, dynamic=False) if plan.compile == "block" else usual_loss
        tokens = open_folder(plan.data.tokens or "")
        file = tokens.path / tokens.splits["train"].file
        self.tokens = np.memmap(file, dtype=DTYPES[tokens.dtype], mode="r")
        self.draw = np.random.default_rng(1)
        self.seq_len, self.micro_batch = plan.model.seq_len, plan.micro_batch
        self.accumulation = plan.accumulation
        self.last = torch.zeros((), device=device)
        self.batch = self.fetch()

    def fetch(self) -> tuple[Tensor, Tensor]:
        starts = self.draw.integers(0, len(self.tokens) - self.seq_len, self.micro_batch)
        window = np.stack([self.tokens[i : i + self.seq_len + 1].astype(np.int64) for i in starts])
        both = torch.from_numpy(window)
        if self.device.type == "cuda":
            both = both.pin_memory().to(self.device, non_blocking=True)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def step(self) -> None:
        for _ in range(self.accumulation):
            inputs, targets = self.batch
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.loss(self.model(inputs), targets)
            self.batch = self.fetch()
            (loss / self.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.last = loss.detach()
