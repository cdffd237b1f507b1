"""Runs, outputs and the registry on real servers: what rests on conditional PUT and LIST."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from kit import saver

from mlpipe.store import leases, outputs, registry, runs

pytestmark = pytest.mark.services


def test_a_run_changes_by_one_writer_at_a_time_and_is_listed(store):
    runs.create_run(store, "r", "version: 1\n", "sha", ["a"], "local", {})

    def work(name):
        for n in range(5):
            runs.update_run(store, "r", lambda run, n=n: replace(run, meta={**run.meta, f"{name}-{n}": n}))

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    written = {f"t{i}-{n}": n for i in range(3) for n in range(5)}
    assert runs.read_run(store, "r").meta == {"stages": ["a"], **written}
    leases.take_lease(store, "r", "me", 60)
    runs.update_run(store, "r", lambda run: replace(run, state="running"))
    runs.request_cancel(store, "r", "enough")
    assert runs.cancel_requested(store, "r") == "enough"
    assert [(run.run_id, run.state, run.seq) for run in runs.list_runs(store)] == [("r", "running", 2)]


def test_outputs_come_back_and_models_are_promoted(store, tmp_path):
    made = tmp_path / "made"
    (made / "sub").mkdir(parents=True)
    (made / "sub" / "a b.bin").write_bytes(bytes(range(256)) * 1000)
    (made / "empty").write_bytes(b"")
    digest = outputs.commit_output(store, "runs/r/stages/corpus", made)
    fetched = outputs.fetch_output(store, "runs/r/stages/corpus", tmp_path / "cache")
    assert fetched == tmp_path / "cache" / digest
    assert (fetched / "sub" / "a b.bin").read_bytes() == (made / "sub" / "a b.bin").read_bytes()
    assert (fetched / "empty").read_bytes() == b""
    prefix = saver.save(store, 3)
    assert registry.promote(store, "lm", "best", prefix, {"run": "r"}) == 1
    assert registry.show_model(store, "lm", "best").step == 3
    assert [model.version for model in registry.list_models(store)[0]] == [1]
