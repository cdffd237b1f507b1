"""From a plan to a loop that is about to take its first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mlpipe._core.errors import TrainError
from mlpipe._core.records import End
from mlpipe.plan.work import TrainPlan
from mlpipe.train.callbacks import Callbacks, make_callbacks
from mlpipe.train.checkpoint import Checkpointer, Coordination, Saved, SaveSettings
from mlpipe.train.contract import check_call
from mlpipe.train.data import first_samples
from mlpipe.train.data.datasets import Streams, fingerprint, open_dataset, vocab_size_of
from mlpipe.train.data.loader import MicrobatchLoader, ReadAhead
from mlpipe.train.data.microbatch import Microbatch, collate, samples_of
from mlpipe.train.data.mixture import Mixture
from mlpipe.train.loop import Loop
from mlpipe.train.memory_probe import dry_steps, fitting_plan, is_due
from mlpipe.train.model import Batch, BuiltModel, build_model
from mlpipe.train.optim.learning_rate import check_schedule
from mlpipe.train.optim.make import make_update
from mlpipe.train.optim.update import Update
from mlpipe.train.outcome import Outcome
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.profiling import Profiling
from mlpipe.train.recording import Recording
from mlpipe.train.resuming import Position, resume
from mlpipe.train.schedules.make import make_schedule
from mlpipe.train.seeding import seed_step
from mlpipe.train.session import Session
from mlpipe.train.world import World

if TYPE_CHECKING:
    from mlpipe.train.validation import Validation


def train(session: Session, plan: TrainPlan, progress: list[int]) -> Outcome:
    """Trains to `plan.steps`, or to the step boundary at which the ranks agreed to stop. `progress[0]` is the
    last finished step."""
    callbacks = make_callbacks(session, plan)
    try:
        return prepare(session, plan, progress, callbacks).run()
    except Exception as error:
        if callbacks:
            callbacks.on_end(End(rank=session.rank, outcome="failed", step=progress[0], message=str(error)))
        raise


def prepare(session: Session, plan: TrainPlan, progress: list[int], callbacks: Callbacks) -> Loop:
    """Everything up to the first step: model, optimizer, data, and the checkpoint to go on from."""
    world = session.world
    group = plan.group_of(world.data_rank)
    if group is not None:
        plan = plan._replace(activation_checkpointing=group.activation_checkpointing)
    seed_step(plan.seed, 0, 0)
    dataset = _dataset(session, plan)
    built = build_model(plan.model, seed=plan.seed, device_type=world.device.type, precision=plan.precision)
    notes = []
    if plan.freeze:
        from mlpipe.train.freezing import freeze

        notes.append(freeze(built.model, plan.freeze))
    trained = _trained(built) if plan.mesh.pp > 1 else None
    num_params = sum(parameter.numel() for parameter in built.model.parameters())
    sample = collate(dataset, np.zeros(2, dtype=np.int64))
    first = first_samples.digests(dataset, plan.data, sample)
    flops = try_out(plan, built.model, dataset, sample)
    if plan.pipeline is not None and not plan.pipeline.num_blocks:
        from mlpipe.train.parallel.even_stages import with_cut

        pipeline = with_cut(plan, built.model, sample)
        if pipeline != plan.pipeline:
            notes.append(f"by FLOPs, the pipeline's stages begin with {', '.join(pipeline.cut)}")
        plan = plan._replace(pipeline=pipeline)
    model = parallelize(built, world, plan._replace(islands=None) if _is_one_island(session) else plan)
    starting = time.perf_counter()
    if plan.init_from is not None:
        from mlpipe.train.starting import start

        notes += start(session, plan, model)
    started = time.perf_counter()
    update = _update(session, plan, model, trained)
    loss_scale = None
    if plan.precision == "fp16":
        from mlpipe.train.loss_scale import LossScale

        loss_scale = LossScale(built.module, plan.micro_batch * plan.accumulation * plan.model.seq_len)
    schedule = make_schedule(plan, model, world, lambda: session.watchdog.beat("computing", progress[0] + 1))

    def first_step(micro_batch: int) -> list[Microbatch]:
        return loader_of(plan, dataset, world, micro_batch).largest()

    if is_due(plan, world.device):
        session.watchdog.beat("probing memory", 0)
        plan = fitting_plan(plan, model, schedule, first_step, world.device)
    elif plan.deterministic and world.size > 1:
        dry_steps(model, schedule, first_step(plan.micro_batch)[:1])
    validation = _validation(session, plan, model)
    session.watchdog.in_collective = lambda: model.waits.open
    recording = Recording(session, plan, model.waits, flops, callbacks)

    def saved(save: Saved) -> None:
        if validation is not None and save.error is not None:
            validation.judge.forget(save.step)
        recording.saved(save)

    coordination_store = session.coordination_store()
    checkpointer = Checkpointer(
        session.store,
        _save_settings(session, plan),
        Coordination(coordination_store, world.rank, world.size),
        on_saved=saved,
        while_waiting=lambda: session.watchdog.beat("waiting for a save", progress[0]),
    )
    position = Position()
    restoring = time.perf_counter()

    def restore() -> Position:
        resumed = resume(session, checkpointer, model, update, coordination_store)
        check_files(resumed.scalars, dataset, plan, session.plan.run_id)
        resumed.notes += _other_firsts(resumed.scalars, dataset, plan, first)
        return resumed

    loader = loader_of(plan, dataset, world, plan.micro_batch)
    loop_of: Callable[..., Loop] = Loop
    if session.plan.launch.replicas is not None:
        _refuse_stream(dataset, "nodes that come and go", "write one number in resources.nodes")
        from mlpipe.train.replicas.elastic_loop import enter

        position, loop_of = enter(session, plan, (model, update, loader), (validation, loss_scale), restore)
        session.stop.begun.set()  # what it has may be nowhere else
    elif plan.resume or session.process.restart:
        position = restore()
    loop_of = _loop_of(session, plan, dataset, loop_of)
    sums = None
    if loop_of is Loop and world.size == session.process.local_world_size > 1:
        from mlpipe.train.node_sums import NodeSums

        sums = NodeSums(world.rank, world.size)
    if validation is not None:
        validation.load(position.scalars)
    if loss_scale is not None:
        loss_scale.load(position.scalars)
    restored = time.perf_counter()
    buckets = {} if plan.buckets is None else {"bucket_bytes": plan.buckets}
    if plan.buckets == "auto":
        from mlpipe.train.bucket_choice import choose_buckets

        session.watchdog.beat("measuring sizes of buckets", position.step)
        chosen = position.scalars.get("buckets")
        buckets = choose_buckets(model, schedule, first_step(plan.micro_batch)[:1], world, chosen)
    position.notes += notes + getattr(dataset, "notes", [])
    recording.start(
        position,
        num_params=num_params,
        restore_seconds=restored - restoring + started - starting,
        sample_lengths=getattr(dataset, "length_counts", None),
        **buckets,
    )
    return loop_of(
        session=session,
        plan=plan,
        model=model,
        update=update,
        schedule=schedule,
        reader=read_ahead(session, plan, loader, position),
        checkpointer=checkpointer,
        recording=recording,
        position=position,
        progress=progress,
        profiling=Profiling(session, plan.profile),
        sums=sums,
        validation=validation,
        loss_scale=loss_scale,
        first_samples=first,
    )


def _dataset(session: Session, plan: TrainPlan) -> Any:
    if plan.data.chat is not None:
        from mlpipe.train.data.chat.tokenised import tokenise_all  # with tokenizers and jinja2

        tokenise_all(plan.data.chat, lambda: session.watchdog.beat("tokenising conversations", 0))
    return open_dataset(plan.data, split="train", seq_len=plan.model.seq_len)


def _trained(built: BuiltModel) -> dict[str, bool]:
    """As a pipeline's ranks know no more when each has kept its stages: names as checkpoints have them."""
    inside = {id(parameter) for block in built.blocks for parameter in block.parameters()}
    return {
        name: id(parameter) in inside
        for name, parameter in built.module.named_parameters()
        if parameter.requires_grad
    }


