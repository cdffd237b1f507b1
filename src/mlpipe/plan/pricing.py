"""Bytes, seconds and dollars of one way to train. Standard library only."""

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from mlpipe._core.compression import COMPRESSIONS
from mlpipe._core.meshes import Strategy
from mlpipe._core.mfu import mfu_ratio
from mlpipe._core.pipelines import DEFAULT, Schedule, stages_per_rank
from mlpipe._core.units import format_bytes
from mlpipe.plan import memory
from mlpipe.plan.allocators import allocation_seconds
from mlpipe.plan.axes import active
from mlpipe.plan.axes.axis import Exchanged, Layout, Passes, RankWork
from mlpipe.plan.choose import Candidate, cheaper
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.memory import MemoryEstimate
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.settings import Communication, ContextExchange, Offload, adds_exactly
from mlpipe.plan.shapes.shape import ModelShape, ParameterCounts, Part, StepShape
from mlpipe.plan.stages import num_blocks_of
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.tensors import GRADIENT_BYTES, WEIGHT_BYTES, RankTensors, total
from mlpipe.plan.time import (
    StepSeconds,
    gradient_seconds,
    host_update_seconds,
    offload_seconds,
    passes,
    save_seconds,
    slowest_ratio,
    update_seconds,
    whole_steps,
)
from mlpipe.plan.updates import CompressPlan, IslandsPlan
from mlpipe.plan.wire import Wire

if TYPE_CHECKING:
    from mlpipe.plan.uneven import Uneven

_EXCHANGES: tuple[ContextExchange, ...] = get_args(ContextExchange)


class Training(NamedTuple):
    """What all candidates of a stage have in common. `save_steps`, `save_seconds`: between checkpoints, which
    are written beside the training if `asynchronous`."""

    global_batch: int
    seq_len: int
    steps: int
    compiled: bool
    optimizer: OptimizerCost
    save_steps: int | None
    save_seconds: float | None
    asynchronous: bool = True
    num_validations: int = 0
    validation_samples: int = 0  # of each, over all ranks
    schedule: Schedule = DEFAULT  # of pipelines
    context_exchange: ContextExchange | Literal["auto"] = "auto"
    compress: CompressPlan | None = None
    islands: IslandsPlan | None = None
    offload: Offload = "off"
    fused_head: bool = False
    float8: bool = False
    deterministic: bool = False


class Choices(NamedTuple):
    """What a candidate decides besides its strategy and mesh."""

    micro_batch: int
    checkpointing: str
    precision: str
    communication: Communication = "collective"


def flags_of(strategy: Strategy, communication: Communication = "collective") -> dict[str, bool]:
    """Of a TrainPlan, what the names stand for: weights that are resident stay until a step's last backward
    pass."""
    flags = ORDER[strategy].FLAGS
    return {**flags, "reshard_after_forward": False} if communication == "resident" else flags


def layout_of(strategy: Strategy, mesh: Mesh, communication: Communication = "collective") -> Layout:
    """Likewise, on this mesh."""
    return Layout(mesh, **cast(Any, flags_of(strategy, communication)), communication=communication)


@lru_cache(maxsize=256)  # asked for by every point of a search
def without_data(mesh: Mesh) -> Mesh:
    """Its axes that share samples."""
    return replace(mesh, dp_replicate=1, dp_shard=1, ep=1)


def of_islands(local: IslandsPlan, trained: ParameterCounts) -> Exchanged:
    """A step's share of a round, in which an island sends what it learnt: anchors, outer momentum and what
    was not told are kept; what travels, and a copy of it, while the island goes on."""
    bits = 8.0 * GRADIENT_BYTES * trained.total
    if local.compress is not None:
        bits = COMPRESSIONS[local.compress].sent(trained.total, 1, {}).reduced_bits
    kept = 1 + (local.outer_momentum > 0) + (local.compress is not None)
    hidden = 0.0
    if local.staleness:
        kept += 2
        hidden = min(1.0, local.fragments * local.staleness / local.sync_every)
    return Exchanged(bits / 8 / local.sync_every, 0.0, trained.total / local.sync_every, kept, hidden)


