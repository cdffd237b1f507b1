"""Committed or not there: what the catalogue lists always loads, verifies and stays."""

from __future__ import annotations

import copy
import itertools
import os
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe.cli.app import app
from mlpipe.cli.session import CliSession
from mlpipe.store import catalogue, leases, runs
from mlpipe.store import manifest as manifest_module
from mlpipe.store.blobs import read_blob, write_blob
from mlpipe.store.checksum import crc32c
from mlpipe.store.folder import FolderStore
from mlpipe.store.manifest import add_checksum, check, strip_checksum
from mlpipe.submit import backends
from mlpipe.submit.adopt import DriveRequest

pytestmark = pytest.mark.unit
STAGE = "runs/r/stages/train"


class CuttingStore(FolderStore):
    """A folder that wants its objects as small as S3 does, to test cutting without a server."""

    part_bytes = 64


@pytest.fixture(params=[FolderStore, CuttingStore])
def store(request, tmp_path):
    return request.param(tmp_path)


def manifest_of(prefix, blobs, step=1, attempt=1, size=100):
    return {
        "format": 1, "step": step, "attempt": attempt, "uuid": prefix[-8:], "time": 1.0,
        "code": {}, "scalars": {"position": 3},
        "tensors": {"model.w": {"dtype": "uint8", "shape": [size], "chunks": [
            {"offset": [0], "shape": [size], "blob": 0, "byte_offset": 0}]}},
        "blobs": blobs,
    }  # fmt: skip


def save(store, step, attempt=1, data=bytes(range(100)), commit=True, best=False):
    prefix = catalogue.new_prefix(STAGE, step, attempt)
    blob = write_blob(store, f"{prefix}/model-0", [data], block_bytes=16)
    if best:
        catalogue.mark_best(store, prefix, {"at": step})
    if commit:
        assert catalogue.commit(store, prefix, manifest_of(prefix, [blob], step, attempt, len(data)))
    return prefix


@given(data=st.data())
def test_any_range_of_a_blob_reads_back(store, data):
    whole = data.draw(st.binary(max_size=300))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    bounds = [0, *cuts, len(whole)]
    chunks = [bytearray(whole[a:b]) for a, b in itertools.pairwise(bounds)]
    blob = write_blob(store, "b/x", chunks, block_bytes=16)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    buffer = bytearray(end - start)
    read_blob(store, blob, start, buffer)
    assert bytes(buffer) == whole[start:end]
    store.delete([info.key for info in store.list("b")])


def test_nothing_is_listed_before_the_commit_and_the_highest_step_is_the_latest(store):
    save(store, 5, commit=False)
    assert catalogue.list_checkpoints(store, STAGE) == []
    assert catalogue.latest(store, STAGE) is None
    first, third, second = save(store, 1), save(store, 3), save(store, 2)
    again = save(store, 3, attempt=2)
    assert [item.key for item in catalogue.list_checkpoints(store, STAGE)] == [first, second, third, again]
    latest = catalogue.latest(store, STAGE)
    assert (latest.key, latest.step, latest.attempt) == (again, 3, 2)
    assert catalogue.verify(store, again) == []
    assert catalogue.load_manifest(store, again)["scalars"] == {"position": 3}


def test_commit_refuses_missing_and_short_blobs(store):
    prefix = catalogue.new_prefix(STAGE, 1, 1)
    blob = write_blob(store, f"{prefix}/model-0", [b"x" * 100], block_bytes=16)
    key = next(info.key for info in store.list(prefix))
    whole = store.get(key)
    store.put(key, whole[:-1])
    with pytest.raises(StoreError, match=r"has .* bytes, .* were written"):
        catalogue.commit(store, prefix, manifest_of(prefix, [blob]))
    store.delete([key])
    with pytest.raises(StoreError, match="is missing"):
        catalogue.commit(store, prefix, manifest_of(prefix, [blob]))
    assert catalogue.list_checkpoints(store, STAGE) == []


def test_a_second_commit_of_the_same_save_is_ours_another_is_not(store):
    prefix = catalogue.new_prefix(STAGE, 1, 1)
    blob = write_blob(store, f"{prefix}/model-0", [b"x" * 100], block_bytes=16)
    manifest = manifest_of(prefix, [blob])
    assert catalogue.commit(store, prefix, manifest)
    assert catalogue.commit(store, prefix, manifest)
    assert not catalogue.commit(store, prefix, {**manifest, "uuid": "other"})
    assert catalogue.load_manifest(store, prefix)["uuid"] == manifest["uuid"]


