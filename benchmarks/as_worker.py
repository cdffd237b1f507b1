"""The trainer's own worker, with a benchmark's `train` in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mlpipe.train import prepare, worker


def run(train: Callable[..., Any]) -> NoReturn:
    """As `python -m mlpipe.train.worker`."""
    prepare.train = train
    sys.exit(worker.main())
