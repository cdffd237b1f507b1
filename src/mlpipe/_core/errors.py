"""The whole error tree. Users see what, where and what to do; a traceback only with --debug.

    MlpipeError            a bug in mlpipe unless a subclass or `kind` says otherwise
      SpecError            the pipeline file is wrong                      input
      PlanError            the pipeline cannot run as asked                input
      RenderError          a manifest cannot be written                    input
      StoreError           the store is unreachable, full or corrupt       infrastructure
        DamagedError       it gave back other bytes than were written      infrastructure
      SubmitError          a run cannot be started, found or followed      infrastructure
      TrainError           the run failed by its own code or its gate      failed

`kind` decides the exit code, which only `cli/` and the processes of stages (`plan/process.py`) know.
"""

from __future__ import annotations

from typing import Literal

from mlpipe._core.printable import in_one_line

# Whose fault it is. (A `Kind` is one of stages: `mlpipe.kinds`.)
ErrorKind = Literal["bug", "input", "failed", "infrastructure", "cancelled", "interrupted"]

EXIT_CODES: dict[ErrorKind, int] = {
    "bug": 1,
    "input": 2,
    "failed": 3,
    "infrastructure": 4,
    "cancelled": 5,
    "interrupted": 130,
}

KINDS_BY_CODE: dict[int, ErrorKind] = {code: kind for kind, code in EXIT_CODES.items()}

# What whoever starts the same thing again makes of them. torchrun, which starts workers anew in an attempt:
# these kinds would come again, while a failure of the user's own code need not.
FATAL_KINDS: tuple[ErrorKind, ...] = ("input", "bug")
# A launcher whose machine did not pass its preflight says so by a code of its own: the driver starts the
# stage elsewhere, since pods that start anew may stand on the same machine.
NODE_FAULT_CODE = 6
# Kubernetes, which starts pods anew when all that is used up: these codes would come again.
NON_RETRIABLE_CODES = (EXIT_CODES["input"], EXIT_CODES["failed"], NODE_FAULT_CODE)
# A launcher that was stopped by a signal and has saved goes on, which costs a JobSet nothing. All else
# counts.
SAVED_CODE = EXIT_CODES["cancelled"]


class MlpipeError(Exception):
    """What went wrong, where (`file:line:col`, a key, a URL, a rank) and what to do about it."""

    kind: ErrorKind = "bug"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        kind: ErrorKind | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint
        if kind is not None:
            self.kind = kind

    @property
    def told(self) -> str:
        """What and where, for whoever shows the hint apart."""
        return f"{in_one_line(self.where)}: {self.message}" if self.where else self.message

    def __str__(self) -> str:
        return f"{self.told}\n  hint: {self.hint}" if self.hint else self.told


class SpecError(MlpipeError):
    """The pipeline file is wrong."""

    kind: ErrorKind = "input"


class PlanError(MlpipeError):
    """The pipeline cannot run as it was asked for."""

    kind: ErrorKind = "input"


class RenderError(MlpipeError):
    """A manifest or Jenkinsfile cannot be written."""

    kind: ErrorKind = "input"


class StoreError(MlpipeError):
    """The store is unreachable, full or corrupt."""

    kind: ErrorKind = "infrastructure"


class DamagedError(StoreError):
    """Reading again would give the same."""


class SubmitError(MlpipeError):
    """A run cannot be started, found or followed."""

    kind: ErrorKind = "infrastructure"


class TrainError(MlpipeError):
    """The run failed by its own code or its gate."""

    kind: ErrorKind = "failed"


class Interrupt(KeyboardInterrupt):
    """Ctrl-C. CPython remembers a plain KeyboardInterrupt that passes through `exec` of a string (as
    dataclasses do while a module is imported): `python -m` then dies of SIGINT at its end, caught or not."""
