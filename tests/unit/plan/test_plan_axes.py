"""What each axis sends and holds, collective by collective: a wire on which a byte takes a second, and a call
one more."""

from __future__ import annotations

from typing import Any, cast

import pytest
from kit.shapes import rank_work

from mlpipe._core.pipelines import Schedule
from mlpipe.plan.axes import active, cp, dp_replicate, ep, pp, tp
from mlpipe.plan.axes.axis import Exchanged, Layout, Passes
from mlpipe.plan.hardware import GPUS, Hardware
from mlpipe.plan.memory import rank_tensors
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.shapes.shape import ParameterCounts, Part
from mlpipe.plan.wire import Wire

pytestmark = pytest.mark.unit
PASSES = Passes(
    num_blocks=5, forward_block=1.0, backward_block=2.0, forward_outside=0.5, backward_outside=0.5,
    accumulation=3, block_params=10, outside_params=20, width=2, overlap=True,
)  # fmt: skip
PARAMETERS = ParameterCounts(total=70, block=10, outside=20, num_blocks=5, tensors=((10, 1, 5), (20, 1, 1)))


class Slow:
    """As `Wire`; `seen`: number of ranks and stride of each call."""

    def __init__(self) -> None:
        gpu = GPUS["H100-80GB"]
        self.hardware = Hardware("cuda", 2, 4, gpu.memory_bytes, "H100", gpu.speed.peak_flops, 96, gpu.speed)
        self.seen: set[tuple[int, int]] = set()

    def __getattr__(self, name: str) -> Any:
        def collective(num_bytes: float, num_ranks: int, stride: int = 1) -> float:
            self.seen.add((num_ranks, stride))
            return 1 + num_bytes

        return collective

    def over(self, num_ranks: int) -> Slow:
        return self

    def beside(self, seconds: float, computing: float) -> tuple[float, float]:
        return max(0.0, seconds - computing), 0.0


def exposed(axis: Any, mesh: Mesh, passes: Passes, **flags: Any) -> tuple[float, set[tuple[int, int]]]:
    wire = Slow()
    return axis.exposed_seconds(passes, cast(Wire, wire), Layout(mesh, **flags)), wire.seen


@pytest.mark.parametrize(
    ("recomputes", "keeps_attention", "gathers"), [(False, False, 2), (True, False, 3), (True, True, 2)]
)
def test_keys_and_values_are_gathered_for_each_pass_of_attention(
    recomputes: bool, keeps_attention: bool, gathers: int
) -> None:
    passes = PASSES._replace(kv_bytes=7, recomputes=recomputes, keeps_attention=keeps_attention)
    seconds, seen = exposed(cp, Mesh(cp=4, tp=2), passes)
    assert seconds == 3 * 5 * (gathers * (1 + 7) + 1 + 4 * 7)
    exact, _ = exposed(cp, Mesh(cp=4, tp=2), passes._replace(exact_sums=True))  # gradients in fp32
    assert exact == seconds + 3 * 5 * 4 * 7
    assert seen == {(4, 2)}


def test_keys_and_values_of_whole_sequences_are_alive_three_times() -> None:
    """With their gradients, and those of one chunk."""
    work = rank_work(PARAMETERS, mesh=Mesh(cp=4), saved=50)._replace(kv_bytes=7)
    before = rank_tensors(work._replace(kv_bytes=0))
    assert cp.divide(before, work).peak == before.peak + 21


@pytest.mark.parametrize(("recomputes", "forwards"), [(False, 1), (True, 2)])
def test_keys_and_values_of_a_ring_travel_beside_attention(recomputes: bool, forwards: int) -> None:
    """Of 4 ranks three hops a pass, and as many of gradients, of which the last has nothing beside it. Of a
    round's computing, a fourth of attention, the backward pass has 2.5 times as much."""
    passes = PASSES._replace(kv_bytes=8, recomputes=recomputes)
    hop = 1 + 8 / 4

    def shown(seconds: float, **changes: Any) -> float:
        given = passes._replace(attention_seconds=seconds, **changes)
        found, seen = exposed(cp, Mesh(cp=4, tp=2), given, context_exchange="ring")
        assert seen == {(4, 2)}
        return found / (3 * 5)

    assert shown(0.0) == forwards * 3 * hop + (hop + 2 * 2 * hop + hop)
    assert shown(1e9, overlap=False) == shown(0.0)
    assert shown(4.0) == forwards * 3 * (hop - 1) + (hop - 2.5) + 2 * (2 * hop - 2.5) + hop
    assert shown(1e9) == hop
    merged = shown(1e9, query_bytes=10**9) - hop  # 18 bytes a number and pass, in the backward one 8 and it
    rate = 0.8 * GPUS["H100-80GB"].speed.memory_bytes_per_second
    assert merged == pytest.approx(3 * (forwards * 18 + 10) * 10**9 / 2 / rate)


