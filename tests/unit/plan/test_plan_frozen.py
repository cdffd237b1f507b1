"""What is frozen has no gradients and no states, and is neither reduced nor updated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.shapes import rank_work

from mlpipe._core.errors import PlanError
from mlpipe._core.presets import PRESETS, LlamaConfig
from mlpipe.plan.axes import dp_replicate, dp_shard
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import GPUS, Hardware
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.memory import rank_tensors, saved_bytes
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.pricing import Choices, Pricer, Training, layout_of
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.frozen import Adapted, Frozen
from mlpipe.plan.shapes.shape import Part, StepShape
from mlpipe.plan.shapes.trained import without
from mlpipe.plan.tensors import total
from mlpipe.plan.time import passes
from mlpipe.plan.wire import Wire

pytestmark = pytest.mark.unit
# V 10, D 4, L 2, 2 query heads and 1 key/value head of 2 channels, F 6: 300 in all, 128 a block, 44 outside
TINY = Dense(LlamaConfig(10, 4, 2, 2, 1, 6, 8, 1e4, 1e-5, True))
SECOND = Frozen(TINY, ("embed*", "layers.0.*"))  # the second block and the last norm are left
_GPU = GPUS["H100-80GB"]
HARDWARE = Hardware("cuda", 1, 8, _GPU.memory_bytes, "H100-80GB", _GPU.speed.peak_flops, 96, _GPU.speed, None)
STEP = StepShape(128, 4, 1, "fp32", "none", compiled=False)


def test_by_hand() -> None:
    counts = SECOND.parameters
    assert (counts.total, counts.trained.total) == (300, 132)
    assert (counts.trained.block, counts.trained.outside) == (128, 4)
    norms = Frozen(TINY, ("embed*", "*proj*")).parameters.trained
    assert norms.tensors == ((4, 1, 5),)
    assert norms.block_matrices == ()
    tensors = rank_tensors(rank_work(counts))
    assert total(tensors.parameters) == 4 * 300
    assert total(tensors.gradients) == 4 * 132
    assert total(tensors.optimizer) == 8 * 132
    assert saved_bytes(counts, OptimizerCost(8), 1) == 4 * 300 + 8 * 132
    assert saved_bytes(counts, OptimizerCost(12, "schedule_free_adamw"), 1) == 4 * (300 - 132) + 12 * 132


def test_of_a_part_of_the_model() -> None:
    """Matrices over two, vectors whole."""
    trained = SECOND.parameters.of(Part(tp=2)).trained
    assert trained.total == (128 - 8) // 2 + 8 + 4
    assert SECOND.parameters.of(Part(num_blocks=1, is_first=False)).trained.total <= 132


def test_what_no_backward_pass_reaches_in_a_part_of_the_model() -> None:
    """The first block; a pipeline's stages may each have blocks that are reached."""
    half, stage = Part(tp=2), Part(num_blocks=2, is_last=False)
    assert SECOND.parameters.unreached == SECOND.parameters.block == 128
    assert SECOND.parameters.of(half).unreached == SECOND.parameters.of(half).block == 60 + 8
    assert SECOND.parameters.of(stage).unreached == 0
    for part, is_less in ((Part(), True), (half, True), (stage, False)):
        step = STEP._replace(part=part)
        saved = [total(shape.activations(step, "cpu").saved) for shape in (SECOND, TINY)]
        assert (saved[0] < saved[1]) is is_less


def test_an_embedding_that_is_trained_is_looked_up() -> None:
    untied = Dense(replace(TINY.config, tied=False))
    alone, head = (Frozen(untied, ("layers.*", "norm*", but)).parameters for but in ("lm_head*", "embed*"))
    assert (alone.trained.looked_up, alone.of(Part(tp=2)).trained.looked_up) == (40, 20)
    assert (head.trained.looked_up, head.looked_up) == (0, 40)


