"""The candidates of one training stage: what the pipeline file leaves open, on given hardware."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from mlpipe._core import feasibility, meshes, pipelines
from mlpipe._core.errors import PlanError
from mlpipe._core.feasibility import Infeasible
from mlpipe._core.pipelines import DEFAULT, Schedule, why_not
from mlpipe._core.units import parse_bytes, parse_cadence
from mlpipe.kinds.train.spec import OwnModel, Train
from mlpipe.plan.choose import Candidate, cheaper, choose, is_tight, smallest
from mlpipe.plan.hardware import GPUS, Hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost, optimizer_cost
from mlpipe.plan.pricing import Choices, Pricer, Training
from mlpipe.plan.settings import CHECKPOINTING, Checkpointing, Communication, ContextExchange, Precision
from mlpipe.plan.shapes import trained
from mlpipe.plan.shapes.shape import ModelShape
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.updates import CompressPlan, IslandsPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.spec import links
from mlpipe.spec.data import ChatData, OwnData, TokenData
from mlpipe.spec.links import UNSCALED
from mlpipe.spec.optimizer import OwnOptimizer

if TYPE_CHECKING:
    from mlpipe.plan.search import SearchResult
    from mlpipe.plan.uneven import Uneven

# A step that is shorter by less is no reason to keep all weights gathered.
_WORTH_RATIO = 0.01
_UNFIT = "{} leaves none of the copies of a model that `compress` and `update` need"
_APART = "{} does not split the weights within each node, as communication: on_demand needs"


def global_batch(spec: Train) -> int:
    """In sequences."""
    if not isinstance(spec.data, TokenData) or spec.data.batch_size is not None:
        return cast(int, spec.data.batch_size)
    return cast(int, spec.data.batch_tokens) // spec.model.seq_len


def refuse(conflict: Infeasible | None, where: str | None = None) -> None:
    """Raises PlanError where there is one."""
    if conflict is not None:
        raise PlanError(conflict.message, where=where, hint=conflict.remedy)


def micro_batches(
    global_batch: int, num_ranks: int, micro_batch: int | None, accumulation: int | None = None
) -> list[int]:
    """Sequences in one forward pass to choose from, largest first; None of `micro_batch` and `accumulation`:
    all that divide. Raises PlanError where `global_batch = micro_batch x num_ranks x accumulation` has no
    solution."""
    refuse(feasibility.uneven_batch(global_batch, num_ranks))
    share = global_batch // num_ranks
    if accumulation is not None:
        refuse(feasibility.uneven_accumulation(accumulation, global_batch, num_ranks))
        return [share // accumulation]
    # divisors come in pairs, and only one of a pair is above the root
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = sorted({*small, *(share // size for size in small)}, reverse=True)
    if micro_batch is None:
        return sizes
    refuse(feasibility.uneven_micro_batch(micro_batch, global_batch, num_ranks))
    return [micro_batch]


def enumerate_candidates(
    spec: Train,
    shape: ModelShape | None,
    hardware: Hardware,
    *,
    every: bool = True,
    searches: bool = True,
) -> list[Candidate]:
    """`shape`: None for a user's own model that nobody traced. `every`: also what the file does not ask for.
    `searches`: meshes whose ranks share samples, too. Raises PlanError where the file asks for what no
    hardware can do."""
    own = own_mesh(spec, shape, hardware)
    name = spec.strategy if own is None or spec.strategy != "auto" else strategy_of(own)
    peaks = hardware.speed.peak_flops
    precision, _ = precision_on(spec, hardware)
    if precision not in peaks:
        raise PlanError(f"{hardware.name} has no {precision}", hint=f"write precision: {' or '.join(peaks)}")
    if spec.float8:
        _refuse_float8(precision, hardware)
    if spec.communication == "on_demand":
        _refuse_apart(own, hardware)
    cut = own is not None and isinstance(spec.model, OwnModel) and not _knows_stages(shape, own)
    pricer = pricer_of(spec, shape, hardware) if shape is not None and not cut else None
    modes = modes_of(spec, shape)
    candidates: list[Candidate] = []
    uneven: PlanError | None = None
    for strategy, settings in ORDER.items():
        wanted = name in ("auto", strategy)
        possible = settings.meshes(hardware.num_nodes, hardware.devices_per_node)
        if own is not None and wanted:
            possible = [own]
        if not isinstance(possible, str) and (unfit := _unfit_for_links(spec, settings.FLAGS, hardware)):
            # what a mesh of the file's own cannot do was refused by now
            possible = [mesh for mesh in possible if not unfit(mesh)] or _UNFIT.format(strategy)
        if spec.communication == "on_demand" and not isinstance(possible, str):
            owned = [mesh for mesh in possible if reads_on_demand(mesh, hardware)]
            possible = owned or _APART.format(strategy)
        if isinstance(possible, str):
            candidates.append(
                Candidate(strategy, None, None, modes[0], precision, wanted, None, False, possible)
            )
            continue
        try:
            sizes = [_sizes(spec, mesh) for mesh in possible]
        except PlanError as error:
            if wanted and not (is_searched(spec) and global_batch(spec) < hardware.world_size):
                raise
            uneven = error
            candidates.append(
                Candidate(strategy, None, None, modes[0], precision, wanted, None, False, error.message)
            )
            continue
        if pricer is None:
            reason = (
                "the size of your own model is not known before it is built"
                if isinstance(spec.model, OwnModel)
                else "the size of these weights is not known before another stage has made them"
            )
            if cut:
                reason = "what the stages of your own model take is known once they are traced"
            unpriced = Candidate(
                strategy, possible[0], sizes[0][0], modes[0], precision, wanted, None, True, reason
            )
            way = communications_of(spec, possible[0])[-1]
            candidates.append(unpriced._replace(communication=way))
            continue
        for mesh, micro in zip(possible, sizes, strict=True):
            communications = communications_of(spec, mesh)
            for each in _precisions(peaks, precision) if every else (precision,):
                for mode in CHECKPOINTING if every else modes:
                    open_ = wanted and each == precision and mode in modes
                    for size in micro:
                        ways = [Choices(size, mode, each, way) for way in communications]
                        tried = (pricer.candidate(strategy, mesh, way, asked=open_) for way in ways)
                        best = _first_fitting if pricer.uneven is None else _worth_it
                        candidates.append(best(tried))
    if searches and pricer is not None and is_searched(spec):
        candidates += searched(spec, pricer, candidates).candidates
        if uneven is not None and not any(c.asked and c.mesh is not None for c in candidates):
            raise uneven
    return candidates


def _knows_stages(shape: ModelShape | None, mesh: Mesh) -> bool:
    """Of a user's own model: whether somebody has traced the stages that it is cut into."""
    if mesh.pp == 1:
        return True
    return shape is not None and len(shape.parameters.by_rank) == mesh.pp


