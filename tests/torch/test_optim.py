"""What an optimizer computes is what torch's own class computes, whole or in slices; starting up imports no
compiler; and whatever keeps the protocol is saved and resumed bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mlpipe._core.errors import TrainError
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.checkpoint import Checkpointer, Coordination, SaveSettings
from mlpipe.train.optim.clipping import clip_factor, squared_norm
from mlpipe.train.optim.make import make_update
from mlpipe.train.reshard import load
from mlpipe.train.shards import LocalShard, clear_gradients

pytestmark = pytest.mark.torch

ADAMW: dict[str, Any] = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1}
STAGE = "runs/r/stages/train"


def plan_of(name: str | None, args: dict[str, Any], entry: str | None = None) -> OptimizerPlan:
    return OptimizerPlan(name, entry, args, 8, 1e-2, 1.0, "constant", 0, 0, 0.0)


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def sliced(module: nn.Module, rank: int = 0, num_ranks: int = 1) -> list[LocalShard]:
    """Each parameter's rows of this rank, as torch.chunk cuts them; gradients are whole (zero1)."""
    shards = []
    for name, parameter in module.named_parameters():
        per_rank = -(-parameter.shape[0] // num_ranks)
        first = min(rank * per_rank, parameter.shape[0])
        shards.append(
            LocalShard(
                f"model.{name}",
                parameter.detach()[first : first + per_rank],
                tuple(parameter.shape),
                (first,) + (0,) * (parameter.dim() - 1),
                parameter=parameter,
                full_gradient=True,
            )
        )
    return shards


def backward(module: nn.Module, step: int) -> None:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
    module(x.to(next(module.parameters()).dtype)).square().sum().backward()


def decaying(parameters: Any, weight_decay: float) -> list[dict[str, Any]]:
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def torchs(name: str, module: nn.Module) -> torch.optim.Optimizer:
    groups = decaying(module.parameters(), 0.1)
    if name == "adamw":
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    return torch.optim.SGD(groups, momentum=0.9, foreach=True)


@pytest.mark.parametrize(
    ("dtype", "num_ranks"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 2), (torch.float32, 8)]
)
@pytest.mark.parametrize(("name", "args"), [("adamw", ADAMW), ("sgd", SGD)])
def test_equal_to_torchs_own_over_100_steps(
    name: str, args: dict[str, Any], dtype: torch.dtype, num_ranks: int
) -> None:
    """Bit for bit. In slices to rounding: the kernel's vectors begin and end elsewhere. Of 8 ranks some have
    no row of a parameter."""
    exact = {"rtol": 0.0, "atol": 0.0} if num_ranks == 1 else {}
    ours, theirs = made(dtype), made(dtype)
    reference = torchs(name, theirs)
    ranks = [sliced(ours, rank, num_ranks) for rank in range(num_ranks)]
    updates = [make_update(plan_of(name, args), shards) for shards in ranks]
    for step in range(1, 101):
        for module in (ours, theirs):
            backward(module, step)
        for parameter in theirs.parameters():
            parameter.grad.mul_(0.5)
        for group in reference.param_groups:
            group["lr"] = 0.01 / step
        reference.step()
        reference.zero_grad()
        for update in updates:
            update.step(lr=0.01 / step, scale=0.5)
        clear_gradients(ranks[0])
        assert all(parameter.grad is None for parameter in ours.parameters())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, **exact)
    states = [{shard.name: shard.local for shard in update.state()} for update in updates]
    for name_, parameter in theirs.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq") if name == "adamw" else ("momentum_buffer",):
            parts = [state[f"optim.model.{name_}.{kind}"] for state in states]
            torch.testing.assert_close(torch.cat(parts), reference.state[parameter][kind], **exact)


@pytest.mark.parametrize(("name", "args"), [("adamw", ADAMW), ("sgd", SGD)])
def test_a_parameter_without_gradient_stays(name: str, args: dict[str, Any]) -> None:
    module = made()
    before = [parameter.clone() for parameter in module.parameters()]
    update = make_update(plan_of(name, args), sliced(module))
    module[0](torch.randn(4, 7)).sum().backward()
    update.step(lr=0.1, scale=1.0)
    moved = [not torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True)]
    assert moved == [True, True, False, False, False, False]


def test_what_is_not_trained_is_no_affair_of_the_optimizer() -> None:
    module = made()
    module[0].weight.requires_grad_(False)
    shards = [*sliced(module), LocalShard("model.mean", torch.ones(3), (3,), (0,), is_buffer=True)]
    names = {shard.name for shard in make_update(plan_of("adamw", ADAMW), shards).state()}
    assert len(names) == 2 * 5
    assert not any("0.weight" in name or "mean" in name for name in names)


