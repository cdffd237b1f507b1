"""The command line: one small file a verb. Here and in `train/launcher.py` an error becomes an exit code."""

from __future__ import annotations

import gc


def main() -> None:
    """The console script `mlpipe`."""
    # Imports make many objects and no garbage: looking for it every 700 of them took a tenth of a command.
    gc.set_threshold(100_000, 50, 50)
    from mlpipe.cli.app import run_app

    run_app()
