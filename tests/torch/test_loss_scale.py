"""fp16 trains as with torch's own GradScaler, on any mesh, and goes on from a checkpoint as if nothing had
been."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kit import plans
from kit.processes import digest_of

from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.updates import EmaPlan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.loss_scale import INITIAL, LEAST, LossScale
from mlpipe.train.model import LossModule, build_model
from mlpipe.train.world import World

pytestmark = pytest.mark.torch

STEPS, TARGETS = 12, 16 * 32


def overflowing(**args) -> ModelPlan:
    return ModelPlan(Entry("kit.models:overflowing", args), None, 32, ())


def fp16(folder, run_id, *, model=None, steps=STEPS, **settings):
    """Samples that begin with one of few tokens overflow: here in three of twelve steps."""
    tokens, settings = folder / "tokens", {"every": STEPS, **settings}
    plan = plans.train_plan(
        folder / "store", tokens, steps=steps, run_id=run_id, precision="fp16", **settings
    )
    return replace(plan, work=plan.work._replace(model=model or overflowing()))


def told(folder, plan, field):
    return plans.by_step(folder / "store", plan, field)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_the_scale_follows_the_rule_of_GradScaler(overflows, growth_steps):
    module = LossModule(torch.nn.Linear(1, 1), "cpu", "fp16")
    ours = LossScale(module, TARGETS - 1, growth_steps)
    scale, tracker = torch.tensor(INITIAL), torch.tensor(0, dtype=torch.int32)
    for overflowed in overflows:
        ours.update(overflowed=overflowed)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflowed)), 2.0, 0.5, growth_steps)
        assert (ours.scale, ours.good_steps) == (float(scale), int(tracker))
        assert module.gradient_scale == ours.factor == ours.scale / TARGETS
    again = LossScale(module, TARGETS, growth_steps)
    again.load(ours.scalars())
    assert vars(again) | {"_tensor": None} == vars(ours) | {"_tensor": None}
    assert ours.num_skipped == sum(overflows)


def test_a_scaled_loss_is_the_same_and_its_gradient_so_much_larger():
    """Also where the model has a loss of its own, and where the gradient alone would vanish in fp16."""

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor([[[20.0, 0.0, 1.0]]]))

        def forward(self, inputs):
            return self.logits.to(torch.float16)

    class WithLoss(Own):
        def loss(self, batch):
            return F.cross_entropy(self(batch["inputs"])[0].float(), batch["targets"][0]), torch.tensor(1)

    batch = {"inputs": torch.tensor([[0]]), "targets": torch.tensor([[0]])}
    for kind in (Own, WithLoss):
        gradients = []
        for scale in (None, torch.tensor(1024.0)):
            module = LossModule(kind(), "cpu", "fp16")
            module.gradient_scale = scale
            loss, _ = module(batch)
            loss.backward()
            gradients.append(module.model.logits.grad)
            exact = F.cross_entropy(module.model.logits.detach()[0], torch.tensor([0]))
            assert loss.item() == pytest.approx(float(exact))
        assert gradients[0][0, 0, 1] == 0 or kind is WithLoss  # 2e-9 is none in fp16
        wanted = 1024 * torch.softmax(module.model.logits.detach()[0, 0], -1)[1:]
        torch.testing.assert_close(gradients[1][0, 0, 1:], wanted, rtol=2e-2, atol=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp16")
    plans.write_tokens(folder / "tokens")
    return folder


LLAMAS: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "single", "world_size": 1},
    "llama": {"strategy": "fsdp"},
    "layers": {"mesh": Mesh(tp=2), "micro_batch": 16},
    "sequence": {"mesh": Mesh(cp=2), "micro_batch": 16},
    "pipeline": {
        "mesh": Mesh(pp=2),
        "pipeline": PipelinePlan("zero_bubble", (1, 1)),
        "micro_batch": 4,
        "accumulation": 4,
    },
}


@pytest.fixture(scope="module")
def trained(folder):
    """By name, finished. `louder` overflows at a scale that it finds; `first` is half of `ddp`,
    `again` the rest."""
    two_steps = {"micro_batch": 4, "accumulation": 2, "ema": EmaPlan(0.9)}
    louder = overflowing(below=128, gain=512.0)
    made = {
        "single": fp16(folder, "single", strategy="single", world_size=1),
        "ddp": fp16(folder, "ddp", strategy="ddp", every=6, **two_steps),
        "first": fp16(folder, "first", strategy="ddp", every=6, **two_steps),
        "zero1": fp16(folder, "zero1", strategy="zero1"),
        "fsdp": fp16(folder, "fsdp", strategy="fsdp"),
        "louder": fp16(folder, "louder", model=louder, strategy="single", world_size=1),
    }
    for name, changes in LLAMAS.items():  # in which nothing overflows
        made[name] = fp16(folder, name, model=plans.model_plan(), steps=5, **changes)
    whole = made["first"].work
    made["first"] = replace(made["first"], work=whole._replace(steps=6))
    made["again"] = replace(made["first"], attempt=2, work=whole._replace(resume=True))
    for world_size in (1, 2):
        mine = [plan for plan in made.values() if plan.launch.nproc_per_node == world_size]
        plans.run_together(mine, folder / f"world-{world_size}")
    return made


@pytest.mark.combines("dp_replicate", "precision fp16")
@pytest.mark.combines("dp_shard", "precision fp16")
@pytest.mark.combines("precision fp16", "accumulation")
@pytest.mark.combines("precision fp16", "ema")
def test_an_overflow_on_any_rank_skips_the_step_on_all_under_every_strategy(trained, folder):
    skipped = told(folder, trained["single"], "skipped")
    assert 2 <= sum(skipped) <= STEPS // 2
    assert not skipped[0]
    losses = told(folder, trained["single"], "loss")
    scales = told(folder, trained["single"], "loss_scale")
    assert scales == [INITIAL / 2 ** sum(skipped[:step]) for step in range(STEPS)]
    for name in ("ddp", "zero1", "fsdp"):
        plan = trained[name]
        assert told(folder, plan, "skipped") == skipped, name
        assert told(folder, plan, "loss_scale") == scales, name
        assert told(folder, plan, "loss") == pytest.approx(losses, rel=1e-3), name
    steps = [one for one in plans.records(folder / "store", trained["single"]) if one["kind"] == "step"]
    assert [one.get("lr") is None for one in steps] == skipped


def test_a_training_equals_one_with_torchs_GradScaler(trained, folder):
    """Step by step: losses, scales, which were skipped, and norms of gradients that were not."""
    plan = trained["louder"].work
    model = build_model(plan.model, seed=plan.seed, device_type="cpu").model
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    data = open_dataset(plan.data, split="train", seq_len=32)
    world = World(Mesh(), 0, torch.device("cpu"))
    loader = MicrobatchLoader(data, world, seed=plan.seed, global_batch=16, micro_batch=16, seq_len=32)
    scaler = torch.amp.GradScaler("cpu")
    losses, scales, skipped, norms = [], [], [], []
    for step in range(STEPS):
        (microbatch,) = loader.step(step * 16)
        with torch.autocast("cpu", torch.float16):
            logits = model(microbatch.batch["inputs"])
        loss = F.cross_entropy(logits.float().flatten(0, 1), microbatch.batch["targets"].flatten().long())
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        skipped.append(scaler.get_scale() < scales[-1])
    ours = trained["louder"]
    assert told(folder, ours, "skipped") == skipped
    assert told(folder, ours, "loss_scale") == scales
    assert told(folder, ours, "loss") == pytest.approx(losses, rel=1e-4)
    for step, norm in enumerate(told(folder, ours, "grad_norm")):
        assert skipped[step] or norm == pytest.approx(norms[step], rel=1e-2), step
    assert 2 <= sum(skipped) < STEPS // 2
    assert not skipped[-1]  # it recovered


def test_a_resumed_training_is_the_same_to_the_bit_after_a_skip(trained, folder):
    first, again, whole = trained["first"], trained["again"], trained["ddp"]
    assert any(told(folder, first, "skipped"))
    for field in ("loss", "loss_scale", "skipped", "grad_norm"):
        assert told(folder, again, field)[-6:] == told(folder, whole, field)[6:], field
    store, skipped = FolderStore(folder / "store"), sum(told(folder, whole, "skipped"))
    last = [catalogue.latest(store, plan.stage_key) for plan in (again, whole)]
    assert digest_of(store, last[0].key) == digest_of(store, last[1].key)
    scalars = catalogue.load_manifest(store, last[0].key)["scalars"]
    assert (scalars["step"], scalars["loss_scale"]["num_skipped"]) == (STEPS, skipped)
    # what was skipped moved neither the optimizer nor the average
    assert scalars["optimizer"]["scalars"]["num_updates"] == STEPS - skipped
    assert scalars["optimizer"]["scalars"]["ema"]["num_steps"] == STEPS - skipped


@pytest.mark.combines("tp", "precision fp16")
@pytest.mark.combines("cp", "precision fp16")
@pytest.mark.combines("pp", "precision fp16")
def test_a_llama_learns_the_same_in_fp16(trained, folder):
    losses = told(folder, trained["plain"], "loss")
    assert losses[-1] < losses[0]
    for name in LLAMAS:
        assert told(folder, trained[name], "loss") == pytest.approx(losses, rel=2e-3), name


def test_what_overflows_at_any_scale_ends_the_training(folder):
    plan = fp16(folder, "hopeless", model=overflowing(below=256), strategy="single", world_size=1)
    plan = replace(plan, work=plan.work._replace(steps=40))
    with pytest.raises(
        AssertionError, match=r"(?s)gradient is not finite at step 17.*no loss scale is small"
    ):
        plans.run_together([plan], folder / "hopeless")
    assert told(folder, plan, "loss_scale") == [INITIAL / 2**step for step in range(17)]
    assert told(folder, plan, "loss_scale")[-1] == LEAST
