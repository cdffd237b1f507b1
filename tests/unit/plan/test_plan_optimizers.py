"""What optimizers cost, by hand: bytes of state on a rank, of a step in memory and on the wire."""

from __future__ import annotations

import pytest

from mlpipe._core.optimizers import OPTIMIZERS, newton_schulz_flops
from mlpipe._core.presets import PRESETS, MoeConfig
from mlpipe.plan.memory import saved_bytes
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.shapes.experts import Experts
from mlpipe.plan.shapes.frozen import Frozen
from mlpipe.plan.shapes.shape import ParameterCounts, Part
from mlpipe.plan.tensors import total

pytestmark = pytest.mark.unit

# An embedding and a matrix of a block of 10 x 300, one of a block of 10 x 7, and a vector of 10.
MODEL = ParameterCounts(
    6080, 3080, 3000, 1, ((10, 300, 2), (10, 7, 1), (10, 1, 1)), ((10, 300, 1), (10, 7, 1))
)


def of(name: str, num_ranks: int, averages: bool = False) -> int:
    args = {key: argument.default for key, argument in OPTIMIZERS[name].arguments.items()}
    cost = OptimizerCost(OPTIMIZERS[name].state_bytes_per_parameter(args), name, averages)
    return total(cost.states(MODEL, num_ranks))


@pytest.mark.parametrize(
    ("name", "alone", "a_rank_of_four"),
    [
        ("adamw", 8 * 6080, 8 * 3 * 608),
        ("lion", 4 * 6080, 4 * 3 * 608),
        # rows split, columns whole
        ("adafactor", 4 * (2 * 310 + 17 + 10), 4 * (2 * (3 + 300) + 3 + 7 + 3)),
        # the blocks' matrices have one state, the embedding and the vector two
        ("muon", 4 * (3000 + 70) + 8 * (3000 + 10), 4 * 3 * (300 + 7) + 8 * 3 * (300 + 1)),
        # codes, and two blocks of 256 a row; rows of 7 and of 1 stay fp32
        ("adamw8bit", 2 * 2 * (3000 + 4 * 20) + 8 * 80, 2 * 2 * 3 * (300 + 8) + 8 * 3 * 8),
        # two codes a byte, and three blocks of 128
        ("schedule_free_adamw", 12 * 6080, 12 * 3 * 608),
        ("adamw4bit", 2 * 2 * (1500 + 4 * 30) + 8 * 80, 2 * 2 * 3 * (150 + 12) + 8 * 3 * 8),
    ],
)
def test_states(name: str, alone: int, a_rank_of_four: int) -> None:
    assert of(name, 1) == alone
    assert of(name, 4) == a_rank_of_four
    assert of(name, 4, averages=True) == a_rank_of_four + 4 * 3 * 608


def test_of_a_checkpoint() -> None:
    """One of the states of a schedule-free optimizer is there in the place of the weights."""
    assert saved_bytes(MODEL, OptimizerCost(8, "adamw"), 4) == (4 + 8) * 3 * 608
    assert saved_bytes(MODEL, OptimizerCost(8, "adamw", averages=True), 4) == (4 + 8 + 4) * 3 * 608
    assert saved_bytes(MODEL, OptimizerCost(12, "schedule_free_adamw"), 4) == 12 * 3 * 608


def test_a_step() -> None:
    """A weight is read and written, its gradient four times, its states twice; an average besides."""
    assert OptimizerCost(8).traffic_bytes_per_parameter(MODEL) == 40
    assert OptimizerCost(4, "lion").traffic_bytes_per_parameter(MODEL) == 32
    assert OptimizerCost(8, averages=True).traffic_bytes_per_parameter(MODEL) == 40 + 2 * 4 + 4
    assert OptimizerCost(8, "adamw").update_cost(MODEL) == (0.0, 0)
    flops, sent = OptimizerCost(4, "muon").update_cost(MODEL)
    assert sent == 2 * (3000 + 70)
    assert flops == newton_schulz_flops(10, 300) + newton_schulz_flops(7, 10)


def test_each_expert_has_its_own_product() -> None:
    """Of two blocks of 8 experts, beside which matrices may be that are as large as all of them together."""
    config = PRESETS["moe-2m"]
    assert isinstance(config, MoeConfig)
    muon, experts = OptimizerCost(4, "muon"), Experts(config)
    number, width = config.num_layers * config.num_experts, config.shared_dim
    shared = 3 * newton_schulz_flops(width, config.dim) if width else 0.0
    attention = 2 * newton_schulz_flops(config.dim, config.dim) + 2 * newton_schulz_flops(
        config.kv_dim, config.dim
    )
    router = newton_schulz_flops(config.num_experts, config.dim)
    of_experts = 3 * number * newton_schulz_flops(config.ffn_dim, config.dim)
    cost = muon.update_cost(experts.parameters)
    assert cost.flops == pytest.approx(config.num_layers * (attention + router + shared) + of_experts)
    assert muon.stacked_bytes(experts.parameters) == 2 * 3 * number * config.ffn_dim * config.dim
    half = experts.parameters.of(Part(tp=2, num_blocks=config.num_layers // 2))
    assert muon.stacked_bytes(half) == muon.stacked_bytes(experts.parameters) // 4
    norms = Frozen(experts, ("*experts*",)).parameters.trained
    assert muon.update_cost(norms).flops == pytest.approx(config.num_layers * (attention + router))
    both = ParameterCounts(0, 0, 0, 1, ((20, 5, 3),), ((20, 5, 3),), stacks=((20, 5, 2, 4),))
    assert muon.update_cost(both).flops == 8 * newton_schulz_flops(5, 5) + newton_schulz_flops(20, 5)


def test_newton_schulz() -> None:
    """Five times: of an m x n matrix the products (m, n) (n, m), (m, m) (m, m) and (m, m) (m, n)."""
    assert newton_schulz_flops(30, 10) == 5 * (2 * 10 * 30 * 10 + 2 * 10 * 10 * 10 + 2 * 10 * 10 * 30)


def test_equal_shapes_of_a_block_all_count() -> None:
    """Without grouped keys and values, q, o, k and v have one shape, and are told as two pairs."""
    apart, together = (
        ParameterCounts(90, 36, 54, 1, ((3, 3, 4), (6, 9, 1)), matrices)
        for matrices in (((3, 3, 2), (3, 3, 2)), ((3, 3, 4),))
    )
    muon = OptimizerCost(4, "muon")
    assert total(muon.states(apart, 1)) == 4 * 36 + 8 * 54
    assert muon.update_cost(apart) == muon.update_cost(together)
