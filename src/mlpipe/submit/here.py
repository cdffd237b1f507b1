"""What a backend does unless it says otherwise: plans for this machine, a process on it for each stage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from mlpipe._core import environment
from mlpipe.plan.ahead import plan_ahead
from mlpipe.plan.plan import Plan
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit import process
from mlpipe.submit.detach import driver_argv
from mlpipe.submit.entries import check_entries
from mlpipe.submit.planning import scratch_folder
from mlpipe.submit.submission import Preview, Submission

Command = tuple[list[str], dict[str, str]]  # argv, and the environment that is added
_GRACE_SECONDS = 2.0  # for orphans of a stage whose plan cannot be read


def plans(submission: Submission, run_id: str, check_plan: Callable[[Plan], None]) -> list[Plan]:
    """Of all stages, ahead. Raises PlanError, what `check_plan` raises, and SubmitError for entries that are
    not there, as seen from the submission's folder."""
    pipeline, url = submission.pipeline, submission.store_url
    planned = [plan_ahead(pipeline, stage.name, url, run_id) for stage in pipeline.stages]
    for plan in planned:
        check_plan(plan)
    check_entries(planned, submission.folder)
    return planned


def preview(
    submission: Submission, check_plan: Callable[[Plan], None], command: Callable[[Plan, Path], Command]
) -> Preview:
    """The driver's argv, and of each stage the plan, and the `command` that it would start."""
    url, only = submission.store_url, submission.stage
    run_id = submission.run_id or f"{submission.pipeline.name[:40]}-RUN"
    stages = []
    for plan in plans(submission, run_id, check_plan):
        if only not in (None, plan.stage):
            continue
        argv: list[str] | None = None
        env: dict[str, str] | None = None
        if plan.kind.runs != "driver":
            scratch = scratch_folder(url, run_id) / f"{plan.stage}-{plan.attempt}"
            argv, env = command(plan, scratch)
        stages.append({"stage": plan.stage, "argv": argv, "env": env, "plan": plan.to_plain()})
    document = {"run_id": run_id, "store": url, "driver": driver_argv(url, run_id, only), "stages": stages}
    return Preview(document, json.dumps(document, indent=2))


def stage_command(plan: Plan, scratch: Path) -> Command:
    """argv of the process that runs a stage by its plan.json in `scratch`, as in a pod, and the environment
    that is added to ours. It ships its logs and leaves outcome.json in the store (`store/outcome.py`)."""
    argv = [sys.executable, "-P", "-m", plan.module]
    argv += ["--plan", str(scratch / "plan.json"), "--scratch", str(scratch)]
    return argv, {**plan.launch.env, environment.RUN_ID: plan.run_id, environment.STAGE: plan.stage}


def clear_orphans(store: Store, former: RunState) -> None:
    """Ends the processes of the driver before us that are on this machine."""
    if former.driver is None:
        return
    grace = _GRACE_SECONDS
    for name, stage in former.stages.items():
        key = f"{former.attempt_key(name)}/plan.json"
        if stage.state == "running" and store.exists(key):
            try:
                plan = Plan.from_json(store.get(key))
            except ValueError:  # of another version of mlpipe
                continue
            grace = max(grace, plan.launch.shutdown_seconds)
    process.clear(former.driver.holder, run_id=former.run_id, grace_seconds=grace)
