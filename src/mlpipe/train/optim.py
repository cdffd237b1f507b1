"""AdamW over the local tensors that a rank owns, its learning rate, and clipping by the global norm."""

from __future__ import annotations

import math

import torch

from mlpipe.plan.plan import OptimizerPlan
from mlpipe.train.parallel.parallel import ParallelizedModel
from mlpipe.train.shards import LocalShard


def learning_rate(plan: OptimizerPlan, step: int, num_steps: int) -> float:
    """Of update number `step`, counted from 1.

    Linear warm-up to `lr`, then: constant; cosine (Loshchilov & Hutter 2017) or linear down to
    `min_lr_ratio * lr` at `num_steps`; wsd (Hu et al., MiniCPM, 2024): constant, then linear decay over
    the last `decay_steps`.
    """
    if step <= plan.warmup_steps:
        return plan.lr * step / plan.warmup_steps
    floor = plan.min_lr_ratio
    if plan.schedule == "constant":
        return plan.lr
    start = num_steps - plan.decay_steps if plan.schedule == "wsd" else plan.warmup_steps
    progress = min(1.0, max(0.0, (step - start) / max(1, num_steps - start)))
    if plan.schedule == "cosine":
        return plan.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    return plan.lr * (1 - (1 - floor) * progress)


class Optimizer:
    """AdamW over `owned`, by the kernel of `torch.optim.AdamW(fused=True)`, whose class would import dynamo,
    3 CPU seconds. Matrices decay, vectors (norms, biases) do not. One count of updates serves the bias
    correction of all parameters, so that one which had no gradient in some step resumes as it would go on."""

    def __init__(self, plan: OptimizerPlan, parallel: ParallelizedModel) -> None:
        self.plan = plan
        self.parallel = parallel
        self.owned = [
            item for item in parallel.owned if item.parameter is not None and item.parameter.requires_grad
        ]
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        device = self.owned[0].local.device if self.owned else None
        self._num_updates = torch.zeros((), dtype=torch.float32, device=device)

    def squared_norm(self) -> torch.Tensor:
        """Of this rank's part of the gradient, such that the sum over the world is the global one; an fp64
        scalar on the device."""
        norms = torch._foreach_norm(self.parallel.gradients())
        return torch.stack(norms).double().square().sum() / self.parallel.norm_copies

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`, then no gradients any more."""
        found = [(item, _local_gradient(item)) for item in self.owned]
        updates = [(item, gradient) for item, gradient in found if gradient is not None]
        if updates:
            torch._foreach_mul_([gradient for _, gradient in updates], scale)
        self._num_updates += 1
        groups: dict[tuple[bool, torch.dtype], list[tuple[LocalShard, torch.Tensor]]] = {}
        for item, gradient in updates:
            groups.setdefault((len(item.shape) >= 2, item.local.dtype), []).append((item, gradient))
        for (decays, _), group in groups.items():
            moments = [self._moments_of(item) for item, _ in group]
            torch._fused_adamw_(
                [item.local for item, _ in group],
                [gradient for _, gradient in group],
                [mean for mean, _ in moments],
                [square for _, square in moments],
                [],
                [self._num_updates] * len(group),
                lr=lr,
                beta1=self.plan.betas[0],
                beta2=self.plan.betas[1],
                weight_decay=self.plan.weight_decay if decays else 0.0,
                eps=self.plan.eps,
                amsgrad=False,
                maximize=False,
            )
        for item in self.owned:
            if item.parameter is not None:
                item.parameter.grad = None
        self.parallel.after_step()

    def state(self) -> list[LocalShard]:
        """The moments sharded as their parameters, made if there was no step yet."""
        found = []
        for item in self.owned:
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), self._moments_of(item), strict=True):
                name = f"optim.{item.name}.{kind}"
                found.append(
                    LocalShard(name, moment, item.shape, item.offset, item.replica_id, item.num_replicas)
                )
        return found

    def set_num_updates(self, num_updates: int) -> None:
        """AdamW's own step count, which corrects the moments' bias."""
        self._num_updates.fill_(num_updates)

    def _moments_of(self, item: LocalShard) -> tuple[torch.Tensor, torch.Tensor]:
        if item.name not in self._moments:
            self._moments[item.name] = (torch.zeros_like(item.local), torch.zeros_like(item.local))
        return self._moments[item.name]


def _local_gradient(item: LocalShard) -> torch.Tensor | None:
    gradient = item.parameter.grad if item.parameter is not None else None
    if gradient is None:
        return None
    if hasattr(gradient, "to_local"):
        return gradient.to_local()
    if item.full_gradient:
        return gradient[item.offset[0] : item.offset[0] + item.local.shape[0]]
    return gradient
