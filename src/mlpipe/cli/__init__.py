"""The command line: one small file a verb. Here and in `train/launcher.py` an error becomes an exit code."""

from __future__ import annotations

import gc
import os
import signal


def main() -> None:
    """The console script `mlpipe`."""
    # Imports make many objects and no garbage: looking for it every 700 of them took a tenth of a command.
    gc.set_threshold(100_000, 50, 50)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing has begun; run_app has its own
    from mlpipe.cli.app import run_app

    try:
        run_app()
    finally:
        gc.freeze()  # all goes with the process: to look for garbage among it once more took an eighth
