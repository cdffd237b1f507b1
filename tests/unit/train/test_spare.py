"""When a machine without ranks leaves. Clocks are the test's own."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from types import SimpleNamespace

import pytest
from kit import plans

from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.train import spare

pytestmark = pytest.mark.unit


@pytest.fixture
def waits(tmp_path, monkeypatch):
    """Stands by until its end; `at` is what happens after so many looks."""
    plan = plans.train_plan(tmp_path / "store", plans.write_tokens(tmp_path / "tokens", num_tokens=100))
    store = FolderStore(tmp_path / "store")
    monkeypatch.setattr(spare, "COME_SECONDS", 20.0)
    monkeypatch.setattr(spare, "GONE_SECONDS", 10.0)
    monkeypatch.setattr(spare, "STOPPED_SECONDS", 6.0)

    def stand(endpoint, at, stopped=False):
        now = [0.0]

        def sleep(seconds):
            now[0] += seconds
            if now[0] in at:
                at[now[0]](store, f"{plan.attempt_key}/outcome.json")

        # its own, not the module of all: other threads of the process sleep, too
        monkeypatch.setattr(spare, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        return spare.stand_by(store, plan, endpoint, lambda: stopped), now[0]

    return stand


@contextlib.contextmanager
def listening():
    """Its address, and what ends it."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        server.handle_error = lambda *_: None

        def end(*_):
            server.shutdown()
            server.server_close()

        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}", end
        end()


def ends(outcome, code):
    return lambda store, key: write_outcome(store, key, AttemptOutcome(outcome, exit_code=code))


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("saved", 5), ("failed", 3)])
def test_it_leaves_as_the_others_have_ended(waits, outcome, code):
    with listening() as (endpoint, _):
        # long after the time for which it waits for them to come
        assert waits(endpoint, {60.0: ends(outcome, code)}) == (code, 60.0)


def test_it_waits_neither_for_others_that_never_came_nor_for_those_that_are_gone(waits):
    nobody = "127.0.0.1:1"
    assert waits(nobody, {}) == (4, 20.0)
    assert waits(nobody, {}, stopped=True) == (5, 6.0)
    with listening() as (endpoint, end):
        assert waits(endpoint, {40.0: end}) == (4, 48.0)
    with listening() as (endpoint, end):  # which save before they leave
        assert waits(endpoint, {40.0: end}, stopped=True) == (5, 46.0)
