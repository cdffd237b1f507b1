"""The trainer's own worker, with a benchmark's `train` in its place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mlpipe.train import loop, worker


def run(train: Callable[..., Any]) -> NoReturn:
    """As `python -m mlpipe.train.worker`; ends the process at once, whatever threads still run."""
    loop.train = train
    code = worker.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
