"""What else a training may say, along each axis of the mesh: on two ranks, which are started once, beside the
same on one rank."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from kit import plans
from kit.weights import held, weights

from mlpipe._core.compression import COMPRESSIONS
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe._core.presets import LLAMA, MOE, LlamaConfig, MoeConfig
from mlpipe._core.quantized import Base, is_quantized
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import AdapterPlan, InitPlan, ModelPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.updates import CompressPlan, EmaPlan, OptimizerPlan
from mlpipe.plan.validation import MetricPlan, ValidatePlan
from mlpipe.store.folder import FolderStore
from mlpipe.submit.starting import find
from mlpipe.train.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from mlpipe.train.init import initialize
from mlpipe.train.models import llama, moe
from mlpipe.train.models.quantized_linear import dequantize, quantize

pytestmark = pytest.mark.torch

STEPS, HELD_OUT = 4, 500
VOCAB = MIN_VOCAB_SIZE + MIN_VOCAB_SIZE % 2
CONFIG = replace(plans.CONFIG, vocab_size=VOCAB, dim=32, ffn_dim=48)
ONE_BLOCK = replace(CONFIG, num_layers=1)
# whose rows, of which tp leaves half, have whole blocks of values that share a scale
WIDE = replace(CONFIG, num_layers=1, dim=512, ffn_dim=512)
EXPERTS = MoeConfig(
    **{**vars(CONFIG), "tied": False}, num_experts=4, experts_per_token=2, num_shared_experts=1,
    balance_rate=0.01,
)  # fmt: skip
AXES = {
    "pp": Mesh(pp=2), "dp_replicate": Mesh(dp_replicate=2), "dp_shard": Mesh(dp_shard=2), "cp": Mesh(cp=2),
    "tp": Mesh(tp=2), "ep": Mesh(dp_shard=2, ep=2),
}  # fmt: skip
FROZEN = "embed_tokens.weight"
OWN = OptimizerPlan(None, "torch.optim:Adam", {"eps": 1e-6}, 8, 3e-3, 1.0, "constant", 0, 0, 0.1)
ALL: dict[str, Any] = {
    "freeze": (FROZEN,), "optimizer": OWN,
    "validate": ValidatePlan(2, HELD_OUT, (MetricPlan("loss"),)),
}  # fmt: skip
OF_EXPERTS = ("sgd", "lion", "adamw8bit", "adamw4bit", "schedule_free_adamw")
OF_PARTS = ("adamw8bit", "adamw4bit")
# of losses: a rounding is another sign to Lion, another code of few bits
NEAR = {"lion": 1e-3, "adamw8bit": 1e-3, "adamw4bit": 3e-3}


def model_of(config: LlamaConfig) -> ModelPlan:
    entry = MOE if isinstance(config, MoeConfig) else LLAMA
    return ModelPlan(Entry(entry, dataclasses.asdict(config)), "test", 32, ())


def optimizer_of(name: str) -> OptimizerPlan:
    args = {key: argument.default for key, argument in OPTIMIZERS[name].arguments.items()}
    args = {key: list(value) if isinstance(value, tuple) else value for key, value in args.items()}
    states = OPTIMIZERS[name].state_bytes_per_parameter(args)
    return OptimizerPlan(name, None, args, states, 3e-3, 1.0, "constant", 0, 0, 0.1)


def compression_of(name: str) -> CompressPlan:
    return CompressPlan(name, {"powersgd": {"rank": 2}, "topk": {"ratio": 0.1}}.get(name, {}))


class Trained:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "store"
        self.tokens = plans.write_tokens(folder / "tokens")
        train_tokenizer([], MIN_VOCAB_SIZE).save(str(self.tokens / "tokenizer.json"))
        path = self.tokens / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": "tokenizer.json"}))
        self.made: dict[str, Plan] = {}
        self.run(1, self.of_one_rank())
        self.run(2, self.of_two_ranks())

    def plan(self, run_id: str, mesh: Mesh, config: LlamaConfig = CONFIG, **changes: Any) -> Plan:
        if mesh.pp > 1:
            changes |= {"pipeline": PipelinePlan("1f1b", (1, 1)), "micro_batch": 8, "accumulation": 2}
        return plans.train_plan(
            self.store, self.tokens, world_size=mesh.world_size, mesh=mesh, run_id=run_id,
            strategy="fsdp" if mesh.dp_shard > 1 else "ddp", steps=STEPS, every=100,
            **{"model": model_of(config), **changes},
        )  # fmt: skip

    def measured(self, name: str) -> list[Plan]:
        """It, and the evaluation of what it has learnt, with a sample of text."""
        return [
            self.made[name],
            plans.evaluate_plan(self.made[name], prompt="ab", generate_tokens=12, max_tokens=HELD_OUT),
        ]

    def of_one_rank(self) -> list[Plan]:
        self.made |= {
            "alone": self.plan("alone", Mesh(), **ALL),
            "experts alone": self.plan("experts-alone", Mesh(), EXPERTS, **ALL),
            "plain": self.plan("plain", Mesh()),
            "one block": self.plan("one block", Mesh(), ONE_BLOCK),
        }
        others = [
            self.made["plain"],
            self.made["one block"],
            *self.of_optimizers("alone", Mesh(), Mesh()),
            self.adapters("alone", Mesh()),
        ]
        return [*self.measured("alone"), *self.measured("experts alone"), *others]

    def of_two_ranks(self) -> list[Plan]:
        for axis, mesh in AXES.items():
            self.made[axis] = self.plan(axis, mesh, EXPERTS if axis == "ep" else CONFIG, **ALL)
        others = [
            *self.of_optimizers("split", AXES["ep"], AXES["tp"]),
            self.adapters("split", AXES["ep"], "nf4"),
            *(
                self.kept(self.plan(f"cp {name}", AXES["cp"], compress=compression_of(name)))
                for name in COMPRESSIONS
            ),
            self.kept(self.plan("compiled pp", AXES["pp"], compile="block")),
            self.kept(self.plan("compiled tp", AXES["tp"], ONE_BLOCK, compile="block")),
        ]
        return [plan for axis in AXES for plan in self.measured(axis)] + others

    def of_optimizers(self, prefix: str, of_experts: Mesh, of_parts: Mesh) -> list[Plan]:
        """Of experts with an average of the weights, unless the optimizer has one of its own."""
        ema = EmaPlan(0.8, every=2)
        return [
            *(
                self.kept(
                    self.plan(
                        f"{prefix} experts {name}", of_experts, EXPERTS, optimizer=optimizer_of(name),
                        ema=None if OPTIMIZERS[name].averages else ema,
                    )
                )
                for name in OF_EXPERTS
            ),
            *(
                self.kept(self.plan(f"{prefix} parts {name}", of_parts, WIDE, optimizer=optimizer_of(name)))
                for name in OF_PARTS
            ),
        ]  # fmt: skip

    def adapters(self, prefix: str, mesh: Mesh, base: Base | None = None) -> Plan:
        """In a model with experts, beside weights of few bits, or beside what these say."""
        kept = AdapterPlan(4, 6.0, base=base)
        return self.kept(
            self.plan(f"{prefix} base", mesh, EXPERTS, init_from=self.weights(base), adapter=kept)
        )

    def weights(self, base: Base | None) -> InitPlan:
        name = base or "rounded"
        (self.folder / name).mkdir()
        model = moe.build_model(**dataclasses.asdict(EXPERTS))
        initialize(model, 5)
        state = model.state_dict()
        if base is None:
            state |= {
                name: dequantize(quantize(weight, "nf4"), weight.shape[1], "nf4").contiguous()
                for name, weight in state.items()
                if is_quantized(name)
            }
        safetensors.torch.save_file(state, self.folder / name / "model.safetensors")
        init = InitPlan({"path": name}, name, {}, strict=True)
        return init._replace(found=find(FolderStore(self.store), "", init, str(self.folder)))

    def kept(self, plan: Plan) -> Plan:
        return self.made.setdefault(plan.run_id, plan)

    def run(self, num_ranks: int, made: list[Plan]) -> None:
        # kernels of blocks, which inductor makes: test_context.py
        plans.run_together(made, self.folder / f"of-{num_ranks}", compiler="aot_eager")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("axes"))


def evaluation(trained: Trained, name: str) -> dict[str, Any]:
    found = plans.records(trained.store, replace(trained.made[name], stage="evaluate"))
    (one,) = [record for record in found if record["kind"] == "evaluate"]
    return one


def validations(trained: Trained, name: str) -> list[float]:
    found = plans.records(trained.store, trained.made[name])
    return [one["metrics"]["loss"] for one in found if one["kind"] == "validation"]


@pytest.mark.combines("pp", "freeze", "your own optimizer", "validate")
@pytest.mark.combines("dp_replicate", "freeze", "your own optimizer")
@pytest.mark.combines("dp_shard", "freeze", "your own optimizer")
@pytest.mark.combines("cp", "freeze", "your own optimizer")
@pytest.mark.combines("tp", "freeze", "your own optimizer")
@pytest.mark.combines("ep", "freeze", "your own optimizer", "validate", "model with experts")
@pytest.mark.parametrize("axis", AXES)
def test_it_trains_as_on_one_rank(trained: Trained, axis: str) -> None:
    """With a part that stays, which is the head as well of all but the experts; with an optimizer that mlpipe
    does not know, whose states are compared too; and measured on held-out samples in between."""
    alone = "experts alone" if axis == "ep" else "alone"
    store, made = trained.store, trained.made
    for field, relative in {"loss": 1e-5, "grad_norm": 1e-3}.items():
        expected = plans.by_step(store, made[alone], field)
        assert plans.by_step(store, made[axis], field) == pytest.approx(expected, rel=relative), field
    assert len(validations(trained, axis)) == 2
    assert validations(trained, axis) == pytest.approx(validations(trained, alone), rel=1e-5)
    assert expected != plans.by_step(store, made["plain"], field)
    mine, theirs = (held(store, made[name]) for name in (axis, alone))
    assert mine.keys() == theirs.keys()
    assert not any(name.startswith("optim.") and FROZEN in name for name in mine)
    for name, value in theirs.items():
        assert (mine[name] - value).abs().max() <= 2e-4 * value.abs().max(), name
    begun = (moe if axis == "ep" else llama).build_model(**made[axis].work.training.model.build.args)
    initialize(begun, made[axis].work.training.seed)
    assert torch.equal(mine[f"model.{FROZEN}"], begun.get_parameter(FROZEN))
    assert not torch.equal(mine["model.norm.weight"], begun.get_parameter("norm.weight"))


@pytest.mark.combines("pp", "evaluate", "generate", "export")
@pytest.mark.combines("dp_replicate", "evaluate", "generate", "export")
@pytest.mark.combines("dp_shard", "evaluate", "generate", "export")
@pytest.mark.combines("cp", "evaluate", "generate", "export")
@pytest.mark.combines("tp", "evaluate", "generate", "export")
@pytest.mark.combines("ep", "evaluate", "generate", "export")
@pytest.mark.parametrize("axis", AXES)
def test_what_it_has_learnt_is_what_one_rank_has(trained: Trained, axis: str, tmp_path: Path) -> None:
    """Measured under the mesh that trained it, in text that the ranks write together, and as files."""
    names = (axis, "experts alone" if axis == "ep" else "alone")
    mine, theirs = (evaluation(trained, name) for name in names)
    assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-5)
    assert mine["val_loss"] == pytest.approx(validations(trained, axis)[-1], rel=1e-6)
    assert mine["sample"] == theirs["sample"]
    assert len(mine["sample"]) > len("ab")
    of_axis, of_one = (weights(trained.store, trained.made[name], tmp_path) for name in names)
    assert of_axis.keys() == of_one.keys()
    for name, value in of_one.items():
        assert (of_axis[name] - value).abs().max() <= 2e-4 * value.abs().max(), name


def near(trained: Trained, name: str, other: str, relative: float = 1e-5) -> None:
    store, made = trained.store, trained.made
    expected = plans.losses(store, made[other])
    assert len(expected) == STEPS
    assert plans.losses(store, made[name]) == pytest.approx(expected, rel=relative)


@pytest.mark.combines("ep", "ema", "optimizer sgd", "model with experts")
@pytest.mark.combines("ep", "ema", "optimizer lion", "model with experts")
@pytest.mark.combines("ep", "ema", "optimizer adamw?bit", "model with experts")
@pytest.mark.combines("ep", "optimizer schedule_free_adamw", "model with experts")
@pytest.mark.combines("tp", "optimizer adamw?bit")
@pytest.mark.parametrize(
    "name", [*(f"experts {name}" for name in OF_EXPERTS), *(f"parts {name}" for name in OF_PARTS)]
)
def test_optimizers_are_those_of_one_rank(trained: Trained, name: str) -> None:
    """In losses, and in the average of the weights."""
    relative = NEAR.get(name.partition(" ")[2], 1e-5)
    near(trained, f"split {name}", f"alone {name}", relative)
    mine, theirs = (held(trained.store, trained.made[f"{prefix} {name}"]) for prefix in ("split", "alone"))
    assert {key: value.shape for key, value in mine.items()} == {k: v.shape for k, v in theirs.items()}
    averages = [key for key in theirs if key.endswith(".ema")]
    assert bool(averages) == (name.startswith("experts") and "schedule_free" not in name)
    for key in averages:
        difference = (mine[key] - theirs[key]).abs().mean()
        assert difference <= 30 * relative * theirs[key].abs().mean(), key


@pytest.mark.combines("ep", "adapter base", "model with experts")
def test_a_base_of_few_bits_lies_beside_experts(trained: Trained) -> None:
    near(trained, "split base", "alone base")
    mine, theirs = (held(trained.store, trained.made[f"{prefix} base"]) for prefix in ("split", "alone"))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (mine[name] - value).abs().max() <= 1e-3 * value.abs().max(), name


@pytest.mark.combines("cp", "compress *")
def test_gradients_of_parts_of_sequences_are_sent_in_fewer_bytes(trained: Trained) -> None:
    store, made = trained.store, trained.made
    plain = plans.losses(store, made["plain"])
    for name, within in {"fp16": 1e-4, "bf16": 1e-3, "int8": 3e-3, "int4": 2e-2}.items():
        losses = plans.losses(store, made[f"cp {name}"])
        assert losses == pytest.approx(plain, rel=within), name
        assert losses != pytest.approx(plain, rel=1e-8), name
    for name in ("powersgd", "topk"):
        losses = plans.losses(store, made[f"cp {name}"])
        assert losses[0] == pytest.approx(plain[0]), name
        assert losses[-1] < losses[0] - 0.3 * (plain[0] - plain[-1]), name
    for name in COMPRESSIONS:
        sent, whole = (
            plans.by_step(store, made[f"cp {name}"], field)
            for field in ("exchanged_bytes", "exchanged_plain_bytes")
        )
        assert all(s < w / 1.9 for s, w in zip(sent, whole, strict=True)), name


@pytest.mark.combines("pp", "compile")
@pytest.mark.combines("tp", "compile")
@pytest.mark.parametrize(("axis", "other"), [("pp", "plain"), ("tp", "one block")])
def test_compiled_blocks_of_a_part_give_the_same(trained: Trained, axis: str, other: str) -> None:
    near(trained, f"compiled {axis}", other)
