"""The benchmarks run and write what the documentation promises. No figure of a quick run means anything."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kit.plans import write_tokens
from kit.warm import Popen

from benchmarks import (
    bubble,
    checkpoint,
    elastic,
    goodput,
    launch,
    links,
    newcomer,
    overhead,
    ranks,
    stragglers,
    tuning,
    uneven,
)
from mlpipe._core.pipelines import SCHEDULES
from mlpipe.api.tuning.decide import Change, sets_of

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the benchmarks start begins as a fork of a process that has imported torch; tokens are at hand."""

    def tokens(folder: Path, *, vocab_size: int) -> Path:
        return write_tokens(folder / "corpus", vocab_size=vocab_size)

    def launched(argv: list[str], timeout: float, env: dict[str, str], **options: Any) -> Any:
        env = env | {"OMP_NUM_THREADS": "1"}
        with Popen("ranks", argv, env=env, **options) as launcher:
            return subprocess.CompletedProcess(argv, launcher.wait(timeout))

    def linked(argv: list[str], **options: Any) -> Popen:
        name, python, *rest = argv[argv.index("exec") + 1 :]
        return Popen("ranks", [python, "-m", "kit.in_netns", name, *rest[1:]], cwd=ROOT, **options)

    monkeypatch.setattr(launch, "corpus", tokens)
    streams = {"DEVNULL": subprocess.DEVNULL, "PIPE": subprocess.PIPE}
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(run=launched, **streams))
    monkeypatch.setattr(links, "subprocess", SimpleNamespace(run=subprocess.run, Popen=linked, **streams))
    ranked = SimpleNamespace(Popen=lambda argv, env: Popen("ranks", argv, env=env, cwd=ROOT))
    monkeypatch.setattr(ranks, "subprocess", ranked)

    def said(argv: list[str], *, check: bool, timeout: float, env: Any = os.environ, **options: Any) -> None:
        """`mlpipe ...`, and all that it starts."""
        argv = [sys.executable, "-m", "mlpipe.cli", *argv[1:]]
        with Popen("cli", argv, env={**env, "KIT_WARM": "1"}, **options) as command:
            assert command.wait(timeout) == 0

    for module in (newcomer, stragglers):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=said, **streams))


