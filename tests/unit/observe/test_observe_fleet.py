"""The exporter, `mlpipe top` and what `monitor up` writes, over a store with runs of every kind."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from dataclasses import replace

import pytest
from click.testing import CliRunner
from kit.command_runs import Cli
from kit.rendered import QUICKSTART, pipeline_of, plan_of
from kit.synthetic_run import (
    BEGIN,
    Life,
    stage_state,
    write_quickstart,
    write_records,
    write_run,
    write_train_stage,
)
from prometheus_client.parser import text_string_to_metric_families

from mlpipe._core.errors import DamagedError
from mlpipe._core.records import Fallback, Membership
from mlpipe.cli.session import CliSession
from mlpipe.cli.status import command as status
from mlpipe.observe import scrape
from mlpipe.observe.exporter import Fleet
from mlpipe.observe.records import records_key
from mlpipe.observe.series import FLEET_METRICS
from mlpipe.observe.serve import Serving
from mlpipe.observe.top import Top, ranks_table, runs_table, straggler_scores
from mlpipe.store import runs
from mlpipe.store.open import open_store
from mlpipe.store.runs import Lease, StageState, append_event, update_run

pytestmark = pytest.mark.unit
LIVE, DONE, BAD = "live-1", "quickstart-1", "bad-1"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A run that is done, one that failed by a NaN, and one under way whose rank 1 is slow."""
    store = open_store(str(tmp_path_factory.mktemp("fleet")))
    write_quickstart(store, DONE)
    failed = StageState("failed", 1, "", BEGIN, BEGIN + 60, 3, {"kind": "failed", "cause": "not_finite"})
    write_run(store, BAD, {"train": failed}, state="failed", updated=BEGIN + 60)
    write_train_stage(store, LIVE, [Life(1, 0, 0, 40, num_ranks=2)], steps=100)
    key = f"runs/{LIVE}/stages/train/attempt-1"
    for rank, compute in ((0, 0.1), (1, 0.3)):
        start = {
            "kind": "start",
            "time": BEGIN,
            "host": socket.gethostname(),
            "metrics_port": 9400 + rank,
            "steps": 100,
        }
        step = {"kind": "step", "time": time.time(), "loss": 2.0, "seconds": 0.4, "data_seconds": 0.0}
        step |= {
            "compute_seconds": compute,
            "collective_seconds": 0.4 - compute,
            "tokens": 64,
            "memory_bytes": 10**8,
        }
        write_records(store, key, rank, [start, *({**step, "step": 40 + n} for n in range(1, 25))])
    built = {
        "pipeline": "live",
        "jenkins_build": "jenkins-train-17",
        "jenkins_url": "https://ci/job/train/17/",
    }
    for when in (BEGIN + 9, BEGIN + 5):
        append_event(store, key, Fallback(time=when, step=20, given_up=["x"], why=["torn"]))
    write_run(store, LIVE, {"train": stage_state("running")}, state="running", meta=built)
    return store


def samples(fleet: Fleet) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in fleet.collect()
    }


@pytest.mark.parametrize(("address", "reached"), [("0.0.0.0", ("127.0.0.1", "[::1]")), ("::1", ("[::1]",))])
def test_pods_that_have_an_address_of_ipv6_alone_are_scraped_as_well(store, address, reached):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6 on the loopback: sysctl net.ipv6.conf.lo.disable_ipv6=0")
    serving = Serving(Fleet(store), address, 0)
    try:
        for host in reached:
            with urllib.request.urlopen(f"http://{host}:{serving.port}/metrics", timeout=300) as answer:
                assert answer.status == 200
    finally:
        serving.close()


