"""Which stages of a run may start, which never will, and how the run has ended.

A stage starts when all that it needs is done and there is room for it. When one fails, whatever needs it is
skipped, and what does not need it still runs (as `make -k`): a long training is not lost to a failed side
branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlpipe.plan.plan import Plan
from mlpipe.store.runs import WAITS_FOR_STAGES, RunState, RunStatus
from mlpipe.submit.executor import Slots, StopRequest


@dataclass(frozen=True)
class Dag:
    """`needs`: each stage's, in the order of the pipeline's file."""

    needs: Mapping[str, Sequence[str]]

    def startable(self, run: RunState, names: Sequence[str]) -> list[str]:
        """Those of `names` that wait, and whose needs are done."""
        return [
            name
            for name in names
            if run.stages[name].state == "pending"
            and all(run.stages[need].state == "done" for need in self.needs[name])
        ]

    def spoiled(self, run: RunState, names: Sequence[str]) -> tuple[str, str] | None:
        """One of `names` that waits for a stage which has ended otherwise, and that stage."""
        for name in names:
            if run.stages[name].state == "pending":
                for need in self.needs[name]:
                    if run.stages[need].state in ("failed", "cancelled", "skipped"):
                        return name, need
        return None


def requests(plan: Plan) -> Slots:
    """A worker takes a core or a GPU; a command one core; what the driver does itself nothing to speak
    of."""
    if plan.kind.runs == "driver":
        return Slots(cpus=0, gpus=0)
    replicas = plan.launch.replicas
    nodes = plan.launch.num_nodes if replicas is None else replicas.fewest
    workers = nodes * plan.launch.nproc_per_node
    return Slots(cpus=0, gpus=workers) if plan.launch.device == "cuda" else Slots(cpus=workers, gpus=0)


def fits(plan: Plan, running: Sequence[Plan], capacity: Slots) -> bool:
    """Whether there is room beside those that run. One that requests more than there is runs alone (cores can
    be shared; `Executor.check` refused GPUs)."""
    taken = [requests(one) for one in (plan, *running)]
    cpus, gpus = sum(one.cpus for one in taken), sum(one.gpus for one in taken)
    return not running or (cpus <= capacity.cpus and gpus <= capacity.gpus)


def outcome_of(run: RunState, stop: StopRequest) -> tuple[RunStatus, str]:
    """State and message of a run in which nothing runs or may start."""
    failed = [name for name, stage in run.stages.items() if stage.state == "failed"]
    if failed:
        return "failed", f"failed: {', '.join(failed)}"
    if all(stage.state == "done" for stage in run.stages.values()):
        return "done", ""
    return ("cancelled", stop.why) if stop.kind is not None else ("running", WAITS_FOR_STAGES)
