"""Every strategy at every world size computes the same training: the strongest test there is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kit import plans

from mlpipe.plan.entry import Entry
from mlpipe.plan.memory import saved_bytes
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.shapes.dense import Dense
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.torch

STEPS, LONG = 6, 20  # of more than two ranks, of two
GOLDEN = Path(__file__).parent.parent / "golden" / "losses_tiny_llama.json"
WORLDS = {
    1: ("single", "ddp", "fsdp"),
    2: ("ddp", "zero1", "zero2", "fsdp"),
    4: ("ddp", "zero1", "fsdp", "hsdp"),
}


def near(found: list[float], expected: list[float], relative: float) -> None:
    assert len(found) == len(expected)
    for step, (a, b) in enumerate(zip(found, expected, strict=True), start=1):
        assert abs(a - b) <= relative * abs(b), f"step {step}: {a} against {b}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def trained(folder):
    """`curves` and `varied`, of ranks that are started once."""
    tokens = plans.write_tokens(folder / "tokens")
    others = {1: whole_models(folder, tokens), 2: variants(folder, tokens)}
    found = {}
    for world_size, strategies in WORLDS.items():
        made = [
            plans.train_plan(
                folder / "store",
                tokens,
                strategy=strategy,
                world_size=world_size,
                steps=50 if strategy == "single" else LONG if world_size == 2 else STEPS,
                every=50,
                run_id=f"{strategy}-{world_size}",
            )
            for strategy in strategies
        ]
        # kernels, which inductor makes: test_context.py
        made_too = others.get(world_size, {}).values()
        plans.run_together([*made, *made_too], folder / f"world-{world_size}", compiler="aot_eager")
        for plan in made:
            found[plan.run_id] = {
                field: plans.by_step(folder / "store", plan, field) for field in ("loss", "grad_norm")
            }
    varied = {name: plans.losses(folder / "store", plan) for name, plan in (others[1] | others[2]).items()}
    return found, varied


@pytest.fixture
def curves(trained):
    """Losses and gradient norms by "strategy-world size", fp32, AdamW at 1e-3, clipped at 1.0. One goes on to
    be the golden curve: what one strategy computes otherwise is there in the first steps."""
    return trained[0]


@pytest.fixture
def varied(trained):
    """Losses by name."""
    return trained[1]


@pytest.mark.combines("dp_replicate", "dp_shard")
@pytest.mark.combines("dp_replicate", "strategy zero1")
@pytest.mark.combines("dp_shard", "strategy zero2")
def test_all_strategies_and_world_sizes_agree(curves):
    for run, curve in curves.items():
        steps = len(curve["loss"])
        assert steps == (50 if run == "single-1" else LONG if run.endswith("-2") else STEPS), run
        near(curve["loss"], curves["single-1"]["loss"][:steps], 1e-5)
        near(
            curve["grad_norm"], curves["single-1"]["grad_norm"][:steps], 1e-3
        )  # AdamW hides a scaled gradient


def test_the_golden_curve(curves):
    losses = curves["single-1"]["loss"]
    near(losses, json.loads(GOLDEN.read_text()), 1e-4)
    assert losses[-1] < 0.85 * losses[0]


def test_a_rank_writes_what_the_plan_says_of_a_checkpoint(curves, folder):
    """To the byte where all is sliced; whole tensors, of copies, are dealt out as evenly as they can be."""
    store = FolderStore(folder / "store")
    for world_size, strategies in WORLDS.items():
        planned = saved_bytes(Dense(plans.CONFIG).parameters, OptimizerCost(8), world_size)
        for strategy in strategies:
            (found,) = catalogue.list_checkpoints(store, f"runs/{strategy}-{world_size}/stages/train")
            written = [0] * world_size
            for blob in catalogue.load_manifest(store, found.key)["blobs"]:
                written[int(blob["key"].rpartition("-")[2])] += blob["size_bytes"]
            dealt = strategy in ("ddp", "hsdp") and world_size > 1
            assert max(written) == pytest.approx(planned, rel=0.2 if dealt else 1e-9), (strategy, written)


def variants(folder, tokens):
    """Of ddp on 2 workers, each against a reference in the same list."""
    base = {"steps": 4, "every": 4, "world_size": 2}
    plan = plans.train_plan
    store = folder / "store"

    def user(entry):
        return ModelPlan(Entry(f"kit.models:{entry}", {}), None, 32, ())

    return {
        "fp32": plan(store, tokens, run_id="fp32", **base),
        "bf16-ddp": plan(store, tokens, run_id="bf16-ddp", precision="bf16", **base),
        "bf16-zero1": plan(store, tokens, run_id="bf16-zero1", precision="bf16", strategy="zero1", **base),
        "bf16-zero2": plan(store, tokens, run_id="bf16-zero2", precision="bf16", strategy="zero2", **base),
        "bf16-fsdp": plan(store, tokens, run_id="bf16-fsdp", precision="bf16", strategy="fsdp", **base),
        "accumulated-ddp": plan(store, tokens, run_id="gas-ddp", micro_batch=2, accumulation=4, **base),
        "accumulated-fsdp": plan(
            store, tokens, run_id="gas-fsdp", micro_batch=2, accumulation=4, strategy="fsdp", **base
        ),
        "every-zero2": plan(
            store,
            tokens,
            run_id="every-zero2",
            micro_batch=2,
            accumulation=4,
            strategy="zero2",
            reduce_gradients="every",
            **base,
        ),
        "every-fsdp": plan(
            store,
            tokens,
            run_id="every-fsdp",
            micro_batch=2,
            accumulation=4,
            strategy="fsdp",
            reduce_gradients="every",
            **base,
        ),
        "full": plan(store, tokens, run_id="full", activation_checkpointing="full", **base),
        "selective-fsdp": plan(
            store, tokens, run_id="selective", activation_checkpointing="selective", strategy="fsdp", **base
        ),
        "compiled": plan(
            store, tokens, run_id="compiled", compile="block", model=plans.model_plan(num_layers=1), **base
        ),
        "user-ddp": replace_model(plan(store, tokens, run_id="user-ddp", **base), user("plain")),
        "user-fsdp": replace_model(
            plan(store, tokens, run_id="user-fsdp", strategy="fsdp", **base), user("plain")
        ),
        "user-bf16-ddp": replace_model(
            plan(store, tokens, run_id="user-bf16-ddp", precision="bf16", **base), user("plain")
        ),
        "user-bf16-fsdp": replace_model(
            plan(store, tokens, run_id="user-bf16-fsdp", precision="bf16", strategy="fsdp", **base),
            user("plain"),
        ),
        "user-loss": replace_model(plan(store, tokens, run_id="user-loss", **base), user("with_loss")),
        "meta-ddp": replace_model(plan(store, tokens, run_id="meta-ddp", **base), user("initialized")),
        "meta-zero1": replace_model(
            plan(store, tokens, run_id="meta-zero1", strategy="zero1", **base), user("initialized")
        ),
        "meta-fsdp": replace_model(
            plan(store, tokens, run_id="meta-fsdp", strategy="fsdp", **base), user("initialized")
        ),
    }


def whole_models(folder, tokens):
    """Of one block, on one rank: each kernel of a whole model is a second of a compiler's."""
    base = {"steps": 4, "every": 4, "world_size": 1, "strategy": "single"}
    base["model"] = plans.model_plan(num_layers=1)
    store = folder / "store"
    return {
        "one-block": plans.train_plan(store, tokens, run_id="one-block", **base),
        "compiled-whole": plans.train_plan(store, tokens, run_id="whole", compile="model", **base),
    }


