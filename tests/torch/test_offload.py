"""What waits on the host changes no bit of a training, and is as many bytes as the planner counts."""

from __future__ import annotations

import weakref
from dataclasses import asdict

import pytest
import torch
from kit import plans
from kit.processes import digest_of

from mlpipe._core.presets import LlamaConfig
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.updates import EmaPlan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.models.llama import build_model
from mlpipe.train.optim.on_host import OnHost
from mlpipe.train.optim.sgd import SGD
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations
from mlpipe.train.parallel.offload_activations import Host, offload
from mlpipe.train.shards import LocalShard

pytestmark = pytest.mark.torch

LAYERS, BATCH, TOKENS = 4, 2, 32
CONFIG = LlamaConfig(**{**asdict(plans.CONFIG), "num_layers": LAYERS})


def passes(mode, *, offloads):
    """Gradients of a Llama, bytes that waited on the host, and what autograd saved of the residual stream."""
    torch.manual_seed(0)
    model = build_model(**asdict(CONFIG))
    model.init_weights()
    checkpoint_activations(list(model.layers), mode)
    host = Host(torch.device("cpu"))
    if offloads:
        offload(list(model.layers), host)
    tokens = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)
    with torch.no_grad():
        model(tokens)
    assert host.num_bytes == 0  # of a pass that nothing follows
    for _ in range(2):
        model(tokens).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert host.last is None
    return gradients, host.num_bytes


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same_to_the_bit_and_bytes_those_of_the_planner(mode):
    plain, nothing = passes(mode, offloads=False)
    moved, num_bytes = passes(mode, offloads=True)
    assert nothing == 0
    assert plain.keys() == moved.keys()
    assert all(torch.equal(plain[name], moved[name]) for name in plain)
    step = StepShape(TOKENS, BATCH, 1, "fp32", mode, compiled=False, offloads=True)
    assert num_bytes == 2 * Dense(CONFIG).activations(step, "cuda").offloaded_bytes
    assert num_bytes == 2 * (LAYERS - 1) * BATCH * TOKENS * CONFIG.dim * 4


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("offloads", [False, True])
def test_what_waits_on_the_host_has_left_the_device(mode, offloads):
    """Of the inputs of blocks only the last one lives on after the forward pass."""
    model = build_model(**asdict(CONFIG))
    model.init_weights()
    blocks, inputs = list(model.layers), []
    checkpoint_activations(blocks, mode)
    if offloads:
        offload(blocks, Host(torch.device("cpu")))
    for block in blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss = model(torch.arange(TOKENS)[None]).sum()
    alive = [one() is not None for one in inputs]
    assert alive == [not offloads] * (LAYERS - 1) + [True]
    loss.backward()
    assert not any(one() is not None for one in inputs)


OFFLOADS = {"ddp": ("off", "activations", "optimizer"), "fsdp": ("off", "all"), "zero1": ("off", "optimizer")}
SETTINGS = {
    "ddp": {"micro_batch": 4, "accumulation": 2, "activation_checkpointing": "full", "ema": EmaPlan(0.9)},
    "fsdp": {"precision": "bf16", "activation_checkpointing": "selective"},
    "zero1": {"precision": "fp16"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload")
    tokens = plans.write_tokens(folder / "tokens")
    made = {
        (strategy, offloaded): plans.train_plan(
            folder / "store",
            tokens,
            strategy=strategy,
            steps=4,
            every=4,
            offload=offloaded,
            run_id=f"{strategy}-{offloaded}",
            **SETTINGS[strategy],
        )
        for strategy, some in OFFLOADS.items()
        for offloaded in some
    }
    plans.run_together(list(made.values()), folder / "runs")
    return folder / "store", made


@pytest.mark.combines("dp_replicate", "offload *")
@pytest.mark.combines("dp_shard", "offload all")
@pytest.mark.combines("offload *", "accumulation")
@pytest.mark.combines("offload *", "ema")
@pytest.mark.combines("offload *", "activation_checkpointing full")
@pytest.mark.combines("offload all", "activation_checkpointing selective")
@pytest.mark.combines("offload all", "precision bf16")
@pytest.mark.combines("offload optimizer", "precision fp16")
@pytest.mark.combines("offload optimizer", "strategy zero1")
@pytest.mark.parametrize(
    ("strategy", "offloaded"), [(one, what) for one, some in OFFLOADS.items() for what in some[1:]]
)
def test_a_training_and_its_checkpoint_are_the_same_to_the_bit(trained, strategy, offloaded):
    store, made = trained
    plain, moved = made[strategy, "off"], made[strategy, offloaded]
    for field in ("loss", "grad_norm"):
        assert plans.by_step(store, plain, field) == plans.by_step(store, moved, field), field
    last = [catalogue.latest(FolderStore(store), plan.stage_key) for plan in (plain, moved)]
    assert digest_of(FolderStore(store), last[0].key) == digest_of(FolderStore(store), last[1].key)
    told = [one.get("offloaded_bytes") for one in plans.records(store, moved) if one["kind"] == "step"]
    # of one of two blocks, 8 sequences of 32 tokens a rank, and not of the steps that were dry
    one_block = None if offloaded == "optimizer" else 8 * 32 * plans.CONFIG.dim * 4
    assert told == 4 * [one_block]


def test_the_host_updates_by_what_the_device_has():
    """Also where others changed it, and a parameter without a gradient."""
    device = [torch.nn.Parameter(torch.full((3, 2), 2.0)), torch.nn.Parameter(torch.ones(2))]
    shards = [
        LocalShard(name, one.detach(), tuple(one.shape), (0,) * one.dim(), parameter=one)
        for name, one in zip("ab", device, strict=True)
    ]
    update = OnHost(shards, lambda some: SGD(some, momentum=0.0, weight_decay=0.0))
    for start in (2.0, 7.0):
        with torch.no_grad():
            device[0].fill_(start)
        device[0].grad = torch.full((3, 2), 4.0)
        update.step(lr=0.5, scale=0.25)
        assert torch.equal(device[0], torch.full((3, 2), start - 0.5))
        assert torch.equal(device[0].grad, torch.full((3, 2), 4.0))  # the copy was scaled
        assert torch.equal(device[1], torch.ones(2))
