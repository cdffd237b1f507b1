"""torchtitan's own Llama under its own parallelisms, on a mesh of CPUs over gloo; with experts, see
`titan_experts.py`.

As its trainer does it (torchtitan/trainer.py: spmd_types, its default; sequence parallelism and the loss over
the split vocabulary with tp, 1F1B with pp), less what is for GPUs only: CUDA graphs, and flex attention,
whose backward no CPU has: attention is its `ScaledDotProductAttention`. Gloo cannot multiply in a reduction,
which FSDP does not need here: it is told to sum. Its first weights are mlpipe's, by its own adapter.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.work import Turns, Work, read_work
from mlpipe._core.presets import LlamaConfig, MoeConfig
from mlpipe.train.init import initialize
from mlpipe.train.models.llama import Llama
from mlpipe.train.models.moe import MoeLlama

titan_utils.device_type = "cpu"  # it would take CUDA where it finds no accelerator

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import register_moe_load_balancing_hook  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.distributed.spmd_types import annotate_input_spmd_types  # noqa: E402
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Decoder, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.llama3 import Llama3Model, Llama3StateDictAdapter, parallelize_llama  # noqa: E402
from torchtitan.models.llama3.model import Llama3TransformerBlock  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402
from torchtitan.models.qwen3 import parallelize_qwen3  # noqa: E402

from benchmarks.peers import titan_experts  # noqa: E402

_INIT = {"weight": nn.init.zeros_}  # overwritten


def model_config(config: LlamaConfig) -> Decoder.Config:
    """Of torchtitan, with mlpipe's sizes, and split as it splits them."""
    head_dim = config.dim // config.num_heads
    experts = isinstance(config, MoeConfig)
    rope = (CosSinRoPE if experts else ComplexRoPE).Config(
        dim=head_dim, max_seq_len=config.max_seq_len, theta=config.rope_theta
    )

    def norm() -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=config.dim, eps=config.norm_eps, param_init=_INIT)

    blocks = [
        {
            "attention_norm": norm(),
            "ffn_norm": norm(),
            "attention": make_gqa_config(
                dim=config.dim, n_heads=config.num_heads, n_kv_heads=config.num_kv_heads,
                wqkv_param_init=_INIT, wo_param_init=_INIT, fuse_qkv=True, rope=rope,
                inner_attention=ScaledDotProductAttention.Config(),
            ),
        }
        for _ in range(config.num_layers)
    ]  # fmt: skip
    outside = {
        "dim": config.dim, "vocab_size": config.vocab_size, "norm": norm(),
        "tok_embeddings": Embedding.Config(
            num_embeddings=config.vocab_size, embedding_dim=config.dim, param_init=_INIT
        ),
        "lm_head": Linear.Config(in_features=config.dim, out_features=config.vocab_size, param_init=_INIT),
    }  # fmt: skip
    if isinstance(config, MoeConfig):
        return titan_experts.model_config(config, blocks, outside)
    layers = [
        Llama3TransformerBlock.Config(
            **block,
            feed_forward=make_ffn_config(
                dim=config.dim, hidden_dim=config.ffn_dim, w1_param_init=_INIT, w2w3_param_init=_INIT
            ),
        )
        for block in blocks
    ]
    titan = Llama3Model.Config(layers=layers, **outside)
    set_llama3_sharding_config(titan, enable_sp=True)
    return titan


def first_weights(config: LlamaConfig, titan: Decoder.Config, seed: int) -> dict[str, Tensor]:
    """mlpipe's, whole, by torchtitan's names; q, k and v of each group of heads lie together there."""
    model = MoeLlama(config) if isinstance(config, MoeConfig) else Llama(config)
    initialize(model, seed)
    names = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in model.state_dict().items()
    }
    if isinstance(config, MoeConfig):
        found = titan_experts.renamed(config, titan, names)
    else:
        found = Llama3StateDictAdapter(titan, None).from_hf(names)
    head_dim = config.dim // config.num_heads
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}.attention.qkv_linear"
        parts = [
            found.pop(f"{prefix}.{name}.weight").view(config.num_kv_heads, -1, head_dim, config.dim)
            for name in ("wq", "wk", "wv")
        ]
        found[f"{prefix}.wqkv.weight"] = torch.cat(parts, 1).reshape(-1, config.dim)
    return found


