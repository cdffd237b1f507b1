"""What the console scripts beside `mlpipe` have in common: how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from mlpipe._core.errors import EXIT_CODES, MlpipeError


def exit_code(prog: str, work: Callable[[], object], place: str) -> int:
    """Of `work()`: 0 done, 2 bad input, 4 no space or permission, or a bucket is away, 130 interrupted; with
    the reason on standard error. `place`: what an error of the system is told of that names no file."""
    try:
        work()
    except MlpipeError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return EXIT_CODES[error.kind]
    except OSError as error:
        sys.stderr.write(f"{prog}: {error.filename or place}: {error.strerror or error}\n")
        return EXIT_CODES["infrastructure"]
    except KeyboardInterrupt:
        return EXIT_CODES["interrupted"]
    return 0
