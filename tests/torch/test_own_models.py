"""Models of one's own: what init_weights() leaves out, what a forward may return, and what is said else."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from kit import own, plans
from torch import nn

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.contract import check_call
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.export import export_checkpoint
from mlpipe.train.flops import count_flops_per_token
from mlpipe.train.init import same_weights
from mlpipe.train.model import LossModule, build_model
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations
from mlpipe.train.parallel.buffers import reading
from mlpipe.train.parallel.materialize import materialize
from mlpipe.train.parallel.pipeline import StagedLossModule, _of_children
from mlpipe.train.parallel.sequence import check_sequence, stages_of
from mlpipe.train.world import World

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
BATCH = {
    "inputs": torch.arange(24).view(4, 6),
    "targets": torch.arange(1, 25).view(4, 6),
}


def model_plan(function: str, **args: object) -> ModelPlan:
    return ModelPlan(Entry(f"kit.own:{function}", dict(args)), None, 6, ())


def made(function: str, seed: int = 3, **args: object) -> torch.nn.Module:
    """As a rank makes it."""
    built = build_model(model_plan(function, **args), seed=seed, device_type="cpu")
    materialize(built, seed, CPU)
    return built.model


def dirty_memory() -> None:
    """What comes out of malloc next is full of large numbers."""
    kept = [torch.full((size,), 1e30) for size in (48, 256, 512, 768, 1024, 4096) for _ in range(64)]
    del kept


def test_what_init_weights_does_not_fill_is_as_the_constructor_made_it(caplog):
    dirty_memory()
    model = made("tutorial")
    torch.manual_seed(3)
    whole = own.Tutorial()
    with torch.no_grad(), same_weights(3):
        whole.init_weights()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert "does not fill" in caplog.text
    assert "transformer_encoder.layers.0.self_attn.in_proj_weight" in caplog.text
    assert "encoder.weight" not in caplog.text.replace("_encoder", "").replace("transformer", "")


def test_rows_that_are_left_and_values_that_are_scaled_have_the_constructors_values():
    model = made("halved")
    assert model.rows.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert model.scaled.tolist() == [1.0] * 5
    assert model.count.item() == 7
    assert model.flags.tolist() == [True, False]


def test_a_model_that_fills_everything_is_built_without_memory_and_once(monkeypatch, caplog):
    built = build_model(
        ModelPlan(Entry("kit.models:initialized", {}), None, 6, ()), seed=3, device_type="cpu"
    )
    assert built.on_meta
    monkeypatch.setattr(built, "construct", lambda: pytest.fail("built for real"))
    materialize(built, 3, CPU)
    assert not caplog.text


@pytest.mark.parametrize("with_init", [True, False])
def test_what_nobody_fills_is_refused_by_name(with_init):
    with pytest.raises(TrainError, match=r"fills forgotten\n") as caught:
        made("empty", with_init=with_init)
    assert (caught.value.kind, caught.value.where) == ("input", "kit.own:empty")


def test_weights_that_a_builder_loads_are_kept(tmp_path, caplog):
    state = own.Loaded().state_dict()
    torch.save(state, tmp_path / "weights.pt")
    model = made("loaded", path=str(tmp_path / "weights.pt"))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert "taken as it is built, init_weights() is not called" in caplog.text


def test_models_of_transformers_are_built_and_loaded(tmp_path):
    """From a configuration: as it initialises them, under the seed. From a folder: with its weights."""
    first, second, other = (made("from_config", seed=seed) for seed in (3, 3, 4))
    weights = first.state_dict()
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in weights.items())
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert first.lm_head.weight is first.model.embed_tokens.weight
    assert abs(first.model.layers[0].mlp.up_proj.weight.std().item() - 0.02) < 0.005
    assert first.model.norm.weight.eq(1).all()
    first.save_pretrained(tmp_path)
    model = made("from_pretrained", seed=9, path=str(tmp_path))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights.items())
    # the output's logits under mlpipe's loss; with the data that transformers knows, the model's own loss
    loss, count = LossModule(model, "cpu")(BATCH)
    assert count == 24
    assert abs(loss.item() / 24 - math.log(256)) < 0.1
    ids = {"input_ids": BATCH["inputs"], "labels": BATCH["inputs"]}
    check_call(model, ids, "kit.own:from_pretrained")
    loss, count = LossModule(model, "cpu")(ids)
    assert count == 4
    torch.testing.assert_close(loss, 4 * model(**ids).loss)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", {}),
        # which of its layers look how far back is said by their numbers
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 3}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_stages_of_a_class_of_transformers_compute_what_it_does(name, config):
    """By its own plan, two stages on each of two ranks: the same loss and gradients, bit for bit."""
    import transformers

    sizes = own.LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": False}
    torch.manual_seed(0)
    whole = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**sizes, **config)
    )
    copies = [copy.deepcopy(whole) for _ in range(2)]
    loss, _ = LossModule(whole, "cpu")(BATCH)
    loss.backward()
    cut, ranks = ("model.layers.0", "model.layers.2", "model.norm"), []
    check_sequence(whole, BATCH, "a:b")
    for rank, model in enumerate(copies):
        world: Any = SimpleNamespace(mesh=Mesh(pp=2), coordinates={"pp": rank})
        staged = StagedLossModule(LossModule(model, "cpu"), model, *_of_children(model, cut, world, "a:b"))
        ranks.append(staged)
    given = None
    for stage in range(4):
        given = ranks[stage % 2](BATCH, stage, given)
    given[0].backward()
    assert torch.equal(given[0], loss)
    found = {key: one.grad for module in ranks for key, one in module.model.named_parameters()}
    expected = {key: one.grad for key, one in whole.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())
    assert all([name for name, _ in model.named_parameters()] == list(expected) for model in copies)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_blocks_that_are_computed_again_collect_no_keys_twice(name, mode):
    """For further tokens, as classes of `transformers` do: GPT-2 hands on a cache by its place."""
    import transformers

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    kind, head = (
        (transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), "GPT2LMHeadModel")
        if name == "GPT2"
        else (transformers.LlamaConfig(**own.LLAMA), "LlamaForCausalLM")
    )
    torch.manual_seed(0)
    plain = getattr(transformers, head)(kind)
    again = copy.deepcopy(plain)
    checkpoint_activations(list(again.transformer.h if name == "GPT2" else again.model.layers), mode)
    for model in (plain, again):
        LossModule(model, "cpu")(BATCH)[0].backward()
    for mine, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_tied_head_of_a_class_of_transformers_is_on_no_two_stages():
    with pytest.raises(
        TrainError, match=r"model.embed_tokens.weight is shared.*\n.*tie_word_embeddings: false"
    ):
        stages_of(own.from_config(), ("model.layers.1",), "a:b")


def check(model: torch.nn.Module, batch=BATCH) -> torch.Tensor:
    """Loss per target, as the loop computes it."""
    check_call(model, batch, "kit.own:gives")
    loss, count = LossModule(model, "cpu", entry="kit.own:gives")(batch)
    return loss / count


@pytest.mark.parametrize("what", ["logits", "output", "sum and count", "number", "a loss of transformers"])
def test_outputs_with_one_meaning_are_accepted(what):
    model = own.gives(what, own=what not in ("logits", "output"))
    logits = model.head(BATCH["inputs"])
    expected = logits.float().mean()
    if what in ("logits", "output"):
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), BATCH["targets"].flatten())
    torch.testing.assert_close(check(model), expected)


# what the model gives -> (by its own loss, words of the message, words of the hint)
BROKEN = {
    "dict": (False, "forward returns a dict with hidden, not logits", "`.logits`"),
    "tuple": (False, "forward returns a tuple of 2, not logits", "return a tensor of logits"),
    "nothing": (False, "forward returns a NoneType, not logits", "return a tensor of logits"),
    "short": (False, r"logits \(4, 5, 256\) do not fit targets \(4, 6\)", "the class of each"),
    "number": (False, r"logits \(\) do not fit", "define `loss"),
    "loss and logits": (True, "loss returns a tuple of 2", r"return \(sum, count\)"),
    "one for each": (True, r"loss returns a tensor of shape \(4,\)", r"return \(sum, count\)"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_is_named_before_the_model_has_weights(what):
    by_loss, message, hint = BROKEN[what]
    with pytest.raises(TrainError, match=message) as caught:
        check(own.gives(what, by_loss))
    assert (caught.value.kind, caught.value.where) == ("input", "kit.own:gives")
    assert hint.replace("\\", "") in caught.value.hint
    with pytest.raises(TrainError, match=message):
        count_flops_per_token(model_plan("gives", what=what, own=by_loss), BATCH)


def test_data_that_do_not_fit_the_model_are_named():
    model = own.gives("logits")
    for keys in (["inputs"], ["targets"], ["x"]):
        batch = dict.fromkeys(keys, BATCH["inputs"])
        with pytest.raises(TrainError, match=f"the data give {keys[0]}") as caught:
            check(model, batch)
        assert "inputs and targets" in caught.value.hint
    with pytest.raises(TrainError, match=r"do not fit targets .* of torch\.float32"):
        check(model, {**BATCH, "targets": BATCH["targets"].float()})
    narrow = {**BATCH, "targets": BATCH["targets"].int()}
    torch.testing.assert_close(check(model, narrow), check(model))
    with pytest.raises(TrainError, match="`loss` is a CrossEntropyLoss that needs input, target"):
        check(own.loss_module())


def test_samples_of_unequal_length_are_named():
    data = DataPlan(tokens=None, dataset=Entry("kit.own:uneven", {}), digest=None)
    dataset = open_dataset(data, split="train", seq_len=4)
    world = World(Mesh(), 0, CPU)
    loader = MicrobatchLoader(dataset, world, seed=0, global_batch=9, micro_batch=9, seq_len=4)
    with pytest.raises(
        TrainError, match=r"samples \d and \d cannot lie in one batch: .*inputs \(5,\)"
    ) as caught:
        loader.step(0)
    assert caught.value.kind == "input"
    assert "pad" in caught.value.hint


STEPS = 6
# what is evaluated, by strategy, and at how many ranks: 37 samples in microbatches of 5, of which the last
# has 2, and with three ranks one of them has none
EVALUATED = {2: ("sum ddp", "mean fsdp"), 3: ("sum fsdp", "mean ddp")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The store of trainings on 2 ranks, with the evaluations of them on 2 and 3."""
    folder = tmp_path_factory.mktemp("own")
    tokens = plans.write_tokens(folder / "tokens")
    points = DataPlan(tokens=None, dataset=Entry("kit.own:points", {}), digest=None)

    def plan(run, function, strategy, data=points, **args):
        return plans.train_plan(
            folder / "store", tokens, strategy=strategy, steps=STEPS, every=STEPS, run_id=run,
            model=model_plan(function, **args)._replace(seq_len=32 if function == "tutorial" else 1),
            **({} if data is None else {"data": data}), num_flops_per_token=None,
        )  # fmt: skip

    made = [
        *(plan(f"{kind} {strategy}", "normed", strategy, kind=kind)
          for kind in ("sum", "mean") for strategy in ("ddp", "fsdp")),
        *(plan(f"tutorial {strategy}", "tutorial", strategy, None) for strategy in ("ddp", "fsdp")),
    ]  # fmt: skip
    by_run = {plan.run_id: plan for plan in made}
    for world_size, runs in EVALUATED.items():
        evaluations = []
        for run in runs:
            done = plans.evaluate_plan(by_run[run])
            strategy = done.work.train.strategy
            train = done.work.train._replace(micro_batch=5, mesh=plans.mesh_of(strategy, world_size))
            launch = done.launch._replace(nproc_per_node=world_size)
            evaluation = done.work._replace(train=train)
            evaluations.append(replace(done, stage=f"evaluate-{world_size}", work=evaluation, launch=launch))
        plans.run_together([*(made if world_size == 2 else []), *evaluations], folder / f"world-{world_size}")
    return folder / "store", by_run


