"""A run's state moves forward, by one writer at a time, and is listed from LIST alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from kit.clock import Clock

from mlpipe._core import environment
from mlpipe._core.errors import DamagedError, StoreError
from mlpipe.store import leases, runs
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path)


def create(store, run_id="r-1", stages=("a", "b")):
    runs.create_run(store, run_id, "version: 1\n", "sha", list(stages), "local", {"pipeline": "p"})
    return run_id


def to(state):
    return lambda run: replace(run, state=state)


def stage_to(name, state, attempt=1):
    return lambda run: replace(
        run, stages={**run.stages, name: replace(run.stages[name], state=state, attempt=attempt)}
    )


def test_a_run_is_created_once_read_and_listed(store):
    create(store)
    run = runs.read_run(store, "r-1")
    assert (run.state, run.seq, run.pipeline, list(run.stages)) == ("pending", 1, "p", ["a", "b"])
    assert runs.read_pipeline(store, "r-1") == "version: 1\n"
    with pytest.raises(StoreError, match="exists already") as caught:
        create(store)
    assert caught.value.kind == "input"
    runs.update_run(store, "r-1", to("running"))
    create(store, "r-2")
    assert [(run.run_id, run.state, run.seq) for run in runs.list_runs(store)] == [
        ("r-1", "running", 2),
        ("r-2", "pending", 1),
    ]


def test_of_two_who_take_over_a_half_claimed_id_one_does(store, monkeypatch):
    """And the pipeline beside the run is that of the one."""
    monkeypatch.setattr(runs, "_CLAIM_SECONDS", 0.0)
    store.put("runs/r-1/pipeline.yaml", b"of the dead")
    index = runs.write_index_key

    def overtaken(*arguments):
        monkeypatch.setattr(runs, "write_index_key", index)
        with pytest.raises(StoreError, match="exists already"):
            runs.create_run(store, "r-1", "of the second", "sha-2", ["a"], "local", {})
        index(*arguments)

    monkeypatch.setattr(runs, "write_index_key", overtaken)
    runs.create_run(store, "r-1", "of the first", "sha-1", ["a"], "local", {})
    assert runs.read_run(store, "r-1").spec_digest == "sha-1"
    assert runs.read_pipeline(store, "r-1") == "of the first"
    put = store.put_if_absent
    meanwhile = {
        "r-2": lambda key: store.put(key, b"of the second"),
        "r-3": lambda key: store.delete([key]),
    }

    def slow(key, data):
        """The first was thought dead: just before it has the run, another takes over, or frees the id."""
        _, run_id, name = key.split("/")
        if name == "run.json":
            meanwhile[run_id](f"runs/{run_id}/pipeline.yaml")
        return put(key, data)

    monkeypatch.setattr(store, "put_if_absent", slow)
    for run_id in meanwhile:
        runs.create_run(store, run_id, "of the first", "sha-1", ["a"], "local", {})
        assert runs.read_pipeline(store, run_id) == "of the first"
    assert not runs.clear_claim(store, "r-2")


def test_a_claim_without_a_run_is_told_waited_for_taken_over_or_freed(store, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(runs, "time", clock)
    store.put("index/r-1/000000-claimed", b"")
    store.put("runs/r-1/pipeline.yaml", b"version: 1\n")
    with pytest.raises(StoreError, match="claimed and not begun") as caught:
        runs.read_run(store, "r-1")
    assert caught.value.kind == "input"
    create(store)  # the same client once more
    assert not clock.pauses
    store.put("runs/r-2/pipeline.yaml", b"of another")
    create(store, "r-2")
    assert sum(clock.pauses) >= runs._CLAIM_SECONDS
    assert runs.read_pipeline(store, "r-2") == "version: 1\n"

    def begun(seconds):
        clock.now += seconds
        store.copy("runs/r-1/run.json", "runs/r-3/run.json")

    store.put("runs/r-3/pipeline.yaml", b"of another")
    monkeypatch.setattr(clock, "sleep", begun)
    began = clock.now
    with pytest.raises(StoreError, match="run r-3 exists already"):
        create(store, "r-3")
    assert clock.now < began + runs._CLAIM_SECONDS
    assert runs.read_pipeline(store, "r-3") == "of another"
    for key in ("index/r-5/000000-claimed", "runs/r-5/pipeline.yaml"):
        store.put(key, b"")
        assert runs.clear_claim(store, "r-5")
        assert not store.exists(key)
        assert not runs.clear_claim(store, "r-5")
    assert not runs.clear_claim(store, "../r-5")
    assert not runs.clear_claim(store, "r-1")
    assert runs.read_run(store, "r-1").pipeline == "p"


def test_runs_are_listed_as_they_were_begun_with_their_last_change(store, tmp_path):
    for time_of, name in enumerate(["r-2/000001-pending", "r-1/000001-pending", "r-1/000002-done", "odd/x"]):
        store.put(f"index/{name}", b"")
        os.utime(tmp_path / "index" / name, (time_of, time_of))
    found = [(run.run_id, run.state, run.created, run.updated) for run in runs.list_runs(store)]
    assert found == [("r-2", "pending", 0.0, 0.0), ("r-1", "done", 1.0, 2.0)]


def test_stages_keep_the_order_of_the_pipelines_file(store):
    create(store, stages=("b", "c", "a"))
    runs.update_run(store, "r-1", stage_to("c", "running"))
    assert list(runs.read_run(store, "r-1").stages) == ["b", "c", "a"]


def test_whose_fault_it_is_that_there_is_no_run(store):
    """The exit code follows from it."""
    create(store)
    newer = json.loads(store.get("runs/r-1/run.json")) | {"schema_version": 9}
    store.put("runs/r-1/run.json", json.dumps(newer).encode())
    for act, kind in (
        (lambda: create(store, "../r"), "input"),
        (lambda: runs.read_run(store, "gone"), "input"),
        (lambda: runs.read_run(store, "gone", known=True), "infrastructure"),
        (lambda: runs.update_run(store, "gone", to("running")), "infrastructure"),
        (lambda: runs.read_run(store, "r-1"), "input"),
    ):
        with pytest.raises(StoreError) as caught:
            act()
        assert caught.value.kind == kind
    assert "another version of mlpipe (schema 9)" in caught.value.message
    store.get_with_etag = unreachable
    with pytest.raises(StoreError, match="away"):
        runs.read_run(store, "r-1")


def unreachable(key):
    raise StoreError("away")


def test_listing_reads_no_object_and_shows_what_can_be_a_run(store, tmp_path, monkeypatch):
    create(store)
    (tmp_path / "index/a\nb  done").mkdir()
    (tmp_path / "index/a\nb  done/000001-done").touch()
    monkeypatch.setattr(store, "get", None)
    monkeypatch.setattr(store, "get_with_etag", None)
    assert len(runs.list_runs(store)) == 1


def test_concurrent_changes_are_all_kept(store):
    create(store)

    def work(name):
        for number in range(10):
            runs.update_run(
                store, "r-1", lambda run, n=number: replace(run, meta={**run.meta, f"{name}-{n}": n})
            )

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    meta = runs.read_run(store, "r-1").meta
    assert sum(key.startswith("t") for key in meta) == 30


def test_states_only_move_forward(store):
    create(store)
    runs.update_run(store, "r-1", to("running"))
    runs.update_run(store, "r-1", stage_to("a", "running"))
    runs.update_run(store, "r-1", stage_to("a", "done"))
    new = runs.update_run(
        store, "r-1", lambda run: replace(run, stages={**run.stages, "c": runs.StageState("running")})
    )
    assert new.stages["c"].state == "running"
    for change in (to("pending"), stage_to("a", "running", 2), stage_to("a", "failed")):
        with pytest.raises(StoreError, match="only move forward"):
            runs.update_run(store, "r-1", change)
    runs.update_run(store, "r-1", to("failed"))
    for state in ("running", "done"):
        with pytest.raises(StoreError, match="only move forward") as caught:
            runs.update_run(store, "r-1", to(state))
        assert caught.value.kind == "bug"


def test_reopen_keeps_what_is_done_and_forgets_the_rest(store):
    create(store)
    runs.update_run(store, "r-1", to("running"))
    runs.update_run(store, "r-1", stage_to("a", "done"))
    runs.update_run(store, "r-1", stage_to("b", "failed", attempt=2))
    runs.request_cancel(store, "r-1", "enough")
    assert runs.cancel_requested(store, "r-1") == "enough"
    runs.update_run(store, "r-1", to("cancelled"))
    run = runs.reopen(store, "r-1")
    assert (run.state, run.seq) == ("running", 4)
    assert (run.stages["a"].state, run.stages["b"].state, run.stages["b"].attempt) == ("done", "pending", 2)
    assert runs.cancel_requested(store, "r-1") is None
    assert runs.list_runs(store)[0].state == "running"
    runs.update_run(store, "r-1", to("done"))
    with pytest.raises(StoreError, match="is done") as caught:
        runs.reopen(store, "r-1")
    assert caught.value.kind == "input"
    assert runs.reopen(store, "r-1", again=["a"]).stages["a"].state == "pending"


def test_of_two_who_resume_what_they_saw_one_does_and_of_some_stages_the_others_stay(store, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(runs, "time", clock)
    create(store)
    failed = runs.update_run(store, "r-1", lambda run: replace(to("failed")(run), message="by a"))
    clock.now += 60
    run = runs.reopen(store, "r-1", ["b"], seen=failed)
    assert (run.state, run.message, run.updated - failed.updated) == ("running", "", 60)
    runs.request_cancel(store, "r-1", "of the first")
    with pytest.raises(StoreError, match="was resumed meanwhile") as caught:
        runs.reopen(store, "r-1", seen=failed)
    assert caught.value.kind == "input"
    assert runs.cancel_requested(store, "r-1") == "of the first"
    for name in ("a", "b"):
        runs.update_run(store, "r-1", stage_to(name, "failed"))
    states = {name: stage.state for name, stage in runs.reopen(store, "r-1", ["b"]).stages.items()}
    assert states == {"a": "failed", "b": "pending"}


def test_an_unknown_or_damaged_run_is_one_clear_error(store, tmp_path):
    for run_id in ("nope", "../etc", "A B"):
        with pytest.raises(StoreError) as caught:
            runs.read_run(store, run_id)
        assert caught.value.kind == "input"
    create(store)
    path = tmp_path / "runs/r-1/run.json"
    sound = path.read_text()
    for lie in (
        '{"schema_version": 1}',
        sound.replace('"run_id": "r-1"', '"run_id": "r-2"'),
        sound.replace('"attempt": 0', '"attempt": -1'),
        sound.replace('"attempt": 0', f'"attempt": 1{400 * "0"}'),
        sound.replace('"a": {', '"a\\n../": {'),
        sound.replace('"meta": {', '"meta": {"set": [1], '),
        sound.replace('"meta": {', '"meta": {"init_from": "x", '),
        sound.replace('"meta": {', '"meta": {"trials": {"000": 3}, '),
        sound.replace('"meta": {', '"meta": {"promoted": true, '),
        sound.replace('"meta": {', '"meta": {"promoted": {"model": "m"}, '),
        sound.replace('"outcome": {}', '"outcome": {"metrics": {"val_loss": "x"}}'),
        sound.replace('"started": null', '"started": 1e999'),
        sound.replace('"started": null', '"started": NaN'),
        100_000 * "[",
    ):
        assert lie != sound
        path.write_text(lie)
        with pytest.raises(DamagedError, match="not a run's state"):
            runs.read_run(store, "r-1")


def test_a_lease_is_kept_from_others_until_it_expires(store):
    create(store)
    run = leases.take_lease(store, "r-1", "one", 60)
    assert leases.lease_is_live(run.driver)
    with pytest.raises(StoreError, match="is driven by process") as caught:
        leases.take_lease(store, "r-1", "two", 60)
    assert (caught.value.kind, caught.value.where) == ("input", store.url)
    assert "wait" not in caught.value.hint, "the process is alive, and renews it"
    there = replace(run.driver, host="elsewhere", namespace="another")
    runs.update_run(store, "r-1", lambda run: replace(run, driver=there))
    with pytest.raises(StoreError) as caught:
        leases.take_lease(store, "r-1", "two", 60)
    assert "mlpipe cancel r-1; if that machine is lost, wait for " in caught.value.hint
    leases.take_lease(store, "r-1", "one", -1)  # renewed by its holder, into the past
    leases.take_lease(store, "r-1", "two", 60)
    with pytest.raises(StoreError, match="was lost"):
        leases.renew_lease(store, "r-1", "one", 60)
    assert leases.renew_lease(store, "r-1", "two", 90).driver.expires > time.time() + 80
    leases.release_lease(store, "r-1", "one")
    assert runs.read_run(store, "r-1").driver.holder == "two"
    leases.release_lease(store, "r-1", "two")
    assert runs.read_run(store, "r-1").driver is None
    forever = runs.Lease("nobody", "elsewhere", 1, time.time() + 1e7)  # as of a clock that was wrong
    runs.update_run(store, "r-1", lambda run: replace(run, driver=forever))
    assert leases.take_lease(store, "r-1", "one", 60).driver.holder == "one"


def test_a_run_that_nobody_drives_is_told_from_one_that_is_about_to_be(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    now = clock.time()
    lease = runs.Lease("one", "elsewhere", 1, now - 500, "another namespace", 1.0, "", "")
    stages = {"a": runs.StageState()}
    left = runs.RunState(
        1, "r-1", "p", "local", "running", now - 900, now - 600, "sha", 2, stages, lease, "", {}
    )
    assert leases.undriven_since(left) == now - 500
    assert leases.undriven_since(replace(left, driver=None)) == now - 600
    for fine in (
        {"state": "done"}, {"message": runs.WAITS_FOR_STAGES}, {"driver": replace(lease, expires=now + 1)},
    ):  # fmt: skip
        assert leases.undriven_since(replace(left, **fine)) is None
    # a cluster may be about to start one, for a while
    there = replace(left, backend="kubernetes", meta={"kubernetes": {"namespace": "ns"}})
    assert leases.undriven_since(there) == now - 500
    assert leases.undriven_since(replace(there, driver=replace(lease, expires=now - 100))) is None
    assert leases.undriven_since(replace(left, driver=replace(lease, expires=now - 100))) == now - 100


def test_the_lease_of_a_dead_process_on_this_host_is_taken_over(store, tmp_path):
    create(store)
    code = (
        "import sys; from pathlib import Path; from mlpipe.store import leases, folder;"
        "leases.take_lease(folder.FolderStore(Path(sys.argv[1])), 'r-1', 'dead', 3600)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300)
    assert leases.take_lease(store, "r-1", "alive", 60).driver.holder == "alive"


def test_a_pid_that_was_given_to_another_process_is_no_driver(store):
    create(store)
    run = leases.take_lease(store, "r-1", "one", 60)
    with pytest.raises(StoreError, match="is driven by process"):
        leases.take_lease(store, "r-1", "two", 60)
    earlier = replace(run.driver, started=run.driver.started - 1)
    runs.update_run(store, "r-1", lambda run: replace(run, driver=earlier))
    assert leases.take_lease(store, "r-1", "two", 60).driver.holder == "two"


def test_a_live_driver_is_not_looked_for_in_another_pid_namespace(store, tmp_path):
    """Where its pid is nobody's, under the same host name."""
    namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode != 0:
        pytest.skip("no PID namespace of one's own here (unshare)")
    create(store)
    leases.take_lease(store, "r-1", "one", 60)
    code = (
        "import sys; from pathlib import Path; from mlpipe.store import leases, folder;"
        "leases.take_lease(folder.FolderStore(Path(sys.argv[1])), 'r-1', 'two', 60)"
    )
    other = subprocess.run(
        [*namespace, sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert "is driven by process" in other.stderr
    assert runs.read_run(store, "r-1").driver.holder == "one"


@pytest.mark.parametrize(("pod_uid", "is_live"), [("u-1", False), ("u-2", True), (None, True)])
def test_a_container_that_was_started_anew_does_not_wait_for_the_one_before(
    store, monkeypatch, pod_uid, is_live
):
    create(store)
    monkeypatch.setenv(environment.POD_UID, "u-1")
    run = leases.take_lease(store, "r-1", "one", 60)
    assert run.driver.pod_uid == "u-1"
    before = replace(run.driver, namespace="boot pid:[1]")  # of the container that is gone
    if pod_uid is None:
        monkeypatch.delenv(environment.POD_UID)
    else:
        monkeypatch.setenv(environment.POD_UID, pod_uid)
    assert leases.lease_is_live(before) is is_live


def test_a_transition_lost_from_the_index_is_written_by_the_next_driver(store):
    create(store)
    runs.update_run(store, "r-1", to("running"))
    store.delete(["index/r-1/000002-running"])
    assert runs.list_runs(store)[0].state == "pending"
    leases.take_lease(store, "r-1", "one", 60)
    assert runs.list_runs(store)[0].state == "running"
