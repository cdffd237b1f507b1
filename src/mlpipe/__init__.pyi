# What `__init__.py` imports on first use, for type checkers and editors.

from types import ModuleType
from typing import Any

from mlpipe._core.errors import MlpipeError as MlpipeError
from mlpipe._core.errors import PlanError as PlanError
from mlpipe._core.errors import SpecError as SpecError
from mlpipe._core.errors import StoreError as StoreError
from mlpipe._core.errors import SubmitError as SubmitError
from mlpipe._core.errors import TrainError as TrainError
from mlpipe.api.comparing import compare as compare
from mlpipe.api.listing import runs as runs
from mlpipe.api.pipeline import LoadedPipeline as LoadedPipeline
from mlpipe.api.pipeline import load as load
from mlpipe.api.planning import plan as plan
from mlpipe.api.run import Run as Run
from mlpipe.api.run import SavedCheckpoint as SavedCheckpoint
from mlpipe.api.start import run as run
from mlpipe.api.start import submit as submit
from mlpipe.api.sweep import Sweep as Sweep
from mlpipe.api.sweep import sweep as sweep
from mlpipe.api.table import Table as Table
from mlpipe.plan.ahead import StagePlan as StagePlan

__version__: str
__all__: list[str]

class CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any: ...
