"""An Update made of a `torch.optim.Optimizer`, ours by name or the user's own.

It sees parameters that are this rank's local tensors, so its states are split as they are. How a state looks
before the first step no optimizer says: a second one is made, over copies of the parameters, and takes a step
without gradients to show it (torch's distributed checkpoint does so too, with the only one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mlpipe._core.errors import TrainError
from mlpipe.train.optim.update import scaled_gradients
from mlpipe.train.shards import LocalShard

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class TorchOptimizer:
    """`build(parameters)` makes the optimizer, more than once. `name`: of it, for errors.

    Its state for a parameter may be tensors of the parameter's shape, which are split and saved like it, and
    numbers (or tensors without a dim), which are the same on every rank. Importing the classes of torch.optim
    is for whoever chose one: the first step imports dynamo, 3 CPU seconds.
    """

    def __init__(self, shards: Sequence[LocalShard], build: Build, name: str) -> None:
        self.shards = {shard.name: shard for shard in shards}
        self.name = name
        self._build = build
        self._parameters = {shard.name: nn.Parameter(shard.local) for shard in shards}
        # of a pipeline's stage that is frozen none, which torch's classes refuse
        self._stand_in = [] if shards else [nn.Parameter(torch.zeros(1))]
        self._optimizer = build([*self._parameters.values(), *self._stand_in])
        self._settings = _settings(self._optimizer)
        self._expected: list[LocalShard] = []  # before the first step: what it will make

    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`."""
        self._expected = []
        with torch.no_grad():
            gradients = scaled_gradients(self.shards.values(), scale)
        for shard, gradient in gradients:
            self._parameters[shard.name].grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> list[LocalShard]:
        """The tensors of the parameters' shapes. Raises TrainError (input) for what is neither that nor a
        number."""
        if not self._optimizer.state:
            if not self._expected:
                made = self._rehearsed(self._parameters)
                self._expected = [tensor for name in made for tensor in self._tensors(name, made[name])]
            return self._expected
        return [
            tensor
            for name, parameter in self._parameters.items()
            if parameter in self._optimizer.state
            for tensor in self._tensors(name, self._optimizer.state[parameter])
        ]

    def scalars(self) -> dict[str, Any]:
        """By parameter the numbers of its state; by group the settings that stepping has changed."""
        state = {
            name: {key: _number(value) for key, value in self._optimizer.state[parameter].items()}
            for name, parameter in self._parameters.items()
            if parameter in self._optimizer.state
        }
        changed = [
            {key: value for key, value in now.items() if value != before.get(key)}
            for before, now in zip(self._settings, _settings(self._optimizer), strict=True)
        ]
        return {"state": state, "groups": changed}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Makes the states that there were, with their numbers. Raises TrainError (input) if the optimizer
        keeps others now."""
        own = {name: numbers for name, numbers in scalars["state"].items() if name in self._parameters}
        made = self._rehearsed(own)
        self._expected = []
        self._optimizer.state.clear()
        for name, numbers in own.items():
            state = made.get(name, {})
            if state.keys() != numbers.keys():
                raise TrainError(
                    f"the checkpoint's optimizer kept {', '.join(numbers) or 'nothing'} of {name}, "
                    f"{self.name} keeps {', '.join(state) or 'nothing'}",
                    hint="resume with the optimizer and the arguments that wrote it, or start a new run",
                    kind="input",
                )
            for key, number in numbers.items():
                if number is not None:
                    state[key] = state[key].fill_(number) if isinstance(state[key], torch.Tensor) else number
            self._optimizer.state[self._parameters[name]] = state
        for group, changed in zip(self._optimizer.param_groups, scalars["groups"], strict=True):
            group.update(changed)

    def _rehearsed(self, names: Any) -> dict[str, dict[str, Any]]:
        """By parameter the state that a step makes for those of `names`."""
        copies = {name: nn.Parameter(own.detach().clone()) for name, own in self._parameters.items()}
        optimizer = self._build([*copies.values(), *self._stand_in])
        for name in names:
            copies[name].grad = torch.zeros_like(copies[name])
        optimizer.step()
        stepped = [name for name in names if copies[name] in optimizer.state]
        return {name: dict(optimizer.state[copies[name]]) for name in stepped}

    def _tensors(self, name: str, state: dict[str, Any]) -> list[LocalShard]:
        shard, tensors = self.shards[name], []
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shard.local.shape and value.dim():
                tensors.append(shard.state(key, value))
            elif _number(value) is None and value is not None:
                what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else "one"
                raise TrainError(
                    f"{self.name} keeps {what} as {key!r} of {name}, of which this rank has "
                    f"{list(shard.local.shape)}",
                    hint="a checkpoint can hold states that have the shape of their parameter, and numbers",
                    kind="input",
                )
        return tensors


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By group the numbers that are not the learning rate, which is set in every step."""
    return [
        {key: value for key, value in group.items() if key != "lr" and isinstance(value, bool | int | float)}
        for group in optimizer.param_groups
    ]


def _number(value: Any) -> bool | int | float | None:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        number: bool | int | float = value.item()
        return number
    return value if isinstance(value, bool | int | float) else None
