"""A GPU that is not there: tensors that have its name, shapes and dtypes, and no values (FakeTensorMode).
What is made on the host by mistake is refused where it meets them, and so is what the host would have to wait
for: a value that decides what comes next.

To C++ they lie on torch's meta device, since autograd would ask a driver for the streams of a real one. What
C++ makes beside them is put on the GPU here, and so is the choice of a kernel for attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # looks at signatures that are replaced here
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mlpipe.plan.mesh import Mesh
from mlpipe.plan.work import TrainPlan
from mlpipe.train.model import BuiltModel, build_model
from mlpipe.train.parallel import materialize
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World

GPU = torch.device("cuda", 0)
_META = torch.device("meta")
_HOPPER, _CUDNN = (9, 0), 92_600
_make_subclass, _tensor = torch.Tensor._make_subclass, torch.tensor


class OnGpu(FakeTensorMode):  # type: ignore[no-untyped-call]
    """While it is entered. `calls`: arguments of each call of an operator, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == _META:
            kwargs["device"] = GPU
        self.calls.setdefault(func.name(), []).append(args)
        return super().__torch_dispatch__(func, types, args, kwargs)


def pretend(monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    """Until the test ends, torch believes in a Hopper GPU."""

    def make(cls: Any, elem: Any, requires_grad: bool = False, **given: Any) -> Any:
        if cls is FakeTensor:
            given.pop("dispatch_device", None)
        return _make_subclass(cls, elem, requires_grad, **given)

    def tensor(*data: Any, device: Any = None, **given: Any) -> Tensor:
        made = _tensor(*data, **given)
        return made if device is None else made.to(device)

    monkeypatch.setattr(torch.Tensor, "_make_subclass", staticmethod(make))
    monkeypatch.setattr(torch, "tensor", tensor)
    for name, kind in (("is_cuda", "cuda"), ("is_meta", "meta"), ("is_cpu", "cpu")):
        monkeypatch.setattr(FakeTensor, name, _is_on(kind), raising=False)
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None, raising=False)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    for name, answer in (("is_bf16_supported", True), ("get_device_capability", _HOPPER)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: _CUDNN)
    monkeypatch.setattr(F, "scaled_dot_product_attention", _attention)
    monkeypatch.setattr(materialize, "materialize", _materialize)
    return OnGpu()


def _is_on(kind: str) -> Any:
    return property(lambda self: self.device.type == kind)


def _attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """As torch chooses on a GPU; a kernel that stores T x T numbers is none of these."""
    result: Tensor
    if q.dtype == torch.float32:
        assert not enable_gqa
        result, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, is_causal
        )
    else:
        result, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return result


def _materialize(built: BuiltModel, seed: int, device: torch.device) -> None:
    """Without drawing numbers, which takes a generator of the device."""
    for module in built.module.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device
                )
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def model_of(plan: TrainPlan, mode: OnGpu) -> ParallelizedModel:
    """To be called while `mode` is not entered."""
    built = build_model(plan.model, seed=plan.seed, device_type=GPU.type, precision=plan.precision)
    with mode:
        return parallelize(built, World(Mesh(), 0, GPU), plan)
