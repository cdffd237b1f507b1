"""Profiles of ranks to what is wrong, where, what it costs at most, and what to do about it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from mlpipe._core.units import format_bytes
from mlpipe.observe.profiles.measure import LayerTime, RankProfile

_WORTH = 0.05  # of a step: less is not worth a line
_CPU_SHARE = 0.75
_SLOWER = 1.15  # than the ranks between
_TINY_OPERATOR_SECONDS = 25e-6
_MANY_OPERATORS = 30.0  # of a call of a layer


@dataclass(frozen=True)
class Finding:
    """`gain`: the share of a step that is won at most, were there nothing of it; None: nobody can say."""

    cause: str
    what: str
    gain: float | None
    remedy: str


def findings(ranks: Sequence[RankProfile]) -> list[Finding]:
    """What costs most first."""
    causes = [*_data(ranks), *_stragglers(ranks), *_threads(ranks), *_machine(ranks)]
    causes += _stages(max(ranks, key=lambda one: one.idle.get("stages", 0.0) / one.seconds))
    causes += _collectives(max(ranks, key=own_seconds))
    for cause in (_syncs, _tiny, _copies):  # of the rank that has most of it
        of_ranks = [one for rank in ranks for one in cause(rank)]
        causes += sorted(of_ranks, key=lambda one: -(one.gain or 0.0))[:1]
    return sorted(causes, key=lambda one: -(one.gain if one.gain is not None else 1.0))


def own_seconds(rank: RankProfile) -> float:
    """Of a step, what the rank does not wait for others."""
    return rank.seconds - rank.idle.get("collectives", 0.0) - rank.idle.get("stages", 0.0)


def kinds_of_layers(rank: RankProfile) -> dict[str, LayerTime]:
    """Layers of the same name but for their number, as one: `layers.*.attention`."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for name, layer in rank.layers.items():
        for at, value in enumerate(vars(layer).values()):
            sums[re.sub(r"(?<![^.])\d+(?![^.])", "*", name)][at] += value
    return {name: LayerTime(*values) for name, values in sums.items()}


def _data(ranks: Sequence[RankProfile]) -> Iterator[Finding]:
    worst = max(ranks, key=lambda one: one.idle.get("data", 0.0) / one.seconds)
    share = worst.idle.get("data", 0.0) / worst.seconds
    if share >= _WORTH:
        yield Finding(
            "data",
            f"rank {worst.rank} waits {1000 * worst.idle['data']:.1f} ms of a step for its samples",
            share,
            "read them in processes of their own: data.workers: auto (or one more); make what a sample takes "
            "cheaper, or prepare it in a stage before",
        )


def _stragglers(ranks: Sequence[RankProfile]) -> Iterator[Finding]:
    slow = max(ranks, key=own_seconds)
    others = [one for one in ranks if one.rank != slow.rank]
    if not others:
        return
    usual = median(map(own_seconds, others))
    more = own_seconds(slow) - usual
    if own_seconds(slow) < _SLOWER * usual or more < _WORTH * slow.seconds:
        return
    peer = min(others, key=lambda one: abs(own_seconds(one) - usual))
    layers = {f"in {name}": layer.seconds - _of(peer, name) for name, layer in slow.layers.items()}
    causes = {"for data": "data", "between operators": "host"}
    others_of = {words: slow.idle.get(one, 0.0) - peer.idle.get(one, 0.0) for words, one in causes.items()}
    # a layer first: what it does between its operators is its own
    worst = (max(where.items(), key=lambda item: item[1]) for where in (layers, others_of) if where)
    named = next((f", {1000 * costs:.1f} ms of it {place}" for place, costs in worst if costs > more / 2), "")
    host = f" on {slow.facts['host']}" if slow.facts.get("host") else ""
    yield Finding(
        "straggler",
        f"rank {slow.rank}{host} takes {1000 * more:.1f} ms of a step more than the others, which wait for "
        f"it{named}",
        more / slow.seconds,
        "look at what this rank does differently: its node (temperature, other jobs, `mlpipe top RUN`), its "
        "samples (longer ones), code of yours that asks for the rank",
    )


def _of(rank: RankProfile, layer: str) -> float:
    return rank.layers[layer].seconds if layer in rank.layers else 0.0


