"""What a pipeline of the file means, and why one cannot be trained: for the file (`spec/pipelines.py` adds
the line) and for the planner. The schedules themselves: `plan/pipelining.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from mlpipe._core.feasibility import Infeasible, setting

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
DEFAULT: Schedule = "1f1b"


def stages_per_rank(schedule: Schedule) -> int:
    """How many of the stages a rank has."""
    return 2 if schedule == "interleaved" else 1


def why_not(schedule: Schedule, num_ranks: int, num_microbatches: int) -> str | None:
    """What of these numbers the schedule cannot do, in words."""
    rounds = max(1, num_microbatches // num_ranks)
    if schedule != "interleaved" or num_microbatches % rounds == 0:
        return None
    return (
        f"interleaved passes {num_ranks} microbatches at a time from rank to rank, which do not divide "
        f"{num_microbatches}"
    )


def conflicts(
    schedule: Schedule,
    microbatches: int | None,
    sizes: Mapping[str, int],
    figures: Mapping[str, int],
    settings: Mapping[str, Any],
) -> Iterator[tuple[str, Infeasible]]:
    """What of a pipeline cannot be done, by key below `pipeline`. `sizes`: of the mesh's axes; `figures`: of
    the model; `settings`: of the training by key; as far as they are known."""
    pp, num_layers = sizes.get("pp", 1), figures.get("num_layers")
    if pp == 1:
        return
    needed = pp * stages_per_rank(schedule)
    entry = setting(settings, "model.entry")
    yield from _cuts(setting(settings, "pipeline.cut"), needed, entry)
    if entry is None and num_layers is not None and pp <= num_layers < needed:
        yield (
            "schedule",
            Infeasible(
                f"{schedule} has {stages_per_rank(schedule)} stages on each of {pp} ranks, and the model has "
                f"{num_layers} blocks",
                f"take {DEFAULT}, or a pp of {num_layers // stages_per_rank(schedule)} at most",
            ),
        )
    if microbatches is not None and (why := why_not(schedule, pp, microbatches)):
        yield "microbatches", Infeasible(why, f"write a multiple of {pp}, or auto")
    if schedule != "zero_bubble":
        return
    if sizes.get("dp_shard", 1) > 1:
        yield (
            "schedule",
            Infeasible(
                "zero_bubble puts off the gradients of weights, which dp_shard reduces with the others",
                f"take {DEFAULT} or interleaved, or dp_replicate instead of dp_shard",
            ),
        )
    if settings.get("compile", "off") != "off":
        yield (
            "schedule",
            Infeasible(
                "zero_bubble puts off the gradients of weights, which a compiled block computes at once",
                f"take {DEFAULT}, or compile: off",
            ),
        )


def _cuts(cut: Any, num_stages: int, entry: Any) -> Iterator[tuple[str, Infeasible]]:
    """Of a user's own model, which `entry` builds; mlpipe's are always cut by FLOPs."""
    if cut in (None, "auto"):
        return
    names = [name for name in cut if isinstance(name, str)] if isinstance(cut, list | tuple) else []
    if entry is None:
        if names:
            yield "cut", Infeasible("mlpipe cuts its own models, by FLOPs", "remove it")
        return
    if len(names) == num_stages - 1 and len(set(names)) == len(names):
        return
    word = "module" if num_stages == 2 else "modules"
    yield (
        "cut",
        Infeasible(
            f"{num_stages} stages of your own model begin with the first module and {num_stages - 1} others, "
            f"and cut names {len(set(names))}",
            f"write cut: auto, or the {word} with which later stages begin, like [layers.4]",
        ),
    )
