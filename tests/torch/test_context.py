"""Context parallelism computes what one rank computes: attention by itself and a model, with ranks that are
threads, and whole trainings."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import plans, processes
from kit.weights import held
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mlpipe._core.errors import TrainError
from mlpipe._core.presets import LlamaConfig
from mlpipe.plan.axes import cp
from mlpipe.plan.axes.axis import Layout
from mlpipe.plan.hardware import detect_hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.plan import Plan
from mlpipe.plan.settings import Checkpointing, ContextExchange
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import Part, StepShape
from mlpipe.plan.time import passes
from mlpipe.plan.validation import MetricPlan, ValidatePlan
from mlpipe.plan.wire import Wire
from mlpipe.store.folder import FolderStore
from mlpipe.train.model import BuiltModel, LossModule
from mlpipe.train.models.attention import causal_attention
from mlpipe.train.models.llama import Llama, RMSNorm
from mlpipe.train.parallel import context, exact_attention, ring_attention
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations
from mlpipe.train.parallel.attention_blocks import attend, attend_backward
from mlpipe.train.parallel.context_attention import RANKS, context_attention
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.world import World

pytestmark = pytest.mark.torch
EXCHANGES = get_args(ContextExchange)


class Threads:
    """Ranks in threads, with the collectives of this technique, and sending to one. `sent`: what the first
    rank sends, in bytes."""

    def __init__(self, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_ranks = num_ranks
        self.here = threading.local()
        self.barrier = threading.Barrier(num_ranks, timeout=60)
        self.given: list[Tensor] = [torch.empty(0)] * num_ranks
        self.sent: Counter[str] = Counter()
        self.ways = {(a, b): queue.SimpleQueue[Tensor]() for a in range(num_ranks) for b in range(num_ranks)}
        monkeypatch.setattr(dist, "all_gather_into_tensor", self.all_gather)
        monkeypatch.setattr(dist, "all_to_all_single", self.all_to_all)
        monkeypatch.setattr(dist, "P2POp", lambda *operation: operation)
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda all_: [self._begun(*one) for one in all_])

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        def on(rank: int) -> Any:
            self.here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.num_ranks) as pool:
            return list(pool.map(on, range(self.num_ranks)))

    def _exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        if self.here.rank == 0:
            share = (self.num_ranks - 1) if name == "all_gather" else (self.num_ranks - 1) / self.num_ranks
            self.sent[name] += int(tensor.nbytes * share)
        self.given[self.here.rank] = tensor.detach().clone()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def all_gather(self, whole: Tensor, part: Tensor, group: Any, async_op: bool = False) -> Any:
        found = self._exchange("all_gather", part)

        class Work:
            def wait(self) -> None:
                whole.copy_(torch.cat(found))

        return Work() if async_op else Work().wait()

    def all_to_all(self, received: Tensor, sent: Tensor, group: Any) -> None:
        received.copy_(torch.stack([one[self.here.rank] for one in self._exchange("all_to_all", sent)]))

    def _begun(self, function: Any, tensor: Tensor, other: int, group: Any) -> Any:
        here = self.here.rank
        if function is dist.irecv:
            way = self.ways[other, here]
            return SimpleNamespace(wait=lambda: tensor.copy_(way.get(timeout=60)))
        self.sent["send"] += tensor.nbytes * (here == 0)
        with _disable_current_modes():  # who counts tensors does not count what is on its way
            self.ways[here, other].put(tensor.detach().clone())
        return SimpleNamespace(wait=lambda: None)


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@settings(max_examples=25)
@given(
    num_ranks=st.integers(1, 4), chunk=st.integers(1, 9), batch=st.integers(1, 2), groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3), channels=st.sampled_from([1, 4, 8]), seed=st.integers(0, 2**31),
    exchange=st.sampled_from(EXCHANGES),
)  # fmt: skip
def test_attention_is_exact(
    monkeypatch: Any,
    num_ranks: int,
    chunk: int,
    batch: int,
    groups: int,
    kv_heads: int,
    channels: int,
    seed: int,
    exchange: ContextExchange,
) -> None:
    """Output and gradients in fp64."""
    threads = Threads(num_ranks, monkeypatch)
    generator, length = torch.Generator().manual_seed(seed), 2 * num_ranks * chunk

    def drawn(heads: int) -> Tensor:
        return torch.randn(
            batch, length, heads, channels, dtype=torch.float64, generator=generator
        ).transpose(1, 2)

    inputs = [drawn(kv_heads * groups), drawn(kv_heads), drawn(kv_heads)]
    gradient = drawn(kv_heads * groups)

    def attend(attention: Callable[..., Tensor], given: list[Tensor], grad: Tensor) -> list[Tensor]:
        leaves = [one.detach().clone().requires_grad_() for one in given]
        out = attention(*leaves)
        out.backward(grad)
        return [out.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    def on(rank: int) -> list[Tensor]:
        number = -1 - rank  # of the real ones none is below 0
        RANKS[number] = RankGroup(rank, num_ranks, None, timed), exchange
        own = [context.cut(one, 2, rank, num_ranks) for one in (*inputs, gradient)]
        return attend(lambda *qkv: context_attention(*qkv, number), own[:3], own[3])

    whole = attend(causal_attention, inputs, gradient)
    for rank, found in enumerate(threads.run(on)):
        for part, expected in zip(found, whole, strict=True):
            torch.testing.assert_close(
                part, context.cut(expected, 2, rank, num_ranks), rtol=1e-10, atol=1e-12
            )
    # what the planner counts: keys and values of a rank's tokens, to all others; back come as many gradients
    numbers = 2 * batch * kv_heads * length * channels // num_ranks * (num_ranks - 1)
    gathered = {"all_gather": 2 * 8 * numbers, "all_to_all": 8 * numbers}
    assert threads.sent == Counter(gathered if exchange == "all_gather" else {"send": 3 * 8 * numbers})


def test_exact_attention_rounds_as_that_of_one_rank(monkeypatch: Any) -> None:
    """The output to the bit; gradients once, when all parts are added."""
    threads, draw = Threads(2, monkeypatch), torch.Generator().manual_seed(1)
    shapes = ((2, 4, 64, 8), (2, 2, 64, 8), (2, 2, 64, 8), (2, 4, 64, 8))
    q, k, v, grad = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    out, log_sums = attend(q, k, v, causal=True)
    wide = [one.float() for one in (grad, q, k, v, out)]
    expected = [one.bfloat16() for one in attend_backward(*wide, log_sums, causal=True)]

    def on(rank: int) -> list[Tensor]:
        ranks = RankGroup(rank, 2, None, timed, exact=True)
        own = [context.cut(one, 2, rank, 2) for one in (q, k, v)]
        part, sums = exact_attention.forward(*own, ranks)
        found = exact_attention.backward(context.cut(grad, 2, rank, 2), *own, part, sums, ranks)
        return [part, *found]

    for rank, (part, *found) in enumerate(threads.run(on)):
        assert torch.equal(part, context.cut(out, 2, rank, 2))
        for one, whole in zip(found, expected, strict=True):
            assert (one != context.cut(whole, 2, rank, 2)).float().mean() < 0.01


class Alive(TorchDispatchMode):
    """`most`: the most numbers that tensors with so many heads had at a time, of those made meanwhile."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_heads, self.now, self.most = num_heads, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(made):
            if one.dim() > 3 and one.shape[-3] == self.num_heads and _storage(one) not in given:
                self.now += one.numel()
                weakref.finalize(one, self._gone, one.numel())
        self.most = max(self.most, self.now)
        return made

    def _gone(self, numbers: int) -> None:
        self.now -= numbers


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_ring_holds_the_keys_and_values_of_two_ranks(monkeypatch: Any, num_ranks: int) -> None:
    """Of however many; and in the backward pass no more than the planner counts."""
    threads, heads, length = Threads(num_ranks, monkeypatch), 3, 8
    part = 2 * heads * length * 4  # numbers of one rank

    def on(rank: int) -> tuple[int, int]:
        ranks = RankGroup(rank, num_ranks, None, timed)
        q, grad = torch.randn(2, 1, 2 * heads, length, 4)
        k, v = torch.randn(2, 1, heads, length, 4)
        with Alive(heads) as forward:
            out, log_sums = ring_attention.forward(q, k, v, ranks)
        with Alive(heads) as backward:
            ring_attention.backward(grad, q, k, v, out, log_sums, ranks)
        return forward.most, backward.most

    work = SimpleNamespace(
        layout=Layout(Mesh(cp=num_ranks), context_exchange="ring"),
        kv_bytes=4 * part * num_ranks,
        step=SimpleNamespace(precision="fp32"),
    )
    for forward, backward in threads.run(on):
        assert forward <= 2 * part + part  # and its own, with the early chunk first
        assert 4 * backward <= cp._held_bytes(work)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_ranks", "checkpointing", "exchange"),
    [
        (2, "full", "all_gather"),
        (2, "selective", "all_gather"),
        (3, "none", "all_gather"),
        (2, "selective", "ring"),
        (3, "full", "ring"),
    ],
)
def test_gradients_of_every_parameter_are_exact(
    monkeypatch: Any, num_ranks: int, checkpointing: Checkpointing, exchange: ContextExchange
) -> None:
    """In fp64, of a model that the technique changed; what that makes of a whole sequence is the same. What
    travels is what the planner counts."""
    monkeypatch.setattr(
        RMSNorm, "forward", lambda self, x: F.rms_norm(x, self.weight.shape, self.weight, self.eps)
    )
    config = LlamaConfig(
        vocab_size=23, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24,
        max_seq_len=8 * num_ranks, rope_theta=100.0, norm_eps=1e-5, tied=True,
    )  # fmt: skip
    torch.manual_seed(5)
    tokens = torch.randint(23, (3, 8 * num_ranks + 1))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    threads = Threads(num_ranks, monkeypatch)

    def made() -> Llama:
        torch.manual_seed(5)
        llama = Llama(config).double()
        llama.init_weights()
        return llama

    def loss_of(module: LossModule, part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        module.cross_entropy = lambda logits, targets, **_: (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), torch.tensor(0)
        )  # fmt: skip
        total: Tensor = module(part)[0]
        total.backward()
        with torch.no_grad():
            logits: Tensor = module({"inputs": batch["inputs"][:, :5]})
        return total.detach(), logits

    models = [made() for _ in range(num_ranks)]

    def on(rank: int) -> tuple[Tensor, Tensor]:
        module = LossModule(models[rank], "cpu")
        built = BuiltModel(module, models[rank], list(models[rank].layers), False, made)
        world = World(Mesh(cp=num_ranks), rank, torch.device("cpu"))
        plan: Any = SimpleNamespace(context_exchange=exchange, exact_sums=False)
        context.apply(ParallelizedModel(built, module), world, plan)
        if checkpointing != "none":
            checkpoint_activations(built.blocks, checkpointing)
        return loss_of(module, context.cut_batch(batch, world))

    alone = made()
    total, logits = loss_of(LossModule(alone, "cpu"), batch)
    found = threads.run(on)
    torch.testing.assert_close(sum(part for part, _ in found), total, rtol=1e-12, atol=0)
    assert all(torch.equal(own, logits) for _, own in found)
    for name, parameter in alone.named_parameters():
        parts = [model.get_parameter(name).grad for model in models]
        torch.testing.assert_close(sum(parts), parameter.grad, rtol=1e-10, atol=1e-12, msg=name)

    step = StepShape(8 * num_ranks, 3, 1, "fp32", checkpointing, compiled=False, part=Part(cp=num_ranks))
    hardware = detect_hardware(None)._replace(devices_per_node=num_ranks)
    in_a_step = passes(Dense(config), step, hardware)._replace(query_bytes=0)  # what it merges is not sent
    layout = Layout(Mesh(cp=num_ranks), context_exchange=exchange)
    counted = cp.exposed_seconds(in_a_step, Sent(hardware), layout)
    assert sum(threads.sent.values()) == 2 * counted  # in fp64