def test_prune_counts_committed_ones_and_spares_what_is_in_use(store):
    prefixes = {step: save(store, step) for step in (1, 2, 3, 4)}
    dead = save(store, 2, attempt=7, commit=False)
    in_flight = save(store, 3, attempt=8, commit=False)
    beside = save(store, 4, attempt=9, commit=False)  # perhaps under way
    newer = save(store, 9, commit=False)
    deleted = catalogue.prune(store, STAGE, keep=2, in_use=[prefixes[1], in_flight])
    assert set(deleted) == {prefixes[2], dead}
    left = {info.key.rsplit("/model-0", 1)[0] for info in store.list(STAGE) if "/model-0" in info.key}
    assert left == {prefixes[1], prefixes[3], prefixes[4], in_flight, beside, newer}
    for prefix in (prefixes[1], prefixes[3], prefixes[4]):
        assert catalogue.verify(store, prefix) == []
    with pytest.raises(StoreError, match="at least one") as caught:
        catalogue.prune(store, STAGE, keep=0)
    assert caught.value.kind == "input"


def test_prune_at_the_command_line_keeps_sound_ones_where_the_latest_is_none(tmp_path, monkeypatch):
    """It deleted what could be resumed, and kept what another hand had put there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = FolderStore(tmp_path / "store")
    runs.create_run(store, "r", "version: 1\n", "d", ["train"], "local", {})
    sound, forged = save(store, 1), save(store, 7)
    store.put(f"{forged}/MANIFEST.json", store.get(f"{sound}/MANIFEST.json"))
    prune = ["checkpoints", "prune", "r", "--keep", "1", "--store", store.url]
    done = CliRunner().invoke(app, prune, obj=CliSession())
    assert isinstance(done.exception, DamagedError)
    assert done.exception.hint == "mlpipe checkpoints discard r 7, then prune"
    assert [item.key for item in catalogue.list_checkpoints(store, STAGE)] == [sound, forged]
    catalogue.discard(store, forged)
    assert CliRunner().invoke(app, prune, obj=CliSession()).exception is None


@pytest.mark.parametrize("verb", [["prune", "r", "--keep", "1"], ["discard", "r", "1"]])
def test_nobody_begins_to_drive_a_run_whose_checkpoints_are_being_deleted(tmp_path, monkeypatch, verb):
    """A resume of that moment went on from one that was gone a moment later."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = FolderStore(tmp_path / "store")
    runs.create_run(store, "r", "version: 1\n", "d", ["train"], "local", {})
    died = runs.Lease("dead", "h", 1, 2.0, "boot pid:[1]", 1)  # whose processes a resume looks for
    stopped = runs.update_run(store, "r", lambda run: replace(run, state="failed", driver=died))
    save(store, 1), save(store, 2)
    delete, refused = catalogue._delete, []

    def deleting(*args):
        with pytest.raises(StoreError, match="checkpoints of run r are being deleted by process") as caught:
            leases.take_lease(store, "r", "a resume", 60.0)
        second = CliRunner().invoke(app, ["checkpoints", *verb, "--store", store.url], obj=CliSession())
        assert str(second.exception) == str(caught.value)
        with pytest.raises(StoreError) as submitted:  # it was taken for driven, and got no driver
            DriveRequest(backends.load("local"), store, "r", None, None, CliSession()).start_driver()
        assert str(submitted.value) == str(caught.value)
        refused.append(caught.value.kind)
        delete(*args)

    monkeypatch.setattr(catalogue, "_delete", deleting)
    done = CliRunner().invoke(app, ["checkpoints", *verb, "--store", store.url], obj=CliSession())
    assert (done.exception, refused) == (None, ["input"])
    assert runs.read_run(store, "r") == stopped, "nor is it said to have ended now"
    assert [item.step for item in catalogue.list_checkpoints(store, STAGE)] == [2]
    leases.take_lease(store, "r", "a resume", 60.0)  # and after it somebody does
    done = CliRunner().invoke(app, ["checkpoints", *verb, "--store", store.url], obj=CliSession())
    assert "being driven" in str(done.exception)


def test_where_nothing_is_committed_nothing_is_pruned_and_a_fence_is_at_the_start(store):
    for step in (0, 1):
        save(store, step, commit=False)
    assert catalogue.prune(store, STAGE, keep=1) == []
    assert catalogue.fence(store, STAGE, 1) == 0
    save(store, 1)
    assert catalogue.latest(store, STAGE) is None


