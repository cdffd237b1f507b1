"""One rank's /metrics: scraped over HTTP, checked by prometheus_client's parser and by promtool."""

from __future__ import annotations

import builtins
import logging
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlpipe._core.record_lines import parse
from mlpipe.observe.metrics import RankMetrics, start_metrics
from mlpipe.observe.reference import reference_page
from mlpipe.observe.series import INFO_LABELS, METRICS

pytestmark = pytest.mark.unit

START = {
    "kind": "start", "time": 1200.0, "strategy": "fsdp", "world_size": 2, "device": "a GPU",
    "device_type": "cuda", "precision": "bf16",
    "num_flops_per_token": 600.0, "peak_flops": 1e9, "steps": 400, "start_step": 100,
}  # fmt: skip
STEP = {
    "kind": "step", "time": 1234.5, "step": 101, "loss": 3.5, "grad_norm": 0.7, "lr": 1e-3, "tokens": 1000,
    "seconds": 0.25, "data_seconds": 0.01, "compute_seconds": 0.2, "collective_seconds": 0.03,
    "bubble_seconds": 0.02, "mfu_ratio": 0.4, "memory_bytes": 2**30, "achievable_flops": 8e8,
    "slowness_ratio": 1.5,
    "membership_seconds": 0.5, "replicas": 3,
}  # fmt: skip
SAVED = {
    "kind": "checkpoint",
    "time": 2345.5,
    "step": 101,
    "bytes": 4096,
    "stall_seconds": 0.02,
    "save_seconds": 1.5,
}
FAILED = {**SAVED, "error": "no space left on the device"}


@pytest.fixture
def serve():
    started = []

    def start(rank=0, **options):
        metrics = start_metrics(RankMetrics("r-1", "train", rank, **options), 0)
        assert metrics is not None
        started.append(metrics)
        return metrics

    yield start
    for metrics in started:
        metrics.close()


def observe(metrics: RankMetrics, line: dict) -> None:
    record = parse(line)
    assert record is not None
    metrics.observe(record)


def scrape(metrics: RankMetrics) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=300) as answer:
        assert answer.status == 200
        return answer.read().decode()


def samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """name -> {labels: value}, by prometheus_client's own parser."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(text: str, name: str) -> float:
    (only,) = samples(text)[name].values()
    return only


def test_before_the_first_record_counters_are_0_and_timestamps_are_now(serve):
    before = time.time()
    text = scrape(serve())
    for metric in METRICS:
        if metric.type == "counter":
            assert value(text, metric.name) == 0
        elif metric.name.endswith("_timestamp_seconds"):
            assert before - 60 < value(text, metric.name) <= time.time()
        elif metric.type == "gauge":
            assert metric.name not in samples(text), "an unknown gauge must be absent, not 0"


VALIDATED = {"kind": "validation", "time": 1.0, "step": 3, "metrics": {"loss": 2.5}, "seconds": 0.5}


def test_every_metric_of_the_table_is_served_after_one_record_of_each_kind_and_no_other(serve):
    metrics = serve()
    for record in (
        START,
        STEP,
        SAVED,
        FAILED,
        VALIDATED,
        {"kind": "of a later version", "time": 1.0},
    ):
        observe(metrics, record)
    found = samples(scrape(metrics))
    bases = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in found}
    assert bases == {metric.name for metric in METRICS}
    for by_labels in found.values():
        for labels in by_labels:
            assert {("run", "r-1"), ("stage", "train"), ("rank", "0")} <= set(labels)
            assert "job" not in dict(labels)


def test_values(serve):
    metrics = serve(info={"git_sha": "abc"})
    again = {**VALIDATED, "metrics": {"loss": 2.25, "accuracy": 0.5}}
    for record in (START, STEP, STEP, SAVED, {**FAILED, "time": 9999.0}, VALIDATED, again):
        observe(metrics, record)
    text = scrape(metrics)
    by_metric = samples(text)["mlpipe_validation_metric"].items()
    assert {dict(labels)["metric"]: number for labels, number in by_metric} == {"loss": 2.25, "accuracy": 0.5}
    assert value(text, "mlpipe_validation_seconds_total") == 1
    assert value(text, "mlpipe_checkpoint_failures_total") == 1
    assert value(text, "mlpipe_checkpoint_duration_seconds_count") == 1
    assert value(text, "mlpipe_train_steps_total") == 2
    assert value(text, "mlpipe_train_tokens_total") == 2000
    assert value(text, "mlpipe_train_model_flops_total") == 2000 * 600
    assert value(text, "mlpipe_train_collective_wait_seconds_total") == pytest.approx(0.06)
    assert value(text, "mlpipe_train_bubble_seconds_total") == pytest.approx(0.04)
    assert value(text, "mlpipe_train_membership_seconds_total") == 1.0
    assert value(text, "mlpipe_train_replicas") == 3
    assert value(text, "mlpipe_train_mfu_ratio") == 0.4
    assert value(text, "mlpipe_train_last_step_timestamp_seconds") == 1234.5
    assert value(text, "mlpipe_checkpoint_last_success_timestamp_seconds") == 2345.5
    assert value(text, "mlpipe_train_step_duration_seconds_count") == 2
    assert value(text, "mlpipe_train_step_duration_seconds_sum") == pytest.approx(0.5)
    buckets = {
        dict(k)["le"]: v for k, v in samples(text)["mlpipe_train_step_duration_seconds_bucket"].items()
    }
    assert buckets["0.1"] == 0
    assert buckets["0.25"] == 2, "le is inclusive"
    assert buckets["+Inf"] == 2
    ((info, one),) = samples(text)["mlpipe_run_info"].items()
    assert one == 1
    assert {name: dict(info).get(name) for name in INFO_LABELS} == {
        "strategy": "fsdp", "world_size": "2", "pipeline_stage": "0", "device": "a GPU", "precision": "bf16",
        "git_sha": "abc", "jenkins_build": "",
    }  # fmt: skip


def test_ranks_say_which_stage_of_a_pipeline_is_theirs(serve):
    metrics = serve(rank=2)
    observe(metrics, {**START, "world_size": 4, "mesh": {"pp": 2, "dp_replicate": 2}})
    ((info, _),) = samples(scrape(metrics))["mlpipe_run_info"].items()
    assert dict(info)["pipeline_stage"] == "1"


def test_a_peak_that_is_measured_later_is_served_on_every_rank(serve):
    metrics = serve(rank=1)
    observe(metrics, {**START, "peak_flops": None})
    assert "mlpipe_train_peak_flops" not in samples(scrape(metrics))
    observe(metrics, {**STEP, "peak_flops": 7e10})
    assert value(scrape(metrics), "mlpipe_train_peak_flops") == 7e10


def test_run_level_series_are_served_by_rank_0_only(serve):
    metrics = serve(rank=3)
    for record in (START, STEP, SAVED):
        observe(metrics, record)
    found = samples(scrape(metrics))
    assert found.keys().isdisjoint(metric.name for metric in METRICS if metric.ranks == "0")
    assert "mlpipe_checkpoint_duration_seconds_count" not in found
    assert found["mlpipe_train_tokens_total"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_number_of_series_is_the_one_that_is_stated(serve, rank):
    metrics = serve(rank=rank)
    for record in (START, STEP, SAVED, VALIDATED, STEP, SAVED):
        observe(metrics, record)
    stated = sum(metric.num_series for metric in METRICS if rank == 0 or metric.ranks == "every")
    assert sum(map(len, samples(scrape(metrics)).values())) == stated


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fields", "rows", "totals"),
    [
        (  # in fp16
            {"loss_scale": "mlpipe_train_loss_scale", "skipped": "mlpipe_train_skipped_steps_total"},
            [(4.0, False), (4.0, True), (2.0, True), (1.0, False)],
            [1.0, 2.0],
        ),
        (  # what is sent in place of gradients; islands do not agree in each step
            {
                "exchanged_bytes": "mlpipe_train_exchanged_bytes_total",
                "exchanged_plain_bytes": "mlpipe_train_exchanged_plain_bytes_total",
            },
            [(0, 400), (100, 400), (200, 400)],
            [300.0, 1200.0],
        ),
    ],
)
def test_what_some_trainings_have_is_there_in_them_alone(serve, rank, fields, rows, totals):
    metrics = serve(rank=rank)
    observe(metrics, START)
    observe(metrics, STEP)
    assert samples(scrape(metrics)).keys().isdisjoint(fields.values())
    for row in rows:
        observe(metrics, {**STEP, **dict(zip(fields, row, strict=True))})
    found = samples(scrape(metrics))
    told = [value for name in fields.values() for value in found.get(name, {}).values()]
    assert told == (totals if rank == 0 else [])


@pytest.mark.parametrize(("rank", "served"), [(0, {"0": 3.0, "1": 1.5}), (1, {})])
def test_the_load_of_experts_is_one_series_a_layer_and_a_bound(serve, rank, served):
    metrics = serve(rank=rank)
    loads = {
        "expert_max_load_ratio": {"0": 2.0, "1": 1.5},
        "expert_max_average_load_ratio": {"0": 1.2, "1": 1.1},
        "experts_by_load_ratio": {"1.0": 5, "inf": 3},
        "expert_dropped_ratio": 0.25,
    }
    for record in (START, {**STEP, **loads}, {**STEP, **loads, "expert_max_load_ratio": {"0": 3.0}}):
        observe(metrics, record)
    found = samples(scrape(metrics))
    fullest = found.get("mlpipe_train_expert_max_load_ratio", {})
    assert {dict(labels)["layer"]: value for labels, value in fullest.items()} == served
    averages = found.get("mlpipe_train_expert_max_average_load_ratio", {})
    assert sorted(averages.values()) == ([1.1, 1.2] if served else [])
    dropped = found.get("mlpipe_train_expert_dropped_ratio", {})
    assert list(dropped.values()) == ([0.25] if served else [])
    counts = found.get("mlpipe_train_experts_by_load_ratio", {})
    assert {dict(labels)["at_most"]: value for labels, value in counts.items()} == (
        {"1.0": 5, "inf": 3} if served else {}
    )


def test_it_can_only_be_read(serve):
    metrics = serve()
    request = urllib.request.Request(f"http://127.0.0.1:{metrics.port}/metrics", data=b"x 1", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=300)
    assert refused.value.code == 501


def test_dead_scrapers_hold_up_nobody_and_are_hung_up_on(monkeypatch, serve):
    def dead_ones(metrics):
        some = [socket.create_connection(("127.0.0.1", metrics.port), timeout=300) for _ in range(5)]
        some[0].sendall(b"GET /metrics HTTP/1.1\r\n")  # and nothing more
        return some

    metrics = serve()
    dead = dead_ones(metrics)
    observe(metrics, START)
    observe(metrics, STEP)
    assert value(scrape(metrics), "mlpipe_train_steps_total") == 1
    monkeypatch.setattr("mlpipe.observe.serve._SCRAPER_SECONDS", 0.1)
    soon = dead_ones(serve())
    for one in soon:
        assert one.recv(1) == b"", "closed by the server"
    for one in [*dead, *soon]:
        one.close()


def test_a_loss_that_is_not_finite_shows_as_nan_and_memory_of_a_cpu_is_not_called_gpu_memory(serve):
    metrics = serve()
    observe(metrics, {**START, "device": "cpu", "device_type": "cpu"})
    observe(metrics, {**STEP, "loss": None})
    text = scrape(metrics)
    assert math.isnan(value(text, "mlpipe_train_loss"))
    assert "mlpipe_train_gpu_memory_bytes" not in samples(text)


def test_a_real_scrape_is_well_formed(serve):
    metrics = serve()
    for record in (START, STEP, SAVED):
        observe(metrics, record)
    text = scrape(metrics)
    assert samples(text)
    promtool = shutil.which("promtool")
    if promtool is None:  # the parser above has read it; promtool also knows the naming rules
        warnings.warn(
            "promtool is not installed (apt-get install prometheus): not checked by it", stacklevel=1
        )
        return
    command = [promtool, "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_without_prometheus_client_it_says_so_and_goes_on(monkeypatch, caplog):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with caplog.at_level(logging.WARNING):
        assert start_metrics(RankMetrics("r", "s", 0), 0) is None
    assert caplog.messages == ["/metrics is off: install prometheus-client"]


def test_a_taken_port_is_a_line_and_no_error(caplog):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert start_metrics(RankMetrics("r", "s", 0), port) is None
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.text


def test_after_close_the_port_is_free(serve):
    metrics = serve()
    metrics.close()
    metrics.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", metrics.port))


def test_the_reference_page_is_fresh():
    page = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
    assert page.read_text() == reference_page(), (
        "run: python -m mlpipe.observe.reference > docs/reference/metrics.md"
    )


def test_names_follow_the_rules():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("mlpipe_")
        assert (metric.type == "counter") == metric.name.endswith("_total")
        assert (metric.type == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert metric.help.endswith(".")


def test_the_gpu_of_a_rank_is_absent_and_not_0_where_there_is_none(serve):
    """Whether nvidia-ml-py is installed or not: this UUID is nobody's."""
    text = scrape(serve(gpu_uuid="GPU-00000000-0000-0000-0000-000000000000"))
    assert not [name for name in samples(text) if name.startswith("mlpipe_gpu_")]


def test_hardware_flops_are_counted_beside_the_models(serve):
    metrics = serve()
    observe(metrics, {**START, "num_hardware_flops_per_token": 800.0})
    observe(metrics, STEP)
    text = scrape(metrics)
    assert value(text, "mlpipe_train_model_flops_total") == 600_000
    assert value(text, "mlpipe_train_hardware_flops_total") == 800_000
    assert value(text, "mlpipe_train_achievable_flops") == 8e8


def test_a_training_that_validates_says_so_until_it_is_done_and_its_end_counts_as_a_steps(serve):
    metrics = serve()
    later = time.time() + 100
    for record, expected in ((START, 0), (STEP, 0), (None, 1), ({**VALIDATED, "time": later}, 0)):
        metrics.validating() if record is None else observe(metrics, record)
        assert value(scrape(metrics), "mlpipe_train_validating") == expected
    assert value(scrape(metrics), "mlpipe_train_last_step_timestamp_seconds") == later
