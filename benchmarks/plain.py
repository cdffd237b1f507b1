"""The peer: what a competent engineer writes without mlpipe, DDP or FSDP2, a page and nothing else.

The same model code, data file, batch, optimizer, clipping and precision as the plan says, and one line of
log a step. Written for speed where that costs nothing: gradients are views of the buckets, constant buffers
are not sent around, AdamW is fused, FSDP2's root keeps its parameters until the backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.tokens import open_folder
from mlpipe.train.models.llama import build_model

Loss = Callable[[Tensor, Tensor], Tensor]


def usual_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


class PlainScript:
    def __init__(self, plan: TrainPlan, log: Path, loss: Loss = usual_loss) -> None:
        torch.manual_seed(plan.seed)
        self.model = build_model(**plan.model.build.args)
        self.model.init_weights()
        self.bf16 = plan.precision == "bf16"
        if plan.strategy == "ddp":
            self.module = DistributedDataParallel(
                self.model, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        else:
            # bf16 as mlpipe means it, so that both do the same arithmetic: blocks in bf16, the residual
            # stream, embedding and head in fp32 under autocast
            low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            exact = MixedPrecisionPolicy(cast_forward_inputs=False)
            for layer in self.model.layers:
                fully_shard(layer, mp_policy=low if self.bf16 else exact)
            self.module = fully_shard(self.model, mp_policy=exact)
        self.loss = loss
        adam = plan.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=adam.lr,
            **adam.args,
            fused=True,
        )
        self.clip = adam.grad_clip
        tokens = open_folder(plan.data.tokens or "")
        file = tokens.path / tokens.splits["train"].file
        self.tokens = np.memmap(file, dtype=tokens.dtype, mode="r")
        self.seq_len, self.batch = plan.model.seq_len, plan.micro_batch
        self.draw = np.random.default_rng(dist.get_rank())
        self.log = log.open("w", buffering=1)
        self.number = 0

    def step(self) -> float:
        began = time.perf_counter()
        starts = self.draw.integers(0, len(self.tokens) - self.seq_len, self.batch)
        window = np.stack([self.tokens[i : i + self.seq_len + 1].astype(np.int64) for i in starts])
        inputs, targets = torch.from_numpy(window[:, :-1]), torch.from_numpy(window[:, 1:])
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.module(inputs)
            loss = self.loss(logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        found = loss.item()
        if dist.get_rank() == 0:
            self.log.write(f"step {self.number} loss {found:.4f} {time.perf_counter() - began:.3f} s\n")
        return found
