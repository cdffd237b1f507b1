"""`python -m mlpipe.train.preflight --plan PLAN --scratch DIR`: one a node, before its torchrun.

Prints what was found as JSON, the same on all machines: see `store/preflight.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlpipe._core.errors import TrainError
from mlpipe.plan.gang_node import GangNode
from mlpipe.plan.plan import Plan, PreflightPlan
from mlpipe.plan.process import main_of_stage
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.preflight import Checked, Ranked
from mlpipe.train.outcome import node_name
from mlpipe.train.preflight import machine
from mlpipe.train.preflight.gang import CHECK_SECONDS, MOST_PAIRS, Gang
from mlpipe.train.preflight.remembered import SPEEDS, remember
from mlpipe.train.preflight.start import at
from mlpipe.train.preflight.verdict import Report, chosen, judge, slow_links, slow_machines


def _run(plan: Plan, path: Path, scratch: Path) -> int:
    limits = plan.launch.preflight
    if limits is None:
        raise ValueError("the plan asks for no preflight")
    node = GangNode.from_environment()
    report = Report(node.index, node_name())
    began = time.monotonic()
    store = open_store(plan.store_url)
    ranked: Ranked | None = None
    if plan.launch.num_nodes == 1:
        machine.look(plan, limits, scratch, store, report)
        checked = judge([report], limits, time.monotonic() - began)
    else:
        checked, ranked = _with_others(plan, limits, scratch, report)
    told = {"checked": asdict(checked), "ranked": None if ranked is None else asdict(ranked)}
    print(json.dumps(told), flush=True)  # noqa: T201
    if not checked.names(report.node) and not any(report.busy.get(name) for name in SPEEDS):
        remember(plan, report)
    return 0


def _with_others(
    plan: Plan, limits: PreflightPlan, scratch: Path, report: Report
) -> tuple[Checked, Ranked | None]:
    """With who gets ranks, where there may be spares. Raises TrainError (infrastructure) when the others, or
    the links to them, are gone."""
    store, node = open_store(plan.store_url), GangNode.from_environment()
    try:
        size = node.num_machines or plan.launch.num_nodes
        with Gang(node.rendezvous, report.index, size, report.node) as gang:
            return _in_gang(gang, plan, limits, scratch, store, report)
    except RuntimeError as error:
        raise TrainError(
            f"the preflight lost the other machines: {str(error).splitlines()[0]}",
            where=report.node,
            hint="one of them, or a link, went away meanwhile; the first one's outcome says more, as "
            "does NCCL if the stage's env has NCCL_DEBUG: INFO",
            kind="infrastructure",
        ) from None


def _in_gang(
    gang: Gang, plan: Plan, limits: PreflightPlan, scratch: Path, store: Store, report: Report
) -> tuple[Checked, Ranked | None]:
    rendezvous = GangNode.from_environment().rendezvous
    addresses = gang.addresses(rendezvous) if limits.spares else []
    _alone(report, lambda: machine.look(plan, limits, scratch, store, report))
    reports = _together(gang, report, "alone")
    if len(reports) == gang.size:
        at(scratch, "the links between machines")
        sound = [one.index for one in reports if not one.faults]  # with others' GPUs it might hang
        gang.look_at_links(report, None, sound if all(one.on_gpus for one in reports) else None)
        reports = _together(gang, report, "together")
    checked = judge(reports, limits, gang.seconds)
    if (checked.words or checked.busy) and len(reports) == gang.size and gang.seconds < CHECK_SECONDS / 2:
        reports = _again(
            gang,
            report,
            reports,
            limits,
            lambda: _alone(report, lambda: machine.look_again(plan, limits, store, report)),
        )
        checked = judge(reports, limits, gang.seconds)
    silent = sorted(set(range(gang.size)) - {one.index for one in reports})
    for index in silent:
        words = gang.lost.get(index, f"did not end its checks within {CHECK_SECONDS:.0f} s")
        checked.faults.setdefault(gang.nodes[index], []).append(words)
    ranked = _ranked(plan, rendezvous, addresses, chosen(reports, checked, plan.launch.num_nodes))
    gang.leave(silent)
    return checked, ranked


def _alone(report: Report, look: Callable[[], None]) -> None:
    """What fails here is this machine's: torch tells most faults of a GPU by RuntimeErrors, as it does of
    peers that are gone. Raises TrainError (infrastructure)."""
    try:
        look()
    except RuntimeError as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainError(first, where=report.node, kind="infrastructure") from error


def _ranked(plan: Plan, rendezvous: str, addresses: list[str], indices: list[int]) -> Ranked | None:
    """None: there are no spares, or too few machines passed."""
    if not addresses or len(indices) < plan.launch.num_nodes:
        return None
    if indices[0] == 0:  # under the name by which the others have found it
        return Ranked(indices, rendezvous)
    return Ranked(indices, f"{addresses[indices[0]]}:{rendezvous.rpartition(':')[2]}")


def _again(
    gang: Gang, report: Report, reports: list[Report], limits: PreflightPlan, alone: Callable[[], None]
) -> list[Report]:
    """What is slow is looked at again before anybody is blamed, while the others do nothing."""
    if report.index in {slow.index for slow, _, _ in slow_machines(reports, limits)}:
        alone()
    reports = _together(gang, report, "alone-again")
    if len(reports) == gang.size:
        pairs = slow_links(reports, limits)
        gang.look_at_links(report, pairs if len(pairs) <= MOST_PAIRS else None)
        reports = _together(gang, report, "together-again")
    return reports


def _together(gang: Gang, report: Report, key: str) -> list[Report]:
    """Everybody's, of those who told it in time."""
    told = gang.exchange(key, asdict(report))
    return [_report(told[index]) for index in sorted(told)]


def _report(plain: dict[str, Any]) -> Report:
    return Report(**{**plain, "links": {int(index): rate for index, rate in plain["links"].items()}})


if __name__ == "__main__":
    sys.stdout = os.fdopen(os.dup(1), "w")  # to the launcher alone: NCCL's log goes to descriptor 1
    os.dup2(2, 1)
    code = main_of_stage("mlpipe.train.preflight", __doc__, None, _run)
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)  # NCCL's last lines
    os._exit(code)  # gloo aborts an interpreter that ends by itself
