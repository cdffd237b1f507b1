"""Keeps torch from importing torch._dynamo (with sympy and inductor: 900 modules, 3 CPU seconds a process)
where nothing is compiled. Nothing changes once somebody has imported it, as `compile` does.

In torch 2.11 to 2.15 two things import it for no use of ours: the wrapper that keeps dynamo out of a function
(on its first call), and `DistributedDataParallel.__init__`, to ask for a setting. FSDP2 still does: a DTensor
operation imports it through FakeTensorMode.
"""

from __future__ import annotations

import importlib.abc
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path


class _Ours(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != "torch._compile":
            return None
        return spec_from_file_location(fullname, Path(__file__).with_name("torch_compile.py"))


def install() -> None:
    """To be called before the first `import torch`."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Ours())


@contextmanager
def no_dynamo_in_ddp() -> Iterator[None]:
    """While DistributedDataParallel is made: its question is answered with the default."""
    import torch

    if "torch._dynamo" in sys.modules:
        yield
        return
    utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    torch._dynamo = types.SimpleNamespace(utils=utils)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo
