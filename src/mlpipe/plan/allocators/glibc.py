"""glibc's malloc, which serves a CPU's tensors. The larger ones are mapped each by itself and go back when
they die; the others lie in a heap, where they leave holes: a tensor of the same size, aligned anew, seldom
fits one (fragmentation).

A retaining heap keeps all but the largest tensors, in huge pages, and never gives them back: a step of a 21M
GPT has a hundredth of the default's page faults. A trimming heap gives back tensors of a few MiB when they
die. It serves plans that trade time for memory themselves (they shard weights or recompute activations):
FSDP's short-lived buffers leave holes as large as the model in a heap, and recomputation would save a quarter
of what it does (915 to 871 MiB, instead of 747). It costs up to a third (llama-8m, one rank, full
recomputation)."""

from __future__ import annotations

from collections.abc import Mapping

from mlpipe._core.units import format_bytes
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.tensors import Group, RankTensors, Reserved, below

# What the kernel cannot take back; the resident set of torch 2.15 shows 0.3 GiB of library pages more.
_CONTEXT_BYTES = 2 * 2**30 // 5
# Tensors of so many bytes and more are mapped, and the holes that smaller ones leave, as a share of their
# bytes. In a retaining heap, of the activations, 0.31 to 0.48 after eight steps of benchmarks/planner's
# configurations: states come first and leave none. In a trimming one of all that is in it; they grow over the
# first steps: 0.2 to 0.6 after four, 0.5 to 1 after eight.
RETAINING_BYTES, _RETAINING_HOLES = 16 * 2**20, 0.42
TRIMMING_BYTES, _TRIMMING_HOLES = 2 * 2**20, 0.6


def is_trimming(mesh: Mesh, checkpointing: str) -> bool:
    """Whether the plan itself trades time for memory, so that malloc should, too."""
    return mesh.dp_shard > 1 or checkpointing != "none"


def reserve(tensors: RankTensors, *, trimming: bool) -> Reserved:
    """Resident bytes of the process."""
    if trimming:
        # the holes of copies that were gathered stay, though these are not alive at once; gradients lie in
        # DDP's buckets, or take the place of activations
        groups = (tensors.parameters, tensors.optimizer, tensors.unsent, tensors.copies)
        in_heap = sum(below(group, TRIMMING_BYTES) for group in (*groups, tensors.saved, tensors.rebuilt))
        holes = int(_TRIMMING_HOLES * in_heap)
    else:
        holes = int(_RETAINING_HOLES * below(tensors.saved, RETAINING_BYTES))
    return Reserved(tensors, _CONTEXT_BYTES, holes)


def environment(*, trimming: bool) -> dict[str, str]:
    """The settings of these heaps."""
    if trimming:
        # torch asks for huge pages in what is large
        return {"THP_MEM_ALLOC_ENABLE": "1"} | _thresholds(TRIMMING_BYTES, 64 * 2**20)
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | _thresholds(RETAINING_BYTES, 2**30)


def reason(env: Mapping[str, str], *, trimming: bool) -> str:
    """Of the settings, and which of them are the user's."""
    ours = environment(trimming=trimming)
    owned = [f"{name}={env[name]}" for name, value in ours.items() if env.get(name, value) != value]
    if owned:
        return f"Memory is kept as the stage's env says, {', '.join(owned)}."
    if trimming:
        return (
            f"Tensors of {format_bytes(TRIMMING_BYTES)} and more are given back as they die, which takes "
            "time: the plan shards or recomputes, and saves memory so itself."
        )
    return "Memory is kept in a heap of huge pages from step to step: nothing is sharded or recomputed."


def _thresholds(mmap: int, trim: int) -> dict[str, str]:
    """Given, they stay: glibc's own move, up to 32 MiB."""
    return {"MALLOC_MMAP_THRESHOLD_": str(mmap), "MALLOC_TRIM_THRESHOLD_": str(trim)}


def num_mapped(made: Group) -> int:
    """Tensors that a trimming heap maps anew."""
    return sum(tensors.number for tensors in made if not tensors.is_below(TRIMMING_BYTES))