def quick(module: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Any:
    """What its quick run writes."""
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr(sys, "argv", [name, "--quick", *more, "--results", str(folder)])
    assert module.main() == 0
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def check_results(body: Any) -> None:
    assert body["commit"]
    assert {"mlpipe", "torch"} <= body["versions"].keys()
    for row in body["figures"]:
        if row["ratio_interval"]:
            low, high = row["ratio_interval"]
            assert low <= row["ratio"] <= high
        assert row["met"] is None or isinstance(row["met"], bool)


@pytest.mark.parametrize("name", ["startup", "data"])
def test_a_command_writes_its_results(name: str, tmp_path: Path):
    """Both measure processes of their own; those of `data`, and itself, are forks that have torch."""
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--results", str(tmp_path)]
    kind, env = "cli", dict(os.environ)
    if name == "data":
        kind, env = "torchrun", env | {"KIT_WARM": "1", "OMP_NUM_THREADS": "1"}
    output = tmp_path / "output"
    with output.open("w") as log:
        command = Popen(kind, argv, cwd=ROOT, env=env, stdout=log, stderr=log)
    try:
        assert command.wait(800) == 0, output.read_text()[-3000:]
    finally:
        command.kill()
    body = json.loads((tmp_path / f"{name}.json").read_text())
    check_results(body)
    assert any(row["work"] and row["figure"].startswith("control") for row in body["figures"])


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("module", [overhead, checkpoint, links], ids=lambda module: module.__name__)
def test_a_quick_run_writes_its_results(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if module is checkpoint and version("torch").startswith("2.11."):
        pytest.skip(
            "the peer itself fails: async_save of torch 2.11 cannot stage an optimizer's state (KeyError)"
        )
    if module is links and (os.geteuid() or shutil.which("tc") is None):
        pytest.skip("network namespaces need root, ip and tc (iproute2)")
    before = signal.getsignal(signal.SIGTERM)
    try:
        body = quick(module, tmp_path, monkeypatch)
    finally:
        signal.signal(signal.SIGTERM, before)  # `links` sets its own
    check_results(body)
    assert module is links or any(
        row["work"] and row["figure"].startswith("control") for row in body["figures"]
    )


def test_a_replica_is_killed_beside_a_worker_of_a_gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the figures count is counted, and is as promised: nobody else restarts, no step is lost. Of two
    workers, each of which costs a second to start."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(elastic, "WORKERS", 2)
    body = quick(elastic, tmp_path, monkeypatch, "--step-seconds", "0.1", "--every", "2", "--ranks", "1")
    rows = {row["figure"]: row for row in body["figures"]}
    for what in (
        "restarts of workers that were not killed",
        "steps that nobody recorded",
        "steps done again",
    ):
        assert rows[what]["ours"] == 0, what
    assert rows["kill to next step, elastic"]["goal"] == 1.0
    assert rows["kill to next step, gang restart"]["ours"] > 0


def test_goodput_is_what_failures_leave_of_the_time():
    """Of a training of a step a second: five seconds of standing still, three steps done again."""
    struck = [(35.5, goodput.Failure(15.5, "link", 1, 15.0)), (60.5, goodput.Failure(40.5, "agent", 0))]
    steps = [*range(1, 36), *range(36, 56), *range(53, 88)]
    times = [*range(1, 36), *range(41, 61), *range(61, 96)]
    done = {0: [goodput.Done(float(at), step) for at, step in zip(times, steps, strict=True)]}
    done[1] = [one for one in done[0] if one.time < 50]
    found = goodput.judge(done, struck, 20.0, 95.0, 10)
    assert found.goodput == pytest.approx((75 - 5 - 3) / 75)
    assert found.step_seconds == 1.0
    assert found.pauses == {"link": [6.0], "agent": [1.0]}
    assert found.counts == {"steps that nobody recorded": 0, "steps done again": 3}
    assert (found.steps, found.small_steps) == (67, 0)


def test_goodput_counts_the_samples_of_steps_that_a_replica_was_missing_in():
    """torchft's: a step of a third fewer samples takes as long as any other."""
    done = [goodput.Done(float(at), at, 8 if 50 < at <= 65 else goodput.BATCH) for at in range(1, 101)]
    struck = [(50.5, goodput.Failure(10.5, "agent", 1))]
    found = goodput.judge({0: done, 1: done[:50]}, struck, 40.0, 100.0, 10)
    assert found.goodput == pytest.approx((60 - 15 / 3) / 60)
    assert (found.steps, found.small_steps) == (60, 15)


def test_failures_are_drawn_of_all_kinds_and_one_at_a_time():
    lasts = {"store": 20.0, "link": 15.0}
    found = goodput.failures(30.0, 120.0, 0, lasts)
    assert found == goodput.failures(30.0, 120.0, 0, lasts)
    assert found != goodput.failures(30.0, 120.0, 1, lasts)
    kinds = [one.kind for one in found]
    assert [kinds.count(kind) for kind in goodput.KINDS] == [3] * len(goodput.KINDS)
    ends = [one.at + one.seconds for one in found]
    assert all(end <= after.at for end, after in zip(ends, found[1:], strict=False))


@pytest.mark.usefixtures("warm")
def test_gains_of_ranks_that_wait_less_are_written_with_what_was_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uneven, "SETTINGS", ())
    rows = quick(uneven, tmp_path, monkeypatch)["figures"]
    assert [row["side"] for row in rows] == ["control", "on_demand", "resident", "on_demand", "resident"]
    assert [round(row["by_the_works_alone"], 2) for row in rows[3:]] == [1.78, 1.49]
    for row in rows[3:]:  # what the meetings take is in it
        gain = next(one["ratio"] for one in rows[1:3] if one["side"] == row["side"])
        assert row["ours"] == pytest.approx(abs(gain / row["expected"] - 1))
        assert row["expected"] != row["by_the_works_alone"]


@pytest.mark.usefixtures("warm")
def test_what_moved_load_saves_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One real training stands for all sides."""
    found = stragglers.trained([0.001, 0.002], "move_load", 3)
    assert 0 < found["speed"] < 1
    monkeypatch.setattr(stragglers, "trained", lambda *side: found)
    rows = quick(stragglers, tmp_path, monkeypatch)["figures"]
    assert [(row["side"], row["ratio"], row["goal"]) for row in rows] == [
        ("control", 1.0, None),
        ("left", 1.0, None),
        ("moved", 1.0, stragglers.OF_THE_IDEAL),
    ]


@pytest.mark.usefixtures("warm")
def test_the_idle_shares_of_pipelines_are_written_with_theory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of two stages."""
    monkeypatch.setattr(bubble, "NUM_RANKS", (2,))
    rows = quick(bubble, tmp_path, monkeypatch)["figures"]
    shares = [row for row in rows if row["peer"] == "theory"]
    assert len(shares) == 2 * len(bubble.works(2))
    assert {row["work"].split(",")[0] for row in shares} == set(SCHEDULES)
    assert all(0 < row["ours"] < 1 and row["goal"] > 0 for row in shares)
    others = [row["work"] for row in rows if row["peer"] == "1f1b"]
    assert others
    assert all(work.startswith("zero_bubble over 1f1b, 2 stages") for work in others)


def test_what_tuning_finds_is_written_beside_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Trials are figures: one change of three is worth something, and a grid of six has the same best."""
    changes = [Change("strategy", ("s=1",)), Change("strategy", ("s=2",)), Change("allocator", ("a=1",))]
    worth = {"s=1": 0.8, "s=2": 1.1, "a=1": 1.2}
    monkeypatch.setattr(tuning, "KNOBS", ("strategy", "allocator"))
    monkeypatch.setattr(tuning, "changes_of", lambda trials: changes)
    monkeypatch.setattr(tuning.Trials, "prepare", lambda *_: None)
    monkeypatch.setattr(
        tuning.Trials, "seconds", lambda _, config: prod(worth.get(one, 1.0) for one in sets_of(config))
    )
    monkeypatch.setattr(sys, "argv", ["tuning", "--rounds", "1", "--results", str(tmp_path)])
    assert tuning.main() == 0
    body = json.loads((tmp_path / "tuning.json").read_text())
    best, time, nothing, _ = body["figures"]
    assert body["settings"]["sets"]["mlpipe tune"] == ["s=1"]
    assert (best["peer"], best["ratio"], best["met"]) == ("grid's 1.", 1.0, True)
    assert "the grid's 6" in time["figure"]
    assert (nothing["ours"], nothing["met"]) == (1.0, True)


@pytest.mark.usefixtures("warm")
def test_a_newcomers_start_is_a_run_on_a_machine_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a corpus and a model that are smaller; then one start stands for all."""
    text = newcomer.QUICKSTART.read_text().replace("8 MiB", "256 KiB").replace("llama-4m", "llama-1m")
    smaller = tmp_path / "smaller.yaml"
    smaller.write_text(text)
    monkeypatch.setattr(newcomer, "QUICKSTART", smaller)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    found = newcomer.started(6, {"MLPIPE_CALIBRATE": "off"})
    assert found["first"] > found["measured"] > 0
    assert found["error"] == pytest.approx(abs(found["predicted"] / found["measured"] - 1))
    assert not (tmp_path / "state").exists()
    monkeypatch.setattr(newcomer, "started", lambda *_: found)
    rows = quick(newcomer, tmp_path / "results", monkeypatch)["figures"]
    assert rows[0]["ours"] == found["error"]
    assert [row["goal"] for row in rows] == [1.0, None, 1.0, None]
