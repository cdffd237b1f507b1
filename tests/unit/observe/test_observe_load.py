"""Whoever else uses the machine is seen: in records, in reports, and by `calibrate`, which writes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from kit.command_runs import Cli
from kit.synthetic_run import Life, stage_state, write_run, write_train_stage

from mlpipe._core.cpu_load import Clock, Load
from mlpipe._core.record_lines import NOT_STARTED, parse
from mlpipe.observe.progress import live_line, summarize
from mlpipe.observe.records import read_records
from mlpipe.observe.report import build_markdown, build_report
from mlpipe.observe.runview import view_run
from mlpipe.observe.top import Top, runs_table
from mlpipe.store.open import open_store
from mlpipe.train import recorder
from mlpipe.train.recorder import Recorder

pytestmark = pytest.mark.unit
TICK = os.sysconf("SC_CLK_TCK")


def proc(root: Path, *, busy: float, stolen: float, waited: float | None) -> Path:
    """Seconds of each CPU; of which this process may use the first ones."""
    cpus = sorted(os.sched_getaffinity(0))
    user, idle = int(busy * TICK), 10**6
    lines = [f"cpu{cpu} {user} 0 0 {idle} {idle} 0 0 {int(stolen * TICK)} 0 0" for cpu in cpus]
    foreign = f"cpu{max(cpus) + 1} {10**9} 0 0 0 0 0 0 0 0 0"
    (root / "pressure").mkdir(parents=True, exist_ok=True)
    (root / "stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, foreign, "intr 1 2"]))
    if waited is not None:
        (root / "pressure" / "cpu").write_text(f"some avg10=0.00 total={int(waited * 1e6)}\nfull total=0\n")
    return root


@pytest.mark.parametrize("waited", [3.0, None])
def test_what_worked_and_was_not_ours_was_others(tmp_path, waited):
    before = Clock.read(proc(tmp_path, busy=100.0, stolen=7.0, waited=1.0 if waited else None))
    after = Clock.read(proc(tmp_path, busy=108.0, stolen=8.0, waited=waited))
    assert before is not None
    assert after is not None
    cpus = len(os.sched_getaffinity(0))
    moved = Clock(before.time + 10.0, cpus, after.busy, after.stolen, after.waited)
    load = before.until(moved, own_seconds=5.0 * cpus)
    expected = [0.3, 0.1, None if waited is None else 0.2]
    assert list(asdict(load).values()) == [value and pytest.approx(value) for value in expected]
    assert before.until(before, 0.0) is None
    assert Clock.read(tmp_path / "not-linux") is None


def test_a_large_machine_has_cpus_for_several():
    assert Load(0.4, 0.0, 0.5).slowed_us
    assert Load(0.4, 0.0, None).slowed_us
    assert not Load(0.4, 0.0, 0.01).slowed_us
    assert Load(0.0, 0.2, 0.01).slowed_us
    assert not Load(0.05, 0.01, 0.99).slowed_us  # we wait for ourselves


def test_the_first_rank_of_a_node_records_it(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "LOAD_SECONDS", 0.0)
    store = open_store(str(tmp_path))
    for rank, siblings in ((0, 2), (1, 0)):
        found = Recorder(store, "a", rank=rank, restart=0, metrics=None, siblings=siblings)
        found.write(NOT_STARTED)
        found.write(parse({"kind": "step", "time": 1.0, "step": 1}))
        found.close()
        start, step = read_records(store, "a", rank)
        assert (start.rank, step.rank) == (rank, rank)
        assert (step.cpu_others_ratio is None, step.cpu_steal_ratio is None) == (not siblings, not siblings)


def test_reports_say_that_others_used_the_machine_and_that_no_mfu_is_above_all(tmp_path):
    store = open_store(str(tmp_path))
    for run, more in (
        ("alone", {"mfu_ratio": 0.5, "cpu_others_ratio": 0.02, "cpu_steal_ratio": 0.0}),
        ("beside", {"mfu_ratio": 1.43, "cpu_others_ratio": 0.4, "cpu_steal_ratio": 0.02}),
    ):
        write_train_stage(store, run, [Life(1, 0, 0, 40, num_ranks=1)], steps=40)
        write_run(store, run, {"train": stage_state("running")}, state="running")
        path = tmp_path / "runs" / run / "stages/train/attempt-1/records/rank-0.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        more = {**more, "cpu_pressure_ratio": 0.9}
        lines = [{**line, **more} if line["kind"] == "step" else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (
        "others used 40 % of the CPUs, the hypervisor took 2 %, something waited for a CPU 90 % of the time"
    )
    for run, busy in (("alone", False), ("beside", True)):
        view = view_run(store, run)
        page, text = build_report(store, run), build_markdown(store, run)
        assert (words in page, words in text) == (busy, busy)
        assert ("143.0 % (!)" in page, "143.0 % (!)" in text) == (busy, busy)
        assert ("the peak is too low" in page) == busy
        line = live_line(summarize(view.stages[0].lead.steps), width=200)
        assert ("MFU 143.0 % (!)" in line) == busy
    table = runs_table(Top(store).runs(9), 0.0)
    assert [("143.0 % (!)" in line, "50.0 %" in line) for line in sorted(table[1:])] == [
        (False, True), (True, False),
    ]  # fmt: skip


def test_calibrate_writes_no_figures_of_a_machine_that_others_use(tmp_path):
    busy = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(busy) for _ in os.sched_getaffinity(0)]
    try:
        refused = Cli(tmp_path)("calibrate", "--out", "hardware.json", code=4)
    finally:
        for process in others:
            process.kill()
            process.wait(300)
    assert "% of the CPUs" in refused.stderr
    assert "hint: calibrate on an idle machine; --force writes them all the same" in refused.stderr
    assert not (tmp_path / "hardware.json").exists()
