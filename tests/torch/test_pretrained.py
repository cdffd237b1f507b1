"""Open weights of `transformers`' own classes: the same logits by mlpipe's model, trained from their first
step however it is split, and what is exported is what `transformers` loads again."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from kit import plans

from mlpipe._core.presets import MoeConfig
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import AdapterPlan, InitPlan, ModelPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.shapes import pretrained
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.submit.starting import find
from mlpipe.train.base_weights import _drop_derived
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.export import export_checkpoint, export_merged
from mlpipe.train.init import initialize
from mlpipe.train.models.llama import Llama, build_model
from mlpipe.train.models.moe import build_model as build_moe
from mlpipe.train.world import World

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 1e4,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 64}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
}
FILE_WORDS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "block_sparse_moe": "mlp"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A folder with one of each, as `save_pretrained` leaves it, `qwen3` in several files; and the models."""
    import transformers

    folder, made = tmp_path_factory.mktemp("bases"), {}
    for name, (kind, more) in CONFIGS.items():
        torch.manual_seed(3)
        config = getattr(transformers, kind)(**SIZES, **more)
        made[name] = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():  # away from logits that are all nearly zero, and norms that are all one
            for parameter in made[name].parameters():
                parameter.normal_(1.0, 0.5) if parameter.dim() == 1 else parameter.mul_(4.0)
        made[name].save_pretrained(folder / name, max_shard_size="30KB" if name == "qwen3" else "1GB")
    assert len(list((folder / "qwen3").glob("*.safetensors"))) > 2
    return folder, made


def ours(folder: Path) -> Llama:
    """mlpipe's model with the weights of a folder, by nothing of the trainer's."""
    sizes = pretrained.sizes_of(pretrained.read_config(str(folder)), "")
    model = (build_moe if isinstance(sizes, MoeConfig) else build_model)(**sizes.args())
    initialize(model, 0)
    files = folder.glob("*.safetensors")
    state = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    stacked: dict[str, list[torch.Tensor]] = defaultdict(list)
    for file_name, tensor in sorted(state.items()):  # of fewer than ten experts in their order
        words = [FILE_WORDS.get(word, word) for word in file_name.removeprefix("model.").split(".")]
        if "experts" in words:
            words = [*words[:4], words[5]]
        stacked[".".join(words)].append(tensor)
    model.load_state_dict({name: torch.cat(parts) for name, parts in stacked.items()})
    return model


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_the_logits_are_those_of_transformers(bases, name):
    folder, made = bases
    inputs = torch.randint(0, 256, (3, 60), generator=torch.Generator().manual_seed(1))
    expected = made[name](inputs).logits
    model = ours(folder / name)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(inputs), expected, atol=1e-5, rtol=0)
    named = pretrained.sizes_of(json.loads((folder / name / "config.json").read_text()), "").named_tensors()
    assert [(one.name, one.size) for one in named] == [
        (name, parameter.numel()) for name, parameter in model.named_parameters()
    ]


def plan_of(folder: Path, name: str, strategy: Any, world_size: int, **changes: Any) -> Plan:
    config = pretrained.read_config(str(folder / name))
    sizes = pretrained.sizes_of(config, "")
    init = InitPlan({"path": name}, name, {}, strict=True, config=config)
    init = init._replace(found=find(FolderStore(folder / "store"), "", init, str(folder)))
    model = ModelPlan(Entry(sizes.entry, sizes.args()), name, 32, ())
    run = f"{name}-{strategy}-{changes.get('mesh', Mesh()).tp}"
    return plans.train_plan(
        folder / "store", folder / "tokens", run_id=run, strategy=strategy, world_size=world_size, steps=2,
        every=2, model=model, init_from=init, **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(bases) -> dict[str, Plan]:
    folder, _ = bases
    plans.write_tokens(folder / "tokens")
    made = [
        plan_of(folder, "qwen3", "fsdp", 2),
        plan_of(folder, "biased", "ddp", 2),
        plan_of(folder, "biased", "single", 2, mesh=Mesh(tp=2)),
        plan_of(folder, "qwen3", "single", 2, mesh=Mesh(tp=2)),
        plan_of(folder, "mixtral", "fsdp", 2, mesh=Mesh(dp_shard=2, ep=2)),
        plan_of(folder, "mixtral", "single", 2, mesh=Mesh(tp=2)),
        plan_of(folder, "qwen3_moe", "ddp", 2, adapter=AdapterPlan(4, 400.0)),
    ]
    plans.run_together(made, folder / "run")
    return {plan.run_id: plan for plan in made}


def first_loss(plan: Plan, model: Llama) -> float:
    """Of the first step's samples, outside of any trainer."""
    train = plan.work.training
    loader = MicrobatchLoader(
        open_dataset(train.data, split="train", seq_len=32), World(Mesh(), 0, torch.device("cpu")),
        seed=train.seed, global_batch=train.global_batch, micro_batch=99, seq_len=1,
    )  # fmt: skip
    (batch,) = loader.step(0)
    logits, targets = model(batch.batch["inputs"]), batch.batch["targets"].flatten().long()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).item()