@pytest.mark.parametrize(("precision", "parts"), [("fp32", 6), ("bf16", 7)])
def test_a_ring_holds_what_a_few_ranks_have_of_keys_and_values(precision: str, parts: int) -> None:
    """Two of keys and values, three of their gradients, and sums in fp32."""
    work = rank_work(PARAMETERS, mesh=Mesh(cp=4), saved=50)
    layout, step = work.layout._replace(context_exchange="ring"), work.step._replace(precision=precision)
    before = rank_tensors(work._replace(step=step))
    work = work._replace(layout=layout, step=step, kv_bytes=8)
    assert cp.divide(before, work).peak == before.peak + parts * 8 / 4


@pytest.mark.parametrize(("recomputes", "rows", "counts"), [(False, 4, 1), (True, 6, 2)])
def test_tokens_go_to_their_experts_and_back_in_every_pass(recomputes: bool, rows: int, counts: int) -> None:
    """Five all-to-alls a block, eight where the forward pass is computed again."""
    passes = PASSES._replace(routed_bytes=7, recomputes=recomputes)
    seconds, seen = exposed(ep, Mesh(dp_shard=4, ep=4, tp=2), passes)
    assert seconds == 3 * 5 * (rows * (1 + 4 * 7) + counts)
    assert seen == {(4, 2)}


def test_recomputation_gathers_and_scatters_again_but_for_what_nothing_needs() -> None:
    assert tp.num_collectives(PASSES) == (22, 22)
    assert tp.num_collectives(PASSES._replace(recomputes=True)) == (32, 27)
    exact = PASSES._replace(exact_sums=True, num_readers=5, stream_bytes=7)  # sums in fp32
    assert tp.num_collectives(exact) == (22, 22 + 5 * 3)
    assert exposed(tp, Mesh(tp=4), exact)[0] == 3 * (21 * (1 + 7) + 36 * (1 + 14) + 2 * (1 + 14))
    inner = PASSES._replace(is_first=False, is_last=False, stream_bytes=7)
    assert exposed(tp, Mesh(tp=4), inner) == (3 * 40 * (1 + 7), {(4, 1)})
    first = PASSES._replace(is_last=False, stream_bytes=7)  # the embedding's travel in fp32
    assert exposed(tp, Mesh(tp=4), first) == (3 * (40 * (1 + 7) + 2 * (1 + 14)), {(4, 1)})


def test_gradients_of_replicas_travel_beside_the_last_backward_pass_but_for_those_of_a_pipeline() -> None:
    long = PASSES._replace(backward_block=1e9)
    last = 1 + 4 * (5 * 10 + 20)
    assert exposed(dp_replicate, Mesh(dp_replicate=2), PASSES._replace(backward_block=0.0))[0] == last
    hidden, seen = exposed(dp_replicate, Mesh(dp_replicate=2, tp=2), long)
    assert (hidden, seen) == (last, {(2, 2)})  # all in one bucket, which nothing hides
    many = long._replace(block_params=10**8)
    hidden, _ = exposed(dp_replicate, Mesh(dp_replicate=2), many)
    assert hidden == 1 + 25 * 2**20
    whole, _ = exposed(dp_replicate, Mesh(dp_replicate=2, pp=2), many)
    assert whole == 1 + 4 * (5 * 10**8 + 20)


