"""What is the same in every process that runs a stage: it is told `--plan PLAN --scratch DIR`, fetches what
the plan reads, and says what went wrong in one line and by its exit code."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from mlpipe._core.errors import EXIT_CODES, Interrupt, MlpipeError
from mlpipe.plan.plan import Plan
from mlpipe.store import outputs, runs
from mlpipe.store.base import Store


def main_of_stage(
    module: str, description: str | None, argv: list[str] | None, run: Callable[[Plan, Path, Path], int]
) -> int:
    """The exit code. `run` gets the plan, its path and the scratch folder, both absolute."""
    parser = argparse.ArgumentParser(prog=module, description=description)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    arguments = parser.parse_args(argv)
    plan: Plan | None = None
    try:
        plan = Plan.from_json(arguments.plan.read_bytes())
        return run(plan, arguments.plan.absolute(), arguments.scratch.absolute())
    except (OSError, ValueError) as error:
        of_machine = plan is not None and isinstance(error, OSError)  # a full disk is not the plan's fault
        where = "" if of_machine else f"{arguments.plan}: "
        print(f"error: {where}{error}", file=sys.stderr, flush=True)  # noqa: T201
        return EXIT_CODES["infrastructure" if of_machine else "input"]
    except MlpipeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return EXIT_CODES[error.kind]


def fetch_inputs(store: Store, plan: Plan, stop: Callable[[], None]) -> bool:
    """To where the plan says that they lie. False, after `stop`, where the run is cancelled: SIGTERM breaks
    it off. What came before anybody here listened the store tells: process 1 of a pod does not hear it, and
    whoever sent it would wait in vain. In the main thread."""

    fetching = True

    def stopped(*_: object) -> None:
        nonlocal fetching
        stop()
        if fetching:
            fetching = False
            raise Interrupt

    former = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, stopped)
        if runs.cancel_requested(store, plan.run_id) is not None:
            fetching = False
            stop()
            return False
        for key in plan.inputs:
            outputs.fetch_output(store, key, outputs.cache_folder() / "outputs")
        fetching = False
        return True
    except Interrupt:
        return False
    finally:
        signal.signal(signal.SIGTERM, former)
