"""What allocators make of tensors, by hand."""

from __future__ import annotations

import pytest
from kit.shapes import rank_work

from mlpipe._core.presets import PRESETS
from mlpipe.plan import allocators
from mlpipe.plan.allocators import cuda, glibc, gloo
from mlpipe.plan.allocators.glibc import RETAINING_BYTES, TRIMMING_BYTES
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.memory import rank_tensors
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import ParameterCounts
from mlpipe.plan.tensors import Moment, Tensors, below

pytestmark = pytest.mark.unit
SIZES = Dense(PRESETS["llama-8m"]).parameters  # an embedding of 6 MiB; 4 layers of seven matrices, nine norms
CPU = Hardware("cpu", 1, 2, 4 * 2**30, "CPU worker", {}, 2)
SMALL = 4 * (4 * (2 * 384**2 + 2 * 128 * 384 + 3 * 1024 * 384) + 9 * 384)


def test_cuda_adds_a_context_and_what_lies_unused_in_segments() -> None:
    tensors = rank_tensors(rank_work(SIZES, saved=10**6))
    alone, among_others = cuda.reserve(tensors, 1), cuda.reserve(tensors, 2)
    assert (alone.context, alone.slack) == (2**30, int(0.08 * tensors.peak))
    assert (among_others.context, among_others.slack) == (2**30 + 3 * 2**29, alone.slack)
    assert alone.tensors == tensors
    for mesh in (Mesh(), Mesh(dp_shard=2)):
        assert allocators.reserve(tensors, "cuda", mesh, "full") == cuda.reserve(tensors, mesh.world_size)


GROW = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def gpus(name: str) -> Hardware:
    return Hardware("cuda", 1, 2, 80 * 2**30, name, {}, 16)


