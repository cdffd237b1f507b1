"""Stands in for torch's module torch._compile (see without_dynamo.py), whose one function this is.

As torch's, it wraps a function that dynamo must not trace; unlike it, it does not import dynamo to say so:
as long as nobody else has, there is nothing that could trace.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def _disable_dynamo(fn: Callable[..., Any] | None = None, recursive: bool = True) -> Callable[..., Any]:
    if fn is None:
        return functools.partial(_disable_dynamo, recursive=recursive)
    disabled: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:
                return fn(*args, **kwargs)
            disabled = disable(fn, recursive, wrapping=False)
        return disabled(*args, **kwargs)

    return inner