def test_nothing_frozen_is_the_whole() -> None:
    kernels = Kernels("fp32", False, "cuda", HARDWARE.speed)
    nothing = Frozen(TINY, ())
    whole, trained = TINY.parameters, nothing.parameters.trained
    assert (trained.total, trained.block, trained.outside) == (whole.total, whole.block, whole.outside)
    assert sorted(trained.tensors) == sorted(whole.tensors)
    assert sorted(trained.block_matrices) == sorted(whole.block_matrices)
    for name in ("llama-1m", "llama-8b"):
        shape = Dense(PRESETS[name])
        told, seconds = (one.pass_seconds(STEP, kernels) for one in (Frozen(shape, ()), shape))
        assert told.backward_block == pytest.approx(seconds.backward_block)
        assert told.backward_outside == pytest.approx(seconds.backward_outside)


def test_seconds_and_traffic() -> None:
    """The more is frozen, the less is computed, sent and updated, and nothing below the lowest trained block
    is passed through; what fits is more."""
    patterns = ((), ("layers.*.down_proj.*",), ("embed*", "layers.[0-3].*"), ("embed*", "layers.*"))
    found = [candidate_of(each) for each in patterns]
    shapes = [Frozen(Dense(PRESETS["llama-25m"]), each) for each in patterns]
    sent = [passes(shape, STEP, HARDWARE)._replace(overlap=False) for shape in shapes]
    layout, wire = layout_of("fsdp", Mesh(dp_shard=8)), Wire(HARDWARE)
    for seconds in (
        [one.seconds.compute for one in found],
        [dp_shard.exposed_seconds(one, wire, layout) for one in sent],
        [dp_replicate.exposed_seconds(one, wire, layout_of("zero1", Mesh(dp_replicate=8))) for one in sent],
    ):
        assert seconds == sorted(set(seconds), reverse=True)
    assert [one.memory.total for one in found] == sorted((one.memory.total for one in found), reverse=True)
    kernels = Kernels("fp32", False, "cuda", HARDWARE.speed)
    shape = Dense(PRESETS["llama-25m"])
    whole, half = (one.pass_seconds(STEP, kernels) for one in (shape, Frozen(shape, patterns[3])))
    assert half.backward_block == 0.0  # of eight blocks none is left
    assert half.forward_block == whole.forward_block
    only = Frozen(shape, ("embed*", "layers.[0-3].*")).pass_seconds(STEP, kernels)
    assert only.backward_block == pytest.approx(whole.backward_block / 2)
    products = shape.weight_gradient_seconds(STEP, kernels)
    none = Frozen(shape, ("layers.*_proj.*",)).pass_seconds(STEP, kernels)
    assert none.backward_block == pytest.approx(whole.backward_block - products)


def candidate_of(patterns: tuple[str, ...]) -> Candidate:
    training = Training(64, 128, 10, False, OptimizerCost(8, "adamw"), 5, None)
    shape = Frozen(Dense(PRESETS["llama-25m"]), patterns)
    return Pricer(shape, training, HARDWARE).candidate(
        "fsdp", Mesh(dp_shard=8), Choices(8, "none", "fp32"), asked=True
    )


@pytest.mark.parametrize(
    ("patterns", "says", "hint"),
    [
        (("layer.*",), "'layer.*' fits no parameter", "layers.0"),
        (("*",), "all parameters are frozen", "leave some out"),
    ],
)
def test_patterns_that_are_refused(patterns: tuple[str, ...], says: str, hint: str) -> None:
    with pytest.raises(PlanError, match=says.replace("*", r"\*")) as caught:
        without(TINY, patterns)
    assert caught.value.where == "train.freeze"
    assert hint in (caught.value.hint or "")


