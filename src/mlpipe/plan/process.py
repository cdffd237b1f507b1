"""What is the same in every process that runs a stage: it is told `--plan PLAN --scratch DIR`, fetches what
the plan reads, and says what went wrong in one line and by its exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from mlpipe._core.errors import EXIT_CODES, MlpipeError
from mlpipe.plan.plan import Plan
from mlpipe.store import outputs
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


def fetch_inputs(store: Store, plan: Plan) -> None:
    """To where the plan says that they lie."""
    for key in plan.inputs:
        outputs.fetch_output(store, key, outputs.cache_folder() / "outputs")
