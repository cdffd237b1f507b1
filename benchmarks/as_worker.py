"""The trainer's own worker, with a benchmark's `train` in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mlpipe.kinds.train import worker as stage
from mlpipe.train import worker


def run(train: Callable[..., Any]) -> NoReturn:
    """As `python -m mlpipe.train.worker`."""
    stage.train = train
    sys.exit(worker.main())
