"""The search over all axes of the mesh: when it looks, what it may leave out, what it chooses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mlpipe.kinds.train.spec import Train
from mlpipe.plan import axis_reasons, candidates, search
from mlpipe.plan.build import stage_hardware
from mlpipe.plan.candidates import enumerate_candidates, pick
from mlpipe.plan.choose import ROOM_WINDOW, Candidate, cheaper, choose, verdict
from mlpipe.plan.hardware import GIB, Hardware
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.pricing import Pricer, layout_of
from mlpipe.plan.scaling import scale_stage
from mlpipe.plan.settings import CHECKPOINTING
from mlpipe.plan.shapes import dense
from mlpipe.plan.shapes.shape import ModelShape
from mlpipe.plan.training import shape_of, training_of
from mlpipe.spec.load import load_pipeline
from mlpipe.spec.problems import SpecErrors

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]


def asked(*overrides: str) -> tuple[Train, ModelShape, Hardware]:
    pipeline = load_pipeline(ROOT / "pipelines" / "llm.yaml", overrides=overrides)
    spec = training_of(pipeline, "train")
    shape = shape_of(spec, {})
    assert shape is not None
    return spec, shape, stage_hardware(pipeline, "train")


def sized(preset: str, nodes: int, batch: int, seq_len: int = 8192) -> list[str]:
    sizes = [
        "train.data.batch_tokens=null",
        f"train.data.batch_size={batch}",
        f"train.model.seq_len={seq_len}",
    ]
    return [f"train.model.preset={preset}", f"train.resources.nodes={nodes}", *sizes]


@pytest.mark.parametrize(
    ("preset", "batch", "gib"),
    [
        ("llama-8b", 32, 80),
        ("llama-8b", 32, 14),
        ("llama-8b", 8, 40),
        ("llama-70b", 32, 80),
        ("llama-3b", 4, 30),
    ],
)
def test_pruning_loses_nothing(preset: str, batch: int, gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 nodes of 8, with every recomputation: the same is chosen as among all that there is."""
    open_ = "train.activation_checkpointing=auto"
    spec, shape, hardware = asked(*sized(preset, 2, batch), open_)
    hardware = hardware._replace(memory_bytes=gib * GIB)
    pruned = enumerate_candidates(spec, shape, hardware, every=False)
    told = candidates._searched[0][3].bounds
    real = search.search
    monkeypatch.setattr(search, "search", lambda *args: real(*args, prune=False))
    candidates._searched.clear()
    whole = enumerate_candidates(spec, shape, hardware, every=False)
    assert len(whole) >= len(pruned)
    assert told == candidates._searched[0][3].bounds != {}
    try:
        expected = choose(whole)
    except candidates.PlanError:
        assert not any(c.fits for c in pruned)
        return
    assert choose(pruned)[0] == expected[0]


@pytest.mark.parametrize(
    ("preset", "changes", "mesh", "sizes"),
    [
        ("llama-8b", [], Mesh(dp_shard=16), (1, 2)),
        ("llama-8b", [], Mesh(dp_shard=8, tp=2), (1, 2)),
        ("llama-70b", ["train.freeze=[layers.*]"], Mesh(dp_shard=2, tp=8), (1, 2)),
        # the rank with the head computes most, those with more blocks send more: they set the pace
        (
            "llama-1b",
            ["train.resources.gpu=L40S", "train.data.batch_size=96", "train.model.seq_len=2048"],
            Mesh(pp=4, dp_shard=2, tp=2),
            (12,),
        ),
    ],
)
def test_bounds_are_below_every_layout_of_the_data_axes(
    preset: str, changes: list[str], mesh: Mesh, sizes: tuple[int, ...]
) -> None:
    spec, shape, hardware = asked(*sized(preset, 2, 32), *changes)
    pricer = Pricer(shape, candidates._training(spec), hardware)
    for size in sizes:
        for mode in ("none", "full"):
            choices = candidates.Choices(size, mode, "bf16")
            seconds, num_bytes = pricer.least_seconds(mesh, choices), pricer.least_bytes(mesh, choices)
            for strategy, layout in search.layouts(mesh, hardware):
                found = pricer.candidate(strategy, layout, choices, asked=True)
                assert found.memory is not None
                assert found.memory.total >= num_bytes
                assert found.step_seconds >= seconds


