"""How tensors that ranks average can be sent in fewer bytes: the names that a pipeline can say, their
arguments, and what they send.

This table lies in the lowest layer because three layers follow it: `spec` accepts names and arguments by it,
`plan` counts bytes by it and `train` builds by it. A new one is one file in `train/parallel/compression/` and
one entry here.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

BLOCK = 256  # values that share a scale
_SCALE_BITS = 32 / BLOCK


class Sent(NamedTuple):
    """Bits of a parameter of `rows` x `columns` (of a vector 1) that an all-reduce carries, and those that
    each rank gives to each other one."""

    reduced_bits: float = 0.0
    gathered_bits: float = 0.0


class Argument(NamedTuple):
    """A number, whole where `default` is. Both bounds are allowed themselves."""

    default: float
    about: str
    least: float
    most: float


class Compression(NamedTuple):
    """`build`: `package.module:function`; called with the arguments, it gives what averages a bucket of
    gradients (`train/parallel/compression/averager.py`). `sent`: for a parameter of so many rows and columns,
    by the arguments. `is_code`: each value has a code of its own, so that it serves any tensor."""

    about: str
    build: str
    sent: Callable[[int, int, Mapping[str, float]], Sent]
    arguments: Mapping[str, Argument]
    is_code: bool = False


def _coded(bits: float) -> Callable[[int, int, Mapping[str, float]], Sent]:
    return lambda rows, columns, args: Sent(reduced_bits=bits * rows * columns)


def _low_rank(rows: int, columns: int, args: Mapping[str, float]) -> Sent:
    """Two factors in 16 bits, where that is less."""
    if not is_factored(rows, columns, int(args["rank"])):
        return Sent(reduced_bits=16 * rows * columns)
    return Sent(reduced_bits=16 * int(args["rank"]) * (rows + columns))


def is_factored(rows: int, columns: int, rank: int) -> bool:
    """Whether two factors have fewer values than half of the matrix."""
    return 2 * rank * (rows + columns) < rows * columns


def _largest(rows: int, columns: int, args: Mapping[str, float]) -> Sent:
    """Each with its place: 16 + 32 bits."""
    return Sent(gathered_bits=48 * args["ratio"] * rows * columns)


_CODES = "mlpipe.train.parallel.compression.codes"
COMPRESSIONS: dict[str, Compression] = {
    "bf16": Compression("Values in bf16.", f"{_CODES}:bf16", _coded(16), {}, is_code=True),
    "fp16": Compression(
        "Values in fp16, scaled so that the largest fits.", f"{_CODES}:fp16", _coded(16), {}, is_code=True
    ),
    "int8": Compression(
        f"Values in 8 bits, a scale for each {BLOCK}.", f"{_CODES}:int8", _coded(8 + _SCALE_BITS), {}, True
    ),
    "int4": Compression(
        f"Values in 4 bits, a scale for each {BLOCK}.", f"{_CODES}:int4", _coded(4 + _SCALE_BITS), {}, True
    ),
    "powersgd": Compression(
        "PowerSGD (Vogels et al., 2019): each matrix as the product of two of low rank, in 16 bits; vectors "
        "in 16 bits.",
        "mlpipe.train.parallel.compression.powersgd:powersgd",
        _low_rank,
        {"rank": Argument(8, "Columns of the factors.", 1, 1024)},
    ),
    "topk": Compression(
        "The largest values of each bucket, and their places (Aji and Heafield, 2017). What a rank receives "
        "grows with the number of ranks.",
        "mlpipe.train.parallel.compression.topk:topk",
        _largest,
        {"ratio": Argument(0.05, "Share of the values that is sent.", 0.0001, 0.5)},
    ),
}
CODES = tuple(name for name, one in COMPRESSIONS.items() if one.is_code)
