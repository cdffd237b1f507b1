"""Seconds per optimizer step, by cause: a roofline for each kernel, and alpha-beta for each collective.

A matmul takes the longer of its FLOPs at the achievable share of the peak and its bytes at the memory's
bandwidth; what is between the matmuls takes its bytes; on a GPU an eager kernel takes at least its launch.
Which collectives a strategy pays for, and what hides them, stands in `plan/strategies/<name>.py`.
Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mlpipe._core.presets import LlamaConfig
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.memory import COMPUTE_BYTES, num_large
from mlpipe.plan.speed import ADAM_TRAFFIC, REFERENCE, REFERENCE_BATCH, traffic_by_width
from mlpipe.plan.traced import Ops, Traced

# Share of the matmuls' rate that fused attention reaches. Dao, FlashAttention-2 (2023): up to 73 % of an
# A100's peak, of which matmuls reach 87 %; Shah et al., FlashAttention-3 (2024): its predecessor, which
# torch's SDPA runs, 35 % of an H100's, of which they reach 80 %. A CPU's runs as its matmuls do.
_ATTENTION_RATIO, _ATTENTION_RATIO_HOPPER = 0.73 / 0.87, 0.35 / 0.80
_HOPPER_FLOPS = 500e12  # bf16 peak, of Hopper and later
# Share of their bandwidth that collectives and streams get: stas00/ml-engineering, network/README.md.
_WIRE_RATIO, _STREAM_RATIO = 0.8, 0.8
# Seconds of a ring's step. NCCL, src/graph/tuning.cc, hwLat and baseLat: Ring, Simple: NVLink 3.4 us, network
# 14; 8.4 for the call. gloo over loopback: assumed; a calibration measures the call with it.
_STEP_LINK, _STEP_NETWORK, _CALL = 3.4e-6, 14e-6, 8.4e-6
_STEP_GLOO = 60e-6
# Eager mode: about 5 us of CPU a kernel (PyTorch's CUDA graphs post, 2021), and the kernels of a block.
_LAUNCH, _KERNELS_FORWARD = 5e-6, 45
# torch.compile keeps about a third of the traffic between matmuls: one read and one write of what eager mode
# reads and writes three times. torchtitan's Llama-8B on 8 H100 got 16 % faster.
_FUSED = 1 / 3
_CACHED_BYTES = 2 * 2**20  # of a tensor that a core's share of the caches holds
# What the trainer waits for a save, per GiB of a rank: benchmarks/results/checkpoint_fsdp.json on CPU; on a
# GPU copying to pinned memory over PCIe 4 at 20 GB/s.
_STALL_CPU, _STALL_GPU = 0.1 / 2**30, 1 / 20e9


@dataclass(frozen=True)
class StepSeconds:
    """Of one optimizer step. `communication`: what computing does not hide. `save`: the waits for
    checkpoints, spread over the steps between two."""

    compute: float
    communication: float
    data: float
    save: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.data + self.save


@dataclass(frozen=True)
class Job:
    """What one rank does in a step."""

    config: LlamaConfig
    seq_len: int
    micro_batch: int
    accumulation: int
    precision: str
    checkpointing: str
    compiled: bool


@dataclass(frozen=True)
class Passes:
    """Seconds of one microbatch, and what travels. `outside`: embedding, last norm, head and loss.
    `overlap`: collectives run beside computing, which needs a GPU: on CPU both want the same cores.
    `reduce_every`: see `TrainPlan.reduce_gradients`. `new_memory`: what a sparing heap costs, a step."""

    num_blocks: int
    forward_block: float
    backward_block: float  # with what is computed again
    forward_outside: float
    backward_outside: float
    accumulation: int
    block_params: int
    outside_params: int
    width: int  # bytes of a block's parameter as it travels
    overlap: bool
    reduce_every: bool = False
    new_memory: float = 0.0

    @property
    def backward(self) -> float:
        return self.num_blocks * self.backward_block + self.backward_outside

    @property
    def compute(self) -> float:
        forward = self.num_blocks * self.forward_block + self.forward_outside
        return self.accumulation * (forward + self.backward)

    @property
    def num_params(self) -> int:
        return self.num_blocks * self.block_params + self.outside_params


@dataclass(frozen=True)
class Wire:
    """Collectives of one rank with `num_ranks` - 1 others that are `stride` ranks apart."""

    hardware: Hardware

    def all_reduce(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """A reduce-scatter and an all-gather."""
        return 2 * self.all_gather(num_bytes, num_ranks, stride)

    def all_gather(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """Of `num_bytes` in all, by a ring (as is a reduce-scatter): `num_ranks` - 1 steps of a share.
        A ring through several nodes has as many network ports as it has members on a node."""
        if num_ranks == 1:
            return 0.0
        found, per_node = self.hardware, self.hardware.devices_per_node
        speed = found.speed
        steps, rate = num_ranks - 1, speed.link_bytes_per_second
        network_steps = 0
        if steps * stride >= per_node:
            members = max(1, per_node // stride)
            rate = min(rate, members * speed.network_bytes_per_second)
            network_steps = steps if members == 1 else max(1, num_ranks // members - 1)
        transfer = num_bytes * steps / num_ranks / rate
        if found.device == "cpu":  # the link's rate was measured with an all-reduce, not read off a datasheet
            return transfer + speed.collective_seconds + steps * _STEP_GLOO
        latency = (steps - network_steps) * _STEP_LINK + network_steps * _STEP_NETWORK + _CALL
        return transfer / _WIRE_RATIO + latency

    def gather(self, num_bytes: float, num_ranks: int) -> float:
        """Of weights: on a CPU as calibrated, with all copies."""
        ring = self.all_gather(num_bytes, num_ranks)
        return self._calibrated(ring, num_bytes, self.hardware.speed.gather_bytes_per_second)

    def scatter(self, num_bytes: float, num_ranks: int) -> float:
        """Of gradients, likewise. gloo reduces the whole on every rank (torch, ProcessGroupGloo.cpp)."""
        on_cpu = self.hardware.device == "cpu"
        ring = (self.all_reduce if on_cpu else self.all_gather)(num_bytes, num_ranks)
        return self._calibrated(ring, num_bytes, self.hardware.speed.scatter_bytes_per_second)

    def _calibrated(self, ring: float, num_bytes: float, rate: float) -> float:
        """The ring is the slower where the calibration had fewer ranks, or one node."""
        if not ring or not rate:
            return ring
        return max(ring, num_bytes / rate + self.hardware.speed.collective_seconds)


def passes(job: Job, hardware: Hardware) -> Passes:
    return _as_measured(_sum_of_kernels(job, hardware), job.precision, hardware)


def _as_measured(found: Passes, precision: str, hardware: Hardware) -> Passes:
    """A calibration's kernels say how shapes differ; how fast a whole pass is, its reference model's says."""
    kernels, config = hardware.speed.kernels.get(precision), REFERENCE[hardware.device]
    if kernels is None or not kernels.passes_seconds:
        return found
    reference = Job(config, config.max_seq_len, REFERENCE_BATCH, 1, precision, "none", compiled=False)
    ratio = kernels.passes_seconds / _sum_of_kernels(reference, hardware).compute
    return replace(
        found,
        forward_block=ratio * found.forward_block,
        backward_block=ratio * found.backward_block,
        forward_outside=ratio * found.forward_outside,
        backward_outside=ratio * found.backward_outside,
    )


def _sum_of_kernels(job: Job, hardware: Hardware) -> Passes:
    config, tokens = job.config, job.micro_batch * job.seq_len
    kernel = Kernels(job.precision, job.compiled, hardware)
    dim, kv_dim, ffn = config.dim, config.num_kv_heads * config.head_dim, config.ffn_dim
    matmuls = [kernel.matmul(tokens, inner, outer) for inner, outer in config.matmuls()]
    # forward; causal kernels skip the upper half
    attention = kernel.attention(2.0 * job.micro_batch * config.num_heads * config.head_dim * job.seq_len**2)
    between = kernel.between(tokens, traffic_by_width(dim, kv_dim, ffn))
    forward = kernel.at_least(sum(matmuls) + attention + between, _KERNELS_FORWARD)
    backward = kernel.at_least(2 * sum(matmuls) + 2.5 * attention + 2 * between, 2 * _KERNELS_FORWARD)
    if job.checkpointing == "full":
        # Torch stops before down, whose result nothing needs. Published runs are those of others, too.
        backward += forward - (matmuls[-1] if kernel.measured is not None else 0.0)
    elif job.checkpointing == "selective":  # keeps attention and q, v, gate, down
        k, o, up = matmuls[1], matmuls[3], matmuls[5]
        backward += k + o + up + between
    head = kernel.matmul(tokens, dim, config.vocab_size)
    # the loss in chunks: reads logits, writes, reads and turns fp32 probabilities, writes the gradient
    loss = kernel.loss(tokens * config.vocab_size * (2 * COMPUTE_BYTES[job.precision] + 12))
    embedding = kernel.stream(tokens * dim * 8 + 4 * config.num_embedding_params(), fuse=False)
    casts = 0.0
    if job.precision == "bf16":  # fp32 weights to bf16, once a forward
        casts = kernel.stream(6 * config.num_layer_params(), fuse=False)
    return Passes(
        num_blocks=config.num_layers,
        forward_block=forward + casts,
        backward_block=backward,
        forward_outside=head + loss,
        backward_outside=2 * head + embedding,
        accumulation=job.accumulation,
        block_params=config.num_layer_params(),
        outside_params=config.num_params() - config.num_layers * config.num_layer_params(),
        width=COMPUTE_BYTES[job.precision],
        overlap=hardware.device == "cuda",
        new_memory=_new_memory(job, hardware),
    )


def _new_memory(job: Job, hardware: Hardware) -> float:
    """Seconds of a step by which a CPU's sparing heap is slower: of each large tensor of a block."""
    if not hardware.speed.new_tensor_seconds:
        return 0.0
    tokens = job.micro_batch * job.seq_len
    number = num_large(
        job.config, num_tokens=tokens, precision=job.precision, checkpointing=job.checkpointing
    )
    return job.accumulation * job.config.num_layers * number * hardware.speed.new_tensor_seconds


