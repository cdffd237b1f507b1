"""The axis pp: each schedule computes what one rank does, whatever lies around it, and goes on elsewhere."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import plans, processes
from kit.models import PATTERNS_OF_HEADS, Sequence, WithLoss
from kit.weights import held

from mlpipe._core.errors import TrainError
from mlpipe._core.pipelines import why_not
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.pipelining import orders
from mlpipe.plan.plan import Plan
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.store.folder import FolderStore
from mlpipe.train.parallel.sequence import check_sequence, stages_of

pytestmark = pytest.mark.torch

CONFIG = replace(plans.CONFIG, num_layers=5, dim=32, ffn_dim=64)
STEPS, SHORT = 20, 4
SEQUENCE = ModelPlan(Entry("kit.models:InitializedSequence", {}), None, 32, ())
HEADS = ModelPlan(Entry("kit.models:SequenceOfHeads", {}), None, 32, (), PATTERNS_OF_HEADS)
LLAMA = ModelPlan(
    Entry("kit.own:from_config", {"num_key_value_heads": 2, "tie_word_embeddings": False}), None, 32, ()
)
LONG = {"steps": STEPS, "every": STEPS // 2}
OWN = OptimizerPlan(None, "torch.optim:Adam", {"eps": 1e-6}, 8, 1e-3, 1.0, "constant", 0, 0, 0.1)
BLOCKS = {"gpipe": (3, 2), "1f1b": (2, 3), "interleaved": (2, 1, 1, 1), "zero_bubble": (2, 3)}


def near(found: list[float], expected: list[float], relative: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for step, (a, b) in enumerate(zip(found, expected, strict=True), start=1):
        assert abs(a - b) <= relative * abs(b), f"step {step}: {a} against {b}"


def model(tied: bool = True) -> ModelPlan:
    config = replace(CONFIG, tied=tied)
    return ModelPlan(Entry("mlpipe.train.models.llama:build_model", asdict(config)), "test", 32, ())


def plan(folder: Path, mesh: Mesh, run_id: str, schedule: Any = None, **changes: Any) -> Plan:
    """Four microbatches of each data rank, with the model's head tied."""
    strategy = "fsdp" if mesh.dp_shard > 1 else "ddp" if mesh.dp_replicate > 1 else "single"
    tokens = plans.write_tokens(folder / "tokens") if not (folder / "tokens").exists() else folder / "tokens"
    given = {
        "mesh": mesh,
        "micro_batch": 16 // mesh.num_data_ranks // 4,
        "accumulation": 4,
        "model": model(),
        "pipeline": PipelinePlan(schedule, BLOCKS[schedule]) if schedule else None,
        **changes,
    }
    return plans.train_plan(
        folder / "store",
        tokens,
        strategy=strategy,
        world_size=mesh.world_size,
        steps=given.pop("steps", SHORT),
        every=given.pop("every", 2),
        run_id=run_id,
        attempt=given.pop("attempt", 1),
        **given,
    )


def same(folder: Path, found: Plan, expected: Plan) -> None:
    """Losses, gradient norms and what the steps made of the weights, in fp32."""
    store = folder / "store"
    near(plans.losses(store, found), plans.losses(store, expected))
    norms = (plans.by_step(store, plan, "grad_norm") for plan in (found, expected))
    near(*norms)
    mine, theirs = (held(store, plan, optimizer=False) for plan in (found, expected))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        # AdamW divides by the gradient's size, so that its last bits show where it is near 0
        assert (tensor - theirs[name]).abs().max() < 2e-4 * theirs[name].abs().max(), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def single(folder):
    made = {
        "tied": plan(folder, Mesh(), "single"),
        "long": plan(folder, Mesh(), "single-long", **LONG),
        "own model": plan(folder, Mesh(), "single-own-model", model=SEQUENCE),
        "own optimizer": plan(folder, Mesh(), "single-own", optimizer=OWN),
        "untied": plan(folder, Mesh(), "single-untied", model=model(tied=False)),
        "heads": plan(folder, Mesh(), "single-heads", model=HEADS),
        "transformers": plan(folder, Mesh(), "single-transformers", model=LLAMA),
        "low": plan(folder, Mesh(), "single-low", precision="bf16"),
    }
    plans.run_together(list(made.values()), folder / "single")
    return made


