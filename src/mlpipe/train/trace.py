"""`python -m mlpipe.train.trace MODEL OUT`: a user's own model in numbers, without its memory or its work.

The model runs on torch's fake tensors, which have shapes, dtypes and a device (CPU, so that autocast and
attention choose what they choose in training) but no bytes. What its operators would read, write, multiply
and keep is counted. MODEL is JSON: {"model": ModelPlan, "data": DataPlan}; OUT gets what
`plan/shapes/traced.py` reads.
"""

from __future__ import annotations

import json
import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mlpipe._core.errors import MlpipeError, TrainError
from mlpipe._core.serial import from_plain, to_json
from mlpipe.plan.plan import CHECKPOINTING, DataPlan, ModelPlan
from mlpipe.plan.shapes.shape import ParameterCounts
from mlpipe.plan.shapes.traced import Ops, Traced, TracedPass
from mlpipe.train import loss as losses
from mlpipe.train.datasets import open_dataset
from mlpipe.train.microbatch import collate
from mlpipe.train.model import Batch, LossModule, find_blocks, load_entry
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations

# Samples in the two passes that are compared, so that what does not grow with them falls out.
_FEW, _MANY = 2, 4
_MOST_CHUNKS = 32  # of the loss, whose loop would take most of the time where the vocabulary is large


