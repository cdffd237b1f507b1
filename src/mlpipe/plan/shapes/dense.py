"""A preset's shape: blocks of attention and SwiGLU, all alike, read off `train/models/llama.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from mlpipe._core.presets import LlamaConfig, Named
from mlpipe.plan.flops import num_flops_per_token
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.recomputation import keeps_matmul, recomputed_matmuls, recomputes_attention
from mlpipe.plan.shapes.shape import Activations, ParameterCounts, Part, PassSeconds, StepShape
from mlpipe.plan.sizes import HEAD_CHUNK_ELEMENTS, LOSS_CHUNK_ELEMENTS
from mlpipe.plan.tensors import COMPUTE_BYTES, GRADIENT_BYTES, WEIGHT_BYTES, Tensors, total

_KERNELS_FORWARD = 45  # of a block in eager mode
# Read and written for each number rounded to float8, by the kernels of `train/parallel/float8.py`: the
# largest magnitude of bf16 (4 + 2), in fp32 (6), divided, clamped (8 + 8), rounded (5). Compiled, it is read
# for the largest magnitude, and once more to be rounded (2 + 3).
_FLOAT8_BYTES, _FLOAT8_COMPILED_BYTES = 33.0, 5.0


@dataclass(frozen=True)
class Dense:
    """Llama with these sizes. `CAST`: bytes a parameter that are read and written to make what matmuls see of
    fp32 weights. `WIDTHS`: names of the sizes that `widths` tells."""

    CAST: ClassVar = 6
    WIDTHS: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "dim",
        "ffn_dim",
        "num_heads",
        "num_kv_heads",
        "head_dim",
    )

    config: LlamaConfig

    @cached_property
    def parameters(self) -> ParameterCounts:
        config = self.config
        total, block = config.num_params(), config.num_layer_params()
        outside = total - config.num_layers * block
        return ParameterCounts(
            total,
            block,
            outside,
            config.num_layers,
            tuple(config.tensors()),
            tuple(config.block_matrices()),
            stacks=stacks(config, config.named_tensors()),
            looked_up=0 if config.tied else config.num_embedding_params(),
        )

    @property
    def active_params(self) -> int:
        """Those that compute a token."""
        return self.config.num_active_params()

    @cached_property
    def widths(self) -> Mapping[str, int]:
        return {name: getattr(self.config, name) for name in self.WIDTHS}

    def flops_per_token(self, seq_len: int) -> float:
        return num_flops_per_token(self.counted_params, self._attention_channels, seq_len)

    @property
    def counted_params(self) -> int:
        """Parameters that take part in a token's matmuls: all but the input embedding, unless it is the head
        as well."""
        config = self.config
        return config.num_active_params() - (0 if config.tied else config.num_embedding_params())

    @property
    def _attention_channels(self) -> int:
        """Layers x heads x (qk + v dims)."""
        return self.config.num_layers * self.config.num_heads * 2 * self.config.head_dim

    def recomputed_flops_per_token(self, checkpointing: str, seq_len: int) -> float:
        """What the backward passes compute again; of attention as the convention counts it."""
        matmuls = self.config.matmuls()
        again = (
            sum(inner * outer for inner, outer in (matmuls[i] for i in _again(checkpointing, matmuls)))
            * self.config.num_layers
        )
        attention = self._attention_channels * seq_len if recomputes_attention(checkpointing) else 0
        return float(2 * (again + attention))

    def activations(self, step: StepShape, device: str, *, adapted: bool = False) -> Activations:
        """With attention that stores no T x T matrix. Logits and their gradient lie in the compute dtype, and
        besides the fp32 log-probabilities of the chunk that `train/loss.py` works on.
        With `loss: fused` they are never whole: what is kept are the gradients of the head's input and of its
        weights, under bf16 and fp16 beside a chunk's product before it is added to these, of which a CPU
        makes an fp32 copy for that. The gradient of a tied head waits for the embedding's, and autograd adds
        them up in the place of the first, but of fp32 logits in a third tensor (measured with torch 2.15).
        `adapted`: norms and head are not trained, and keep nothing for gradients of their own."""
        config, mode, width = self.config, step.checkpointing, COMPUTE_BYTES[step.precision]
        part, num_blocks = step.part, self._num_blocks(step.part)
        norms = "cuda" if adapted else device  # of which a fused one keeps no more in any case
        # of a GPU's fp32, whose kernel knows no groups: each query head has keys and values of its own
        apart = device == "cuda" and step.precision == "fp32"
        kv_dim = config.q_dim if apart else config.kv_dim
        norm, block = self._saved(step, norms, mode, kv_dim)
        again = self._saved(step, norms, "none", kv_dim)[1] if mode != "none" else []
        # At the product of the MLP, whose two factors' gradients are new while what came in has not been
        # freed, and the residual stream's. Without recomputation a GPU's logits are larger than these.
        backward = 2 * width * self._ffn_channels + 4 * config.dim if mode != "none" or device == "cpu" else 0
        # Parts of gradients that are added exactly are whole, in fp32: of one product, and of those before.
        parts = 8 * config.dim if step.exact_sums and part.tp > 1 else 0
        num_logits = step.num_tokens * config.vocab_size // part.tp if part.is_last else 0
        kept_logits = width * num_logits
        logit_bytes = 2 * kept_logits + 4 * min(num_logits, LOSS_CHUNK_ELEMENTS[device])
        if step.fused_head:
            kept_logits = config.dim * (width * step.num_tokens + 4 * config.vocab_size)
            chunk, low = min(num_logits, HEAD_CHUNK_ELEMENTS[device]), width < 4
            losses = (width + 4) * chunk
            summed = width + (4 if device == "cpu" else 0)
            products = 4 * chunk + low * (width * chunk + summed * config.dim * config.vocab_size)
            logit_bytes = kept_logits + max(losses, products)
        head = 0 if adapted else GRADIENT_BYTES * part.is_last * config.num_embedding_params() // part.tp
        in_place = step.fused_head or width < WEIGHT_BYTES
        tied = config.tied and part.is_first
        made = [(num_blocks * number, size) for number, size in self._made(step)]
        inputs, away = num_blocks, 0
        if step.offloads and mode != "none":
            away = max(0, num_blocks - 1)
            # a CPU's host is itself; on a GPU one is on its way back beside that which is used
            inputs = num_blocks if device == "cpu" else min(num_blocks, 2)
        # norm of the head, or what goes to the next stage
        last = norm[: 1 if adapted else None] if part.is_last else [4 * config.dim]
        return Activations(
            saved=_tensors(
                step,
                [
                    (inputs, block[0]),
                    *((num_blocks, size) for size in block[1:]),
                    *((1, size) for size in last),
                ],
            ),
            rebuilt=_tensors(step, ((1, size) for size in again)),
            backward_bytes=step.num_tokens * backward // part.tp + step.num_tokens * parts,
            logit_bytes=logit_bytes,
            made=_tensors(step, made),
            offloaded_bytes=total(_tensors(step, [(away, block[0])])),
            kept_logit_bytes=kept_logits,
            put_off_bytes=0 if adapted else self._put_off_bytes(step),
            head_gradient_bytes=head,
            tied_bytes=head * tied * (1 if in_place else 2),
        )

    def _put_off_bytes(self, step: StepShape) -> int:
        """As `train/schedules/deferred_weights.py` has it: of layers without a bias, which several may share
        an input; of a block's attention, of its feed-forward, and of a head that is no embedding."""
        config, part, width = self.config, step.part, COMPUTE_BYTES[step.precision]
        q_dim, kv_dim, dim, tp = config.q_dim, config.kv_dim, config.dim, step.part.tp
        channels = 0 if config.qkv_bias else dim + (q_dim + 2 * kv_dim) // tp
        channels += 0 if config.o_bias else q_dim // tp + dim
        channels += 0 if config.mlp_bias else 2 * dim + 3 * self._linear_ffn_channels // tp
        channels *= self._num_blocks(part)
        if part.is_last and not config.tied:
            channels += dim + config.vocab_size // tp
        return step.num_tokens * width * channels

    @property
    def _linear_ffn_channels(self) -> int:
        """Of these those of linear layers."""
        return self.config.ffn_dim

    @property
    def _ffn_channels(self) -> int:
        """That a token has in a block's feed-forward."""
        return self.config.ffn_dim

    def _saved_in_ffn(self, width: int, tp: int) -> list[int]:
        """Bytes a token of each tensor that autograd saves there: gate, up, silu(gate) and their product."""
        return 4 * [width * self.config.ffn_dim // tp]

    def _matmuls(self, step: StepShape, kernels: Kernels) -> list[float]:
        """Seconds of those of a block. In float8 only the multiplying is faster: bf16 comes in and out, and
        operands are rounded first."""
        dim, tp, tokens = self.config.dim, step.part.tp, step.num_tokens
        sides = [split(inner, outer, dim, tp) for inner, outer in self.config.matmuls()]
        if not step.float8:
            return [kernels.matmul(tokens, inner, outer) for inner, outer in sides]
        spared = 1 - 1 / (kernels.speed.float8_speedup or 1)
        rounded = _FLOAT8_COMPILED_BYTES if kernels.compiled else _FLOAT8_BYTES
        return [
            kernels.matmul(tokens, inner, outer)
            - spared * kernels.matmul_flops(2.0 * tokens * inner * outer)
            + kernels.stream(rounded * inner * (tokens + outer), fuse=False)
            for inner, outer in sides
        ]

    def _params_of_a_block(self, part: Part) -> float:
        """That a rank computes with."""
        return self.parameters.block / part.tp

    def _moving(self, step: StepShape, kernels: Kernels) -> float:
        """Seconds of a block's forward pass in which rows only move."""
        return 0.0

    def _num_blocks(self, part: Part) -> int:
        return self.config.num_layers if part.num_blocks is None else part.num_blocks

    def _saved(
        self, step: StepShape, device: str, checkpointing: str, kv_dim: int
    ) -> tuple[list[int], list[int]]:
        """Bytes a token of each tensor that autograd saves of a norm, and of a block. Of a norm: its input
        (fp32, the residual stream), its output, and on CPU, where it is not fused, the normalised input. Of a
        block: two norms; rotated q and k, v and the attention's output; gate, up, silu(gate) and their
        product. Under `tp` each rank has its share of all but the norms' outputs, which the matrix products
        of every rank read whole (Korthikanti et al. 2022, section 4.2.2, who gather them once more
        instead)."""
        width, dim, tp = COMPUTE_BYTES[step.precision], self.config.dim, step.part.tp
        q_dim = self.config.q_dim
        norm = [4 * dim // tp, width * dim] + ([4 * dim // tp] if device == "cpu" else [])
        if checkpointing == "none":
            split = [*2 * [width * q_dim], *2 * [width * kv_dim]]
            return norm, [*2 * norm, *(size // tp for size in split), *self._saved_in_ffn(width, tp)]
        kept = [4 * dim]  # the block's input
        if not recomputes_attention(checkpointing):
            kept.append(width * q_dim)
            outers = enumerate(outer for _, outer in self.config.matmuls())
            kept += [width * outer for index, outer in outers if keeps_matmul(index)]
        return norm, [size // tp for size in kept]

    def _made(self, step: StepShape) -> list[tuple[int, int]]:
        """Numbers and bytes a token of tensors that the passes of one block make on a CPU, as torch's
        profiler saw them of llama-8m with 2,048 and 4,096 tokens in fp32 and bf16: fp32 ones of the residual
        stream's width and of half of it (the rotation's), and those of matmuls; with recomputation as many
        again as are rebuilt."""
        width, dim, ffn = COMPUTE_BYTES[step.precision], self.config.dim, self._ffn_channels
        kv_dim = self.config.num_kv_heads * self.config.head_dim
        made = [(30, 4 * dim), (27, 2 * dim), (9, width * dim), (8, width * ffn), (6, width * kv_dim)]
        if step.checkpointing != "none":
            made += [(9, 4 * dim), (15, 2 * dim), (2, width * dim), (4, width * ffn), (3, width * kv_dim)]
        return [(number, size // step.part.tp) for number, size in made]

    def weight_gradient_seconds(self, step: StepShape, kernels: Kernels) -> float:
        """Of a block's backward pass: one product for each of its matrices."""
        return sum(self._matmuls(step, kernels))

    def embedding_seconds(self, step: StepShape, kernels: Kernels) -> float:
        """Of its backward pass."""
        if not step.part.is_first:
            return 0.0
        traffic = step.num_tokens * self.config.dim * 8 + 4 * self.config.num_embedding_params()
        return kernels.stream(traffic // step.part.tp, fuse=False)

    def pass_seconds(self, step: StepShape, kernels: Kernels) -> PassSeconds:
        """Under `tp` each product has its share of the channels, and all between them of the tokens; under
        `cp` each rank computes as many of the causal mask's lower half (`train/parallel/context.py`)."""
        config, tokens, part, tp = self.config, step.num_tokens, step.part, step.part.tp
        dim, kv_dim = config.dim, config.num_kv_heads * config.head_dim
        matmuls = self._matmuls(step, kernels)
        # forward; causal kernels skip the upper half
        attention = kernels.attention(
            2.0 * step.micro_batch * config.num_heads * config.head_dim * step.seq_len**2 / (tp * part.cp),
            step.seq_len,
        )
        between = kernels.between(tokens, traffic_by_width(dim // tp, kv_dim // tp, self._ffn_channels // tp))
        between += self._moving(step, kernels)
        forward = kernels.at_least(sum(matmuls) + attention + between, _KERNELS_FORWARD)
        backward = kernels.at_least(2 * sum(matmuls) + 2.5 * attention + 2 * between, 2 * _KERNELS_FORWARD)
        if recomputes_attention(step.checkpointing):
            # Published runs, which the catalogue's figures are compared with, compute the last one, too.
            backward += forward - (matmuls[-1] if kernels.measured is not None else 0.0)
        elif step.checkpointing != "none":
            backward += sum(matmuls[index] for index in _again(step.checkpointing, matmuls)) + between
        casts = 0.0
        if step.precision != "fp32":  # once a forward
            casts = kernels.stream(self.CAST * self._params_of_a_block(part), fuse=False)
        head = loss = 0.0
        if part.is_last:
            head = kernels.matmul(tokens, dim, config.vocab_size // tp)
            # the loss in chunks: reads logits, writes, reads and turns fp32 probabilities, writes gradients
            num_bytes = 2 * COMPUTE_BYTES[step.precision] + 12
            loss = kernels.loss(tokens * config.vocab_size // tp * num_bytes)
            if step.fused_head:  # each chunk's product is added to the gradient of the weights
                chunks = -(-tokens * config.vocab_size // HEAD_CHUNK_ELEMENTS[kernels.device])
                loss += kernels.stream(chunks * 8 * config.num_embedding_params(), fuse=False)
        embedding = self.embedding_seconds(step, kernels)
        return PassSeconds(forward + casts, backward, head + loss, 2 * head + embedding, attention)


def split(inner: int, outer: int, dim: int, tp: int) -> tuple[int, int]:
    """Of a block's product: by what comes out where the residual stream goes in, else by what goes in. Of
    dim x dim either is as long."""
    return (inner, outer // tp) if inner == dim else (inner // tp, outer)


def _again(checkpointing: str, matmuls: list[Any]) -> list[int]:
    return recomputed_matmuls(checkpointing, len(matmuls))


def _tensors(step: StepShape, sizes: Iterable[tuple[int, int]]) -> tuple[Tensors, ...]:
    """`sizes`: numbers of tensors and bytes a token of each."""
    return tuple(Tensors(step.num_tokens * number * size, number) for number, size in sizes)


def traffic_block(dim: int, kv_dim: int, ffn: int) -> int:
    """Bytes a token of what stands between the matmuls of a block in eager mode, read off
    `train/models/llama.py` under bf16 (fp32 moves about as many): two norms of 14 a channel, the rotation of
    q and k 38, two residual sums 10, silu 4 and product 6."""
    return sum(num_bytes for _, num_bytes in traffic_by_width(dim, kv_dim, ffn))


def traffic_by_width(dim: int, kv_dim: int, ffn: int) -> list[tuple[int, int]]:
    """The same, by the channels of the tensors."""
    return [(dim, 28 * dim + 38 * dim + 20 * dim), (kv_dim, 38 * kv_dim), (ffn, 10 * ffn)]


def stacks(config: LlamaConfig, tensors: Iterable[Named]) -> tuple[tuple[int, int, int, int], ...]:
    """Of these, as of `ParameterCounts`."""
    numbers = Counter((one.rows, one.columns, config.matrices_in(one.name)) for one in tensors)
    return tuple(
        (rows, columns, number, matrices)
        for (rows, columns, matrices), number in numbers.items()
        if matrices > 1
    )
