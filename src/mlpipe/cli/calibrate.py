"""`mlpipe calibrate`: what this machine can do, as a file for `plan --hardware` and `resources.hardware`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from mlpipe._core.errors import PlanError, TrainError
from mlpipe.cli.session import CliSession, shared

if TYPE_CHECKING:
    from mlpipe._core.cpu_load import Load
    from mlpipe.plan.calibration import Calibration
    from mlpipe.plan.measured import Measured

T = TypeVar("T")
_DEADLINE_SECONDS = 120.0  # of a machine of its own: 10 to 25 s
_LOOK_SECONDS = 1.0


@click.command()
@click.option("--out", type=click.Path(), default="hardware.json", show_default=True, help="File to write.")
@click.option(
    "--ranks", type=click.IntRange(1, 64), default=None, help="Up to so many. Default: the devices."
)
@click.option("--from-run", metavar="RUN", help="Measure nothing; hold this finished run against the file.")
@click.option("--force", is_flag=True, help="Write figures although others used the machine meanwhile.")
@shared
@click.pass_obj
def command(session: CliSession, out: str, ranks: int | None, from_run: str | None, force: bool) -> None:
    """Measure matmuls, memory, collectives and the store here, or feed a run's figures back.

    Exits 4 and writes nothing where others use more than a tenth of the CPUs, or a hypervisor takes a
    twentieth.
    """
    from dataclasses import asdict

    from mlpipe.plan.calibration import Calibration, load, save

    if from_run is not None:
        calibration = _add_run(session, load(out), from_run)
    else:
        before = load(out).runs if Path(out).exists() else ()
        if before:
            names = ", ".join(dict.fromkeys(item.run for item in before))
            session.note(f"what runs taught was about the old figures; add them again: {names}")
        _refuse_foreign(_load_during(lambda: time.sleep(_LOOK_SECONDS))[1], force)
        device, most = _devices()
        measured, loads = {}, []
        for number in _numbers(ranks or most):
            session.note(f"measuring with {_ranks(number)}")
            work = partial(_measure, session, number, max(1, _cores() // number))
            measured[str(number)], seen = _load_during(work)
            _refuse_foreign(seen, force)
            loads += [seen] if seen is not None else []
        worst = max(loads, key=lambda seen: seen.others_ratio + seen.steal_ratio, default=None)
        calibration = Calibration(1, _name(device), device, measured, (), worst)
    save(out, calibration)
    session.result({"file": out, **asdict(calibration)}, _text(out, calibration))


def _load_during(work: Callable[[], T]) -> tuple[T, Load | None]:
    """What `work` gives, and what others did meanwhile; None where the machine does not say."""
    from mlpipe._core.cpu_load import Clock

    before, own = Clock.read(), sum(os.times()[:4])
    result = work()
    after = Clock.read()
    used = sum(os.times()[:4]) - own  # with the processes that ended meanwhile
    return result, before.until(after, used) if before is not None and after is not None else None


def _refuse_foreign(load: Load | None, force: bool) -> None:
    if load is not None and load.is_foreign and not force:
        raise PlanError(
            f"{load}: no figures to plan with",
            hint="calibrate on an idle machine; --force writes them all the same",
            kind="infrastructure",
        )


def _numbers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({1 << i for i in range(7) if 1 << i <= most} | {most})


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"


def _cores() -> int:
    from mlpipe.plan.hardware import detect_hardware

    return detect_hardware(None).cpus_per_node


def _devices() -> tuple[str, int]:
    from mlpipe.submit.process_executor import gpu_ids

    gpus = len(gpu_ids())
    return ("cuda", gpus) if gpus else ("cpu", min(_cores(), 8))


def _name(device: str) -> str:
    from mlpipe._core.cpus import processor

    if device == "cuda":
        import subprocess

        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        except OSError:  # not every container has it
            return "GPU"
        return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else "GPU"
    return processor()


def _measure(session: CliSession, ranks: int, threads: int) -> Measured:
    import subprocess
    import tempfile

    from mlpipe._core.serial import from_plain
    from mlpipe.plan.allocators import glibc
    from mlpipe.plan.measured import Measured

    with tempfile.TemporaryDirectory(prefix="mlpipe-calibrate-") as folder:
        written = Path(folder) / "measured.json"
        store = session.store_url or f"{folder}/store"
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        argv += ["-m", "mlpipe.train.calibrate", str(written), store]
        env = {**os.environ, **glibc.environment(trimming=False), "OMP_NUM_THREADS": str(threads)}
        env["PYTHONSAFEPATH"] = "1"  # also of the ranks: no module of the working folder is taken for another
        try:
            done = subprocess.run(
                argv, env=env, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise TrainError(
                f"measuring with {_ranks(ranks)} took over {_DEADLINE_SECONDS:.0f} s",
                hint="is the machine busy?",
                kind="infrastructure",
            ) from None
        if done.returncode or not written.exists():
            tail = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise TrainError(
                f"measuring with {_ranks(ranks)} failed: {tail}", hint="mlpipe doctor says what is missing"
            )
        return from_plain(Measured, json.loads(written.read_bytes()))


def _add_run(session: CliSession, calibration: Calibration, run_id: str) -> Calibration:
    from dataclasses import replace

    from mlpipe.observe.predicted import compared
    from mlpipe.plan.feedback import predict_again
    from mlpipe.store.runs import read_run
    from mlpipe.submit.planning import load_stored

    store = session.store_of(run_id)
    pipeline = load_stored(store, run_id, read_run(store, run_id).meta.get("set", []))
    more = compared(store, run_id, partial(predict_again, pipeline, calibration))
    if not more:
        raise PlanError(
            f"nothing of {run_id} can be compared", hint="it needs a finished training with a prediction"
        )
    mine = {(item.run, item.stage) for item in more}
    kept = tuple(item for item in calibration.runs if (item.run, item.stage) not in mine)
    return replace(calibration, runs=(*kept, *more))


def _text(out: str, calibration: Calibration) -> str:
    lines = [f"{calibration.name}, {calibration.device}"]
    for number, item in calibration.ranks.items():
        peaks = ", ".join(f"{name} {k.peak_flops / 1e9:,.0f} GFLOP/s" for name, k in item.kernels.items())
        link = f", link {item.link_bytes_per_second / 1e9:.2f} GB/s" if item.link_bytes_per_second else ""
        memory = f"memory {item.memory_bytes_per_second / 1e9:.1f} GB/s"
        store = f"store {item.store_bytes_per_second / 1e6:,.0f} MB/s"
        lines.append(f"{number} rank{'s' if number != '1' else ' '}  {peaks}, {memory}{link}, {store}")
    if calibration.load is not None:
        lines.append(f"meanwhile {calibration.load}")
    if calibration.runs:
        lines.append(f"compared with {len(calibration.runs)} run{'s' if len(calibration.runs) > 1 else ''}")
    return "\n".join([*lines, f"written to {out}; use it: mlpipe plan SPEC --hardware {out}"])
