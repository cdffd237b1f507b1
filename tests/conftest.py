"""Every test belongs to one ring. A ring that MLPIPE_REQUIRE_RINGS names must run: a skip there fails."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail: no property here is about time. A fixture that all examples share is
# meant: said once, since a test's own list would stand in the place of this one.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("patient")

_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 4 * 2**30


def _work_in_memory() -> None:
    """Stores write through to the disk (fsync): half of the suite would wait for that. What a cluster's nodes
    unpack is too large for this: `tests/cluster/conftest.py`."""
    if "TMPDIR" in os.environ or not _MEMORY.is_dir() or not os.access(_MEMORY, os.W_OK):
        return
    runs_programs = not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
    if runs_programs and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES:
        os.environ["TMPDIR"] = str(_MEMORY)
        tempfile.tempdir = None


_work_in_memory()

# Threads that wait for each other spin: where others have the cores, that takes ten to twenty times the CPU
# time of the work itself. Read by what torch and NumPy bring as it is loaded, also in what is started here.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Behind a shell's `&` Ctrl-C is ignored, here and in all that is started from here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest begin first, so that no process is left alone with one at the end. Those of
# services wait most of their time: they lie among those of torch, which compute meanwhile.
_FIRST = ("torch", "services")
_LONGEST = ("test_faults.py", "test_cli_train.py")
_LONGEST += ("test_slurm.py", "test_submit_faults.py", "test_submit_elastic.py", "test_submit_kueue.py")
_LONGEST += ("test_submit.py", "test_jenkins_builds.py", "test_submit_trainjob.py", "test_submit_gangs.py")
_LONGEST += (
    "test_submit_lost.py",
    "test_observe.py",
    "test_submit_multikueue.py",
    "test_submit_placement.py",
)
_LONGEST += ("test_kit_addons.py", "test_image.py", "test_submit_sweep.py", "test_submit_pending.py")
RINGS = ("unit", "golden", "torch", "services", "cluster", "gpu")
REQUIRED = frozenset(filter(None, os.environ.get("MLPIPE_REQUIRE_RINGS", "").split(",")))


def pytest_configure() -> None:
    if odd := REQUIRED - set(RINGS):
        raise pytest.UsageError(f"MLPIPE_REQUIRE_RINGS names {', '.join(sorted(odd))}; there are {RINGS}")


@pytest.fixture(autouse=True)
def _remembers_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of the stores, runs and machine of other tests, or of whoever runs them."""
    folder = tmp_path_factory.getbasetemp() / "state" / os.urandom(6).hex()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.setenv("MLPIPE_CALIBRATE", "off")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: nobody need look through it, again and again, for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files_of: dict[str, dict[Path, None]] = {ring: {} for ring in RINGS}
    for item in items:
        rings = _rings(item)
        if len(rings) != 1:
            raise pytest.UsageError(f"{item.nodeid} needs the marker of one ring: {', '.join(RINGS)}")
        files_of[rings[0]][item.path] = None
    places: dict[Path, float] = {}  # from 0 to 1, of the files that begin first
    for ring in _FIRST:
        files = files_of[ring]
        places |= {path: index / len(files) for index, path in enumerate(files)}
    longest = {name: index for index, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: (longest.get(item.path.name, len(longest)), places.get(item.path, 1.0)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    ring = ", ".join(_rings(item))
    if ring in REQUIRED:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"the ring {ring} must run here (MLPIPE_REQUIRE_RINGS): {reason}"
    return report


def _rings(item: pytest.Item) -> list[str]:
    marks = {mark.name for mark in item.iter_markers()}
    return [ring for ring in RINGS if ring in marks]