class Sent(Wire):
    """Bytes in place of seconds."""

    def _ring(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        return num_bytes * (num_ranks - 1) / num_ranks


STEPS = 20
CHAIN = (Mesh(cp=2), Mesh(), Mesh(dp_shard=2), Mesh(dp_shard=2, cp=2))  # five steps each
VALIDATED = ValidatePlan(10, 4096, (MetricPlan("loss"), MetricPlan("accuracy")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Plan]]]:
    """Plans of trainings by name, of which the chain goes on under another mesh every five steps."""
    folder = tmp_path_factory.mktemp("context")
    tokens = plans.write_tokens(folder / "tokens")

    def plan(run_id: str, mesh: Mesh, **changes: Any) -> Plan:
        return plans.train_plan(
            folder / "store", tokens, world_size=mesh.world_size, mesh=mesh, run_id=run_id,
            strategy="fsdp" if mesh.dp_shard > 1 else "ddp", **{"steps": STEPS, "every": 100} | changes,
        )  # fmt: skip

    chain = [
        plan("chain", mesh, steps=5 * number, attempt=number) for number, mesh in enumerate(CHAIN, start=1)
    ]
    made = {
        1: [plan("alone", Mesh(), validate=VALIDATED)],
        2: [
            plan("two", Mesh(cp=2), validate=VALIDATED),
            plan(
                "recomputed",
                Mesh(cp=2),
                steps=6,
                activation_checkpointing="full",
                offload="all",
                micro_batch=4,
                accumulation=4,
            ),
            plan(
                "selective",
                Mesh(cp=2),
                steps=6,
                activation_checkpointing="selective",
                buckets="auto",
                deterministic=False,
            ),
            plan("ring", Mesh(cp=2), validate=VALIDATED, context_exchange="ring"),
            plan("compiled-ring", Mesh(cp=2), steps=4, compile="block", context_exchange="ring"),
        ],
        4: [
            plan("sharded", Mesh(dp_shard=2, cp=2), validate=VALIDATED),
            plan("sliced", Mesh(dp_replicate=2, cp=2), steps=6, shard_optimizer=True),
            plan("tensor", Mesh(cp=2, tp=2), steps=6),
            plan("tensor-ring", Mesh(cp=2, tp=2), steps=6, context_exchange="ring"),
            plan("copied-ring", Mesh(dp_replicate=2, cp=2), steps=6, context_exchange="ring"),
            plan(
                "ring-of-four",
                Mesh(cp=4),
                steps=6,
                activation_checkpointing="selective",
                context_exchange="ring",
            ),
            plan(
                "sharded-ring",
                Mesh(dp_shard=2, cp=2),
                steps=6,
                activation_checkpointing="full",
                context_exchange="ring",
            ),
        ],
        8: [plan("triple", Mesh(dp_shard=2, cp=2, tp=2), steps=3)],
    }
    for number, one in enumerate(chain):
        if number in (0, 1, 3):
            made[one.launch.nproc_per_node].append(one)
    # with inductor's kernels, which no other test of trainings makes
    plans.run_together(made[2], folder / "two")
    plans.run_together(made[1], folder / "one")
    plans.run_together([chain[2]], folder / "third")
    plans.run_together(made[4], folder / "four")
    plans.run_together(made[8], folder / "eight")
    exchanges: dict[str, Any] = {"killed": "all_gather", "killed-ring": "ring"}
    killed = [
        plan(name, CHAIN[0], context_exchange=way, **plans.dying(step=14, every=10))
        for name, way in exchanges.items()
    ]
    for one in killed:
        plans.launch_dying(one, folder / "store", folder / one.run_id)
    found = {one.run_id: [one] for several in [*made.values(), killed] for one in several}
    return folder / "store", found | {"chain": chain}


