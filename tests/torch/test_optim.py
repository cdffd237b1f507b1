"""Our step is torch's AdamW bit for bit, and starting up imports no compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mlpipe.plan.plan import Mesh, OptimizerPlan
from mlpipe.train.model import BuiltModel
from mlpipe.train.optim import Optimizer
from mlpipe.train.parallel.parallel import ParallelizedModel, owned_tensors
from mlpipe.train.world import World

pytestmark = pytest.mark.torch

PLAN = OptimizerPlan("adamw", 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0, "constant", 0, 0, 0.0)


def made(dtype=torch.float32):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))
    return module.to(dtype)


def optimizer_of(module):
    built = BuiltModel(module, module, [], on_meta=False, construct=made)
    world = World(Mesh(), 0, torch.device("cpu"))
    return Optimizer(PLAN, ParallelizedModel(built, module, owned=owned_tensors(module, world)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_torchs_fused_adamw(dtype):
    ours, theirs = made(dtype), made(dtype)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() >= 2], "weight_decay": PLAN.weight_decay},
        {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=PLAN.betas, eps=PLAN.eps, fused=True)
    optimizer = optimizer_of(ours)
    for step in range(1, 6):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
        for module in (ours, theirs):
            module(x).square().sum().backward()
        for parameter in theirs.parameters():
            parameter.grad.mul_(0.5)
        for group in reference.param_groups:
            group["lr"] = 0.01 / step
        reference.step()
        reference.zero_grad()
        optimizer.step(lr=0.01 / step, scale=0.5)
        assert all(parameter.grad is None for parameter in ours.parameters())
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
    moments = {item.name: item.local for item in optimizer.state()}
    for name, parameter in theirs.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(moments[f"optim.{name}.{kind}"], reference.state[parameter][kind])


def test_a_parameter_without_gradient_stays():
    module = made()
    before = [parameter.clone() for parameter in module.parameters()]
    optimizer = optimizer_of(module)
    module[0](torch.randn(4, 7)).sum().backward()
    optimizer.step(lr=0.1, scale=1.0)
    moved = [not torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True)]
    assert moved == [True, True, False, False, False, False]


PROGRAM = """
import sys
from mlpipe.train import without_dynamo
without_dynamo.install()
import torch
import torch.distributed as dist
from mlpipe.plan.plan import Entry, Mesh, ModelPlan, OptimizerPlan
from mlpipe.train.model import build_model
from mlpipe.train.optim import Optimizer
from mlpipe.train.parallel import materialize, replicate
from mlpipe.train.parallel.parallel import ParallelizedModel, owned_tensors
from mlpipe.train.world import World

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
cpu = torch.device("cpu")
small = dict(vocab_size=16, dim=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=8, max_seq_len=4,
             rope_theta=1e4, norm_eps=1e-5, tied=False)
model = ModelPlan(Entry("mlpipe.train.models.llama:build_model", small), None, 4, ())
built = build_model(model, seed=0, device_type="cpu", bf16=False)
materialize.materialize(built, 0, cpu)
world = World(Mesh(), 0, cpu)
parallel = ParallelizedModel(built, built.module, owned=owned_tensors(built.module, world))
replicate.apply(parallel, world, None)
plan = OptimizerPlan("adamw", 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0, "constant", 0, 0, 0.0)
optimizer = Optimizer(plan, parallel)
for last in (False, True):
    with parallel.gradient_sync(last):
        tokens = torch.ones(2, 4, dtype=torch.int64)
        parallel.module({"inputs": tokens, "targets": tokens})[0].backward()
optimizer.step(lr=0.1, scale=1.0)
loaded = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
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
print("fine")
"""


def test_starting_imports_no_compiler_and_compiling_works_afterwards():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("fine\n"), done.stderr
