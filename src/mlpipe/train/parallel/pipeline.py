"""The axis `pp`: each rank keeps the blocks of its stages; the first stage has the embedding, the last one
norm and head. What runs when is said by `train/schedules/pipelined.py`. Of a user's own module a stage has
the children between two cuts (sequence.py), of a class of `transformers` those of its plan
(stages_by_plan.py).

The whole model stays, on the meta device but for what this rank keeps: so names, and the numbers of the draws
that initialise (see `train/init.py`), are those of the whole model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mlpipe._core.errors import TrainError
from mlpipe._core.presets import OWN
from mlpipe.plan.work import TrainPlan
from mlpipe.train.contract import logits_of
from mlpipe.train.model import Batch, LossModule
from mlpipe.train.models.llama import Llama, Part
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.sequence import stages_of
from mlpipe.train.parallel.stages_by_plan import base_of, forward_stage, of_all_stages
from mlpipe.train.precision import autocast
from mlpipe.train.world import World


class StagedLossModule(LossModule):
    """This rank's `parts` of the model, by stage. `whole` is no submodule: its parameters are not all this
    rank's."""

    whole: nn.Module

    def __init__(
        self, loss_module: LossModule, whole: nn.Module, own: nn.Module, parts: dict[int, Part]
    ) -> None:
        super().__init__(own, loss_module.device_type, loss_module.precision, loss_module.entry)
        self.parts = parts
        self.__dict__["whole"] = whole

    def forward(self, batch: Batch, stage: int = 0, received: Tensor | None = None) -> Any:
        """Of the last stage as `LossModule`; of others their output. `received`: that of the stage before."""
        part = self.parts[stage]
        with autocast(self.device_type, self.precision):
            inputs = batch["inputs"]
            output = inputs if part.is_first else received
            if isinstance(self.whole, Llama):
                output = self.whole(output, part, inputs.shape[1])
            elif (base := base_of(self.whole)) is not None:
                assert isinstance(output, Tensor)
                output = forward_stage(self.whole, base, part, output)
            else:
                for child in part.blocks:
                    output = child(output)
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
    assert pipeline is not None
    if pipeline.schedule == "zero_bubble" and plan.mesh.dp_shard > 1:
        raise TrainError(
            "zero_bubble computes gradients when fully_shard has reduced the others",
            where="pipeline.schedule",
            hint="take 1f1b or interleaved, or a mesh with dp_replicate instead of dp_shard",
            kind="input",
        )
    if plan.model.build.entry in OWN and isinstance(whole, Llama):
        own, parts = _of_llama(whole, pipeline.num_blocks, world)
    else:
        own, parts = _of_children(whole, pipeline.cut, world, plan.model.build.entry)
    built.module = StagedLossModule(built.module, whole, own, parts)
    kept = set(map(id, own.modules()))
    built.blocks = [block for block in built.blocks if id(block) in kept]
    model.module = built.module


def _of_llama(whole: Llama, num_blocks: tuple[int, ...], world: World) -> tuple[nn.Module, dict[int, Part]]:
    """What this rank keeps, and its parts by stage."""
    last = len(num_blocks) - 1
    parts: dict[int, Part] = {}
    own, layers = nn.Module(), nn.ModuleDict()
    for stage in range(world.coordinates["pp"], last + 1, world.mesh.pp):
        begin = sum(num_blocks[:stage])
        blocks = list(whole.layers)[begin : begin + num_blocks[stage]]
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
    return own, parts


def _of_children(
    whole: nn.Module, cut: tuple[str, ...], world: World, entry: str
) -> tuple[nn.Module, dict[int, Part]]:
    """Likewise; what other ranks keep has no memory here any more."""
    stages = stages_of(whole, cut, entry)
    own, last = nn.Module(), len(stages) - 1
    parts: dict[int, Part] = {}
    for stage, children in enumerate(stages):
        if stage % world.mesh.pp != world.coordinates["pp"]:
            for child in children.values():
                child.to("meta")
            continue
        parts[stage] = Part(stage == 0, stage == last, list(children.values()))
        _add(own, children)
    _add(own, of_all_stages(whole))
    return own, parts


def _add(own: nn.Module, children: dict[str, nn.Module]) -> None:
    """Under their names."""
    for name, child in children.items():
        *path, last_name = name.split(".")
        parent = own
        for key in path:
            if key not in parent._modules:
                parent.add_module(key, nn.Module())
            parent = parent.get_submodule(key)
        parent.add_module(last_name, child)


def shares_embedding(model: ParallelizedModel) -> bool:
    """Whether the last stage's head is the first stage's embedding."""
    module = model.built.module
    whole = module.whole if isinstance(module, StagedLossModule) else None
    return isinstance(whole, Llama) and whole.lm_head is None
