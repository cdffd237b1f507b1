"""torch's profiler around steps of the loop, with spans that say which layer and which part of a step it is.

What is added to the training is taken off again at the end: hooks on all modules at once, and functions
around the parts of a step. Imported only where a rank is profiled.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.modules import module as hooks
from torch.profiler import ProfilerActivity, profile, record_function

from mlpipe._core.serial import to_json
from mlpipe.observe.profiles.measure import measure
from mlpipe.observe.profiles.trace import LAYER, PART, STEP, Trace
from mlpipe.plan.work import TrainPlan
from mlpipe.store import profiles
from mlpipe.store.profiles import Profile
from mlpipe.train.data.loader import ReadAhead
from mlpipe.train.optim.update import Update
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.schedules import Schedule
from mlpipe.train.session import Session

_log = logging.getLogger(__name__)
_WRAPPERS = ("module.", "model.", "_orig_mod.", "_checkpoint_wrapped_module.")
_MOST_MEMORY_EVENTS = 100_000
_END_BYTES = 8192  # with the longest path


class Profiled(Protocol):
    """What spans are put around."""

    plan: TrainPlan
    model: ParallelizedModel
    reader: ReadAhead
    schedule: Schedule
    update: Update


class Profiler:
    """Of this rank, from now on until `finish`."""

    def __init__(self, session: Session, loop: Profiled, profile_: Profile) -> None:
        self.profile = profile_
        self._session = session
        self._undo = ExitStack()
        self._step: Any = None
        self._cuda = session.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        memory = profile_.memory and not self._cuda
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=memory)
        if self._cuda and profile_.memory:
            # of Python alone: to name frames of C++ takes a minute, in which nobody trains
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_MEMORY_EVENTS)
        self._machine = Machine()
        self._profiler.start()
        if loop.plan.compile == "off":  # hooks would have it compiled anew; its regions have spans already
            self._name_layers(loop.model.module)
        self._name_part(loop.reader, "take", "data")
        self._name_part(loop.reader, "read", "data")
        self._name_part(loop.schedule, "forward_backward", "forward and backward")
        self._name_part(loop.update, "step", "optimizer")

    def step_begins(self, step: int) -> None:
        """With the span by which HTA and TensorBoard know a step."""
        self._step = record_function(f"{STEP}{step}")
        self._step.__enter__()

    def step_ends(self) -> None:
        self._step.__exit__(None, None, None)
        self._machine.look()

    def finish(self) -> None:
        """Puts trace and summary into the store. What goes wrong here is no reason to end a training."""
        self._undo.close()
        session = self._session
        facts = {"rank": session.rank, "device": session.device.type, "first_step": self.profile.first_step}
        facts |= {"local_world_size": session.process.local_world_size, **self._machine.facts()}
        self._profiler.add_metadata_json("mlpipe", json.dumps(facts))  # taken up while it runs only
        self._profiler.stop()
        with self._told("is lost"):  # which ends all that is within
            text = self._store_trace()
            if self._cuda and self.profile.memory:
                with self._told("has no snapshot of memory"):
                    self._store_memory()
            with self._told("has a trace, but no summary"):
                summary = measure(Trace(json.loads(text)))
                self._put(profiles.summary_key, to_json(summary).encode())
        if self._cuda and self.profile.memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Where an error ends what is within: a warning that the profile `what`, and why."""
        try:
            yield
        except Exception as error:
            _log.warning("the profile of step %d %s: %s", self.profile.first_step, what, error)

    def _store_trace(self) -> bytes:
        """Chrome's JSON. Raises ValueError where a full disk, of which torch says nothing, has cut it."""
        with tempfile.TemporaryDirectory(prefix="mlpipe-profile-") as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))  # which would compress line by line
            text = path.read_bytes()
        # torch writes its name last; to parse 87 MB takes 10 s
        if b'"traceName":' not in text[-_END_BYTES:] or not text.rstrip().endswith(b"}"):
            raise ValueError("the trace is cut short")
        self._put(profiles.trace_key, gzip.compress(text, 6))
        return text

    def _store_memory(self) -> None:
        with tempfile.TemporaryDirectory(prefix="mlpipe-profile-") as folder:
            snapshot = Path(folder) / "memory.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            self._put(profiles.memory_key, snapshot.read_bytes())

    def _put(self, key_of: Callable[[str, int, int], str], data: bytes) -> None:
        session = self._session
        key = key_of(session.plan.attempt_key, self.profile.first_step, session.rank)
        session.store.put(key, data)

    def _name_layers(self, root: torch.nn.Module) -> None:
        names = {id(module): _plain(name) for name, module in root.named_modules()}
        open_spans: list[Any] = []

        def before(module: torch.nn.Module, args: Any) -> None:
            span = None
            if name := names.get(id(module)):
                span = record_function(f"{LAYER}{name}")
                span.__enter__()
            open_spans.append(span)

        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            span = open_spans.pop()
            if span is not None:
                span.__exit__(None, None, None)

        # also where a recomputation ends early, by an exception of torch's own
        for handle in (
            hooks.register_module_forward_pre_hook(before),
            hooks.register_module_forward_hook(after, always_call=True),
        ):
            self._undo.callback(handle.remove)

    def _name_part(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def spanned(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"{PART}{part}"):
                return function(*args, **kwargs)

        setattr(owner, name, spanned)
        self._undo.callback(delattr, owner, name)


class Machine:
    """Where this rank's threads ran meanwhile, and how often others took their place: no trace has it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._cpus: set[int] = set()

    def look(self) -> None:
        """At the CPU that each thread ran on last (proc_pid_stat(5), field 39)."""
        for path in Path("/proc/self/task").glob("*/stat"):
            try:
                self._cpus.add(int(path.read_text().rpartition(")")[2].split()[36]))
            except (OSError, IndexError, ValueError):
                continue

    def facts(self) -> dict[str, Any]:
        now = resource.getrusage(resource.RUSAGE_SELF)
        allowed = sorted(os.sched_getaffinity(0))
        return {
            "host": os.uname().nodename,
            "num_threads": torch.get_num_threads(),
            "allowed_cpus": allowed,
            "used_cpus": sorted(self._cpus),
            "nodes": {name: cpus for name, cpus in _numa_nodes().items() if set(cpus) & set(allowed)},
            "wall_seconds": time.perf_counter() - self._began,
            "cpu_seconds": now.ru_utime + now.ru_stime - self._usage.ru_utime - self._usage.ru_stime,
            "num_preempted": now.ru_nivcsw - self._usage.ru_nivcsw,
        }


def _numa_nodes() -> dict[str, list[int]]:
    """CPUs by node; empty where the kernel does not say."""
    nodes = {}
    for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"):
        cpus: list[int] = []
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            if first:
                cpus += range(int(first), int(last or first) + 1)
        nodes[path.parent.name.removeprefix("node")] = cpus
    return nodes


def _plain(name: str) -> str:
    """Without what techniques wrapped around it."""
    for wrapper in _WRAPPERS[2:]:
        name = name.replace(wrapper, "")
    while (shorter := next((name[len(w) :] for w in _WRAPPERS[:2] if name.startswith(w)), None)) is not None:
        name = shorter
    return "" if name in ("module", "model") else name
