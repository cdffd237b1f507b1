"""What a rank-second can go into: the one list for the ledger, the metrics, the charts and the boards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlpipe._core.records import Step


@dataclass(frozen=True)
class Bucket:
    """`words`: what its time went into. `colour`: a key of `plots.COLOURS`; those of a kind of trouble are
    alike. `of_step`: its seconds of a step, of the buckets that a step's record tells. `is_good`: of steps
    that are kept, it counts as goodput."""

    name: str
    words: str
    colour: str
    of_step: Callable[[Step], float | None] | None = None
    is_good: bool = False


BUCKETS: tuple[Bucket, ...] = (
    Bucket(
        "compute", "this rank's own forward, backward and update", "blue",
        lambda step: step.compute_seconds, is_good=True,
    ),
    Bucket(
        "communication", "exposed: waiting for other ranks, or for bytes on the way", "amber",
        lambda step: step.collective_seconds, is_good=True,
    ),
    Bucket(
        "bubble", "waiting for other stages of a pipeline", "pink",
        lambda step: step.bubble_seconds, is_good=True,
    ),
    Bucket(
        "membership", "nodes left or joined: a step begun in vain, meeting and healing", "brown",
        lambda step: step.membership_seconds,
    ),
    Bucket("data", "waiting for the next batch", "teal", lambda step: step.data_seconds),
    Bucket("save", "training stood still for a checkpoint", "violet", lambda step: step.checkpoint_seconds),
    Bucket("validate", "measuring on held-out samples in the middle of the training", "green"),
    Bucket("queue", "submitted, its launcher not started: no place on the cluster, an image to pull", "grey"),
    Bucket("startup", "from the launcher to the rank's process", "brown"),
    Bucket("init", "from the process to the first step: imports, process group, model, data", "brown"),
    Bucket("restore", "of that, loading a checkpoint", "violet"),
    Bucket(
        "lost", "steps done and done again after a restart, and what was under way when a life ended", "red",
    ),
    Bucket("hang", "from the last step to the end of a life that hung", "red"),
    Bucket("idle", "the rest: between steps, and after the last one", "grey"),
    Bucket(
        "stopped",
        "between two attempts, of the ranks of the later one: in the wall time, but nothing is paid", "grey",
    ),
)  # fmt: skip
NAMES = tuple(bucket.name for bucket in BUCKETS)
GOOD = tuple(bucket.name for bucket in BUCKETS if bucket.is_good)
STOPPED = "stopped"  # the one that is not paid
