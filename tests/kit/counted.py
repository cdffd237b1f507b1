"""`torchrun -m kit.counted LIST`: as kit.many, and counts what the host of rank 0 is asked to do: calls of
operators, allocations, numbers read from tensors (on a GPU each makes the host wait for the device), and
calls and bytes of each collective, from the second step on. Beside LIST, in `counts-<run id>.json`: the
counts by the number of the step that began then, and at the "end"."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from kit import many
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlpipe.train.loop import Loop
from mlpipe.train.outcome import Outcome
from mlpipe.train.session import Session


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes: of the tensors that a collective is given, input and output counted both. An allocation is a
    storage among an operator's results that none of its arguments has; what a kernel takes and gives back
    within is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found["operators"] += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default:  # `.item()`, `float()`, `bool()`
            self.found["numbers read one by one"] += 1
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            self.found[name] += 1
            self.found[f"{name} bytes"] += sum(one.numel() * one.element_size() for one in tensors)
        given = {_storage(one) for one in tensors}
        kernel = _kernel(func)
        if kernel is None:
            result = func(*args, **(kwargs or {}))
        else:
            with self:
                result = kernel(*args)
        made = {_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        self.found["allocations"] += len(made - given)
        return result


def _kernel(func: Any) -> Any:
    """Of an operator of ours, what it runs: its own operators and collectives count, too."""
    if func.namespace != "mlpipe":
        return None
    from mlpipe.train.models import moe
    from mlpipe.train.parallel import context_attention

    return {
        "count_rows": moe._count_rows,
        "context_attention": context_attention._forward,
        "context_attention_backward": context_attention._backward,
    }[func.overloadpacket.__name__]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_run, _step = Session.run, Loop.step


def _counted(session: Session, progress: list[int]) -> Outcome:
    if session.process.rank:
        return _run(session, progress)
    found: dict[str, dict[str, int]] = {}
    counts = Counts()
    with ExitStack() as counting:

        def step(loop: Loop) -> tuple[bool, bool]:
            if len(found) == 1:
                counting.enter_context(counts)
            found[str(loop.position.step + 1)] = dict(counts.found)
            return _step(loop)

        Loop.step = step  # type: ignore[method-assign, assignment]
        ended: Outcome = _run(session, progress)
    found["end"] = counts.found
    path = Path(sys.argv[1]).with_name(f"counts-{session.plan.run_id}.json")
    path.write_text(json.dumps(found))
    return ended


if __name__ == "__main__":
    Session.run = _counted  # type: ignore[method-assign, assignment]
    code = many.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
