"""Measures this machine unasked, in a process of its own: beside the first stages of a run, or before a plan;
and learns from the trainings that ended here. What is known: `plan/machine.py`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

from mlpipe._core.errors import MlpipeError
from mlpipe._core.units import format_step_seconds
from mlpipe.observe.predicted import measured
from mlpipe.observe.runview import RunView, worst_load
from mlpipe.plan import machine
from mlpipe.plan.ahead import plan_ahead, predicted_here
from mlpipe.plan.candidates import priced
from mlpipe.plan.hardware import Hardware, cpu_speed, knows_machine, machine_memory_bytes
from mlpipe.plan.machine import Core, Learnt, Machine
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.spec.model import Pipeline
from mlpipe.store.runs import RunState
from mlpipe.submit.standby import Standby, Standbys

_LONGEST_SECONDS = 30.0  # of a plan that waits; an idle machine takes 4, most of it to import torch
_LATE_SECONDS = 1.0  # that a training waits for what was begun before it
_LOOK_SECONDS = 0.05
_LEAST_STEPS = 20  # of a training that is learnt from
_THREADS = "OMP_NUM_THREADS"
Note = Callable[[str], None]


class Measuring:
    """What `standby` measures; what it has said in time is kept."""

    def __init__(self, standby: Standby) -> None:
        self._began = time.monotonic()
        self._standby = standby
        self._is_finished = False

    def finish(self, seconds: float, note: Note) -> None:
        """Waits no longer than `seconds`. Says in a line what was measured, or that nothing was."""
        if self._is_finished:
            return
        self._standby.has_measured(seconds)
        self._is_finished = True
        if machine.is_known():
            return  # another was not late, and may have learnt since
        taken = time.monotonic() - self._began
        figures = _figures(self._standby.figures.decode(errors="replace"))
        if not figures:
            note(f"this machine could not be measured in {taken:.0f} s: its figures are the catalogue's")
            return
        try:
            machine.save(Machine(machine.SCHEMA_VERSION, machine.torch(), figures))
        except OSError as error:
            note(f"this machine was measured, which cannot be kept: {error}")
            return
        words = ", ".join(f"{name} {format_step_seconds(c.passes_seconds)}" for name, c in figures.items())
        note(
            f"measured this machine: a core does the passes of a small model in {words}; "
            f"kept in {machine.path()}"
        )


def measure_first(pipeline: Pipeline, note: Note) -> None:
    """Where something is to be planned on CPUs that nobody has measured: waits for it, whoever measures."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    if not _trainings_to_measure(pipeline) or (lock := _lock(_LONGEST_SECONDS, note)) is None:
        return
    if machine.is_known():
        os.close(lock)
        return
    with contextlib.closing(Standby({**os.environ, _THREADS: "1"}, lock)) as standby:
        Measuring(standby).finish(max(_LATE_SECONDS, deadline - time.monotonic()), note)


@contextlib.contextmanager
def beside(
    pipeline: Pipeline, run: RunState, hardware: Callable[[Pipeline, str], Hardware], note: Note
) -> Iterator[tuple[Callable[[Pipeline, str], Hardware], Standbys]]:
    """Within, what `hardware` says of a stage, measured while the stages ran that it needs; and what has
    measured, of which the training may begin. A training that starts at once waits for nothing: its machine
    is known when it has ended."""
    names = _trainings_to_measure(pipeline)
    waiting = [any(run.stages[need].state != "done" for need in pipeline.stage(name).needs) for name in names]
    if not waiting or not all(waiting) or (lock := _lock(0.0, note)) is None:
        yield hardware, Standbys()
        return
    standby = Standby(_environment_of(pipeline, names[0], run.run_id), lock)
    measuring = Measuring(standby)

    def measured_hardware(pipeline: Pipeline, stage: str) -> Hardware:
        if stage in names:
            measuring.finish(_LATE_SECONDS, note)
        return hardware(pipeline, stage)

    try:
        yield measured_hardware, Standbys(standby)
    finally:
        if standby.has_measured():  # of a run of one stage, say, for the next
            measuring.finish(0.0, note)
        standby.close()


def _environment_of(pipeline: Pipeline, training: str, run_id: str) -> dict[str, str]:
    """In which its launcher will be started, as far as a plan ahead can say."""
    try:
        return {**os.environ, **plan_ahead(pipeline, training, "", run_id).launch.env}
    except MlpipeError:  # a figure that an earlier stage makes
        return {**os.environ, _THREADS: "1"}


def _lock(seconds: float, note: Note) -> int | None:
    """An open file, by which one process at a time measures for this user: of a sweep's trials, one. None:
    another still does after `seconds`, or what is measured could not be kept; says so."""
    path = machine.path().with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        note(f"this machine is not measured, since that could not be kept: {error}")
        return None
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                continue
        except OSError:  # a file system without locks
            return lock
        else:
            return lock
        os.close(lock)
        return None


def learn(view: RunView) -> None:
    """From its trainings on CPUs here that are done and had this machine for themselves."""
    if not knows_machine():
        return
    before = machine.read() or Machine(machine.SCHEMA_VERSION, machine.torch(), {})
    known = before
    for stage in view.stages:
        plan, training, real = stage.plan, stage.training, measured(stage)
        if plan is None or training is None or real is None or not _is_plain(plan, training):
            continue
        load = worst_load(stage)
        slowed = load is not None and load.slowed_us
        if stage.state.state != "done" or slowed or len(stage.lead.steps) < _LEAST_STEPS:
            continue
        told = priced(training, _hardware(plan, replace(before, runs=())))
        assert told.seconds is not None
        ratio = 1 + (real[1] - told.step_seconds) / told.seconds.compute
        workers = plan.launch.nproc_per_node
        known = known.learn(Learnt(view.run.run_id, stage.name, training.precision, workers, ratio))
    if known != before:
        with contextlib.suppress(OSError):
            machine.save(known)


def _is_plain(plan: Plan, training: TrainPlan) -> bool:
    """Whether its steps say how fast this machine's cores are."""
    launch = plan.launch
    here = launch.device == "cpu" and launch.num_nodes == 1 and launch.replicas is None
    here = here and launch.env.get(_THREADS, "").isdigit()
    return here and training.predicted is not None and training.compile == "off"


def _hardware(plan: Plan, known: Machine) -> Hardware:
    """That it ran on, as `known`."""
    workers, threads = plan.launch.nproc_per_node, float(plan.launch.env[_THREADS])
    speed, cpus = known.speed(cpu_speed(threads), workers, threads), int(workers * threads)
    return Hardware("cpu", 1, workers, machine_memory_bytes() // workers, "CPU worker", {}, cpus, speed)


def _trainings_to_measure(pipeline: Pipeline) -> list[str]:
    """Stages whose steps are predicted by figures of this machine that are not known."""
    if not knows_machine() or machine.is_known() or find_spec("torch") is None:
        return []
    return predicted_here(pipeline)


def _figures(said: str) -> dict[str, Core]:
    """The lines of `train/measure.py`, without one that was not finished, and without others' words."""
    figures = {}
    for line in said.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(line)
            figures[told["precision"]] = Core(told["matmul_flops"], told["passes_seconds"])
    return figures