_searched: list[tuple[Pricer, Train, float, SearchResult]] = []


def searched(spec: Train, pricer: Pricer, candidates: Sequence[Candidate]) -> SearchResult:
    """Other axes of the mesh, for a preset under `auto`. `candidates`: in which those without are. Whoever
    plans asks for the same to choose, to compare, and to explain."""
    from mlpipe.plan.search import limit_of

    data_parallel = [c for c in candidates if c.mesh and c.mesh.num_data_ranks == c.mesh.world_size]
    asked = pricer, spec, limit_of(data_parallel)
    known = _searched[:1]  # of this thread, whatever others ask for
    if not known or known[0][:3] != asked:
        known = _searched[:] = [(*asked, _search(*asked))]
    return known[0][3]


def _search(pricer: Pricer, spec: Train, limit: float) -> SearchResult:
    from mlpipe.plan.search import SearchResult, model_meshes, search

    if "num_heads" not in pricer.shape.widths:  # nobody knows what of it can be split
        return SearchResult()
    modes, precision = modes_of(spec, pricer.shape), precision_on(spec, pricer.hardware)[0]
    figures, settings = _figures(spec, pricer.shape), spec.model_dump()

    def allows(sizes: dict[str, int]) -> bool:
        return next(_conflicts(spec, settings, sizes, figures), None) is None

    points = []
    for mesh in model_meshes(pricer.hardware, figures, allows):
        try:
            sizes = _sizes(spec, mesh)
        except PlanError:  # of samples that so many data ranks cannot share
            continue
        share = global_batch(spec) // mesh.num_data_ranks
        # with fewer microbatches than stages a rank is idle for as long as it works
        sizes = [size for size in sizes if share // size >= mesh.pp] or sizes[-1:]
        way = communications_of(spec, mesh)[-1]
        points += [(mesh, [Choices(size, mode, precision, way) for mode in modes]) for size in sizes]
    return search(pricer, points, limit) if points else SearchResult()


def modes_of(spec: Train, shape: ModelShape | None) -> tuple[Checkpointing, ...]:
    """Of activation checkpointing, those that the file leaves open. Without what experts do not go with under
    some meshes, `auto` is the same under all."""
    asked = spec.activation_checkpointing
    if asked == "auto" and spec.offload in ("activations", "all"):
        return tuple(mode for mode in CHECKPOINTING if mode != "none")
    if asked == "auto" and spec.float8:  # `selective` keeps bf16's products
        return tuple(mode for mode in CHECKPOINTING if mode != "selective")
    if asked == "auto" and spec.compile != "off" and shape is not None and "num_experts" in shape.widths:
        return tuple(mode for mode in CHECKPOINTING if mode != "selective")
    return CHECKPOINTING if asked == "auto" else (asked,)


def _first_fitting(candidates: Iterable[Candidate]) -> Candidate:
    """Else the last one."""
    last = None
    for last in candidates:
        if last.fits:
            break
    assert last is not None
    return last


def _worth_it(candidates: Iterable[Candidate]) -> Candidate:
    """The last one, unless another is faster by enough."""
    *others, usual = candidates
    worth = [one for one in others if one.step_seconds < (1 - _WORTH_RATIO) * usual.step_seconds]
    return cheaper([*worth, usual])


def communications_of(spec: Train, mesh: Mesh) -> tuple[Communication, ...]:
    """What the file says, or what `auto` may be. Packed samples give workers uneven work, which costs no time
    where they meet once a step: weights that stay gathered cost memory instead, and are not gathered again.
    Where nobody knows the lengths it is the first that fits."""
    if spec.communication != "auto":
        return (spec.communication,)
    if spec.stragglers == "move_load":  # ranks that meet in each microbatch have equally many
        return ("resident",)
    runs_free = (
        packing_of(spec) is not None
        and spec.update is None
        and mesh.num_data_ranks == mesh.world_size
        and mesh.ep == 1
    )
    return ("resident", "collective") if runs_free else ("collective",)


def reads_on_demand(mesh: Mesh, hardware: Hardware) -> bool:
    """Whether weights are split, and all workers that need a part are on the node of its owner."""
    shares = mesh.dp_shard > 1 and hardware.devices_per_node % mesh.dp_shard == 0
    return shares or mesh.world_size == 1


def _refuse_apart(own: Mesh | None, hardware: Hardware) -> None:
    """Raises PlanError."""
    within = Mesh(dp_replicate=hardware.num_nodes, dp_shard=hardware.devices_per_node)
    if not reads_on_demand(own or within, hardware):
        raise PlanError(
            "communication: on_demand needs weights that are split over workers of the same node",
            hint=f"write a mesh whose dp_shard divides the {hardware.devices_per_node} of a node"
            if within.dp_shard > 1
            else "take nodes of several workers, or write communication: resident",
        )


def uneven_of(spec: Train, shape: ModelShape | None) -> Uneven | None:
    """None: samples are not packed, or nobody can read yet how long they are."""
    if not isinstance(spec.data, ChatData) or (packing := packing_of(spec)) is None:
        return None
    files = [(one.path, one.weight) for one in spec.data.files]
    return _uneven(files, shape, spec.model.seq_len, global_batch(spec), packing)


def _uneven(
    files: Sequence[tuple[str, float]],
    shape: ModelShape | None,
    seq_len: int,
    batch: int,
    packing: Literal["best_fit", "balanced"],
) -> Uneven | None:
    """`files`: with their weights beside each other."""
    from mlpipe.plan.dealing import cost_of_samples  # of few plans
    from mlpipe.plan.uneven import Uneven, lengths_of

    lengths = {file: lengths_of(file[0], seq_len) for file in files}
    if not all(lengths.values()):
        return None
    weights = None
    if len(lengths) > 1:
        weights = [weight / len(each) for (_, weight), each in lengths.items() for _ in each]
    every = [length for each in lengths.values() for length in each]
    return Uneven(every, cost_of_samples(shape), batch, packing, weights)


def packing_of(spec: Train) -> Literal["best_fit", "balanced"] | None:
    """What `auto` means, or what the file says; None: samples are not packed."""
    asked = spec.data.packing if isinstance(spec.data, ChatData | OwnData) else None
    if asked == "auto":
        return None if isinstance(spec.model, OwnModel) else "balanced"
    return None if asked == "off" else asked


_last: list[Pricer] = []


def pricer_of(spec: Train, shape: ModelShape, hardware: Hardware) -> Pricer:
    """Prices ways to do this training. Whoever plans asks twice for the same: to choose, and to compare."""
    made = Pricer(shape, _training(spec), hardware, uneven_of(spec, shape))
    known = _last[:1]  # of this thread, whatever others ask for
    if not known or known[0].prices != made.prices:
        known = _last[:] = [made]
    return known[0]


def is_searched(spec: Train) -> bool:
    """Whether all axes are open: of a model of mlpipe's, where the file names neither mesh nor strategy."""
    return spec.mesh is None and spec.strategy == "auto" and not isinstance(spec.model, OwnModel)


def _figures(spec: Train, shape: ModelShape | None) -> dict[str, int]:
    """What is known of the model's sizes."""
    figures = {"seq_len": spec.model.seq_len}
    if shape is None:
        return figures
    layers = {"num_layers": shape.parameters.num_blocks, "num_experts": 0}
    return {**layers, **shape.widths, **figures}


def own_mesh(spec: Train, shape: ModelShape | None, hardware: Hardware) -> Mesh | None:
    """The one that the file names, on this hardware; None: it leaves it open. Raises PlanError."""
    if spec.mesh is None:
        return None
    sizes = spec.mesh.on(hardware.world_size)
    if isinstance(sizes, Infeasible):
        raise PlanError(sizes.message, hint=sizes.remedy)
    for _, conflict in _conflicts(spec, spec.model_dump(), sizes, _figures(spec, shape)):
        refuse(conflict)
    return Mesh(**sizes)


def _conflicts(
    spec: Train, settings: Mapping[str, Any], sizes: dict[str, int], figures: dict[str, int]
) -> Iterator[tuple[str, Infeasible]]:
    """Why a mesh of these sizes cannot be trained. `settings`: `spec`, as in the file."""
    yield from meshes.conflicts(sizes, figures, own_model=isinstance(spec.model, OwnModel))
    yield from meshes.unsupported_mix(sizes, settings, figures)
    number = spec.pipeline.microbatches if spec.pipeline is not None else None
    asked = number if isinstance(number, int) else None
    yield from pipelines.conflicts(schedule_of(spec), asked, sizes, figures, settings)


def num_data_ranks(spec: Train, hardware: Hardware) -> int:
    """Groups of workers that read different samples: all, where the file names no mesh. Raises PlanError."""
    own = own_mesh(spec, None, hardware)
    return hardware.world_size if own is None else own.num_data_ranks


def strategy_of(mesh: Mesh) -> str:
    """The strategy that uses these data axes, with no flags besides."""
    used = tuple(axis for axis in meshes.DATA_AXES if mesh.axes[axis] > 1)
    return next(name for name, one in ORDER.items() if meshes.STRATEGIES[name] == used and not one.FLAGS)


def _sizes(spec: Train, mesh: Mesh) -> list[int]:
    """Of micro-batches; those that a pipeline's schedule can do."""
    number = spec.pipeline.microbatches if spec.pipeline is not None else None
    if number in (None, "auto"):
        number = spec.accumulation
    asked, passes = (None if n == "auto" else n for n in (spec.data.micro_batch, number))
    sizes = micro_batches(global_batch(spec), mesh.num_data_ranks, asked, passes)
    if mesh.pp == 1:
        return sizes
    share, schedule = global_batch(spec) // mesh.num_data_ranks, schedule_of(spec)
    whys = {size: why_not(schedule, mesh.pp, share // size) for size in sizes}
    if not (possible := [size for size, why in whys.items() if why is None]):
        refuse(Infeasible(whys[sizes[0]] or "", "write another batch_size, micro_batch or schedule"))
    return possible


def precision_on(spec: Train, hardware: Hardware) -> tuple[Precision, str]:
    """What `precision: auto` means there, or what the file says, and why: bf16 where the hardware computes it
    natively. What must repeat to the bit follows from the file alone, not from the machine at hand."""
    if spec.precision != "auto":
        return spec.precision, "as asked"
    peaks = hardware.speed.peak_flops
    if "bf16" not in peaks:
        if "fp16" not in peaks:
            return "fp32", f"{hardware.name} has no bf16"
        spoilt = next((key for key in UNSCALED if getattr(spec, key) is not None), None)
        if spoilt is not None:
            return "fp32", f"{hardware.name} has no bf16, and {spoilt} does not go with fp16"
        return "fp16", f"{hardware.name} has no bf16; the loss is scaled, since fp16 has a narrow range"
    if spec.float8:
        return "bf16", "float8 stands beside it"
    if hardware.speed.kernels and "fp32" in peaks:
        ratio = peaks["bf16"] / peaks["fp32"]
        return "bf16" if ratio > 1 else "fp32", f"bf16 was measured at {ratio:.2g} times the speed of fp32"
    if hardware.device == "cuda":
        return "bf16", f"{hardware.name} computes it natively"
    if hardware.native_bf16 is None:
        return "fp32", "no bf16 instructions are known of this CPU"
    if spec.deterministic:
        return "fp32", "a deterministic run must not depend on what this CPU can do"
    return "bf16", f"this CPU has {hardware.native_bf16}"


def _refuse_float8(precision: str, hardware: Hardware) -> None:
    """Raises PlanError."""
    if precision != "bf16":
        raise PlanError(
            f"float8 stands beside bf16, and precision is {precision} on {hardware.name}",
            hint="write precision: bf16, or float8: false",
        )
    if hardware.device == "cuda" and hardware.speed.float8_speedup is None:
        able = ", ".join(name for name, gpu in GPUS.items() if gpu.float8_speedup)
        raise PlanError(
            f"no float8 of {hardware.name} is known",
            hint=f"write float8: false, or take one of {able}",
        )


def _precisions(peaks: Iterable[str], asked: Precision) -> list[str]:
    """To compare: fp16 only where bf16 is not there, or is not what is asked for."""
    return [one for one in peaks if one in ("fp32", "bf16", asked) or "bf16" not in peaks]


def pick(
    spec: Train, shape: ModelShape | None, hardware: Hardware, *, simplest: bool = False
) -> tuple[Candidate, str]:
    """The best, or the best of the strategy asked for, which is not refused for memory alone: the estimate
    may err. With the reason. `simplest`: whatever fits and shards least, for work whose steps are not
    training's. Raises PlanError."""
    candidates = enumerate_candidates(spec, shape, hardware, every=False, searches=not simplest)
    # none is simpler than one of these that leaves memory free
    if simplest and not any(one.asked and one.fits and not is_tight(one) for one in candidates):
        candidates = enumerate_candidates(spec, shape, hardware, every=False)
    if spec.strategy == "auto":
        best, reason = choose(candidates, equal=math.inf) if simplest else choose(candidates)
        return best, reason if spec.mesh is None else f"{best.strategy}: as the mesh says; {_needs(best)}"
    mine = [c for c in candidates if c.asked]
    if mine[0].mesh is None:
        raise PlanError(mine[0].reason, hint="choose another strategy, or auto")
    if any(c.fits for c in mine):
        best, _ = choose(mine)
        return best, f"{spec.strategy}: as asked; {_needs(best)}"
    least = smallest(mine)
    return least, f"{spec.strategy}: as asked; {least.reason} per worker, too much"


def _needs(candidate: Candidate) -> str:
    return f"{candidate.reason} per worker" if candidate.memory else candidate.reason


def _training(spec: Train) -> Training:
    every = parse_cadence(spec.checkpoint.every)
    return Training(
        global_batch=global_batch(spec),
        seq_len=spec.model.seq_len,
        steps=spec.steps,
        compiled=spec.compile != "off",
        optimizer=OptimizerCost(
            spec.optimizer.state_bytes_per_parameter,
            None if isinstance(spec.optimizer, OwnOptimizer) else spec.optimizer.name,
            averages=spec.ema is not None,
            on_host=spec.offload in ("optimizer", "all"),
        ),
        save_steps=every.steps,
        save_seconds=every.seconds,
        asynchronous=spec.checkpoint.asynchronous,
        schedule=schedule_of(spec),
        context_exchange=exchange_of(spec),
        compress=compress_plan(spec),
        islands=islands_plan(spec),
        offload=spec.offload or "off",
        fused_head=spec.loss == "fused",
        float8=bool(spec.float8),
        deterministic=spec.deterministic,
        **_validations(spec),
    )


def _validations(spec: Train) -> dict[str, int]:
    """As `train/validation.py` counts them."""
    validate = spec.validate_
    if validate is None:
        return {}
    every = parse_cadence(validate.every).steps or spec.steps
    return {
        "num_validations": -(-spec.steps // every),
        "validation_samples": max(1, validate.max_tokens // spec.model.seq_len),
    }


def _unfit_for_links(
    spec: Train, flags: Mapping[str, bool], hardware: Hardware
) -> Callable[[Mesh], bool] | None:
    """Meshes on which gradients cannot be compressed, or there is one island of many workers; None: any will
    do, as where all of them are one among others."""
    if spec.compress is not None:
        return lambda mesh: mesh.dp_shard > 1
    if spec.update is not None and not hardware.comes_and_goes:
        return lambda mesh: mesh.dp_replicate == 1 < mesh.world_size or bool(flags.get("shard_optimizer"))
    return None


def islands_plan(spec: Train) -> IslandsPlan | None:
    """None: gradients are averaged in every step."""
    return None if spec.update is None else IslandsPlan(**links.round_of(spec.update))


def compress_plan(spec: Train) -> CompressPlan | None:
    """None: gradients are sent as they are."""
    return None if spec.compress is None else CompressPlan(*links.settings_of(spec.compress))


def buckets_of(spec: Train, mesh: Mesh) -> int | Literal["auto"] | None:
    """None where nobody asked, or what `auto` chose has none."""
    averages = mesh.dp_replicate * mesh.cp > 1 == mesh.dp_shard == mesh.pp
    if spec.buckets is None or not averages:
        return None
    return "auto" if spec.buckets == "auto" else parse_bytes(spec.buckets)


def schedule_of(spec: Train) -> Schedule:
    """Of its pipeline, if it is to be one."""
    return spec.pipeline.schedule if spec.pipeline is not None else DEFAULT


def exchange_of(spec: Train) -> ContextExchange | Literal["auto"]:
    """Of keys and values, where the mesh has `cp`."""
    asked = spec.context.exchange if spec.context is not None else "auto"
    # which is cheaper may be another one on the next machine, and sums in another order
    return "all_gather" if asked == "auto" and spec.deterministic else asked


def priced(plan: TrainPlan, hardware: Hardware) -> Candidate:
    """What was planned for a preset, perhaps by other figures, on `hardware`, which has as many workers."""
    shape = trained.planned(plan)
    assert shape is not None
    training = Training(
        global_batch=plan.global_batch,
        seq_len=plan.model.seq_len,
        steps=plan.steps,
        compiled=plan.compile != "off",
        optimizer=optimizer_cost(plan),
        save_steps=plan.checkpoint.every_steps,
        save_seconds=plan.checkpoint.every_seconds,
        asynchronous=plan.checkpoint.asynchronous,
        schedule=plan.pipeline.schedule if plan.pipeline is not None else DEFAULT,
        context_exchange=plan.context_exchange,
        compress=plan.compress,
        islands=plan.islands,
        offload=plan.offload,
        fused_head=plan.loss == "fused",
        float8=plan.float8,
        deterministic=plan.deterministic,
    )
    choices = Choices(plan.micro_batch, plan.activation_checkpointing, plan.precision, plan.communication)
    uneven, chat = None, plan.data.chat
    if chat is not None and chat.packing is not None:
        mixed = [(one.path, one.weight) for one in chat.mix]
        files = mixed if chat.path is None else [(chat.path, 1.0)]
        uneven = _uneven(files, shape, plan.model.seq_len, plan.global_batch, chat.packing)
    return Pricer(shape, training, hardware, uneven).candidate(plan.strategy, plan.mesh, choices, asked=True)
