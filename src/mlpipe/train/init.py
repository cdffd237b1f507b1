"""The same weights for a seed under every strategy and world size.

`init_weights()` of a model that left the meta device runs under a dispatch mode: each in-place random
operation draws the whole tensor from a generator seeded by (seed, number of the operation), and a rank keeps
the box of it that is its own. So no draw depends on how a parameter is split, every parameter may start from
another seed's stream, and only one parameter at a time exists in full.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from mlpipe._core.errors import TrainError
from mlpipe.train.slices import Slice, part_of, places, slices_of, whole_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_aten = torch.ops.aten
_IN_PLACE = {
    _aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.random_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_,
}  # fmt: skip


# What stands in memory before init_weights(): NaN in every floating dtype, and nothing likely in the others.
_UNWRITTEN_FLOAT, _UNWRITTEN = 0xFF, 0xA5


def mark_unwritten(tensor: Tensor) -> Tensor:
    """In place."""
    local: Any = tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    is_float = tensor.is_floating_point() or tensor.is_complex()
    local.untyped_storage().fill_(_UNWRITTEN_FLOAT if is_float else _UNWRITTEN)
    return tensor


@torch.no_grad()
def unwritten(model: nn.Module) -> list[str]:
    """Parameters and buffers of which this rank holds a part that nobody filled since `mark_unwritten`, or
    that was computed from such a part."""
    return [
        name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if _is_marked(tensor)
    ]


def refuse_unwritten(model: nn.Module, entry: str) -> None:
    """Of parameters: a buffer may well hold NaN. Raises TrainError (input) with their names."""
    parameters = dict(model.named_parameters())
    if missing := [name for name in unwritten(model) if name in parameters]:
        raise TrainError(
            f"neither its constructor nor init_weights() fills {some_of(missing)}",
            where=entry,
            hint="fill every parameter in one of them",
            kind="input",
        )


def some_of(names: list[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _is_marked(tensor: Tensor) -> bool:
    local: Any = tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    if not local.numel() or local.is_meta:  # or another pipeline stage has it
        return False
    if local.is_floating_point() or local.is_complex():
        return bool(local.isnan().any())
    return bool((local.reshape(-1).view(torch.uint8) == _UNWRITTEN).all())


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Of `source`, whole, into `target`, which is the same model, perhaps split over the ranks."""
    whole: dict[str, Tensor] = dict(source.named_buffers(remove_duplicate=False))
    whole.update(source.named_parameters(remove_duplicate=False))
    cuts = slices_of(target)
    for name, tensor in [*target.named_parameters(), *target.named_buffers()]:
        own = part_of(whole[name], cuts.get(id(tensor), ()))
        if _is_sharded(tensor):
            _keep_own(tensor, own)  # type: ignore[arg-type]
        else:
            tensor.copy_(own)


def initialize(model: nn.Module, seed: int, *, again: bool = False) -> None:
    """Calls `model.init_weights()`. Every rank has to call it. `again`: over weights that are there. Raises
    TrainError (input) when it draws random numbers in a way that would differ between strategies."""
    with torch.no_grad(), Wholes(model, again) as wholes, same_weights(seed, wholes):
        model.init_weights()  # type: ignore[operator]


