"""Time and cost of an elastic training by its number of nodes."""

from __future__ import annotations

import pytest
from kit.rendered import pipeline_of

from mlpipe.plan.build import stage_hardware
from mlpipe.plan.pricing import layout_of
from mlpipe.plan.scaling import scale_stage
from mlpipe.plan.training import shape_of, training_of
from mlpipe.plan.wire import Wire

pytestmark = pytest.mark.unit
SMALL = ("train.model.preset=llama-350m", "train.model.seq_len=2048", "train.data.batch_tokens=4194304")


def test_each_node_computes_its_part_and_sends_behind_its_passes():
    gang = pipeline_of("llm", *SMALL, "train.resources.nodes=1")
    elastic = pipeline_of("llm", *SMALL, "train.resources.nodes=1..8")
    hardware = stage_hardware(elastic, "train")
    one, two, four = (row.best for row in scale_stage(elastic, "train", hardware, "1..4"))
    (alone,) = scale_stage(gang, "train", hardware, "1")
    assert one == alone.best._replace(mfu_ratio=None), "one node sends nothing"
    trained = shape_of(training_of(elastic, "train"), {}).parameters.trained.total
    for number, best in ((2, two), (4, four)):
        assert best.mesh.world_size == hardware.devices_per_node
        assert best.seconds.compute == pytest.approx(one.seconds.compute / number, rel=0.1)
        num_bytes = 4 * trained / layout_of(best.strategy, best.mesh).num_updating_ranks
        ring = 2 * (number - 1) / number * num_bytes / hardware.speed.network_bytes_per_second
        assert best.seconds.communication >= ring
        assert best.usd == pytest.approx(best.hours * 8 * number * hardware.price_usd_per_device_hour)
        assert best.tokens_per_second == pytest.approx(4194304 / best.step_seconds)
    assert one.hours > two.hours > four.hours


def test_islands_keep_two_copies_more_and_send_a_part_of_a_round_in_a_step():
    """And within a node gradients, as without `update`, under any strategy."""
    every, rows = 50, []
    for update in ("null", f"{{diloco: {{sync_every: {every}}}}}"):
        settings = (*SMALL, "train.strategy=fsdp", "train.resources.nodes=1..8", f"train.update={update}")
        elastic = pipeline_of("llm", *settings)
        hardware = stage_hardware(elastic, "train")
        rows.append([row.best for row in scale_stage(elastic, "train", hardware, "1..2")])
    (plain, plain_two), (one, two) = rows
    trained = shape_of(training_of(elastic, "train"), {}).parameters.trained.total
    own = 4 * trained / hardware.devices_per_node
    kept = 2 * own + min(own, 25 * 2**20)
    assert one.memory.buffers - plain.memory.buffers == pytest.approx(kept, rel=1e-3)
    assert one.memory.total > plain.memory.total + own
    assert one.seconds == plain.seconds
    ring = Wire(hardware._replace(num_nodes=2)).all_reduce(own, 2, hardware.devices_per_node)
    rarer = plain_two.seconds.communication - two.seconds.communication
    assert rarer == pytest.approx(ring * (1 - 1 / every), rel=0.01)
