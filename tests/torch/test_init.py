"""The same weights, bit for bit, for a seed under every strategy and world size (real torchrun, gloo)."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch
from kit import plans

from mlpipe._core.errors import TrainError
from mlpipe.train.init import initialize

pytestmark = pytest.mark.torch

REFUSED = {"factory"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{what was initialised: {"<world size> <strategy>": digest or error}}"""
    outcomes = defaultdict(dict)
    for world_size in (2, 4):
        output = tmp_path_factory.mktemp("init") / "output"
        code = plans.run_ranks(world_size, "kit.init_worker", output=output)
        assert code == 0, output.read_text()[-3000:]
        report = json.loads(output.read_text().splitlines()[-1])
        assert report["same_on_all_ranks"]
        for name, outcome in report["found"].items():
            what, strategy = name.split("/")
            outcomes[what][f"{world_size} {strategy}"] = outcome
    return outcomes


def test_every_way_to_fill_a_parameter_gives_the_same_bits_everywhere(found):
    checked = {what: set(outcomes.values()) for what, outcomes in found.items()}
    for what in REFUSED:
        checked.pop(what)
    assert all(
        len(found[what]) == 7 for what in checked
    )  # plain, fsdp and one rank's fsdp at 2 and 4; hsdp at 4
    assert {what: digests for what, digests in checked.items() if len(digests) != 1} == {}
    assert all(len(digest) == 64 for digests in checked.values() for digest in digests)


def test_another_seed_gives_other_weights(found):
    assert set(found["llama 0 False"].values()) != set(found["llama 1 False"].values())


def test_what_would_differ_between_ranks_is_refused_under_every_strategy(found):
    for what in REFUSED:
        for outcome in found[what].values():
            assert outcome.startswith("input: init_weights() calls aten.randn.default")


def test_each_draw_is_another_one_and_the_global_generator_is_left_alone():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.empty(50))
            self.b = torch.nn.Parameter(torch.empty(50))

        def init_weights(self):
            self.a.normal_()
            self.b.normal_()

    model = Two()
    before = torch.get_rng_state()
    initialize(model, 3)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(model.a, model.b)


def test_the_error_says_what_to_write_instead():
    class Factory(torch.nn.Module):
        def init_weights(self):
            torch.randperm(4)

    with pytest.raises(TrainError, match="randperm") as caught:
        initialize(Factory(), 0)
    assert "torch.nn.init" in caught.value.hint
