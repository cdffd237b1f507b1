"""`torchrun -m mlpipe.train.calibrate OUT STORE`: what this machine's ranks can do, all at work at once.

A kernel's figure is that of the fastest fifth of its tries within a time box; that of whole passes and of
collectives, which wait for the slowest, the median's. The passes, which weigh most, are looked at three
times, between the kernels: a machine that others use, too, is slow for seconds. Rank 0 writes its own to OUT.
About 25 s on a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from mlpipe._core.serial import to_json
from mlpipe.plan.allocators import glibc
from mlpipe.plan.measured import KernelRates, Measured
from mlpipe.plan.optimizers import traffic_bytes
from mlpipe.plan.reference import BLOCK, REFERENCE
from mlpipe.plan.settings import Precision
from mlpipe.plan.shapes.dense import traffic_block
from mlpipe.store.open import open_store
from mlpipe.train.loss import cross_entropy_sum
from mlpipe.train.measure import reference_passes
from mlpipe.train.model import LossModule
from mlpipe.train.models.attention import causal_attention
from mlpipe.train.models.llama import Llama, RMSNorm, rope_tables, rotate
from mlpipe.train.precision import DTYPES
from mlpipe.train.stop import die_with_parent

_NATIVE_BF16 = (8, 0)  # compute capability of the first GPUs that have it
_BOX_SECONDS, _PASSES_SECONDS = 0.15, 1.0  # for one figure; for one look at the whole passes
# tokens x inner x outer: from a small model's k to a GPU-sized block's
_SHAPES_CPU = ((256, 128, 64), (256, 128, 384), (512, 256, 704), (1024, 256, 2048), (1024, 512, 4096))
_SHAPES = ((1024, 1024, 1024), (4096, 2048, 2048), (8192, 4096, 4096), (8192, 4096, 14336))
_FEW_CPU, _MANY_CPU = 2, 16  # sequences whose tensors a cache holds, or not
_COLLECTIVE_BYTES = 16 * 2**20
_SHARDED = (2**18, 2**17, 2**17, 2**18, 2**19, 2**19, 2**19)  # numbers of q, k, v, o, gate, up, down: 9 MiB
_STORE_BYTES = 16 * 2**20

# As torch allocates where THP_MEM_ALLOC_ENABLE=1 (c10, alloc_cpu): aligned to a small page, whatever the name
# says, so that up to 2 MiB of a tensor are not in huge ones; filled, less filling it once more.
_NEW_TENSOR = """
import ctypes, time
from statistics import mean, median
libc, at, more = ctypes.CDLL(None), ctypes.c_void_p(), []
for size in (5 * 2**19, 6 * 2**19, 8 * 2**19, 12 * 2**19):
    taken = []
    for _ in range(50):
        times = [time.perf_counter()]
        assert libc.posix_memalign(ctypes.byref(at), 4096, size) == 0
        libc.madvise(at, size, 14)
        libc.memset(at, 1, size)
        times.append(time.perf_counter())
        libc.memset(at, 2, size)
        times.append(time.perf_counter())
        libc.free(at)
        times.append(time.perf_counter())
        taken.append(times[1] - times[0] + times[3] - times[2] - (times[2] - times[1]))
    more.append(median(taken))