def _update(
    session: Session, plan: TrainPlan, model: ParallelizedModel, trained: dict[str, bool] | None
) -> Update:
    check_schedule(plan.optimizer, plan.steps)
    on_host = plan.offload in ("optimizer", "all")
    update = make_update(plan.optimizer, model.shards, plan.ema, trained, on_host)
    if plan.islands is not None:
        from mlpipe.train.optim.islands import local_updates

        update = local_updates(plan.islands, update, model, session.world, whole=_is_one_island(session))
    # before the first pass, so that they do not lie among what it leaves in the heap
    update.state()
    return update


def _is_one_island(session: Session) -> bool:
    """Of an elastic training all that are here are one."""
    return session.plan.launch.replicas is not None


def loader_of(plan: TrainPlan, dataset: Any, world: World, micro_batch: int) -> MicrobatchLoader:
    """Of this rank's microbatches. `micro_batch`: their samples, but for groups of machines, each of which
    has a size of its own."""
    group = plan.group_of(world.data_rank)
    size = micro_batch if group is None else group.micro_batch
    if plan.data.is_uneven:
        from mlpipe.train.data.uneven_loader import uneven_loader

        loader: MicrobatchLoader = uneven_loader(plan, dataset, world, size)
    else:
        loader = MicrobatchLoader.of(plan, dataset, world, size)
    if plan.moves_load:
        # whoever compiles for a size of batches compiles for each
        loader.unit = 1 if plan.compile == "off" else size
    loader.speeds = plan.speeds
    return loader


def _save_settings(session: Session, plan: TrainPlan) -> SaveSettings:
    return SaveSettings(
        session.plan.stage_key,
        attempt=session.plan.attempt,
        restart=session.process.restart,
        code_digest=session.plan.code_digest,
        keep=plan.checkpoint.keep,
        asynchronous=plan.checkpoint.asynchronous,
    )


def _loop_of(
    session: Session, plan: TrainPlan, dataset: Any, entered: Callable[..., Loop]
) -> Callable[..., Loop]:
    """The loop that the plan asks for, instead of `entered`. Raises TrainError (input) for data that
    cannot be dealt as it needs them."""
    launch = session.plan.launch
    if plan.groups:
        _refuse_stream(dataset, "machines that differ", "write one mapping in resources")
    if plan.moves_load and session.world.size > 1:
        _refuse_stream(dataset, "workers by their speed", "remove stragglers")
        from mlpipe.train.stragglers import MovingLoop

        entered = MovingLoop
    elif entered is Loop and launch.preflight is not None and launch.num_nodes > 1:
        from mlpipe.train.stragglers import WatchingLoop

        entered = WatchingLoop
    if plan.islands is not None and plan.islands.staleness:
        from mlpipe.train.stale_loop import StaleLoop

        return StaleLoop
    return entered


def _validation(session: Session, plan: TrainPlan, model: ParallelizedModel) -> Validation | None:
    if plan.validate is None:
        return None
    from mlpipe.train.validation import Validation  # with tokenizers and all

    return Validation(session, plan, plan.validate, model)


def _refuse_stream(dataset: Any, to: str, instead: str) -> None:
    samples = samples_of(dataset)
    if isinstance(samples, Streams):
        raise TrainError(
            f"a data set that can only be iterated over cannot be dealt to {to}",
            where=samples.where,
            hint=f"return an object with len() and [i], or {instead}",
            kind="input",
        )