def test_the_host_has_room_for_the_fullest_rank_of_a_pipeline() -> None:
    """Of which the head's is not the slowest here."""
    changes = "train.offload=optimizer", "train.resources.gpu=L40S", "train.activation_checkpointing=none"
    spec, shape, hardware = asked(*sized("llama-3b", 2, 96, 2048), *changes)
    pricer, choices = (
        Pricer(shape, candidates._training(spec), hardware),
        candidates.Choices(1, "none", "bf16"),
    )
    ((strategy, mesh),) = search.layouts(Mesh(pp=8, tp=2), hardware)
    layout = layout_of(strategy, mesh)
    ranks = [pricer._on_one_rank(choices, mesh, part) for part in pricer._parts(mesh)]
    on_hosts = [pricer._host_bytes(layout, rank.work) for rank in ranks]
    assert pricer.candidate(strategy, mesh, choices, asked=True).host_bytes == max(on_hosts) > min(on_hosts)


@pytest.mark.parametrize("preset", ["llama-8b", "llama-3b"])
def test_who_recomputes_more_takes_no_less_time(preset: str) -> None:
    """Under any mesh that is looked at: so what is too slow without need not be looked at with it."""
    spec, shape, hardware = asked(*sized(preset, 2, 32))
    pricer = Pricer(shape, candidates._training(spec), hardware)
    figures = candidates._figures(spec, shape)
    for mesh in search.model_meshes(hardware, figures, lambda sizes: True):
        for size in (1, 4):
            choices = [candidates.Choices(size, mode, "bf16") for mode in CHECKPOINTING]
            seconds = [pricer.least_seconds(mesh, each) for each in choices]
            assert seconds == sorted(seconds), (mesh, size)


def test_what_was_looked_at_to_choose_is_not_looked_at_again_to_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, shape, hardware = asked(*sized("llama-8b", 2, 32))
    pick(spec, shape, hardware)
    looks: list[Mesh] = []
    real = Pricer.least_seconds
    monkeypatch.setattr(
        Pricer, "least_seconds", lambda self, mesh, *rest: looks.append(mesh) or real(self, mesh, *rest)
    )
    enumerate_candidates(spec, shape, hardware)
    assert not looks
    enumerate_candidates(spec, shape, hardware._replace(memory_bytes=40 * GIB))
    assert looks


def test_what_was_found_is_told_again_to_who_asks_for_the_same_only() -> None:
    """The file may leave other choices open, and data parallelism be faster."""
    modes, fast = ("none", "full"), candidate(1e-9, 0.5, Mesh(dp_replicate=32))
    for mode in modes:
        spec, shape, hardware = asked(*sized("llama-8b", 4, 8), f"train.activation_checkpointing={mode}")
        pricer = candidates.pricer_of(spec, shape, hardware)
        found = candidates.searched(spec, pricer, []).candidates
        assert {one.activation_checkpointing for one in found} == {mode}
        assert candidates.searched(spec, pricer, [fast]).candidates == []


def test_a_product_is_computed_once_for_all_ways_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, shape, hardware = asked(*sized("llama-8b", 2, 32), "train.activation_checkpointing=auto")
    computed: list[tuple[object, ...]] = []
    real = Kernels._matmul

    def spy(self: Kernels, rows: int, inner: int, outer: int, number: int) -> float:
        computed.append((self.precision, rows, inner, outer, number))
        return real(self, rows, inner, outer, number)

    monkeypatch.setattr(Kernels, "_matmul", spy)
    candidates._last.clear()
    enumerate_candidates(spec, shape, hardware)
    assert len(computed) == len(set(computed)) > 0