@torch.no_grad()
def fill(part: nn.Module, whole: dict[str, Tensor]) -> None:
    for name, parameter in part.named_parameters():
        value = whole[name]
        if isinstance(parameter, DTensor):
            own = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(own.to_local())
        else:
            parameter.copy_(value)


def main() -> None:
    work = read_work()
    dist.init_process_group("gloo")
    mesh = {"dp_shard": 1, "tp": 1, "pp": 1, "ep": 1, **work.mesh}
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=mesh["dp_shard"], tensor_parallel_degree=mesh["tp"],
        expert_parallel_degree=mesh["ep"],
        pipeline_parallel_degree=mesh["pp"], pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=work.batch // work.microbatches,
        # as many blocks on both sides, as mlpipe cuts them
        module_fqns_per_model_part=work.stages or None,
    )  # fmt: skip
    training = TrainingConfig(
        local_batch_size=work.batch, seq_len=work.model["seq_len"], mixed_precision_param="float32"
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    if dims.ep_enabled:
        titan_experts.on_gloo_in_fp32()
    train(work, dims, training, parallelism)


def train(work: Work, dims: ParallelDims, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    config = MoeConfig(**work.llama) if dims.ep_enabled else LlamaConfig(**work.llama)
    titan = model_config(config)
    parallelize = parallelize_qwen3 if dims.ep_enabled else parallelize_llama
    loss_fn = CrossEntropyLoss(CrossEntropyLoss.Config(global_vocab_size=config.vocab_size))
    with torch.device("meta"):
        model = titan.build()
    given = {
        "parallel_dims": dims, "training": training, "parallelism": parallelism,
        "compile_config": CompileConfig(), "ac_config": None, "dump_folder": "",
    }  # fmt: skip
    schedule, is_last = None, True
    if dims.pp_enabled:
        schedule, parts, is_first, is_last = pipeline_llm(
            model, device=torch.device("cpu"), model_config=titan, parallelize_fn=parallelize,
            loss_fn=loss_fn, **given,
        )  # fmt: skip
    else:
        parts, is_first = [parallelize(model, **given)], True
    whole = first_weights(config, titan, work.seed)
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        fill(part, whole)
        part.train()
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = work.adamw(parameters)
    register_moe_load_balancing_hook(optimizer, parts, dims)
    context = dist_utils.get_spmd_context(parallel_dims=dims)
    data_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    dataset = work.dataset()
    sampler = DistributedSampler(dataset, dims.dp_shard, data_rank, shuffle=False)
    losses: list[float | None] = [None]
    waiting = Turns(work.socket, work.side, dist.get_rank(), lambda: losses[-1])
    num_tokens = torch.tensor(float(work.batch * dims.dp_shard * work.model["seq_len"]))
    for batch in DataLoader(dataset, batch_size=work.batch, sampler=sampler):
        waiting.before_step()
        inputs, targets = batch["inputs"], batch["targets"]
        if schedule is None:
            inputs, targets, _ = annotate_input_spmd_types(dims, inputs, targets, {})
            with context():
                loss, _ = loss_fn(parts[0](inputs), targets, num_tokens)
                loss.backward()
        else:
            pieces = [
                annotate_input_spmd_types(dims, x, y, {})[:2]
                for x, y in zip(
                    inputs.chunk(work.microbatches), targets.chunk(work.microbatches), strict=True
                )
            ]
            found: list[Tensor] = []
            with context():
                schedule.step(
                    arg_mbs=[(x,) for x, _ in pieces] if is_first else None,
                    kwarg_mbs=[{} for _ in pieces],
                    target_mbs=[y for _, y in pieces] if is_last else None,
                    losses=found if is_last else None,
                    loss_kwargs={"global_valid_tokens": num_tokens},
                    return_outputs=False,
                )  # fmt: skip
            loss = torch.stack(found).sum() if is_last else None
        dist_utils.clip_grad_norm_(
            parameters, work.grad_clip, foreach=True, pp_mesh=dims.get_optional_mesh("pp"),
            ep_enabled=dims.ep_enabled,
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        # the mean over ranks is the batch's
        losses[-1] = None if loss is None else float(loss) * dims.dp_shard


if __name__ == "__main__":
    main()
    os._exit(0)
