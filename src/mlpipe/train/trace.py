"""`python -m mlpipe.train.trace MODEL OUT`: a user's own model in numbers, without its memory or its work.

The model runs on torch's fake tensors, which have shapes, dtypes and a device (CPU, so that autocast and
attention choose what they choose in training) but no bytes; one that cannot, as it reads values of a mask,
runs on real ones. What its operators would read, write, multiply and keep is counted. MODEL is JSON:
{"model": ModelPlan, "data": DataPlan, "pipeline": PipelinePlan or null, "num_ranks": 2, "tp": 1}; OUT gets
what `plan/shapes/traced.py` reads.
"""

from __future__ import annotations

import json
import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mlpipe._core.errors import MlpipeError, TrainError
from mlpipe._core.pipelines import stages_per_rank
from mlpipe._core.serial import from_plain, to_json
from mlpipe.plan.data import DataPlan
from mlpipe.plan.mesh import PipelinePlan
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.pipelining import order
from mlpipe.plan.settings import CHECKPOINTING, Precision
from mlpipe.plan.shapes.shape import ParameterCounts
from mlpipe.plan.shapes.traced import Child, Ops, Traced, TracedPass
from mlpipe.train import loss as losses
from mlpipe.train.contract import logits_of
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.microbatch import collate
from mlpipe.train.model import Batch, LossModule, find_blocks, load_entry
from mlpipe.train.models.llama import Part
from mlpipe.train.parallel import even_stages
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations
from mlpipe.train.parallel.pipeline import StagedLossModule
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.parallel.sequence import check_sequence, stages_of
from mlpipe.train.schedules.deferred_weights import DeferredWeights

# Samples in the two passes that are compared, so that what does not grow with them falls out.
_FEW, _MANY = 2, 4
_MOST_PARAMETERS = 2**28  # of a model that is run, since it reads values
_MOST_CHUNKS = 32  # of the loss, whose loop would take most of the time where the vocabulary is large


class _Stages(NamedTuple):
    """Of a pipeline cut like that, those of one rank."""

    cut: tuple[str, ...]
    own: Sequence[int]
    puts_off: bool  # the gradients of weights
    tp: int  # ranks that share its products, of which this is the first


class _First(RankGroup):
    """Of ranks that are not there."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Meter(TorchDispatchMode):
    """Bytes of all tensors made under it that are alive, at most and after the forward pass; and the work by
    phase."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.alive = self.most = self.kept = self.put_off = 0
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

    def turn(self) -> None:
        """From forward to backward."""
        self.kept, self.phase = self.alive, "backward"

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


def trace(
    model: ModelPlan,
    data: DataPlan,
    pipeline: PipelinePlan | None = None,
    num_ranks: int = 1,
    tp: int = 1,
) -> Traced:
    """`pipeline`: that of so many ranks, each of which may be `tp` of them, and whose stages begin where it
    says, or where the trainer cuts. Raises TrainError (input) when the model or its data cannot be built, or
    cut, or the model does what tensors without values cannot, and is too large to be run."""
    try:
        try:
            with FakeTensorMode():
                return _traced(model, data, pipeline, num_ranks, tp)
        except MlpipeError:
            raise
        except Exception:  # it reads values, or copies tensors, as nn.TransformerEncoder its layer
            if _num_parameters(model) > _MOST_PARAMETERS:
                raise
            return _traced(model, data, pipeline, num_ranks, tp)
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


def _num_parameters(model: ModelPlan) -> int:
    with FakeTensorMode():
        return sum(parameter.numel() for parameter in _build(model).parameters())


