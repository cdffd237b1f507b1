"""Which of many changes make a step faster, of trials that are noisy. Standard library only, and no clock:
what a trial says comes from a function.

Single changes are tried between two trials of what they are to be better than, then those that may still win
once more in the reverse order, so that what slows the machine for a while, or ever more, falls on both. How
much the same differs from itself is the noise. What wins by more than that is kept, and the others that
looked no worse are tried on top of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlpipe._core.errors import MlpipeError

LEAST_GAIN_RATIO = 0.02
_CERTAINTY = 3.0  # standard deviations; of ten changes that do nothing one wins in a hundred searches
_FEWEST = 3  # that are tried twice, if they may win
_HOPELESS = 1.25  # times the expected time, which errs, or the time of a first trial: not tried (again)


@dataclass(frozen=True)
class Change:
    """`sets`: KEY=VALUE, as overrides. Of several changes of one `knob` one is made. `expected_ratio`: the
    planner's seconds of a step with it over those without; 1: it does not know."""

    knob: str
    sets: tuple[str, ...]
    expected_ratio: float = 1.0

    def __str__(self) -> str:
        return ", ".join(self.sets)


Config = tuple[Change, ...]
Measure = Callable[[Config], float | None]  # seconds of a step; None: it does not run


def sets_of(config: Config) -> tuple[str, ...]:
    """All that it changes, as overrides."""
    return tuple(item for change in config for item in change.sets)


class TimeOverError(MlpipeError):
    """By a Measure, instead of a trial."""


@dataclass
class Row:
    """What a change was worth, `beside` others. `ratio`: seconds of a step with it over those without; None:
    it does not run, or time was over before."""

    change: Change
    beside: Config
    ratio: float | None
    num_trials: int
    verdict: str


@dataclass
class TuningResult:
    """`best`: what to change; empty: there is nothing to gain. `ratio`: its seconds over those of before,
    measured once more side by side. `noise_ratio`: standard deviation of a trial."""

    best: Config = ()
    ratio: float = 1.0
    noise_ratio: float = 0.0
    rows: list[Row] = field(default_factory=list)
    is_complete: bool = False  # else time was over


def search(changes: Sequence[Change], measure: Measure) -> TuningResult:
    """What is known when a Measure says that time is over counts for what it is worth: nothing is won by a
    change that was not tried twice."""
    result, block = TuningResult(), _Block(measure)
    slow = [c for c in changes if c.expected_ratio > _HOPELESS]
    result.rows = [Row(change, (), None, 0, "expected to be slower") for change in slow]
    left = sorted((c for c in changes if c.expected_ratio <= _HOPELESS), key=lambda c: c.expected_ratio)
    taken: Config = ()
    try:
        while left:
            ratios = block.compare(taken, left, result.rows)
            better = {c: ratio for c, ratio in ratios.items() if ratio < 1 - block.least_gain()}
            if not better:
                break
            winner = min(better, key=lambda c: better[c])
            next(row for row in reversed(result.rows) if row.change == winner).verdict = "taken"
            taken = (*taken, winner)
            left = [c for c in ratios if c.knob != winner.knob and ratios[c] < 1 + block.noise]
        if taken:  # once more, by trials that have not chosen it
            final = block.abba(taken)
            result.best, result.ratio = (taken, final) if final < 1 - block.least_gain() else ((), final)
        result.is_complete = True
    except TimeOverError:
        # the last was chosen by two trials each; that all together were not tried once more is said
        result.best, result.ratio = taken, math.prod(_ratio_of(result.rows, change) for change in taken)
    result.noise_ratio = block.noise
    return result


def _ratio_of(rows: list[Row], change: Change) -> float:
    row = next(row for row in reversed(rows) if row.change == change and row.verdict == "taken")
    return row.ratio or 1.0


class _Block:
    """Trials side by side. Seconds are compared by their logarithms."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._differences: list[float] = []  # between two trials of the same

    @property
    def noise(self) -> float:
        """Standard deviation of a trial, as a ratio."""
        squares = [difference**2 for difference in self._differences]
        return math.sqrt(sum(squares) / len(squares) / 2) if squares else 0.0

    def least_gain(self) -> float:
        """That is no chance, between the means of two trials each."""
        return max(LEAST_GAIN_RATIO, _CERTAINTY * self.noise)

    def compare(self, taken: Config, changes: Sequence[Change], rows: list[Row]) -> dict[Change, float]:
        """Ratios of those that were tried twice. A row for each change."""
        there: dict[Change, Row] = {c: Row(c, taken, None, 0, "time was over") for c in changes}
        rows += there.values()
        controls = [self._seconds(taken)]
        once: dict[Change, float] = {}
        for change in changes:
            log = self._try((*taken, change))
            there[change].num_trials, there[change].verdict = (
                1,
                "does not run" if log is None else "tried once",
            )
            if log is not None:
                once[change], there[change].ratio = log, math.exp(log - controls[0])
        controls.append(self._seconds(taken))
        self._differences.append(controls[0] - controls[1])
        before = sum(controls) / 2
        best = sorted(once, key=lambda c: once[c])[: max(_FEWEST, math.ceil(len(once) / 2))]
        hopeful = [c for c in changes if c in best and once[c] < before + LEAST_GAIN_RATIO]
        for change in once.keys() - hopeful:
            there[change].verdict = (
                "slower" if once[change] > before + LEAST_GAIN_RATIO else "others are faster"
            )
        if not hopeful:
            return {}
        twice: dict[Change, float] = {}
        for change in reversed(hopeful):
            log = self._try((*taken, change))
            if log is None:
                there[change].verdict = "does not always run"
                continue
            twice[change] = (once[change] + log) / 2
            self._differences.append(once[change] - log)
        controls.append(self._seconds(taken))
        self._differences.append(controls[1] - controls[2])
        base = sum(controls) / 3
        for change, log in twice.items():
            there[change].ratio, there[change].num_trials = math.exp(log - base), 2
            won = math.exp(log - base) < 1 - self.least_gain()
            there[change].verdict = "faster" if won else "no more than noise"
        return {change: math.exp(log - base) for change, log in twice.items()}

    def abba(self, config: Config) -> float:
        """Ratio of the whole to nothing changed; infinite where it does not run any more."""
        logs = [self._seconds(()), self._try(config), self._try(config), self._seconds(())]
        if logs[1] is None or logs[2] is None or logs[0] is None or logs[3] is None:
            return math.inf
        self._differences += [logs[0] - logs[3], logs[1] - logs[2]]
        return math.exp((logs[1] + logs[2] - logs[0] - logs[3]) / 2)

    def _try(self, config: Config) -> float | None:
        seconds = self._measure(config)
        return None if seconds is None else math.log(seconds)

    def _seconds(self, taken: Config) -> float:
        """Of what ran before."""
        log = self._try(taken)
        if log is None:
            raise MlpipeError("what is to be made faster does not run", kind="failed")
        return log
