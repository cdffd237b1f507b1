"""What a model of one's own has to give, checked in the first passes and told by the rule that is broken.

Outputs of `transformers`, and losses that are one number, have one meaning here and are taken as they are:
`.logits` are the logits, and a loss without a count is the mean over the samples of its batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mlpipe._core.errors import TrainError

_LOSS_RULE = (
    "return (sum, count): the summed loss and the number of targets that it sums, both of one element; "
    "or one number, the mean over the batch"
)
_LOGITS_RULE = (
    "return a tensor of logits (..., vocabulary), or an object with `.logits`; for anything else define "
    "`loss(self, batch) -> (sum, count)`"
)


def check_call(model: nn.Module, batch: Mapping[str, Tensor], entry: str) -> None:
    """Whether the model can be called with what the data give. Raises TrainError (input)."""
    keys = ", ".join(batch)
    own = getattr(model, "loss", None)
    if own is not None:
        needed = _required(own.forward if isinstance(own, nn.Module) else own) if callable(own) else []
        if len(needed) != 1:
            needs = f" that needs {', '.join(needed)}" if needed else ""
            raise broken(
                entry,
                f"its model's `loss` is a {type(own).__name__}{needs}; the loop calls loss(batch)",
                "define `def loss(self, batch) -> (sum, count)`, and give other things another name",
            )
        return
    required = _required(model.forward)
    if "inputs" not in batch:
        takes = inspect.signature(model.forward).parameters
        if all(key in takes for key in batch) and all(name in batch for name in required):
            return  # as transformers' models are called: the loss is theirs
        raise broken(
            entry,
            f"the data give {keys}, its model's forward takes {', '.join(takes)}",
            "let the samples have the keys inputs and targets, or those of forward, which then returns an "
            "object with `.loss`; or define `loss(self, batch) -> (sum, count)`",
        )
    if len(required) > 1:
        raise broken(
            entry,
            f"its model's forward needs {', '.join(required)}; the loop passes inputs only",
            "take one tensor and return logits, or define `loss(self, batch) -> (sum, count)`",
        )
    if "targets" not in batch:
        raise broken(
            entry,
            f"the data give {keys}: there are no targets to compute a loss with",
            "let the samples have the keys inputs and targets, or define `loss(self, batch) -> (sum, count)`",
        )


def logits_of(output: Any, entry: str) -> Tensor:
    """What a forward gave for `inputs`."""
    logits = output if isinstance(output, Tensor) else _field(output, "logits")
    if not isinstance(logits, Tensor):
        raise broken(entry, f"its model's forward returns {_described(output)}, not logits", _LOGITS_RULE)
    return logits


def check_targets(logits: Tensor, targets: Tensor, entry: str) -> None:
    """One vector of logits to each target, and targets that are classes."""
    if logits.shape[:-1] != targets.shape or targets.is_floating_point():
        raise broken(
            entry,
            f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)} of {targets.dtype}",
            "the cross-entropy takes logits (..., vocabulary) and the class of each, integers (...); for "
            "another loss define `loss(self, batch) -> (sum, count)`",
        )


def sum_and_count(output: Any, batch: Mapping[str, Tensor], entry: str, of: str) -> tuple[Tensor, Any]:
    """Out of what `of` ("loss", "forward") gave. Of one number, the mean, the count is that of samples."""
    if isinstance(output, tuple | list) and len(output) == 2:
        total, count = output
        if _is_scalar(total) and (_is_scalar(count) or isinstance(count, int | float)):
            return total, count
    mean = output if isinstance(output, Tensor) else _field(output, "loss")
    if not _is_scalar(mean) or not mean.is_floating_point():
        raise broken(entry, f"its model's {of} returns {_described(output)}", _LOSS_RULE)
    num_samples = len(next(iter(batch.values())))
    return mean.float() * num_samples, num_samples


def broken(entry: str, message: str, hint: str) -> TrainError:
    """The error that says which rule of the contract `entry` breaks."""
    return TrainError(message, where=entry or None, hint=hint, kind="input")


def _required(function: Any) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
