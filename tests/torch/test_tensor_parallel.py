"""Tensor parallelism computes what one rank computes, and leaves checkpoints that any mesh reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import plans
from kit.init_worker import INITS, Own
from kit.tensor_worker import Twice
from kit.weights import held
from torch import nn

from mlpipe.plan.axes.tp import num_collectives
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.validation import MetricPlan, ValidatePlan
from mlpipe.train.init import initialize
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.parallel.tensor_by_pattern import split
from mlpipe.train.schedules.deferred_weights import DeferredWeights
from mlpipe.train.slices import Slice, keep_slice

pytestmark = pytest.mark.torch

STEPS, SHORT = 20, 8
CHAIN = (Mesh(tp=2), Mesh(dp_shard=2, tp=2), Mesh(), Mesh(dp_replicate=2, tp=2))  # five steps each
VALIDATE = ValidatePlan(STEPS, 2000, (MetricPlan("accuracy"), MetricPlan("perplexity")))
BASE: dict[str, Any] = {"model": plans.model_plan(tied=False), "validate": VALIDATE}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Plan]]]:
    """Plans of a training by one rank, two and four, and of one whose mesh changes every five steps."""
    folder = tmp_path_factory.mktemp("tensor")
    tokens = plans.write_tokens(folder / "tokens")

    def plan(run_id: str, mesh: Mesh, **changes: Any) -> Plan:
        return plans.train_plan(
            folder / "store", tokens, world_size=mesh.world_size, mesh=mesh, run_id=run_id,
            strategy="fsdp" if mesh.dp_shard > 1 else "ddp",
            **{"steps": STEPS, "every": 100} | BASE | changes,
        )  # fmt: skip

    chain = [
        plan("chain", mesh, steps=5 * number, attempt=number, shard_optimizer=mesh.dp_replicate > 1)
        for number, mesh in enumerate(CHAIN, start=1)
    ]
    alone = plan("alone", Mesh())
    tied: Any = {"model": plans.model_plan(), "steps": SHORT}
    two = [
        plan("two", CHAIN[0]),
        plan("tied", CHAIN[0], **tied, activation_checkpointing="full", micro_batch=4, offload="all"),
    ]
    # large enough that sizes of buckets are tried
    wide: Any = {"model": plans.model_plan(ffn_dim=352), "steps": SHORT}
    copied = plan("copied", CHAIN[3], **wide, buckets="auto", deterministic=False)
    wide_alone = plan("wide-alone", Mesh(), **wide)
    sharded = plan("sharded", CHAIN[1])
    tied_alone = plan("tied-alone", Mesh(), **tied)
    plans.run_together([*two, chain[0]], folder / "two")
    plans.run_together([sharded, chain[1]], folder / "four")
    plans.run_together([alone, tied_alone, wide_alone, chain[2]], folder / "one")
    plans.run_together([chain[3], copied], folder / "four-again")
    killed = plan("killed", CHAIN[0], **plans.dying())
    plans.launch_dying(killed, folder / "store", folder / "killed")
    found = {one.run_id: [one] for one in (alone, *two, wide_alone, copied, sharded, killed)}
    return folder / "store", found | {"chain": chain, "tied-alone": [tied_alone]}


def losses(trained: Any, run: str) -> list[float]:
    store, made = trained
    return [loss for plan in made[run] for loss in plans.losses(store, plan)]


def weights(trained: Any, run: str) -> dict[str, torch.Tensor]:
    """All that the last checkpoint holds."""
    return held(trained[0], trained[1][run][-1])


@pytest.mark.combines("tp", "dp_shard", "resume under another mesh", "optimizer adamw")
@pytest.mark.combines("tp", "dp_replicate", "resume under another mesh", "strategy zero1")
@pytest.mark.combines("tp", "activation_checkpointing full", "accumulation", "offload *")
@pytest.mark.parametrize(
    ("run", "other"),
    [("two", "alone"), ("sharded", "alone"), ("chain", "alone"), ("tied", "tied-alone")],
)
def test_losses_and_parameters_are_those_of_one_rank(trained: Any, run: str, other: str) -> None:
    """Also with recomputed blocks, whose inputs and the optimizer wait on the host, in accumulated
    microbatches, and where the mesh changes on the way."""
    assert losses(trained, run) == pytest.approx(losses(trained, other), rel=1e-5)
    found, expected = weights(trained, run), weights(trained, other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.combines("tp", "dp_replicate", "buckets auto")
def test_any_size_of_buckets_gives_the_same(trained: Any) -> None:
    store, made = trained
    assert losses(trained, "copied") == pytest.approx(losses(trained, "wide-alone"), rel=1e-5)
    assert plans.records(store, made["copied"][0])[0]["bucket_seconds"], "sizes were tried"


@pytest.mark.combines("tp", "kill of a worker", "deterministic")
def test_a_killed_rank_costs_nothing(trained: Any) -> None:
    """A restart in place from the checkpoint of step 3 ends at the same bits."""
    store, made = trained
    assert plans.outcome(store, made["killed"][0])["restarts"] == 1
    killed, whole = (weights(trained, run) for run in ("killed", "two"))
    assert killed.keys() == whole.keys()
    assert all(torch.equal(killed[name], value) for name, value in whole.items())


@pytest.mark.combines("tp", "validate")
def test_metrics_see_all_logits_and_each_sample_once(trained: Any) -> None:
    store, made = trained
    found, expected = (
        [record["metrics"] for record in plans.records(store, made[run][0]) if record["kind"] == "validation"]
        for run in ("two", "alone")
    )
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert len(found) == len(expected) == 1


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `kit.tensor_worker` found on two ranks."""
    folder = tmp_path_factory.mktemp("passes")
    tokens, output = plans.write_tokens(folder / "tokens"), folder / "output"
    assert plans.run_ranks(2, "kit.tensor_worker", str(tokens), output=output) == 0, output.read_text()[
        -3000:
    ]
    found: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return found


