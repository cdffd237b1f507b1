"""A run as a JUnit report: what failed, whose fault it was, and no text of a user that XML cannot hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlpipe.observe.junit import build_junit
from mlpipe.store import runs
from mlpipe.store.folder import FolderStore
from mlpipe.store.runs import StageState

pytestmark = pytest.mark.unit
STATES = {
    "a": StageState("done", 1, started=10.0, ended=12.5, outcome={"kind": None}),
    "own": StageState("failed", 1, message='exit 7 <]]> "&\x00', outcome={"kind": "failed"}),
    "lost": StageState("failed", 1, message="a node was lost", outcome={"kind": "infrastructure"}),
    "stopped": StageState("cancelled", 1, message="by anna"),
    "never": StageState("skipped", message="needs 'own'"),
    "waits": StageState(),
}


def test_each_stage_is_a_case(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    names = list(STATES)[::-1]  # not sorted
    runs.create_run(store, "r", "x: 1\n", "d", names, "local", {"pipeline": "p"})
    runs.update_run(store, "r", lambda run: replace(run, stages=STATES))
    suite = ElementTree.fromstring(build_junit(store, "r"))
    assert suite.attrib == {"name": "r", "tests": "6", "failures": "1", "errors": "1", "skipped": "3"}
    found = {case.get("name"): [(child.tag, child.get("message")) for child in case] for case in suite}
    assert list(found) == names
    assert found == {
        "a": [],
        "own": [("failure", 'exit 7 <]]> "&\N{REPLACEMENT CHARACTER}')],
        "lost": [("error", "a node was lost")],
        "stopped": [("skipped", "by anna")],
        "never": [("skipped", "needs 'own'")],
        "waits": [("skipped", "pending")],
    }
    assert suite.find("testcase[@name='a']").get("time") == "2.500"  # type: ignore[union-attr]