def replace_model(plan, model):
    return replace(plan, work=plan.work._replace(model=model))


@pytest.mark.combines("dp_replicate", "precision bf16")
@pytest.mark.combines("dp_shard", "precision bf16")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_bf16_means_the_same_under_every_strategy(varied, strategy):
    near(varied[f"bf16-{strategy}"], varied["bf16-ddp"], 1e-2)
    near(varied[f"bf16-{strategy}"], varied["fp32"], 1e-2)


@pytest.mark.combines("dp_replicate", "accumulation")
@pytest.mark.combines("dp_shard", "accumulation")
@pytest.mark.combines("dp_replicate", "activation_checkpointing full")
@pytest.mark.combines("dp_shard", "activation_checkpointing selective")
@pytest.mark.combines("dp_replicate", "compile")
@pytest.mark.parametrize(
    "name",
    [
        "accumulated-ddp",
        "accumulated-fsdp",
        "every-zero2",
        "every-fsdp",
        "full",
        "selective-fsdp",
        "compiled",
        "compiled-whole",
    ],
)
def test_what_only_saves_memory_or_time_changes_no_loss(varied, name):
    near(varied[name], varied["one-block" if name.startswith("compiled") else "fp32"], 1e-5)


@pytest.mark.combines("dp_replicate", "your own model")
@pytest.mark.combines("dp_shard", "your own model")
def test_a_users_model_trains_the_same_under_every_strategy(varied):
    near(varied["user-fsdp"], varied["user-ddp"], 1e-5)
    near(varied["user-loss"], varied["user-ddp"], 1e-5)
    near(varied["user-bf16-fsdp"], varied["user-bf16-ddp"], 1e-2)
    near(varied["user-bf16-ddp"], varied["user-ddp"], 1e-2)
    near(varied["meta-fsdp"], varied["meta-ddp"], 1e-5)
    near(varied["meta-zero1"], varied["meta-ddp"], 1e-5)
    assert varied["user-ddp"][-1] < varied["user-ddp"][0]
