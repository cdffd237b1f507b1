"""How a run stands, as a document for machines, as text for people, and as an exit code."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core import environment
from mlpipe._core.errors import EXIT_CODES, ErrorKind, MlpipeError
from mlpipe._core.printable import as_argument
from mlpipe._core.units import format_seconds
from mlpipe.store.open import DEFAULT_STORE, full_url

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.catalogue import Checkpoint
    from mlpipe.store.runs import RunState, StageState

_FEW = 4  # overrides: a smoke test has more
_COLOURS = {"done": "green", "failed": "red", "cancelled": "yellow", "skipped": "yellow", "running": "cyan"}


def exit_code(run: RunState, only: str | None = None) -> int:
    """Of the verb that waited for `run` (or for its stage `only`)."""
    kinds: dict[str, ErrorKind] = {"done": "bug", "cancelled": "cancelled", "failed": "failed"}
    if run.state == "done" or (only is not None and run.stages[only].state == "done"):
        return 0
    if only is not None and run.stages[only].state == "cancelled":
        return EXIT_CODES["cancelled"]
    first = [run.stages[only]] if only is not None else []
    for stage in [*first, *run.stages.values()]:
        if stage.state == "failed":
            return EXIT_CODES[(stage.outcome or {}).get("kind") or "failed"]
    return EXIT_CODES[kinds.get(run.state, "infrastructure")]


def colour(state: str) -> str:
    """The state, coloured where the terminal takes colours."""
    return click.style(state, fg=_COLOURS.get(state))


def describe(stage: StageState) -> str:
    """`done in 4.1s`, `failed after 3.0s: exited with code 1`, in colour."""
    from mlpipe.api.watch import in_words

    return in_words(stage, colour)


def document(store: Store, run: RunState) -> dict[str, Any]:
    """run.json, with where it lies and the last checkpoint of each stage that has one."""
    fields = asdict(run)
    fields["store"] = store.url
    for name, stage in fields["stages"].items():
        checkpoint = last_checkpoint(store, run, name)
        stage["last_checkpoint"] = asdict(checkpoint) if checkpoint else None
    return fields


def last_checkpoint(store: Store, run: RunState, stage: str) -> Checkpoint | None:
    """The newest committed one of a stage, if there is any."""
    from mlpipe.store import catalogue

    return catalogue.latest(store, f"runs/{run.run_id}/stages/{stage}")


def stage_lines(run: RunState) -> list[str]:
    """A line for each stage: its name and how it stands."""
    width = max(len(name) for name in run.stages)
    return [f"{name.ljust(width)}  {describe(stage)}" for name, stage in run.stages.items()]


def summary(store: Store, run: RunState, report: str | None) -> str:
    """What came out, where it lies, and what to try next."""
    took = format_seconds(run.updated - run.created)
    rows = [("run", f"{run.run_id}, {colour(run.state)} after {took}")]
    failures = [(name, stage.message) for name, stage in run.stages.items() if stage.state == "failed"]
    for stage in run.stages.values():
        result = stage.outcome or {}
        metrics = result.get("metrics") or {}
        if "val_loss" in metrics:
            bits = metrics.get("val_bits_per_byte")
            extra = f", {bits:.3f} bits per byte" if bits is not None else ""
            rows.append(("validation loss", f"{metrics['val_loss']:.4f}{extra}"))
        if result.get("sample"):
            rows.append(("sample", " ".join(str(result["sample"]).split())[:200]))
        if "version" in result:
            where = f"models/{result['model']}/{result['version']}"
            rows.append(("model", f"{result['model']} version {result['version']}, {store.url}/{where}"))
    if report is not None:
        rows.append(("report", report))
    rows += [(f"failed: {name}", message) for name, message in failures]
    width = max(len(label) for label, _ in rows)
    lines = [f"{label.ljust(width)}  {text}" for label, text in rows]
    return "\n".join([*lines, "", "next:", *(f"  {command}" for command in _next(store, run))])


def store_option(store: Store) -> str:
    """Behind a command that is shown: ` --store URL`; empty where `mlpipe list` in this shell needs none."""
    default = os.environ.get(environment.STORE) or DEFAULT_STORE
    return "" if store.url == full_url(default) else f" --store {shlex.quote(store.url)}"


def _next(store: Store, run: RunState) -> list[str]:
    from mlpipe.submit import backends

    where = store_option(store)
    if run.state == "failed":
        return [
            f"mlpipe logs {run.run_id}{where}",
            f"mlpipe resume {run.run_id}{where}    # when the cause is gone",
        ]
    if run.state != "done":
        return [f"mlpipe resume {run.run_id}{where}"]
    if any((stage.outcome or {}).get("step") for stage in run.stages.values()):
        trained = next(name for name, stage in run.stages.items() if (stage.outcome or {}).get("step"))
        loads = "    # what transformers loads" if _is_llama(store, run.stages[trained].outcome) else ""
        has_models = any("version" in stage.outcome for stage in run.stages.values())
        start = "run" if run.backend == backends.DEFAULT else f"submit --to {run.backend}"
        return [
            *_under_another_strategy(store, run, trained, f"mlpipe {start}", where),
            f"mlpipe checkpoints export {run.run_id} --out model{where}{loads}",
            *([f"mlpipe models list{where}"] if has_models else []),
        ]
    return [f"mlpipe status {run.run_id}{where}", f"mlpipe logs {run.run_id}{where}"]


def _under_another_strategy(store: Store, run: RunState, trained: str, start: str, where: str) -> list[str]:
    """The same run, split in another way; none where that is more than a word: workers share samples, and
    batches need not come out even over all of them, or much was set besides; nor for one worker."""
    from mlpipe.plan.plan import Plan
    from mlpipe.plan.work import TrainPlan

    key = f"runs/{run.run_id}/stages/{trained}/attempt-{run.stages[trained].attempt}/plan.json"
    try:
        train = Plan.from_json(store.get(key)).part(TrainPlan)
    except (MlpipeError, ValueError):
        return []
    same = tuple(f"{stage}.strategy=" for stage in (trained, f"{trained}.train", f"stages.{trained}.train"))
    given = run.meta.get("set") or ()
    last = {one.partition("=")[0]: at for at, one in enumerate(given)}  # a resume adds to them
    overrides = [given[at] for at in sorted(last.values()) if not given[at].startswith(same)]
    if train is None or len(overrides) > _FEW or train.mesh.ep > 1 or train.compress or train.islands:
        return []
    if train.mesh.world_size == 1 or train.mesh.num_data_ranks != train.mesh.world_size:
        return []
    other = f"stages.{trained}.train." + ("strategy=ddp" if train.mesh.dp_shard > 1 else "strategy=fsdp")
    words = [f" --set {shlex.quote(one)}" for one in (*overrides, other)]
    spec = as_argument(str(run.meta.get("spec", "SPEC")))
    return [f"{start} {spec}{where}{''.join(words)}    # the same under another strategy"]


def _is_llama(store: Store, outcome: dict[str, Any] | None) -> bool:
    """Whether the checkpoint that a stage left is of mlpipe's own model."""
    from mlpipe._core.presets import LLAMA
    from mlpipe.store.catalogue import load_manifest

    try:
        scalars = load_manifest(store, (outcome or {})["checkpoint"])["scalars"]
        model = scalars["model"]
    except (MlpipeError, KeyError, TypeError):
        return False
    return "adapter" not in scalars and isinstance(model, dict) and model.get("entry") == LLAMA
