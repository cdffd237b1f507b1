"""What activation checkpointing keeps of a block and what it computes again in the backward pass. The
trainer's policy, the bytes, the seconds and the FLOPs of the planner all follow from here.

    none       keeps all that autograd saves
    selective  keeps the block's input, attention, and the results of every second matmul, beginning with the
               first: the expensive ones (after torchtitan's per-op policy)
    full       keeps the block's input; torch stops before the last matmul, whose result nothing needs

Standard library only, and imports nothing: it is on the path of workers.
"""


def keeps_matmul(index: int) -> bool:
    """Whether `selective` keeps the result of the block's matmul number `index`, from 0."""
    return index % 2 == 0


def recomputed_matmuls(mode: str, num_matmuls: int) -> list[int]:
    """Numbers of a block's matmuls that are computed again."""
    if mode == "full":
        return list(range(num_matmuls - 1))
    return [i for i in range(num_matmuls) if not keeps_matmul(i)] if mode == "selective" else []


def recomputes_attention(mode: str) -> bool:
    """Whether attention is computed again."""
    return mode == "full"
