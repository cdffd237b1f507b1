"""What a mesh of the pipeline file means, and why one cannot be trained: for the file (`spec/mesh.py` adds
the line) and for the planner, which knows the tokens' vocabulary and the workers. `train/parallel/` has a
technique for each axis, and `plan/axes/` its price."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mlpipe._core.feasibility import Infeasible, setting
from mlpipe._core.optimizers import OPTIMIZERS

FACTORS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # multiply to the workers; outermost first
AXES = (*FACTORS, "ep")
DATA_AXES = ("dp_replicate", "dp_shard")  # whose ranks read different samples
# A name for settings of a mesh, and by it the data axes that may be larger than 1.
Strategy = Literal["single", "ddp", "zero1", "zero2", "fsdp", "hsdp"]
STRATEGIES: dict[str, tuple[str, ...]] = {
    "single": (),
    "ddp": ("dp_replicate",),
    "zero1": ("dp_replicate",),
    "zero2": ("dp_shard",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
}
FILL = "fill"  # a size: what the others leave of the workers

# What `tp` splits evenly of a model: attention by whole heads, experts by whole ones, the rest by channels
# and tokens.
TENSOR_WIDTHS = ("num_heads", "num_kv_heads", "num_experts", "ffn_dim", "vocab_size", "seq_len")


class Mix(NamedTuple):
    """What the trainer cannot do together: an `axis` larger than 1, and a `key` of the training, like
    `optimizer.name`, with one of `values`, or with none of them a key that is written at all, or another axis
    larger than 1. `why`: completes a sentence."""

    axis: str
    key: str
    values: tuple[Any, ...]
    why: str


UNEVEN = ("resident", "on_demand")  # of `communication`: ranks need not have equally many microbatches
_PACKINGS = ("off", "best_fit", "balanced")  # of `data.packing`: samples differ in length
_TOGETHER = "its workers compute the same micro-batches together"
MIXES: tuple[Mix, ...] = (
    *(
        Mix(axis, "optimizer.name", (name,), "it needs whole matrices")
        for name, optimizer in OPTIMIZERS.items()
        for axis in optimizer.uncut
    ),
    *(Mix(axis, "data.chat", (), "its samples differ in length") for axis in ("pp", "cp", "tp")),
    *(Mix(axis, "data.packing", _PACKINGS, "its samples differ in length") for axis in ("pp", "cp", "tp")),
    Mix("tp", "adapter.lora.dora", (True,), "it needs whole rows of the weights"),
    Mix("tp", "adapter.base", (), "weights of few bits are split by whole rows"),
    Mix("pp", "adapter.base", (), "a stage keeps its weights as they are"),
    *(Mix(axis, "communication", ("on_demand",), _TOGETHER) for axis in ("pp", "cp", "tp", "ep")),
    Mix(
        "pp", "stragglers", ("move_load",), "its ranks may hold all microbatches of a share, which would grow"
    ),
    Mix("ep", "stragglers", ("move_load",), "ranks that send each other rows have equal shares"),
    *(Mix(axis, "compress", (), "it is for gradients of whole models") for axis in ("pp", "dp_shard", "tp")),
    *(Mix(axis, "float8", (True,), "scales are of whole matrices") for axis in ("pp", "tp")),
    Mix("tp", "loss", ("fused",), "each of its workers has a part of the vocabulary"),
    Mix("pp", "loss", ("fused",), "its last stage gives logits to the schedule"),
    *(Mix(axis, "buckets", (), "it sends gradients block by block") for axis in ("pp", "dp_shard")),
    *(Mix(axis, "update", (), "an island has one worker, or shards") for axis in ("pp", "cp", "tp", "ep")),
)


# Of a user's own model.
UNSPLIT = Infeasible(
    "nobody says how to split this model over tp",
    'write model.tensor, like {"layers.*.attn.q": column, "layers.*.attn.o": row}, or make tp 1',
)


def resolve(sizes: Mapping[str, int | str], num_workers: int) -> dict[str, int] | Infeasible:
    """Sizes of all axes for so many workers, of those that the file says: what is left out is 1."""
    written = {axis: sizes.get(axis, 1) for axis in AXES}
    filling = [axis for axis in FACTORS if written[axis] == FILL]
    known = {axis: size for axis, size in written.items() if isinstance(size, int)}
    product = math.prod(size for axis, size in known.items() if axis in FACTORS)
    if len(filling) > 1:
        return Infeasible(
            f"{' and '.join(filling)} are both to fill", "write the size of all but one of them"
        )
    if filling:
        if num_workers % product:
            return Infeasible(
                f"{filling[0]} cannot fill: the mesh's other axes make {product}, which does not divide "
                f"{num_workers} workers",
                "make their product a divisor of it",
            )
        return known | {filling[0]: num_workers // product}
    return known if product == num_workers else _wrong_product(known, product, num_workers)


def _wrong_product(sizes: Mapping[str, int], product: int, num_workers: int) -> Infeasible:
    words = " x ".join(f"{axis} {sizes[axis]}" for axis in FACTORS if sizes[axis] > 1) or "of one worker"
    there = f"there {'is' if num_workers == 1 else 'are'} {num_workers}"
    rest = product // sizes["dp_shard"]
    remedy = f"make the product of its axes {num_workers}"
    if num_workers % rest == 0:
        remedy = f"write dp_shard: {num_workers // rest}, or dp_shard: fill"
    return Infeasible(f"mesh {words} is for {product} workers, but {there}", remedy)


def conflicts(
    sizes: Mapping[str, int], figures: Mapping[str, int], *, own_model: bool
) -> Iterator[tuple[str, Infeasible]]:
    """Axes that do not split the model, or not evenly, and why. `figures`: what is
    known of it: num_heads, num_kv_heads, ffn_dim, vocab_size, num_layers, num_experts (0: it has none),
    seq_len."""
    for axis, size in sizes.items():
        if size == 1:
            continue
        conflict = None
        if own_model and axis in ("tp", "pp"):
            continue  # by patterns and cuts, which the trainer compares with the model
        elif own_model and axis not in DATA_AXES:
            conflict = Infeasible(
                f"{axis} {size} splits mlpipe's own models, not yours",
                f"make {axis} 1, or use a preset",
            )
        elif axis == "tp":
            conflict = uneven_tensors(size, {k: figures[k] for k in TENSOR_WIDTHS if figures.get(k)})
        elif axis == "cp":
            conflict = uneven_context(size, figures.get("seq_len"), sizes["tp"])
        elif axis == "pp":
            conflict = too_many_stages(size, figures.get("num_layers"))
        elif axis == "ep":
            conflict = uneven_experts(size, sizes["dp_shard"], figures.get("num_experts"), sizes["tp"])
        if conflict is not None:
            yield axis, conflict


def across_classes(
    sizes: Mapping[str, int], nodes: Sequence[int], per_node: int
) -> Iterator[tuple[str, Infeasible]]:
    """Axes that reach over machines of several classes, of each so many `nodes` with `per_node` workers:
    those who compute the same micro-batches together would wait for the slower ones. Machines are numbered
    class by class, a pipeline's are neighbours (`Mesh.number_at`)."""
    shared, pp, why = (
        sizes["cp"] * sizes["tp"],
        sizes["pp"],
        "over two groups of machines, whose workers differ",
    )
    workers = [number * per_node for number in nodes]
    if any(number % shared for number in workers):
        axis, other = ("tp", "cp") if sizes["tp"] > 1 else ("cp", "tp")
        words = f"{axis} {sizes[axis]}" + (f" x {other} {sizes[other]}" if sizes[other] > 1 else "")
        yield axis, Infeasible(f"{words} reaches {why}", f"give each group a multiple of {shared} workers")
        return
    stage = sizes["dp_shard"] * shared
    if pp > 1 and stage % per_node:
        words = f"pp {pp} reaches {why}: a stage has {stage} workers, which are no whole nodes of {per_node}"
        yield "pp", Infeasible(words, "make dp_shard x cp x tp the workers of whole nodes")
    elif pp > 1 and any(number % (stage * pp) for number in workers):
        words = f"pp {pp} reaches {why}: its stages have {stage} workers each"
        yield "pp", Infeasible(words, f"give each group a multiple of {stage * pp // per_node} nodes")
    elif any(number // (shared * pp) % sizes["ep"] for number in workers):
        words = f"ep {sizes['ep']} reaches {why}"
        yield "ep", Infeasible(words, f"give each group a multiple of {sizes['ep'] * shared * pp} workers")


def uneven_tensors(tp: int, widths: Mapping[str, int]) -> Infeasible | None:
    """Whole heads and equal widths on each rank of `tp`."""
    uneven = [f"{name} {width}" for name, width in widths.items() if width % tp]
    if not uneven:
        return None
    return Infeasible(f"tp {tp} does not divide {', '.join(uneven)}", f"make tp {_divisors(widths.values())}")


def uneven_context(cp: int, seq_len: int | None, tp: int = 1) -> Infeasible | None:
    """Each rank of `cp` has a part of the sequence's first half and its mirror image of the second; the ranks
    of `tp` share both."""
    if seq_len is None or seq_len % (unit := cp * math.lcm(2, tp)) == 0:
        return None
    below = seq_len // unit * unit
    remedy = f"write seq_len {below} or {below + unit}" if below else f"write seq_len {unit}"
    if seq_len % (2 * cp) == 0:
        share = f"{seq_len // cp} tokens of seq_len {seq_len}"
        return Infeasible(f"cp {cp} leaves each worker {share}, which tp {tp} does not divide", remedy)
    if seq_len % 2 == 0:
        remedy = f"make cp {_divisors([seq_len // 2])}, or {remedy}"
    parts = f"{2 * cp} equal parts"
    return Infeasible(f"cp {cp} cuts a sequence into {parts}, and seq_len {seq_len} is no multiple", remedy)


def too_many_stages(pp: int, num_layers: int | None) -> Infeasible | None:
    """A stage has a block at the least."""
    if num_layers is None or pp <= num_layers:
        return None
    return Infeasible(
        f"pp {pp} is more than the {num_layers} blocks of the model", f"write {num_layers} at most"
    )


def uneven_experts(ep: int, dp_shard: int, num_experts: int | None, tp: int = 1) -> Infeasible | None:
    """`ep` groups neighbours along `dp_shard`, which hold equally many experts, of those that `tp` leaves."""
    if num_experts == 0:
        return Infeasible(
            f"ep {ep} splits experts, and this model has none", "make ep 1, or use a model with experts"
        )
    widths = {"dp_shard": dp_shard} | ({"num_experts": num_experts} if num_experts else {})
    if num_experts and tp > 1 and num_experts % (ep * tp):
        left = num_experts // tp
        message = f"ep {ep} does not divide the experts that tp {tp} leaves a worker, {left}"
        return Infeasible(message, f"write {_divisors([dp_shard, max(1, left)])}")
    uneven = [f"{name} {width}" for name, width in widths.items() if width % ep]
    if not uneven:
        return None
    return Infeasible(f"ep {ep} does not divide {', '.join(uneven)}", f"write {_divisors(widths.values())}")


def cut_blocks(tp: int, optimizer: Any, figures: Mapping[str, int]) -> Infeasible | None:
    """Rows of which each rank of `tp` has a part, of what heads and feed-forward give, have whole blocks of
    values that share a scale."""
    block = OPTIMIZERS[optimizer].block if optimizer in OPTIMIZERS else 0
    if not block or tp == 1:
        return None
    widths = {name: figures[name] for name in ("dim", "ffn_dim") if name in figures}
    if {"num_heads", "head_dim"} <= figures.keys() and (
        channels := figures["num_heads"] * figures["head_dim"]
    ) != figures.get("dim"):
        widths = {"num_heads x head_dim": channels, "ffn_dim": figures.get("ffn_dim", 0)}
    cut = [f"{name} {width}" for name, width in widths.items() if width % (tp * block)]
    if not cut:
        return None
    return Infeasible(
        f"{optimizer} has a scale for each {block} values of a row, and tp {tp} cuts rows of "
        f"{', '.join(cut)} within them",
        f"take adamw, or widths that {tp * block} divides",
    )


def cut_graph(sizes: Mapping[str, int], settings: Mapping[str, Any], has_experts: bool) -> Infeasible | None:
    """A block whose experts lie on several workers is no whole graph, in which alone a compiler keeps some of
    the results and computes others again."""
    axis = next((axis for axis in ("ep", "tp") if sizes.get(axis, 1) > 1), None)
    compiled = setting(settings, "compile") in ("block", "model")
    if not (
        has_experts and axis and compiled and setting(settings, "activation_checkpointing") == "selective"
    ):
        return None
    return Infeasible(
        f"selective cannot be combined with compile and {axis} {sizes[axis]} yet: the rows that are sent to "
        "experts cut a block's graph",
        "take activation_checkpointing full or none, or compile: off",
    )


def unsupported_mix(
    sizes: Mapping[str, int], settings: Mapping[str, Any], figures: Mapping[str, int]
) -> Iterator[tuple[str, Infeasible]]:
    """What of a training the trainer cannot do together: the key or axis, and why. `settings`: of the
    training, as in the file, as far as they are known; `figures`: of the model, as of `conflicts`."""
    conflict = cut_blocks(sizes.get("tp", 1), setting(settings, "optimizer.name"), figures)
    if conflict is not None:
        yield "optimizer.name", conflict
    conflict = cut_graph(sizes, settings, bool(figures.get("num_experts")))
    if conflict is not None:
        yield "activation_checkpointing", conflict
    for mix in MIXES:
        if sizes.get(mix.axis, 1) == 1:
            continue
        what = sizes.get(mix.key, 1) if mix.key in AXES else setting(settings, mix.key)
        if what in mix.values or (not mix.values and what not in (1, None)):
            shown = "" if isinstance(what, Mapping | list | tuple) else f" {what}"
            yield (
                mix.key,
                Infeasible(
                    f"{mix.key}{shown} cannot be combined with {mix.axis} {sizes[mix.axis]} yet: {mix.why}",
                    f"change {mix.key}, or make {mix.axis} 1",
                ),
            )


def _divisors(numbers: Any) -> str:
    """Common ones, in words."""
    common = math.gcd(*numbers)
    divisors = [n for n in range(1, min(common, 4096) + 1) if common % n == 0]
    *rest, last = [str(n) for n in divisors[:12]]
    return f"{', '.join(rest)} or {last}" if rest else last
