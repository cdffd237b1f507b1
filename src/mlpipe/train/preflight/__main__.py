"""`python -m mlpipe.train.preflight --plan PLAN --scratch DIR`: one a node, before its torchrun.

Prints what was found as JSON, the same on all machines: see `store/preflight.py`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlpipe._core import environment
from mlpipe._core.errors import TrainError
from mlpipe.plan.gang_node import GangNode
from mlpipe.plan.plan import Plan, PreflightPlan
from mlpipe.plan.process import main_of_stage
from mlpipe.store.open import open_store
from mlpipe.store.preflight import Checked
from mlpipe.train.preflight import machine
from mlpipe.train.preflight.gang import CHECK_SECONDS, Gang
from mlpipe.train.preflight.verdict import Report, judge


def _run(plan: Plan, path: Path, scratch: Path) -> int:
    limits = plan.launch.preflight
    if limits is None:
        raise ValueError("the plan asks for no preflight")
    node = GangNode.from_environment()
    report = Report(node.index, os.environ.get(environment.NODE_NAME) or socket.gethostname())
    began = time.monotonic()
    store = open_store(plan.store_url)
    if plan.launch.num_nodes == 1:
        machine.look(plan, limits, scratch, store, report)
        checked = judge([report], limits, time.monotonic() - began)
    else:
        checked = _with_others(plan, limits, scratch, report)
    print(json.dumps(asdict(checked)), flush=True)  # noqa: T201
    return 0


def _with_others(plan: Plan, limits: PreflightPlan, scratch: Path, report: Report) -> Checked:
    """Raises TrainError (infrastructure) when the others, or the links to them, are gone."""
    store = open_store(plan.store_url)
    try:
        gang = Gang(GangNode.from_environment().rendezvous, report.index, plan.launch.num_nodes, report.node)
        checked, silent = _look(
            gang, report, limits, lambda: machine.look(plan, limits, scratch, store, report), again=False
        )
        if checked.words and not silent and checked.seconds < CHECK_SECONDS / 3:
            checked, silent = _look(
                gang, report, limits, lambda: machine.look_again(plan, limits, store, report), again=True
            )
        gang.leave(silent)
    except RuntimeError as error:
        raise TrainError(
            f"the preflight lost the other machines: {str(error).splitlines()[0]}",
            where=report.node,
            hint="one of them, or a link, went away meanwhile; the first one's outcome says more",
            kind="infrastructure",
        ) from None
    return checked


def _look(
    gang: Gang, report: Report, limits: PreflightPlan, alone: Callable[[], None], *, again: bool
) -> tuple[Checked, list[int]]:
    """What all found, and who told nothing in time. What is slow or odd is looked at `again` before anybody
    is blamed. The seconds are the first machine's, by which all decide."""
    alone()
    told = gang.exchange(f"alone-{again}", [asdict(report), 0.0])
    if len(told) == gang.size:
        gang.look_at_links(report)
        told = gang.exchange(f"together-{again}", [asdict(report), time.monotonic() - gang.began])
    reports = [_report(told[index][0]) for index in sorted(told)]
    checked = judge(reports, limits, told[0][1] if 0 in told else CHECK_SECONDS)
    silent = [index for index in range(gang.size) if index not in told]
    for index in silent:
        words = f"did not end its checks within {CHECK_SECONDS:.0f} s"
        checked.faults.setdefault(gang.nodes[index], []).append(words)
    return checked, silent


def _report(plain: dict[str, Any]) -> Report:
    return Report(**{**plain, "links": {int(index): rate for index, rate in plain["links"].items()}})


if __name__ == "__main__":
    code = main_of_stage("mlpipe.train.preflight", __doc__, None, _run)
    sys.stdout.flush()
    os._exit(code)  # gloo aborts an interpreter that ends by itself
