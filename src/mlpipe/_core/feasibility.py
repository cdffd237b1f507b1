"""Why a combination of figures cannot be trained, whatever the hardware: the one place that says so, in the
same words for the pipeline file (`spec/feasibility.py` adds the line), for the planner (which has resolved
`auto`, the tokens' vocabulary and the number of workers) and for whoever builds a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Infeasible(NamedTuple):
    """`message`: what does not go together. `remedy`: what to write instead."""

    message: str
    remedy: str


def setting(settings: Any, key: str) -> Any:
    """What a file says at a key like `optimizer.name`; None where it, or a part of its way, is not there."""
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def indivisible(part: tuple[str, int], whole: tuple[str, int]) -> Infeasible | None:
    """Two named figures, of which the first has to divide the second."""
    (name, value), (whole_name, whole_value) = part, whole
    if whole_value % value == 0:
        return None
    return Infeasible(
        f"{name} {value} does not divide {whole_name} {whole_value}",
        f"write {nearest_divisor(whole_value, value)}",
    )


def no_experts(key: str) -> Infeasible:
    """A size of a mixture of experts, of a model without."""
    return Infeasible(f"{key} is for models with experts", "remove it, or take a moe-* preset")


def too_many_experts(experts_per_token: int, num_experts: int) -> Infeasible | None:
    """Experts of a token, and of a block."""
    if experts_per_token <= num_experts:
        return None
    return Infeasible(
        f"experts_per_token {experts_per_token} is more than num_experts {num_experts}",
        f"write {num_experts} at most",
    )


def not_with_experts(key: str) -> Infeasible:
    """A key of their training: what balances and counts them waits for all workers in every step, and moves
    what islands could not put together."""
    return Infeasible(f"{key} does not go with experts yet", f"remove {key}")


ELASTIC_EXPERTS = Infeasible(
    "the loads of experts are counted over all workers, which come and go", "write one number of nodes"
)


def too_long(seq_len: int, max_seq_len: int) -> Infeasible | None:
    """A sequence and the positions of the model."""
    if seq_len <= max_seq_len:
        return None
    return Infeasible(
        f"seq_len {seq_len} is more than the {max_seq_len} positions of the model",
        f"write {max_seq_len} at most, or raise max_seq_len",
    )


def too_few_samples(batch: int, num_workers: int) -> Infeasible | None:
    """Of workers whose shares need not be equal, each has a sample at the least."""
    if batch >= num_workers:
        return None
    return Infeasible(
        f"{num_workers} workers share a batch of {batch}: some would have no sample",
        "fewer nodes, or a larger batch",
    )


def uneven_batch(batch: int, num_readers: int, unit: int = 1) -> Infeasible | None:
    """Samples of a step, over all that read different ones: workers, or groups of them that share theirs.
    `unit`: what the file counts a sample as, tokens perhaps."""
    if batch % num_readers == 0:
        return None
    nearest = max(1, round(batch / num_readers)) * num_readers
    return Infeasible(
        f"a batch of {batch} cannot be split evenly over {num_readers} workers",
        f"write {nearest}" if unit == 1 else f"write {nearest * unit} tokens",
    )


def uneven_micro_batch(micro_batch: int, batch: int, num_readers: int) -> Infeasible | None:
    """Samples of one forward pass of one worker, of a batch that all workers share evenly."""
    return _uneven_share("micro_batch", micro_batch, batch, num_readers)


def uneven_accumulation(
    accumulation: int, batch: int, num_readers: int, key: str = "accumulation"
) -> Infeasible | None:
    """Microbatches that a worker adds up, of a batch that all workers share evenly. `key`: which says so."""
    return _uneven_share(key, accumulation, batch, num_readers)


def _uneven_share(key: str, divisor: int, batch: int, num_readers: int) -> Infeasible | None:
    share = batch // num_readers
    if share % divisor == 0:
        return None
    return Infeasible(
        f"{key} {divisor} does not divide the {share} sequences of each of {num_readers} workers",
        f"write {nearest_divisor(share, divisor)}, or auto",
    )


def nearest_divisor(number: int, wish: int) -> int:
    """Of `number`, the one that is nearest to `wish`."""
    return min((n for n in range(1, min(number, 4096) + 1) if number % n == 0), key=lambda n: abs(n - wish))