def test_runs_of_every_state_are_served_and_pass_promtool(store):
    fleet = Fleet(store)
    fleet.round()
    serving = Serving(fleet, "127.0.0.1", 0)
    try:
        silent = [socket.create_connection(("127.0.0.1", serving.port), timeout=5) for _ in range(40)]
        with urllib.request.urlopen(f"http://127.0.0.1:{serving.port}/metrics", timeout=300) as answer:
            text = answer.read().decode()
        assert silent[0].recv(1) == b""  # long before it has been silent for 10 s
        for one in silent:
            one.close()
    finally:
        serving.close()
    assert {family.name for family in text_string_to_metric_families(text)} == {m.name for m in FLEET_METRICS}
    found = samples(fleet)
    assert found["mlpipe_fleet_runs"][("failed",)] == 1
    assert sum(found["mlpipe_fleet_runs"].values()) == 3
    assert found["mlpipe_fleet_failed_runs"] == {("not_finite",): 1}
    ((labels, when),) = found["mlpipe_run_failed_timestamp_seconds"].items()
    assert (labels, when) == ((BAD, "bad", "train", "not_finite"), BEGIN + 60)
    fallbacks = found["mlpipe_run_fallback_timestamp_seconds"]
    assert fallbacks == {(LIVE, "live", "train"): BEGIN + 9}
    ((labels, when),) = found["mlpipe_run_last_step_timestamp_seconds"].items()
    assert labels == (LIVE, "live", "train")
    assert when > time.time() - 600
    built = (LIVE, "live", "jenkins-train-17", "https://ci/job/train/17/")
    assert found["mlpipe_run_build_info"] == {built: 1}
    assert found["mlpipe_run_undriven_timestamp_seconds"] == {}
    gone = Lease("dead", "elsewhere", 1, BEGIN)
    update_run(store, LIVE, lambda run: replace(run, driver=gone))
    fleet.round()
    assert samples(fleet)["mlpipe_run_undriven_timestamp_seconds"] == {(LIVE, "live"): BEGIN}
    assert 0 < found["mlpipe_run_goodput_ratio"][DONE, "quickstart"] < 1
    assert found["mlpipe_run_step_seconds"][LIVE, "live", "train", "measured"] == pytest.approx(0.4, rel=0.2)
    assert found["mlpipe_run_memory_bytes"][DONE, "quickstart", "train", "measured"] > 0
    whole = sum(found["mlpipe_fleet_rank_seconds"].values())
    assert whole == pytest.approx(sum(found["mlpipe_run_rank_seconds"].values()))
    if shutil.which("promtool"):
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=text,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_status_names_the_build_that_made_the_run(store):
    done = CliRunner().invoke(status, [LIVE, "--store", store.url], obj=CliSession(), catch_exceptions=False)
    assert "made by https://ci/job/train/17/" in done.output


def test_what_is_over_is_read_once_and_old_runs_wait_for_their_turn(store, monkeypatch):
    fleet = Fleet(store, recent=0)
    fleet.round(seconds=-1.0)
    assert samples(fleet)["mlpipe_fleet_unread_runs"] == {(): 2}
    assert [labels[0] for labels in samples(fleet)["mlpipe_run_state_info"]] == [LIVE]
    fleet.round()
    asked = []
    read = runs.read_run
    monkeypatch.setattr(runs, "read_run", lambda store, run_id: asked.append(run_id) or read(store, run_id))
    fleet.round()
    assert asked == [LIVE]
    assert samples(fleet)["mlpipe_fleet_unread_runs"] == {(): 0}


def test_top_shows_the_runs_under_way_first_and_marks_the_slow_rank(store):
    top, now = Top(store), time.time()
    rows = top.runs(2)
    assert rows[0].run == LIVE
    assert len(rows) == 2
    lines = runs_table(rows, now)
    assert lines[0].split()[:3] == ["RUN", "STATE", "FOR"]
    assert "64/100" in lines[1]
    ranks = top.ranks(LIVE)
    assert [round(row.straggler_score, 2) for row in ranks] == [0.5, 1.5]
    table = ranks_table(ranks, now)
    assert [line.endswith("slow") for line in table[1:]] == [False, True]
    assert top.ranks(BAD) == []
    assert straggler_scores([], []) == []
    assert straggler_scores([0.0, 0.0], [0, 0]) == [1.0, 1.0]


def test_top_compares_ranks_of_one_stage(tmp_path):
    """Of a pipeline of two stages with two ranks each, of which the second stage has three times the work."""
    store = open_store(str(tmp_path))
    for rank, compute in enumerate((0.1, 0.1, 0.3, 0.9)):
        start = {"kind": "start", "time": BEGIN, "world_size": 4, "mesh": {"pp": 2, "dp_replicate": 2}}
        step = {"kind": "step", "time": BEGIN, "step": 1, "data_seconds": 0.0, "compute_seconds": compute}
        key = "runs/staged/stages/train/attempt-1"
        records = [{"v": 1, "rank": rank, "restart": 0, **one} for one in (start, step)]
        write_records(store, key, rank, records)
    write_run(store, "staged", {"train": stage_state("running")}, state="running")
    assert [round(row.straggler_score, 2) for row in Top(store).ranks("staged")] == [1, 1, 0.5, 1.5]


def test_a_rank_with_less_work_is_slow_all_the_same(tmp_path):
    """Its load was moved: it takes as long as the other, for half as much."""
    store = open_store(str(tmp_path))
    write_run(store, "q-1", {"train": stage_state("running")}, state="running")
    for rank, share in enumerate((4 / 3, 2 / 3)):
        step = {"kind": "step", "time": BEGIN, "step": 1, "compute_seconds": 0.4, "share_ratio": share}
        line = {"v": 1, "rank": rank, "restart": 0, **step}
        write_records(store, "runs/q-1/stages/train/attempt-1", rank, [line])
    fast, slow = Top(store).ranks("q-1")
    assert slow.straggler_score == pytest.approx(2 * fast.straggler_score)