def test_the_newest_that_was_marked_and_committed_is_the_best_and_stays(store):
    assert catalogue.best(store, STAGE) is None
    first = save(store, 1, best=True)  # the only one, and the newest of all
    assert catalogue.best(store, STAGE).key == first
    plain, marked = save(store, 2), save(store, 3, best=True)
    save(store, 4, commit=False, best=True)
    last = save(store, 5)
    found = catalogue.list_checkpoints(store, STAGE)
    assert {item.step: item.best for item in found} == {1: False, 2: False, 3: True, 5: False}
    for item in found:
        objects = {info.key: info for info in store.list(item.key)}
        assert item.size_bytes == sum(info.size_bytes for info in objects.values())
        assert item.time == objects[f"{item.key}/MANIFEST.json"].modified
    best = catalogue.best(store, STAGE)
    assert (best.key, catalogue.step_of(best.key)) == (marked, 3)
    assert catalogue.read_best(store, marked) == {"at": 3}
    assert catalogue.read_best(store, plain) == {}
    store.put("odd/BEST", b"[1]")
    assert catalogue.read_best(store, "odd") == {}
    catalogue.prune(store, STAGE, keep=1, in_use=[f"{plain}/"])
    kept = [item.key for item in catalogue.list_checkpoints(store, STAGE)]
    assert kept == [plain, marked, last]


def test_a_manifest_that_could_not_be_read_back_is_not_committed(store, monkeypatch):
    prefix = save(store, 1, commit=False)
    manifest = manifest_of(prefix, [write_blob(store, f"{prefix}/model-1", [b"x" * 100], block_bytes=16)])
    size = len(add_checksum(check(manifest, prefix, "m")))
    monkeypatch.setattr(catalogue, "MAX_BYTES", size - 1)
    with pytest.raises(StoreError, match="the manifest is larger than"):
        catalogue.commit(store, prefix, manifest)
    assert catalogue.latest(store, STAGE) is None
    monkeypatch.setattr(catalogue, "MAX_BYTES", size)
    assert catalogue.commit(store, prefix, manifest)
    assert catalogue.load_manifest(store, prefix)["step"] == 1


def test_discard_takes_one_away(store):
    bad, good = save(store, 2), save(store, 1)
    catalogue.discard(store, bad)
    assert catalogue.latest(store, STAGE).key == good
    assert list(store.list(bad)) == []


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
@settings(max_examples=60)
def test_any_flipped_bit_and_any_cut_is_found(tmp_path, position, bit, cut):
    store = CuttingStore(tmp_path / "s")
    prefix = save(store, 1)
    objects = list(store.list(prefix))
    whole = b"".join(store.get(info.key) for info in objects)
    position %= len(whole)
    for info in objects:
        if position < info.size_bytes:
            data = bytearray(store.get(info.key))
            data[position] ^= 1 << bit
            store.put(info.key, data[:position] if cut else data)
            break
        position -= info.size_bytes
    problems = catalogue.verify(store, prefix)
    assert problems
    assert info.key in problems[0]
    if "model-0" in info.key:
        blob = catalogue.load_manifest(store, prefix)["blobs"][0]
        with pytest.raises(StoreError, match=r"corrupt|ends at byte"):
            read_blob(store, blob, 0, bytearray(100))
    store.delete([info.key for info in store.list("")])


@pytest.mark.parametrize("method", ["get", "get_into"])
def test_a_store_that_goes_away_is_not_called_damage(store, method, monkeypatch):
    prefix = save(store, 1)

    def gone(*_, **__):
        raise StoreError("cannot be reached", where=store.url)

    monkeypatch.setattr(store, method, gone)
    with pytest.raises(StoreError, match="cannot be reached"):
        catalogue.verify(store, prefix)


# manifests from strangers

_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def _replaced(value, path, new):
    value = copy.deepcopy(value)
    owner = value
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = new
    return value


PREFIX = f"{STAGE}/checkpoints/step-000000001/1-00000000"
SOUND = manifest_of(PREFIX, [{"key": f"{PREFIX}/model-0", "size_bytes": 100, "block_bytes": 16,
                              "crc32c": [0] * 7, "part_bytes": 0}])  # fmt: skip


@given(data=st.data())
@settings(max_examples=300)
def test_a_manifest_with_anything_in_any_place_is_sound_or_one_clear_error(data):
    path = data.draw(st.sampled_from([path for path in _paths(SOUND) if path]))
    odd = st.sampled_from([-1, 2**63, 2**70, 1e308, "../../x", "/etc/passwd", f"{PREFIX}/../y", [], {}, True])
    manifest = _replaced(SOUND, path, data.draw(_JUNK | odd))
    try:
        sound = check(manifest, PREFIX, "m")
    except StoreError:
        return
    for blob in sound["blobs"]:
        assert os.path.normpath(blob["key"]) == blob["key"]
        assert blob["key"].startswith(PREFIX + "/")
    for tensor in sound["tensors"].values():
        for chunk in tensor["chunks"]:
            assert chunk["byte_offset"] <= sound["blobs"][chunk["blob"]]["size_bytes"]


