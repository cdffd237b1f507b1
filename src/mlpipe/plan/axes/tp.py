"""The ranks of this axis share each matrix product, and between the products the tokens (tensor and sequence
parallelism): `shapes/shape.py`'s `Part` divides weights, activations and logits. What travels is the residual
stream, which nothing hides: a product waits for it."""

from __future__ import annotations

from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.tensors import WEIGHT_BYTES, RankTensors
from mlpipe.plan.wire import Wire


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """The part is divided before."""
    return tensors


def num_collectives(passes: Passes) -> tuple[int, int]:
    """All-gathers and reduce-scatters of the residual stream in a micro-batch: in a forward pass one of each
    around attention and around the MLP (Korthikanti et al. 2022, section 4.2.2, g and g-bar), and behind the
    embedding a reduce-scatter, before the head an all-gather; in a backward pass each is the other one.
    Recomputation gathers and scatters again, but for the last sum of a block, which nothing needs.
    Exact sums are those of one rank: gradients from each product that reads the stream are added up apart."""
    each, outside = 4 * passes.num_blocks, passes.is_first + passes.is_last
    again = passes.num_blocks if passes.recomputes else 0
    apart = passes.num_blocks * (passes.num_readers - 2) if passes.exact_sums else 0
    return each + outside + 2 * again, each + outside + again + apart


def exposed_seconds(passes: Passes, wire: Wire, layout: Layout) -> float:
    """Of whole streams, (B T, D), in the dtype of the products; sums as `Passes.sum_width` says, and all that
    the embedding sends in fp32."""
    num_ranks, num_bytes = layout.mesh.tp, passes.stream_bytes
    gathers, scatters = num_collectives(passes)
    sums, exact = (num_bytes * width // passes.width for width in (passes.sum_width, WEIGHT_BYTES))
    gathering = (gathers - passes.is_first) * wire.gather_activations(num_bytes, num_ranks)
    scattering = (scatters - passes.is_first) * wire.scatter_activations(sums, num_ranks)
    embedding = wire.gather_activations(exact, num_ranks) + wire.scatter_activations(exact, num_ranks)
    return passes.accumulation * (gathering + scattering + passes.is_first * embedding)