@pytest.mark.parametrize("hidden_ratio", [0.0, 0.5, 1.0])
def test_what_islands_send_hides_behind_as_many_steps_as_it_may_take(hidden_ratio: float) -> None:
    """Of three micro-batches, 16 s each; of islands that share weights, a share of what is sent."""
    exchanged = Exchanged(1000, 0.0, 0.0, hidden_ratio=hidden_ratio)
    wire = cast(Wire, Slow())
    alone = Layout(Mesh(dp_replicate=2), exchanged=exchanged)
    shown = dp_replicate.exposed_seconds(PASSES, wire, alone)
    assert shown == pytest.approx(1001 - hidden_ratio * 3 * 16)
    shares = Layout(Mesh(dp_replicate=2, dp_shard=4), exchanged=exchanged)
    left = 1001 / 4 - hidden_ratio * 3 * 16
    assert dp_replicate.exposed_seconds(PASSES, wire, shares) == pytest.approx(left)


def test_a_pipeline_holds_the_microbatches_that_are_under_way() -> None:
    """Of 4 ranks with 1F1B the first has 4: of each but one what is saved, and its logits' gradient."""
    work = rank_work(PARAMETERS, mesh=Mesh(pp=4), saved=50, logits=40, accumulation=8)
    before = rank_tensors(work._replace(layout=Layout(Mesh())))
    divided = pp.divide(before, work)
    assert divided.peak == before.peak + 3 * (50 + 20)
    assert divided.buffers == before.buffers  # nobody else has these weights
    replicas = work._replace(layout=Layout(Mesh(pp=4, dp_replicate=2)))
    assert pp.divide(before, replicas).buffers == before.buffers + 4 * 70  # all gradients, in one bucket
    shards = work._replace(layout=Layout(Mesh(pp=4, dp_replicate=2, dp_shard=2)))
    assert pp.divide(before, shards).buffers == before.buffers


def test_a_pipeline_holds_of_each_pass_what_is_left_of_it() -> None:
    """The last of 4 ranks: with zero_bubble one whole microbatch at its logits, 40, and of three what weights
    need, 30 each; with interleaved of five microbatches half, of one the logits, where it was begun with 50
    and 40. Of many that are recomputed, and then put off, the last but one has more than the second."""
    last = Part()._replace(is_first=False)

    def peak(schedule: Schedule, part: Part, put_off: int = 30) -> int:
        work = rank_work(PARAMETERS, mesh=Mesh(pp=4), saved=50, logits=40, accumulation=8)
        whole = rank_tensors(work._replace(layout=Layout(Mesh())))
        activations = work.activations._replace(put_off_bytes=put_off)
        layout, step = Layout(Mesh(pp=4), schedule=schedule), work.step._replace(part=part)
        work = work._replace(activations=activations, layout=layout, step=step)
        return pp.divide(whole, work).peak - whole.peak

    assert peak("zero_bubble", last) == 3 * 30
    assert peak("interleaved", last) == 2.5 * 50 + 40 - (50 + 40)
    assert peak("zero_bubble", Part(is_first=False, is_last=False), 70) == 2 * 50 + 2 * 70 - (50 + 40)
    assert peak("zero_bubble", Part(is_first=False, is_last=False, number=2), 70) == 50 + 3 * 70 - (50 + 40)


@pytest.mark.parametrize(("overlap", "number"), [(True, 3), (False, 16)])
def test_what_goes_from_stage_to_stage_travels_beside_computing_where_that_is_possible(
    overlap: bool, number: int
) -> None:
    """On a GPU all but what fills and drains the pipeline; else what a rank between two others sends and
    receives. In fp32, a share of each rank of `tp`."""
    idle = dict.fromkeys(("forward_block", "backward_block", "forward_outside", "backward_outside"), 0.0)
    passes = PASSES._replace(**idle, accumulation=8, overlap=overlap, stream_bytes=70)
    assert exposed(pp, Mesh(pp=4, dp_shard=2), passes) == (2 * number * (1 + 140), {(2, 1)})


def test_ranks_of_a_context_group_reduce_gradients_as_replicas_do_unless_they_are_sharded() -> None:
    assert active(Mesh(cp=4)) == (dp_replicate, cp)
    assert [axis.__name__.rpartition(".")[2] for axis in active(Mesh(cp=4, dp_shard=2))] == ["dp_shard", "cp"]
