"""What the machines found out about themselves and each other to who is at fault: a pure function, so that
all of them come to the same end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from mlpipe.plan.plan import PreflightPlan
from mlpipe.store.preflight import Checked

PEERS = "peer_bytes_per_second"
# What is compared with the others of the gang: the word for it, its unit, and how much is enough whatever the
# others have.
_COMPARED = {
    "flops": ("matmul", 1e9, "GFLOP/s", None),
    "memory_bytes_per_second": ("memory", 1e9, "GB/s", None),
    PEERS: ("between its GPUs", 1e9, "GB/s", None),
    "store_bytes_per_second": ("store", 1e6, "MB/s", 20e6),
}
LINK = "link "


@dataclass
class Report:
    """Of one machine. `figures`: what it can do. `faults`: what is wrong whatever the others have. `links`:
    by index of the other machine, bytes a second in one direction. `clock_seconds`: ahead of the first
    machine's; `store_clock_seconds`: of the store's, None where it has no clock of its own. `busy`: by
    figure, or LINK and the other's index, how others took this machine's CPUs in each look; None: in one they
    did not. `on_gpus`: its ranks would be. `unread`: what its GPUs or their driver do not tell."""

    index: int
    node: str
    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    links: dict[int, float] = field(default_factory=dict)
    clock_seconds: float = 0.0
    store_clock_seconds: float | None = None
    busy: dict[str, str | None] = field(default_factory=dict)
    on_gpus: bool = False
    unread: list[str] = field(default_factory=list)


def judge(reports: Sequence[Report], limits: PreflightPlan, seconds: float) -> Checked:
    """`reports`: of all machines of the gang, in their order. What is slow by comparison alone, and was
    looked at while others took its CPUs, is told and blames nobody."""
    faults = {report.index: list(report.faults) for report in reports}
    busy: dict[int, list[str]] = {}
    for report, figure, words in slow_machines(reports, limits):
        if taken := report.busy.get(figure):
            busy.setdefault(report.index, []).append(f"{words}, while {taken}")
        else:
            faults[report.index].append(words)
    pairs = _clocks(reports, limits, faults) + _links(reports, limits, faults, busy)
    names = {report.index: report.node for report in reports}
    return Checked(
        {report.node: report.figures for report in reports},
        _by_name(faults, names),
        [(names[one], names[other], words) for one, other, words in pairs],
        seconds,
        _by_name(busy, names),
        unread=_by_name({report.index: report.unread for report in reports}, names),
    )


def chosen(reports: Sequence[Report], checked: Checked, num_nodes: int) -> list[int]:
    """Indices of the machines that get ranks, in their order; fewer than `num_nodes`: too few passed. Who was
    busy comes last; of two that nobody can tell apart the second is left out."""
    out = set(checked.faults)
    for one, other, _ in checked.pairs:
        if not out & {one, other}:
            out.add(other)
    good = [report for report in reports if report.node not in out]
    good.sort(key=lambda report: (report.node in checked.busy, report.index))
    return sorted(report.index for report in good[:num_nodes])


def _by_name(told: Mapping[int, list[str]], names: Mapping[int, str]) -> dict[str, list[str]]:
    by_name: dict[str, list[str]] = {}
    for index, words in told.items():  # several of a gang may stand on one machine
        if words:
            by_name.setdefault(names[index], []).extend(words)
    return by_name


def slow_machines(reports: Sequence[Report], limits: PreflightPlan) -> list[tuple[Report, str, str]]:
    """Who has less than the others, of which figure, and that in words."""
    slow = []
    for figure, (what, unit, unit_name, enough) in _COMPARED.items():
        rates = {report.index: report.figures[figure] for report in reports if figure in report.figures}
        for report in reports:
            rate = rates.get(report.index)
            others = [other for at, other in rates.items() if at != report.index]
            if rate is None or not others or (enough is not None and rate >= enough):
                continue
            if rate < limits.slow_ratio * (usual := median(others)):
                words = f"{what} {rate / unit:.3g} {unit_name}, where the others have {usual / unit:.3g}"
                slow.append((report, figure, words))
    return slow


def _clocks(
    reports: Sequence[Report], limits: PreflightPlan, faults: Mapping[int, list[str]]
) -> list[tuple[int, int, str]]:
    """With three machines the one is wrong that differs from most; of two the store's clock tells, if it has
    one."""
    usual = median(report.clock_seconds for report in reports)
    if len(reports) == 2:
        one, other = reports
        apart = other.clock_seconds - one.clock_seconds
        if abs(apart) <= limits.clock_seconds:
            return []
        known = [report.store_clock_seconds for report in reports]
        if known[0] is None or known[1] is None:
            return [(one.index, other.index, f"their clocks are {abs(apart):.3g} s apart")]
        usual = min(reports, key=lambda report: abs(report.store_clock_seconds or 0.0)).clock_seconds
    for report in reports:
        apart = report.clock_seconds - usual
        if abs(apart) > limits.clock_seconds:
            how = "ahead" if apart > 0 else "behind"
            faults[report.index].append(f"its clock is {abs(apart):.3g} s {how}")
    return []


def slow_links(reports: Sequence[Report], limits: PreflightPlan) -> list[tuple[int, int]]:
    """Pairs of machines between which it is slow."""
    rates = _rates(reports)
    least = max(_least(reports, limits, rates), limits.link_bytes_per_second or 0.0)
    return sorted(pair for pair, rate in rates.items() if rate < least)


def _rates(reports: Sequence[Report]) -> dict[tuple[int, int], float]:
    rates: dict[tuple[int, int], float] = {}
    there = {report.index for report in reports}
    for report in reports:
        for other, rate in report.links.items():
            if other not in there:  # it has told nothing since
                continue
            pair = (min(report.index, other), max(report.index, other))
            rates[pair] = min(rate, rates.get(pair, rate))
    return rates


def _best(rates: Mapping[tuple[int, int], float]) -> dict[int, float]:
    best: dict[int, float] = {}
    for pair, rate in rates.items():
        for index in pair:
            best[index] = max(rate, best.get(index, 0.0))
    return best


def _least(reports: Sequence[Report], limits: PreflightPlan, rates: Mapping[tuple[int, int], float]) -> float:
    """By comparison: the link of two machines has none."""
    best = _best(rates)  # without those whose links were not tried
    return limits.slow_ratio * median(best.values()) if len(best) > 2 else 0.0


def _links(
    reports: Sequence[Report],
    limits: PreflightPlan,
    faults: Mapping[int, list[str]],
    busy: dict[int, list[str]],
) -> list[tuple[int, int, str]]:
    """A machine all of whose links are slow is at fault; where one link alone is, it is one of the two."""
    rates, by_index = _rates(reports), {report.index: report for report in reports}
    best, least = _best(rates), _least(reports, limits, rates)
    needed = limits.link_bytes_per_second or 0.0

    def words_of(rate: float) -> str:
        said = f"their link has {rate / 1e6:.3g} MB/s"
        return f"{said}, of {needed / 1e6:.3g} that it needs" if rate < needed else said

    def taken(pair: tuple[int, int]) -> str | None:
        ends = (
            by_index[pair[0]].busy.get(f"{LINK}{pair[1]}"),
            by_index[pair[1]].busy.get(f"{LINK}{pair[0]}"),
        )
        return ends[0] or ends[1]

    def blames(pair: tuple[int, int]) -> bool:
        return rates[pair] < needed or (rates[pair] < least and not taken(pair))

    if len(best) > 2:
        for index, most in best.items():
            if all(rates[pair] < least or blames(pair) for pair in rates if index in pair):
                beside = f"others' {max(best.values()) / 1e6:.3g}"
                if most < needed:
                    beside = f"of {needed / 1e6:.3g} that they need"
                words = f"its links reach {most / 1e6:.3g} MB/s, {beside}"
                if any(blames(pair) for pair in rates if index in pair):
                    faults[index].append(words)
                else:
                    loads = filter(None, (taken(pair) for pair in rates if index in pair))
                    busy.setdefault(index, []).append(f"{words}, while {next(loads)}")
    return [
        (*pair, words_of(rate))
        for pair, rate in rates.items()
        if blames(pair) and not any(faults[index] for index in pair)
    ]
