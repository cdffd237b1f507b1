"""Imported once a node, by the process that ranks are forked from (`torchrun.py`): what every rank of the
plan needs. Nothing here may start threads, touch a device or run a user's code: a fork keeps none of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mlpipe._core import environment
from mlpipe.plan.plan import Plan
from mlpipe.train import without_dynamo
from mlpipe.train.stop import die_with_parent

if sys.argv[0] == "-c":  # a fork server that multiprocessing started, since the first one is gone
    die_with_parent(os.getppid())
    without_dynamo.install()

from mlpipe.train.parallel.apply import techniques  # with torch: behind what was just installed

_plan = Plan.from_json(Path(os.environ[environment.PLAN]).read_bytes())
_plan.kind.part("worker")
techniques(_plan.work.training)
