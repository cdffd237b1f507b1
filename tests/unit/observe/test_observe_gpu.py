"""What a rank tells of its GPU, over a made-up card with the names of nvidia-ml-py; no GPU was met."""

from __future__ import annotations

import sys
import urllib.request

import pytest
from kit.nvml import UUID, FakeNvml
from prometheus_client.parser import text_string_to_metric_families

from mlpipe.observe import gpu
from mlpipe.observe.metrics import RankMetrics, start_metrics
from mlpipe.observe.series import GPU_METRICS

pytestmark = pytest.mark.unit
READ = {
    "mlpipe_gpu_utilization_ratio": 0.87,
    "mlpipe_gpu_memory_used_bytes": float(60 << 30),
    "mlpipe_gpu_power_watts": 651.25,
    "mlpipe_gpu_temperature_celsius": 71.0,
    "mlpipe_gpu_ecc_errors": 2.0,
}
HELD_DOWN = {"power_cap": 1.0, "thermal": 0.0, "hw_thermal": 1.0, "hw_power_brake": 0.0, "hw_slowdown": 0.0}


def use(monkeypatch, fake: FakeNvml | None) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # None: as if it were not installed


def read(one: gpu.NvmlGpu) -> dict[str, float]:
    return {" ".join((name, *labels)): value for name, labels, value in one.read()}


def test_a_rank_serves_what_its_card_says(monkeypatch):
    use(monkeypatch, FakeNvml(xids=[79, 94]))
    metrics = start_metrics(RankMetrics("r", "train", 0, gpu_uuid=UUID.removeprefix("GPU-")), 0)
    assert metrics is not None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=300) as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("mlpipe_gpu_")
    }
    assert set(found) == {metric.name for metric in GPU_METRICS}
    for name, value in READ.items():
        assert found[name].value == pytest.approx(value)
    assert (found["mlpipe_gpu_xid_errors_total"].value, found["mlpipe_gpu_last_xid"].value) == (2, 94)


def test_a_card_that_fell_off_the_bus_is_absent_and_its_last_error_is_kept(monkeypatch):
    monkeypatch.setattr(gpu, "_AGE_SECONDS", -1.0)
    fake = FakeNvml(xids=[79])
    use(monkeypatch, fake)
    metrics = RankMetrics("r", "train", 0, gpu_uuid=UUID)

    def served() -> set[str]:
        return {s.name for family in metrics.collect() for s in family.samples if "_gpu_" in s.name}

    assert set(READ) < served()
    fake.fall_off_the_bus()
    assert served() == {"mlpipe_gpu_last_xid", "mlpipe_gpu_xid_errors_total"}


def test_reasons_errors_and_age(monkeypatch):
    fake = FakeNvml()
    use(monkeypatch, fake)
    one = gpu.NvmlGpu(UUID)
    first = read(one)
    assert first == {
        **READ,
        **{f"mlpipe_gpu_throttled {reason}": value for reason, value in HELD_DOWN.items()},
        "mlpipe_gpu_xid_errors_total": 0.0,
    }
    asked = len(fake.calls)
    assert read(one) == first
    assert len(fake.calls) == asked, "scrapers share a reading"
    monkeypatch.setattr(gpu, "_AGE_SECONDS", -1.0)
    fake.xids = [48] * (gpu._MOST_EVENTS + 20)
    assert read(one)["mlpipe_gpu_xid_errors_total"] == gpu._MOST_EVENTS
    assert read(one)["mlpipe_gpu_xid_errors_total"] == gpu._MOST_EVENTS + 20


@pytest.mark.parametrize("refused", [name for name in vars(FakeNvml()) if name.startswith("nvml")])
def test_what_is_not_supported_is_absent_and_the_rest_is_there(monkeypatch, refused):
    use(monkeypatch, FakeNvml(refuses=[refused]))
    one = gpu.find_gpu(UUID)
    if refused in ("nvmlInit", "nvmlDeviceGetHandleByUUID"):
        assert one is None
        return
    assert one is not None
    missing = (len(READ) + len(HELD_DOWN) + 1) - len(read(one))
    none_lost = (
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureV",
        "nvmlEventSetWait_v2",
    )  # two ways; no event
    all_reasons = "nvmlDeviceGetCurrentClocksEventReasons"
    assert missing == (0 if refused in none_lost else len(HELD_DOWN) if refused == all_reasons else 1)


def test_an_older_package_has_other_names(monkeypatch):
    use(monkeypatch, FakeNvml().older())
    found = read(gpu.NvmlGpu(UUID))
    assert found["mlpipe_gpu_temperature_celsius"] == 70
    assert found["mlpipe_gpu_throttled hw_thermal"] == 1
    fake = FakeNvml(refuses=["nvmlDeviceGetCurrentClocksEventReasons"])  # a newer package, an older driver
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x40
    use(monkeypatch, fake)
    assert read(gpu.NvmlGpu(UUID))["mlpipe_gpu_throttled hw_thermal"] == 1
    for gone in (
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlEventSetCreate",
    ):
        fake = FakeNvml().older()
        delattr(fake, gone)
        use(monkeypatch, fake)
        left = read(gpu.NvmlGpu(UUID))
        assert left.items() < found.items()


def test_without_the_package_or_such_a_card_there_is_nothing(monkeypatch):
    use(monkeypatch, None)
    assert gpu.find_gpu(UUID) is None
    use(monkeypatch, FakeNvml())
    assert gpu.find_gpu(None) is None
    assert gpu.find_gpu("GPU-another") is None