def losses(trained: Any, run: str) -> list[float]:
    store, made = trained
    return [loss for plan in made[run] for loss in plans.losses(store, plan)]


@pytest.mark.combines("cp", "dp_shard", "resume under another mesh", "optimizer adamw")
@pytest.mark.combines("cp", "context ring", "optimizer adamw")
@pytest.mark.parametrize("run", ["two", "sharded", "chain", "ring"])
def test_losses_and_parameters_are_those_of_one_rank(trained: Any, run: str) -> None:
    assert losses(trained, run) == pytest.approx(losses(trained, "alone"), rel=1e-5)
    store, made = trained
    found, expected = (held(store, made[name][-1]) for name in (run, "alone"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.combines("cp", "activation_checkpointing full", "accumulation", "offload *")
@pytest.mark.combines("cp", "activation_checkpointing selective", "buckets auto")
@pytest.mark.combines("cp", "dp_replicate", "strategy zero1")
@pytest.mark.combines("cp", "tp", "dp_shard")
@pytest.mark.combines("cp", "context ring", "dp_shard", "activation_checkpointing full")
@pytest.mark.combines("cp", "context ring", "tp")
@pytest.mark.combines("cp", "context ring", "dp_replicate")
@pytest.mark.combines("cp", "context ring", "compile")
@pytest.mark.combines("cp", "context ring", "activation_checkpointing selective")
@pytest.mark.parametrize(
    "run",
    [
        *("recomputed", "selective", "sliced", "tensor", "triple"),
        *("sharded-ring", "tensor-ring", "copied-ring", "compiled-ring", "ring-of-four"),
    ],
)
def test_what_it_is_combined_with_changes_nothing(trained: Any, run: str) -> None:
    store, made = trained
    steps = made[run][0].work.training.steps
    if made[run][0].work.training.buckets == "auto":
        assert plans.records(store, made[run][0])[0]["bucket_seconds"], "sizes were tried"
    assert losses(trained, run) == pytest.approx(losses(trained, "alone")[:steps], rel=1e-5)
    norms = [plans.by_step(store, made[one][0], "grad_norm")[:steps] for one in (run, "alone")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)  # AdamW hides a scaled gradient


@pytest.mark.combines("cp", "kill of a worker", "deterministic")
@pytest.mark.combines("cp", "context ring", "kill of a worker", "deterministic")
@pytest.mark.parametrize("runs", [("killed", "two"), ("killed-ring", "ring")])
def test_a_killed_rank_costs_nothing(trained: Any, runs: tuple[str, str]) -> None:
    """A restart in place from the checkpoint of step 10 ends at the same bits."""
    store, made = trained
    killed, whole = (processes.digests(FolderStore(store), made[run][0]) for run in runs)
    assert killed[STEPS, 1] == whole[STEPS, 1]


@pytest.mark.combines("cp", "dp_shard", "validate")
@pytest.mark.combines("cp", "context ring", "validate")
@pytest.mark.parametrize("run", ["two", "sharded", "ring"])
def test_validation_and_tokens_count_each_once(trained: Any, run: str) -> None:
    """The loss, and a metric that sees outputs and batch of each rank."""
    store, made = trained

    def validations(name: str) -> list[dict[str, float]]:
        found = plans.records(store, made[name][0])
        return [record["metrics"] for record in found if record["kind"] == "validation"]

    assert len(validations(run)) == 2
    for found, expected in zip(validations(run), validations("alone"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    mesh = made[run][0].work.training.mesh
    for rank in range(mesh.world_size):
        steps = [one for one in plans.records(store, made[run][0], rank) if one["kind"] == "step"]
        assert {step["tokens"] for step in steps} == {16 * 32 // mesh.world_size}
        assert {step["target_tokens"] for step in steps} == {16 * 32 // mesh.world_size}


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    world = World(Mesh(cp=2), 0, torch.device("cpu"))
    with pytest.raises(TrainError, match=r"4 equal parts.*seq_len 6"):
        context.cut_batch({"inputs": torch.zeros(1, 6, dtype=torch.int64)}, world)