@pytest.fixture(scope="module")
def pairs(folder):
    """On two ranks: each schedule; one with what else a training may do, and one in two parts."""
    cut = PipelinePlan("interleaved", (), ("blocks.0", "blocks.2", "norm"))
    two = PipelinePlan("zero_bubble", ())  # by FLOPs
    half = plan(folder, Mesh(pp=2), "halves", "zero_bubble", **LONG | {"steps": STEPS // 2})
    made = {
        **{schedule: plan(folder, Mesh(pp=2), schedule, schedule, **LONG) for schedule in BLOCKS},
        "untied": plan(
            folder,
            Mesh(pp=2),
            "untied",
            "zero_bubble",
            model=model(tied=False),
            activation_checkpointing="selective",
        ),
        "recomputed": plan(
            folder,
            Mesh(pp=2),
            "recomputed",
            "interleaved",
            activation_checkpointing="full",
            offload="all",
        ),
        "own model": plan(folder, Mesh(pp=2), "own-model", model=SEQUENCE, pipeline=cut),
        "own model in halves": plan(folder, Mesh(pp=2), "own-model-halves", model=SEQUENCE, pipeline=two),
        "half": half,
        "second half": plan(folder, Mesh(pp=2), "halves", "zero_bubble", attempt=2, **LONG),
        "low copies": plan(folder, Mesh(dp_replicate=2), "low-copies", precision="bf16"),
        **{
            f"low {schedule}": plan(folder, Mesh(pp=2), f"low-{schedule}", schedule, precision="bf16")
            for schedule in BLOCKS
        },
    }
    plans.run_together(list(made.values()), folder / "pairs")
    return made


@pytest.mark.combines("pp", "accumulation", "pipeline *", "optimizer adamw")
@pytest.mark.combines("pp", "pipeline interleaved", "activation_checkpointing full", "offload *")
@pytest.mark.parametrize("name", [*BLOCKS, "recomputed"])
def test_a_schedule_computes_what_one_rank_does(folder, single, pairs, name):
    """Also where the inputs of recomputed blocks, and the optimizer, wait on the host."""
    same(folder, pairs[name], single["long" if name in BLOCKS else "tied"])


@pytest.mark.combines("pp", "pipeline *", "precision bf16")
@pytest.mark.parametrize("schedule", BLOCKS)
def test_bf16_is_no_farther_from_one_rank_than_copies_are(folder, single, pairs, schedule):
    """Where two ranks of ddp round otherwise than one does, which of the two is right nobody can say."""
    alone = plans.losses(folder / "store", single["low"])

    def distance(name: str) -> float:
        losses = plans.losses(folder / "store", pairs[name])
        return max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))

    assert 1e-7 < distance("low copies") < 1e-2
    assert distance(f"low {schedule}") <= distance("low copies")


@pytest.mark.combines("pp", "pipeline zero_bubble", "activation_checkpointing selective")
def test_a_head_of_its_own_lies_on_the_last_stage(folder, single, pairs):
    same(folder, pairs["untied"], single["untied"])


@pytest.mark.combines("pp", "pipeline zero_bubble", "deterministic")
def test_a_resumed_pipeline_is_bit_exact(folder, pairs):
    store = FolderStore(folder / "store")
    whole, parts = (processes.digests(store, pairs[name]) for name in ("zero_bubble", "second half"))
    assert parts[STEPS, 2] == whole[STEPS, 1]


@pytest.mark.combines("pp", "kill of a worker", "pipeline 1f1b", "deterministic")
def test_a_killed_stage_costs_nothing(folder, pairs):
    """Its neighbour waits for what it would have sent; both start again from the checkpoint of step 10."""
    killed = plan(folder, Mesh(pp=2), "killed", "1f1b", steps=STEPS, **plans.dying(step=13, every=10))
    plans.launch_dying(killed, folder / "store", folder / "killed")
    found, expected = (
        processes.digests(FolderStore(folder / "store"), one) for one in (killed, pairs["1f1b"])
    )
    assert found[STEPS, 1] == expected[STEPS, 1]


@pytest.mark.combines("pp", "your own model", "pipeline interleaved", "pipeline zero_bubble")
@pytest.mark.parametrize("name", ["own model", "own model in halves"])
def test_a_model_of_ones_own_is_cut_between_its_children(folder, single, pairs, name):
    same(folder, pairs[name], single["own model"])


class Skipping(Sequence):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        return self.head(self.norm(x + self.blocks[0](x)))


class Scaled(Sequence):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


class Added(Sequence):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x) + x
        return self.head(self.norm(x))


class AddedInPlace(Sequence):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x).add_(x)
        return self.head(self.norm(x))