@pytest.mark.combines("tp", "your own model")
@pytest.mark.parametrize("model", ["tied", "untied", "patterns", "its own plan", "experts"])
def test_gradients_and_logits_in_fp64(passes: Any, model: str) -> None:
    """The loss itself is fp32 everywhere. Logits also of 7 tokens, which two ranks cannot share."""
    found = passes[model]
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
    assert found["gradient"] < 1e-6
    assert found["logits"] < 1e-12


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_what_travels_is_the_residual_stream(passes: Any, checkpointing: str) -> None:
    """As often as the planner says; besides, of the loss three numbers a token, and once a step the gradients
    of the norms."""
    counts = {name: n for name, n in passes["counts"].items() if name.startswith(checkpointing)}
    layers, microbatches, tokens, dim = plans.CONFIG.num_layers, 2, 2 * 32, plans.CONFIG.dim
    work: Any = SimpleNamespace(
        num_blocks=layers,
        recomputes=checkpointing == "full",
        is_first=True,
        is_last=True,
        exact_sums=False,
    )
    gathers, scatters = num_collectives(work)
    stream, loss = (
        4 * tokens * dim * 3 // 2,
        4 * 3 * tokens * 3,
    )  # bytes that go in and come out, of two ranks
    assert counts == {
        f"{checkpointing} _allgather_base_": microbatches * (gathers + 1),
        f"{checkpointing} _allgather_base_ bytes": microbatches * (gathers * stream + loss),
        f"{checkpointing} _reduce_scatter_base_": microbatches * scatters,
        f"{checkpointing} _reduce_scatter_base_ bytes": microbatches * scatters * stream,
        f"{checkpointing} allreduce_": 1,
        f"{checkpointing} allreduce_ bytes": 4 * (2 * layers + 1) * dim,
    }


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("no sum", "input: the ranks of tp have different gradients of inner.blocks.0.head_norm.weight"),
        ("no such module", "input: model.tensor: 'blocks.*.attention' fits no module"),
        ("no linear", "input: row cannot split inner.blocks.0.norm, a LayerNorm"),
    ],
)
def test_patterns_that_do_not_split_the_model_are_refused(passes: Any, mistake: str, words: str) -> None:
    assert passes["refused"][mistake].startswith(words)


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_of_columns_and_rows_are_put_off(exact: bool) -> None:
    """By patterns, in fp32 and where bf16 adds exactly."""
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    ranks = RankGroup(0, 1, None, lambda collective: collective, exact=exact)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        split(module, ModelPlan(Entry("test", {}), None, 8, (), {"0": "column", "1": "row"}), ranks)
        deferred = DeferredWeights(module)
        with torch.autocast("cpu", torch.bfloat16, enabled=exact), deferred.collecting(0, 0):
            module(torch.ones(2, 8, requires_grad=True)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert [one.grad for one in module.parameters()] == [None, None]
    deferred.compute(0, 0)
    assert all(one.grad is not None for one in module.parameters())


def test_a_parameter_that_init_weights_comes_back_to(passes: Any) -> None:
    assert passes["twice"]


@pytest.mark.parametrize("how", sorted(set(INITS) - {"factory"}))
def test_a_slice_begins_as_that_slice_of_the_whole(how: str) -> None:
    """Whatever fills it, by whichever shape: of 7 rows, or of 5 columns, one."""
    with torch.device("meta"):
        whole = Own(how)
    whole.to_empty(device="cpu")
    initialize(whole, 0)
    for cut in (Slice("tp", 0, 3, 7), Slice("tp", 1, 0, 5)):
        with torch.device("meta"):
            part = Own(how)
        keep_slice(part, "weight", cut, {})
        part.to_empty(device="cpu")
        initialize(part, 0)
        assert torch.equal(part.weight, cut.of(whole.weight))
        assert torch.equal(part.scale, whole.scale)


def test_a_slice_of_another_stage_is_asked_for_by_nobody() -> None:
    """init_weights() comes back to it; its other parts, on other ranks, have no memory either."""
    with torch.device("meta"):
        part = Twice()
    for name, dim in (("first", 0), ("second", 1)):
        keep_slice(part, name, Slice("tp", dim, 0, 2), {})
    initialize(part, 0)
    assert [parameter.shape for parameter in part.parameters()] == [(4, 4), (4, 3)]
