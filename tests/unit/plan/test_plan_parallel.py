"""Axes whose ranks share samples: what each rank has of the model, what it sends, and over which links."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe._core.presets import PRESETS, MoeConfig
from mlpipe.plan.axes import dp_replicate, dp_shard, ep, pp, tp
from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import GPUS, Hardware
from mlpipe.plan.kernels import copy_seconds
from mlpipe.plan.memory import MemoryEstimate, rank_tensors
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.pricing import Choices, Pricer, Training
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.experts import Experts
from mlpipe.plan.shapes.shape import ParameterCounts, Part, StepShape
from mlpipe.plan.tensors import total
from mlpipe.plan.time import passes
from mlpipe.plan.wire import Wire

pytestmark = pytest.mark.unit
SHAPE = Dense(PRESETS["llama-8b"])


def gpus(num_nodes: int = 1, per_node: int = 8) -> Hardware:
    gpu = GPUS["H100-80GB"]
    return Hardware(
        "cuda", num_nodes, per_node, gpu.memory_bytes, "H100", gpu.speed.peak_flops, 96, gpu.speed
    )


def price(
    mesh: Mesh, *, batch: int = 64, seq_len: int = 8192, hardware: Hardware | None = None, micro: int = 1
) -> Candidate:
    training = Training(batch, seq_len, 1000, False, OptimizerCost(8), 1000, None)
    hardware = hardware or gpus(max(1, mesh.world_size // 8))
    strategy = "fsdp" if mesh.dp_shard > 1 else "ddp"
    pricer = Pricer(SHAPE, training, hardware)
    return pricer.candidate(strategy, mesh, Choices(micro, "none", "bf16"), asked=True)


def counted(parameters: ParameterCounts) -> int:
    return sum(rows * columns * number for rows, columns, number in parameters.tensors)


@given(st.sampled_from(sorted(PRESETS)), st.sampled_from([1, 2, 4]), st.integers(1, 4))
def test_the_parts_of_a_model_are_the_whole(preset: str, tp: int, stages: int) -> None:
    """Each matrix once; vectors on every rank of `tp`; a tied matrix in the first stage and in the last."""
    config = PRESETS[preset]
    whole = Dense(config).parameters
    if config.vocab_size % tp or config.num_kv_heads % tp or stages > config.num_layers:
        return
    blocks = [config.num_layers // stages + (n < config.num_layers % stages) for n in range(stages)]
    parts = [
        whole.of(Part(tp=tp, num_blocks=number, is_first=n == 0, is_last=n == stages - 1))
        for n, number in enumerate(blocks)
    ]
    vectors = config.dim * (2 * config.num_layers + 1)
    twice = config.num_embedding_params() if config.tied and stages > 1 else 0
    assert all(part.total == counted(part) for part in parts)
    assert tp * sum(part.total for part in parts) == whole.total + (tp - 1) * vectors + twice
    assert sum(part.num_blocks for part in parts) == config.num_layers


def test_tensor_parallelism_divides_all_activations_but_what_every_product_reads() -> None:
    """Of a token of a block in bf16: 4 bytes of each norm's input, q and what attention gives, k and v, and
    four of the MLP's are split; both norms' outputs, 2 bytes a channel, are whole."""
    config = SHAPE.config
    step = StepShape(8192, 1, 1, "bf16", "none", compiled=False)
    alone, split = (SHAPE.activations(step._replace(part=Part(tp=tp)), "cuda") for tp in (1, 4))
    whole = 8192 * (config.num_layers * 2 + 1) * 2 * config.dim
    assert total(split.saved) == (total(alone.saved) - whole) // 4 + whole
    assert split.backward_bytes == alone.backward_bytes // 4
    logits = 8192 * config.vocab_size * 4
    assert alone.logit_bytes - split.logit_bytes == pytest.approx(logits * 3 / 4, rel=0.2)


@given(st.sampled_from(["llama-8b", "llama-8m", "llama-125m"]), st.sampled_from([1, 2, 4]), st.booleans())
def test_an_embedding_as_large_as_a_matrix_of_a_block_is_none(name: str, tp: int, tied: bool) -> None:
    """Of a vocabulary of as many tokens as the feed-forward has channels."""
    config = dataclasses.replace(PRESETS[name], tied=tied)
    config = dataclasses.replace(config, vocab_size=config.ffn_dim)
    part = Dense(config).parameters.of(Part(tp=tp))
    embeddings = config.num_embedding_params() * (1 if tied else 2) // tp
    assert part.outside == embeddings + config.dim
    assert part.total == counted(part)


def test_each_microbatch_of_a_pipeline_keeps_what_is_cast_for_it() -> None:
    """In bf16 without recomputation, of 8 stages of 4 blocks with 8 microbatches: the first rank holds all 8
    with their copies of its blocks' weights. FSDP casts once, recomputation again; so neither keeps them."""
    config = SHAPE.config
    block = 2 * 4 * (config.num_layer_params() - 2 * config.dim)

    def held(mesh: Mesh, mode: str, precision: str) -> int:
        part = Part(num_blocks=4, is_last=False)
        step = StepShape(8192, 1, 8, precision, mode, compiled=False, part=part)
        work = RankWork(
            SHAPE.parameters.of(part),
            SHAPE.activations(step, "cuda"),
            step,
            Layout(mesh),
            OptimizerCost(8),
            True,
        )
        return rank_tensors(work).activation_bytes

    def saved(mode: str, precision: str) -> int:
        part = Part(num_blocks=4, is_last=False)
        made = SHAPE.activations(StepShape(8192, 1, 8, precision, mode, False, part), "cuda")
        return total(made.saved)

    alone, sharded = Mesh(pp=8), Mesh(pp=8, dp_shard=2)
    once = held(Mesh(), "none", "bf16")
    copies = held(alone, "none", "bf16") - once - 7 * saved("none", "bf16")
    assert copies == pytest.approx(7 * block, rel=1e-3)
    assert held(sharded, "none", "bf16") == once + 7 * saved("none", "bf16")
    assert held(alone, "full", "bf16") == held(sharded, "full", "bf16")
    assert held(alone, "none", "fp32") == held(sharded, "none", "fp32")


