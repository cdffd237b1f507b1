"""`preflight.json` of an attempt: what its machines could do before ranks started, and which were at fault.
The launcher of its first node writes it; the driver of the next attempt leaves out who was at fault.

`preflight/slow.json` beside it: which nodes have been slow for long while they trained
(`train/stragglers.py`), and by how much; a launcher writes it. Who is slower there than a machine may be in a
preflight is left out, too. A replica of an elastic training has its own file, `slow-replica-<n>.json`."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mlpipe.store.base import Store

# What workers write is taken for the name of a machine only if it is one: it stands in manifests and scripts.
NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_SLOW_REPLICA = re.compile(r"slow-replica-([0-9]+)\.json")


@dataclass(frozen=True)
class Checked:
    """`nodes`: what each can do. `faults`: what is wrong with one. `pairs`: two of them and what is wrong
    between them, where nobody can tell which of them is to blame. `busy`: how one was slow, and is not
    blamed, since others took its CPUs meanwhile. `slow`: how many times as long as the others one took when
    it trained last. `unread`: what the GPUs of one, or their driver, do not tell."""

    nodes: dict[str, dict[str, float]] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    pairs: list[tuple[str, str, str]] = field(default_factory=list)
    seconds: float = 0.0
    busy: dict[str, list[str]] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    unread: dict[str, list[str]] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """A line for each machine and each pair that did not pass."""
        named = [f"{node}: {'; '.join(words)}" for node, words in self.faults.items()]
        return named + [f"{one} and {other}: {words}" for one, other, words in self.pairs]

    def names(self, node: str) -> bool:
        """Whether anything is said against it."""
        return (
            node in self.faults
            or node in self.busy
            or any(node in (one, other) for one, other, _ in self.pairs)
        )


@dataclass(frozen=True)
class Ranked:
    """Of machines with spares among them: the indices of those that get ranks, in the order of their nodes,
    and where these meet, host:port."""

    indices: list[int]
    rendezvous: str


def probe_key(attempt_key: str, index: int) -> str:
    """What machine `index` writes, reads and deletes to try the store."""
    return f"{attempt_key}/preflight/node-{index}"


def write_checked(store: Store, attempt_key: str, checked: Checked) -> None:
    """Raises StoreError."""
    store.put(f"{attempt_key}/preflight.json", json.dumps(asdict(checked), indent=2).encode())


def write_slow(store: Store, attempt_key: str, slow: bytes, replica: int | None = None) -> None:
    """A JSON object of ratios by node. Raises StoreError."""
    store.put(slow_key(attempt_key, replica), slow)


def slow_key(attempt_key: str, replica: int | None = None) -> str:
    """Of what says who is slow."""
    return f"{attempt_key}/preflight/slow{'' if replica is None else f'-replica-{replica}'}.json"


def slow_replicas(store: Store, attempt_key: str) -> dict[int, tuple[str, float] | None]:
    """By number, of each that has been measured since it started: its node, and its time for the same work
    over that of the others; None: it is not slow. Raises StoreError."""
    found: dict[int, tuple[str, float] | None] = {}
    for info in store.list(f"{attempt_key}/preflight"):
        if (name := _SLOW_REPLICA.fullmatch(info.key.rpartition("/")[2])) is not None:
            # what is written of most, {}, need not be read
            ratios = _ratios(store.get(info.key)) if info.size_bytes > len(b"{}") else {}
            found[int(name[1])] = next(iter(ratios.items()), None)
    return found


def _ratios(written: bytes) -> dict[str, float]:
    """By node; of what is none, nothing: workers may write what they like."""
    try:
        ratios = {str(node): float(ratio) for node, ratio in json.loads(written).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    return {node: ratio for node, ratio in ratios.items() if ratio < math.inf and NODE.fullmatch(node)}


def read_checked(store: Store, attempt_key: str) -> Checked | None:
    """With who got slow since. None: no preflight ended, or what stands there is none. Raises StoreError."""
    key, slow = f"{attempt_key}/preflight.json", slow_key(attempt_key)
    if not store.exists(key):
        return None
    try:
        checked = checked_from(json.loads(store.get(key)))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return replace(checked, slow=_ratios(store.get(slow))) if store.exists(slow) else checked


def checked_from(document: Any) -> Checked:
    """Raises ValueError, TypeError or KeyError."""
    return Checked(
        {
            str(node): {str(name): float(rate) for name, rate in figures.items()}
            for node, figures in document["nodes"].items()
        },
        _words(document["faults"]),
        [(str(one), str(other), str(words)) for one, other, words in document["pairs"]],
        float(document["seconds"]),
        _words(document.get("busy", {})),
        unread=_words(document.get("unread", {})),
    )


def _words(plain: Any) -> dict[str, list[str]]:
    return {str(node): [str(word) for word in words] for node, words in plain.items()}


def nodes_to_avoid(store: Store, stage_key: str, attempt: int, slow_ratio: float) -> tuple[str, ...]:
    """In an attempt, after those before it. `slow_ratio`: of the others' speed, what a machine must have."""
    earlier = [read_checked(store, f"{stage_key}/attempt-{number}") for number in range(1, attempt)]
    return to_avoid([checked for checked in earlier if checked is not None], slow_ratio)


def to_avoid(preflights: Sequence[Checked], slow_ratio: float) -> tuple[str, ...]:
    """Who was at fault, or got slow. Of each pair the one that was in another pair, too, and while none was,
    the second: the next attempt may have the first one with another machine, which tells who it is."""
    faulty = {node for checked in preflights for node in checked.faults}
    faulty |= {
        node for checked in preflights for node, ratio in checked.slow.items() if ratio * slow_ratio > 1
    }
    pairs = [(one, other) for checked in preflights for one, other, _ in checked.pairs]
    times = Counter(node for pair in pairs for node in pair)
    for one, other in pairs:
        again = {node for node in (one, other) if times[node] > 1}
        if not faulty & {one, other}:
            faulty |= again or {other}
    return tuple(sorted(node for node in faulty if NODE.fullmatch(node)))