# -- clipping ---------------------------------------------------------------------------------------


def held(gradient: torch.Tensor, num_replicas: int) -> LocalShard:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return LocalShard("p", parameter.detach(), tuple(gradient.shape), (0,), 0, num_replicas, parameter)


def test_the_norm_counts_every_value_once_on_any_mesh() -> None:
    """Set by hand: 2 replicas of 2 shards, on 4 ranks. One tensor is cut and replicated, one is on every rank
    whole, and one is cut in four, of which the last part is nothing."""
    torch.manual_seed(0)
    cut, whole, quartered = torch.randn(6, 2), torch.randn(5), torch.randn(3)
    total = 0.0
    for rank in range(4):
        shards = [
            held(cut[3 * (rank % 2) : 3 * (rank % 2) + 3], 2),
            held(whole, 4),
            held(quartered[rank : rank + 1], 1),
            LocalShard("b", torch.ones(9), (9,), (0,), is_buffer=True),
        ]
        total += float(squared_norm(shards))
    expected = sum(float(tensor.double().square().sum()) for tensor in (cut, whole, quartered))
    assert total == pytest.approx(expected, rel=1e-6)


def test_a_rank_without_gradients_adds_nothing() -> None:
    assert float(squared_norm([LocalShard("b", torch.ones(9), (9,), (0,), is_buffer=True)])) == 0.0
    frozen = LocalShard(
        "a", torch.ones(9, device="meta"), (9,), (0,), parameter=torch.nn.Parameter(torch.ones(9))
    )
    assert squared_norm([frozen]).device.type == "meta"  # where the other numbers of a step are


@pytest.mark.parametrize(
    ("norm", "limit", "factor"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (1.0, 1.0, 1.0), (9.0, 0.0, 1.0)]
)
def test_only_a_norm_above_the_limit_is_clipped(norm: float, limit: float, factor: float) -> None:
    assert clip_factor(norm, limit) == pytest.approx(factor, rel=1e-5)


# -- saving and resuming ----------------------------------------------------------------------------


def save(store: FolderStore, step: int, shards: list[LocalShard], update: Any) -> None:
    errors: list[Any] = []
    checkpointer = Checkpointer(
        store,
        SaveSettings(STAGE, attempt=1, restart=0, code_digest="", keep=9, asynchronous=False),
        Coordination(dist.HashStore(), rank=0, world_size=1),
        on_saved=lambda saved: errors.append(saved.error),
        while_waiting=lambda: None,
    )
    checkpointer.save(step, [*shards, *update.state()], {"optimizer": update.scalars()})
    assert errors == [None]


def restore(store: FolderStore, shards: list[LocalShard], update: Any) -> None:
    last = catalogue.latest(store, STAGE)
    manifest = catalogue.load_manifest(store, last.key)
    update.load_scalars(manifest["scalars"]["optimizer"])
    load(store, last.key, manifest, [*shards, *update.state()])


class Averaged:
    """A wrapper around an Update: every second step the parameters go half-way back to where they were two
    steps ago (as Lookahead and DiLoCo's outer step do), with a sum of such moves that outlives a step."""

    def __init__(self, shards: list[LocalShard], inner: Any) -> None:
        self.shards, self.inner, self.num_steps = shards, inner, 0
        self.slow = [shard.local.clone() for shard in shards]
        self.momentum = [torch.zeros_like(shard.local) for shard in shards]

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        self.inner.step(lr=lr, scale=scale)
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for shard, slow, momentum in zip(self.shards, self.slow, self.momentum, strict=True):
                momentum.mul_(0.7).add_(shard.local - slow)
                slow.add_(momentum, alpha=0.5)
                shard.local.copy_(slow)

    def state(self) -> list[LocalShard]:
        own = [
            shard.state(kind, tensor)
            for kind, tensors in (("slow", self.slow), ("outer_momentum", self.momentum))
            for shard, tensor in zip(self.shards, tensors, strict=True)
        ]
        return [*self.inner.state(), *own]

    def scalars(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "inner": self.inner.scalars()}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        self.num_steps = scalars["num_steps"]
        self.inner.load_scalars(scalars["inner"])