def test_adapters_by_hand() -> None:
    """Rank 2, of two blocks: q and o 4 x 4, k and v 2 x 4, gate and up 6 x 4, down 4 x 6."""
    block = 2 * 2 * (4 + 4) + 2 * 2 * (2 + 4) + 3 * 2 * (6 + 4)
    counts = Adapted(TINY, (), 2).parameters
    assert (counts.total, counts.block, counts.outside) == (300 + 2 * block, 128 + block, 44)
    assert (counts.trained.total, counts.trained.block, counts.trained.outside) == (2 * block, block, 0)
    tensors = rank_tensors(rank_work(counts))
    assert total(tensors.parameters) == 4 * (300 + 2 * block)
    assert total(tensors.gradients) == 4 * 2 * block
    assert total(tensors.optimizer) == 8 * 2 * block
    assert saved_bytes(counts, OptimizerCost(8), 1) == (4 + 8) * 2 * block
    named = Adapted(TINY, ("q_proj", "layers.1.mlp.*"), 2)
    assert [one.name for one in named.trained][::2] == [
        "layers.0.self_attn.q_proj.lora_A", "layers.1.self_attn.q_proj.lora_A",
        "layers.1.mlp.gate_proj.lora_A", "layers.1.mlp.up_proj.lora_A", "layers.1.mlp.down_proj.lora_A",
    ]  # fmt: skip
    counts = Adapted(TINY, (), 2, dora=True).parameters
    rows = 4 + 2 + 2 + 4 + 6 + 6 + 4  # of q, k, v, o, gate, up and down, each with its magnitude
    assert counts.trained.total == 2 * (block + rows)
    with pytest.raises(PlanError, match="'head' fits no linear layer"):
        _ = Adapted(TINY, ("head",), 2).trained


def test_a_backward_pass_beside_adapters_computes_no_gradient_of_the_weights() -> None:
    kernels = Kernels("fp32", False, "cuda", HARDWARE.speed)
    whole, adapted = TINY.pass_seconds(STEP, kernels), Adapted(TINY, (), 2).pass_seconds(STEP, kernels)
    assert adapted.forward_block > whole.forward_block
    some = Adapted(TINY, ("q_proj",), 2).pass_seconds(STEP, kernels)
    assert some.backward_block < adapted.backward_block


def test_a_base_of_few_bits_by_hand() -> None:
    """A block's 28 rows of matrices, of 128 - 8 parameters, each with a block of 34 bytes."""
    plain, counts = Adapted(TINY, (), 2).parameters, Adapted(TINY, ("q_proj",), 2, base="nf4").parameters
    added = Adapted(TINY, ("q_proj",), 2).parameters.trained.total
    of_block = 28 * 34
    work = rank_work(counts, precision="bf16")
    tensors = rank_tensors(work)
    assert total(tensors.parameters) == 2 * of_block + 4 * (300 - 2 * 120 + added)
    assert total(tensors.copies) == 2 * (300 - 2 * 120 + added)  # autocast's
    assert counts.spared_bytes(4) == 4 * 120 - of_block
    shards = rank_work(counts, "fsdp", Mesh(dp_shard=2))
    rows = 2 + 1 + 1 + 2 + 3 + 3 + 2  # of each the larger half
    own = counts.trained.sharded(2, 4)
    vectors = 4 * (5 * 2 + 5 * 4)  # five norms of 4, the embedding's 5 rows of 4
    assert total(rank_tensors(shards).parameters) == 2 * rows * 34 + vectors + total(own)
    assert saved_bytes(counts, OptimizerCost(8), 1) == 12 * added
    assert plain.spared_bytes(4) == 0


def test_few_bits_are_spelled_out_for_each_product_and_travel_as_they_are() -> None:
    kernels = Kernels("bf16", False, "cuda", HARDWARE.speed)
    step = STEP._replace(precision="bf16")
    shape = Dense(PRESETS["llama-25m"])
    plain, few, more = (Adapted(shape, (), 2, base=base) for base in (None, "nf4", "int8"))
    largest = max(rows * columns for rows, columns, _ in shape.config.block_matrices())
    bytes_of = [one.activations(step, "cuda").backward_bytes for one in (plain, few, more)]
    assert [one - bytes_of[0] for one in bytes_of] == [0, 6 * largest, 6 * largest]
    seconds = [one.pass_seconds(step, kernels) for one in (plain, few)]
    extra = seconds[1].forward_block - seconds[0].forward_block
    assert extra > 0
    assert seconds[1].backward_block - seconds[0].backward_block == pytest.approx(extra)
    full = [one.pass_seconds(step._replace(checkpointing="full"), kernels) for one in (plain, few)]
    assert full[1].backward_block - full[0].backward_block == pytest.approx(2 * extra)
    layout, wire = layout_of("fsdp", Mesh(dp_shard=8)), Wire(HARDWARE)
    sent = [
        dp_shard.exposed_seconds(passes(one, step, HARDWARE)._replace(overlap=False), wire, layout)
        for one in (few, more, plain)
    ]
    assert sent == sorted(set(sent))
