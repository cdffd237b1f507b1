"""Expert parallelism computes what one rank computes, and leaves checkpoints that any mesh reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import plans
from kit.weights import held
from torch import Tensor

from mlpipe._core.presets import MOE, MoeConfig
from mlpipe.plan.axes import ep
from mlpipe.plan.axes.axis import Layout
from mlpipe.plan.entry import Entry
from mlpipe.plan.hardware import detect_hardware
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import AdapterPlan, ModelPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.settings import Checkpointing
from mlpipe.plan.shapes import experts as shapes
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.time import passes
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.plan.wire import Wire
from mlpipe.train.models.moe import Experts, build_model
from mlpipe.train.parallel import experts
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations
from mlpipe.train.parallel.rank_group import RankGroup

pytestmark = pytest.mark.torch

CONFIG = MoeConfig(
    **{**vars(plans.CONFIG), "dim": 32, "ffn_dim": 32},
    num_experts=4,
    experts_per_token=2,
    num_shared_experts=1,
    balance_rate=0.01,
)
MODEL = ModelPlan(Entry(MOE, dataclasses.asdict(CONFIG)), "test", 32, ())
STEPS, SHORT = 20, 6
MUON = {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}
TWO, FOUR = Mesh(dp_shard=2, ep=2), Mesh(dp_shard=4, ep=2)
MIXED = {
    "tp": Mesh(tp=2),
    "cp": Mesh(cp=2),
    "pp": Mesh(pp=2),
    "copies": Mesh(dp_replicate=2, dp_shard=2, ep=2),
    "sequences": Mesh(dp_shard=2, cp=2, ep=2),
    "ring": Mesh(dp_shard=2, cp=2, ep=2),
    "layers": Mesh(dp_shard=2, tp=2, ep=2),
    "stages": Mesh(pp=2, dp_shard=2, ep=2),
    "layers-of-stages": Mesh(pp=2, tp=2),
}


class Counted(Wire):
    """Bytes of rows that a rank holds, in place of seconds."""

    def all_to_all(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        return num_bytes / num_ranks


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_what_travels_is_what_the_planner_counts(
    checkpointing: Checkpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is its only neighbour: rows go to it and come back, and their numbers before them."""
    sent: list[int] = []

    def send(out: Tensor, own: Tensor, *splits: Any, group: Any) -> None:
        out.copy_(own)
        sent.append(own.nbytes if own.is_floating_point() else 0)

    monkeypatch.setattr(dist, "all_to_all_single", send)
    model = build_model(**dataclasses.asdict(CONFIG))
    model.init_weights()
    for module in model.modules():
        if isinstance(module, Experts):
            module.exchange = experts._Exchange(RankGroup(0, 1, None, lambda call: call))
    if checkpointing == "full":
        checkpoint_activations(list(model.layers), "full")
    model(torch.zeros(3, 8, dtype=torch.int64)).square().sum().backward()
    step = StepShape(8, 3, 1, "fp32", checkpointing, compiled=False)
    in_a_step = passes(shapes.Experts(CONFIG), step, detect_hardware(None))
    hardware: Any = None
    # a mesh with two, whose bytes are of one
    assert sum(sent) == ep.exposed_seconds(in_a_step, Counted(hardware), Layout(Mesh(dp_shard=2, ep=2)))
    assert len(sent) == CONFIG.num_layers * (8 if checkpointing == "full" else 5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    """`chain`: two steps on each of four ranks, one, and two."""
    folder: Path = tmp_path_factory.mktemp("experts")
    tokens = plans.write_tokens(folder / "tokens")

    def plan(run_id: str, mesh: Mesh, **changes: Any) -> Plan:
        return plans.train_plan(
            folder / "store", tokens, world_size=mesh.world_size, mesh=mesh, run_id=run_id,
            strategy="fsdp" if mesh.dp_shard > 1 else "single",
            **{"steps": SHORT, "every": 100, "model": MODEL} | changes,
        )  # fmt: skip

    chain = [
        plan("chain", mesh, steps=2 * number, attempt=number)
        for number, mesh in enumerate((FOUR, Mesh(), TWO), start=1)
    ]
    alone = plan("alone", Mesh(), steps=STEPS)
    lora: Any = {"adapter": AdapterPlan(4, 6.0)}
    muon: Any = {"optimizer": OptimizerPlan("muon", None, MUON, 8, 1e-2, 1.0, "constant", 0, 0, 0.0)}
    two = [
        plan("two", TWO, steps=STEPS),
        plan("full", TWO, activation_checkpointing="full", micro_batch=4, accumulation=2, offload="all"),
        plan("half", TWO, precision="fp16"),
        plan("compiled", TWO, compile="block", activation_checkpointing="full"),
        plan("lora", TWO, **lora),
        plan("muon", TWO, **muon),
    ]
    four = [plan("four", FOUR, steps=STEPS), plan("muon-four", FOUR, **muon)]
    of_one = [alone, plan("lora-alone", Mesh(), **lora), plan("muon-alone", Mesh(), **muon)]
    for name, mesh in MIXED.items():
        schedule = PipelinePlan("zero_bubble" if mesh.tp > 1 else "1f1b", (1, 1))
        staged = {"pipeline": schedule, "micro_batch": 4, "accumulation": 4 // mesh.dp_shard}
        more = staged if mesh.pp > 1 else {"context_exchange": "ring" if name == "ring" else "all_gather"}
        if name == "copies":
            more = {"activation_checkpointing": "selective", "loss": "fused"}
        (two if mesh.world_size == 2 else four).append(plan(name, mesh, **more))
    plans.run_together([*four, chain[0]], folder / "four")
    plans.run_together([*of_one, chain[1]], folder / "one")
    # kernels of experts, which inductor makes: the ring of GPUs
    plans.run_together([*two, chain[2]], folder / "two", compiler="aot_eager")
    killed = plan("killed", TWO, steps=STEPS, **plans.dying(step=13, every=10))
    plans.launch_dying(killed, folder / "store", folder / "killed")
    fields = ("loss", "grad_norm", "expert_max_load_ratio")
    found = {
        one.run_id: {field: plans.by_step(folder / "store", one, field) for field in fields}
        for one in [*of_one, *two, *four, killed]
    }
    steps = [plans.by_step(folder / "store", one, "loss") for one in chain]
    weights = {
        one.run_id: {"weights": held(folder / "store", one)}
        for one in [alone, *two, *four]
        if one.work.steps == STEPS
    }
    chained = {"chain": {"loss": [loss for some in steps for loss in some]}}
    return {name: figures | weights.get(name, {}) for name, figures in found.items()} | chained


@pytest.mark.combines("ep", "compile", "activation_checkpointing full")
@pytest.mark.combines("ep", "dp_shard", "model with experts", "optimizer adamw")
@pytest.mark.combines("ep", "dp_shard", "activation_checkpointing full", "accumulation", "offload *")
@pytest.mark.combines("ep", "dp_replicate", "dp_shard", "model with experts", "loss fused")
@pytest.mark.combines("ep", "dp_replicate", "activation_checkpointing selective")
@pytest.mark.combines("ep", "pp", "dp_shard", "pipeline 1f1b", "model with experts")
@pytest.mark.combines("pp", "tp", "pipeline zero_bubble", "model with experts")
@pytest.mark.combines("tp", "ep", "dp_shard", "model with experts")
@pytest.mark.combines("cp", "ep", "dp_shard", "model with experts")
@pytest.mark.combines("cp", "context ring", "ep", "dp_shard", "model with experts")
@pytest.mark.parametrize("name", ["two", "full", "four", "compiled", *MIXED])
def test_losses_gradients_and_loads_are_those_of_one_rank(trained: Any, name: str) -> None:
    found, expected = trained[name], trained["alone"]
    steps = STEPS if "weights" in found else SHORT
    assert found["loss"] == pytest.approx(expected["loss"][:steps], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"][:steps], rel=1e-3)
    assert found["expert_max_load_ratio"] == expected["expert_max_load_ratio"][:steps]


@pytest.mark.combines("ep", "adapter lora", "model with experts")
def test_adapters_beside_experts_that_stay_learn_as_on_one_rank(trained: Any) -> None:
    losses = trained["lora-alone"]["loss"]
    assert trained["lora"]["loss"] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0] - 1e-3


@pytest.mark.combines("ep", "optimizer muon", "model with experts")
@pytest.mark.parametrize("name", ["muon", "muon-four"])
def test_muon_is_that_of_one_rank(trained: Any, name: str) -> None:
    """A rounding is another bf16 value in its iterations."""
    assert trained[name]["loss"] == pytest.approx(trained["muon-alone"]["loss"], rel=1e-3)


@pytest.mark.parametrize("name", ["two", "four"])
def test_parameters_are_those_of_one_rank(trained: Any, name: str) -> None:
    """And the optimizer's states, after all steps."""
    found, expected = trained[name]["weights"], trained["alone"]["weights"]
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        torch.testing.assert_close(found[tensor], value, rtol=1e-4, atol=2e-5, msg=tensor)


@pytest.mark.combines("ep", "resume under another mesh")
def test_a_checkpoint_goes_on_under_any_mesh(trained: Any) -> None:
    assert trained["chain"]["loss"] == pytest.approx(trained["alone"]["loss"][:SHORT], rel=1e-5)


@pytest.mark.combines("ep", "dp_shard", "kill of a worker", "deterministic")
def test_a_killed_rank_costs_nothing(trained: Any) -> None:
    """A restart in place from the checkpoint of step 10, which has the biases: the same bits to the end."""
    assert trained["killed"].items() <= trained["two"].items()


@pytest.mark.combines("ep", "precision fp16")
def test_fp16_is_near(trained: Any) -> None:
    assert trained["half"]["loss"] == pytest.approx(trained["alone"]["loss"][:SHORT], rel=2e-3)
