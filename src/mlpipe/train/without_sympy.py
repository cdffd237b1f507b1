"""Keeps torch from importing sympy, half a CPU second of a rank's start, where sizes are plain numbers.

On the meta device its kernels ask symbolic_shapes whether sizes are equal and conditions hold, of numbers
Python's own answer, and whether a number is one of sympy's. What else they ask for is imported, as ever.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_SHAPES = "torch.fx.experimental.symbolic_shapes"
_SAME = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "guarding_hint_or_throw")
_OF_NUMBERS: dict[str, dict[str, Any]] = {
    "sympy": {"Basic": type("Basic", (), {})},
    _SHAPES: {
        **dict.fromkeys(_SAME, lambda value: value),
        "has_guarding_hint": lambda size: True,
        "is_nested_int": lambda size: not isinstance(size, int),
        "statically_known_true": lambda condition: condition is True,
        "sym_eq": lambda one, other: (
            list(one) == list(other) if isinstance(one, list | tuple) else one == other
        ),
        "sym_and": lambda *conditions: all(conditions),
        "sym_or": lambda *conditions: any(conditions),
    },
}


@contextmanager
def without_sympy() -> Iterator[None]:
    """In the `with`, unless somebody has imported it before."""
    if any(name in sys.modules for name in _OF_NUMBERS):
        yield
        return
    importlib.import_module("torch.fx.experimental._config")  # which kernels take as imported by the other
    stand_ins = {name: types.ModuleType(name) for name in _OF_NUMBERS}

    def leave() -> None:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]

    def of_torch(module: str, name: str) -> Any:
        if name.startswith("__"):  # of the import itself
            raise AttributeError(name)
        leave()
        return getattr(importlib.import_module(module), name)

    for module, stand_in in stand_ins.items():
        vars(stand_in).update(_OF_NUMBERS[module], __getattr__=partial(of_torch, module))
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        leave()