class Wholes:
    """Slices of parameters (train/slices.py) are whole to init_weights(): its draws and its standard
    deviations are by the shape of the whole. While this is entered, something without memory of that shape
    stands for each; when it is used, one that has memory takes its place, until the next one is used."""

    def __init__(self, model: nn.Module, again: bool) -> None:
        self.model = model
        self.again = again
        self.sliced: dict[int, tuple[nn.Parameter, tuple[Slice, ...]]] = {}  # by the storage of who stands
        self.written: set[int] = set()
        self.current = 0
        self.whole: Tensor | None = None
        self.restored: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __enter__(self) -> Wholes:
        standing: dict[int, nn.Parameter] = {}
        for module, name, cuts in places(self.model):
            parameter = module._parameters[name]
            assert parameter is not None
            self.restored.append((module, name, parameter))
            if id(parameter) not in standing:
                shape = list(parameter.shape)
                for cut in cuts:
                    shape[cut.dim] *= cut.num_ranks
                one = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
                stand_in = nn.Parameter(one.expand(shape), requires_grad=parameter.requires_grad)
                standing[id(parameter)] = stand_in
                self.sliced[_storage(stand_in)] = parameter, cuts
            module._parameters[name] = standing[id(parameter)]
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, parameter in self.restored:
            module._parameters[name] = parameter
        self._keep()

    def real(self, value: Any) -> Any:
        """What stands for a whole becomes the whole."""
        if not isinstance(value, Tensor) or _is_sharded(value) or (key := _storage(value)) not in self.sliced:
            return value
        if key != self.current:
            self._keep()
            parameter, cuts = self.sliced[key]
            if not parameter.is_meta and (self.again or key in self.written):
                self.whole = whole_of(parameter, cuts)
            else:
                self.whole = mark_unwritten(torch.empty(value.shape, dtype=value.dtype, device=value.device))
            self.current = key
        return self.whole

    def _keep(self) -> None:
        if self.whole is None:
            return
        parameter, cuts = self.sliced[self.current]
        own = part_of(self.whole, cuts)
        if _is_sharded(parameter):
            _keep_own(parameter, own)  # type: ignore[arg-type]
        else:
            parameter.copy_(own)
        self.written.add(self.current)
        self.current, self.whole = 0, None


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class same_weights(TorchDispatchMode):
    """A context; `with same_weights(seed): ...` may initialise plain tensors and DTensors alike, and inside
    `wholes` slices."""

    def __init__(self, seed: int, wholes: Wholes | None = None) -> None:
        super().__init__()
        self.seed = seed
        self.wholes = wholes if wholes is not None and wholes.sliced else None
        self.num_draws = 0
        # what was asked for as a view, but had to be gathered: the call that asked
        self._copies = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.wholes is not None:
            args, kwargs = tree_map(self.wholes.real, (args, kwargs))
        target: Any = args[0] if args else None
        if isinstance(target, Tensor) and target.is_meta and func._schema.is_mutable:
            self.num_draws += func.overloadpacket in _IN_PLACE  # of another pipeline stage's parameter
            return target
        sharded = _is_sharded(target)
        if sharded and func._schema.is_mutable and target in self._copies:
            self._change_part(target, func, args, kwargs)
            return target
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        if sharded and func is _aten.copy_.default and not _is_sharded(args[1]):
            return _keep_own(target, args[1].expand(target.shape))
        result = func(*args, **kwargs)
        if sharded and func.is_view and _is_sharded(result):
            gathered = (
                result.to_local().untyped_storage()._cdata != target.to_local().untyped_storage()._cdata
            )
            if gathered or target in self._copies:
                self._copies[result] = (func, args, kwargs)
        return result

    def _change_part(self, part: DTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """As `weight[padding_idx].zero_()`: of a split parameter the part is a copy. It is changed in the
        whole parameter, which every rank gathers for that, and of which each keeps its own."""
        views: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        parent = part
        while parent in self._copies:
            views.append(self._copies[parent])
            parent = views[-1][1][0]
        whole = parent.full_tensor()
        inner = whole
        for view, given, options in reversed(views):
            inner = view(inner, *given[1:], **options)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(func, (inner, *args[1:]), kwargs)
        else:
            func(inner, *args[1:], **kwargs)
        _keep_own(parent, whole)
        _keep_own(part, inner)  # for who reads it later

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket not in _IN_PLACE:
            raise _unfit(f"init_weights() calls {func}, whose result depends on how the model is split")
        target = args[0]
        if kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator(target.device)}
        # contiguous for plain tensors too: torch draws in another order into a strided one
        full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        func(full, *args[1:], **kwargs)
        return _keep_own(target, full) if _is_sharded(target) else target.copy_(full)

    def _generator(self, device: torch.device) -> torch.Generator:
        name = f"{self.seed}:{self.num_draws}".encode()
        self.num_draws += 1
        draw = int.from_bytes(hashlib.sha256(name).digest()[:8], "little") >> 1  # manual_seed takes int64
        return torch.Generator(device).manual_seed(draw)


def _is_sharded(value: Any) -> bool:
    """A DTensor. Not by its class: importing that costs 2 s, which a replicated model need not pay."""
    return isinstance(value, Tensor) and hasattr(value, "placements")


def _keep_own(target: DTensor, full: Tensor) -> DTensor:
    """Copies this rank's box of `full` into `target`; no communication."""
    from torch.distributed.tensor import distribute_tensor

    own = distribute_tensor(full.to(target.dtype), target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(own.to_local())
    return target


def _unfit(message: str) -> TrainError:
    hint = "fill whole parameters in place, with torch.nn.init, tensor.normal_() and the like"
    return TrainError(message, hint=hint, kind="input")
