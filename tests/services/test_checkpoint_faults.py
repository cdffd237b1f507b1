"""For every request of a save: the client killed there, with and without its effect, or only its answer lost.

Afterwards every listed checkpoint reads back bit for bit, the last committed one is there, and the next save
works. The requests of a save are counted from a run without faults; parts are uploaded side by side, so the
same number need not be the same request each time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kit import budget, saver
from kit.faultproxy import Fault
from kit.warm import Popen

from mlpipe._core.errors import StoreError
from mlpipe.store import catalogue
from mlpipe.store.s3 import S3Store

pytestmark = pytest.mark.services
KIT = Path(saver.__file__).parent.parent
SECONDS = 180.0


class Child:
    """A saver under way. `until("ready 2")` waits for that line, "" when it has died."""

    def __init__(self, url, environment, *steps):
        self.process = Popen(
            "cli",
            [sys.executable, "-m", "kit.saver", url, *map(str, steps)],
            env={**os.environ, **environment, "PYTHONPATH": str(KIT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def until(self, line):
        watchdog = threading.Timer(SECONDS, self.process.kill)
        watchdog.start()
        try:
            while (text := self.process.stdout.readline()) and text.strip() != line:
                pass
        finally:
            watchdog.cancel()
        return text.strip()

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def save(self, step):
        assert self.until(f"ready {step}")
        self.go()
        assert self.until(f"saved {step}"), self.errors()

    def errors(self):
        return self.process.communicate(timeout=SECONDS)[1]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate(timeout=SECONDS)


def child_of(server, proxy, url, *steps, seconds=60):
    return Child(
        url, {**server.environment(proxy.endpoint), "MLPIPE_STORE_DEADLINE_SECONDS": str(seconds)}, *steps
    )


def fresh(store):
    store.delete([info.key for info in store.list("")])


def num_requests(server, proxy, url, store):
    """Of the third save, the first whose pruning has something to delete."""
    with child_of(server, proxy, url, 1, 2, 3) as child:
        child.save(1)
        child.save(2)
        child.until("ready 3")
        proxy.arm()
        child.go()
        assert child.until("saved 3")
    requests = proxy.requests
    fresh(store)
    return len(requests)


KILLS = ("kill-after", "kill-lose", "kill-cut")


def test_a_client_killed_at_any_request_of_a_save_loses_nothing(server, proxy, url, store, capsys):
    total = num_requests(server, proxy, url, store)
    assert total >= 10
    budget.within("a checkpoint of 3 blobs in 7 parts, and pruning", {"store requests": total})
    kills = losses = survived = 0
    saver.save(store, 1)
    saver.save(store, 2)
    committed = 2
    for how in KILLS:
        killed, k = True, 0
        while killed:  # until a save ends before its k-th request
            k += 1
            step = committed + 1
            with child_of(server, proxy, url, step) as child:
                assert child.until(f"ready {step}")
                proxy.arm(Fault(at=k, how=how, pid=child.pid))
                child.go()
                finished = child.until(f"saved {step}")
                child.process.wait(SECONDS)
                killed = proxy.wait_fired(0 if finished else SECONDS)
            kills += killed
            steps = saver.check_all(store)
            losses += committed not in steps
            assert len(steps) >= 2, "two valid checkpoints must remain"
            assert step in steps or not finished
            if step in steps:
                survived += killed
                committed = step
        assert k > total / 2
    losses += saver.check_all(store)[-1] != committed
    saver.save(store, committed + 1)  # and a next save finds its way, and sweeps what the dead left
    assert saver.check_all(store) == [committed, committed + 1]
    folders = {info.key.partition("/checkpoints/")[2].split("/")[1] for info in store.list(saver.STAGE)}
    assert len(folders) == 2
    with capsys.disabled():
        print(
            f"\n{server.name}: {total} requests numbered in a save, {kills} kills tried, "
            f"{survived} of them after the commit, {losses} losses"
        )
    assert losses == 0


@pytest.mark.parametrize(
    ("server", "how"),
    [
        *(("minio", how) for how in ("lose", "drop", "503", "cut")),
        *(("versitygw", how) for how in ("lose", "cut")),  # of the others a server hears nothing
    ],
    indirect=["server"],
    scope="session",  # one server after the other
)
def test_a_save_goes_on_when_any_one_request_goes_wrong(server, proxy, url, store, capsys, how):
    total = num_requests(server, proxy, url, store)
    through = S3Store.from_environment(url, server.environment(proxy.endpoint))
    through.part_bytes = saver.PART_BYTES
    for k in range(1, total + 1):
        proxy.arm(Fault(at=k, how=how))
        saver.save(through, k)
        assert proxy.wait_fired(0)
        assert saver.check_all(store) == [max(k - 1, 1), k][-min(k, 2) :]
    with capsys.disabled():
        print(f"\n{server.name}, {how}: {total} requests numbered, each went wrong once, 0 losses")


# a hang is outlived by the client's read timeout, longer than this
@pytest.mark.parametrize(("how", "away_seconds"), [("refuse", 6.0), ("hang", 5.0)])
def test_a_save_waits_for_a_store_that_comes_back(server, proxy, url, store, how, away_seconds):
    with child_of(server, proxy, url, 1, seconds=90) as child:
        assert child.until("ready 1")
        proxy.away(how)
        timer = threading.Timer(away_seconds, proxy.back)
        timer.start()
        child.go()
        assert child.until("saved 1"), child.errors()
        timer.join(SECONDS)
    assert saver.check_all(store) == [1]


def test_a_store_that_stays_away_ends_a_save_with_one_clear_error(server, proxy, url, store):
    saver.save(store, 1)
    through = S3Store.from_environment(
        url, {**server.environment(proxy.endpoint), "MLPIPE_STORE_DEADLINE_SECONDS": "2"}
    )
    proxy.away("refuse")
    with pytest.raises(StoreError, match="did not serve PUT within 2 s") as caught:
        saver.save(through, 2)
    assert caught.value.kind == "infrastructure"
    assert saver.check_all(store) == [1]


def test_corrupt_and_cut_objects_are_named(server, store, url):
    prefix = saver.save(store, 1)
    objects = list(store.list(prefix))
    for info in objects:
        sound = store.get(info.key)
        for damaged in (sound[:-1], sound[:10] + bytes([sound[10] ^ 1]) + sound[11:]):
            store.put(info.key, damaged)
            problems = catalogue.verify(store, prefix)
            assert len(problems) == 1
            assert info.key in problems[0]
        store.delete([info.key])
        assert catalogue.verify(store, prefix)
        store.put(info.key, sound)
    assert catalogue.verify(store, prefix) == []
