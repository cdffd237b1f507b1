"""AdamW over the local tensors that a rank owns, its learning rate, and clipping by the global norm."""

from __future__ import annotations

import math

import torch

from mlpipe.plan.plan import OptimizerPlan
from mlpipe.train.parallel.parallel import Owned, Parallel


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
    """torch.optim.AdamW (fused) over `owned`. Matrices decay, vectors (norms, biases) do not."""

    def __init__(self, plan: OptimizerPlan, parallel: Parallel) -> None:
        self.plan = plan
        self.parallel = parallel
        self.owned = [
            item for item in parallel.owned if item.parameter is not None and item.parameter.requires_grad
        ]
        self._leaves = {item.name: item.local.requires_grad_() for item in self.owned}
        groups = [
            {
                "params": [self._leaves[item.name] for item in self.owned if len(item.shape) >= 2],
                "weight_decay": plan.weight_decay,
            },
            {
                "params": [self._leaves[item.name] for item in self.owned if len(item.shape) < 2],
                "weight_decay": 0.0,
            },
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=plan.lr, betas=(plan.betas[0], plan.betas[1]), eps=plan.eps, fused=True
        )

    def squared_norm(self) -> float:
        """Of this rank's part of the gradient, such that the sum over the world is the global one."""
        norms = torch._foreach_norm(self.parallel.gradients())
        return float(torch.stack(norms).double().square().sum()) / self.parallel.norm_copies

    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`, then no gradients any more."""
        for item in self.owned:
            self._leaves[item.name].grad = _local_gradient(item)
        gradients = [leaf.grad for leaf in self._leaves.values() if leaf.grad is not None]
        torch._foreach_mul_(gradients, scale)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for item in self.owned:
            self._leaves[item.name].grad = None
            if item.parameter is not None:
                item.parameter.grad = None
        self.parallel.after_step()

    def state(self) -> list[Owned]:
        """The moments in the boxes of their parameters, made if there was no step yet."""
        found = []
        for item in self.owned:
            state = self.adamw.state[self._leaves[item.name]]
            if not state:
                leaf = self._leaves[item.name]
                state["step"] = torch.zeros((), dtype=torch.float32, device=leaf.device)
                state["exp_avg"] = torch.zeros_like(leaf)
                state["exp_avg_sq"] = torch.zeros_like(leaf)
            for kind in ("exp_avg", "exp_avg_sq"):
                name = f"optim.{item.name}.{kind}"
                found.append(Owned(name, state[kind], item.shape, item.offset, item.num_copies, item.copy))
        return found

    def set_num_updates(self, num_updates: int) -> None:
        """AdamW's own step count, which corrects the moments' bias; the same for all parameters."""
        for state in self.adamw.state.values():
            state["step"].fill_(num_updates)


def _local_gradient(item: Owned) -> torch.Tensor | None:
    gradient = item.parameter.grad if item.parameter is not None else None
    if gradient is None:
        return None
    if hasattr(gradient, "to_local"):
        return gradient.to_local()
    if item.full_gradient:
        return gradient[item.offset[0] : item.offset[0] + item.local.shape[0]]
    return gradient