class Stateful(torch.optim.Optimizer):
    """A user's own: a tensor, a number and a tensor without a dim by parameter, a setting that steps change,
    and a group of another weight."""

    def __init__(self, params: Any, *, decay: float) -> None:
        params = list(params)
        groups = [{"params": params[:2], "weight": 1.0}, {"params": params[2:], "weight": 0.5}]
        super().__init__(groups, {"lr": 99.0, "decay": decay, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"mean": torch.ones_like(p), "calls": 0, "sum": torch.tensor(0.0)}
                state["calls"] += 1
                state["sum"] += 1.0 / state["calls"]
                state["mean"].lerp_(p.grad, 1 - group["decay"])
                divisor = float(state["sum"]) + group["num_steps"]
                p.sub_(state["mean"] * (group["lr"] * group["weight"] / divisor))


def wrapped(shards: list[LocalShard]) -> Any:
    return Averaged(shards, make_update(plan_of("adamw", ADAMW), shards))


def own(shards: list[LocalShard]) -> Any:
    return make_update(plan_of(None, {"decay": 0.9}, "test_optim:Stateful"), shards)


def named(name: str, args: dict[str, Any]) -> Any:
    return lambda shards: make_update(plan_of(name, args), shards)


UPDATES = {"adamw": named("adamw", ADAMW), "sgd": named("sgd", SGD), "wrapped": wrapped, "own": own}


@pytest.mark.parametrize("kind", UPDATES)
def test_a_resumed_update_goes_on_bit_for_bit(kind: str, tmp_path: Any, monkeypatch: Any) -> None:
    """Saved at a step in the middle of the wrapper's two; `state` may be asked before the first step."""
    monkeypatch.setitem(sys.modules, "test_optim", sys.modules[__name__])
    store, whole, parts = FolderStore(tmp_path), made(), made()

    def train(module: nn.Module, update: Any, steps: range) -> None:
        for step in steps:
            backward(module, step)
            update.step(lr=0.02, scale=0.5)
            clear_gradients(sliced(module))

    train(whole, UPDATES[kind](sliced(whole)), range(8))
    first = UPDATES[kind](sliced(parts))
    first.state()
    train(parts, first, range(3))
    save(store, 3, sliced(parts), first)
    again = made()
    second = UPDATES[kind](sliced(again))
    restore(store, sliced(again), second)
    assert json.dumps(second.scalars()) == json.dumps(first.scalars())
    train(again, second, range(3, 8))
    for a, b in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_users_own_has_our_learning_rate_and_starts_as_it_is(monkeypatch: Any) -> None:
    """Looking at a state before the first step must not be a step: neither of the tensors nor of settings."""
    monkeypatch.setitem(sys.modules, "test_optim", sys.modules[__name__])
    ours, theirs = made(), made()
    update, reference = own(sliced(ours)), Stateful(theirs.parameters(), decay=0.9)
    for group in reference.param_groups:
        group["lr"] = 0.02
    before = [parameter.clone() for parameter in ours.parameters()]
    assert {tuple(shard.local.shape) for shard in update.state()} == {tuple(p.shape) for p in before}
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), before, strict=True))
    for step in range(3):
        for module in (ours, theirs):
            backward(module, step)
        reference.step()
        reference.zero_grad()
        update.step(lr=0.02, scale=1.0)
        clear_gradients(sliced(ours))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def factored(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params)


def elsewhere(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(3, requires_grad=True)])


def nothing_of_the_kind(params: Any) -> Any:
    return len(params)


@pytest.mark.parametrize(
    ("entry", "args", "says"),
    [
        ("factored", {}, r"keeps a tensor of shape \[.*\] as 'row_var' of model\.0\.weight"),
        ("elsewhere", {}, "updates other tensors than the parameters that it was given"),
        ("nothing_of_the_kind", {}, "returned int, not a torch.optim.Optimizer"),
        ("Stateful", {"decay": None}, None),
        ("Stateful", {"foo": 1}, "does not take these args"),
        ("absent", {}, "has no function 'absent'"),
    ],
)
def test_what_a_users_own_may_not_do(entry: str, args: Any, says: str | None, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "test_optim", sys.modules[__name__])
    if says is None:
        with pytest.raises(TypeError):  # an error of their own code keeps its place
            make_update(plan_of(None, args, f"test_optim:{entry}"), sliced(made())).state()
        return
    with pytest.raises(TrainError, match=says) as caught:
        make_update(plan_of(None, args, f"test_optim:{entry}"), sliced(made())).state()
    assert caught.value.kind == "input"