class _Meter(TorchDispatchMode):
    """Bytes of all tensors made under it that are alive, at most; and the work by phase."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.alive = self.most = 0
        self.phase = "forward"
        self.counted: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._remember(tensor.untyped_storage())
        if not func.is_view:
            self._count(func, args, kwargs or {}, given, made, out)
        return out

    def _remember(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.alive += num_bytes
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.alive -= num_bytes

    def _count(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        out: Any,
    ) -> None:
        counted, name = self.counted[self.phase], func.overloadpacket.__name__
        if name.startswith("empty") or name == "detach":
            return
        counted["num_kernels"] += 1
        if name.startswith("_scaled_dot_product"):
            turned = name.endswith("_backward")
            q, k = (args[1], args[2]) if turned else (args[0], args[1])
            flops = 4.0 * math.prod(q.shape) * k.shape[-2]
            causal = any(flag is True for flag in (*args, *kwargs.values()))
            counted["attention"] += flops / (2 if causal else 1) * (2.5 if turned else 1.0)
            counted["convention"] += flops * (2.0 if turned else 1.0)
        elif func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
            counted["matmul"] += flops
            counted["convention"] += flops
            counted["num_matmuls"] += 1
        else:
            counted["bytes"] += sum(tensor.nbytes for tensor in (*given, *made))


def trace(model: ModelPlan, data: DataPlan) -> Traced:
    """Raises TrainError (input) when the model or its data cannot be built, or the model does what tensors
    without values cannot, such as `.item()`."""
    chunk = losses._CHUNK_ELEMENTS_CPU
    try:
        with FakeTensorMode():
            plain = _build(model)
            parameters = _parameters(model, plain)
            if data.tokens is not None and not hasattr(plain, "loss"):
                logits = plain(_batch(model, data, _MANY)["inputs"])
                losses._CHUNK_ELEMENTS_CPU = max(chunk, logits.numel() // _MOST_CHUNKS)
            passes = {}
            for precision in ("fp32", "bf16"):
                for mode in CHECKPOINTING:
                    few, many = (_once(model, data, precision, mode, n) for n in (_FEW, _MANY))
                    passes[f"{precision} {mode}"] = TracedPass(
                        sample_bytes=max(0, (many.most - few.most) // (_MANY - _FEW)),
                        forward=_ops(many.counted["forward"]),
                        backward=_ops(many.counted["backward"]),
                    )
                    if (precision, mode) == ("fp32", "none"):
                        flops = sum(counted["convention"] for counted in many.counted.values()) / _MANY
    except MlpipeError:
        raise
    except Exception as error:
        raise TrainError(
            f"cannot be traced: {type(error).__name__}: {error}",
            where=model.build.entry,
            hint="a forward that reads values (.item(), if tensor:) has no size before it runs; "
            "plan without --trace",
            kind="input",
        ) from error
    finally:
        losses._CHUNK_ELEMENTS_CPU = chunk
    words = f"traced with torch {torch.__version__}"
    return Traced(parameters, flops / model.seq_len, passes, words)


def _build(model: ModelPlan) -> torch.nn.Module:
    built = load_entry(model.build)(**model.build.args)
    if not isinstance(built, torch.nn.Module):
        raise TrainError(
            f"returned {type(built).__name__}, not an nn.Module",
            where=model.build.entry,
            hint="return the plain, unwrapped torch.nn.Module",
            kind="input",
        )
    return built


def _parameters(model: ModelPlan, plain: torch.nn.Module) -> ParameterCounts:
    blocks = find_blocks(plain, model.blocks, model.build.entry)
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    total = sum(parameter.numel() for parameter in plain.parameters())
    inside = {id(parameter): parameter for block in blocks for parameter in block.parameters()}
    return ParameterCounts(
        total,
        max(sizes, default=0),
        total - sum(sizes),
        len(blocks),
        _counted(plain.parameters()),
        _counted(parameter for parameter in inside.values() if parameter.dim() == 2),
    )


def _counted(parameters: Iterable[torch.nn.Parameter]) -> tuple[tuple[int, int, int], ...]:
    """Rows, values in a row, and how many there are of each shape."""
    shapes = Counter(
        (parameter.shape[0], parameter.numel() // parameter.shape[0]) if parameter.numel() else (0, 0)
        for parameter in (p if p.dim() else p.view(1) for p in parameters)
    )
    return tuple((rows, width, many) for (rows, width), many in shapes.items())


def _once(model: ModelPlan, data: DataPlan, precision: str, mode: Any, size: int) -> _Meter:
    """Forward and backward over `size` samples, with a new model: checkpointing changes its blocks."""
    plain = _build(model)
    if mode != "none":
        checkpoint_activations(find_blocks(plain, model.blocks, model.build.entry), mode)
    module = LossModule(plain, "cpu", bf16=precision == "bf16", entry=model.build.entry)
    for parameter in module.parameters():
        if parameter.requires_grad:  # a gradient is not counted here: it goes as it comes
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    batch = _batch(model, data, size)
    meter = _Meter([*module.parameters(), *module.buffers(), *batch.values()])
    with meter:
        loss, _ = module(batch)
        meter.phase = "backward"
        loss.backward()
    return meter


def _batch(model: ModelPlan, data: DataPlan, size: int) -> Batch:
    if data.tokens is not None:
        ids = torch.zeros((size, model.seq_len), dtype=torch.int64)
        return {"inputs": ids, "targets": torch.zeros_like(ids)}
    with unset_fake_temporarily():
        dataset = open_dataset(data, split="train", seq_len=model.seq_len)
        real = collate(dataset, np.zeros(size, dtype=np.int64))
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in real.items()}


def _ops(counted: Counter[str]) -> Ops:
    return Ops(
        matmul_flops=counted["matmul"] / _MANY,
        num_matmuls=counted["num_matmuls"],
        attention_flops=counted["attention"] / _MANY,
        other_bytes=counted["bytes"] / _MANY,
        num_kernels=counted["num_kernels"],
    )


def main() -> int:
    asked = json.loads(Path(sys.argv[1]).read_bytes())
    try:
        shape = trace(from_plain(ModelPlan, asked["model"]), from_plain(DataPlan, asked["data"]))
    except MlpipeError as error:
        Path(sys.argv[2]).write_text(
            json.dumps({"message": error.message, "where": error.where, "hint": error.hint})
        )
        return 1
    Path(sys.argv[2]).write_text(to_json(shape))
    return 0


if __name__ == "__main__":
    sys.exit(main())
