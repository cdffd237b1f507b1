"""What a fork does in place of a new interpreter."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_as_program(program: Callable[[], object], *, clean_up: bool = True) -> NoReturn:
    """Ends the process as the interpreter would: by what `program` returns, or the SystemExit that it raises.
    `clean_up`: waits for threads, and calls what is registered with atexit."""
    code: object = 1
    try:
        code = program()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)  # noqa: T201  # as the interpreter does
            code = 1
        with contextlib.suppress(BaseException):
            if clean_up:
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)
