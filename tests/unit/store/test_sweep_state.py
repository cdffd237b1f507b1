"""Which trial of a sweep is the best, in which order all of them stand, and where a store is."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlpipe._core.errors import StoreError
from mlpipe.store import sweeps
from mlpipe.store.base import check_key, check_prefix
from mlpipe.store.open import default_url, full_url, open_store
from mlpipe.store.runs import RunState, StageState

pytestmark = pytest.mark.unit
LONG = "/".join(["a" * 204] * 5)  # 1024 bytes


def sweep(mode: str | None, **stages: tuple[str, object]) -> RunState:
    """`stages`: state and value of the metric."""
    states = {
        name.removeprefix("t"): StageState(state, outcome={} if value is None else {"value": value})
        for name, (state, value) in stages.items()
    }
    meta = {"trials": {}} if mode is None else {"trials": {}, "metric": {"mode": mode}}
    return RunState(1, "s", "p", "local", "running", 0.0, 0.0, "", 1, states, None, "", meta)


TRIALS = {
    "t4": ("done", 0), "t0": ("done", 0.5), "t1": ("stopped", 0.5), "t2": ("failed", None),
    "t3": ("done", -1.0), "t5": ("stopped", 9.0), "t6": ("done", "odd"), "t7": ("done", -1.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "best", "order"), [("max", "0", "04375126"), ("min", "3", "37401526"), (None, "3", "37401526")]
)
def test_the_best_has_ended_and_is_first_of_all(mode, best, order):
    found = sweep(mode, **TRIALS)
    assert sweeps.best(found) == best
    assert "".join(sweeps.ranked(found)) == order
    assert sweeps.best(sweep(mode, t0=("running", 1.0))) is None


def test_a_sweep_is_a_run_of_trials_whose_values_are_in_the_order_of_its_file():
    found = sweep(None)
    assert found.is_sweep
    found.meta["trials"] = {"007": {"a": 1, "b": None, "c": 3}}
    assert list(sweeps.values_of(found, "007").items()) == [("a", 1), ("b", None), ("c", 3)]
    found.meta["over"] = ["c", "d", "a", "b"]
    assert list(sweeps.values_of(found, "007").items()) == [("c", 3), ("a", 1), ("b", None)]
    assert sweeps.values_of(found, "008") == {}
    del found.meta["trials"]
    assert not found.is_sweep
    assert sweeps.trial_name(7) == "007"
    assert sweeps.trial_run_id("s", "007") == "s-007"


def test_keys_have_the_shortest_names_that_tell_them_apart():
    keys = ["train.optimizer.lr", "other.lr", "train.seed", "a.b", "b"]
    assert sweeps.short_names(keys) == {
        "train.optimizer.lr": "optimizer.lr", "other.lr": "other.lr", "train.seed": "seed", "a.b": "a.b",
        "b": "b",
    }  # fmt: skip


def test_the_store_is_the_one_that_was_named_last(monkeypatch):
    monkeypatch.delenv("MLPIPE_STORE", raising=False)
    assert (default_url(None), default_url(None, "p"), default_url("s", "p")) == ("./runs", "p", "s")
    monkeypatch.setenv("MLPIPE_STORE", "e")
    assert (default_url(None, "p"), default_url("s", "p"), default_url("")) == ("e", "s", "e")


def test_a_url_is_a_folder_or_a_bucket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for url, place in (
        ("runs", tmp_path / "runs"),
        ("~/runs", "/home/me/runs"),
        ("file:///data/my%20runs", "/data/my runs"),
        ("file://localhost/data", "/data"),
    ):
        assert open_store(url).url == full_url(url) == str(place)
        assert open_store(url).local_path("a") == Path(place, "a")
    assert full_url("s3://bucket/x/") == "s3://bucket/x"  # asks for no keys
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    assert open_store("s3://bucket/x/").url == "s3://bucket/x"
    for url, words in (
        ("file://host/data", "names another host"),
        ("gs://bucket", "is not a store"),
        ("s3:/bucket", "is not a store"),
        ("S3://bucket", "is not a store"),
        ("", "is not a store"),
    ):
        with pytest.raises(StoreError, match=words) as caught:
            open_store(url)
        assert caught.value.kind == "input"


@pytest.mark.parametrize(
    ("key", "sound"),
    [
        *((key, True) for key in ("a", "a/b c/ü", "a" * 255, "ü" * 127, LONG, "a/.b", "..a", ".mlpipe")),
        *((key, False) for key in ("a" * 256, "ü" * 128, f"{LONG}a", "", "/a", "a/", "a//b", ".", "a/../b")),
        *((key, False) for key in ("a\\b", "a\nb", "a/.mlpipe-x", "\udcff")),
    ],
)
def test_a_key_leads_nowhere_else(key, sound):
    if sound:
        assert check_key(key) == key
        assert check_prefix(key) == check_prefix(f"{key}//") == f"{key}/"
        return
    for check in (check_key,) if key in ("", "a/") else (check_key, check_prefix):
        with pytest.raises(StoreError, match="is not a key") as caught:
            check(key)
        assert caught.value.kind == "input"
    assert check_prefix("") == check_prefix("/") == ""