def weights(trained, run, tmp_path):
    store = FolderStore(trained[0])
    key = catalogue.latest(store, trained[1][run].stage_key).key
    export_checkpoint(store, key, tmp_path / run)
    return safetensors.torch.load_file(tmp_path / run / "model.safetensors")


@pytest.mark.parametrize(
    ("world_size", "run"), [(world_size, run) for world_size, runs in EVALUATED.items() for run in runs]
)
def test_every_sample_counts_once_whatever_the_loss(trained, tmp_path, world_size, run):
    model = own.Normed()
    model.load_state_dict(weights(trained, run, tmp_path))
    x = own.points("validation").x
    with torch.no_grad():
        loss, count = model.eval().loss({"x": x})
    plan = replace(trained[1][run], stage=f"evaluate-{world_size}")
    (found,) = [record for record in plans.records(trained[0], plan) if record["kind"] == "evaluate"]
    assert found["num_tokens"] == count == 37
    assert found["val_loss"] == pytest.approx(loss.item() / 37, rel=1e-5)
    assert found["val_perplexity"] is found["val_bits_per_byte"] is None


def test_buffers_are_one_ranks_under_every_strategy(trained, tmp_path):
    ddp, fsdp = (plans.losses(trained[0], trained[1][f"sum {strategy}"]) for strategy in ("ddp", "fsdp"))
    assert ddp == pytest.approx(fsdp, rel=1e-5)
    saved, other = (weights(trained, f"sum {strategy}", tmp_path) for strategy in ("ddp", "fsdp"))
    assert saved["layers.0.1.running_mean"].abs().min() > 0
    for name, tensor in saved.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_mean_and_a_sum_with_its_count_train_alike(trained):
    for strategy in ("ddp", "fsdp"):
        of_mean, of_sum = (
            plans.losses(trained[0], trained[1][f"{kind} {strategy}"]) for kind in ("mean", "sum")
        )
        assert of_mean == pytest.approx(of_sum, rel=1e-5)


def test_the_tutorials_transformer_trains(trained):
    ddp, fsdp = (plans.losses(trained[0], trained[1][f"tutorial {strategy}"]) for strategy in ("ddp", "fsdp"))
    assert fsdp == pytest.approx(ddp, rel=1e-5)
    assert abs(ddp[0] - math.log(256)) < 0.3
    assert ddp[-1] < ddp[0]


def test_buffers_travel_unless_a_pass_only_writes_them():
    """Running averages are not read in training; frozen ones are, and so is what is not theirs."""
    normed = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(2)))
    reads = reading(normed)
    assert not reads()
    normed[2].eval()
    assert reads()
    normed.train()
    assert not reads()
    assert reading(own.Tutorial())()

    class Own(nn.BatchNorm2d):
        """Whose forward pass may read anything."""

    assert reading(nn.Sequential(Own(2)))()
    assert reading(nn.Sequential(nn.BatchNorm2d(2), own.Halved()))()
