"""A training on one device in this process, for the ring `gpu`: as `train/prepare.py` makes it, without a
process group, and figures that a reader of the output finds.

B batch · T tokens
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import plans
from torch import Tensor

from mlpipe._core.presets import LLAMA, MOE, LlamaConfig, MoeConfig
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.train.loss_scale import LossScale
from mlpipe.train.model import build_model
from mlpipe.train.optim.clipping import clip_factor, squared_norm
from mlpipe.train.optim.make import make_update
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.seeding import seed_step
from mlpipe.train.shards import clear_gradients
from mlpipe.train.world import World

# read at the first product of the process; as plan/launch.py sets it where a plan is deterministic
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device: the ring gpu needs an NVIDIA GPU and a torch that sees it",
    ),
    pytest.mark.timeout(170),
]
Batch = dict[str, Tensor]


def figure(name: str, value: float | str, unit: str = "") -> None:
    """A line of the output."""
    shown = value if isinstance(value, str) else f"{value:.6g}"
    print(f"FIGURE {name} {shown} {unit}".rstrip(), flush=True)


def plan_of(config: LlamaConfig, seq_len: int = 256, **changes: Any) -> TrainPlan:
    """Of one rank and AdamW; `changes` are fields of TrainPlan."""
    entry = Entry(MOE if isinstance(config, MoeConfig) else LLAMA, asdict(config))
    model = ModelPlan(build=entry, preset="test", seq_len=seq_len, blocks=())
    with tempfile.TemporaryDirectory() as folder:
        tokens = plans.write_tokens(Path(folder), num_tokens=100)
        plan = plans.train_plan(
            folder, tokens, strategy="single", world_size=1, model=model, deterministic=False, **changes
        )
    return plan.work.training


def batch_of(vocab_size: int, size: int, seq_len: int, number: int = 0) -> Batch:
    """A noisy successor function, which a model learns; the same for a number."""
    draw = torch.Generator().manual_seed(number)
    tokens_BT = torch.zeros(size, seq_len + 1, dtype=torch.int64)
    tokens_BT[:, 0] = torch.randint(vocab_size, (size,), generator=draw)
    noise_BT = torch.randint(vocab_size, (size, seq_len), generator=draw)
    is_noise_BT = torch.rand(size, seq_len, generator=draw) < 0.2
    for t in range(seq_len):
        following = (tokens_BT[:, t] * 5 + 17) % vocab_size
        tokens_BT[:, t + 1] = torch.where(is_noise_BT[:, t], noise_BT[:, t], following)
    return {"inputs": tokens_BT[:, :-1].contiguous(), "targets": tokens_BT[:, 1:].contiguous()}


class Training:
    """`like`: the training whose weights this one begins with, else the plan's seed gives them."""

    def __init__(self, plan: TrainPlan, device: torch.device, like: Training | None = None) -> None:
        self.plan, self.device = plan, device
        built = build_model(plan.model, seed=plan.seed, device_type=device.type, precision=plan.precision)
        self.model = parallelize(built, World(Mesh(), 0, device), plan)
        if like is not None:
            built.model.load_state_dict(like.model.built.model.state_dict())
        on_host = plan.offload in ("optimizer", "all")
        self.update = make_update(plan.optimizer, self.model.shards, plan.ema, None, on_host)
        self.update.state()
        self.num_steps = 0
        self.loss_scale: LossScale | None = None

    def forward_backward(self, batch: Batch) -> tuple[float, int]:
        """Loss sum and targets; gradients are of the sum."""
        model = self.model
        model.before_passes()
        model.before_forward(True)
        loss, count = model.module({key: tensor.to(self.device) for key, tensor in batch.items()})
        loss.backward()
        model.after_backward()
        return float(loss.detach()), int(count)

    def step(self, batch: Batch, lr: float = 1e-3) -> float:
        """One update, as `train/loop.py` makes it; the mean loss before it."""
        self.num_steps += 1
        seed_step(self.plan.seed, self.num_steps, 0)
        loss, count = self.forward_backward(batch)
        squared = float(squared_norm(self.model.shards))
        scale = 1 / count if self.loss_scale is None else 1 / count / self.loss_scale.factor
        skipped = not math.isfinite(squared)
        if skipped:
            assert self.loss_scale is not None, f"step {self.num_steps}: a gradient is not finite"
        else:
            limit = self.plan.optimizer.grad_clip
            self.update.step(lr=lr, scale=scale * clip_factor(squared**0.5 * scale, limit))
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=skipped)
        clear_gradients(self.model.shards)
        self.model.after_step()
        self.model.step_metrics()
        return loss / count

    def gradients(self) -> dict[str, Tensor]:
        """On the host, in fp32, by name."""
        named = self.model.built.model.named_parameters()
        return {name: _copied(own.grad) for name, own in named if own.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        """Likewise."""
        return {name: _copied(own) for name, own in self.model.built.model.named_parameters()}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Norm of the difference of all, over that of `wanted`."""
    assert found.keys() == wanted.keys()
    apart = sum((found[name].double() - wanted[name].double()).square().sum() for name in wanted)
    whole = sum(own.double().square().sum() for own in wanted.values())
    return float(torch.as_tensor(apart / whole).sqrt())


def relative(found: Tensor, wanted: Tensor) -> float:
    """Of one."""
    return distance({"": found.detach()}, {"": wanted.detach()})


def milliseconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """The median on the device; other tests may share it."""
    for _ in range(3):
        work()
    taken: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return sorted(taken)[len(taken) // 2]


def forget_memory() -> None:
    """Before a peak is measured: of what earlier tests left nothing is reserved."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
