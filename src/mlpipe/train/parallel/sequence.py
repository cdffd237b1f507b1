"""A user's own module as a sequence of children, which a pipeline is cut between.

What nobody can see from outside a forward is what goes on between two children. So the contract is that
nothing does: x = child(x), child after child in the order in which they are defined, a ModuleList or an
nn.Sequential standing for its members. It is looked at once, before anything is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mlpipe.train.contract import broken
from mlpipe.train.model import Batch
from mlpipe.train.parallel.stages_by_plan import base_of, children_by_plan, of_all_stages

_HINT = (
    "let the forward be x = child(x) for each of its children in their order, with all else, like positions "
    "or skipped connections, inside of one child; or make pp 1"
)


def children_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """By name, in order; lists taken apart."""
    for name, child in model.named_children():
        if type(child) in (nn.ModuleList, nn.Sequential):
            yield from children_of(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def sequence_of(model: nn.Module) -> dict[str, nn.Module]:
    """The children that a pipeline may be cut between, by name, as they are or as the class's plan says."""
    base = base_of(model)
    return dict(children_of(model) if base is None else children_by_plan(model, base))


def stages_of(model: nn.Module, cut: tuple[str, ...], entry: str) -> list[dict[str, nn.Module]]:
    """Children by name, by stage; each of `cut` begins one. Raises TrainError (input) for names that are none
    of a child, or not in their order, and for what lies on no stage or on two."""
    stages: list[dict[str, nn.Module]] = [{}]
    base, children = base_of(model), sequence_of(model)
    for name, child in children.items():
        if len(stages) <= len(cut) and name == cut[len(stages) - 1]:
            stages.append({})
        stages[-1][name] = child
    if len(stages) <= len(cut):
        name = cut[len(stages) - 1]
        what = "comes too late in the list" if name in children else "is no child of the model"
        raise broken(entry, f"pipeline.cut: {name!r} {what}", f"its children are {', '.join(children)}")
    if not stages[0]:
        raise broken(entry, f"pipeline.cut: before {cut[0]!r} there is nothing", "begin with a later child")
    inside = [{id(one) for child in stage.values() for one in _tensors(child)} for stage in stages]
    everywhere = {id(one) for child in of_all_stages(model).values() for one in _tensors(child)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) in everywhere:
            continue
        number = sum(id(tensor) in those for those in inside)
        if number != 1:
            what = "belongs to none of its children" if number == 0 else "is shared by children on two stages"
            hint = _HINT if base is None else "write tie_word_embeddings: false into its config, or make pp 1"
            raise broken(entry, f"{name} {what}, so no stage can have it", hint)
    return stages


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@torch.no_grad()
def check_sequence(model: nn.Module, batch: Batch, entry: str) -> None:
    """Passes a sample through the whole model, which may be on the meta device. Raises TrainError (input)
    where a child is given anything but what the one before gave. Of a class that brings a plan its plan says
    it."""
    if hasattr(model, "loss") or "inputs" not in batch:
        raise broken(
            entry,
            "a model that computes its own loss cannot be cut into stages",
            "let the forward take `inputs` and return logits, and the data have inputs and targets",
        )
    if base_of(model) is not None:
        return
    children = list(children_of(model))
    device = next(model.parameters()).device
    given: list[tuple[str, _Seen]] = []  # what a child was given, in the order of calls
    gave: list[_Seen] = []

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given.append((name, _seen(args[0] if len(args) == 1 and not kwargs else (args, kwargs))))

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> None:
        gave.append(_seen(output))

    hooks = [child.register_forward_pre_hook(before(name), with_kwargs=True) for name, child in children]
    hooks += [child.register_forward_hook(after) for _, child in children]
    inputs = batch["inputs"][:1].to(device)
    first = _seen(inputs)
    try:
        output = _seen(model(inputs))
    except Exception as error:
        raise broken(
            entry,
            f"its forward failed on one sample, to see in which order children are called: "
            f"{type(error).__name__}: {error}",
            "let it run on the meta device, or make pp 1",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    expected = [name for name, _ in children]
    if (called := [name for name, _ in given]) != expected:
        odd = next((a for a, b in zip(called, expected, strict=False) if a != b), "")
        raise broken(
            entry,
            f"its forward calls {odd or 'only ' + ', '.join(called)}, not its children one after the other: "
            f"{', '.join(expected)}",
            _HINT,
        )
    for (name, got), wanted in zip(given, [first, *gave], strict=False):
        if not _same(got, wanted) or not isinstance(got[0], Tensor):
            raise broken(entry, f"{name} is given something else than what the child before it gives", _HINT)
    if not _same(output, gave[-1]):
        raise broken(entry, f"its forward does not return what {expected[-1]} gives", _HINT)


_Seen = tuple[Any, int]  # a value, and how often it had been written to, if it is a tensor


def _seen(value: Any) -> _Seen:
    return value, value._version if isinstance(value, Tensor) else 0


def _same(one: _Seen, other: _Seen) -> bool:
    """The same object, which nobody wrote to in between."""
    return one[0] is other[0] and one[1] == other[1]
