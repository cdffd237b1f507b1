"""mlpipe: one YAML file trains a model on a laptop, through Jenkins and on a gang of GPU pods.

What Python programs and notebooks call stands in `_HOMES`; docs/reference/python.md describes it. Each is
imported when it is first used, so that `import mlpipe` costs nothing.
"""

from __future__ import annotations

import sys

# The command imports this first, and Ctrl-C ends it without a traceback from here on: `cli/app.py` has the
# handler of what has begun. Of `signal`, which would have to be imported, the part that Python begins with.
if "".join(sys.argv[:1]).endswith("/mlpipe"):
    import _signal
    import os

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # else it is ignored
        try:  # noqa: SIM105 - contextlib would have to be imported
            _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))
        except ValueError:  # in a thread of another program that is called so
            pass

from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "load": "mlpipe.api.pipeline",
    "LoadedPipeline": "mlpipe.api.pipeline",
    "plan": "mlpipe.api.planning",
    "StagePlan": "mlpipe.plan.ahead",
    "run": "mlpipe.api.start",
    "submit": "mlpipe.api.start",
    "Run": "mlpipe.api.run",
    "SavedCheckpoint": "mlpipe.api.run",
    "sweep": "mlpipe.api.sweep",
    "Sweep": "mlpipe.api.sweep",
    "runs": "mlpipe.api.listing",
    "compare": "mlpipe.api.comparing",
    "Table": "mlpipe.api.table",
    "MlpipeError": "mlpipe._core.errors",
    "SpecError": "mlpipe._core.errors",
    "PlanError": "mlpipe._core.errors",
    "StoreError": "mlpipe._core.errors",
    "SubmitError": "mlpipe._core.errors",
    "TrainError": "mlpipe._core.errors",
}
__all__ = [*_HOMES, "__version__"]
_PACKAGES = ("plan", "submit")  # of ours as well: see CallablePackage


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"mlpipe.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class CallablePackage(ModuleType):
    """`mlpipe.plan(...)` and `mlpipe.submit(...)` are functions to whoever calls them, and packages to
    whoever imports from them. Python knows one name for both, so the packages can be called."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_HOMES[name]), name)(*arguments, **options)
