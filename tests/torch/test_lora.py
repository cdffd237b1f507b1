"""Adapters beside open weights: the same training however it is split, checkpoints of adapters alone that go
on under another strategy, and an export whose product with the weights is what was trained."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from kit import plans

from mlpipe._core.adapters import MAGNITUDE, A, B
from mlpipe._core.errors import TrainError
from mlpipe._core.quantized import is_quantized
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import AdapterPlan, InitPlan, ModelPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.shapes import pretrained
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.submit.starting import find
from mlpipe.train import export
from mlpipe.train import export_merged as merging
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.export import export_checkpoint, export_merged
from mlpipe.train.export_adapter import adapter_config
from mlpipe.train.init import initialize
from mlpipe.train.models.llama import Llama, build_model
from mlpipe.train.models.quantized_linear import dequantize, quantize
from mlpipe.train.parallel import lora
from mlpipe.train.world import World

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

CONFIG: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e4,
}  # fmt: skip
SIZES = pretrained.sizes_of(CONFIG, "")
DORA = AdapterPlan(4, 6.0, dora=True)
ALL, SOME = AdapterPlan(4, 6.0), AdapterPlan(4, 6.0, ("q_proj", "layers.1.mlp.*"), rslora=True)
# whose FSDP2 cannot split weights of few bits
OLDEST = torch.__version__.startswith("2.11.")
FSDP, ZERO2 = ("ddp", "ddp") if OLDEST else ("fsdp", "zero2")
NF4, INT8_DORA = AdapterPlan(4, 6.0, base="nf4"), AdapterPlan(4, 6.0, dora=True, base="int8")


def model_of(state: dict[str, torch.Tensor]) -> Llama:
    model = build_model(**SIZES.args())
    initialize(model, 0)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    return model


def rounded(name: str, weight: torch.Tensor, base: Any) -> torch.Tensor:
    """As a base in few bits has it."""
    if base is None or not is_quantized(name):
        return weight
    return dequantize(quantize(weight, base), weight.shape[1], base).contiguous()


def plan_of(
    folder: Path,
    run: str,
    strategy: Any,
    steps: int,
    adapter: AdapterPlan,
    base: str = "base",
    **changes: Any,
) -> Plan:
    init = InitPlan({"path": base}, base, {}, strict=True, config=CONFIG)
    init = init._replace(found=find(FolderStore(folder / "store"), "", init, str(folder)))
    model = ModelPlan(Entry("mlpipe.train.models.llama:build_model", SIZES.args()), "base", 32, ())
    plan = plans.train_plan(
        folder / "store", folder / "tokens", run_id=run, strategy=strategy, steps=steps, every=2, model=model,
        init_from=init, adapter=adapter, **changes,
    )  # fmt: skip
    optimizer = plan.work.training.optimizer._replace(lr=1e-2)
    return replace(plan, work=plan.work.training._replace(optimizer=optimizer))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, Plan]]:
    folder = tmp_path_factory.mktemp("lora")
    plans.write_tokens(folder / "tokens")
    model = build_model(**SIZES.args())
    initialize(model, 5)
    state = {f"model.{name}": tensor.detach() * 2 for name, tensor in model.named_parameters()}
    for base in (None, "nf4", "int8"):
        path = folder / (base or "base")
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG))
        kept = {name: rounded(name, tensor, base) for name, tensor in state.items()}
        safetensors.torch.save_file(kept, path / "model.safetensors")
    made = {
        "fsdp": plan_of(folder, "fsdp", "fsdp", 5, ALL),
        "zero1": plan_of(folder, "zero1", "zero1", 3, ALL),
        "begun": plan_of(folder, "half", "ddp", 2, ALL),
        "half": plan_of(folder, "half", "fsdp", 4, ALL, attempt=2),
        "some": plan_of(folder, "some", "ddp", 3, SOME),
        "tp": plan_of(folder, "moving", "single", 2, ALL, mesh=Mesh(tp=2)),
        "pp": plan_of(
            folder,
            "moving",
            "single",
            4,
            ALL,
            attempt=2,
            mesh=Mesh(pp=2),
            pipeline=PipelinePlan("1f1b", (1, 1)),
            micro_batch=4,
            accumulation=4,
        ),
        "cp": plan_of(folder, "cp", "single", 2, ALL, mesh=Mesh(cp=2)),
        "tp again": plan_of(folder, "moving", "single", 5, ALL, attempt=3, mesh=Mesh(tp=2)),
        "dora whole": plan_of(folder, "dora-whole", "zero1", 3, DORA),
        "dora begun": plan_of(folder, "dora", "ddp", 2, DORA),
        "dora": plan_of(folder, "dora", "fsdp", 3, DORA, attempt=2),
        "nf4 plain": plan_of(folder, "nf4-plain", "ddp", 5, ALL, "nf4"),
        "nf4 begun": plan_of(folder, "nf4", "ddp", 2, NF4),
        "nf4": plan_of(folder, "nf4", FSDP, 5, NF4, attempt=2),
        "int8 plain": plan_of(folder, "int8-plain", "zero2", 2, DORA, "int8"),
        "int8": plan_of(folder, "int8", ZERO2, 2, INT8_DORA),
        "bf16 plain": plan_of(folder, "bf16-plain", "ddp", 2, ALL, "nf4", precision="bf16"),
        "bf16": plan_of(folder, "bf16", FSDP, 2, NF4, precision="bf16", activation_checkpointing="full"),
        "int8 cp": plan_of(folder, "int8-cp", "single", 2, INT8_DORA, mesh=Mesh(cp=2)),
        "none": plan_of(folder, "none", "ddp", 1, AdapterPlan(4, 6.0, ("nothing",))),
    }
    of_four = {
        "nf4 hsdp": plan_of(
            folder, "nf4-hsdp", "hsdp", 2, NF4, world_size=4, mesh=Mesh(dp_replicate=2, dp_shard=2)
        )
    }
    plans.run_together(list(made.values()), folder / "run", may_fail=True)
    plans.run_together(list(of_four.values()), folder / "run-of-four", may_fail=OLDEST)
    return folder, made | of_four


def losses(trained: tuple[Path, dict[str, Plan]], name: str) -> list[float]:
    return plans.losses(trained[0] / "store", trained[1][name])


def loss_of(plan: Plan, model: Llama, step: int) -> float:
    """Of the samples of a step, from 0, outside of any trainer."""
    train = plan.work.training
    loader = MicrobatchLoader(
        open_dataset(train.data, split="train", seq_len=32), World(Mesh(), 0, torch.device("cpu")),
        seed=train.seed, global_batch=train.global_batch, micro_batch=99, seq_len=1,
    )  # fmt: skip
    (batch,) = loader.step(step * train.global_batch)
    with torch.no_grad():
        logits = model(batch.batch["inputs"]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch.batch["targets"].flatten().long()).item()


@pytest.mark.combines("dp_replicate", "adapter lora", "strategy zero1")
@pytest.mark.combines("dp_shard", "adapter lora", "resume under another mesh")
@pytest.mark.combines("tp", "adapter lora", "resume under another mesh")
@pytest.mark.combines("pp", "adapter lora", "resume under another mesh")
@pytest.mark.combines("cp", "adapter lora")
def test_strategies_agree_and_a_checkpoint_goes_on_under_another(trained):
    """From ddp to shards, from parts of layers to stages and back."""
    expected = losses(trained, "fsdp")
    assert losses(trained, "zero1") == pytest.approx(expected[:3], rel=1e-5)
    for axis, steps in {"tp": slice(0, 2), "pp": slice(2, 4), "tp again": slice(4, 5)}.items():
        assert losses(trained, axis) == pytest.approx(expected[steps], rel=1e-5)
    for name in ("begun", "cp"):
        assert losses(trained, name) == pytest.approx(expected[:2], rel=1e-5), name
    assert losses(trained, "half") == pytest.approx(expected[2:4], rel=1e-5)
    assert expected[4] < expected[0] - 0.05
    whole = losses(trained, "dora whole")
    assert losses(trained, "dora begun") + losses(trained, "dora") == pytest.approx(whole, rel=1e-5)
    assert whole[2] != expected[2]


@pytest.mark.combines("dp_replicate", "adapter base")
@pytest.mark.combines("dp_shard", "adapter base")
@pytest.mark.combines("cp", "adapter base")
def test_a_base_in_few_bits_is_trained_beside_as_the_weights_that_it_says(trained):
    """Of which the others have files; from copies to shards, copies of shards, parts of sequences, and
    with DoRA."""
    expected = losses(trained, "nf4 plain")
    assert losses(trained, "nf4 begun") + losses(trained, "nf4") == pytest.approx(expected, rel=1e-5)
    assert expected[0] != pytest.approx(losses(trained, "fsdp")[0], rel=1e-5)
    if OLDEST:
        output = (trained[0] / "run-of-four" / "output.log").read_text()
        assert "cannot split parameters that are no floats" in output
    else:
        assert losses(trained, "nf4 hsdp") == pytest.approx(expected[:2], rel=1e-5)
    for name in ("int8", "int8 cp"):
        assert losses(trained, name) == pytest.approx(losses(trained, "int8 plain"), rel=1e-5)
    assert losses(trained, "bf16") == pytest.approx(losses(trained, "bf16 plain"), rel=1e-3)


def test_checkpoints_have_adapters_and_their_states_alone(trained):
    folder, made = trained
    store = FolderStore(folder / "store")
    names = catalogue.load_manifest(store, catalogue.latest(store, made["fsdp"].stage_key).key)["tensors"]
    modules = {name.removeprefix("optim.").rpartition(".lora_")[0] for name in names}
    of_block = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    assert modules == {f"model.layers.{block}.{name}" for block in range(2) for name in of_block}
    assert len(names) == 3 * 2 * len(modules)  # A and B, each with two means of AdamW


@pytest.mark.parametrize(
    ("run", "adapter", "step"), [("fsdp", ALL, 4), ("some", SOME, 2), ("dora", DORA, 2), ("nf4", NF4, 4)]
)
def test_the_export_added_to_the_weights_is_what_was_trained(trained, run, adapter, step):
    """In peft's names and with its formula; B was 0 at first."""
    folder, made = trained
    base = safetensors.torch.load_file(folder / (adapter.base or "base") / "model.safetensors")
    first = f"{run} begun" if f"{run} begun" in made else run
    assert losses(trained, first)[0] == pytest.approx(loss_of(made[run], model_of(base), 0), rel=1e-6)
    store = FolderStore(folder / "store")
    (item,) = [one for one in catalogue.list_checkpoints(store, made[run].stage_key) if one.step == step]
    done = export_checkpoint(store, item.key, folder / "out" / run)
    assert done.files == ("adapter_config.json", "adapter_model.safetensors")
    config = json.loads((folder / "out" / run / "adapter_config.json").read_text())
    parts = safetensors.torch.load_file(folder / "out" / run / "adapter_model.safetensors")
    factor = config["lora_alpha"] / config["r"] ** (0.5 if config["use_rslora"] else 1)
    prefix = "base_model.model."
    modules = {name.removeprefix(prefix).partition(".lora_")[0] for name in parts}
    assert len(modules) == (5 if adapter is SOME else 14)
    assert all(any(f".{name}".endswith(f".{end}") for end in config["target_modules"]) for name in modules)
    for name in modules:
        a, b = (parts[f"{prefix}{name}.lora_{part}.weight"] for part in "AB")
        weight = base[f"{name}.weight"]
        weight += factor * b @ a
        if adapter.dora:
            magnitude = parts[f"{prefix}{name}.lora_magnitude_vector"]
            weight *= (magnitude / weight.norm(dim=1))[:, None]
    expected = loss_of(made[run], model_of(base), step)
    assert losses(trained, run)[-1] == pytest.approx(expected, rel=1e-5)
    done = export_merged(store, item.key, folder / "merged" / run)
    assert (done.transformers, done.num_params) == (True, SIZES.num_params())
    merged = safetensors.torch.load_file(folder / "merged" / run / "model.safetensors")
    torch.testing.assert_close(merged, base, atol=1e-6, rtol=0)


