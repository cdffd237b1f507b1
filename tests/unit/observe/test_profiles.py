"""Traces by hand to profiles, and profiles to words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe.observe.profiles.findings import findings, kinds_of_layers
from mlpipe.observe.profiles.measure import RankProfile, class_of, measure
from mlpipe.observe.profiles.text import profile_text
from mlpipe.observe.profiles.trace import Trace, both, length, minus, union

pytestmark = pytest.mark.unit
MS = 1000.0  # microseconds


def span(
    name: str, start: float, end: float, cat: str = "cpu_op", tid: Any = 1, **args: Any
) -> dict[str, Any]:
    """Milliseconds."""
    return {
        "ph": "X", "name": name, "cat": cat, "pid": 7, "tid": tid, "ts": start * MS,
        "dur": (end - start) * MS, "args": args,
    }  # fmt: skip


def note(name: str, start: float, end: float) -> dict[str, Any]:
    return span(name, start, end, "user_annotation")


def profile(*events: dict[str, Any], **facts: Any) -> RankProfile:
    """Of a step of 100 ms."""
    document = {"traceEvents": [note("ProfilerStep#7", 0, 100), *events], "mlpipe": facts}
    return measure(Trace(document))


def on_cpu(**facts: Any) -> RankProfile:
    """A forward pass of two layers in 40 ms, a backward pass in 30, 10 ms of waiting for the samples, and 15
    for an all-reduce, 5 of which while the backward pass still computes."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    return profile(
        note("part: data", 0, 10),
        note("part: forward and backward", 10, 85),
        note("layer: layers.0", 10, 30),
        span("aten::mm", 12, 30, **{"Sequence number": 1}),
        note("layer: layers.1", 30, 50),
        span("aten::linear", 32, 50, **{"Sequence number": 2}),
        span("aten::mm", 34, 50, **{"Sequence number": 2}),
        span(node, 50, 65, **{"Sequence number": 2, "Fwd thread id": 1}),
        span("aten::mm", 51, 65),
        span(node, 65, 80, **{"Sequence number": 1, "Fwd thread id": 1}),
        span("aten::mm", 66, 80),
        note("gloo:all_reduce", 75, 90) | {"tid": 9},
        **{"rank": 0, "device": "cpu", "first_step": 7, **facts},
    )


def test_a_step_is_divided_into_computing_and_causes_of_idleness():
    found = on_cpu()
    assert found.seconds == pytest.approx(0.1)
    assert found.busy == pytest.approx(0.066)  # 18 + 18 + 30 ms of operators
    assert found.idle == pytest.approx(
        {"data": 0.01, "collectives": 0.01, "stages": 0, "synchronisation": 0, "host": 0.014}
    )
    assert found.communication == pytest.approx(0.015)
    assert found.hidden_communication == pytest.approx(0.005)
    assert found.parts == pytest.approx({"data": 0.01, "forward and backward": 0.075, "other": 0.015})


def test_a_backward_pass_is_of_the_layer_that_made_its_node():
    layers = on_cpu().layers
    for name in ("layers.0", "layers.1"):
        assert layers[name].forward == pytest.approx(0.02)
        assert layers[name].backward == pytest.approx(0.015)
    both_layers = kinds_of_layers(on_cpu())
    assert list(both_layers) == ["layers.*"]
    assert both_layers["layers.*"].seconds == pytest.approx(0.07)
    assert both_layers["layers.*"].operators == 4  # aten::linear starts another


def test_operators_are_summed_without_those_in_them():
    by_name = {one.name: one for one in on_cpu().operators}
    assert by_name["aten::mm"].count == 4
    assert by_name["aten::mm"].seconds == pytest.approx(0.062)
    assert by_name["aten::linear"].seconds == pytest.approx(0.002)


def on_gpu() -> RankProfile:
    """Kernels run behind the host, NCCL beside them; the host waits 20 ms for a number in a layer."""
    launched = [
        note("part: forward and backward", 0, 90),
        note("layer: head", 0, 40),
        span("aten::item", 10, 40),
        span("cudaLaunchKernel", 1, 2, "cuda_runtime", correlation=1),
        span("cudaStreamSynchronize", 12, 40, "cuda_runtime", correlation=2),
        span("sm90_xmma_gemm_bf16", 2, 20, "kernel", "stream 7", correlation=1),
        span("ncclDevKernel_AllReduce", 15, 60, "kernel", "stream 9", correlation=3),
        span("vectorized_elementwise_kernel", 60, 60.01, "kernel", "stream 7", correlation=4),
    ]
    return profile(*launched, rank=3, device="cuda")