def _traced(
    model: ModelPlan, data: DataPlan, pipeline: PipelinePlan | None, num_ranks: int, tp: int
) -> Traced:
    chunk = losses._CHUNK_ELEMENTS_CPU
    try:
        plain = _build(model)
        parameters = _parameters(model, plain)
        if data.tokens is not None and not hasattr(plain, "loss"):
            logits = logits_of(plain(_batch(model, data, _MANY)["inputs"]), model.build.entry)
            losses._CHUNK_ELEMENTS_CPU = max(chunk, logits.numel() // _MOST_CHUNKS)
        passes, flops = _passes(model, data)
        of_ranks: list[dict[str, TracedPass]] = []
        children: tuple[Child, ...] = ()
        cut: tuple[str, ...] = ()
        if pipeline is not None:
            sample, entry = _batch(model, data, 1), model.build.entry
            check_sequence(plain, sample, entry)
            children = even_stages.children(plain, sample, model.seq_len)
            num_stages = num_ranks * stages_per_rank(pipeline.schedule)
            cut = pipeline.cut or even_stages.even(children, num_stages, entry)
            _share(plain, model, tp)
            stages = stages_of(plain, cut, entry)
            ranks = [range(rank, len(stages), num_ranks) for rank in range(num_ranks)]
            parameters = parameters._replace(
                by_rank=tuple(
                    _parameters(model, plain, [one for s in own for one in stages[s].values()])
                    for own in ranks
                ),
            )
            puts_off = any(action.kind == "W" for action in order(pipeline.schedule, 0, num_ranks, num_ranks))
            of_ranks = [_passes(model, data, _Stages(cut, own, puts_off, tp))[0] for own in ranks]
    finally:
        losses._CHUNK_ELEMENTS_CPU = chunk
    words = f"traced with torch {torch.__version__}"
    return Traced(parameters, flops / model.seq_len, passes, words, tuple(of_ranks), children, cut)


def _passes(
    model: ModelPlan, data: DataPlan, stages: _Stages | None = None
) -> tuple[dict[str, TracedPass], float]:
    """Of the whole model, or these stages; with the FLOPs of a sample by the convention."""
    passes, flops = {}, 0.0
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        for mode in CHECKPOINTING:
            few, many = (_once(model, data, precision, mode, n, stages) for n in (_FEW, _MANY))
            passes[f"{precision} {mode}"] = TracedPass(
                sample_bytes=max(0, (many.most - few.most) // (_MANY - _FEW)),
                kept_bytes=max(0, (many.kept - few.kept) // (_MANY - _FEW)),
                forward=_ops(many.counted["forward"]),
                backward=_ops(many.counted["backward"]),
                put_off_bytes=max(0, (many.put_off - few.put_off) // (_MANY - _FEW)),
            )
            if (precision, mode) == ("fp32", "none"):
                flops = sum(counted["convention"] for counted in many.counted.values()) / _MANY
    return passes, flops


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


def _share(plain: torch.nn.Module, model: ModelPlan, tp: int) -> None:
    """Leaves of it what the first of `tp` ranks has."""
    if tp > 1:
        from mlpipe.train.parallel.tensor_by_pattern import split

        split(plain, model, _First(0, tp, None, lambda collective: collective))


def _parameters(
    model: ModelPlan, plain: torch.nn.Module, own: Sequence[torch.nn.Module] | None = None
) -> ParameterCounts:
    """Of the whole model, or of these modules of it."""
    blocks = find_blocks(plain, model.blocks, model.build.entry)
    kept = [plain] if own is None else own
    there = {id(one) for module in kept for one in module.modules()}
    blocks = [block for block in blocks if id(block) in there]
    parameters = list({id(one): one for module in kept for one in module.parameters()}.values())
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    total = sum(parameter.numel() for parameter in parameters)
    inside = {id(parameter): parameter for block in blocks for parameter in block.parameters()}
    return ParameterCounts(
        total,
        max(sizes, default=0),
        total - sum(sizes),
        len(blocks),
        _counted(parameters),
        _counted(parameter for parameter in inside.values() if parameter.dim() == 2),
    )


def _counted(parameters: Iterable[torch.nn.Parameter]) -> tuple[tuple[int, int, int], ...]:
    """Rows, values in a row, and how many there are of each shape."""
    shapes = Counter(
        (parameter.shape[0], parameter.numel() // parameter.shape[0]) if parameter.numel() else (0, 0)
        for parameter in (p if p.dim() else p.view(1) for p in parameters)
    )
    return tuple((rows, width, many) for (rows, width), many in shapes.items())


def _once(
    model: ModelPlan,
    data: DataPlan,
    precision: Precision,
    mode: Any,
    size: int,
    stages: _Stages | None = None,
) -> _Meter:
    """Forward and backward over `size` samples, with a new model: checkpointing changes its blocks."""
    plain = _build(model)
    if stages is not None:
        _share(plain, model, stages.tp)
    if mode != "none":
        checkpoint_activations(find_blocks(plain, model.blocks, model.build.entry), mode)
    module = LossModule(plain, "cpu", precision, entry=model.build.entry)
    for parameter in module.parameters():
        if parameter.requires_grad:  # a gradient is not counted here: it goes as it comes
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    batch = _batch(model, data, size)
    meter = _Meter([*module.parameters(), *module.buffers(), *batch.values()])
    if stages is not None:
        _stages_once(meter, module, batch, stages)
        return meter
    with meter:
        loss, _ = module(batch)
        meter.turn()
        loss.backward()
    return meter


def _stages_once(meter: _Meter, module: LossModule, batch: Batch, asked: _Stages) -> None:
    """What other ranks compute costs this one nothing here; what they send lies in tensors of its own."""
    own, stages = asked.own, stages_of(module.model, asked.cut, module.entry)
    last = len(stages) - 1
    parts = {s: Part(s == 0, s == last, list(one.values())) for s, one in enumerate(stages)}
    staged = StagedLossModule(module, module.model, module.model, parts)
    deferred = DeferredWeights(staged) if asked.puts_off else None
    gave: list[torch.Tensor] = []
    with torch.no_grad():
        for stage in range(last):
            gave.append(staged(batch, stage, gave[-1] if gave else None))
    with meter:
        received = {stage: gave[stage - 1].clone().requires_grad_() for stage in own if stage > 0}
        outputs = {stage: staged(batch, stage, received.get(stage)) for stage in own}
        meter.turn()
        edge = gave[max(own[0] - 1, 0)]
        under_way = [torch.empty_like(edge) for _ in range(2)]  # come for the next pass, and not yet gone
        for stage in reversed(own):
            output, arrived = outputs.pop(stage), received.pop(stage, None)
            gradient = torch.empty_like(output) if stage < last else None
            with nullcontext() if deferred is None else deferred.collecting(stage, 0):
                torch.autograd.backward(output[0] if stage == last else output, gradient)
            del output, gradient, arrived
        del under_way
        meter.put_off = meter.alive
        if deferred is not None:
            for stage in own:
                deferred.compute(stage, 0)


def _batch(model: ModelPlan, data: DataPlan, size: int) -> Batch:
    if data.tokens is not None:
        ids = torch.zeros((size, model.seq_len), dtype=torch.int64)
        return {"inputs": ids, "targets": torch.zeros_like(ids)}
    with unset_fake_temporarily() as fake:
        dataset = open_dataset(data, split="train", seq_len=model.seq_len)
        real = collate(dataset, np.zeros(size, dtype=np.int64))
    if fake is None:  # the model reads values
        return real
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
        shape = trace(
            from_plain(ModelPlan, asked["model"]),
            from_plain(DataPlan, asked["data"]),
            None if asked["pipeline"] is None else from_plain(PipelinePlan, asked["pipeline"]),
            asked["num_ranks"],
            asked["tp"],
        )
    except MlpipeError as error:
        Path(sys.argv[2]).write_text(
            json.dumps({"message": error.message, "where": error.where, "hint": error.hint})
        )
        return 1
    Path(sys.argv[2]).write_text(to_json(shape))
    return 0


if __name__ == "__main__":
    sys.exit(main())