def read_ahead(session: Session, plan: TrainPlan, loader: MicrobatchLoader, position: Position) -> ReadAhead:
    """From `position` on: in this process, or in as many beside it as the plan asks for."""
    dataset = samples_of(loader.dataset)
    if plan.data.workers == 0 and not isinstance(dataset, Streams):
        return ReadAhead(loader)
    from mlpipe.train.data.streams import StreamReader
    from mlpipe.train.data.workers import data_workers
    from mlpipe.train.steps_ahead import steps_ahead

    def beat() -> None:
        session.watchdog.beat("waiting for a data worker", position.step + 1)

    if not isinstance(dataset, Streams):
        return ReadAhead(loader, steps_ahead(loader, plan, session.process.local_world_size, beat))
    reader = StreamReader(
        loader,
        dataset,
        num_steps=plan.steps,
        num_workers=1 if plan.data.workers == "auto" else plan.data.workers,
        saved=position.streams,
        workers_of=data_workers(plan, beat),
    )
    return ReadAhead(loader, reader)


def try_out(plan: TrainPlan, model: torch.nn.Module, dataset: Any, sample: Batch) -> float | None:
    """FLOPs a token, as the plan says or counted. Raises TrainError (input) if the model and its data break a
    rule of the contract, as far as that shows on the meta device; the first pass looks again."""
    _check_vocabulary(plan, dataset)
    check_call(model, sample, plan.model.build.entry)
    if plan.num_flops_per_token is not None:
        return plan.num_flops_per_token
    from mlpipe.train.flops import count_flops_per_token

    return count_flops_per_token(plan.model, collated=sample)


def check_files(scalars: dict[str, Any], dataset: Any, plan: TrainPlan, run_id: str) -> None:
    """Whether the samples are those of the checkpoint: by how many there are, of files in each, which decides
    the order. Not where other data are meant (`--allow-change`). Raises TrainError (input)."""
    before, now = scalars.get("data_files"), fingerprint(dataset)
    if before is None or before == now or not _has_data_of(scalars, plan):
        return
    # of a mixture's sources an older checkpoint says less
    if isinstance(dataset, Mixture) and now is not None and {*before.split(", ")} <= {*now.split(", ")}:
        return
    files, own = plan.data.all_files, [one.dataset for one in plan.data.sources if one.dataset is not None]
    raise TrainError(
        f"the data were {before} at the checkpoint, and are {now}",
        where=files[0].paths[0] if files else own[0].entry if own else "data",
        hint=f"put them back as they were, or begin anew: mlpipe resume {run_id} --from-step 0",
        kind="input",
    )


def _other_firsts(scalars: dict[str, Any], dataset: Any, plan: TrainPlan, now: str | None) -> list[str]:
    """Notes of other first samples, where the same data are meant, cut and padded alike."""
    # "first_sample" of older checkpoints: digests without shapes and dtypes, which no new one equals
    before, length = scalars.get("first_samples"), "model.seq_len"
    if before is None or now is None or not _has_data_of(scalars, plan):
        return []
    is_as_long = scalars.get("meaning", {}).get(length) == plan.meaning.get(length)
    return first_samples.changes(dataset, plan.data, before, now) if is_as_long else []


def _has_data_of(scalars: dict[str, Any], plan: TrainPlan) -> bool:
    """Whether the data are meant to be those of the checkpoint."""
    return _of_data(scalars.get("meaning", {})) == _of_data(plan.meaning)


def _of_data(meaning: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meaning.items() if key.startswith("data.")}


def _check_vocabulary(plan: TrainPlan, dataset: Any) -> None:
    """Of tokens that the planner has not seen."""
    ours, theirs = plan.model.build.args.get("vocab_size"), vocab_size_of(dataset)
    if plan.model.preset is not None and isinstance(ours, int) and theirs > ours:
        raise TrainError(
            f"model.vocab_size is {ours}, but there are {theirs} tokens in the data",
            where=plan.data.tokens or "data",
            hint=f"write vocab_size: {-(-theirs // 64) * 64}",
            kind="input",
        )
