"""Where a training goes on: at the newest of its checkpoints that is sound for every rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mlpipe._core.errors import DamagedError, TrainError
from mlpipe._core.records import Fallback
from mlpipe.plan.plan import Plan
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.store import catalogue
from mlpipe.store.base import Store
from mlpipe.store.manifest import Manifest
from mlpipe.store.runs import append_event
from mlpipe.train.checkpoint import Checkpointer
from mlpipe.train.optim.learning_rate import learning_rate
from mlpipe.train.optim.update import GROUPS, ISLANDS, Update, after_load
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.reshard import load
from mlpipe.train.session import Session
from mlpipe.train.shards import LocalShard
from mlpipe.train.world import World

_log = logging.getLogger(__name__)


@dataclass
class Position:
    """Where the run stands: updates done and samples consumed (which differ when the batch changed). `notes`:
    what a person should know of the way there. `streams`: where each part of a streaming data set stands.
    `scalars`: all that the checkpoint says besides tensors."""

    step: int = 0
    samples: int = 0
    resumed_from: str | None = None
    notes: list[str] = field(default_factory=list)
    streams: list[Any] | None = None
    scalars: dict[str, Any] = field(default_factory=dict)


def resume(
    session: Session,
    checkpointer: Checkpointer,
    parallel: ParallelizedModel,
    update: Update,
    coordination_store: dist.Store,
) -> Position:
    """From the stage's newest sound checkpoint, the same on every rank: rank 0 lists them, and one that is
    damaged for any rank is damaged for all. Those that were passed over count no more.

    Raises TrainError if there are checkpoints and none is sound.
    """
    name = f"resume/{session.plan.attempt}/{session.process.restart}"
    if session.world.rank == 0:
        checkpoints = catalogue.list_checkpoints(session.store, session.plan.stage_key)
        coordination_store.set(name, json.dumps([item.key for item in reversed(checkpoints)]))
    keys: list[str] = json.loads(coordination_store.get(name))
    damages: list[str] = []

    def state_of(manifest: Manifest) -> list[LocalShard]:
        part = session.plan.work.training
        is_local = part.islands is not None
        load_optimizer(part.optimizer, update, manifest["scalars"], session.plan.run_id, is_local)
        if parallel.kept is not None:
            parallel.kept.load_scalars(manifest["scalars"].get("kept", {}))
        return stored(parallel, update)

    for index, key in enumerate(keys):
        session.watchdog.beat(f"loading {key}", 0)
        manifest, damage = load_or_damage(session.store, key, state_of)
        if damage:
            coordination_store.set(f"{name}/damage-{index}", damage)
        num_damaged = torch.tensor([float(bool(damage))])
        dist.all_reduce(num_damaged)
        if manifest is not None and not num_damaged.item():
            break
        damages.append(coordination_store.get(f"{name}/damage-{index}").decode())
        _log.warning("the checkpoint %s is damaged: %s", key, damages[-1])
    else:
        if keys:
            raise _none_is_sound(session.plan, damages)
        return Position()
    scalars = manifest["scalars"]
    after_load(update)
    if parallel.kept is not None:
        parallel.kept.after_load()
    parallel.after_step()
    checkpointer.in_use.add(key)
    notes = _schedule_notes(session.plan.work.training, scalars)
    if damages:
        notes.insert(0, _fall_back(session, keys[: len(damages)], damages, scalars["step"]))
    return Position(scalars["step"], scalars["samples"], key, notes, scalars.get("streams"), scalars)


def load_or_damage(
    store: Store, key: str, tensors: Callable[[Manifest], list[LocalShard]]
) -> tuple[Manifest | None, str]:
    """The manifest, with the `tensors` for it filled; or what of the checkpoint is damaged, in words."""
    try:
        manifest = catalogue.load_manifest(store, key)
        catalogue.check_whole(store, key, manifest)
        load(store, key, manifest, tensors(manifest))
    except DamagedError as error:
        return None, str(error)
    return manifest, ""


def _fall_back(session: Session, keys: list[str], damages: list[str], step: int) -> str:
    """What was lost, in words; rank 0 leaves them in the events, and sees to it that the damaged ones count
    no more: else they would push the sound ones out when old checkpoints are deleted."""
    newest = catalogue.step_of(keys[0])
    text = (
        f"went back to the checkpoint of step {step}: that of step {newest} is damaged ({damages[0]}); "
        f"{newest - step} steps are computed again"
    )
    _log.warning(text)
    if session.world.rank == 0:
        for key, damage in zip(keys, damages, strict=True):
            catalogue.give_up(session.store, key, f"damaged: {damage}")
        append_event(session.store, session.plan.attempt_key, Fallback(step=step, given_up=keys, why=damages))
    return text


def _none_is_sound(plan: Plan, damages: list[str]) -> TrainError:
    error = TrainError(
        f"no checkpoint is sound, the newest of {len(damages)}: {damages[0]}",
        where=plan.stage_key,
        hint=f"see what is left: mlpipe checkpoints verify {plan.run_id}; "
        f"begin anew: mlpipe resume {plan.run_id} --from-step 0",
        kind="infrastructure",
    )
    error.fatal = True  # type: ignore[attr-defined]
    return error


def _schedule_notes(plan: TrainPlan | None, scalars: dict[str, Any]) -> list[str]:
    """Of another number of steps, over which the learning rate's schedule stretches."""
    step, before = scalars["step"], scalars.get("steps")
    if plan is None or before in (None, plan.steps) or plan.optimizer.schedule == "constant":
        return []
    old, new = (learning_rate(plan.optimizer, step + 1, steps) for steps in (before, plan.steps))
    return [
        f"schedule {plan.optimizer.schedule} spans {plan.steps} steps now, {before} before: "
        f"the learning rate of step {step + 1} is {new:.3g}, not {old:.3g}"
    ]