def test_a_pipeline_waits_for_the_collectives_of_its_stages_too() -> None:
    """Stages of two ranks: while the first microbatch comes and the last one goes, as often as a stage is
    idle; what is sent is each rank's share. The embedding is one stage's, the head another's."""
    hardware = gpus(2)
    wire = Wire(hardware)

    def seconds(mesh: Mesh, part: Part) -> tuple[Passes, float, float]:
        step = StepShape(8192, 1, 8, "bf16", "none", False, part)
        each = passes(SHAPE, step, hardware)
        layout = Layout(mesh)
        return each, pp.exposed_seconds(each, wire, layout), tp.exposed_seconds(each, wire, layout)

    split = Part(tp=2, num_blocks=16, is_last=False)
    each, idle, collectives = seconds(Mesh(pp=2, tp=2, dp_shard=4), split)
    assert tp.num_collectives(each) == (4 * 16 + 1, 4 * 16 + 1)
    last = seconds(Mesh(pp=2, tp=2, dp_shard=4), Part(tp=2, num_blocks=16, is_first=False))
    assert tp.num_collectives(last[0]) == (4 * 16 + 1, 4 * 16 + 1)
    sent = wire.send(8192 * 4096 * 4 // 2, 8)
    assert idle == pytest.approx(each.forward + each.backward + collectives / 8 + 2 * sent)
    routed = each._replace(routed_bytes=2**20)
    layout = Layout(Mesh(pp=2, tp=2, dp_shard=4, ep=4))
    exchanges = ep.exposed_seconds(routed, wire, layout)
    assert pp.exposed_seconds(routed, wire, layout) == pytest.approx(idle + exchanges / 8)


def test_a_stage_keeps_what_it_has_sent() -> None:
    """8,192 tokens of 4,096 channels in fp32, until its backward pass."""
    config = SHAPE.config
    sent, last = (
        total(SHAPE.activations(StepShape(8192, 1, 1, "bf16", "full", False, part), "cuda").saved)
        for part in (Part(num_blocks=4, is_last=False), Part(num_blocks=4, is_first=False))
    )
    assert sent == 8192 * 4 * config.dim * (4 + 1)
    assert last == 8192 * config.dim * (4 * 4 + 4 + 2)


def test_context_parallelism_divides_all_activations() -> None:
    step = StepShape(8192, 1, 1, "bf16", "none", compiled=False)
    alone, split = (SHAPE.activations(step._replace(part=Part(cp=cp)), "cuda") for cp in (1, 4))
    assert total(split.saved) == total(alone.saved) // 4


def test_ranks_of_a_context_group_share_the_sharding_of_weights() -> None:
    split, sharded = price(Mesh(dp_shard=2, cp=4)).memory, price(Mesh(dp_shard=8)).memory
    assert split is not None
    assert sharded is not None
    assert (split.parameters, split.optimizer) == (sharded.parameters, sharded.optimizer)
    whole, copies = price(Mesh(cp=8)).memory, price(Mesh(dp_replicate=8)).memory
    assert whole is not None
    assert copies is not None
    assert whole.optimizer == copies.optimizer


def test_tensor_parallelism_is_for_the_links_inside_a_node() -> None:
    """The same collectives over the network take many times as long; of 8 ranks in a node none does."""
    inside, across = price(Mesh(tp=8)), price(Mesh(tp=8), hardware=gpus(8, 1))
    assert inside.seconds is not None
    assert across.seconds is not None
    assert across.seconds.communication > 5 * inside.seconds.communication
    assert across.seconds.compute == pytest.approx(inside.seconds.compute)


def test_what_is_for_other_nodes_leaves_by_a_port_of_its_own() -> None:
    """A GiB in all of 16 ranks on two nodes: each sends half of its 64 MiB to the other node."""
    gpu, wire = GPUS["H100-80GB"], Wire(gpus(2))
    least = 2**26 / 2 / (0.8 * gpu.speed.network_bytes_per_second)
    assert wire.all_to_all(2**30, 16) == pytest.approx(least)
    assert wire.all_to_all(2**30, 8) < 2**27 / (0.8 * gpu.speed.link_bytes_per_second) + 1e-4
    assert wire.all_to_all(2**30, 2, stride=8) >= 2**29 / 2 / (0.8 * gpu.speed.network_bytes_per_second)


def test_a_ring_waits_for_its_slowest_hop() -> None:
    """A MiB within a node of 8, and where one of 16 leaves it by its own port, with `tp` between."""
    gpu, wire = GPUS["H100-80GB"], Wire(gpus(2))
    for num_ranks, stride in ((8, 1), (4, 2)):
        assert wire.hop(2**20, num_ranks, stride) == wire.send(2**20, 1)
    slow = 2**20 / (0.8 * gpu.speed.network_bytes_per_second)
    for num_ranks, stride in ((16, 1), (8, 2)):
        assert slow < wire.hop(2**20, num_ranks, stride) < slow + 3e-5


@given(
    st.sampled_from([2, 4, 8]),
    st.sampled_from([2**15, 2**17, 2**19]),
    st.integers(20, 90),
    st.sampled_from(["none", "selective", "full"]),
)
def test_the_cheaper_way_to_exchange_keys_and_values_is_chosen(
    cp: int, seq_len: int, gib: int, mode: str
) -> None:
    """Of two that fit the faster by more than 5 % is never left for the other; what fits is taken."""
    hardware = gpus()._replace(memory_bytes=gib * 2**30)
    training = Training(8 // cp, seq_len, 1000, False, OptimizerCost(8), 1000, None)
    choices, mesh = Choices(1, mode, "bf16"), Mesh(dp_shard=8 // cp, cp=cp)

    def candidate(way: Any) -> Candidate:
        asked = training._replace(context_exchange=way)
        return Pricer(SHAPE, asked, hardware).candidate("fsdp", mesh, choices, asked=True)

    found, ways = candidate("auto"), [candidate(way) for way in ("all_gather", "ring")]
    assert [way.context_exchange for way in ways] == ["all_gather", "ring"]
    assert found in ways
    assert found.fits == any(way.fits for way in ways)
    fitting = [way.step_seconds for way in ways if way.fits]
    assert found.step_seconds <= 1.05 * min(fitting, default=math.inf)


def test_a_ring_is_chosen_where_what_is_gathered_does_not_fit() -> None:
    """Of llama-8b with a million tokens, cp 16: 12 GiB of keys, values and gradients, or 7 of 16 parts of 4.
    Of 8,192 tokens on 8 ranks they are gathered: rounds would be too short for what they send."""
    training, mesh = Training(2, 2**20, 1000, False, OptimizerCost(8), 1000, None), Mesh(dp_shard=2, cp=16)

    def candidate(way: Any, hardware: Hardware) -> Candidate:
        asked = training._replace(context_exchange=way)
        choices = Choices(1, "full", "bf16")
        return Pricer(SHAPE, asked, hardware).candidate("fsdp", mesh, choices, asked=True)

    needs = [candidate(way, gpus(4)).memory for way in ("all_gather", "ring")]
    gathered, ring = (one.total for one in needs if one is not None)
    kv_bytes = 2 * 2 * 2**20 * 8 * 128
    between = gpus(4)._replace(memory_bytes=(gathered + ring) // 2)
    assert gathered - ring > 2 * kv_bytes
    assert candidate("auto", between).fits
    assert candidate("auto", between).context_exchange == "ring"
    roomy = gpus()._replace(memory_bytes=2**40)
    assert price(Mesh(cp=8), hardware=roomy).context_exchange == "all_gather"


def test_updated_slices_are_gathered_from_those_that_have_them() -> None:
    """Ranks of a context group update the same ones (`train/parallel/shard_optimizer.py`), here a node's."""
    wire, passes = Wire(gpus(2, 4)), _passes()
    layout = Layout(Mesh(dp_replicate=2, cp=4), shard_optimizer=True)
    plain = layout._replace(shard_optimizer=False)
    gathering = dp_replicate.exposed_seconds(passes, wire, layout)
    gathering -= dp_replicate.exposed_seconds(passes, wire, plain)
    num_bytes = 4 * passes.num_trained_params
    copies = copy_seconds(2 * num_bytes, wire.hardware.speed)
    assert gathering == pytest.approx(wire.all_gather(num_bytes, 2, 4) + copies)


def _passes() -> Passes:
    step = StepShape(8192, 1, 1, "bf16", "none", compiled=False)
    return passes(SHAPE, step, gpus())


def test_collectives_of_tensor_parallelism_by_hand() -> None:
    """32 blocks, 8,192 tokens of 4,096 channels in bf16: 130 all-gathers and as many reduce-scatters a
    micro-batch, 7 of 8 parts of 64 MiB each (one of either of 128), at 0.8 of the link, with 7 steps of 3.4
    us and a call of 8.4 us."""
    found = price(Mesh(tp=8), batch=2)
    transfer = 2**26 * 7 / 8 / (0.8 * GPUS["H100-80GB"].link_bytes_per_second)
    once = 262 / 260 * transfer + 7 * 3.4e-6 + 8.4e-6
    assert found.seconds is not None
    assert found.seconds.communication == pytest.approx(2 * 260 * once, rel=1e-6)


def test_a_batch_is_divided_over_ranks_that_read_different_samples() -> None:
    """As many tokens in all, and as much to compute on each rank, but for what smaller products lose, and
    what adding up the gradients of more micro-batches takes."""
    meshes = [Mesh(dp_shard=8), Mesh(dp_shard=4, tp=2), Mesh(dp_shard=2, cp=2, tp=2)]
    found = [price(mesh, batch=16) for mesh in meshes]
    tokens = {round((c.tokens_per_second or 0) * c.step_seconds) for c in found}
    assert tokens == {16 * 8192}
    compute = [c.seconds.compute for c in found if c.seconds]
    assert max(compute) < 1.16 * min(compute)


def test_experts_are_gathered_by_who_has_the_same_ones() -> None:
    """Of moe-16b on two nodes of 8, a node has all experts: what a rank gathers of them comes from its twin
    in the other node. In one node of 8 nobody has the same ones, and nothing of them is gathered."""
    shape = Experts(cast(MoeConfig, PRESETS["moe-16b"]))
    config = shape.config
    for num_ranks in (8, 16):
        hardware = gpus(num_ranks // 8)._replace(device="cpu")  # where nothing is hidden
        wire, step = Wire(hardware), StepShape(4096, 1, 1, "bf16", "none", compiled=False)
        own = passes(shape, step, hardware)
        experts = 3 * config.num_experts * config.dim * config.ffn_dim
        assert own.expert_params == experts
        half = passes(shape, step._replace(part=Part(tp=2)), hardware)
        assert (half.routed_bytes, half.expert_params) == (own.routed_bytes // 2, experts // 2)
        free = own._replace(block_params=own.block_params - experts, expert_params=0, routed_bytes=0)
        layout = Layout(Mesh(dp_shard=num_ranks, ep=8))
        others = dp_shard.exposed_seconds(free, wire, Layout(Mesh(dp_shard=num_ranks)))
        more = dp_shard.exposed_seconds(own, wire, layout) - others
        if num_ranks == 8:
            assert more == pytest.approx(0, abs=1e-9)
            continue
        each = 2 * wire.all_gather(2 * experts / 8, 2, 8) + wire.reduce_scatter(4 * experts / 8, 2, 8)
        copied = copy_seconds(2 * config.num_layers * (2 * 2 + 4) * experts / 8, hardware.speed)
        assert more == pytest.approx(config.num_layers * each + copied)


def test_experts_that_nobody_shares_are_cast_for_the_backward_pass() -> None:
    """On two ranks half of moe-7b's stay cast in all 16 blocks, or of one that is computed again; without ep
    FSDP gathers two blocks' in bf16 and holds one's gradients twice. Of four ranks two share half of them."""
    shape = Experts(dataclasses.replace(cast(MoeConfig, PRESETS["moe-7b"]), vocab_size=64))
    experts = 3 * shape.config.num_experts * shape.config.dim * shape.config.ffn_dim

    def buffers(mode: str, mesh: Mesh) -> int:
        step = StepShape(1024, 1, 1, "bf16", mode, compiled=False)
        work = RankWork(
            shape.parameters,
            shape.activations(step, "cuda"),
            step,
            Layout(mesh),
            OptimizerCost(8),
            overlap=True,
            expert_params=experts,
        )
        return rank_tensors(work).buffers

    without = buffers("none", Mesh(dp_shard=2))
    assert buffers("none", Mesh(dp_shard=2, ep=2)) == without + (2 * 16 // 2 - 10) * experts
    assert buffers("full", Mesh(dp_shard=2, ep=2)) == without + (2 // 2 - 10) * experts
    for mesh in (Mesh(dp_shard=4, ep=2), Mesh(dp_replicate=2, dp_shard=2, ep=2)):
        assert buffers("none", mesh) == without - 10 * experts // 2


@given(
    st.sampled_from(["llama-8m", "llama-125m", "llama-8b"]),
    st.sampled_from(["tp", "dp_shard", "pp", "cp"]),
    st.sampled_from([1, 2]),
)
def test_more_ranks_along_an_axis_never_hold_more(preset: str, axis: str, size: int) -> None:
    """Of weights and moments (gradients stay whole where there is room); of activations with `tp`, `cp`."""
    shape = Dense(PRESETS[preset])
    training = Training(64, 1024, 1000, False, OptimizerCost(8), 1000, None)
    pricer, choices = Pricer(shape, training, gpus()), Choices(4, "none", "bf16")

    def needs(number: int) -> MemoryEstimate:
        mesh = Mesh(**{"dp_shard": 2, axis: number})
        memory = pricer.candidate("fsdp", mesh, choices, asked=True).memory
        assert memory is not None
        return memory

    fewer, more = needs(size), needs(2 * size)
    assert more.parameters <= fewer.parameters
    assert more.optimizer <= fewer.optimizer
    if axis in ("tp", "cp"):
        assert more.activations + more.logits <= fewer.activations + fewer.logits