def _threads(ranks: Sequence[RankProfile]) -> Iterator[Finding]:
    for rank in ranks:
        facts = rank.facts
        allowed, threads = facts.get("allowed_cpus") or [], facts.get("num_threads") or 0
        on_node = threads * (facts.get("local_world_size") or 1)
        if rank.device == "cpu" and allowed and on_node > len(allowed):
            yield Finding(
                "threads",
                f"{on_node} threads compute on {len(allowed)} CPUs ({threads} of each rank); the kernel took "
                f"one off its CPU {facts.get('num_preempted', 0) / rank.num_steps:.0f} times a step on rank "
                f"{rank.rank}",
                None,
                "leave OMP_NUM_THREADS to mlpipe, which gives each rank its share, or set it to "
                f"{max(1, len(allowed) // (facts.get('local_world_size') or 1))}",
            )
            return
        used = [node for node, cpus in (facts.get("nodes") or {}).items() if set(cpus) & _used(rank)]
        if len(used) > 1:
            yield Finding(
                "threads",
                f"threads of rank {rank.rank} ran on NUMA nodes {', '.join(sorted(used))}: half of what they "
                "read lies in the other one's memory",
                None,
                "bind ranks to nodes: one rank a node with its CPUs (numactl, or the kubelet's "
                "single-numa-node policy)",
            )
            return


def _machine(ranks: Sequence[RankProfile]) -> Iterator[Finding]:
    """On a CPU, what computes has one; else somebody else has it, and all other figures are of that."""
    for rank in ranks:
        computed, used = rank.busy * rank.num_steps, rank.facts.get("cpu_seconds")
        if rank.device == "cpu" and used is not None and used < _CPU_SHARE * computed:
            yield Finding(
                "machine",
                f"rank {rank.rank} had a CPU for {used:.2f} of the {computed:.2f} s in which it computed: "
                "others use the machine, and the figures below are disturbed",
                None,
                "profile again when the machine is its own; `mlpipe report` says who else was there",
            )
            return


def _used(rank: RankProfile) -> set[int]:
    return set(rank.facts.get("used_cpus") or ())


def _collectives(rank: RankProfile) -> Iterator[Finding]:
    """Of the slowest rank, which waits for nobody: what is left is the wire."""
    share = rank.idle.get("collectives", 0.0) / rank.seconds
    if share >= 2 * _WORTH:
        hidden = rank.hidden_communication / rank.communication if rank.communication else 0.0
        yield Finding(
            "collectives",
            f"even the slowest rank waits {1000 * rank.idle['collectives']:.1f} ms of a step in collectives; "
            f"{100 * hidden:.0f} % of communication is hidden behind computing",
            share,
            "send less often (accumulation, a larger batch) or less (a strategy that shards less): "
            "`mlpipe plan` compares them",
        )


def _stages(rank: RankProfile) -> Iterator[Finding]:
    share = rank.idle.get("stages", 0.0) / rank.seconds
    if share >= 2 * _WORTH:
        yield Finding(
            "stages",
            f"rank {rank.rank} waits {1000 * rank.idle['stages']:.1f} ms of a step for other stages of the "
            "pipeline",
            share,
            "more micro-batches (pipeline.microbatches), a schedule that waits less (zero_bubble), or a cut "
            "that is more even",
        )


def _syncs(rank: RankProfile) -> Iterator[Finding]:
    if not rank.syncs:
        return
    count = sum(place.count for place in rank.syncs)
    first = max(rank.syncs, key=lambda place: place.count)
    seconds = rank.idle.get("synchronisation", 0.0) + sum(place.seconds for place in rank.syncs)
    yield Finding(
        "synchronisation",
        f"{first.layer} reads numbers out of tensors: {first.what.removeprefix('aten::')} {first.count:g} "
        "times a step" + (f", {count:g} in all layers" if count > first.count else ""),
        seconds / rank.seconds,
        "each makes the host wait until the device has done all that it has to do: compute with tensors "
        "(torch.where instead of `if`), and read numbers only for records",
    )


def _tiny(rank: RankProfile) -> Iterator[Finding]:
    for name, layer in sorted(kinds_of_layers(rank).items(), key=lambda item: -item[1].seconds):
        share = layer.seconds / rank.seconds
        if share < 2 * _WORTH or not layer.operators or not layer.calls:
            continue
        each = layer.operator_seconds / layer.operators
        if each < _TINY_OPERATOR_SECONDS and layer.operators / layer.calls >= _MANY_OPERATORS:
            yield Finding(
                "tiny operators",
                f"{name} runs {layer.operators / layer.calls:.0f} operators a call, of {1e6 * each:.1f} "
                f"microseconds each: to start them takes longer than to compute",
                max(0.0, layer.seconds - layer.operator_seconds) / rank.seconds,
                "compute with larger tensors instead of loops over small ones, or let torch fuse them: "
                "compile: block",
            )
            return


def _copies(rank: RankProfile) -> Iterator[Finding]:
    seconds = sum(place.seconds for place in rank.copies)
    if seconds / rank.seconds < 2 * _WORTH or not rank.copies:
        return
    first = rank.copies[0]
    yield Finding(
        "copies",
        f"{first.layer or 'the step'} copies {format_bytes(first.num_bytes)} a step ({first.what}, "
        f"{1000 * first.seconds:.1f} ms); all copies take {1000 * seconds:.1f} ms",
        seconds / rank.seconds,
        "keep one dtype and layout between operators, make once what does not change (register_buffer), and "
        "copy to a device from pinned memory",
    )