def test_on_a_gpu_idle_is_when_no_kernel_computes():
    found = on_gpu()
    assert found.busy == pytest.approx(0.01801)
    assert found.idle["collectives"] == pytest.approx(0.04)
    assert found.communication == pytest.approx(0.045)
    assert found.hidden_communication == pytest.approx(0.005)
    assert found.layers["head"].forward == pytest.approx(0.018)
    assert found.tiny_count == 1
    named = {one.cause: one.what for one in findings([found])}
    assert named["synchronisation"].startswith("head reads numbers out of tensors")


def test_a_kernel_of_an_optimizer_is_no_matmul():
    """However its name is spelled: AdamMath has an "mm"."""
    kernel = "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>"
    assert class_of(f"void at::native::{kernel}") == "optimizer"


def test_an_operator_that_waits_for_others_within_computes_only_what_operators_in_it_do():
    found = profile(
        span("mlpipe::gather_and_multiply", 0, 80),
        span("c10d::_allgather_base_", 5, 6),
        note("gloo:all_gather", 5, 50) | {"tid": 9},
        span("aten::mm", 50, 80),
    )
    assert found.busy == pytest.approx(0.03)
    assert found.idle["collectives"] == pytest.approx(0.045)


def test_a_pipeline_waits_for_stages_and_no_rank_of_it_is_slow_for_that():
    waits = [span("aten::mm", 0, 40), note("gloo:recv", 30, 100) | {"tid": 9}]
    first, second = (profile(*waits, device="cpu", rank=rank) for rank in range(2))
    assert first.idle["stages"] == pytest.approx(0.06)
    assert [one.cause for one in findings([first, second])] == ["stages"]


def test_a_straggler_is_named_with_the_layer_in_which_it_is_slow():
    """A layer that waits between its operators is the layer's affair, not Python's."""

    def rank(number: int, end: float) -> RankProfile:
        events = [note("layer: layers.3", 0, end), span("aten::mm", 0, 10)]
        wire = note("gloo:all_reduce", end, 100) | {"tid": 9}
        return profile(*events, wire, rank=number, device="cpu", host="node-7")

    named = {one.cause: one for one in findings([rank(0, 40), rank(1, 40), rank(2, 90)])}
    assert named["straggler"].what.startswith("rank 2 on node-7 takes 50.0 ms")
    assert "in layers.3" in named["straggler"].what
    assert named["straggler"].gain == pytest.approx(0.5)
    assert "straggler" not in {one.cause for one in findings([rank(0, 90), rank(1, 90)])}


def test_threads_that_cross_nodes_or_outnumber_the_cpus_are_named():
    nodes = {"0": [0, 1], "1": [2, 3]}
    home: dict[str, Any] = {
        "allowed_cpus": [0, 1, 2, 3],
        "num_threads": 2,
        "local_world_size": 2,
        "nodes": nodes,
    }
    assert "threads" not in {one.cause for one in findings([on_cpu(used_cpus=[0, 1], **home)])}
    (across,) = [one for one in findings([on_cpu(used_cpus=[1, 2], **home)]) if one.cause == "threads"]
    assert "NUMA nodes 0, 1" in across.what
    (many,) = [one for one in findings([on_cpu(**home | {"num_threads": 3})]) if one.cause == "threads"]
    assert "6 threads compute on 4 CPUs" in many.what


def test_a_machine_that_others_use_is_named():
    assert "machine" not in {one.cause for one in findings([on_cpu(cpu_seconds=0.06)])}
    assert "machine" in {one.cause for one in findings([on_cpu(cpu_seconds=0.04)])}


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(ValueError, match="no step"):
        measure(Trace({"traceEvents": []}))


def test_words_have_all_figures():
    text = profile_text([on_cpu(), on_gpu()])
    for words in ("What to change", "idle: data", "layers.*", "Costliest operators", "steps 7 to 7, 2 ranks"):
        assert words in text


SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple))


@given(SPANS, SPANS)
def test_spans_are_sets(first, second):
    def points(spans):
        return {at for low, high in spans for at in range(low, high)}

    ours, others = union(first), union(second)
    assert points(ours) == points(first)
    assert points(minus(ours, others)) == points(first) - points(second)
    assert points(both(ours, others)) == points(first) & points(second)
    assert length(ours) * 1e6 == pytest.approx(len(points(first)))
