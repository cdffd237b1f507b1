"""`python -m mlpipe.train.preflight --plan PLAN --scratch DIR`: one a node, before its torchrun.

Leaves `preflight-result.json` in the scratch folder: the same on all machines, see `store/preflight.py`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
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
from mlpipe.train.preflight.start import RESULT
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
    gathered = scratch / f".{RESULT}"
    gathered.write_text(json.dumps(asdict(checked)))
    gathered.rename(scratch / RESULT)
    return 0


def _with_others(plan: Plan, limits: PreflightPlan, scratch: Path, report: Report) -> Checked:
    """What is slow or odd is looked at once more before anybody is blamed."""
    store = open_store(plan.store_url)
    gang = Gang(GangNode.from_environment().rendezvous, report.index, plan.launch.num_nodes, report.node)
    checked = Checked()
    for turn in range(2):
        if turn == 0:
            machine.look(plan, limits, scratch, store, report)
        else:
            machine.look_again(plan, limits, store, report)
        silent = _silent(gang, gang.exchange(f"alone-{turn}", asdict(report)))
        if silent.faults:
            return silent
        try:
            gang.look_at_links(report)
        except RuntimeError as error:
            raise TrainError(
                f"the preflight's links failed: {str(error).splitlines()[0]}",
                where=report.node,
                hint="a machine or a link went away while they were tried",
                kind="infrastructure",
            ) from None
        told = gang.exchange(f"together-{turn}", asdict(report))
        silent = _silent(gang, told)
        if silent.faults:
            return silent
        checked = judge(
            [_report(told[index]) for index in sorted(told)], limits, time.monotonic() - gang.began
        )
        if not checked.words:
            break
    gang.leave()
    return checked


def _silent(gang: Gang, told: dict[int, Any]) -> Checked:
    """Machines that were there and did not end their checks in time."""
    words = [f"did not end its checks within {CHECK_SECONDS:.0f} s"]
    silent = {node: list(words) for index, node in enumerate(gang.nodes) if index not in told}
    return Checked({one["node"]: one["figures"] for one in told.values()}, silent, [], CHECK_SECONDS)


def _report(plain: dict[str, Any]) -> Report:
    return Report(**{**plain, "links": {int(index): rate for index, rate in plain["links"].items()}})


if __name__ == "__main__":
    code = main_of_stage("mlpipe.train.preflight", __doc__, None, _run)
    sys.stdout.flush()
    os._exit(code)  # gloo aborts an interpreter that ends by itself
