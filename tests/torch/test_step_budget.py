"""What a step asks of the host and of the network, under every strategy and along every other axis: counts,
so that a slower step is found on any machine."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
from kit import budget, plans

from mlpipe._core.compression import COMPRESSIONS
from mlpipe._core.presets import MOE, MoeConfig
from mlpipe.plan.axes import active, pp
from mlpipe.plan.axes.tp import num_collectives
from mlpipe.plan.entry import Entry
from mlpipe.plan.hardware import detect_hardware
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.pipelining import num_transfers
from mlpipe.plan.pricing import Choices, Pricer, Training, layout_of
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.experts import Experts
from mlpipe.plan.updates import CompressPlan, IslandsPlan
from mlpipe.plan.wire import Wire

pytestmark = pytest.mark.torch

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
# four microbatches each of 2 or, of ep, 4 samples
EXPERTS = MoeConfig(
    **{**vars(plans.CONFIG), "ffn_dim": 32}, num_experts=4, experts_per_token=2, num_shared_experts=1,
    balance_rate=0.01,
)  # fmt: skip
PARTED: dict[str, dict[str, Any]] = {"micro_batch": 4, "accumulation": 4}
# numbers of blocks of each stage
STAGES = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved": (1, 1, 1, 1), "zero_bubble": (1, 1)}
AXES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": Mesh(tp=2), **PARTED},
    "cp": {"mesh": Mesh(cp=2), **PARTED},
    "cp, ring": {"mesh": Mesh(cp=2), "context_exchange": "ring", **PARTED},
    **{
        f"pp, {schedule}": {
            "mesh": Mesh(pp=2),
            "pipeline": PipelinePlan(schedule, blocks),
            "model": plans.model_plan(num_layers=sum(blocks)),
            **PARTED,
        }
        for schedule, blocks in STAGES.items()
    },
    "ep": {
        "mesh": Mesh(dp_shard=2, ep=2),
        "strategy": "fsdp",
        "model": ModelPlan(Entry(MOE, dataclasses.asdict(EXPERTS)), "test", 32, ()),
    },
}
# in bf16, whose sums are exact where a run is deterministic
EXACT: dict[str, dict[str, Any]] = {
    "tp, exact": {"mesh": Mesh(tp=2), "precision": "bf16", **PARTED},
    "tp of experts, exact": {
        "mesh": Mesh(tp=2), "precision": "bf16", "model": AXES["ep"]["model"], **PARTED
    },
    "cp, exact": {"mesh": Mesh(cp=2), "precision": "bf16", **PARTED},
}  # fmt: skip
LINKS: dict[str, dict[str, Any]] = {
    "ddp, int8": {"compress": CompressPlan("int8")},
    "ddp, powersgd": {"compress": CompressPlan("powersgd", {"rank": 4})},
    # two steps are a round
    "islands, int8": {"islands": IslandsPlan(2, 0.7, 0.5, "int8")},
}
WORKS: dict[str, dict[str, Any]] = {name: {"strategy": name} for name in STRATEGIES} | AXES | EXACT | LINKS
# Of two axes at once, on four ranks.
TWICE: dict[str, Any] = {"micro_batch": 4, "accumulation": 2}
MIXES: dict[str, dict[str, Any]] = {
    "tp x pp": {"mesh": Mesh(tp=2, pp=2), "pipeline": PipelinePlan("1f1b", (1, 1)), **PARTED},
    "tp x fsdp": {"mesh": Mesh(dp_shard=2, tp=2), "strategy": "fsdp", **TWICE},
    "cp x fsdp": {"mesh": Mesh(dp_shard=2, cp=2), "strategy": "fsdp", **TWICE},
    "ep x fsdp": {"mesh": Mesh(dp_shard=4, ep=2), "strategy": "fsdp", "micro_batch": 2, "accumulation": 2,
                  "model": AXES["ep"]["model"]},
}  # fmt: skip
# Of two copies, each of two ranks as of one node.
ON_DEMAND: dict[str, Any] = {
    "mesh": Mesh(dp_replicate=2, dp_shard=2), "strategy": "hsdp", "communication": "on_demand",
    "deterministic": False, **TWICE, "micro_batch": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """By rank 0 of 2."""
    return _counts(tmp_path_factory.mktemp("counted"), WORKS, 2)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """By rank 0 of 4."""
    return _counts(tmp_path_factory.mktemp("mixed"), {**MIXES, "on demand": ON_DEMAND}, 4)


def _counts(folder, works, world_size):
    """Of one step, as the mean of two, neither of them the first or the last."""
    tokens = plans.write_tokens(folder / "tokens")
    made = [
        plans.train_plan(
            folder / "store", tokens, **{"world_size": world_size, **work}, steps=4, every=100,
            run_id=str(number),
        )
        for number, work in enumerate(works.values())
    ]  # fmt: skip
    plans.run_together(made, folder / "runs", worker="kit.counted")
    found = {}
    for number, name in enumerate(works):
        by_step = json.loads((folder / "runs" / f"counts-{number}.json").read_text())
        before, after = by_step["2"], by_step["4"]
        found[name] = {
            figure: (count - before.get(figure, 0)) / 2
            for figure, count in after.items()
            if count > before.get(figure, 0)
        }
    return found


@pytest.mark.parametrize("work", WORKS)
def test_a_step_keeps_its_budget(counted, work):
    found = dict(counted[work])
    if work == "ep":  # which rows a rank is sent, the router says; how many bytes: test_expert_parallel.py
        del found["alltoall_base_ bytes"]
    budget.within(f"a step, {work}", found)


def test_what_is_communicated_is_what_the_strategy_needs(counted):
    """In fp32 with P parameters: DDP reduces 4 P bytes; an all-gather or reduce-scatter over 2 ranks has 4 P
    on one side and half of it on the other (ZeRO, arXiv:1910.02054, section 7)."""
    parameters = 4 * plans.CONFIG.num_params()
    assert counted["ddp"]["allreduce_ bytes"] == parameters  # sums of the loss stay within the node
    assert counted["zero1"]["_allgather_base_ bytes"] == 1.5 * parameters
    assert counted["zero2"]["_allgather_base_ bytes"] == 1.5 * parameters  # kept until the backward pass
    assert counted["fsdp"]["_allgather_base_ bytes"] == 3 * parameters
    assert counted["fsdp"]["_reduce_scatter_base_ bytes"] == 1.5 * parameters


def test_what_is_sent_compressed_is_what_the_planner_prices(counted):
    """Of P parameters, padded: each rank gives its code to an all-to-all, and the code of its half to an
    all-gather; in and out are counted both. Of islands in every second step."""
    parameters = plans.CONFIG.num_params()
    bits = COMPRESSIONS["int8"].sent(parameters, 1, {}).reduced_bits
    for name, steps in (("ddp, int8", 1), ("islands, int8", 2)):
        expected = bits / 8 / steps
        assert counted[name]["alltoall_base_ bytes"] == pytest.approx(2 * expected, rel=0.02), name
        assert counted[name]["_allgather_base_ bytes"] == pytest.approx(1.5 * expected, rel=0.02), name
        assert "allreduce_" not in counted[name], name


def test_what_travels_along_an_axis_is_what_the_planner_prices(counted):
    """In fp32, of four microbatches: what goes in and comes out on each of 2 ranks. Besides, of the loss
    three numbers a token, and the gradients of the norms."""
    layers, tokens, dim = plans.CONFIG.num_layers, 16 * 32, plans.CONFIG.dim
    stream, width = 4 * tokens * dim, dim // plans.CONFIG.num_heads
    block: Any = SimpleNamespace(
        num_blocks=layers, recomputes=False, is_first=True, is_last=True, exact_sums=False
    )
    gathers, scatters = num_collectives(block)
    tp = counted["tp"]
    assert tp["_allgather_base_ bytes"] == gathers * stream * 3 / 2 + 4 * 3 * tokens * 3
    assert tp["_reduce_scatter_base_ bytes"] == scatters * stream * 3 / 2
    assert tp["allreduce_ bytes"] == 4 * (2 * layers + 1) * dim

    keys_and_values = 2 * 4 * tokens * plans.CONFIG.num_kv_heads * width  # of all tokens
    cp = counted["cp"]
    assert cp["_allgather_base_ bytes"] == layers * 2 * keys_and_values * 3 / 2  # in each pass
    assert cp["alltoall_base_ bytes"] == layers * keys_and_values * 2
    assert cp["allreduce_ bytes"] == 4 * plans.CONFIG.num_params()
    # in each pass one rank's, and back their gradients: of those that come, of early chunks only
    ring, part = counted["cp, ring"], keys_and_values / 2
    assert ring["send"] == ring["recv_"] == layers * 4 * 3
    assert ring["send bytes"] == layers * 3 * part
    assert ring["recv_ bytes"] == layers * 2.5 * part

    tied = 4 * plans.CONFIG.vocab_size * dim  # gradients that both ends add up
    for schedule in STAGES:
        pp = counted[f"pp, {schedule}"]
        each_way = num_transfers(schedule, 0, 2, 4) // 2
        assert pp["send bytes"] == pp["recv_ bytes"] == each_way * stream // 4 + tied, schedule
        assert pp["send"] == pp["recv_"] == each_way + 1, schedule

    ep = counted["ep"]
    assert ep["alltoall_base_"] == 5 * layers


class Asked(Wire):
    """In place of seconds, of one kind of collective how many there are, or the bytes that a rank gives and
    gets."""

    kind, calls = "", False

    def _of(self, kind, num_bytes, num_ranks):
        return 0.0 if kind != self.kind or num_ranks == 1 else 1.0 if self.calls else num_bytes

    def all_reduce(self, num_bytes, num_ranks, stride=1):
        return self._of("allreduce_", num_bytes, num_ranks)

    def all_gather(self, num_bytes, num_ranks, stride=1):
        return self._of("_allgather_base_", num_bytes * (1 + 1 / num_ranks), num_ranks)

    def reduce_scatter(self, num_bytes, num_ranks, stride=1):
        return self._of("_reduce_scatter_base_", num_bytes * (1 + 1 / num_ranks), num_ranks)

    gather_activations, scatter_activations = all_gather, reduce_scatter

    def all_to_all(self, num_bytes, num_ranks, stride=1):
        return self._of("alltoall_base_", 2 * num_bytes / num_ranks, num_ranks)

    def send(self, num_bytes, stride):
        return self._of("send", num_bytes, 2)


def _asked(work, kind, calls):
    """Of rank 0, as the planner prices it."""
    mesh, strategy = work["mesh"], work.get("strategy", "single")
    shape = Experts(EXPERTS) if work.get("model") is AXES["ep"]["model"] else Dense(plans.CONFIG)
    hardware = detect_hardware(None)
    measured = hardware.speed._replace(
        gather_bytes_per_second=1.0, scatter_bytes_per_second=1.0
    )  # with all copies
    hardware = hardware._replace(speed=measured)
    training = Training(16, 32, 1, False, OptimizerCost(8, "adamw"), 100, None, deterministic=True)
    pricer = Pricer(shape, training, hardware)
    precision = work.get("precision", "fp32")
    choices = Choices(work["micro_batch"], "none", precision, work.get("communication", "collective"))
    passes = pricer._on_one_rank(choices, mesh, pricer._parts(mesh)[0]).passes
    no_time = {f"{way}_{where}": 0.0 for way in ("forward", "backward") for where in ("block", "outside")}
    passes, layout = passes._replace(**no_time), layout_of(strategy, mesh, choices.communication)
    # while a rank of a pipeline is idle, others' collectives take time, of which it has none
    axes = (axis for axis in active(mesh) if axis is not pp or kind == "send")
    wire = Asked(hardware)
    wire.kind, wire.calls = kind, calls
    return sum(axis.exposed_seconds(passes, wire, layout) for axis in axes)


@pytest.mark.parametrize("name", EXACT)
def test_exact_sums_travel_as_the_planner_prices_them(counted, name):
    """Besides, of the loss three numbers a token, in each of four micro-batches."""
    counts = counted[name]
    for kind in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
        calls, num_bytes = (_asked(EXACT[name], kind, calls) for calls in (True, False))
        if kind == "_allgather_base_" and EXACT[name]["mesh"].tp > 1:
            calls, num_bytes = calls + 4, num_bytes + 4 * 3 * (16 * 32) * 3
        assert (counts.get(kind, 0), counts.get(f"{kind} bytes", 0)) == (calls, num_bytes), kind


@pytest.mark.parametrize("name", MIXES)
def test_what_travels_along_two_axes_is_what_the_planner_prices(mixed, name):
    """Besides, a head that `tp` splits gathers three numbers a token for the loss, in each of two
    micro-batches of 4 x 32 tokens; a pipeline's ends add up the gradient of what they share; how many rows go
    to the other ranks the router says; norms' gradients are small."""
    work, counts = MIXES[name], mixed[name]
    found, asked = ({}, {})
    for kind in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
        found[kind] = counts.get(kind, 0), counts.get(f"{kind} bytes", 0)
        asked[kind] = tuple(_asked(work, kind, calls) for calls in (True, False))
    if name == "tp x fsdp":
        calls, num_bytes = asked["_allgather_base_"]
        asked["_allgather_base_"] = calls + 2, num_bytes + 2 * 4 * 3 * (4 * 32) * 3
    if name == "ep x fsdp":
        rows = [one.pop("alltoall_base_") for one in (found, asked)]
        assert rows[0][0] == rows[1][0]
        assert rows[0][1] == pytest.approx(rows[1][1], rel=0.1)
    assert found == asked
    assert counts.get("allreduce_ bytes", 0) < 4 * (2 * plans.CONFIG.num_layers + 1) * plans.CONFIG.dim
    sent, num_bytes = (_asked(work, "send", calls) for calls in (True, False))
    tied = 4 * plans.CONFIG.vocab_size * plans.CONFIG.dim / work["mesh"].tp if sent else 0
    for way in ("send", "recv_"):
        assert (counts.get(way, 0), counts.get(f"{way} bytes", 0)) == (
            sent / 2 + (sent > 0),
            num_bytes / 2 + tied,
        )


def test_copies_on_demand_send_gradients_alone_once_a_step(mixed):
    """Of two microbatches."""
    counts = mixed["on demand"]
    calls, num_bytes = (_asked(ON_DEMAND, "allreduce_", calls) for calls in (True, False))
    assert counts["allreduce_"] == calls == plans.CONFIG.num_layers + 1
    assert counts["allreduce_ bytes"] == num_bytes
    assert num_bytes == 4 * plans.CONFIG.num_params() / 2
    assert not {"_allgather_base_", "_reduce_scatter_base_", "broadcast_"} & counts.keys()
