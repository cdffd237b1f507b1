"""Every optimizer of the table: over 100 steps what its reference computes, under every strategy the same
training, from ranks of one number on ranks of another; and what stands beside it (groups, an average of the
weights, schedules, clipping)."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import plans
from torch import nn

from mlpipe._core.errors import TrainError
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.updates import EmaPlan, OptimizerPlan, ParameterGroup
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.export import export_checkpoint
from mlpipe.train.optim.averages import swapped_in
from mlpipe.train.optim.clipping import clip_values
from mlpipe.train.optim.ema import averaged
from mlpipe.train.optim.learning_rate import check_schedule, learning_rate
from mlpipe.train.optim.make import make_update
from mlpipe.train.optim.update import after_load
from mlpipe.train.reshard import load
from mlpipe.train.resuming import load_optimizer
from mlpipe.train.shards import LocalShard, Split, clear_gradients, rows_of

pytestmark = pytest.mark.torch

# -- against the reference ------------------------------------------------------------------------


def plan_of(name: str | None, entry: str | None = None, **changes: Any) -> OptimizerPlan:
    args = {}
    if name is not None:
        args = {
            key: list(argument.default) if isinstance(argument.default, tuple) else argument.default
            for key, argument in OPTIMIZERS[name].arguments.items()
        }
    args |= changes.pop("args", {})
    return OptimizerPlan(name, entry, args, 8, 1e-2, 1.0, "constant", 0, 0, 0.0, **changes)


class Net(nn.Module):
    """Matrices with more rows than columns and fewer, one of rows longer than a block of 8 bits, vectors, and
    a short row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 264), nn.Linear(264, 33)])
        self.head = nn.Linear(33, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def shards_of(module: nn.Module) -> list[LocalShard]:
    return [
        LocalShard(
            f"model.{name}",
            parameter.detach(),
            tuple(parameter.shape),
            (0,) * parameter.dim(),
            parameter=parameter,
            in_block=name.startswith("layers."),
        )
        for name, parameter in module.named_parameters()
    ]


def backward(module: nn.Module, step: int) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
    module(x).square().sum().backward()


def by_dims(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class Reference:
    """Of several torch.optim.Optimizers, or formulas that look like one."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()


class LionOfThePaper:
    """Chen et al., 2023, algorithm 2, with the betas 0.9 and 0.99 and a decay of 0.1 of matrices."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.means = parameters, [torch.zeros_like(p) for p in parameters]
        self.param_groups = [{"lr": 0.0}]

    @torch.no_grad()
    def step(self) -> None:
        lr = self.param_groups[0]["lr"]
        for p, mean in zip(self.parameters, self.means, strict=True):
            update = torch.sign(0.9 * mean + (1 - 0.9) * p.grad)
            p.copy_(p * (1 - lr * (0.1 if p.dim() >= 2 else 0.0)) - lr * update)
            mean.copy_(0.99 * mean + (1 - 0.99) * p.grad)


class ScheduleFreeOfThePaper:
    """Defazio et al., 2024, algorithm 1, with the betas 0.9 and 0.999 and a decay of 0.1 of matrices: all
    three series are kept, and each is computed as it stands there. The members of the average weigh what the
    largest learning rate so far was, squared (section 4.3)."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.count, self.param_groups = parameters, 0, [{"lr": 0.0}]
        self.x, self.z = ([p.detach().clone() for p in parameters] for _ in range(2))
        self.squares = [torch.zeros_like(p) for p in parameters]
        self.weights: list[float] = []

    @torch.no_grad()
    def step(self) -> None:
        lr = self.param_groups[0]["lr"]
        self.count += 1
        self.weights.append(max([lr**2, *self.weights]))
        c = self.weights[-1] / sum(self.weights)
        for i, y in enumerate(self.parameters):
            self.squares[i] = 0.999 * self.squares[i] + 0.001 * y.grad**2
            step = y.grad / ((self.squares[i] / (1 - 0.999**self.count)).sqrt() + 1e-8)
            self.z[i] = self.z[i] - lr * step - lr * (0.1 if y.dim() >= 2 else 0.0) * y
            self.x[i] = (1 - c) * self.x[i] + c * self.z[i]
            y.copy_((1 - 0.9) * self.z[i] + 0.9 * self.x[i])


class AdamWOfFewBits:
    """AdamW in plain operations, whose moments go through a few bits after each step: the nearest of the
    numbers, of the two around it, times the largest of a block of a row."""

    block: int

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.count, self.param_groups = parameters, 0, [{"lr": 0.0}]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @staticmethod
    def numbers(signed: bool) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def mended(codes: torch.Tensor, blocks: torch.Tensor, signed: bool) -> torch.Tensor:
        return codes

    def through_few_bits(self, values: torch.Tensor, signed: bool) -> torch.Tensor:
        numbers, found = self.numbers(signed), values.clone()
        for start in range(0, values.shape[1], self.block):
            blocks = values[:, start : start + self.block]
            largest = blocks.abs().amax(1, keepdim=True)
            ratios = torch.where(largest > 0, blocks / largest, 0.0)
            above = torch.searchsorted(numbers, ratios).clamp(1, len(numbers) - 1)
            is_nearer = (ratios - numbers[above - 1]) < (numbers[above] - ratios)
            codes = self.mended(torch.where(is_nearer, above - 1, above), blocks, signed)
            found[:, start : start + self.block] = numbers[codes] * largest
        return found

    @torch.no_grad()
    def step(self) -> None:
        lr = self.param_groups[0]["lr"]
        self.count += 1
        for p, (mean, square) in zip(self.parameters, self.moments, strict=True):
            mean.lerp_(p.grad, 0.1)
            square.mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
            if p.dim() >= 2:
                p.mul_(1 - lr * 0.1)
            divisor = (square / (1 - 0.95**self.count)).sqrt() + 1e-8
            p.sub_(lr * (mean / (1 - 0.9**self.count)) / divisor)
            if p.dim() >= 2 and p.shape[1] >= 32:
                mean.copy_(self.through_few_bits(mean, True))
                square.copy_(self.through_few_bits(square, False))


class AdamWOf8Bits(AdamWOfFewBits):
    """Dettmers et al. (2022). A positive square stays so."""

    block = 256

    @staticmethod
    def numbers(signed: bool) -> torch.Tensor:
        """As bitsandbytes' functional.py: create_dynamic_map."""
        data = [0.0, 1.0]
        for i in range(7):
            edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float32)
            means = (10 ** (-6 + i)) * (edges[:-1] + edges[1:]) / 2.0
            data += means.tolist() + ((-means).tolist() if signed else [])
        assert len(data) == 256
        return torch.tensor(sorted(data))

    @staticmethod
    def mended(codes: torch.Tensor, blocks: torch.Tensor, signed: bool) -> torch.Tensor:
        return codes if signed else torch.where(blocks > 0, codes.clamp(min=1), codes)


class AdamWOf4Bits(AdamWOfFewBits):
    """Li et al. (2023), with blocks for both moments: dynamic exponent, and linear without 0."""

    block = 128

    @staticmethod
    def numbers(signed: bool) -> torch.Tensor:
        half = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
        signs = [*(-number for number in reversed(half)), 0.0, *half, 1.0]
        return torch.tensor(signs) if signed else torch.arange(1, 17) / 16


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The tensors are small, and threads of OpenMP wait for each other on a machine that does other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference_of(name: str, net: Net) -> Reference:
    everything = list(net.parameters())
    if name == "lion":
        return Reference(LionOfThePaper(everything))
    if name in ("adamw8bit", "adamw4bit"):
        return Reference((AdamWOf8Bits if name == "adamw8bit" else AdamWOf4Bits)(everything))
    if name == "schedule_free_adamw":
        return Reference(ScheduleFreeOfThePaper(everything))
    if name == "adafactor":
        return Reference(torch.optim.Adafactor(by_dims(everything, 0.05)))
    if name == "muon":
        matrices = [layer.weight for layer in net.layers]
        rest = [p for p in everything if all(p is not matrix for matrix in matrices)]
        muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        return Reference(muon, torch.optim.AdamW(by_dims(rest, 0.1), betas=(0.9, 0.95), fused=True))
    raise AssertionError(name)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "args", "tolerance"),
    [
        ("lion", {}, 1e-6),
        ("schedule_free_adamw", {}, 1e-5),
        ("adafactor", {"weight_decay": 0.05}, 1e-5),
        ("muon", {}, 1e-6),
        ("adamw8bit", {}, 1e-4),
        ("adamw4bit", {}, 1e-4),
    ],
)
def test_equal_to_its_reference_over_100_steps(name: str, args: dict[str, Any], tolerance: float) -> None:
    """Each step begins at the reference's weights, so that a rounding in one step is not another sign or
    code in the next; the states go their own way."""
    ours, theirs = Net(), Net()
    reference = reference_of(name, theirs)
    shards = shards_of(ours)
    update = make_update(plan_of(name, args=args), shards)
    for step in range(1, 101):
        for module in (ours, theirs):
            backward(module, step)
        for parameter in theirs.parameters():
            parameter.grad.mul_(0.5)
        reference.step(0.01 / step)
        update.step(lr=0.01 / step, scale=0.5)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            unlike = (a - b).abs() > tolerance * b.abs().max()
            # a rounding is another sign to Lion, and another code to few bits
            assert unlike.double().mean() <= (0.002 if "bit" in name or name == "lion" else 0.0), step
            a.data.copy_(b.data)
        clear_gradients(shards)
        for parameter in theirs.parameters():
            parameter.grad = None


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_from_its_states_bit_for_bit(name: str) -> None:
    """With the tensors that a checkpoint has: those of the model that the optimizer has none instead of, and
    its states."""
    nets = Net(), Net()
    ours, theirs = (shards_of(net) for net in nets)
    before, after = make_update(plan_of(name), ours), make_update(plan_of(name), theirs)
    for step in (1, 2):
        backward(nets[0], step)
        before.step(lr=0.01, scale=0.5)
        clear_gradients(ours)
    after.load_scalars(json.loads(json.dumps(before.scalars())))
    saved = {item.name: item.local.clone() for item in [*ours, *before.state()]}
    for item in [*theirs, *after.state()]:
        item.local.copy_(saved[item.name])
    after_load(after)
    for net, shards, update in ((nets[0], ours, before), (nets[1], theirs, after)):
        backward(net, 3)
        update.step(lr=0.02, scale=0.5)
        clear_gradients(shards)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_muon_of_experts_is_that_of_each_of_their_matrices(num_ranks: int) -> None:
    """Four of each kind, one below the other, whose rows three ranks share as they come, with a matrix that
    is none of theirs: the same bits as of twelve matrices and that one."""
    shapes = {"up": (5, 6, 4), "down": (8, 3, 4), "gate": (7, 6, 1)}
    whole = {name: torch.randn(rows * many, columns) for name, (rows, columns, many) in shapes.items()}
    meeting, table = threading.Barrier(num_ranks), {}

    def exchange(rank: int) -> Any:
        def all_to_all(out: torch.Tensor, own: torch.Tensor, came: Any, sent: Any, group: Any) -> None:
            table[rank] = own.split(sent)
            meeting.wait(60)
            arrived = [table[other][rank] for other in range(num_ranks)]
            meeting.wait(60)
            assert [len(part) for part in arrived] == came
            out.copy_(torch.cat(arrived))

        return all_to_all

    def train(rank: int | None) -> list[torch.Tensor]:
        """Two steps; of all apart, or of one rank's rows of the stacks."""
        shards, split = [], None
        if rank is not None and num_ranks > 1:
            split = Split(rank, num_ranks, None, lambda _: exchange(rank))
        for name, (rows, columns, many) in shapes.items():
            start, stop = rows_of(rows * many, rank or 0, num_ranks if split else 1)
            parts = [whole[name][start:stop]] if rank is not None else list(whole[name].split(rows))
            size = (rows * many, columns) if rank is not None else (rows, columns)
            for number, part in enumerate(parts):
                parameter = nn.Parameter(part.clone())
                parameter.grad = part.roll(1, 1) + part
                shard = LocalShard(
                    f"{name}{number}", parameter.data, size, (start, 0), parameter=parameter, in_block=True
                )
                stacked = many if rank is not None else 1
                shards.append(replace(shard, split=split, num_matrices=stacked))
        update = make_update(plan_of("muon"), shards)
        for lr in (0.1, 0.05):
            update.step(lr=lr, scale=0.5)
        return [shard.local for shard in shards]

    apart = iter(train(None))
    expected = [torch.cat([next(apart) for _ in range(many)]) for *_, many in shapes.values()]
    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = list(pool.map(train, range(num_ranks)))
    for found, wanted in zip(map(torch.cat, zip(*ranks, strict=True)), expected, strict=True):
        assert torch.equal(found, wanted)