_CHUNK = ("tensors", "model.w", "chunks", 0)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("format",), 2, "its format is not 1"),
        (("step",), True, "manifest: 'step' is not int"),
        (("step",), 2**63, "manifest: 'step' is out of range"),
        (("attempt",), None, "manifest: 'attempt' is not int"),
        (("uuid",), 7, "manifest: 'uuid' is not str"),
        (("time",), "now", "manifest: 'time' is not a number"),
        (("code",), [], "manifest: 'code' is not dict"),
        (("lineage",), "", "manifest: 'lineage' is not dict"),
        (("blobs",), SOUND["blobs"] * 2, "blob 1: its key stands twice"),
        (("blobs", 0), [], "blob 0 is not an object"),
        (("blobs", 0, "key"), "elsewhere", f"blob 0: 'elsewhere' is not under '{PREFIX}/'"),
        (("blobs", 0, "key"), f"{PREFIX}/MANIFEST.json", "is not under"),
        (("blobs", 0, "key"), f"{PREFIX}/../x", f"blob 0: '{PREFIX}/../x' is not a key"),
        (("blobs", 0, "block_bytes"), 0, "blob 0: 'block_bytes' is out of range"),
        (("blobs", 0, "part_bytes"), 8, "blob 0: 'part_bytes' does not fit"),
        (("blobs", 0, "crc32c"), [0] * 6, "blob 0: 'crc32c' has the wrong length"),
        (("blobs", 0, "crc32c"), [-1] * 7, "blob 0: 'crc32c' is not a list of sizes"),
        (("blobs", 0, "crc32c"), [2**32] * 7, "blob 0: 'crc32c' is out of range"),
        (("tensors", "model.w", "dtype"), "text", "tensor 'model.w': unknown dtype 'text'"),
        (
            ("tensors", "model.w", "chunks", 0, "offset"),
            [0, 0],
            "tensor 'model.w': 'offset' has the wrong length",
        ),
        ((*_CHUNK, "blob"), 1, "tensor 'model.w': there is no blob 1"),
        (
            ("tensors", "model.w", "chunks", 0, "shape"),
            [101],
            "tensor 'model.w': a chunk reaches out of its shape",
        ),
        (("tensors", "model.w", "chunks"), [], "tensor 'model.w': its chunks do not tile it"),
    ],
)
def test_what_is_not_sound_is_named(path, value, words):
    """In a prefix with or without its last '/'."""
    for prefix in (PREFIX, f"{PREFIX}/"):
        with pytest.raises(DamagedError, match=re.escape(words)) as caught:
            check(_replaced(SOUND, path, value), prefix, "m")
        assert caught.value.where == "m"
        assert caught.value.message.startswith("not a sound manifest: ")
        assert caught.value.hint == "it was altered or written by another program"
    check(_replaced(SOUND, ("step",), 2**63 - 1), PREFIX, "m")


def test_a_checksum_is_of_these_very_bytes():
    """Checkpoints of an older mlpipe stay readable, and those of a newer one by it."""
    assert add_checksum({"a": [1, 2.5]}) == b'{"crc32c":"%08x","manifest":{"a":[1,2.5]}}\n' % crc32c(
        b'{"a":[1,2.5]}'
    )
    with pytest.raises(DamagedError, match="corrupt: its checksum does not fit") as caught:
        strip_checksum(add_checksum({"a": 1}).replace(b"1}}", b"2}}"), "m")
    assert caught.value.where == "m"


