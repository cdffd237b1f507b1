"""The peer: what a competent engineer writes without mlpipe, DDP or FSDP2, 60 lines and nothing else."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from mlpipe.plan.plan import TrainPlan
from mlpipe.train.models.llama import build_model
from mlpipe.train.tokens import TokenDataset, open_folder


class PlainScript:
    """The same model code, data, batch, optimizer, clipping and precision as `plan` says; no records."""

    def __init__(self, plan: TrainPlan, strategy: str) -> None:
        torch.manual_seed(plan.seed)
        self.model = build_model(**plan.model.build.args)
        self.model.init_weights()
        self.bf16 = plan.precision == "bf16"
        if strategy == "ddp":
            self.module = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        else:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if self.bf16 else None,
                reduce_dtype=torch.float32 if self.bf16 else None,
            )
            for layer in self.model.layers:
                fully_shard(layer, mp_policy=policy)
            self.module = fully_shard(self.model)
        adam = plan.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=adam.lr,
            betas=adam.betas[:2],
            weight_decay=adam.weight_decay,
            fused=True,
        )
        self.clip = adam.grad_clip
        self.data = TokenDataset(open_folder(plan.data.tokens), "train", plan.model.seq_len)
        self.batch = plan.micro_batch
        self.draw = np.random.default_rng(dist.get_rank())

    def step(self) -> float:
        window = torch.from_numpy(self.data.windows(self.draw.integers(0, len(self.data), self.batch)))
        inputs, targets = window[:, :-1], window[:, 1:]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.module(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()
