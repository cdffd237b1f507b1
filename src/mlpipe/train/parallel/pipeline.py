"""The axis `pp`: each rank keeps the blocks of its stages; the first stage has the embedding, the last one
norm and head. What runs when is said by `train/schedules/pipelined.py`.

The whole model stays, on the meta device but for what this rank keeps: so names, and the numbers of the draws
that initialise (see `train/init.py`), are those of the whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mlpipe._core.errors import TrainError
from mlpipe._core.presets import OWN
from mlpipe.plan.plan import TrainPlan
from mlpipe.train.contract import logits_of
from mlpipe.train.model import Batch, LossModule
from mlpipe.train.models.llama import Llama, Part
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World


class StagedLossModule(LossModule):
    """This rank's `parts` of the model, by stage. `whole` is no submodule: its parameters are not all this
    rank's."""

    whole: Llama

    def __init__(self, loss_module: LossModule, whole: Llama, own: nn.Module, parts: dict[int, Part]) -> None:
        super().__init__(own, loss_module.device_type, loss_module.bf16, loss_module.entry)
        self.parts = parts
        self.__dict__["whole"] = whole

    def forward(self, batch: Batch, stage: int = 0, received: Tensor | None = None) -> Any:
        """Of the last stage as `LossModule`; of others their output. `received`: that of the stage before."""
        part = self.parts[stage]
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.bf16):
            inputs = batch["inputs"]
            output = self.whole(inputs if part.is_first else received, part, inputs.shape[1])
            if not part.is_last:
                return output
            logits = logits_of(output, self.entry)
        return self.loss_of(logits, batch)

    def _apply(self, fn: Any, recurse: bool = True) -> StagedLossModule:
        """Tensors that the whole model has directly are those of `own`."""
        super()._apply(fn, recurse)
        self.whole._buffers.update(self.model._buffers)
        return self


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Cuts the model, which must still be on the meta device."""
    built, pipeline = model.built, plan.pipeline
    whole = built.model
    if plan.model.build.entry not in OWN or not isinstance(whole, Llama) or pipeline is None:
        raise TrainError(
            "only mlpipe's own models are cut into pipeline stages",
            where=plan.model.build.entry,
            hint="leave pp out of the mesh",
            kind="input",
        )
    if pipeline.schedule == "zero_bubble" and plan.mesh.dp_shard > 1:
        raise TrainError(
            "zero_bubble computes gradients when fully_shard has reduced the others",
            where="pipeline.schedule",
            hint="take 1f1b or interleaved, or a mesh with dp_replicate instead of dp_shard",
            kind="input",
        )
    last = len(pipeline.num_blocks) - 1
    parts: dict[int, Part] = {}
    own, layers = nn.Module(), nn.ModuleDict()
    for stage in range(world.coordinates["pp"], last + 1, world.mesh.pp):
        begin = sum(pipeline.num_blocks[:stage])
        blocks = list(whole.layers)[begin : begin + pipeline.num_blocks[stage]]
        parts[stage] = Part(stage == 0, stage == last, blocks)
        layers.update({str(begin + number): block for number, block in enumerate(blocks)})
    # in the order of the whole model, so that what is summed or stored in order is
    if 0 in parts or (last in parts and whole.lm_head is None):
        own.embed_tokens = whole.embed_tokens
    own.layers = layers
    if last in parts:
        own.norm = whole.norm
        if whole.lm_head is not None:
            own.lm_head = whole.lm_head
    for name, buffer in whole.named_buffers(recurse=False):
        own.register_buffer(name, buffer, persistent=name not in whole._non_persistent_buffers_set)
    built.module = StagedLossModule(built.module, whole, own, parts)
    built.blocks = list(layers.values())
    model.module = built.module


def shares_embedding(model: ParallelizedModel) -> bool:
    """Whether the last stage's head is the first stage's embedding."""
    module = model.built.module
    return isinstance(module, StagedLossModule) and module.whole.lm_head is None