print(mean(more))
"""


class Bench:
    """This rank's device, and the works that are timed on it."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        self.on_cpu = self.device.type == "cpu"
        self.config = BLOCK[self.device.type]
        self.seq_len, self.batch = (256, 4) if self.on_cpu else (2048, 4)
        self.tokens = self.seq_len * self.batch
        self.precisions: tuple[Precision, ...] = ("fp32", "bf16")
        if not self.on_cpu and torch.cuda.get_device_capability(self.device) < _NATIVE_BF16:
            self.precisions = ("fp32", "fp16")
        self.works: dict[str, Callable[[], object]] = {one: self._passes(one) for one in self.precisions}
        if self.on_cpu and dist.get_world_size() > 1:
            self.works["sharded"] = self._passes("fp32", sharded=True)
        self.passes: dict[str, list[float]] = {name: [] for name in self.works}

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call, the fastest fifth's slowest, while the other ranks do the same: what happens beside us
        only ever adds."""
        for _ in range(3):
            work()
        if dist.get_world_size() > 1:
            dist.barrier()
        taken: list[float] = []
        deadline = time.perf_counter() + _BOX_SECONDS
        while time.perf_counter() < deadline or len(taken) < 5:
            taken.append(self._once(work))
        return sorted(taken)[len(taken) // 5]

    def together(
        self, *works: Callable[[], object], box: float = _BOX_SECONDS, least: int = 5
    ) -> list[list[float]]:
        """Seconds of each in turns, of all ranks as often: one call more on one would meet another's next."""
        for work in works:
            work()
        turns = [[self._once(work) for work in works]]
        asked = torch.tensor([box / sum(turns[0])])
        dist.broadcast(asked, 0)
        turns += [[self._once(work) for work in works] for _ in range(max(least, int(asked)) - 1)]
        return [list(taken) for taken in zip(*turns, strict=True)]

    def look(self) -> None:
        """Whole passes in turns, a few each."""
        turns = self.together(*self.works.values(), box=_PASSES_SECONDS, least=2)
        for taken, more in zip(self.passes.values(), turns, strict=True):
            taken += more

    def _once(self, work: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if not self.on_cpu:
            torch.accelerator.synchronize(self.device)

    def kernels(self, precision: Precision) -> KernelRates:
        """`passes_seconds` is to come, when all looks have been taken."""
        dtype, points = DTYPES[precision], []
        for tokens, inner, outer in _SHAPES_CPU if self.on_cpu else _SHAPES:
            flops = 2.0 * tokens * inner * outer
            points.append((flops, 3 * flops / self.seconds(self._linear(dtype, tokens, inner, outer))))
        peak = max(rate for _, rate in points)
        attention = self._attention(dtype)
        shares = tuple((flops, rate / peak) for flops, rate in points)
        small, large = self._stream(dtype, _FEW_CPU if self.on_cpu else self.batch), 0.0
        if self.on_cpu:
            large = self._stream(dtype, _MANY_CPU)
        return KernelRates(peak, shares, attention, small, self._loss(dtype), large)

    def _passes(self, precision: Precision, *, sharded: bool = False) -> Callable[[], object]:
        """Of the reference model; `sharded`: by FSDP2."""

        def shard(module: LossModule) -> None:
            for block in cast(Llama, module.model).layers:
                fully_shard(block)
            fully_shard(module, reshard_after_forward=True)

        return reference_passes(self.device, precision, shard if sharded else None)

    def _linear(self, dtype: torch.dtype, tokens: int, inner: int, outer: int) -> Callable[[], object]:
        """Forward and backward: a CPU's matmuls are slower where an operand lies across."""
        left = torch.randn(tokens, inner, device=self.device, dtype=dtype, requires_grad=True)
        right = torch.randn(outer, inner, device=self.device, dtype=dtype, requires_grad=True)
        grad = torch.randn(tokens, outer, device=self.device, dtype=dtype)
        return lambda: torch.autograd.grad(F.linear(left, right), (left, right), grad)

    def _attention(self, dtype: torch.dtype) -> float:
        """FLOPs a second of the causal half, forward and backward (2.5 times the forward), as a block of ours
        calls it."""
        config = self.config
        heads_of = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        shapes = [(self.batch, self.seq_len, heads, config.head_dim) for heads in heads_of]
        q, k, v = (
            torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True) for shape in shapes
        )
        grad = torch.randn_like(q)

        def work() -> None:
            qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))
            y = causal_attention(qh, kh, vh)
            torch.autograd.grad(y.transpose(1, 2), (q, k, v), grad)

        flops = 2.0 * self.batch * config.num_heads * config.head_dim * self.seq_len**2
        return 3.5 * flops / self.seconds(work)

    def _stream(self, dtype: torch.dtype, batch: int) -> float:
        """What stands between the matmuls of a block of ours, forward and backward, by itself: less the
        matmuls a whole block would be a small difference of large numbers."""
        config, low = self.config, dtype != torch.float32
        norms = [RMSNorm(config.dim, config.norm_eps).to(self.device) for _ in range(2)]
        cos, sin = (table[: self.seq_len] for table in rope_tables(config, self.device))

        def randn(*channels: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            shape = (batch, self.seq_len, *channels)
            return torch.randn(shape, device=self.device, dtype=dtype, requires_grad=True)

        streams = [randn(config.dim, dtype=torch.float32) for _ in norms]
        added = [randn(config.dim) for _ in norms]
        turned = [randn(heads, config.head_dim) for heads in (config.num_heads, config.num_kv_heads)]
        gate, up = randn(config.ffn_dim), randn(config.ffn_dim)
        inputs = [*streams, *added, *turned, gate, up, *(norm.weight for norm in norms)]
        grads: list[torch.Tensor] = []

        def work() -> None:
            with torch.autocast(self.device.type, dtype, enabled=low):
                first, second = (norm(x) for norm, x in zip(norms, streams, strict=True))
            sums = [x + y for x, y in zip(streams, added, strict=True)]
            rotated = [rotate(x, cos, sin) for x in turned]
            outputs = [*3 * [first], *2 * [second], *sums, *rotated, F.silu(gate) * up]  # q k v, gate up
            if not grads:
                grads.extend(torch.randn_like(x) for x in outputs)
            torch.autograd.grad(outputs, inputs, grads)

        kv_dim = config.num_kv_heads * config.head_dim
        num_bytes = 3.0 * batch * self.seq_len * traffic_block(config.dim, kv_dim, config.ffn_dim)
        return num_bytes / self.seconds(work)

    def _loss(self, dtype: torch.dtype) -> float:
        vocab = self.config.vocab_size
        logits = torch.randn(self.tokens, vocab, device=self.device, dtype=dtype, requires_grad=True)
        targets = torch.randint(vocab, (self.tokens,), device=self.device)

        def work() -> None:
            cross_entropy_sum(logits[None], targets[None])[0].backward()
            logits.grad = None

        width = dtype.itemsize
        return self.tokens * vocab * (2 * width + 12) / self.seconds(work)

    def memory(self) -> float:
        x, y = (torch.randn(2**24 if self.on_cpu else 2**26, device=self.device) for _ in range(2))
        return 3.0 * x.nbytes / self.seconds(lambda: torch.mul(x, y, out=y))

    def update(self) -> float:
        """Norm, scale and fused AdamW over 16M parameters, more than a cache holds."""
        tensors = [torch.randn(2**22, device=self.device) for _ in range(4)]
        grads, means, squares = ([torch.zeros_like(tensor) for tensor in tensors] for _ in range(3))
        count = torch.ones((), device=self.device)

        def work() -> None:
            torch._foreach_norm(grads)
            torch._foreach_mul_(grads, 0.5)
            torch._fused_adamw_(
                tensors,
                grads,
                means,
                squares,
                [],
                [count] * 4,
                lr=1e-9,
                beta1=0.9,
                beta2=0.95,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )

        return traffic_bytes(8) * 4 * 2.0**22 / self.seconds(work)  # AdamW's two moments

    def kernel(self) -> float:
        """Of one small operator, forward and backward (which is two): the CPU's part."""
        x = torch.ones(64, device=self.device, requires_grad=True)

        def work() -> None:
            y = x
            for _ in range(50):
                y = y * 1.0001
            y.sum().backward()

        return self.seconds(work) / 150

    def collective(self) -> tuple[float, float]:
        """Bytes a second of a ring's links, and what a call costs."""
        ranks = dist.get_world_size()
        if ranks == 1:
            return 0.0, 0.0
        group: Any = None if self.on_cpu else dist.new_group(backend="nccl")
        tiny = torch.ones(1, device=self.device)
        big = torch.ones(_COLLECTIVE_BYTES // 4, device=self.device)
        works = [partial(dist.all_reduce, tensor, group=group) for tensor in (tiny, big)]
        call, whole = map(median, self.together(*works))
        moved = 2 * (ranks - 1) / ranks * _COLLECTIVE_BYTES
        return moved / max(whole - call, 0.1 * whole), call / 2  # an all-reduce counts as two halves

    def sharding(self) -> tuple[float, float]:
        """Bytes a second of gathering a block's weights and of scattering its gradients as FSDP2 does on a
        CPU, with all copies, into new memory: of a few MiB in tensors like a block's. On a GPU, where this
        runs beside computing, 0."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if ranks == 1 or not self.on_cpu:
            return 0.0, 0.0
        numbers = [size // ranks for size in _SHARDED]
        shards = [torch.randn(number) for number in numbers]
        grads = [torch.randn(ranks, number) for number in numbers]
        share = sum(numbers)

        def gather() -> None:
            flat = torch.empty(ranks * share)
            own = flat[rank * share :][:share]
            torch._foreach_copy_(own.split(numbers), shards)
            dist.all_gather_into_tensor(flat, own)
            whole = [torch.empty(ranks, number) for number in numbers]
            torch.split_with_sizes_copy(flat.view(ranks, -1), numbers, dim=1, out=whole)

        def scatter() -> None:
            flat = torch._chunk_cat(grads, 0, ranks).view(-1)
            dist.reduce_scatter_tensor(torch.empty(share), flat, op=dist.ReduceOp.AVG)

        num_bytes = 4 * ranks * share
        gathered, scattered = map(median, self.together(gather, scatter))
        # In a training each of them waits for the slowest rank's block, too.
        pairs = zip(self.passes["sharded"], self.passes["fp32"], strict=True)
        more = median(sharded - whole for sharded, whole in pairs)
        expected = 4 * REFERENCE["cpu"].parameters.total / num_bytes * (2 * gathered + scattered)
        slower = max(1.0, more / expected)
        return num_bytes / (slower * gathered), num_bytes / (slower * scattered)

    def new_tensor(self) -> float:
        """Seconds that a tensor of a few MiB costs more where malloc maps it anew, all ranks at once; of a
        GPU 0. In a process of its own: malloc's settings come with the environment."""
        if not self.on_cpu:
            return 0.0
        dist.barrier()
        ours = glibc.environment(trimming=False)  # this process's own: a heap of huge pages would serve both
        env = {k: v for k, v in os.environ.items() if k not in ours} | glibc.environment(trimming=True)
        argv = [sys.executable, "-I", "-c", _NEW_TENSOR]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
        return max(0.0, float(done.stdout))

    def store(self, url: str) -> float:
        store, key = open_store(url), f"calibration/{uuid4().hex}"
        start = time.perf_counter()
        store.put(key, bytes(_STORE_BYTES))
        taken = time.perf_counter() - start
        store.delete([key])
        return _STORE_BYTES / taken


def measure(store_url: str) -> Measured:
    """All figures of this number of ranks; those of the store are rank 0's."""
    bench = Bench()
    link, call = bench.collective()
    bench.look()
    kernels: dict[str, KernelRates] = {}
    for precision in bench.precisions:
        kernels[precision] = bench.kernels(precision)
        bench.look()
    for name, rates in kernels.items():
        kernels[name] = replace(rates, passes_seconds=median(bench.passes[name]))
    gathered, scattered = bench.sharding()
    return Measured(
        kernels=kernels,
        memory_bytes_per_second=bench.memory(),
        update_bytes_per_second=bench.update(),
        kernel_seconds=bench.kernel(),
        link_bytes_per_second=link,
        collective_seconds=call,
        store_bytes_per_second=bench.store(store_url) if dist.get_rank() == 0 else 0.0,
        gather_bytes_per_second=gathered,
        scatter_bytes_per_second=scattered,
        new_tensor_seconds=bench.new_tensor(),
    )


def main() -> None:
    die_with_parent(os.getppid())  # `mlpipe calibrate` kills a torchrun that takes too long
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    measured = measure(sys.argv[2])
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(to_json(measured))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort an interpreter that ends by itself once in about fifty


if __name__ == "__main__":
    main()