def test_a_thousand_devices_are_searched_by_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a second of CPU: a candidate costs less than 0.2 ms, a point less than that, and nobody looks at
    what one keeps that is too slow."""
    spec, shape, hardware = asked(*sized("llama-70b", 128, 2048), "train.activation_checkpointing=auto")
    assert hardware.world_size == 1024
    found: list[search.SearchResult] = []
    real = search.search

    def spy(*args: object) -> search.SearchResult:
        found.append(real(*args))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(search, "search", spy)
    weighed: list[Mesh] = []
    least = Pricer.least_bytes
    monkeypatch.setattr(
        Pricer, "least_bytes", lambda self, mesh, each: weighed.append(mesh) or least(self, mesh, each)
    )
    enumerate_candidates(spec, shape, hardware, every=False)
    ((points, priced),) = [(one.num_points, one.num_priced) for one in found]
    assert 0 < len(weighed) < points / 2
    assert points <= 3000
    assert priced <= 1500


def test_other_axes_are_used_where_the_samples_do_not_suffice() -> None:
    spec, shape, hardware = asked(*sized("llama-8b", 4, 8))
    best, reason = pick(spec, shape, hardware)
    assert best.mesh is not None
    assert best.mesh.num_data_ranks <= 8
    assert best.mesh.world_size == 32
    assert best.fits
    assert reason.startswith(f"{best.strategy}: needs")


def test_data_parallelism_that_is_as_fast_is_kept() -> None:
    """Of a small model on one node with a large batch; and no mesh is searched where a strategy is named."""
    spec, shape, hardware = asked(*sized("llama-1b", 1, 512))
    best, _ = pick(spec, shape, hardware)
    assert best.mesh is not None
    assert best.mesh.num_data_ranks == 8
    named, shape, hardware = asked(*sized("llama-1b", 1, 512), "train.strategy=fsdp")
    meshes = {c.mesh for c in enumerate_candidates(named, shape, hardware) if c.mesh}
    assert {mesh.num_data_ranks for mesh in meshes} == {8}


def candidate(seconds: float, used: float, mesh: Mesh | None = None) -> Candidate:
    """Takes so long, and so much of the memory."""
    spec, shape, hardware = asked(*sized("llama-1b", 1, 8))
    del spec
    pricer = Pricer(shape, candidates._training(asked(*sized("llama-1b", 1, 8))[0]), hardware)
    choices = candidates.Choices(1, "none", "bf16")
    found = pricer.candidate("fsdp", mesh or Mesh(dp_shard=8), choices, asked=True)
    assert found.seconds is not None
    parts = found.seconds._replace(compute=seconds, communication=0.0, data=0.0, save=0.0)
    return found._replace(seconds=parts, used_ratio=used, fits=True)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ([(1.0, 0.97), (1.04, 0.5)], 1),  # another within 5 % leaves memory free
        ([(1.0, 0.97), (1.06, 0.5)], 0),  # none does
        ([(1.0, 0.91), (1.04, 0.5)], 0),  # this one leaves enough
        ([(1.0, 0.93), (1.01, 0.94), (1.05, 0.92)], 2),
    ],
)
def test_what_fills_the_memory_is_chosen_only_where_nothing_else_is_as_fast(
    others: list[tuple[float, float]], chosen: int
) -> None:
    found = [candidate(*one) for one in others]
    assert choose(found)[0] == found[chosen]


@pytest.mark.parametrize(
    ("ways", "chosen"),
    [
        ([(1.0, 0.97), (1.04, 0.93)], 1),  # neither leaves memory free
        ([(1.0, 0.97), (1.06, 0.93)], 0),
        ([(1.0, 0.93), (1.0, 0.97)], 0),
        ([(1.0, 0.97), (1.04, 0.9)], 1),
        ([(1.0, 0.9), (1.04, 0.5)], 0),
    ],
)
def test_of_ways_that_fill_the_memory_the_one_that_needs_less_is_taken(
    ways: list[tuple[float, float]], chosen: int
) -> None:
    found = [candidate(*one) for one in ways]
    assert cheaper(found) == found[chosen]


def test_words_are_those_of_what_decided() -> None:
    """Nothing is the fastest that is not, and nothing shards more that only leaves less memory free."""
    shared = Mesh(dp_shard=4, tp=2)
    best, full, near = candidate(1.04, 0.5), candidate(1.0, 0.97, shared), candidate(1.05, 0.5, shared)
    chosen, reason = choose([best, full, near])
    assert chosen == best
    assert "leaves memory free and is within 5% of the fastest of 2 that fit" in reason
    assert verdict(full, best) == "0.96 times the time, and leaves little memory free"
    assert verdict(near, best) == "as fast, and more workers share samples"
    assert verdict(best._replace(strategy="ddp"), best) == "as fast"
    assert (
        "; as fast as any of 2 that fit"
        in choose([candidate(1.01, 0.5), near, candidate(1.0, 0.5, shared)])[1]
    )
    assert "; the fastest of 2 that fit" in choose([candidate(1.0, 0.5), near])[1]
    told = axis_reasons._used("tp", 2, [candidate(1.0, 0.97)], near)
    assert told == "tp 2 is used: what was tried without it and fits leaves little memory free."
    told = axis_reasons._used("tp", 2, [candidate(1.0, 0.97), candidate(2.1, 0.5)], near)
    assert (
        told
        == "tp 2 is used: the fastest step tried without it that leaves memory free takes 2.00 times the "
        "time."
    )


def test_sizes_stay_within_a_node_and_the_model() -> None:
    _, shape, hardware = asked(*sized("llama-8b", 4, 64))
    assert isinstance(shape, dense.Dense)
    sizes = search.sizes_of_axes(hardware, {"num_layers": 6, "seq_len": 4096, "num_experts": 0})
    assert sizes == {"tp": [1, 2, 4, 8], "cp": [1, 2, 4, 8, 16], "pp": [1, 2, 4], "ep": [1]}
    assert math.prod(max(one) for one in sizes.values()) > hardware.world_size


def test_other_axes_have_to_win_by_more_than_the_planner_errs() -> None:
    spec, shape, hardware = asked(*sized("llama-8b", 4, 8))
    pricer = candidates.pricer_of(spec, shape, hardware)
    points = [(Mesh(dp_shard=8, tp=4), [candidates.Choices(1, "none", "bf16")])]
    best = min(c.step_seconds for c in search.search(pricer, points, math.inf).candidates)
    slower, slow = (search.limit_of([candidate(ratio * best, 0.5)]) for ratio in (1.11, 1.13))
    assert search.search(pricer, points, slower).candidates == []
    won = search.search(pricer, points, slow).candidates
    assert min(c.step_seconds for c in won) == best


def test_what_is_too_slow_to_be_worth_it_is_not_priced_for_what_it_leaves_free() -> None:
    """That counts beside one which is not: without one, nobody prices behind the limit, or asks how long the
    same takes that recomputes more."""
    spec, shape, hardware = asked(*sized("llama-8b", 4, 8))
    pricer = candidates.pricer_of(spec, shape, hardware)
    mesh, modes = Mesh(dp_shard=8, tp=4), ("none", "selective", "full")
    choices = [candidates.Choices(1, mode, "bf16") for mode in modes]
    least = pricer.least_seconds(mesh, choices[0])
    for ratio, priced in ((0.98, 0), (1.001, len(list(search.layouts(mesh, hardware))))):
        limit = candidate(ratio * least * (1 + search.MODEL_ERROR), 0.5)
        assert least <= search.limit_of([limit]) * ROOM_WINDOW
        found = search.search(pricer, [(mesh, choices)], search.limit_of([limit]))
        assert found.num_priced == priced
        assert found.num_points == 1 + (priced > 0)
        assert found.candidates == []


def test_a_mesh_that_fills_the_memory_gives_way_to_a_slower_one_that_does_not() -> None:
    """Of llama-70b with 128 samples on 64 A100 the fastest fills 97 % of the memory, and another mesh is 4 %
    slower."""
    changes = ["train.resources.gpu=A100-80GB", "train.activation_checkpointing=auto", "train.compile=off"]
    spec, shape, hardware = asked(*sized("llama-70b", 8, 128, 4096), *changes)
    found = enumerate_candidates(spec, shape, hardware, every=False)
    best, _ = choose(found)
    fastest = min(c.step_seconds for c in found if c.fits)
    assert best.used_ratio <= 0.92
    assert fastest < best.step_seconds <= 1.05 * fastest


def test_what_model_and_settings_rule_out_is_said_in_words() -> None:
    """Not that no size would split it evenly."""

    def told(*changes: str) -> str:
        spec, shape, hardware = asked(*changes, "train.compile=off")
        found = enumerate_candidates(spec, shape, hardware, every=False)
        return " ".join(axis_reasons.axis_reasons(spec, shape, hardware, found, choose(found)[0]))

    dense = told(*sized("llama-8m", 1, 16, 1024), "train.optimizer.name=muon")
    assert "tp is not used: optimizer.name muon cannot be combined with tp 2 yet" in dense
    assert "ep is not used: ep 2 splits experts, and this model has none." in dense


def test_fewer_samples_than_workers_are_refused_where_no_axis_shares_them() -> None:
    asked(*sized("llama-8m", 2, 8, 1024), "train.compile=off")
    with pytest.raises(SpecErrors, match="a batch of 8 cannot be split evenly over 16 workers"):
        asked(*sized("moe-2m", 2, 8, 1024), "train.compile=off", "train.strategy=fsdp")


def test_a_pipeline_that_nothing_could_use_is_refused() -> None:
    schedule = "train.pipeline={schedule: gpipe}"
    asked(*sized("llama-8m", 2, 16, 1024), "train.compile=off", schedule)
    with pytest.raises(SpecErrors, match="there is a pipeline, but no mesh with pp"):
        asked(*sized("moe-2m", 2, 16, 1024), "train.compile=off", "train.strategy=fsdp", schedule)


def test_a_mesh_that_fills_is_kept_on_any_number_of_nodes() -> None:
    """One of fixed sizes is of one number only."""
    sizes = sized("llama-8b", 2, 128)
    pipelines = [
        load_pipeline(ROOT / "pipelines" / "llm.yaml", overrides=[*sizes, f"train.mesh={mesh}"])
        for mesh in ("{dp_shard: fill, tp: 4}", "{dp_shard: 4, tp: 4}")
    ]
    kept, free = (scale_stage(one, "train", stage_hardware(one, "train"), "2..4") for one in pipelines)
    assert [row.best and row.best.mesh for row in kept] == [Mesh(dp_shard=4, tp=4), Mesh(dp_shard=8, tp=4)]
    assert all(row.best and row.best.mesh != Mesh(dp_shard=4, tp=4) for row in free[1:])