class ScaledInPlace(Sequence):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).mul_(2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Skipping, "its forward calls norm, not its children one after the other: embed, blocks.0, blocks.1"),
        (Added, "blocks.1 is given something else than what the child before it gives"),
        (Scaled, "its forward does not return what head gives"),
        (AddedInPlace, "blocks.1 is given something else than what the child before it gives"),
        (ScaledInPlace, "its forward does not return what head gives"),
        (WithLoss, "a model that computes its own loss cannot be cut"),
    ],
)
def test_what_happens_between_children_is_refused(kind, words):
    with torch.device("meta"), pytest.raises(TrainError, match=words):
        check_sequence(kind(), {"inputs": torch.zeros((2, 8), dtype=torch.int64, device="cpu")}, "a:b")


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (("blocks.1", "block.2"), "'block.2' is no child of the model"),
        (("norm", "blocks.1"), "'blocks.1' comes too late in the list"),
        (("embed",), "before 'embed' there is nothing"),
    ],
)
def test_cuts_are_children_in_their_order(cut, words):
    with torch.device("meta"), pytest.raises(TrainError, match=words):
        stages_of(Sequence(), cut, "a:b")


def test_what_stages_would_share_is_refused():
    with torch.device("meta"):
        tied, loose = Sequence(), Sequence()
    tied.head.weight = tied.embed.weight
    loose.scale = torch.nn.Parameter(torch.ones(1))
    for odd, words in ((tied, "embed.weight is shared by children on two"), (loose, "scale belongs to none")):
        with pytest.raises(TrainError, match=words):
            stages_of(odd, ("norm",), "a:b")


def test_waiting_for_other_stages_is_told_apart_from_collectives(folder, single, pairs):
    """On every rank; without a pipeline nothing is said of it."""
    parts = ("compute_seconds", "collective_seconds", "bubble_seconds", "data_seconds")
    for trained, rank in ((pairs["1f1b"], 0), (pairs["zero_bubble"], 1), (single["tied"], 0)):
        found = plans.records(folder / "store", trained, rank)
        steps = [one for one in found if one["kind"] == "step"]
        assert len(steps) == trained.work.training.steps
        assert all((one.get("bubble_seconds", 0) > 0) == (trained is not single["tied"]) for one in steps)
        assert all(sum(one.get(part, 0) for part in parts) <= one["seconds"] * 1.001 for one in steps)


MOVES = ((Mesh(pp=2, tp=2), "interleaved"), (Mesh(), None), (Mesh(dp_shard=2), None), (Mesh(pp=2), "1f1b"))


def moving(folder: Path, number: int) -> Plan:
    """One step, of another mesh than the step before; the first is among `fours`."""
    mesh, schedule = MOVES[number - 1]
    return plan(folder, mesh, "moving", schedule, steps=number, every=1, attempt=number, optimizer=OWN)


@pytest.fixture(scope="module")
def fours(folder):
    """On four ranks."""
    cut, by_flops = PipelinePlan("1f1b", (), ("blocks.1",)), PipelinePlan("zero_bubble", ())
    zero1 = {"schedule": "zero_bubble", "shard_optimizer": True}
    made = {
        "split": plan(folder, Mesh(pp=2, dp_shard=2), "split", "1f1b"),
        "copied": plan(folder, Mesh(pp=2, dp_replicate=2), "copied", **zero1),
        "tp": plan(folder, Mesh(pp=2, tp=2), "tp", "1f1b", **LONG),
        "tp untied": plan(folder, Mesh(pp=2, tp=2), "tp-untied", "zero_bubble", model=model(tied=False)),
        "cp": plan(folder, Mesh(pp=2, cp=2), "cp", "interleaved"),
        "ring": plan(folder, Mesh(pp=2, cp=2), "ring", "zero_bubble", context_exchange="ring"),
        "heads": plan(folder, Mesh(pp=2, tp=2), "heads", model=HEADS, pipeline=cut),
        "transformers": plan(folder, Mesh(pp=2, tp=2), "transformers", model=LLAMA, pipeline=by_flops),
        "moving": moving(folder, 1),
        **{
            f"exact {schedule}": plan(
                folder, Mesh(pp=2, tp=2), f"exact-{schedule}", schedule, precision="bf16"
            )
            for schedule in ("1f1b", "zero_bubble")
        },
    }
    plans.run_together(list(made.values()), folder / "fours")
    return made