@pytest.mark.parametrize(
    ("chunks", "sound"),
    [
        ([([0, 0], [2, 3]), ([2, 0], [2, 3])], True),
        ([([0, 0], [2, 2]), ([0, 2], [2, 1]), ([2, 0], [2, 2]), ([2, 2], [2, 1])], True),
        ([([0, 0], [4, 3]), ([4, 0], [0, 3])], True),  # a rank with nothing
        ([([0, 0], [2, 3])], False),
        ([([0, 0], [3, 3]), ([2, 0], [2, 3])], False),
        ([([0, 0], [2, 3]), ([0, 0], [2, 3])], False),
        ([([0, 0], [2, 3]), ([2, 0], [3, 3])], False),
        ([([0, 0], [2, 3]), ([1, 0], [2, 3])], False),  # as many rows as there are, one of them twice
        ([([0, 0], [2, 3]), ([2, 0], [2, 3]), ([2, 0], [2, 3])], False),
        ([], False),
    ],
)
def test_chunks_must_tile_their_tensor(chunks, sound):
    manifest = copy.deepcopy(SOUND)
    boxes = [{"offset": offset, "shape": shape, "blob": 0, "byte_offset": 0} for offset, shape in chunks]
    manifest["tensors"] = {"model.w": {"dtype": "float32", "shape": [4, 3], "chunks": boxes}}
    if sound:
        check(manifest, PREFIX, "m")
    else:
        with pytest.raises(StoreError, match=r"tile|reaches out"):
            check(manifest, PREFIX, "m")


def test_a_tensor_ends_where_its_blob_does():
    for size, sound in ((100, True), (101, False)):
        manifest = manifest_of(PREFIX, SOUND["blobs"], size=size)
        if sound:
            check(manifest, PREFIX, "m")
        else:
            with pytest.raises(StoreError, match="a chunk reaches out of its blob"):
                check(manifest, PREFIX, "m")


def test_a_manifest_has_a_largest_size(monkeypatch):
    data = add_checksum({"a": 1})
    monkeypatch.setattr(manifest_module, "MAX_BYTES", len(data))
    assert strip_checksum(data, "m") == {"a": 1}
    monkeypatch.setattr(manifest_module, "MAX_BYTES", len(data) - 1)
    with pytest.raises(StoreError, match="larger than"):
        strip_checksum(data, "m")


@given(data=st.binary(max_size=200))
def test_bytes_without_a_checksum_are_refused(data):
    with pytest.raises(StoreError):
        strip_checksum(data, "m")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":NaN}', '{"a":Infinity}', "9" * 5000, "{"])
def test_text_with_a_checksum_that_is_no_json_is_refused(text):
    forged = b'{"crc32c":"%08x","manifest":' % crc32c(text.encode()) + text.encode() + b"}\n"
    with pytest.raises(StoreError, match="not JSON"):
        strip_checksum(forged, "m")


def test_what_json_cannot_hold_gets_no_checksum():
    with pytest.raises(ValueError):
        add_checksum({"loss": float("nan")})


def test_what_a_given_up_attempt_commits_later_does_not_count(store):
    kept = save(store, 4, attempt=1)
    save(store, 6, attempt=1, commit=False)
    assert catalogue.fence(store, STAGE, 1) == 4
    late = save(store, 8, attempt=1)
    assert catalogue.latest(store, STAGE).key == kept
    ours = save(store, 6, attempt=2)
    assert [found.key for found in catalogue.list_checkpoints(store, STAGE)] == [kept, ours]
    assert catalogue.fence(store, STAGE, 1) == 6  # by another driver, later: the first one stays
    between = save(store, 5, attempt=1)
    assert between not in [found.key for found in catalogue.list_checkpoints(store, STAGE)]
    assert [found.key for found in catalogue.list_checkpoints(store, STAGE)] == [kept, ours]
    catalogue.prune(store, STAGE, 1)
    assert [found.key for found in catalogue.list_checkpoints(store, STAGE)] == [ours]
    assert store.list(late)  # a save of a higher step, perhaps under way for all that prune knows
    assert catalogue.fence(store, STAGE, 3) == 6


def test_one_that_is_given_up_counts_no_more_and_is_pruned_below_a_later_one(store):
    kept, damaged = save(store, 4), save(store, 6)
    catalogue.give_up(store, damaged, "damaged")
    assert catalogue.latest(store, STAGE).key == kept
    assert catalogue.prune(store, STAGE, 1) == []
    again = save(store, 8, attempt=2)
    assert set(catalogue.prune(store, STAGE, 1)) == {kept, damaged}
    assert [found.key for found in catalogue.list_checkpoints(store, STAGE)] == [again]


def test_a_missing_and_a_short_object_are_damage_before_a_byte_is_read(store):
    prefix = save(store, 1)
    manifest = catalogue.load_manifest(store, prefix)
    catalogue.check_whole(store, prefix, manifest)
    key = next(info.key for info in store.list(prefix) if "/model-0" in info.key)
    store.put(key, store.get(key)[:-1])
    with pytest.raises(DamagedError, match=r"has .* bytes, .* were written"):
        catalogue.check_whole(store, prefix, manifest)
    store.delete([key])
    with pytest.raises(DamagedError, match="is missing"):
        catalogue.check_whole(store, prefix, manifest)
