"""torchtitan's mixture of experts where it computes what mlpipe's does: in its block of Qwen3, which without
norms of queries and keys is Llama's, with the router of its DeepSeek-V3 (sigmoids, normalised, balanced by
biases) and a shared expert. Its models have other combinations; each of these parts is its own.

Two things of it no CPU or no equal loss allows. Its experts cast to bf16 whatever the precision: here that
cast does nothing, and both sides multiply in fp32. Its rows go to the experts by a list all-to-all, of which
gloo wants equal sizes: `spmd_types`, which sends them, is given one of sends and receives.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import spmd_types._dist
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.models.common import Decoder
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from mlpipe._core.presets import MoeConfig

_INIT = dict.fromkeys(("weight", "w1_EFD", "w2_EDF", "w3_EFD"), nn.init.zeros_)  # overwritten
_ROUTED, _SHARED = "moe.routed_experts.inner_experts", "moe.shared_experts"
_NAMES = {
    "gate.weight": "moe.router.gate.weight",
    "gate.e_score_correction_bias": "moe.expert_bias_E",
    "experts.gate_proj": f"{_ROUTED}.w1_EFD",
    "experts.down_proj": f"{_ROUTED}.w2_EDF",
    "experts.up_proj": f"{_ROUTED}.w3_EFD",
    "shared_experts.gate_proj.weight": f"{_SHARED}.w1.weight",
    "shared_experts.down_proj.weight": f"{_SHARED}.w2.weight",
    "shared_experts.up_proj.weight": f"{_SHARED}.w3.weight",
}


def on_gloo_in_fp32() -> None:
    """For this process."""
    Tensor.bfloat16 = lambda self: self
    spmd_types._dist.set_dist(SimpleNamespace(**{**vars(dist), "all_to_all": _all_to_all}))


def _all_to_all(outs: list[Tensor], ins: list[Tensor], group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    outs[rank].copy_(ins[rank])
    others = [other for other in range(len(ins)) if other != rank]
    works = [dist.irecv(outs[other], group=group, group_src=other) for other in others if len(outs[other])]
    works += [dist.isend(ins[other], group=group, group_dst=other) for other in others if len(ins[other])]
    for work in works:
        if work is not None:
            work.wait()  # for the group's timeout at most


def model_config(
    config: MoeConfig, blocks: list[dict[str, Any]], outside: dict[str, Any]
) -> Qwen3Model.Config:
    """`blocks`: what stands in each beside its experts."""
    sizes = {"dim": config.dim, "num_experts": config.num_experts, "top_k": config.experts_per_token}
    layers = [
        Qwen3TransformerBlock.Config(
            **block,
            moe=make_moe_config(
                num_experts=config.num_experts,
                router=make_router_config(
                    **sizes, gate_param_init=_INIT, score_func="sigmoid", route_norm=True
                ),
                routed_experts=make_routed_experts_config(
                    **sizes, hidden_dim=config.ffn_dim, param_init=_INIT, comm_backend="standard"
                ),
                shared_experts=make_ffn_config(
                    dim=config.dim, hidden_dim=config.shared_dim, w1_param_init=_INIT, w2w3_param_init=_INIT
                ),
                load_balance_coeff=config.balance_rate,
            ),
        )
        for block in blocks
    ]
    titan = Qwen3Model.Config(layers=layers, **outside)
    set_qwen3_sharding_config(titan, enable_sp=True, enable_ep=True)
    return titan


def renamed(config: MoeConfig, titan: Decoder.Config, names: dict[str, Tensor]) -> dict[str, Tensor]:
    """mlpipe's weights by torchtitan's names. Its adapter knows no shared expert and wants experts one by
    one; both libraries keep them in one tensor, mlpipe one below the other."""
    others = {name: value for name, value in names.items() if ".mlp." not in name}
    found: dict[str, Tensor] = Qwen3StateDictAdapter(titan, None).from_hf(others)
    for name in names.keys() - others.keys():
        block, part = name.removeprefix("model.").split(".mlp.")
        value = names[name]
        if part.startswith("experts."):
            value = value.view(config.num_experts, -1, value.shape[1])
        found[f"{block}.{_NAMES[part]}"] = value
    return found