class Rank(NamedTuple):
    """One of the ranks in a step, before data parallelism divides its states: `work` has the layout of a rank
    that is alone, and `alone` is what that holds."""

    work: RankWork
    alone: RankTensors
    passes: Passes


class Pricer:
    """Of candidates on one hardware; passes are computed once for all meshes. `uneven`: the samples, where
    they differ in length and are packed; without it each has `seq_len` tokens. Memory is that of full rows
    in any case."""

    def __init__(
        self, shape: ModelShape, training: Training, hardware: Hardware, uneven: "Uneven | None" = None
    ) -> None:
        self.shape, self.training, self.hardware = shape, training, hardware
        self.uneven = uneven
        self.prices = (shape, training, hardware, uneven)
        self._wire, self._slowest_ratio = Wire(hardware), slowest_ratio(hardware)
        self._flops_per_token = shape.flops_per_token(training.seq_len)
        self._passes: dict[tuple[Choices, Part, int], tuple[StepShape, Passes]] = {}
        self._kernels: dict[str, Kernels] = {}
        self._parts_of: dict[Mesh, list[Part]] = {}
        self._ranks: dict[tuple[Choices, Part, int], Rank] = {}
        self._priced: dict[tuple[Strategy, Mesh, Choices, bool], Candidate] = {}

    def candidate(self, strategy: Strategy, mesh: Mesh, choices: Choices, *, asked: bool) -> Candidate:
        """With the cheaper exchange of keys and values, unless one is asked for."""
        key = strategy, mesh, choices, asked
        if (known := self._priced.get(key)) is None:
            layout, schedule = layout_of(strategy, mesh, choices.communication), self.training.schedule
            layouts = [
                layout._replace(schedule=schedule, context_exchange=way) for way in self._exchanges(mesh)
            ]
            ways = [self._candidate(strategy, one, choices, asked=asked) for one in layouts]
            known = self._priced[key] = cheaper(ways)
        return known

    def _exchanges(self, mesh: Mesh) -> tuple[ContextExchange, ...]:
        asked = self.training.context_exchange
        if mesh.cp == 1:
            return ("all_gather",)
        return _EXCHANGES if asked == "auto" else (asked,)

    def _candidate(self, strategy: Strategy, layout: Layout, choices: Choices, *, asked: bool) -> Candidate:
        mesh = layout.mesh
        ranks = [self._on_one_rank(choices, mesh, part) for part in self._parts(mesh)]
        hardware, training, step = self.hardware, self.training, ranks[0].work.step
        needs = self._fullest(ranks, layout)
        available, often = hardware.memory_bytes, choices.communication != "resident"
        if often and needs.total > available and step.accumulation > 1 and mesh.dp_shard > 1:
            layout = layout._replace(reduce_gradients="every")  # more to send, less to keep
            needs = self._fullest(ranks, layout)
        needed = needs.total
        # of a pipeline one with more blocks may send more than the one with the head computes
        each = [self._seconds(layout, one.work, self._packed(mesh, choices, one.passes)) for one in ranks]
        seconds, slowest = max(zip(each, ranks, strict=True), key=lambda pair: pair[0].total)
        num_tokens = self.num_tokens
        rate = num_tokens / seconds.total
        peak = hardware.speed.peak_flops[step.precision] * mesh.world_size
        validating = self._validation_seconds(mesh, step, slowest.passes)
        hours = (training.steps * seconds.total + validating) / 3600
        price = hardware.price_usd_per_device_hour
        usd = None if price is None else price * mesh.world_size * hours
        return Candidate(
            strategy=strategy,
            mesh=mesh,
            micro_batch=step.micro_batch,
            activation_checkpointing=step.checkpointing,
            precision=step.precision,
            asked=asked,
            memory=needs,
            fits=needed <= available,
            reason=f"needs {format_bytes(needed)} of {format_bytes(available)}",
            seconds=seconds,
            tokens_per_second=rate,
            mfu_ratio=mfu_ratio(self._flops_per_token, rate, peak),
            hours=hours,
            usd=usd,
            usd_per_million_tokens=None if usd is None else usd / (training.steps * num_tokens / 1e6),
            reduce_gradients=layout.reduce_gradients,
            communication=choices.communication,
            context_exchange=layout.context_exchange,
            used_ratio=needed / available,
            host_bytes=max(
                one.work.activations.offloaded_bytes + self._host_bytes(layout, one.work) for one in ranks
            ),
        )

    def _host_bytes(self, layout: Layout, work: RankWork) -> int:
        """Of an optimizer on the host: its states, and the weights and gradients that it updates by."""
        optimizer, trained = self.training.optimizer, work.parameters.trained
        if not optimizer.on_host:
            return 0
        num_ranks = layout.num_updating_ranks
        states = total(optimizer.states(trained, num_ranks)) - total(
            optimizer.states_on_gpu(trained, num_ranks)
        )
        return states + (WEIGHT_BYTES + GRADIENT_BYTES) * trained.share(num_ranks)

    @property
    def num_tokens(self) -> float:
        """Of a step."""
        training = self.training
        return training.global_batch * training.seq_len if self.uneven is None else self.uneven.num_tokens

    def _packed(self, mesh: Mesh, choices: Choices, step_passes: Passes) -> Passes:
        """With as many rows as the samples are packed into, and the waits for whoever has more work."""
        if self.uneven is None:
            return step_passes
        capacity = choices.micro_batch * self.training.seq_len
        dealt = self.uneven.dealt(mesh, capacity, choices.communication, self.hardware.device)
        full = choices.micro_batch * self.uneven.cost(self.training.seq_len)
        return step_passes.of_rows(dealt.num_rows, dealt.work / (dealt.num_rows * full))

    def least_seconds(self, mesh: Mesh, choices: Choices, too_long: float = math.inf) -> float:
        """That no candidate is below which differs from this in its data axes alone (of as many data ranks).
        Of a pipeline's ranks those of the one with the most blocks. Where computing alone takes `too_long`,
        it is that."""
        _, step_passes = self._passes_of(choices, mesh, self._fullest_part(mesh))
        step_passes = self._packed(mesh, choices, step_passes)
        ratio = self.hardware.speed.time_ratio
        compute = ratio * self._slowest_ratio * step_passes.compute
        if compute >= too_long:
            return compute
        schedule, sharing = self.training.schedule, without_data(mesh)
        layouts = [Layout(mesh, schedule=schedule, context_exchange=way) for way in self._exchanges(mesh)]
        return compute + ratio * min(self.exposed_seconds(step_passes, one, sharing) for one in layouts)

    def least_bytes(self, mesh: Mesh, choices: Choices) -> int:
        """Likewise."""
        work = self._on_one_rank(choices, mesh, self._fullest_part(mesh)).work
        hardware, parameters, activations = self.hardware, work.parameters, work.activations
        most = mesh.num_data_ranks * mesh.cp
        states = total(parameters.held(most, WEIGHT_BYTES))
        optimizer = self.training.optimizer
        kept = optimizer.states_on_gpu if hardware.device == "cuda" else optimizer.states
        states += total(kept(parameters.trained, most))
        held = total(activations.saved) + activations.logit_bytes
        return int(hardware.speed.memory_ratio * (states + held))

    def _fullest_part(self, mesh: Mesh) -> Part:
        return max(self._parts(mesh), key=lambda part: part.num_blocks or 0)

    def _parts(self, mesh: Mesh) -> list[Part]:
        """Of the ranks that have most to do or to hold."""
        if (known := self._parts_of.get(mesh)) is None:
            known = self._parts_of[mesh] = self._different_parts(mesh)
        return known

    def _different_parts(self, mesh: Mesh) -> list[Part]:
        """Of a pipeline those of its first, last and second rank. Others have no more to do than the second
        and hold less, but those with more blocks, and the last but one where weights' gradients are put
        off."""
        num_ranks = mesh.pp
        if num_ranks == 1:
            return [Part(tp=mesh.tp, cp=mesh.cp, ep=mesh.ep)]
        if len(self.shape.parameters.by_rank) == num_ranks:
            last = num_ranks - 1
            return [Part(is_first=rank == 0, is_last=rank == last, rank=rank) for rank in range(num_ranks)]
        num_stages = num_ranks * stages_per_rank(self.training.schedule)
        counts = num_blocks_of(self.shape, self.training.seq_len, num_stages)
        blocks = [sum(counts[rank::num_ranks]) for rank in range(num_ranks)]
        inner = Part(mesh.tp, mesh.cp, is_first=False, is_last=False, ep=mesh.ep)
        parts = [
            inner._replace(num_blocks=blocks[0], is_first=True),
            inner._replace(num_blocks=blocks[-1], is_last=True),
        ]
        from mlpipe.plan.pipelining import held  # of few plans

        between = range(1, num_ranks - 1)
        more = [rank for rank in between if blocks[rank] > max(blocks[1:rank], default=0)]
        if any(one.put_off for one in held(self.training.schedule, 0, num_ranks, num_ranks)):
            more += between[-1:]
        parts += [inner._replace(num_blocks=blocks[n], number=n) for n in dict.fromkeys(more)]
        return parts

    def _on_one_rank(self, choices: Choices, mesh: Mesh, part: Part) -> Rank:
        """Of those with this part; under all meshes with as many data ranks it is the same."""
        key = choices, part, mesh.num_data_ranks
        if (known := self._ranks.get(key)) is None:
            step, step_passes = self._passes_of(choices, mesh, part)
            work = RankWork(
                self.shape.parameters.of(part),
                self.shape.activations(step, self.hardware.device),
                step,
                Layout(Mesh()),
                self.training.optimizer,
                overlap=step_passes.overlap,
                kv_bytes=step_passes.kv_bytes,
                expert_params=step_passes.expert_params,
            )
            known = self._ranks[key] = Rank(work, memory.whole(work), step_passes)
        return known

    def _passes_of(self, choices: Choices, mesh: Mesh, part: Part) -> tuple[StepShape, Passes]:
        """The same without its activations, for what is too slow whatever it keeps."""
        key = choices, part, mesh.num_data_ranks
        if (known := self._passes.get(key)) is None:
            training, hardware = self.training, self.hardware
            samples = training.global_batch // mesh.num_data_ranks
            step = StepShape(
                training.seq_len,
                choices.micro_batch,
                samples // choices.micro_batch,
                choices.precision,
                choices.checkpointing,
                training.compiled,
                part,
                training.offload in ("activations", "all"),
                training.fused_head,
                training.float8,
                adds_exactly(training.deterministic, choices.precision),
            )
            known = self._passes[key] = step, passes(self.shape, step, hardware, self._kernels_of(step))
        return known

    def _kernels_of(self, step: StepShape) -> Kernels:
        if step.precision not in self._kernels:
            device, speed = self.hardware.device, self.hardware.speed
            self._kernels[step.precision] = Kernels(step.precision, step.compiled, device, speed)
        return self._kernels[step.precision]

    def _of_rank(self, layout: Layout, work: RankWork) -> Layout:
        """With what this rank tells others beside its gradients, or instead of them."""
        exchanged = self._exchanged(work.parameters, layout)
        return layout if exchanged is None else layout._replace(exchanged=exchanged)

    def _exchanged(self, parameters: ParameterCounts, layout: Layout) -> Exchanged | None:
        compress, trained = self.training.compress, parameters.trained
        if (local := self.training.islands) is not None:
            return of_islands(local, trained)._replace(elsewhere=self.hardware.comes_and_goes)
        if compress is None or layout.num_replicas == 1:
            return None
        sent = COMPRESSIONS[compress.name].sent
        each = [(sent(rows, columns, compress.args), many) for rows, columns, many in trained.tensors]
        return Exchanged(
            sum(one.reduced_bits * many for one, many in each) / 8,
            sum(one.gathered_bits * many for one, many in each) / 8,
            trained.total,
        )

    def _fullest(self, ranks: list[Rank], layout: Layout) -> MemoryEstimate:
        """What the fullest of these ranks needs."""
        return max(self._needs(ranks, layout), key=lambda needs: needs.total)

    def memory_by_rank(self, chosen: Candidate) -> list[MemoryEstimate]:
        """Of a priced candidate, as `_parts` has the ranks of its pipeline."""
        assert chosen.mesh is not None
        assert chosen.micro_batch is not None
        mode, precision = chosen.activation_checkpointing, chosen.precision
        choices = Choices(chosen.micro_batch, mode, precision, chosen.communication)
        ranks = [self._on_one_rank(choices, chosen.mesh, part) for part in self._parts(chosen.mesh)]
        layout = layout_of(chosen.strategy, chosen.mesh, chosen.communication)
        layout = layout._replace(
            schedule=self.training.schedule,
            reduce_gradients=chosen.reduce_gradients,
            context_exchange=chosen.context_exchange,
        )
        return self._needs(ranks, layout)

    def _needs(self, ranks: list[Rank], layout: Layout) -> list[MemoryEstimate]:
        hardware = self.hardware
        estimates = (
            memory.estimate(
                rank.work._replace(layout=self._of_rank(layout, rank.work)), hardware.device, rank.alone
            )
            for rank in ranks
        )
        return [one.scaled(hardware.speed.memory_ratio) for one in estimates]

    def _validation_seconds(self, mesh: Mesh, step: StepShape, step_passes: Passes) -> float:
        """Of all validations: forward passes over micro-batches that are dealt to the ranks. What these
        gather is not counted."""
        training = self.training
        together = step.micro_batch * mesh.num_data_ranks
        num_passes = training.num_validations * -(-training.validation_samples // together)
        return self.hardware.speed.time_ratio * num_passes * step_passes.forward

    def exposed_seconds(self, step_passes: Passes, layout: Layout, mesh: Mesh) -> float:
        """What computing does not hide of the communication of this mesh's axes; a pipeline's idle time."""
        return sum(axis.exposed_seconds(step_passes, self._wire, layout) for axis in active(mesh))

    def gradient_seconds(self, step: StepShape, num_params: float, layout: Layout) -> float:
        """Of a rank and a step, beside its passes."""
        return gradient_seconds(step, num_params, layout, self.hardware)

    def _seconds(self, layout: Layout, work: RankWork, step_passes: Passes) -> StepSeconds:
        hardware, training, mesh = self.hardware, self.training, layout.mesh
        layout = self._of_rank(layout, work)
        step = work.step._replace(accumulation=step_passes.accumulation)
        activations, wire, trained = work.activations, self._wire, work.parameters.trained
        allocating = allocation_seconds(
            activations.made, hardware.device, hardware.speed, mesh, step.checkpointing
        )
        num_updating = layout.num_updating_ranks
        traffic = training.optimizer.traffic_bytes_per_parameter(trained)
        update = update_seconds(trained.share(num_updating), traffic, hardware)
        if training.optimizer.on_host:
            update = host_update_seconds(trained.share(num_updating), traffic, hardware)
        passing = step_passes.compute + step.accumulation * allocating
        elsewhere = step_passes.num_blocks * step_passes.expert_params * (1 - 1 / mesh.ep)
        passing += self.gradient_seconds(step, max(0.0, trained.total - elsewhere), layout)
        compute = self._slowest_ratio * (passing + update)
        exposed = self.exposed_seconds(step_passes, layout, mesh)
        exposed += offload_seconds(activations.offloaded_bytes, step_passes, hardware)
        cost = training.optimizer.update_cost(trained)
        if cost.flops:
            precision = "bf16" if "bf16" in hardware.speed.peak_flops else step.precision
            kernels = Kernels(precision, False, hardware.device, hardware.speed)
            compute += kernels.matmul_flops(cost.flops) / num_updating
            # experts that `ep` lays over ranks are sent within those that have the same ones
            apart = training.optimizer.stacked_bytes(trained) if mesh.ep > 1 else 0
            exposed += 2 * wire.all_to_all(cost.sent_bytes - apart, num_updating)
            if num_updating > mesh.ep > 1:
                exposed += 2 * wire.all_to_all(apart / mesh.ep, num_updating // mesh.ep, mesh.ep)
        interval = training.save_steps
        if interval is None:
            interval = whole_steps(training.save_seconds or 900.0, compute + exposed)
        between = interval * (compute + exposed) if training.asynchronous else None
        saved = memory.saved_bytes(self.shape.parameters, training.optimizer, mesh.world_size)
        stall = save_seconds(saved, hardware, between)
        # reading tokens is a copy out of a mapped file; the rest of a step's bookkeeping is a few kernels
        data = self.num_tokens / mesh.num_data_ranks * 16 / hardware.speed.memory_bytes_per_second
        ratio = hardware.speed.time_ratio
        return StepSeconds(ratio * compute, ratio * exposed, data, stall / interval)