def traced_passes(
    traced: Traced,
    *,
    micro_batch: int,
    accumulation: int,
    precision: str,
    checkpointing: str,
    compiled: bool,
    hardware: Hardware,
) -> Passes:
    """As `passes`, with the work spread evenly over the blocks."""
    kernel = Kernels(precision, compiled, hardware)
    found, number = traced.one(precision, checkpointing), max(1, traced.num_blocks)

    def seconds(ops: Ops) -> float:
        each = micro_batch * ops.matmul_flops / max(1, ops.num_matmuls)
        matmuls = ops.num_matmuls * kernel.matmul_flops(each) if each else 0.0
        others = kernel.stream(
            micro_batch * ops.other_bytes,
            large=micro_batch * ops.other_bytes > _CACHED_BYTES * ops.num_kernels,
        )
        attention = kernel.attention(micro_batch * ops.attention_flops)
        return kernel.at_least(matmuls + attention + others, ops.num_kernels) / number

    counts = traced.counts
    summed = Passes(
        num_blocks=number,
        forward_block=seconds(found.forward),
        backward_block=seconds(found.backward),
        forward_outside=0.0,
        backward_outside=0.0,
        accumulation=accumulation,
        block_params=(counts.total - counts.outside) // number,
        outside_params=counts.outside,
        width=COMPUTE_BYTES[precision],
        overlap=hardware.device == "cuda",
    )
    return _as_measured(summed, precision, hardware)


