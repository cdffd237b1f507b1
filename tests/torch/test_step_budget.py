"""What a step asks of the host and of the network, under every strategy: counts, so that a slower step is
found on any machine."""

from __future__ import annotations

import json

import pytest
from kit import budget, plans

pytestmark = pytest.mark.torch

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
SHORT, LONG = 4, 8


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Counts of rank 0 of 2 for one step: what LONG steps take more than SHORT ones."""
    folder = tmp_path_factory.mktemp("counted")
    tokens = plans.write_tokens(folder / "tokens")
    made = [
        plans.train_plan(
            folder / "store", tokens, strategy=strategy, steps=steps, every=100, run_id=f"{strategy}-{steps}"
        )
        for strategy in STRATEGIES
        for steps in (SHORT, LONG)
    ]
    plans.run_together(made, folder / "runs", worker="kit.counted")

    def counts(strategy, steps):
        return json.loads((folder / "runs" / f"counts-{strategy}-{steps}.json").read_text())

    return {
        strategy: {
            figure: more / (LONG - SHORT)
            for figure, count in counts(strategy, LONG).items()
            if (more := count - counts(strategy, SHORT).get(figure, 0))
        }
        for strategy in STRATEGIES
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_keeps_its_budget(counted, strategy):
    budget.within(f"a step, {strategy}", counted[strategy])


def test_what_is_communicated_is_what_the_strategy_needs(counted):
    """In fp32 with P parameters: DDP reduces 4 P bytes; an all-gather or reduce-scatter over 2 ranks has 4 P
    on one side and half of it on the other (ZeRO, arXiv:1910.02054, section 7)."""
    parameters = 4 * plans.CONFIG.num_params()
    assert 0 <= counted["ddp"]["allreduce_ bytes"] - parameters < 100  # and the sums of loss and tokens
    assert counted["zero1"]["_allgather_base_ bytes"] == 1.5 * parameters
    assert counted["zero2"]["_allgather_base_ bytes"] == 1.5 * parameters  # kept until the backward pass
    assert counted["fsdp"]["_allgather_base_ bytes"] == 3 * parameters
    assert counted["fsdp"]["_reduce_scatter_base_ bytes"] == 1.5 * parameters
