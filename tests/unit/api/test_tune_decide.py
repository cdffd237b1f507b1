"""The decisions of `mlpipe tune`, on trainings that are made of numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from mlpipe._core.errors import MlpipeError
from mlpipe.api.tuning.decide import Change, Config, TimeOverError, TuningResult, search

pytestmark = pytest.mark.unit

# knob: value -> what it does to the seconds of a step. The planner errs by up to a tenth.
KNOBS = {
    "strategy": {"zero1": 0.94, "zero2": 1.02, "fsdp": 1.3},
    "micro_batch": {"2": 1.15, "8": 0.92},
    "recompute": {"selective": 1.08, "full": 1.33},
    "compile": {"block": 0.9, "model": 0.86},
    "allocator": {"other": 1.2},
    "threads": {"1": 1.05},
    "workers": {"2": 1.0},
}


class Machine:
    """A step takes a second; `noise`: of a trial, a standard deviation; `drift`: more with every trial."""

    def __init__(
        self, knobs: dict[str, dict[str, float]], seed: int, noise: float, drift: float = 0.0
    ) -> None:
        self.knobs, self.noise, self.drift = knobs, noise, drift
        self.random = random.Random(seed)
        self.spent = self.trials = 0.0

    def true_seconds(self, config: Config) -> float:
        chosen = dict(change.sets[0].split("=") for change in config)
        assert len(chosen) == len(config), "one change of a knob at a time"
        seconds = math.prod(self.knobs[knob][value] for knob, value in chosen.items())
        # a larger micro-batch helps less what is compiled
        return seconds * (1.04 if {"compile", "micro_batch"} <= chosen.keys() else 1.0)

    def measure(self, config: Config) -> float:
        seconds = self.true_seconds(config)
        self.spent += seconds
        self.trials += 1
        return seconds * math.exp(self.random.gauss(0, self.noise)) * (1 + self.drift * self.trials)

    def changes(self) -> list[Change]:
        return [
            Change(knob, (f"{knob}={value}",), factor * self.random.uniform(0.9, 1.1))
            for knob, values in self.knobs.items()
            for value, factor in values.items()
        ]

    def grid(self) -> list[Config]:
        choices = [[None, *(Change(knob, (f"{knob}={v}",)) for v in vs)] for knob, vs in self.knobs.items()]
        return [tuple(c for c in picked if c is not None) for picked in itertools.product(*choices)]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_within_three_percent_of_the_grid_in_a_quarter_of_its_time(seed):
    machine = Machine(KNOBS, seed, noise=0.005)
    found = search(machine.changes(), machine.measure)
    everything = [machine.true_seconds(config) for config in machine.grid()]
    assert found.is_complete
    assert machine.true_seconds(found.best) <= 1.03 * min(everything)
    assert machine.spent < sum(everything) / 4
    assert found.ratio == pytest.approx(machine.true_seconds(found.best), abs=0.03)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_of_changes_that_do_nothing_none_is_worth_a_line(noise):
    nothing = {knob: dict.fromkeys(values, 1.0) for knob, values in KNOBS.items()}
    won = [seed for seed in range(100) if same(seed, noise, nothing).best]
    assert len(won) <= 1


def same(seed: int, noise: float, knobs: dict[str, dict[str, float]]) -> TuningResult:
    machine = Machine(knobs, seed, noise)
    return search(machine.changes(), machine.measure)


def test_a_machine_that_becomes_slower_is_no_reason_to_change():
    nothing = {knob: dict.fromkeys(values, 1.0) for knob, values in KNOBS.items()}
    machine = Machine(nothing, 0, noise=0.002, drift=0.01)
    assert search(machine.changes(), machine.measure).best == ()


def test_what_slows_all_alike_falls_on_each_side_alike():
    """A steady drift leaves no trace in the ratios, since the second trials are in the reverse order."""
    trials = itertools.count()
    changes = [Change(knob, (f"{knob}=1",)) for knob in "abc"]
    found = search(changes, lambda config: math.exp(0.004 * next(trials)))
    assert [row.ratio for row in found.rows] == pytest.approx([1.0, 1.0, 1.0])
    assert found.best == ()


def test_what_the_planner_calls_hopeless_and_what_was_slow_once_is_left_alone():
    machine = Machine(KNOBS, 3, noise=0.001)
    tried: list[str] = []

    def measure(config: Config) -> float:
        tried.extend(str(change) for change in config)
        return machine.measure(config)

    hopeless = Change("recompute", ("recompute=full",), 2.0)
    slow = Change("allocator", ("allocator=other",))
    good = Change("compile", ("compile=model",))
    found = search([hopeless, slow, good], measure)
    assert "recompute=full" not in tried
    assert tried.count("allocator=other") == 1
    assert found.best == (good,)
    assert {str(row.change): row.verdict for row in found.rows} == {
        "recompute=full": "expected to be slower",
        "allocator=other": "slower",
        "compile=model": "taken",
    }


def test_what_does_not_run_is_said_and_does_not_win():
    def measure(config: Config) -> float | None:
        return None if config else 1.0

    found = search([Change("compile", ("compile=block",))], measure)
    assert (found.best, [row.verdict for row in found.rows]) == ((), ["does not run"])
    with pytest.raises(MlpipeError, match="does not run"):
        search([Change("compile", ("compile=block",))], lambda config: None)


@pytest.mark.parametrize("most", range(1, 30))
def test_when_time_is_over_only_what_was_tried_twice_counts(most):
    machine = Machine(KNOBS, 5, noise=0.001)

    def measure(config: Config) -> float:
        if machine.trials >= most:
            raise TimeOverError("time is over")
        return machine.measure(config)

    found = search(machine.changes(), measure)
    taken = [row for row in found.rows if row.verdict == "taken"]
    assert found.is_complete == (machine.trials < most)
    assert all(row.num_trials == 2 for row in taken)
    if not found.is_complete:
        assert found.best == tuple(row.change for row in taken)
        assert machine.true_seconds(found.best) <= 1.0


def test_gains_that_do_not_last_are_not_written():
    """Twice faster by chance, and as slow as ever afterwards."""
    lucky: Sequence[float] = [1.0, 0.9, 1.0, 0.9, 1.0]
    seconds = iter([*lucky, 1.0, 1.0, 1.0, 1.0])
    found = search([Change("compile", ("compile=block",))], lambda config: next(seconds))
    assert found.best == ()
    assert found.is_complete