def update_seconds(num_params: float, hardware: Hardware) -> float:
    """Norm, clipping and AdamW over the parameters that a rank updates."""
    if hardware.speed.update_bytes_per_second is not None:
        return num_params * ADAM_TRAFFIC / hardware.speed.update_bytes_per_second
    return copy_seconds(num_params * ADAM_TRAFFIC, hardware)


def copy_seconds(num_bytes: float, hardware: Hardware) -> float:
    """Reads and writes of so many bytes in all."""
    return num_bytes / (hardware.speed.memory_bytes_per_second * _STREAM_RATIO)


def save_seconds(num_bytes: float, hardware: Hardware, interval_seconds: float | None) -> float:
    """What the trainer waits for one save of `num_bytes` of this rank: to copy them, and for what the store
    still writes when the next save comes, `interval_seconds` later (None: all of it, as a save that is not
    asynchronous does). The store's rate, where measured, was that of one rank; a node's share it."""
    rate = hardware.speed.store_bytes_per_second
    copying = num_bytes * (_STALL_GPU if hardware.device == "cuda" else _STALL_CPU)
    writing = num_bytes * hardware.devices_per_node / rate if rate else 0.0
    return copying + max(0.0, writing - (interval_seconds or 0.0))


class Kernels:
    """Seconds of single kernels on this hardware."""

    def __init__(self, precision: str, compiled: bool, hardware: Hardware) -> None:
        self.precision, self.compiled = precision, compiled
        self.hardware, self.speed = hardware, hardware.speed
        self.peak = self.speed.peak_flops[precision]
        self.width = COMPUTE_BYTES[precision]
        self.measured = self.speed.kernels.get(precision)

    def matmul(self, rows: int, inner: int, outer: int) -> float:
        seconds = self.matmul_flops(2.0 * rows * inner * outer)
        if self.measured is not None:  # its points have felt the memory already
            return seconds
        num_bytes = self.width * (rows * inner + inner * outer + rows * outer)
        return max(seconds, num_bytes / (self.speed.memory_bytes_per_second * _STREAM_RATIO))

    def matmul_flops(self, flops: float) -> float:
        return flops / (self.peak * self.speed.matmul_ratio(self.precision, flops))

    def attention(self, flops: float) -> float:
        if self.measured is not None:
            return flops / self.measured.attention_flops
        ratio = _ATTENTION_RATIO_HOPPER if self.peak >= _HOPPER_FLOPS else _ATTENTION_RATIO
        if self.hardware.device == "cpu":
            ratio = 1.0
        return flops / (self.peak * self.speed.achievable_ratio * ratio)

    def between(self, tokens: int, traffic: list[tuple[int, int]]) -> float:
        """The matmuls of a block: bytes a token, by channels of the tensors."""
        if self.measured is None:
            return self.stream(tokens * sum(num_bytes for _, num_bytes in traffic))
        return sum(
            self.stream(tokens * num_bytes, large=tokens * channels * self.width >= _CACHED_BYTES)
            for channels, num_bytes in traffic
        )

    def stream(self, num_bytes: float, *, fuse: bool = True, large: bool = False) -> float:
        if fuse and self.compiled:
            num_bytes *= _FUSED
        if fuse and self.measured is not None:
            slow = self.measured.large_bytes_per_second if large else 0.0
            return num_bytes / (slow or self.measured.stream_bytes_per_second)
        return num_bytes / (self.speed.memory_bytes_per_second * _STREAM_RATIO)

    def loss(self, num_bytes: float) -> float:
        if self.measured is not None:
            return num_bytes / self.measured.loss_bytes_per_second
        return self.stream(num_bytes, fuse=False)

    def at_least(self, seconds: float, num_kernels: int) -> float:
        if self.hardware.device == "cpu":
            return seconds + num_kernels * self.speed.kernel_seconds
        return seconds if self.compiled else max(seconds, num_kernels * _LAUNCH)


def whole_steps(interval_seconds: float, step_seconds: float) -> int:
    return max(1, math.ceil(interval_seconds / step_seconds))