@pytest.mark.combines("pp", "dp_shard", "pipeline 1f1b")
@pytest.mark.combines("pp", "dp_replicate", "pipeline zero_bubble", "strategy zero1")
def test_pipelines_of_ranks_that_share_the_samples(folder, single, fours):
    """Stages whose weights are split, and copies of stages, whose optimizer states are."""
    same(folder, fours["split"], single["tied"])
    same(folder, fours["copied"], single["tied"])


@pytest.mark.combines("pp", "tp", "pipeline 1f1b", "pipeline zero_bubble")
@pytest.mark.combines("pp", "cp", "pipeline interleaved")
@pytest.mark.combines("pp", "cp", "context ring", "pipeline zero_bubble")
def test_stages_that_share_products_or_sequences(folder, single, fours):
    """Each stage on two ranks, which have a part of every matrix and of the vocabulary, or of every sequence.
    The parts go on in one rank."""
    same(folder, fours["tp"], single["long"])
    same(folder, fours["tp untied"], single["untied"])
    same(folder, fours["cp"], single["tied"])
    same(folder, fours["ring"], single["tied"])


@pytest.mark.combines("pp", "tp", "precision bf16", "pipeline zero_bubble", "deterministic")
def test_what_is_put_off_of_exact_sums_is_the_same_to_the_bit(folder, fours):
    """Gradients of weights are added in the order of microbatches in either schedule."""
    put_off, at_once = (
        held(folder / "store", fours[f"exact {schedule}"]) for schedule in ("zero_bubble", "1f1b")
    )
    assert put_off.keys() == at_once.keys()
    assert all(torch.equal(tensor, at_once[name]) for name, tensor in put_off.items())


@pytest.mark.combines("pp", "tp", "your own model")
@pytest.mark.parametrize("name", ["heads", "transformers"])
def test_stages_of_a_model_of_ones_own_that_share_products(folder, single, fours, name):
    """Split by patterns, or as a class of `transformers` brings it; each rank has modules of its stage."""
    same(folder, fours[name], single[name])


@pytest.mark.combines("pp", "resume under another mesh", "your own optimizer")
@pytest.mark.usefixtures("fours")
def test_a_checkpoint_goes_on_under_any_other_mesh(folder, single):
    """From stages of two ranks each to one rank to shards to a pipeline with other stages, a step each, with
    an optimizer that keeps a number for each parameter."""
    plans.run_together([moving(folder, 2)], folder / "moving-on-one")
    last = moving(folder, 4)
    plans.run_together([moving(folder, 3), last], folder / "moving-on-two")
    both = (held(folder / "store", one, optimizer=False) for one in (last, single["own optimizer"]))
    mine, theirs = both
    assert all((mine[name] - theirs[name]).abs().max() < 2e-4 * theirs[name].abs().max() for name in theirs)
    assert plans.losses(folder / "store", last) == pytest.approx(
        plans.losses(folder / "store", single["own optimizer"])[-1:], rel=1e-5
    )


def torch_orders(schedule: str, num_ranks: int, num_microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Of torch's own class, without its communication and without waiting."""
    from torch.distributed.pipelining import schedules

    name = {"gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble"}[
        schedule
    ]
    made = object.__new__(getattr(schedules, f"Schedule{name}"))
    made._n_microbatches, made._num_stages, made.pp_group_size = num_microbatches, num_ranks, num_ranks
    made.n_local_stages = 2 if schedule == "interleaved" else 1
    made.number_of_rounds = max(1, num_microbatches // num_ranks)
    made.microbatches_per_round = num_microbatches // made.number_of_rounds
    if schedule == "gpipe":
        found = made._get_pipeline_order()
    else:
        found = {rank: made._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            (kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in found[rank]
            if action is not None and action.microbatch_index is not None
        ]
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
def test_the_orders_are_those_of_torch(schedule):
    """Of 1f1b torch has no list of its own that it runs by: it is `zero_bubble` with both parts together."""
    for num_ranks, num_microbatches in ((2, 2), (2, 6), (4, 8), (5, 15), (4, 5)):
        if why_not(schedule, num_ranks, num_microbatches) is None:
            found = orders(schedule, num_ranks, num_microbatches)
            assert found == torch_orders(schedule, num_ranks, num_microbatches)
            if schedule == "zero_bubble":
                whole = [
                    [action._replace(kind="B") if action.kind == "I" else action for action in actions]
                    for actions in found
                ]
                assert [[action for action in actions if action.kind != "W"] for actions in whole] == orders(
                    "1f1b", num_ranks, num_microbatches
                )