def stored(parallel: ParallelizedModel, update: Update) -> list[LocalShard]:
    """All tensors of a checkpoint. LossModule's one child is `model`, hence the names `model.<fqn>`."""
    states = update.state()
    instead = {state.name for state in states}
    kept = parallel.kept.state() if parallel.kept is not None else []
    return [*(shard for shard in parallel.stored() if shard.name not in instead), *states, *kept]


def optimizer_scalars(plan: OptimizerPlan, of_stages: list[dict[str, Any]]) -> dict[str, Any]:
    """What a checkpoint says of its optimizer besides tensors."""
    return {"name": plan.name or plan.entry, "scalars": joined(of_stages)}


def scalars_of_stages(update: Update, world: World) -> list[dict[str, Any]]:
    """By stage of a pipeline. Every rank calls it."""
    of_stages = [update.scalars()] * world.mesh.pp
    if world.mesh.pp > 1:
        dist.all_gather_object(of_stages, of_stages[0], group=world.group("pp"))
    return of_stages


def joined(parts: list[Any]) -> Any:
    """Values of JSON as one. Raises TrainError (input) for lists of several lengths: groups of an optimizer
    of one's own that depend on which parameters it is given."""
    first = parts[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: joined([part[key] for part in parts if key in part]) for key in keys}
    if not isinstance(first, list):
        return first
    if len({len(part) for part in parts}) > 1:
        raise TrainError(
            f"the optimizer has {', '.join(str(len(part)) for part in parts)} groups of parameters on the "
            "stages of the pipeline",
            hint="make as many groups of whatever parameters it is given, perhaps empty ones, or make pp 1",
            kind="input",
        )
    return [joined(list(items)) for items in zip(*parts, strict=True)]


def load_optimizer(
    plan: OptimizerPlan, update: Update, scalars: dict[str, Any], run_id: str, is_local: bool
) -> None:
    """From what `optimizer_scalars` gave. Before there was a choice it was AdamW, with a step an update."""
    ours = plan.name or plan.entry
    saved = scalars.get("optimizer", {"name": "adamw", "scalars": {"num_updates": scalars["step"]}})
    if saved["name"] != ours:
        raise TrainError(
            f"the checkpoint has the states of optimizer {saved['name']}, not of {ours}",
            where=f"step {scalars['step']}",
            hint=f"go on with {saved['name']}, or begin anew: mlpipe resume {run_id} --from-step 0",
            kind="input",
        )
    if GROUPS in saved["scalars"] and not plan.groups:
        raise TrainError(
            "the checkpoint's optimizer had groups of parameters, there are none now",
            where=f"step {scalars['step']}",
            hint=f"go on with its `groups`, or begin anew: mlpipe resume {run_id} --from-step 0",
            kind="input",
        )
    if ISLANDS in saved["scalars"] and not is_local:
        raise TrainError(
            "the checkpoint's ranks had weights of their own, of which there is one now",
            where=f"step {scalars['step']}",
            hint="go on with its `update`, or start from its weights in a new run: "
            f"`init_from: {{run: {run_id}}}`",
            kind="input",
        )
    update.load_scalars(saved["scalars"])
