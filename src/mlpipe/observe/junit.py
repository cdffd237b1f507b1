"""A run as a JUnit report: a test case a stage, which CI servers show and compare from build to build."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from mlpipe.store.base import Store
from mlpipe.store.runs import read_run

# what XML 1.0 cannot hold: https://www.w3.org/TR/xml/#charsets
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def build_junit(store: Store, run_id: str) -> str:
    """A stage that failed is a failure, or an error where it was not its own fault; one that was cancelled or
    never ran is skipped. Raises StoreError when there is no such run."""
    run = read_run(store, run_id)
    suite = ElementTree.Element("testsuite", name=run_id)
    for name, stage in run.stages.items():
        seconds = stage.ended - stage.started if stage.started and stage.ended else 0.0
        case = ElementTree.SubElement(
            suite, "testcase", classname=run.pipeline or "run", name=name, time=f"{max(seconds, 0.0):.3f}"
        )
        message = _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", stage.message)
        if stage.state == "failed":
            own = (stage.outcome or {}).get("kind") in (None, "failed", "input")
            ElementTree.SubElement(case, "failure" if own else "error", message=message)
        elif stage.state != "done":
            ElementTree.SubElement(case, "skipped", message=message or stage.state)
    counted = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for key, tag in counted.items():
        suite.set(key, str(sum(1 for _ in suite.iter(tag))))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, "unicode") + "\n"