def test_top_marks_ranks_of_replicas_that_left(tmp_path):
    """Of an elastic training of two ranks a replica: the second has left, and comes back."""
    store, key = open_store(str(tmp_path)), "runs/e-1/stages/train/attempt-1"
    write_run(store, "e-1", {"train": stage_state("running")}, state="running")
    plan = plan_of(pipeline_of("quickstart", *QUICKSTART), "train")
    plan = replace(plan, launch=plan.launch._replace(nproc_per_node=2))
    store.put(f"{key}/plan.json", plan.to_json().encode())
    for rank in range(6):
        step = {"kind": "step", "time": BEGIN, "step": 1, "compute_seconds": 0.4}
        write_records(store, key, rank, [{"v": 1, "rank": rank, "restart": 0, **step}])
    top = Top(store)
    assert not any(row.left for row in top.ranks("e-1")), "nobody has said who takes part"
    append_event(store, key, Membership(members=[2, 0], step=1, why="replica 1 leaves"))
    table = ranks_table(top.ranks("e-1"), BEGIN)
    assert [line.endswith("left") for line in table[1:]] == [False, False, True, True, False, False]
    append_event(store, key, Membership(members=[0, 1, 2], step=2, why="replica 1 comes"))
    assert not any(row.left for row in top.ranks("e-1"))
    store.put(f"{key}/plan.json", b'{"train": 1}')
    with pytest.raises(DamagedError, match="not a plan") as caught:  # it was a bug
        Top(store).ranks("e-1")
    assert str(caught.value.where).endswith("attempt-1/plan.json")


def test_top_shows_a_damaged_run_as_such_and_skips_records_without_a_time(store, tmp_path):
    shutil.copytree(store.url, tmp_path / "store")
    store = open_store(str(tmp_path / "store"))
    store.put(f"runs/{BAD}/run.json", b"[]")
    log = store.open_log(records_key(runs.read_run(store, LIVE).attempt_key("train"), 0))
    log.write(b'{"v": 1, "kind": "step", "rank": 0, "restart": 0, "step": 65, "seconds": 1.0}\n')
    log.close()
    top = Top(store)
    rows = {row.run: row for row in top.runs(9)}
    assert (rows[BAD].state, rows[LIVE].progress["step"]) == ("damaged", 64)
    assert "not a run's state" in runs_table([rows[BAD]], time.time())[-1]
    assert [row.step for row in top.ranks(LIVE)] == [64, 64]
    listed = {run.run_id: run.state for run in runs.list_runs(store)}
    assert listed.keys() == rows.keys()


def test_targets_are_the_ranks_that_train_here(store, tmp_path):
    targets, fleet = scrape.Targets(store), Fleet(store)
    fleet.round()
    assert targets.find(fleet.under_way) == targets.find(fleet.under_way) == [9400, 9401]
    scrape.write_prometheus(tmp_path, interval_seconds=5)
    scrape.write_targets(tmp_path, targets.find(fleet.under_way), 9399)
    (group,) = json.loads((tmp_path / "targets.json").read_text())
    assert group["targets"] == ["127.0.0.1:9400", "127.0.0.1:9401", "127.0.0.1:9399"]
    if shutil.which("promtool"):
        check = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
        done = subprocess.run(check, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    provisioning = scrape.write_grafana(tmp_path, "http://127.0.0.1:9090")
    provider = json.loads((provisioning / "dashboards" / "mlpipe.yaml").read_text())["providers"][0]
    boards = sorted(path.name for path in scrape.BOARDS.glob("*.json"))
    assert boards == ["fleet.json", "nodes.json", "run.json"]
    for name in boards:
        copied = tmp_path / "grafana" / "dashboards" / name
        assert str(copied.parent) == provider["options"]["path"]
        assert copied.read_bytes() == (scrape.BOARDS / name).read_bytes()


def test_the_verbs_on_an_empty_store(tmp_path):
    cli = Cli(tmp_path)
    assert "no runs" in cli("top").stdout
    assert cli.json("top") == []
    assert "there is no run nothing" in cli("top", "nothing", code=2).stderr
    cli.env["PATH"] = str(tmp_path)
    refused = cli("monitor", "up", code=4)
    assert "there is no prometheus in PATH" in refused.stderr
    assert "hint: install it" in refused.stderr
    assert not (tmp_path / "mlpipe-monitor").exists()
