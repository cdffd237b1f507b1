"""The decision as one person would tell it to another, and advice on shapes and switches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mlpipe._core.units import format_bytes
from mlpipe.kinds.train.spec import Train
from mlpipe.plan import allocators
from mlpipe.plan.axis_reasons import axis_reasons
from mlpipe.plan.candidates import precision_on, priced
from mlpipe.plan.choose import Candidate, smallest
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.optimizers import optimizer_cost
from mlpipe.plan.plan import Plan
from mlpipe.plan.shapes import presets, trained
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.updates import CompressPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.spec.model import Pipeline

_MILDEST = "int8"  # of compressions that send less than half
_TILES = "NVIDIA, Matrix Multiplication Background User's Guide: full tiles want multiples of 64 bf16 values"
_HEADS = "Dao, FlashAttention-2 (2023): kernels for heads of 64 and 128 channels; others are padded"
_FUSION = "torchtitan, benchmarks/llama3_h100_202412: 5,762 -> 6,667 tok/s of Llama-8B on 8 H100"


def explanation(
    pipeline: Pipeline, plan: Plan, chosen: Candidate, candidates: Sequence[Candidate], hardware: Hardware
) -> list[str]:
    """One line a thought. `plan` trains, and `chosen` has its figures."""
    train, spec = plan.part(TrainPlan), pipeline.stage(plan.stage).part(Train)
    if train is None or spec is None or chosen.memory is None or chosen.seconds is None:
        return [train.reason if train is not None else "nothing is trained here"]
    memory, seconds = chosen.memory, chosen.seconds
    told = [
        f"There are {hardware.world_size} workers ({hardware}), {format_bytes(hardware.memory_bytes)} each.",
        *_experts(train),
        f"Weights, gradients and optimizer states take {8 + _state_bytes(train):.3g} bytes "
        f"a parameter; {chosen.strategy} shards "
        f"{ORDER[chosen.strategy].SHARDS}, which leaves "
        f"{format_bytes(memory.parameters + memory.gradients + memory.optimizer)} of them on a worker.",
        *_frozen(train),
        *_update(train),
        f"A micro-batch of {train.micro_batch} x {train.model.seq_len} tokens keeps "
        f"{format_bytes(memory.activations + memory.logits)} of activations and logits, with "
        f"activation checkpointing {train.activation_checkpointing}.",
        *_on_host(train, chosen, hardware),
        f"In all {chosen.reason} per worker, of which {format_bytes(memory.context)} are there before the "
        f"first tensor and {format_bytes(memory.slack)} are left to the allocator.",
        allocators.reason(hardware, train.mesh, train.activation_checkpointing, plan.launch.env),
    ]
    precision, why = precision_on(spec, hardware)
    told.append(f"Matmuls compute in {precision}: {why}. Weights, gradients, moments and the loss stay fp32.")
    if train.float8:
        faster = hardware.speed.float8_speedup
        words = f"at best {faster:.3g} times as fast" if faster else "which this CPU emulates"
        told.append(f"Those of the blocks' linear layers are in float8, {words}; what is kept stays bf16.")
    bound = "computing" if seconds.compute >= seconds.communication else "communication"
    told.append(
        f"A step takes {seconds.total:.3g} s, {seconds.compute / seconds.total:.0%} of it computing and "
        f"{seconds.communication / seconds.total:.0%} communication that nothing hides: {bound} decides."
    )
    asked = [candidate for candidate in candidates if candidate.asked]
    told += _rejected(asked, chosen)
    told += axis_reasons(spec, trained.planned(train), hardware, candidates, chosen)
    told += _exchange(train, chosen, hardware)
    told.append(f"So {train.reason}.")
    told += _links(train, chosen, hardware)
    advice = [*lint(train, chosen, candidates), *_link_advice(train, chosen, hardware)]
    return told + ([f"Advice: {line}" for line in advice] or ["No advice: the shapes suit the hardware."])


def _frozen(train: TrainPlan) -> Iterator[str]:
    """What is trained, where that is not all."""
    shape = trained.planned(train)
    if (train.freeze or train.adapter is not None) and shape is not None:
        counts = shape.parameters
        yield (
            f"Of {counts.total:,} parameters {counts.trained.total:,} are trained: the others have weights "
            "only, and nothing of them is reduced or updated."
        )
        if train.adapter is not None and train.adapter.base is not None:
            weights = sum(rows * columns * number for rows, columns, _, number in counts.quantized)
            num_bytes = sum(rows * each * number for rows, _, each, number in counts.quantized)
            yield (
                f"{weights:,} of these weights are kept in {train.adapter.base}, "
                f"{8 * num_bytes / weights:.3g} bits each, and spelled out for each product."
            )


def _on_host(train: TrainPlan, chosen: Candidate, hardware: Hardware) -> Iterator[str]:
    """What waits there."""
    if train.offload == "off":
        return
    words = {
        "activations": "inputs of recomputed blocks",
        "optimizer": "the optimizer's states, and what it updates by",
        "all": "inputs of recomputed blocks, the optimizer's states, and what it updates by",
    }
    own = ", which is this worker's own memory" if hardware.device == "cpu" else ""
    yield f"On the host{own} are {format_bytes(chosen.host_bytes)} of each worker: {words[train.offload]}."


def _experts(train: TrainPlan) -> Iterator[str]:
    """How much of a model with experts a token meets."""
    shape = presets.planned(train.model)
    if shape is not None and (active := shape.active_params) < shape.parameters.total:
        total = shape.parameters.total
        yield f"Of {total:,} parameters {active:,}, {active / total:.0%}, are active: they compute a token."


def _update(train: TrainPlan) -> Iterator[str]:
    """What a step of the optimizer moves."""
    shape = trained.planned(train)
    if shape is None:
        return
    cost, parameters = optimizer_cost(train), shape.parameters.trained
    moved = cost.traffic_bytes_per_parameter(parameters)
    name = train.optimizer.name or train.optimizer.entry
    words = f"A step of {name} reads and writes {moved:.3g} bytes a parameter"
    once = cost.update_cost(parameters)
    if once.flops:
        words += f", and computes {once.flops / 1e9:.3g} GFLOP"
        if train.mesh.dp_shard > 1 or train.shard_optimizer:
            sent = once.sent_bytes
            if train.mesh.ep == train.mesh.dp_shard * train.mesh.cp:  # nobody shares a worker's experts
                sent -= cost.stacked_bytes(parameters)
            words += f", for which {format_bytes(2 * sent)} travel between the workers of a copy"
    yield f"{words}."


def _state_bytes(train: TrainPlan) -> float:
    """For each parameter, on average; of a user's own model as the optimizer's table says."""
    shape = trained.planned(train)
    if shape is None:
        return train.optimizer.state_bytes_per_parameter
    return optimizer_cost(train).state_bytes_per_parameter(shape.parameters.trained)


def _exchange(train: TrainPlan, chosen: Candidate, hardware: Hardware) -> Iterator[str]:
    """Of keys and values, beside the other way."""
    if train.mesh.cp == 1:
        return
    is_ring = train.context_exchange == "ring"
    other = priced(train._replace(context_exchange="all_gather" if is_ring else "ring"), hardware)
    ways = ["are gathered at once", "go round from worker to worker"]
    mine, theirs = reversed(ways) if is_ring else ways
    ratio = other.step_seconds / chosen.step_seconds
    yield (
        f"Keys and values of cp {train.mesh.cp} {mine}: if they {theirs}, a step would take {ratio:.2f} "
        f"times the time, and a worker {other.reason}."
    )


def _links(train: TrainPlan, chosen: Candidate, hardware: Hardware) -> Iterator[str]:
    """What sending less, or more rarely, is worth on these links."""
    if (train.compress is None and train.islands is None) or hardware.comes_and_goes:
        return
    plain = priced(train._replace(compress=None, islands=None), hardware)
    ratio = plain.step_seconds / chosen.step_seconds
    what = "update" if train.compress is None else "compress"
    verdict = f"{ratio:.3g} times as fast" if ratio >= 1 else f"{1 / ratio:.3g} times as slow"
    yield f"Without {what} a step would take {plain.step_seconds:.3g} s: with it training is {verdict}."


def _link_advice(train: TrainPlan, chosen: Candidate, hardware: Hardware) -> Iterator[str]:
    """Of copies that send all of their gradients in every step."""
    copies = train.mesh.dp_replicate == train.mesh.world_size > 1
    if not copies or train.compress is not None or train.islands is not None:
        return
    shape = trained.planned(train)
    if shape is None or shape.widths.get("num_experts"):
        return
    coded = priced(train._replace(compress=CompressPlan(_MILDEST)), hardware)
    gain = chosen.step_seconds / coded.step_seconds
    if gain > 1.1:
        yield f"compress: {_MILDEST} would be {gain:.2g} times as fast (docs/how-to/slow-links.md)"


def _rejected(asked: Sequence[Candidate], chosen: Candidate) -> Iterator[str]:
    """Per strategy one sentence."""
    for strategy in ORDER:
        mine = [candidate for candidate in asked if candidate.strategy == strategy]
        if strategy == chosen.strategy or not mine:
            continue
        fitting = [candidate for candidate in mine if candidate.fits]
        if fitting:
            best = min(fitting, key=lambda candidate: candidate.step_seconds)
            ratio = best.step_seconds / chosen.step_seconds
            yield f"{strategy} would fit, and take {ratio:.2f} times the time."
        elif mine[0].mesh is None:
            yield f"{mine[0].reason}."
        else:
            yield f"{strategy} does not fit: at best it {smallest(mine).reason}."


def lint(train: TrainPlan, chosen: Candidate, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Advice with the gain to expect and its source."""
    shape = trained.planned(train)
    if shape is not None:
        yield from _shapes(shape.widths)
    if train.precision == "fp32":
        low = [c for c in candidates if c.precision == "bf16" and c.fits and c.strategy == chosen.strategy]
        gain = chosen.step_seconds / min(c.step_seconds for c in low) if low else 1.0
        if gain > 1.1:
            yield f"precision: bf16 would be {gain:.1f} times as fast (by this model; peaks of the catalogue)"
    if train.precision == "fp16" and any(c.precision == "bf16" for c in candidates):
        yield "precision: bf16 is as fast there, and needs no loss scale: it reaches as far as fp32"
    has_experts = shape is not None and shape.widths.get("num_experts")
    puts_off = train.pipeline is not None and train.pipeline.schedule == "zero_bubble"
    if train.compile == "off" and train.precision == "bf16" and not (has_experts or puts_off):
        yield f"compile: block is worth about 16 % in long runs ({_FUSION})"
    if train.activation_checkpointing != "none" and train.compile != "off":
        free = [c for c in candidates if c.activation_checkpointing == "none" and c.fits]
        if any(c.precision == train.precision for c in free):
            yield "activation_checkpointing: none fits too, and saves a third (Chen et al. 2016)"
    if train.accumulation > 8 and train.mesh.dp_shard > 1 and train.reshard_after_forward:
        yield (
            f"{train.accumulation} micro-batches a step gather the weights {train.accumulation} times; a "
            "larger micro_batch with more recomputation may be faster (Zhao et al., PyTorch FSDP, 2023)"
        )


def _shapes(widths: Mapping[str, int]) -> Iterator[str]:
    for name in ("vocab_size", "dim", "ffn_dim"):
        size = widths.get(name, 0)
        if size % 64:
            better = -(-size // 64) * 64
            waste = better / size - 1
            yield f"{name} {size} is no multiple of 64: {better}, {waste:.1%} more, fills tiles ({_TILES})"
    head_dim = widths.get("head_dim", 64)
    if head_dim not in (64, 128):
        padded = 64 if head_dim < 64 else 128
        yield f"heads have {head_dim} channels; {padded} make full use of attention kernels ({_HEADS})"
