"""Which changes may make the steps of a training faster and leave what it learns as it is: its global batch,
precision, data and seed are never among them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mlpipe._core.errors import SpecError
from mlpipe.api.pipeline import LoadedPipeline
from mlpipe.api.tuning.decide import Change
from mlpipe.kinds.train.spec import Train
from mlpipe.plan import allocators
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan

KNOBS = (
    "strategy", "micro_batch", "recomputation", "compile", "offload", "loss", "readers", "threads",
    "allocator",
)  # fmt: skip
_MOST_SIZES = 3  # of micro-batches, those that the planner thinks best
_COMPILED = ("off", "block", "model")
_READERS = (0, 1, 2)


def possible_changes(
    pipeline: LoadedPipeline, plan: Plan, candidates: Sequence[Candidate], hardware: Hardware
) -> list[Change]:
    """To what `plan` would do, those that the pipeline's file can say. `candidates`: every way to train it,
    with the planner's seconds."""
    train = plan.part(TrainPlan)
    assert train is not None
    spec = pipeline.spec.stage(plan.stage).part(Train)
    assert spec is not None
    changes: list[Change] = []
    key = f"stages.{plan.stage}"
    changes += _of_layout(spec, train, candidates, f"{key}.train")
    changes += [
        Change("compile", (f"{key}.train.compile={mode}",))
        for mode in _COMPILED
        if mode != train.compile and not (mode == "model" and train.mesh.dp_shard > 1)
    ]
    if spec.offload is not None:
        changes.append(Change("offload", (f"{key}.train.offload=null",)))
    changes.append(Change("loss", (f"{key}.train.loss={'fused' if spec.loss is None else 'null'}",)))
    if (readers := getattr(spec.data, "workers", None)) is not None:
        changes += [
            Change("readers", (f"{key}.train.data.workers={number}",))
            for number in _READERS
            if number != readers
        ]
    changes += _of_environment(plan, train, hardware, key)
    return [change for change in changes if is_allowed(pipeline, change)]


def _of_layout(spec: Train, train: TrainPlan, candidates: Sequence[Candidate], key: str) -> Iterator[Change]:
    """Strategy, micro-batch and recomputation, each by itself."""
    fitting = [c for c in candidates if c.fits and c.seconds is not None and c.precision == train.precision]
    now = (train.strategy, train.mesh, train.micro_batch, train.activation_checkpointing)

    def rest(c: Candidate, but: int) -> bool:
        theirs = (c.strategy, c.mesh, c.micro_batch, c.activation_checkpointing)
        return all(
            mine == other for at, (mine, other) in enumerate(zip(now, theirs, strict=True)) if at != but
        )

    own = next((c.step_seconds for c in fitting if rest(c, -1)), math.nan)

    def change(knob: str, setting: str, c: Candidate) -> Change:
        ratio = c.step_seconds / own
        return Change(knob, (f"{key}.{setting}",), 1.0 if math.isnan(ratio) else ratio)

    if spec.mesh is None:
        fastest: dict[str, Candidate] = {}
        for c in sorted(fitting, key=lambda c: c.step_seconds):
            same = c.activation_checkpointing == train.activation_checkpointing
            if same and c.mesh is not None and c.mesh.num_data_ranks == c.mesh.world_size:
                fastest.setdefault(c.strategy, c)
        yield from (change("strategy", f"strategy={n}", c) for n, c in fastest.items() if n != train.strategy)
    if spec.accumulation is None and spec.pipeline is None:
        sizes = sorted((c for c in fitting if rest(c, 2) and not rest(c, -1)), key=lambda c: c.step_seconds)
        yield from (
            change("micro_batch", f"data.micro_batch={c.micro_batch}", c) for c in sizes[:_MOST_SIZES]
        )
    for c in fitting:
        if rest(c, 3) and not rest(c, -1):
            yield change("recomputation", f"activation_checkpointing={c.activation_checkpointing}", c)


def _of_environment(plan: Plan, train: TrainPlan, hardware: Hardware, key: str) -> Iterator[Change]:
    threads = plan.launch.env.get("OMP_NUM_THREADS", "")
    if hardware.device == "cpu" and threads.isdigit() and int(threads) > 1:
        yield Change("threads", (f"{key}.env.OMP_NUM_THREADS={int(threads) // 2}",))
    layout = train.mesh, train.activation_checkpointing
    if other := allocators.other_environment(hardware, *layout, plan.launch.env):
        sets = [f"{key}.env.{name}={value}" for name, value in other.items()]
        yield Change("allocator", tuple(sets))


def is_allowed(pipeline: LoadedPipeline, change: Change) -> bool:
    """Whether the file may say so."""
    try:
        pipeline.override(change.sets)
    except SpecError:
        return False
    return True