def test_muon_without_blocks_is_refused() -> None:
    shards = [replace(shard, in_block=False) for shard in shards_of(Net())]
    with pytest.raises(TrainError, match="no trained parameter is in a block"):
        make_update(plan_of("muon"), shards)


# -- groups ---------------------------------------------------------------------------------------


def moved(update: Any, net: Net, lr: float = 0.1) -> dict[str, torch.Tensor]:
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    backward(net, 0)
    update.step(lr=lr, scale=1.0)
    return {name: before[name] - parameter.detach() for name, parameter in net.named_parameters()}


def with_own(params: Any, *, weight_decay: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, weight_decay=weight_decay)


@pytest.mark.parametrize("name", [*OPTIMIZERS, None])
def test_the_first_group_that_matches_rules(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every optimizer and the user's own: a scaled rate scales the step; weight decay of a group is of its
    vectors, too, and of nothing else."""
    import sys

    monkeypatch.setitem(sys.modules, "test_optimizers", sys.modules[__name__])
    plan = plan_of(name, None if name else "test_optimizers:with_own", args={"weight_decay": 0.0})
    groups = (
        ParameterGroup("layers.0.*", lr_scale=0.0),
        ParameterGroup("*.bias", weight_decay=0.5),
        ParameterGroup("layers.?.weight", lr_scale=0.5),
    )
    nets = Net(), Net()
    for net in nets:
        for parameter in net.parameters():
            parameter.data += 0.01
    plain = moved(make_update(plan, shards_of(nets[0])), nets[0])
    grouped = moved(make_update(plan._replace(groups=groups), shards_of(nets[1])), nets[1])
    assert not grouped["layers.0.weight"].any()
    assert not grouped["layers.0.bias"].any()
    torch.testing.assert_close(grouped["embed.weight"], plain["embed.weight"])
    torch.testing.assert_close(
        grouped["layers.1.weight"], 0.5 * plain["layers.1.weight"], rtol=1e-3, atol=1e-6
    )
    extra = grouped["head.bias"] - plain["head.bias"]
    before = Net().head.bias.detach() + 0.01
    torch.testing.assert_close(extra, 0.1 * 0.5 * before, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("patterns", "says", "where"),
    [
        (["layer.*"], r"'layer\.\*' fits no parameter that is trained", "groups[0]"),
        (
            ["*.bias", "head.bias"],
            "all parameters that match 'head.bias' are of an earlier group",
            "groups[1]",
        ),
    ],
)
def test_a_pattern_that_says_nothing_is_refused(patterns: list[str], says: str, where: str) -> None:
    plan = plan_of("adamw", groups=tuple(ParameterGroup(pattern, 2.0) for pattern in patterns))
    with pytest.raises(TrainError, match=says) as caught:
        make_update(plan, shards_of(Net()))
    assert where in str(caught.value.where)
    assert "layers.0" in str(caught.value.hint) or "first match" in str(caught.value.hint)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd"])
def test_ranks_with_other_parameters_have_the_same_groups(name: str) -> None:
    """As the stages of a pipeline, one of which trains nothing."""
    groups = (ParameterGroup("layers.0.*", 0.0), ParameterGroup("head.bias", 2.0, 0.5))
    plan = plan_of(name, args={"weight_decay": 0.0}, groups=groups)
    nets = Net(), Net()
    for net in nets:
        backward(net, 1)
    whole, mine = map(shards_of, nets)
    everywhere = {shard.name: shard.in_block for shard in mine}
    stages = [make_update(plan, own, None, everywhere) for own in (mine[:3], mine[3:], [])]
    for update in (make_update(plan, whole), *stages):
        update.state()
        update.step(lr=0.1, scale=1.0)
    for expected, shard in zip(whole, mine, strict=True):
        torch.testing.assert_close(shard.local, expected.local, msg=shard.name)
    assert not stages[-1].state()
    stages[-1].load_scalars(stages[0].scalars())
    assert stages[-1].scalars() == stages[0].scalars()


def test_a_checkpoint_of_other_groups_is_refused() -> None:
    plan = plan_of("adamw")
    grouped = make_update(plan._replace(groups=(ParameterGroup("*.bias", 2.0),)), shards_of(Net()))
    plain = make_update(plan, shards_of(Net()))
    with pytest.raises(TrainError, match="had no groups of parameters, there are 2 now"):
        grouped.load_scalars(plain.scalars())
    saved = {"step": 3, "optimizer": {"name": "adamw", "scalars": grouped.scalars()}}
    with pytest.raises(TrainError, match="had groups of parameters, there are none now"):
        load_optimizer(plan, plain, saved, "run", False)


# -- an average, schedules, clipping --------------------------------------------------------------


def test_the_average_follows_the_formula_and_takes_turns() -> None:
    net = Net()
    shards = shards_of(net)
    update: Any = make_update(plan_of("adamw"), shards, EmaPlan(0.9, every=2))
    expected = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    for step in range(1, 6):
        backward(net, step)
        update.step(lr=0.01, scale=1.0)
        clear_gradients(shards)
        if step % 2 == 0:
            for name, parameter in net.named_parameters():
                expected[name] = 0.9 * expected[name] + 0.1 * parameter.detach()
    kept = {shard.name: shard.local for shard in update.state()}
    for name, average in expected.items():
        torch.testing.assert_close(kept[f"optim.model.{name}.ema"], average)
    again: Any = make_update(plan_of("adamw"), shards_of(Net()), EmaPlan(0.9, every=2))
    again.load_scalars(update.scalars())
    assert again.num_steps == 5
    plain = make_update(plan_of("adamw"), shards_of(Net()))
    plain.load_scalars(update.scalars())  # who averages no more goes on
    with pytest.raises(TrainError, match="no average of the weights to go on with"):
        again.load_scalars(plain.scalars())


def test_the_average_is_swapped_in_and_out() -> None:
    net = Net()
    shards = shards_of(net)
    update: Any = make_update(plan_of("adamw"), shards, EmaPlan(0.5))
    backward(net, 0)
    update.step(lr=0.1, scale=1.0)
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    averages = [shard.local.clone() for shard in update.state() if shard.name.endswith(".ema")]
    gathered = []

    class Model:
        built = type("Built", (), {"module": net})

        @staticmethod
        def after_step() -> None:
            gathered.append(net.head.bias.detach().clone())

    def failing() -> None:
        with swapped_in(update.averages(), Model):  # type: ignore[arg-type]
            for parameter, average in zip(net.parameters(), averages, strict=True):
                assert torch.equal(parameter, average)
            raise KeyError  # what fails inside leaves the weights as they were

    with pytest.raises(KeyError):
        failing()
    for parameter, weight in zip(net.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
    assert torch.equal(gathered[0], averages[-1])
    assert torch.equal(gathered[1], weights[-1])


def halves(step: int, steps: int, low: float) -> float:
    return 1.0 if step <= steps / 2 else low


def nonsense(step: int, steps: int) -> Any:
    return math.nan if step == steps else "a" if step == 1 else -1.0


def test_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "test_optimizers", sys.modules[__name__])
    polynomial = plan_of("adamw")._replace(schedule="polynomial", power=2.0, min_lr_ratio=0.1, warmup_steps=2)
    rates = [learning_rate(polynomial, step, 10) for step in (1, 2, 6, 10, 11)]
    assert rates == pytest.approx([0.005, 0.01, 0.01 * (0.1 + 0.9 * 0.25), 0.001, 0.001])
    linear = polynomial._replace(schedule="linear")
    assert learning_rate(polynomial._replace(power=1.0), 7, 10) == pytest.approx(learning_rate(linear, 7, 10))
    own = polynomial._replace(schedule="own", own_schedule=Entry("test_optimizers:halves", {"low": 0.2}))
    check_schedule(own, 10)
    assert [learning_rate(own, step, 10) for step in (1, 5, 6)] == pytest.approx([0.005, 0.01, 0.002])
    bad = own._replace(own_schedule=Entry("test_optimizers:nonsense", {}))
    with pytest.raises(TrainError, match="gave 'a' for step 1 of 10"):
        check_schedule(bad, 10)
    for step, said in ((5, "-1.0"), (10, "nan")):
        with pytest.raises(TrainError, match=f"gave {said} for step {step}"):
            learning_rate(bad, step, 10)
    with pytest.raises(TrainError, match="failed at step 1 of 10: TypeError"):
        check_schedule(own._replace(own_schedule=Entry("test_optimizers:halves", {})), 10)


def test_values_are_clipped_as_torch_clips_them() -> None:
    ours, theirs = Net(), Net()
    for module in (ours, theirs):
        backward(module, 0)
    clip_values(shards_of(ours), 0.01)
    nn.utils.clip_grad_value_(theirs.parameters(), 0.01)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# -- under every strategy -------------------------------------------------------------------------

STEPS, SAVED = 4, 2
AXES = {"pp": Mesh(pp=2), "tp": Mesh(tp=2), "cp": Mesh(cp=2)}
WORLDS: dict[int, tuple[str, ...]] = {1: ("single",), 2: ("ddp", "zero1", *AXES), 4: ("fsdp", "hsdp")}
ON_BOTH_DATA_AXES = ("muon", "adamw8bit")  # of each kind that looks beyond single elements one
# of losses: a rounding is another sign to Lion, another bf16 value to Muon, another code to 8 bits
TOLERANCE = {
    "adamw": 1e-5,
    "sgd": 1e-5,
    "adafactor": 1e-5,
    "lion": 1e-3,
    "muon": 1e-3,
    "adamw8bit": 1e-3,
    "adamw4bit": 3e-3,
    "schedule_free_adamw": 1e-5,
}
GROUPS = (ParameterGroup("*layernorm*", 2.0, 0.05), ParameterGroup("embed*", lr_scale=0.5))


def training(folder: Path, name: str, way: Any, world_size: int, **changes: Any) -> Plan:
    """With groups, an average, a schedule, and clipping by value or norm. `way`: a strategy, or an axis."""
    tokens = folder / "tokens"
    if way == "pp":
        changes |= {"pipeline": PipelinePlan("1f1b", (1, 1)), "micro_batch": 8, "accumulation": 2}
    plan = plans.train_plan(
        folder / "store", tokens, strategy="single" if way in AXES else way, world_size=world_size,
        mesh=AXES.get(way), steps=STEPS, every=SAVED, run_id=f"{name}-{way}-{world_size}",
        deterministic=False, **changes,
    )  # fmt: skip
    config = replace(plans.CONFIG, dim=32, ffn_dim=48, num_heads=2, num_kv_heads=2)
    train: Any = plan.work
    optimizer = plan_of(name)._replace(
        lr=3e-3 if name != "sgd" else 0.1,
        schedule="polynomial",
        warmup_steps=2,
        grad_clip=0.0 if name in ("lion", "muon") else 0.5,
        clip_value=0.001 if name in ("lion", "muon") else None,
        groups=GROUPS,
    )
    model = train.model._replace(build=Entry(train.model.build.entry, asdict(config)))
    ema = None if OPTIMIZERS[name].averages else EmaPlan(0.8, every=2)
    return replace(plan, work=train._replace(model=model, optimizer=optimizer, ema=ema))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Plan]]:
    folder = tmp_path_factory.mktemp("optimizers")
    plans.write_tokens(folder / "tokens")
    found: dict[str, Plan] = {}
    for world_size, strategies in WORLDS.items():
        made = [
            training(folder, name, one, world_size)
            for name, optimizer in OPTIMIZERS.items()
            for one in strategies
            if one not in optimizer.uncut and (one != "tp" or not optimizer.block)
            if one != "hsdp" or name in ON_BOTH_DATA_AXES
        ]
        plans.run_together(made, folder / f"world-{world_size}")
        found |= {plan.run_id: plan for plan in made}
    return folder / "store", found


def contents(store: Path, plan: Plan) -> dict[str, torch.Tensor]:
    """Of the last checkpoint, all tensors whole."""
    folder = FolderStore(store)
    latest = catalogue.latest(folder, plan.stage_key)
    assert latest is not None
    assert latest.step == STEPS
    manifest = catalogue.load_manifest(folder, latest.key)
    whole = [
        LocalShard(
            name,
            torch.empty(found["shape"], dtype=getattr(torch, found["dtype"])),
            tuple(found["shape"]),
            (0,) * len(found["shape"]),
        )
        for name, found in manifest["tensors"].items()
    ]
    load(folder, latest.key, manifest, whole)
    return {item.name: item.local for item in whole}


@pytest.mark.combines("dp_replicate", "optimizer *", "ema")
@pytest.mark.combines("dp_shard", "optimizer *", "ema")
@pytest.mark.combines("pp", "optimizer *", "ema")
@pytest.mark.combines("cp", "optimizer *", "ema")
@pytest.mark.combines("tp", "optimizer adamw", "ema")
@pytest.mark.combines("tp", "optimizer sgd")
@pytest.mark.combines("tp", "optimizer lion")
@pytest.mark.combines("tp", "optimizer schedule_free_adamw")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_strategies_agree(trained: Any, name: str) -> None:
    """In losses, in the average of the weights, and in which tensors there are."""
    store, made = trained
    alone = plans.losses(store, made[f"{name}-single-1"])
    of_one = contents(store, made[f"{name}-single-1"])
    kind = "model." if OPTIMIZERS[name].averages else ".ema"  # what a checkpoint has as the average
    averages = {key: value for key, value in of_one.items() if key.startswith(kind) or key.endswith(kind)}
    assert len(alone) == STEPS
    assert len(averages) == sum(key.startswith("model.") for key in of_one)
    assert alone[-1] < alone[0]
    for run, plan in made.items():
        if run.startswith(f"{name}-"):
            assert plans.losses(store, plan) == pytest.approx(alone, rel=TOLERANCE[name]), run
            of_many = contents(store, plan)
            assert {k: v.shape for k, v in of_many.items()} == {k: v.shape for k, v in of_one.items()}, run
            for key, value in averages.items():
                difference = (of_many[key] - value).abs().mean()
                assert difference <= 30 * TOLERANCE[name] * value.abs().mean(), (run, key)


def test_what_four_saved_two_go_on_with(trained: Any, tmp_path: Path) -> None:
    """In the middle: as if nothing had happened, under every optimizer."""
    store, made = trained
    resumed = []
    for name in OPTIMIZERS:
        last = catalogue.latest(FolderStore(store), made[f"{name}-fsdp-4"].stage_key)
        assert last is not None
        catalogue.discard(FolderStore(store), last.key)
        plan = training(store.parent, name, "fsdp", 2, attempt=2)
        resumed.append(replace(plan, run_id=f"{name}-fsdp-4"))
    plans.run_together(resumed, tmp_path)
    for name, plan in zip(OPTIMIZERS, resumed, strict=True):
        alone = plans.losses(store, made[f"{name}-single-1"])
        assert plans.losses(store, plan) == pytest.approx(alone[SAVED:], rel=TOLERANCE[name]), name
        rates = plans.by_step(store, plan, "lr")
        assert rates == plans.by_step(store, made[f"{name}-single-1"], "lr")[SAVED:]
        of_one, of_many = contents(store, made[f"{name}-single-1"]), contents(store, plan)
        for key, value in of_one.items():
            if key.endswith(".ema") or (OPTIMIZERS[name].averages and key.startswith("model.")):
                assert (of_many[key] - value).abs().mean() <= 30 * TOLERANCE[name] * value.abs().mean(), key


def test_an_average_is_exported_and_loaded_instead_of_the_weights(trained: Any, tmp_path: Path) -> None:
    store, made = trained
    plan, folder = made["adamw-fsdp-4"], FolderStore(store)
    kept, latest = contents(store, plan), catalogue.latest(folder, plan.stage_key)
    assert latest is not None
    export_checkpoint(folder, latest.key, tmp_path / "out", ema=True)
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    found = json.loads(data[8:end])["model.norm.weight"]
    start, stop = found["data_offsets"]
    exported = torch.frombuffer(bytearray(data[end + start : end + stop]), dtype=torch.float32)
    assert torch.equal(exported, kept["optim.model.norm.weight.ema"])
    assert not torch.equal(exported, kept["model.norm.weight"])
    # as an evaluation loads it, with a buffer that nobody averages
    manifest = catalogue.load_manifest(folder, latest.key)
    norm = LocalShard("model.norm.weight", torch.zeros(32), (32,), (0,))
    other = LocalShard("model.mean", torch.zeros(2), (2,), (0,), is_buffer=True)
    renamed = averaged([norm, other], manifest, latest.key)
    assert [one.name for one in renamed] == ["optim.model.norm.weight.ema", "model.mean"]
    load(folder, latest.key, manifest, renamed[:1])
    assert torch.equal(norm.local, exported)
    with pytest.raises(TrainError, match="no average of the weights"):
        averaged([other], manifest, latest.key)
