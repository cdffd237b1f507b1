"""A folder store under kill -9 at every step of a save, full disks, read-only folders and planted pickles.

What must hold: every listed checkpoint reads back bit for bit, the last committed one is there, or one clear
error says what is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit import saver

from mlpipe._core.errors import StoreError
from mlpipe.store import catalogue, outputs, registry, runs
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit


@pytest.fixture
def save_and_die():
    """As `kit.killed_save` has it."""
    command = [sys.executable, "-m", "kit.killed_save"]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ask(*asked):
            print(json.dumps(asked), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask


def test_a_process_killed_at_any_file_operation_of_a_save_loses_nothing(tmp_path, capsys, save_and_die):
    store = FolderStore(tmp_path)
    for step in (1, 2):
        saver.save(store, step)
    _, total = save_and_die(str(tmp_path), 3, -1, "before")
    assert total >= 20
    committed = 3
    kills = losses = 0
    for when in ("before", "after"):
        killed, at = True, 0
        while killed:  # until the save ends before its `at`-th operation
            at += 1
            killed, _ = save_and_die(str(tmp_path), committed + 1, at, when)
            kills += killed
            steps = saver.check_all(store)
            losses += committed not in steps
            assert len(steps) >= 2
            committed = steps[-1]
            catalogue.prune(store, saver.STAGE, 2)  # every save finds the same to do
            store.sweep("", older_than_seconds=0)
        assert at > total / 2
    saver.save(store, committed + 1)
    assert saver.check_all(store) == [committed, committed + 1]
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*saver.BLOB_SIZES, "MANIFEST.json"}
    with capsys.disabled():
        print(f"\nfolder: {total} file operations numbered in a save, {kills} kills tried, {losses} losses")
    assert losses == 0


def test_what_is_written_outlives_a_power_cut(tmp_path, monkeypatch):
    """A name counts as durable once the folder that it stands in is synced after it was made, and data once
    its file is synced before it gets its name."""
    unsynced: set[Path] = set()
    synced: set[Path] = set()
    real = {name: getattr(os, name) for name in ("mkdir", "replace", "link", "fsync")}

    def mkdir(path, *more, **named):
        real["mkdir"](path, *more, **named)
        unsynced.add(Path(path))

    def publish(name):
        def wrapper(source, target):
            assert Path(source) in synced, f"{target} was published before its data was durable"
            real[name](source, target)
            unsynced.add(Path(target))

        return wrapper

    def fsync(fd):
        real["fsync"](fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced.add(path)
        unsynced.difference_update([name for name in unsynced if name.parent == path])

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "replace", publish("replace"))
    monkeypatch.setattr(os, "link", publish("link"))
    monkeypatch.setattr(os, "fsync", fsync)
    store = FolderStore(tmp_path / "store")
    store.put("a/b/replaced", b"1")
    assert not unsynced
    assert store.put_if_absent("a/c/linked", b"2")
    assert not unsynced
    etag = store.get_with_etag("a/c/linked")[1]
    assert store.put_if_match("a/c/linked", b"3", etag)
    assert not unsynced
    saver.save(store, 1)
    assert not unsynced


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(saver.__file__).parent.parent)}


def run_child(code, *arguments, prefix=(), preexec=None):
    """A Python process; StoreErrors it raises are printed as one line."""
    guarded = (
        "import sys\nfrom mlpipe._core.errors import StoreError\nfrom kit import saver\n"
        "from mlpipe.store.folder import FolderStore\nfrom pathlib import Path\n"
        f"try:\n    store = FolderStore(Path(sys.argv[1]))\n    {code}\n"
        "except StoreError as error:\n    print(error.kind, '|', error.message, '|', error.hint)\n"
    )
    return subprocess.run(
        [*prefix, sys.executable, "-c", guarded, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=preexec,
    )


def namespace():
    """Argv that runs a shell script as root of a private mount namespace, or None where that is forbidden."""
    own = ["unshare", "--mount", "--propagation", "private"]
    for prefix in (own, [*own, "--user", "--map-root-user"]):
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
                return [*prefix, "sh", "-c"]
    return None


def mounted(script, folder):
    """Argv prefix: runs `script` on the folder in a mount namespace, then what follows."""
    start = namespace()
    if start is None:
        pytest.skip("no mount namespaces here: run as root or allow user namespaces (util-linux unshare)")
    return [*start, f'd="$0"; {script}; exec "$@"', str(folder)]


def test_a_full_disk_is_one_clear_error_and_the_last_checkpoint_stays(tmp_path):
    code = (
        "saver.save(store, 1)\n"
        "    try: [saver.save(store, step, keep=99) for step in range(2, 99)]\n"
        "    finally: print(saver.check_all(store), sum(1 for p in Path(sys.argv[1]).rglob('.mlpipe-tmp*')))"
    )
    prefix = mounted('mount -t tmpfs -o size=4m tmpfs "$d"', tmp_path)
    done = run_child(code, tmp_path, prefix=prefix)
    listed, error = done.stdout.strip().splitlines()
    assert listed.startswith("[1, ")
    assert listed.endswith("] 0")  # no half-written file takes up room
    assert error.startswith("infrastructure | no space left on the device | free some space")


def test_a_file_size_limit_is_one_clear_error_and_the_last_checkpoint_stays(tmp_path):
    saver.save(FolderStore(tmp_path), 1)

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = run_child("saver.save(store, 2)", tmp_path, preexec=limit)
    assert done.stdout.startswith("infrastructure | the file would be larger than is allowed |"), done.stderr
    assert saver.check_all(FolderStore(tmp_path)) == [1]


def test_a_read_only_folder_reads_well_and_says_so_when_written(tmp_path):
    saver.save(FolderStore(tmp_path), 1)
    prefix = mounted('mount --bind "$d" "$d" && mount -o remount,ro,bind "$d"', tmp_path)
    for call in ("saver.save(store, 2)", "store.probe()", "store.open_log('l/x')", "store.delete(['a/b'])"):
        done = run_child(f"print(saver.check_all(store)); {call}", tmp_path, prefix=prefix)
        lines = done.stdout.strip().splitlines()
        assert lines[0] == "[1]", done.stderr
        if "delete" not in call:  # of what is absent: nothing to do
            assert lines[1].startswith("infrastructure | the file system is read-only | choose a folder")


def test_a_folder_that_belongs_to_somebody_else_is_one_clear_error(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir(mode=0o555)
    if os.getuid() == 0:
        for parent in [tmp_path, *tmp_path.parents][:3]:
            parent.chmod(0o755)
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(65534)
                with pytest.raises(StoreError, match="permission denied"):
                    FolderStore(folder).put("x", b"1")
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    else:
        with pytest.raises(StoreError, match="permission denied"):
            FolderStore(folder).put("x", b"1")


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def readers(store, tmp_path):
    yield lambda: runs.read_run(store, "r")
    yield lambda: runs.list_runs(store)
    yield lambda: runs.cancel_requested(store, "r")
    yield lambda: outputs.fetch_output(store, "runs/r/stages/corpus", tmp_path / "cache")
    yield lambda: registry.list_models(store)
    yield lambda: registry.show_model(store, "lm", "best")
    yield lambda: saver.check_all(store)
    for checkpoint in catalogue.list_checkpoints(store, saver.STAGE):
        yield lambda key=checkpoint.key: catalogue.verify(store, key)


def test_a_pickle_planted_under_any_name_runs_nothing(tmp_path):
    store = FolderStore(tmp_path / "store")
    made = tmp_path / "made"
    made.mkdir()
    (made / "f").write_bytes(b"x" * 100)
    runs.create_run(store, "r", "version: 1\n", "sha", ["train"], "local", {})
    runs.request_cancel(store, "r", "why")
    outputs.commit_output(store, "runs/r/stages/corpus", made)
    registry.promote(store, "lm", "best", saver.save(store, 1), {})
    marker = tmp_path / "it-ran"
    bomb = pickle.dumps(Bomb(marker))
    objects = [info.key for info in store.list("")]
    assert len(objects) >= 14
    for key in objects:
        sound = store.get(key)
        store.put(key, bomb)
        for read in readers(store, tmp_path):
            with contextlib.suppress(StoreError, AssertionError):
                read()
        store.put(key, sound)
        assert not marker.exists(), key
    assert saver.check_all(store) == [1]
    pickle.loads(bomb)  # the bomb is live
    assert marker.exists()


def test_a_pickle_inside_a_valid_checkpoint_is_only_bytes(tmp_path):
    store = FolderStore(tmp_path / "store")
    marker = tmp_path / "it-ran"
    bomb = pickle.dumps(Bomb(marker))
    prefix = catalogue.new_prefix(saver.STAGE, 1, 1)
    blob = catalogue.write_blob(store, f"{prefix}/model-0", [bomb])
    chunk = {"offset": [0], "shape": [len(bomb)], "blob": 0, "byte_offset": 0}
    manifest = {
        "format": 1, "step": 1, "attempt": 1, "uuid": "0", "time": 1.0, "code": {},
        "scalars": {"state": bomb.decode("latin-1")},
        "tensors": {"model.w": {"dtype": "uint8", "shape": [len(bomb)], "chunks": [chunk]}}, "blobs": [blob],
    }  # fmt: skip
    assert catalogue.commit(store, prefix, manifest)
    loaded = catalogue.load_manifest(store, prefix)
    assert json.dumps(loaded["scalars"])
    buffer = bytearray(len(bomb))
    catalogue.read_blob(store, loaded["blobs"][0], 0, buffer)
    assert bytes(buffer) == bomb
    assert catalogue.verify(store, prefix) == []
    assert not marker.exists()


def test_a_folder_that_is_deleted_while_it_is_written_into_is_a_fault_of_the_store(tmp_path):
    """Not bad input: what was written had its place when it began."""
    store = FolderStore(tmp_path / "store")

    def pieces():
        yield b"half"
        shutil.rmtree(tmp_path / "store")

    with pytest.raises(StoreError, match="somebody deleted the folder") as gone:
        store.put_pieces("runs/r/x", pieces())
    assert gone.value.kind == "infrastructure"
    with pytest.raises(StoreError, match="no such object") as missing:
        store.get("runs/r/x")
    assert missing.value.kind == "input"