def test_a_state_that_is_kept_no_more_is_refused() -> None:
    shards = sliced(made())
    update = make_update(plan_of("sgd", SGD), shards)
    backward_of = made()
    backward(backward_of, 0)
    trained = make_update(plan_of("sgd", SGD), sliced(backward_of))
    trained.step(lr=0.1, scale=1.0)
    plain = make_update(plan_of("sgd", {"momentum": 0.0, "weight_decay": 0.1}), shards)
    update.load_scalars(trained.scalars())
    with pytest.raises(TrainError, match="kept momentum_buffer"):
        plain.load_scalars(trained.scalars())
    with pytest.raises(TrainError, match="kept nothing"):
        update.load_scalars(plain.scalars())
    # as a checkpoint has them that torch.optim.SGD wrote, of which one parameter had no gradient
    numbers = {shard.name: {"momentum_buffer": None} for shard in shards[1:]}
    update.load_scalars({"state": numbers, "groups": [{}, {}]})
    assert {shard.name for shard in update.state()} == {f"optim.{name}.momentum_buffer" for name in numbers}


def test_every_optimizer_of_the_table_is_built_and_states_its_bytes() -> None:
    for name, known in OPTIMIZERS.items():
        args = {
            key: list(argument.default) if isinstance(argument.default, tuple) else argument.default
            for key, argument in known.arguments.items()
        }
        module = made()
        shards = [replace(shard, in_block="2." in shard.name) for shard in sliced(module)]
        num_bytes = sum(shard.local.nbytes for shard in make_update(plan_of(name, args), shards).state())
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        if known.states is None:
            assert num_bytes == known.state_bytes_per_parameter(args) * num_parameters, name


PROGRAM = """
import os, sys
from types import SimpleNamespace
from mlpipe.train import without_dynamo
without_dynamo.install()
import torch
import torch.distributed as dist
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.plan.sizes import DDP_BUCKET_BYTES
from mlpipe.train.model import build_model
from mlpipe.train.optim.make import make_update
from mlpipe.train.parallel import materialize, replicate
from mlpipe.train.parallel.parallelized_model import ParallelizedModel, local_shards
from mlpipe.train.world import World

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
cpu = torch.device("cpu")
small = dict(vocab_size=16, dim=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=8, max_seq_len=4,
             rope_theta=1e4, norm_eps=1e-5, tied=False)
model = ModelPlan(Entry("mlpipe.train.models.llama:build_model", small), None, 4, ())
built = build_model(model, seed=0, device_type="cpu")
materialize.materialize(built, 0, cpu)
world = World(Mesh(), 0, cpu)
parallel = ParallelizedModel(built, built.module, shards=local_shards(built.module, world))
replicate.apply(parallel, world, SimpleNamespace(buckets=None))
assert parallel.module.bucket_bytes_cap == DDP_BUCKET_BYTES, "the planner counts with it"
args = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
update = make_update(OptimizerPlan("adamw", None, args, 8, 1e-2, 1.0, "constant", 0, 0, 0.0), parallel.shards)
for last in (False, True):
    with parallel.gradient_sync(last):
        tokens = torch.ones(2, 4, dtype=torch.int64)
        parallel.module({"inputs": tokens, "targets": tokens})[0].backward()
update.step(lr=0.1, scale=1.0)
args = {"momentum": 0.9, "weight_decay": 0.1}
update = make_update(OptimizerPlan("sgd", None, args, 4, 1e-2, 1.0, "constant", 0, 0, 0.0), parallel.shards)
for last in (False, True):
    with parallel.gradient_sync(last):
        parallel.module({"inputs": tokens, "targets": tokens})[0].backward()
update.step(lr=0.1, scale=1.0)
import mlpipe.train.flops  # which every rank without a peak of a table measures by
loaded = [name for name in ("torch._dynamo", "torch._inductor", "sympy", "triton") if name in sys.modules]
assert not loaded, loaded

# Whoever compiles gets torch's own behaviour: a function that dynamo must keep out of breaks the graph.
@torch._compile._disable_dynamo
def outside(x):
    return x + 1 if not torch.compiler.is_compiling() else x

graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph
compiled = torch.compile(lambda x: outside(x * 2) * 3, backend=backend)
assert compiled(torch.ones(1)).item() == 9.0
assert len(graphs) == 2, graphs
print("fine", flush=True)
os._exit(0)  # gloo's threads abort an interpreter that ends by itself once in about fifty
"""


def test_starting_imports_no_compiler_and_compiling_works_afterwards():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("fine\n"), done.stderr
