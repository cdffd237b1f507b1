"""Weights that a training started from, with what its adapters add to them: W + scale * B A of each layer
that has one (with DoRA, each row as long as the magnitude says), in fp32, rounded to the dtype that W has
there, as peft's `merge_and_unload` does. Weights that were kept in few bits are what these said: beside
that the adapters were trained. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlpipe._core.adapters import MAGNITUDE, A, B, is_adapter, scale
from mlpipe._core.errors import TrainError
from mlpipe._core.quantized import BLOCK, NF4, NF4_BORDERS, STEPS, Base, is_quantized
from mlpipe._core.serial import from_plain
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import AdapterPlan, InitPlan
from mlpipe.store.base import Store
from mlpipe.store.manifest import Manifest, Tensor
from mlpipe.train.base_weights import names_here, open_found
from mlpipe.train.matching import rename
from mlpipe.train.write_safetensors import reader

Array = NDArray[Any]
_FLOATS = ("float32", "float16", "bfloat16", "float64")


class Merged:
    """`weights`: all of the model, by the names that an export gives them."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        exported: Callable[[str], str],
        own: dict[str, Tensor],
        key: str,
    ) -> None:
        """`exported`: the name that an export gives a tensor of the model. `own`: what the checkpoint `key`
        has of it, by these names: adapters and buffers. Raises TrainError (input) where the weights are gone,
        or others, or not all there."""
        scalars = manifest["scalars"]
        init = from_plain(InitPlan, scalars["init_from"])
        if not init.strict:
            raise TrainError(
                "some of the weights beside the adapters may be the seed's, which are stored nowhere",
                where=key,
                hint="only a training with init_from.strict: true can be merged",
                kind="input",
            )
        model = Entry(scalars["model"]["entry"], scalars["model"]["args"])
        source = open_found(store, init, model)
        names = rename(source.tensors, names_here(init, model.entry))
        self._adapters = {name: tensor for name, tensor in own.items() if is_adapter(name)}
        self._buffers = {name: tensor for name, tensor in own.items() if not is_adapter(name)}
        there = {exported(here): source.tensors[name] for here, name in names.items()}
        self.weights = there | self._buffers
        self._base = reader(source.store, source.blobs, source.read)
        self._own = reader(store, manifest["blobs"])
        self._plan = from_plain(AdapterPlan, scalars["adapter"])
        missing = [name for name in self._adapters if f"{name.rpartition('.')[0]}.weight" not in there]
        if missing:
            raise TrainError(f"there is no weight for {missing[0]}", where=source.where, kind="input")

    def read(self, name: str, tensor: Tensor) -> memoryview:
        """A `Reader`."""
        if name in self._buffers:
            return self._own(name, tensor)
        whole = self._base(name, tensor)
        layer = name.removesuffix(".weight")
        a, b, magnitude = (self._adapters.get(f"{layer}.{part}") for part in (A, B, MAGNITUDE))
        base = self._plan.base if is_quantized(name) else None
        if base is None and (a is None or b is None):
            return whole
        weight = _floats(whole, tensor) if base is None else in_few_bits(_floats(whole, tensor), base)
        if a is None or b is None:
            return _bytes(weight, tensor["dtype"])
        down, up = (_floats(self._own(name, one), one) for one in (a, b))
        factor = np.float32(scale(self._plan.alpha, self._plan.rank, rslora=self._plan.rslora))
        weight = weight + factor * (up @ down)
        if magnitude is not None:
            lengths = _floats(self._own(name, magnitude), magnitude)
            weight *= (lengths / np.linalg.norm(weight, axis=1))[:, None]
        return _bytes(weight, tensor["dtype"])


def in_few_bits(weights: Array, base: Base) -> Array:
    """What `train/models/quantized_linear.py` makes of fp32 weights (rows, columns)."""
    rows, columns = weights.shape
    blocks = np.pad(weights, ((0, 0), (0, -columns % BLOCK))).reshape(rows, -1, BLOCK)
    largest = np.abs(blocks).max(-1, keepdims=True)
    ratios = blocks / np.maximum(largest, np.finfo(np.float32).tiny)
    scales = _floats(
        _bytes(largest, "bfloat16"), {"dtype": "bfloat16", "shape": list(largest.shape), "chunks": []}
    )
    if base == "int8":
        values = np.rint(ratios * np.float32(STEPS)) * (scales / np.float32(STEPS))
    else:
        nearest = np.searchsorted(np.array(NF4_BORDERS, np.float32), ratios)
        values = np.array(NF4, np.float32)[nearest] * scales
    return values.reshape(rows, -1)[:, :columns].astype(np.float32)


def _floats(data: memoryview, tensor: Tensor) -> Array:
    """In fp32. Raises TrainError (input) for what is no float."""
    dtype = tensor["dtype"]
    if dtype not in _FLOATS:
        raise TrainError(
            f"adapters cannot be merged into weights of {dtype}",
            hint="merge them with peft, where the weights are unpacked",
            kind="input",
        )
    if dtype == "bfloat16":  # which numpy has not: the upper half of an fp32
        return (
            (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor["shape"])
        )
    return np.frombuffer(data, dtype).astype(np.float32).reshape(tensor["shape"])


def _bytes(values: Array, dtype: str) -> memoryview:
    if dtype != "bfloat16":
        return np.ascontiguousarray(values.astype(dtype)).reshape(-1).view(np.uint8).data
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, of two the even one
    return np.where(np.isnan(values.reshape(-1)), 0x7FC0, rounded).astype(np.uint16).view(np.uint8).data