@pytest.mark.parametrize(
    ("mesh", "checkpointing", "why"),
    [
        (Mesh(dp_shard=2), "none", "gathered weights come and go"),
        (Mesh(pp=2), "none", "several micro-batches are held at once"),
        (Mesh(dp_replicate=2), "selective", "activations are recomputed"),
        (Mesh(dp_replicate=2), "none", None),
    ],
)
def test_segments_grow_where_sizes_change(mesh: Mesh, checkpointing: str, why: str | None) -> None:
    h100 = gpus("H100-80GB")
    ours = allocators.environment(h100, mesh, checkpointing)
    told = allocators.reason(h100, mesh, checkpointing, ours)
    other = allocators.other_environment(h100, mesh, checkpointing, ours)
    if why is None:
        assert (ours, other) == ({}, GROW)
        assert told == "The allocator is left as it is: its tensors have the same sizes in each step."
    else:
        assert (ours, other) == (GROW, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
        assert (
            f"(PYTORCH_ALLOC_CONF=expandable_segments:True): {why}. Its gaps are counted as without" in told
        )


def test_segments_are_left_alone_where_nobody_has_tried() -> None:
    h100, mi300x = gpus("H100-80GB"), gpus("MI300X")
    both = h100._replace(groups=(h100, gpus("A100-80GB")))
    assert allocators.environment(both, Mesh(dp_shard=2), "full") == GROW
    mixed = h100._replace(name="H100-80GB + MI300X", groups=(h100, mi300x))
    for hardware in (mi300x, gpus("H100-80GB 3g.40gb"), gpus("mine"), mixed):
        assert allocators.environment(hardware, Mesh(dp_shard=2), "full") == {}
        assert allocators.other_environment(hardware, Mesh(), "none", {}) == {}
        told = allocators.reason(hardware, Mesh(dp_shard=2), "full", {})
        assert told.endswith(f"on {hardware.name} nobody has tried segments that grow.")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_own_allocator_is_said_and_left(name: str) -> None:
    env = GROW | {name: "max_split_size_mb:128"}
    layout = gpus("H100-80GB"), Mesh(dp_shard=2), "none"
    assert allocators.reason(*layout, env) == (
        f"The allocator does as the stage's env says, {name}=max_split_size_mb:128."
    )
    assert allocators.other_environment(*layout, env) == {}


def test_a_heap_says_why_and_whose_it_is() -> None:
    for checkpointing, words in (("none", "huge pages"), ("full", "Tensors of 2.0 MiB and more")):
        env = allocators.environment(CPU, Mesh(), checkpointing)
        assert words in allocators.reason(CPU, Mesh(), checkpointing, env)
        other = allocators.other_environment(CPU, Mesh(), checkpointing, env)
        assert other["MALLOC_TRIM_THRESHOLD_"] != env["MALLOC_TRIM_THRESHOLD_"]
        changed = env | {"MALLOC_TRIM_THRESHOLD_": "1"}
        told = allocators.reason(CPU, Mesh(), checkpointing, changed)
        assert told == "Memory is kept as the stage's env says, MALLOC_TRIM_THRESHOLD_=1."


def test_a_trimming_heap_has_holes_of_all_that_is_in_it() -> None:
    def slack(strategy: str, mesh: Mesh, **more: object) -> int:
        tensors = rank_tensors(rank_work(SIZES, strategy, mesh, overlap=False, **more))  # type: ignore[arg-type]
        return glibc.reserve(tensors, trimming=True).slack

    one, two, replicas = Mesh(), Mesh(dp_shard=2), Mesh(dp_replicate=2)
    assert below(SIZES.sharded(1, 4), TRIMMING_BYTES) == SMALL
    assert slack("single", one, saved=1000) == int(0.6 * (3 * SMALL + 1000))
    assert slack("single", one, saved=TRIMMING_BYTES) == int(0.6 * 3 * SMALL)
    half = below(SIZES.sharded(2, 4), TRIMMING_BYTES)
    assert half == SMALL // 2
    assert slack("zero1", replicas) == int(0.6 * (SMALL + 2 * half))
    assert slack("fsdp", two) == int(0.6 * (3 * half + SMALL))
    assert slack("fsdp", two, accumulation=2) == int(0.6 * (3 * half + SMALL + SMALL))
    low = below(SIZES.sharded(1, 2), TRIMMING_BYTES)
    assert slack("single", one, precision="bf16") == int(0.6 * (3 * SMALL + low))
    assert glibc.reserve(rank_tensors(rank_work(SIZES)), trimming=True).context == 2 * 2**30 // 5


def test_a_retaining_heap_has_holes_of_activations_only() -> None:
    """States come first and leave none."""
    for strategy, mesh in (("single", Mesh()), ("zero1", Mesh(dp_replicate=2))):
        tensors = rank_tensors(rank_work(SIZES, strategy, mesh, saved=5000, overlap=False))  # type: ignore[arg-type]
        assert allocators.reserve(tensors, "cpu", mesh, "none").slack == 2100
    large = rank_tensors(rank_work(SIZES, saved=RETAINING_BYTES))
    assert glibc.reserve(large, trimming=False).slack == 0


def test_a_heap_trims_where_the_plan_saves_memory() -> None:
    assert not glibc.is_trimming(Mesh(dp_replicate=4), "none")
    assert glibc.is_trimming(Mesh(dp_shard=2), "none")
    assert glibc.is_trimming(Mesh(), "full")
    assert allocators.environment(CPU, Mesh(), "selective") == {
        "THP_MEM_ALLOC_ENABLE": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
    }
    assert allocators.environment(CPU, Mesh(dp_replicate=2), "none") == {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "MALLOC_MMAP_THRESHOLD_": str(16 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(2**30),
    }


def test_a_tensor_of_the_threshold_lies_outside_the_heap() -> None:
    def small(rows: int, num_ranks: int = 1, width: int = 4) -> int:
        sizes = ParameterCounts(0, 0, 0, 0, ((rows, 2**10, 3),))
        return below(sizes.sharded(num_ranks, width), TRIMMING_BYTES)

    rows = TRIMMING_BYTES // (4 * 2**10)
    assert small(rows) == 0
    assert small(rows - 1) == 3 * 4 * 2**10 * (rows - 1)
    assert small(rows, 2) == 3 * TRIMMING_BYTES // 2
    assert small(5, 2) == 3 * 4 * 2**10 * 3  # whole rows
    assert small(2 * rows, width=2) == 0
    assert small(rows, width=2) == 3 * TRIMMING_BYTES // 2
    made = (Tensors(2 * TRIMMING_BYTES, 2), Tensors(2 * TRIMMING_BYTES - 1, 2), Tensors(TRIMMING_BYTES, 1))
    assert glibc.num_mapped(made) == 3


def test_gloo_clones_what_it_scatters_and_gathers() -> None:
    tensors = rank_tensors(rank_work(SIZES))
    moments = (Moment(100), Moment(90, reduce_scattered=30), Moment(80, all_gathered=25))
    cloned = gloo.with_clones(type(tensors)(**{**tensors._asdict(), "moments": moments, "buffers": 7}))
    assert [moment.alive for moment in cloned.moments] == [100, 120, 105]
    assert cloned.buffers == 7 + 30
