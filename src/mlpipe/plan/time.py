"""Seconds of an optimizer step, by cause: passes from the model's kernels, communication from the axes of the
mesh, the update and the saves from the bytes that they move. Standard library only."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from mlpipe.plan.axes.axis import Layout, Passes
from mlpipe.plan.hardware import Hardware, cpu_speed
from mlpipe.plan.kernels import Kernels, copy_seconds
from mlpipe.plan.shapes.shape import ModelShape, PassSeconds, StepShape
from mlpipe.plan.tensors import COMPUTE_BYTES, GRADIENT_BYTES, WEIGHT_BYTES

# What the trainer waits for a save, per GiB of a rank: benchmarks/results/checkpoint_fsdp.json on CPU; on a
# GPU copying to pinned memory over PCIe 4 at 20 GB/s.
_STALL_CPU, _STALL_GPU = 0.1 / 2**30, 1 / 20e9
# Standard deviation of the speed of equal GPUs: the 8 of a node were seen to differ by 5 % and more
# (stas00/ml-engineering, compute/accelerator/README.md), which is 2.85 of it (Tippett 1925).
_SPREAD = 0.05 / 2.85


class StepSeconds(NamedTuple):
    """Of one optimizer step. `communication`: what computing does not hide. `save`: the waits for
    checkpoints, spread over the steps between two."""

    compute: float
    communication: float
    data: float
    save: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.data + self.save


def passes(shape: ModelShape, step: StepShape, hardware: Hardware, kernels: Kernels | None = None) -> Passes:
    """Forward and backward of one rank and its part of the model, and what of it travels. `kernels`: of this
    precision and hardware, for who asks for many."""
    kernels = kernels or Kernels(step.precision, step.compiled, hardware.device, hardware.speed)
    seconds, parameters = _pass_seconds(shape, step, hardware, kernels), shape.parameters.of(step.part)
    num_blocks, width, widths = max(1, parameters.num_blocks), COMPUTE_BYTES[step.precision], shape.widths
    frozen = parameters.total - parameters.trained.total
    frozen_outside = parameters.outside - parameters.trained.outside
    dim = widths.get("dim", 0)
    routed, expert = widths.get("experts_per_token", 0) * dim, widths.get("ffn_dim", 0) * dim
    head_dim = widths.get("head_dim", 0)
    channels, q_channels = widths.get("num_kv_heads", 0) * head_dim, widths.get("num_heads", 0) * head_dim
    return Passes(
        num_blocks=num_blocks,
        forward_block=seconds.forward_block,
        backward_block=seconds.backward_block,
        forward_outside=seconds.forward_outside,
        backward_outside=seconds.backward_outside,
        accumulation=step.accumulation,
        block_params=(parameters.total - parameters.outside) // num_blocks,
        outside_params=parameters.outside,
        width=width,
        overlap=hardware.device == "cuda",
        stream_bytes=step.num_tokens * (dim or widths.get("stage_output", 0)) * width,
        kv_bytes=2 * step.micro_batch * step.seq_len * channels // step.part.tp * width,
        query_bytes=step.num_tokens * q_channels // step.part.tp * width,
        attention_seconds=seconds.attention,
        routed_bytes=step.num_tokens * routed * width // step.part.tp,
        expert_params=3 * widths.get("num_experts", 0) * expert // step.part.tp,
        recomputes=step.checkpointing != "none",
        keeps_attention=step.checkpointing == "selective",
        frozen_block_params=(frozen - frozen_outside) // num_blocks,
        frozen_outside_params=frozen_outside,
        spared_block_bytes=parameters.spared_bytes(width),
        exact_sums=step.exact_sums,
        num_readers=_num_readers(widths),
        is_first=step.part.is_first,
        is_last=step.part.is_last,
    )


def _num_readers(widths: Mapping[str, int]) -> int:
    """Products of a block that read the residual stream: of q, k, v, and of gate and up; experts and their
    router are one. Of a user's own model nobody knows."""
    if not widths.get("num_experts"):
        return 5
    return 4 + 2 * (widths.get("num_shared_experts", 0) > 0)


def _pass_seconds(shape: ModelShape, step: StepShape, hardware: Hardware, kernels: Kernels) -> PassSeconds:
    """Kernels say how shapes differ; how fast a whole pass is, the reference model's, where timed."""
    seconds = shape.pass_seconds(step, kernels)
    rates, speed = hardware.speed.kernels.get(step.precision), hardware.speed
    measured = rates.passes_seconds if rates is not None else speed.passes_seconds.get(step.precision)
    if not measured:
        return seconds
    from mlpipe.plan.reference import reference_seconds

    return seconds.scaled(measured / reference_seconds(step.precision, hardware.device, speed))


