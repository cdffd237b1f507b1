"""What may start beside what, and what has come of a run, whatever walks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlpipe.kinds.command.plan import CommandPlan
from mlpipe.kinds.promote.plan import PromotePlan
from mlpipe.plan.plan import Launch, Plan
from mlpipe.store.runs import RunState, StageState
from mlpipe.submit.dag import Dag, fits, outcome_of, requests
from mlpipe.submit.executor import Slots, StopRequest

pytestmark = pytest.mark.unit

LAUNCH = Launch(
    num_nodes=1, nproc_per_node=3, max_restarts=0, device="cpu", argv=(), env={}, timeout_seconds=None,
    shutdown_seconds=10.0, metrics_port=None,
)  # fmt: skip
ON_CPUS = Plan(1, "run", "test", "one", 1, "store", "digest", "digest", LAUNCH, CommandPlan(("true",)))
ON_GPUS = replace(ON_CPUS, launch=LAUNCH._replace(device="cuda"))
OF_THE_DRIVER = replace(ON_GPUS, work=PromotePlan("one", None, "lm", None))


def run_of(**states: Any) -> RunState:
    stages = {name: StageState(state) for name, state in states.items()}
    return RunState(1, "run", "test", "local", "running", 0.0, 0.0, "digest", 0, stages, None, "", {})


def test_a_worker_takes_a_core_or_a_gpu_and_what_the_driver_does_neither() -> None:
    asked = [requests(plan) for plan in (ON_CPUS, ON_GPUS, OF_THE_DRIVER)]
    assert asked == [Slots(cpus=3, gpus=0), Slots(cpus=0, gpus=3), Slots(cpus=0, gpus=0)]


@pytest.mark.parametrize(
    ("running", "capacity", "room"),
    [
        ([ON_CPUS], Slots(cpus=6, gpus=0), True),
        ([ON_CPUS], Slots(cpus=5, gpus=9), False),
        ([ON_GPUS], Slots(cpus=3, gpus=3), True),
        ([ON_CPUS, OF_THE_DRIVER], Slots(cpus=6, gpus=0), True),
        ([OF_THE_DRIVER], Slots(cpus=2, gpus=0), False),
        ([], Slots(cpus=2, gpus=0), True),  # alone it is served, however little there is
    ],
)
def test_stages_run_side_by_side_where_there_is_room(running: Any, capacity: Slots, room: bool) -> None:
    assert fits(ON_CPUS, running, capacity) is room


@pytest.mark.parametrize("state", ["failed", "cancelled", "skipped"])
def test_a_stage_whose_need_has_ended_otherwise_is_spoiled(state: str) -> None:
    dag = Dag({"a": (), "b": (), "c": ("a", "b")})
    assert dag.spoiled(run_of(a="done", b=state, c="pending"), ["a", "b", "c"]) == ("c", "b")
    assert dag.spoiled(run_of(a="done", b="running", c="pending"), ["a", "b", "c"]) is None
    assert dag.spoiled(run_of(a="done", b=state, c="skipped"), ["a", "b", "c"]) is None


def test_what_came_of_a_run_names_all_that_failed() -> None:
    stop = StopRequest()
    assert outcome_of(run_of(a="failed", b="done", c="failed"), stop) == ("failed", "failed: a, c")
    assert outcome_of(run_of(a="done", b="done"), stop) == ("done", "")
    assert outcome_of(run_of(a="done", b="pending"), stop)[0] == "running"
    stop.request("cancelled", "asked to")
    assert outcome_of(run_of(a="done", b="pending"), stop) == ("cancelled", "asked to")