def test_merging_rounds_to_the_dtype_of_the_weights_as_torch_does():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 10.0 ** torch.arange(
        -20, 20
    ).repeat(25)
    values[:4] = torch.tensor([math.nan, math.inf, 1.00390625, 1.01171875])  # the last two lie half-way
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name, expected = str(dtype).removeprefix("torch."), values.to(dtype)
        with np.errstate(over="ignore"):
            made = torch.frombuffer(bytearray(merging._bytes(values.numpy(), name)), dtype=dtype)
        torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)
        raw = expected.view(torch.uint8).numpy().data
        back = merging._floats(raw, {"dtype": name, "shape": [1000], "chunks": []})
        torch.testing.assert_close(torch.from_numpy(back), expected.float(), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(TrainError, match="cannot be merged into weights of int8"):
        merging._floats(memoryview(b"1"), {"dtype": "int8", "shape": [1], "chunks": []})


def test_what_cannot_be_merged_is_refused(trained, tmp_path, monkeypatch):
    """Weights that changed under the adapters, and a checkpoint that has all of them."""
    folder, made = trained
    store = FolderStore(folder / "store")
    key = catalogue.latest(store, made["some"].stage_key).key
    manifest = catalogue.load_manifest(store, key)
    start = manifest["scalars"]["init_from"]
    for change, words in (
        ({"found": {**start["found"], "digest": "0"}}, "changed since the run was asked for"),
        ({"strict": False}, "some of the weights beside the adapters may be the seed's"),
    ):
        scalars = {**manifest["scalars"], "init_from": {**start, **change}}
        with pytest.raises(TrainError, match=words):
            merging.Merged(store, {**manifest, "scalars": scalars}, str, {}, key)
    whole = {name: one for name, one in manifest["scalars"].items() if name != "adapter"}
    monkeypatch.setattr(export, "load_manifest", lambda store, key: {**manifest, "scalars": whole})
    with pytest.raises(TrainError, match="no adapter to merge"):
        export_merged(store, key, tmp_path / "out")


def outcome(trained: tuple[Path, dict[str, Plan]], name: str) -> dict[str, Any]:
    """Of rank 0."""
    folder, made = trained
    path = folder / "run" / f"scratch-{list(made).index(name)}" / "outcome-0.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_targets_that_fit_nothing_are_refused(trained):
    assert "'nothing' fits no linear layer" in outcome(trained, "none")["message"]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dora_is_that_of_peft(dropout):
    """What comes out and all gradients; with dropout of the same values."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    adapter = DORA._replace(dropout=dropout)
    torch.manual_seed(0)
    own, other = (torch.nn.Sequential(torch.nn.Linear(12, 7)).double() for _ in range(2))
    other.load_state_dict(own.state_dict())
    [layer] = lora._adapt(own, [own], adapter)
    lora._fill([layer])
    config = peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=["0"], use_dora=True, lora_dropout=dropout)
    theirs = peft.get_peft_model(other, config)
    names = {name.rpartition(".")[2]: parameter for name, parameter in layer.named_parameters()}
    with torch.no_grad():
        for name in (A, B, MAGNITUDE):
            names[name] += torch.randn_like(names[name]) / 4
        for name, parameter in theirs.named_parameters():
            for own_name in (A, B, MAGNITUDE):
                if f".{own_name}." in name:
                    parameter.copy_(names[own_name])
    x = torch.randn(5, 12, dtype=torch.float64)
    made = []
    for model in (own, theirs):
        torch.manual_seed(1)
        y = model.train()(x)
        y.square().sum().backward()
        grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        made.append([y, *(next(g for n, g in grads.items() if key in n) for key in (A, B, MAGNITUDE))])
    torch.testing.assert_close(*made)


def test_layers_of_an_encoder_have_theirs_in_evaluation_too():
    """Its fast path reads the weights of its layers, and attention those of its projection always."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
    built = SimpleNamespace(model=model, blocks=[model[0]], on_meta=False, construct=None)
    plan: Any = SimpleNamespace(adapter=ALL, seed=0)
    try:
        lora.apply(SimpleNamespace(built=built, base=None), None, plan)  # type: ignore[arg-type]
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert names == [f"0.linear{i}.lora_{part}" for i in (1, 2) for part in "AB"]
        for i in (1, 2):
            model.get_parameter(f"0.linear{i}.lora_B").data.normal_()
        x = torch.randn(2, 5, 16)
        trained = model.train()(x)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), trained)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def test_layers_of_a_model_of_ones_own_are_named_whole_for_peft():
    """By their last words, which are numbers here, it would take others for them."""
    scalars = {"adapter": {"targets": [], "rank": 4, "alpha": 6.0, "dropout": 0.0, "rslora": False}}
    names = [f"layers.{i}.{j}.lora_A" for i in (0, 1) for j in (0, 2)]
    told = adapter_config(scalars, names, for_transformers=False)
    assert told["target_modules"] == ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]
    assert told["task_type"] is None