@pytest.mark.parametrize("name", ["qwen3", "biased", "mixtral"])
@torch.no_grad()
def test_training_begins_with_these_weights_however_it_is_split(bases, trained, name):
    """The second loss tells whether gradients of biases and of norms of heads are whole."""
    folder, _ = bases
    first, second = (plan for run, plan in trained.items() if run.startswith(f"{name}-"))
    assert plans.losses(folder / "store", first)[0] == pytest.approx(
        first_loss(first, ours(folder / name)), rel=1e-5
    )
    assert plans.losses(folder / "store", second) == pytest.approx(
        plans.losses(folder / "store", first), rel=1e-5
    )


@pytest.mark.parametrize("run", ["qwen3-fsdp-1", "biased-single-2", "mixtral-fsdp-1"])
@torch.no_grad()
def test_the_export_is_the_same_architecture_for_transformers(bases, trained, run):
    import transformers

    folder, made = bases
    name = run.partition("-")[0]
    (folder / name / "tokenizer.json").write_text("{}")
    store = FolderStore(folder / "store")
    key = catalogue.latest(store, trained[run].stage_key).key
    done = export_checkpoint(store, key, folder / "out" / run)
    assert done.transformers
    assert "tokenizer.json" in done.files
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "out" / run, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(theirs) is type(made[name])
    inputs = torch.randint(0, 256, (3, 60), generator=torch.Generator().manual_seed(1))
    logits = theirs(inputs).logits
    torch.testing.assert_close(logits, ours(folder / "out" / run)(inputs), atol=1e-5, rtol=0)
    assert (logits - made[name](inputs).logits).abs().max() > 1e-3  # it was trained


@torch.no_grad()
def test_adapters_stand_beside_the_attention_of_a_mixture_of_experts(bases, trained):
    import transformers

    folder, made = bases
    plan = trained["qwen3_moe-ddp-1"]
    assert plans.losses(folder / "store", plan)[0] == pytest.approx(
        first_loss(plan, ours(folder / "qwen3_moe")), rel=1e-5
    )
    store = FolderStore(folder / "store")
    key = catalogue.latest(store, plan.stage_key).key
    names = catalogue.load_manifest(store, key)["tensors"]
    assert len(names) == 2 * 4 * 2 * 3  # blocks, projections, A and B, each with two means of AdamW
    done = export_merged(store, key, folder / "out" / "experts")
    assert done.transformers
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "out" / "experts")
    inputs = torch.randint(0, 256, (3, 60), generator=torch.Generator().manual_seed(1))
    logits = theirs(inputs).logits
    torch.testing.assert_close(logits, ours(folder / "out" / "experts")(inputs), atol=1e-5, rtol=0)
    assert (logits - made["qwen3_moe"](inputs).logits).abs().max() > 1e-3


@pytest.mark.parametrize(("tied", "left"), [(True, {"n"}), (False, {"n", "lm_head.weight"})])
def test_a_head_that_is_the_embedding_and_frequencies_are_left_as_transformers_leaves_them(tied, left):
    names = ("n", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    source = SimpleNamespace(tensors=dict.fromkeys(names))
    _drop_derived(source, {"tied": tied})
    assert set(source.tensors) == left