def offload_seconds(num_bytes: int, step_passes: Passes, hardware: Hardware) -> float:
    """What computing does not hide of copies to the host and back, of `num_bytes` of a micro-batch: a block's
    goes beside the next block's pass. On a CPU it is a copy in memory, beside which nothing runs."""
    number = step_passes.num_blocks - 1
    if not num_bytes or number < 1:
        return 0.0
    speed = hardware.speed
    if not speed.host_bytes_per_second:
        return step_passes.accumulation * 2 * copy_seconds(2 * num_bytes, speed)
    each = num_bytes / number / speed.host_bytes_per_second
    blocks = (step_passes.forward_block, step_passes.backward_block)
    return step_passes.accumulation * number * sum(max(0.0, each - seconds) for seconds in blocks)


def slowest_ratio(hardware: Hardware) -> float:
    """Seconds of the slowest GPU's kernels over a mean one's: the others wait for it in every step. The
    largest of so many samples of a normal distribution (Fisher and Tippett 1928). A calibration of a CPU has
    measured all ranks at work."""
    if hardware.device == "cpu" or hardware.world_size == 1:
        return 1.0
    root = math.sqrt(2 * math.log(hardware.world_size))
    return 1 + _SPREAD * max(0.0, root - (2 * math.log(root) + math.log(2 * math.pi)) / (2 * root))


def gradient_seconds(step: StepShape, num_params: float, layout: Layout, hardware: Hardware) -> float:
    """Of a step, what fp32 gradients of so many parameters cost beside the passes: each is cast to fp32 (2
    bytes read, 4 written), by autograd or where FSDP's weights take it (`grad_dtype`), and added to those of
    the micro-batches before (4 + 4 and 4), unless each micro-batch's are sent. A CPU's passes were timed with
    all of it."""
    if hardware.device == "cpu":
        return 0.0
    casts = step.accumulation if step.precision != "fp32" else 0
    kept = layout.mesh.dp_shard == 1 or layout.reduce_gradients == "last"
    adds = step.accumulation - 1 if kept else 0
    return copy_seconds((6.0 * casts + 12.0 * adds) * num_params, hardware.speed)


def update_seconds(num_params: float, traffic_bytes: float, hardware: Hardware) -> float:
    """Norm, clipping and update of the parameters that a rank updates; `traffic_bytes`: read and written for
    each of them."""
    num_bytes = num_params * traffic_bytes
    if hardware.speed.update_bytes_per_second is not None:
        return num_bytes / hardware.speed.update_bytes_per_second
    return copy_seconds(num_bytes, hardware.speed)


# Bytes a parameter that go down for an update on the host, gradient and weight, and the new weight up again.
_DOWN_AND_UP = GRADIENT_BYTES + 2 * WEIGHT_BYTES


def host_update_seconds(num_params: float, traffic_bytes: float, hardware: Hardware) -> float:
    """The same of an optimizer on the host, by this worker's share of its CPUs, with the copies down and up,
    beside which nothing runs. On a CPU both are in its own memory."""
    speed, copied = hardware.speed, num_params * _DOWN_AND_UP
    if not speed.host_bytes_per_second:
        return update_seconds(num_params, traffic_bytes, hardware) + copy_seconds(2 * copied, speed)
    host = cpu_speed(hardware.cpus_per_node / hardware.devices_per_node)
    return copy_seconds(num_params * traffic_bytes, host) + copied / speed.host_bytes_per_second


def save_seconds(num_bytes: float, hardware: Hardware, interval_seconds: float | None) -> float:
    """What the trainer waits for one save of `num_bytes` of this rank: to copy them, and for what the store
    still writes when the next save comes, `interval_seconds` later (None: all of it, as a save that is not
    asynchronous does). The store's rate, where measured, was that of one rank; a node's share it."""
    rate = hardware.speed.store_bytes_per_second
    copying = num_bytes * (_STALL_GPU if hardware.device == "cuda" else _STALL_CPU)
    writing = num_bytes * hardware.devices_per_node / rate if rate else 0.0
    return copying + max(0.0, writing - (interval_seconds or 0.0))


def whole_steps(interval_seconds: float, step_seconds: float) -> int:
    """Steps between two saves that are so many seconds apart."""
    return max(1, math.ceil(interval_seconds / step_seconds))
