"""One real cluster for all files that a test process runs; skipped with a word on what to install."""

from __future__ import annotations

import fcntl
import os
import pickle
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from kit import run_ids
from kit.cluster import ServerMissingError, cluster
from kit.cluster_control import api_server
from kit.place import BUCKET, Place
from kit.undisturbed import Hold, Undisturbed


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of all processes of the session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cluster-ring"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def _claims(shared, monkeypatch):
    """All processes of the session see who has which run."""
    folder = shared / "run-ids"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(run_ids, "folder", folder)


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    """The cluster. A test that takes parts of it down brings them back."""
    disk = Path(tempfile.mkdtemp(prefix="mlpipe-cluster-", dir="/var/tmp"))  # gigabytes: not in memory
    try:
        with cluster(tmp_path_factory.mktemp("cluster"), disk=disk, kueue=True) as one:
            yield one
    except ServerMissingError as error:
        pytest.skip(str(error))
    finally:
        shutil.rmtree(disk, ignore_errors=True)


@pytest.fixture(scope="session")
def api_alone(tmp_path_factory):
    """An API server that nothing stands behind: what it admits is seen, and nothing runs."""
    try:
        with api_server(tmp_path_factory.mktemp("api") / "control") as control:
            yield control
    except ServerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def namespace(running):
    """A fresh one that enforces `restricted`."""
    return running.namespace(f"test-{secrets.token_hex(4)}")


@pytest.fixture(scope="session")
def place(running, tmp_path_factory):
    running.make_bucket(BUCKET)
    return Place(running, tmp_path_factory.mktemp("place"))


@pytest.fixture
def guarded(running, place, tmp_path):
    """Another namespace, under guard-rails for its image: `place`'s other tests bring images of their own."""
    one = Place(running, tmp_path)
    one.guard(running.image.name)
    return one


@pytest.fixture
def second(running):
    """Index of a second node: a new one where there is none, or a test has killed it."""
    if len(running.nodes) == 1 or not running.nodes[-1].processes[0].running:
        running.add_node()
    return len(running.nodes) - 1


@pytest.fixture
def occupied():
    """A file for as long as a command shall take; pods see the virtual environment."""
    path = Path(sys.prefix) / f"occupied-{secrets.token_hex(4)}"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def hold():
    one = Hold()
    yield one
    one.release()


@pytest.fixture(scope="session")
def undisturbed(place, hold, shared, tmp_path_factory):
    """The first process that asks trains it; the others wait, and have a file of their own."""
    spec, kept = place.spec("everywhere", model=hold.model), shared / "undisturbed"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_bytes(pickle.dumps(Undisturbed(tmp_path_factory.mktemp("local"), spec)))
    one: Undisturbed = pickle.loads(kept.read_bytes())
    one.spec = spec
    return one
