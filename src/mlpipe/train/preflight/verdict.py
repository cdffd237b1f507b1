"""What the machines found out about themselves and each other to who is at fault: a pure function, so that
all of them come to the same end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from mlpipe.plan.plan import PreflightPlan
from mlpipe.store.preflight import Checked

# What is compared with the others of the gang: the word for it, its unit, and how much is enough whatever the
# others have.
_COMPARED = {
    "flops": ("matmul", 1e9, "GFLOP/s", None),
    "memory_bytes_per_second": ("memory", 1e9, "GB/s", None),
    "store_bytes_per_second": ("store", 1e6, "MB/s", 20e6),
}


@dataclass
class Report:
    """Of one machine. `figures`: what it can do. `faults`: what is wrong whatever the others have. `links`:
    by index of the other machine, bytes a second in one direction. `clock_seconds`: ahead of the first
    machine's; `store_clock_seconds`: of the store's, None where it has no clock of its own."""

    index: int
    node: str
    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    links: dict[int, float] = field(default_factory=dict)
    clock_seconds: float = 0.0
    store_clock_seconds: float | None = None


def judge(reports: Sequence[Report], limits: PreflightPlan, seconds: float) -> Checked:
    """`reports`: of all machines of the gang, in their order."""
    faults = {report.index: list(report.faults) for report in reports}
    _slow(reports, limits, faults)
    pairs = _clocks(reports, limits, faults) + _links(reports, limits, faults)
    names = {report.index: report.node for report in reports}
    named: dict[str, list[str]] = {}
    for index, words in faults.items():  # several of a gang may stand on one machine
        if words:
            named.setdefault(names[index], []).extend(words)
    return Checked(
        {report.node: report.figures for report in reports},
        named,
        [(names[one], names[other], words) for one, other, words in pairs],
        seconds,
    )


def _slow(reports: Sequence[Report], limits: PreflightPlan, faults: Mapping[int, list[str]]) -> None:
    for figure, (what, unit, unit_name, enough) in _COMPARED.items():
        rates = {report.index: report.figures[figure] for report in reports if figure in report.figures}
        for index, rate in rates.items():
            others = [other for at, other in rates.items() if at != index]
            if not others or (enough is not None and rate >= enough):
                continue
            if rate < limits.slow_ratio * (usual := median(others)):
                faults[index].append(
                    f"{what} {rate / unit:.3g} {unit_name}, where the others have {usual / unit:.3g}"
                )


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


def _links(
    reports: Sequence[Report], limits: PreflightPlan, faults: Mapping[int, list[str]]
) -> list[tuple[int, int, str]]:
    """A machine all of whose links are slow is at fault; where one link alone is, it is one of the two."""
    rates: dict[tuple[int, int], float] = {}
    there = {report.index for report in reports}
    for report in reports:
        for other, rate in report.links.items():
            if other not in there:  # it has told nothing since
                continue
            pair = (min(report.index, other), max(report.index, other))
            rates[pair] = min(rate, rates.get(pair, rate))
    if not rates:
        return []
    least = limits.link_bytes_per_second or 0.0
    best = {
        report.index: max((rate for pair, rate in rates.items() if report.index in pair), default=None)
        for report in reports
    }
    known = [rate for rate in best.values() if rate is not None]
    if len(reports) > 2:
        least = max(least, limits.slow_ratio * median(known))
    slow = {pair: rate for pair, rate in rates.items() if rate < least}
    if len(reports) > 2:
        for index, most in best.items():
            if most is not None and most < least:
                faults[index].append(f"its links reach {most / 1e6:.3g} MB/s, others' {max(known) / 1e6:.3g}")
    return [
        (*pair, f"their link has {rate / 1e6:.3g} MB/s")
        for pair, rate in slow.items()
        if not any(faults[index] for index in pair)
    ]
