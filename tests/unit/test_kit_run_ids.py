"""No two tests of the cluster ring have a run of one name, whichever processes they are in."""

from __future__ import annotations

import pytest
from kit import run_ids

pytestmark = pytest.mark.unit


def test_a_run_that_another_test_has_is_refused_by_its_name(tmp_path, monkeypatch):
    submit = ["submit", tmp_path / "x.yaml", "--run-id", "urgent"]
    run_ids.claim_named(submit)  # outside of that ring nobody asks
    monkeypatch.setattr(run_ids, "folder", tmp_path)
    for test in ("a.py::one (setup)", "a.py::one (call)"):  # of the same test it goes on
        monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
        run_ids.claim_named(submit)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "b.py::two (call)")
    run_ids.claim_named(["resume", "urgent"])
    for argv in (submit, ["sweep", "x.yaml", "--sweep-id", "urgent"]):
        with pytest.raises(AssertionError, match=r"a\.py::one has a run 'urgent', too"):
            run_ids.claim_named(argv)
