"""How often workers wait for each other, as the planner sees it."""

from __future__ import annotations

from typing import Any

import pytest

from mlpipe._core.errors import PlanError
from mlpipe.plan.build import Start, build_plan
from mlpipe.plan.hardware import GIB, Hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.plan import Plan
from mlpipe.spec.load import load_pipeline_text

pytestmark = pytest.mark.unit
CPU = Hardware("cpu", 1, 4, 8 * GIB, "CPU worker", {}, 4)
PAIR = CPU._replace(num_nodes=2)
CHAT = "{chat: train.jsonl, tokenizer: ./model, batch_size: 64, micro_batch: 1}"
TOKENS = "{tokens: tokens, batch_size: 64, micro_batch: 1}"
PRESET = "{preset: llama-25m, seq_len: 256, vocab_size: 4096}"
OWN = "{entry: 'package.models:build', seq_len: 32}"


def plan_of(
    more: str, data: str = CHAT, model: str = PRESET, hardware: Hardware = CPU, kubernetes: str = ""
) -> Plan:
    text = f"""version: 1
name: uneven
{kubernetes}
stages:
  - name: train
    train: {{model: {model}, data: {data}, steps: 10, {more}}}
    resources: {{workers_per_node: 4}}
"""
    return build_plan(load_pipeline_text(text, "uneven.yaml"), "train", Start("r", 1, "./runs"), hardware)


def work_of(*args: Any, **kwargs: Any) -> Any:
    return plan_of(*args, **kwargs).work


def test_packed_conversations_are_gathered_once_a_step_where_that_fits():
    roomy = work_of("strategy: fsdp")
    assert (roomy.communication, roomy.reshard_after_forward) == ("resident", False)
    often = work_of("strategy: fsdp, communication: collective")
    assert (often.communication, often.reshard_after_forward) == ("collective", True)
    between = (roomy.predicted.memory_bytes + often.predicted.memory_bytes) // 2
    assert often.predicted.memory_bytes < between < roomy.predicted.memory_bytes
    tight = work_of("strategy: fsdp", hardware=CPU._replace(memory_bytes=between))
    assert (tight.communication, tight.reshard_after_forward) == ("collective", True)


@pytest.mark.parametrize("data", [TOKENS, CHAT.replace("{", "{packing: off, ")])
def test_even_work_waits_as_ever(data):
    assert work_of("strategy: fsdp", data=data).communication == "collective"


def test_a_model_of_ones_own_is_trained_as_asked():
    assert work_of("communication: resident, strategy: fsdp", TOKENS, OWN).communication == "resident"
    assert work_of("strategy: fsdp", TOKENS, OWN).communication == "collective"


def test_weights_that_are_shown_are_split_and_counted():
    """Once for all ranks of the node: each keeps its part."""
    shown = work_of("communication: on_demand")
    assert shown.mesh.dp_shard == 4
    params = 8 * shown.shared_memory_bytes  # fp32 weights and sums of gradients, or bf16 blocks
    assert params > 0
    fsdp = work_of("communication: on_demand, strategy: fsdp, precision: fp32")
    often = work_of("communication: collective, strategy: fsdp, precision: fp32")
    more = fsdp.predicted.memory_bytes - often.predicted.memory_bytes
    assert more == pytest.approx(fsdp.shared_memory_bytes / 4, rel=0.1)
    assert often.shared_memory_bytes is None


def test_each_of_several_nodes_has_all_weights_and_gradients_cross_once_a_step():
    """Of shards of a quarter, in fp32, to one other node by each worker: 4 bytes a parameter / 4, of which an
    all-reduce of two sends half, twice. Over a slow network a smaller part is worth more owners."""
    asked = "communication: on_demand, precision: fp32"
    slow = [PAIR._replace(speed=PAIR.speed._replace(network_bytes_per_second=rate)) for rate in (1e6, 2e6)]
    one, two = work_of(f"{asked}, strategy: fsdp"), work_of(asked, hardware=slow[0])
    assert (two.strategy, two.mesh) == ("hsdp", Mesh(dp_replicate=2, dp_shard=4))
    assert two.shared_memory_bytes == one.shared_memory_bytes
    assert two.predicted.memory_bytes == one.predicted.memory_bytes
    faster = two.predicted.step_seconds - work_of(asked, hardware=slow[1]).predicted.step_seconds
    assert faster == pytest.approx(two.shared_memory_bytes / 8 * (1 / 1e6 - 1 / 2e6), rel=1e-3)


def test_several_copies_on_a_node_have_memory_each():
    split = work_of("communication: on_demand, mesh: {dp_shard: 4}, precision: fp32")
    copied = work_of("communication: on_demand, mesh: {dp_replicate: 2, dp_shard: 2}, precision: fp32")
    assert copied.shared_memory_bytes == 2 * split.shared_memory_bytes


def test_what_is_on_another_node_cannot_be_read():
    """Of nodes that the file does not name."""
    with pytest.raises(PlanError, match="fsdp does not split the weights within each node"):
        work_of("communication: on_demand, strategy: fsdp", hardware=PAIR)
    for more, hardware in (
        ("", CPU._replace(num_nodes=4, devices_per_node=1)),
        ("mesh: {dp_shard: 4}", CPU._replace(num_nodes=2, devices_per_node=2)),
    ):
        with pytest.raises(PlanError, match="split over workers of the same node"):
            work_of(f"communication: on_demand, {more}", hardware=hardware)


def test_pods_have_room_for_what_is_shown():
    image = "image: registry.example.com/a:1\n"
    large = PRESET.replace("llama-25m", "llama-1b")
    usual = plan_of("strategy: fsdp, communication: resident", model=large, kubernetes=image).cluster
    plan = plan_of("strategy: fsdp, communication: on_demand", model=large, kubernetes=image)
    assert usual is not None
    assert plan.cluster is not None
    assert plan.cluster.shm_bytes >= max(usual.shm_bytes, plan.work.training.shared_memory_bytes or 0)
    with pytest.raises(PlanError, match="is too small: communication: on_demand needs"):
        plan_of(
            "strategy: fsdp, communication: on_demand",
            model=large,
            kubernetes=image + "kubernetes: {shm: 64 MiB}",
        )
