"""Training from existing weights, and with some of them frozen: under every strategy, from each kind of
place, killed on the way, resumed when they are gone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from kit import models, plans
from kit.command_runs import Cli

from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import InitPlan, ModelPlan
from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue, runs, weights
from mlpipe.store.folder import FolderStore
from mlpipe.submit.starting import find
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.export import export_checkpoint
from mlpipe.train.model import LossModule, build_model
from mlpipe.train.parallel.materialize import materialize
from mlpipe.train.shards import LocalShard
from mlpipe.train.starting import _fill
from mlpipe.train.world import World

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def first_loss(plan: Plan, state: dict[str, torch.Tensor]) -> float:
    """Of the first step's samples, by the plan's model with these weights, outside of any trainer."""
    train = plan.work.training
    built = build_model(train.model, seed=0, device_type="cpu")
    materialize(built, 0, CPU)
    built.model.load_state_dict(state, strict=False)
    dataset = open_dataset(train.data, split="train", seq_len=train.model.seq_len)
    loader = MicrobatchLoader(
        dataset,
        World(Mesh(), 0, CPU),
        seed=train.seed,
        global_batch=train.global_batch,
        micro_batch=99,
        seq_len=1,
    )
    (batch,) = loader.step(0)
    with torch.no_grad():
        total, count = built.module(batch.batch)
    return float(total / count)


def from_weights(
    plan: Plan, folder: Path, *, names: dict[str, str] | None = None, strict: bool = True, **asked: Any
) -> Plan:
    init = InitPlan(asked, asked.get("path"), names or {}, strict)
    found = find(FolderStore(folder / "store"), plan.run_id, init, str(folder))
    return replace(plan, work=plan.work.training._replace(init_from=init._replace(found=found)))


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> tuple[Path, dict[str, Plan], dict[str, torch.Tensor]]:
    """A folder with a trained run `base`, its weights in several files, the runs that start from them, and
    these weights by the names of the model."""
    folder = tmp_path_factory.mktemp("starting")
    tokens = plans.write_tokens(folder / "tokens")

    def plan(run: str, strategy: Any, world_size: int = 2, **changes: Any) -> Plan:
        return plans.train_plan(
            folder / "store", tokens, run_id=run, strategy=strategy, world_size=world_size, steps=2, every=2,
            **changes,
        )  # fmt: skip

    base = plan("base", "fsdp")
    plans.run_together([base], folder / "base")
    store = FolderStore(folder / "store")
    runs.create_run(store, "base", "", "", ["train"], "local", {})
    key = catalogue.latest(store, base.stage_key).key
    export_checkpoint(store, key, folder / "whole")
    export_checkpoint(store, key, folder / "cut", shard_bytes=200_000)
    assert len(list((folder / "cut").glob("*.safetensors"))) > 2
    exported = safetensors.torch.load_file(folder / "whole" / "model.safetensors")
    trained = {name.removeprefix("model."): tensor for name, tensor in exported.items()}
    low = {f"net.{name}": tensor.bfloat16() for name, tensor in trained.items()}
    safetensors.torch.save_file(low, folder / "low.safetensors")
    fewer = dict(list(trained.items())[:-2]) | {"more.weight": torch.ones(2), "norm.weight": torch.ones(3)}
    safetensors.torch.save_file(fewer, folder / "fewer.safetensors")
    whole = str(folder / "whole")
    made = {
        1: [
            from_weights(plan("single", "single", 1), folder, run="base"),
            from_weights(plan("low", "single", 1), folder, path="low.safetensors", names={"net.*": "*"}),
        ],
        2: [
            from_weights(plan("ddp", "ddp"), folder, run="base"),
            from_weights(plan("zero1", "zero1"), folder, run="base"),
            from_weights(plan("fsdp", "fsdp"), folder, run="base"),
            from_weights(plan("cut", "fsdp"), folder, path="cut"),
            from_weights(plan("low fsdp", "fsdp"), folder, path="low.safetensors", names={"net.*": "*"}),
            from_weights(plan("loose", "fsdp"), folder, path="fewer.safetensors", strict=False),
            from_weights(plan("refused", "fsdp"), folder, path="fewer.safetensors"),
            from_weights(plan("prefixed", "ddp"), folder, path="low.safetensors"),
            from_weights(plan("gone", "ddp"), folder, path=whole),
            from_weights(plan("changed", "ddp"), folder, path="cut"),
        ],
    }
    by_run = {one.run_id: one for some in made.values() for one in some}
    gone, changed = by_run["gone"], by_run["changed"]
    other = {"digest": "0" * 64, "files": ("first.safetensors 0",)}
    for one, what in ((gone, {"key": "away.safetensors"}), (changed, other)):
        init = one.work.training.init_from
        init = init._replace(found=init.found._replace(**what))
        by_run[one.run_id] = replace(one, work=one.work.training._replace(init_from=init))
    for world_size, some in made.items():
        these = [by_run[one.run_id] for one in some]
        plans.run_together(these, folder / f"world-{world_size}", may_fail=world_size == 2)
    return folder, by_run, trained


@pytest.mark.parametrize("run", ["single", "ddp", "zero1", "fsdp", "cut"])
def test_the_first_step_sees_the_weights_under_every_strategy(started, run):
    folder, by_run, trained = started
    plan = by_run[run]
    losses = plans.losses(folder / "store", plan)
    assert losses[0] == pytest.approx(first_loss(plan, trained), rel=1e-6)
    assert losses[1] == pytest.approx(plans.losses(folder / "store", by_run["single"])[1], rel=1e-5)
    assert abs(losses[0] - first_loss(plan, {})) > 1e-3  # the seed's own are others


@pytest.mark.parametrize("run", ["low", "low fsdp"])
def test_bf16_is_converted_and_names_are_mapped(started, run):
    folder, by_run, trained = started
    rounded = {name: tensor.bfloat16().float() for name, tensor in trained.items()}
    expected = first_loss(by_run[run], rounded)
    assert plans.losses(folder / "store", by_run[run])[0] == pytest.approx(expected, rel=1e-6)


def test_what_does_not_fit_is_refused_by_name_or_left_out_and_listed(started):
    folder, by_run, trained = started
    message = refusal(folder, 6)
    for words in (
        "fewer.safetensors does not fit the model",
        "not in the model: more.weight",
        "norm.weight (float32[64] here, float32[3] there)",
    ):
        assert words in message["message"]
    assert "strict: false" in message["hint"]
    (start,) = [one for one in plans.records(folder / "store", by_run["loose"]) if one["kind"] == "start"]
    notes = " ".join(start["notes"])
    missing = list(trained)[-2:]
    assert all(name in notes for name in (*missing, "more.weight", "norm.weight"))
    assert start["restore_seconds"] > 0
    seeds = build_model(by_run["loose"].work.training.model, seed=1, device_type="cpu")
    materialize(seeds, 1, CPU)
    partly = seeds.model.state_dict() | {
        name: tensor for name, tensor in trained.items() if name not in (*missing, "norm.weight")
    }
    expected = first_loss(by_run["loose"], partly)
    assert plans.losses(folder / "store", by_run["loose"])[0] == pytest.approx(expected, rel=1e-6)


def refusal(folder: Path, number: int) -> dict[str, Any]:
    """How the plan of this number, of those on two ranks, ended on rank 0."""
    path = folder / "world-2" / f"scratch-{number}" / "outcome-0.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_hint_names_the_map_and_weights_that_are_gone_or_changed_are_told(started):
    folder, _, _ = started
    assert 'map: {"net.*": "*"}' in refusal(folder, 7)["hint"]
    assert "is gone: no such file" in refusal(folder, 8)["message"]
    assert "changed since the run was asked for: first.safetensors, " in refusal(folder, 9)["message"]


def test_a_checkpoint_says_what_it_started_from(started):
    folder, by_run, _ = started
    store = FolderStore(folder / "store")
    manifest = catalogue.load_manifest(store, catalogue.latest(store, by_run["fsdp"].stage_key).key)
    found = by_run["fsdp"].work.training.init_from.found
    assert manifest["scalars"]["init_from"]["found"] == {
        "words": "run base, stage train, step 2", "format": "checkpoint", "store_url": str(folder / "store"),
        "key": found.key, "step": 2, "digest": found.digest, "files": [],
        "revision": None,
    }  # fmt: skip


def test_a_rank_reads_the_blocks_of_its_own_part_and_no_others(tmp_path):
    full = {"w": torch.arange(4096.0).view(64, 64), "b": torch.arange(64).half()}
    safetensors.torch.save_file(full, tmp_path / "w.safetensors")
    source = weights.of_files(FolderStore(tmp_path), "w.safetensors")
    asked: list[tuple[int, int]] = []

    def read(store: Any, blob: Any, start: int, buffer: Any) -> None:
        asked.append((start, len(buffer)))
        source.read(store, blob, start, buffer)

    small = replace(source, read=read, blobs=[{**source.blobs[0], "block_bytes": 256}])
    part = LocalShard("model.w", torch.zeros(16, 64), (64, 64), (32, 0))
    low = LocalShard("model.b", torch.zeros(8), (64,), (8,))
    _fill(small, [(part, "w"), (low, "b")])
    assert torch.equal(part.local, full["w"][32:48])
    assert torch.equal(low.local, full["b"][8:16].float())
    assert sum(count for _, count in asked) <= 16 * 64 * 4 + 3 * 256


FROZEN = ("embed.*", "blocks.0.*")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> tuple[Path, dict[str, Plan]]:
    """Runs of a model of one's own in one go; `half` under zero1, and on from there under fsdp."""
    folder = tmp_path_factory.mktemp("frozen")
    tokens = plans.write_tokens(folder / "tokens")
    model = ModelPlan(Entry("kit.models:odd", {}), None, 32, ())

    def plan(run: str, strategy: Any, steps: int = 4, **changes: Any) -> Plan:
        return plans.train_plan(
            folder / "store", tokens, run_id=run, strategy=strategy, steps=steps, every=2, model=model,
            freeze=FROZEN, **changes,
        )  # fmt: skip

    whole = [
        plan("ddp", "ddp"),
        plan("zero1", "zero1"),
        plan("fsdp", "fsdp", activation_checkpointing="full"),
    ]
    half = plan("half", "zero1", 2)
    rest = replace(plan("half", "fsdp"), attempt=2)
    rest = replace(rest, work=rest.work.training._replace(resume=True))
    wrong = replace(plan("wrong", "ddp"), run_id="wrong")
    wrong = replace(wrong, work=wrong.work.training._replace(freeze=("embedding.*",)))
    everything = replace(wrong, run_id="everything", work=wrong.work.training._replace(freeze=("*",)))
    made = [*whole, half, rest, wrong, everything]
    plans.run_together(made, folder / "runs", may_fail=True)
    return folder, {f"{one.run_id}-{one.attempt}": one for one in made}


def test_frozen_parameters_stay_and_all_strategies_agree(frozen):
    folder, by_run = frozen
    store = FolderStore(folder / "store")
    expected = plans.losses(folder / "store", by_run["ddp-1"])
    assert len(expected) == 4
    for run in ("zero1-1", "fsdp-1"):
        assert plans.losses(folder / "store", by_run[run]) == pytest.approx(expected, rel=1e-5)
    rest = plans.losses(folder / "store", by_run["half-2"])
    assert rest == pytest.approx(expected[2:], rel=1e-5)
    built = build_model(by_run["ddp-1"].work.training.model, seed=1, device_type="cpu")
    materialize(built, 1, CPU)
    for run in ("ddp-1", "zero1-1", "fsdp-1", "half-2"):
        key = catalogue.latest(store, by_run[run].stage_key).key
        source = weights.of_checkpoint(store, key)
        manifest = catalogue.load_manifest(store, key)
        states = {
            name.split(".", 2)[2].rpartition(".")[0]
            for name in manifest["tensors"]
            if name.startswith("optim.")
        }
        moved = set()
        for name, parameter in built.model.named_parameters():
            item = LocalShard(
                name, torch.empty_like(parameter), tuple(parameter.shape), (0,) * parameter.dim()
            )
            _fill(source, [(item, name)])
            if not torch.equal(item.local, parameter.detach()):
                moved.add(name)
        assert (
            moved
            == states
            == {
                name
                for name, _ in built.model.named_parameters()
                if not name.startswith(("embed.", "blocks.0."))
            }
        )


def test_patterns_that_freeze_nothing_or_all_are_refused(frozen):
    folder, _ = frozen
    nothing, everything = (
        json.loads((folder / "runs" / f"scratch-{number}" / "outcome-0.json").read_text())
        for number in (5, 6)
    )
    assert "'embedding.*' fits no parameter" in nothing["message"]
    assert "embed.weight" in nothing["hint"]
    assert "all parameters are frozen" in everything["message"]


KILLED_ONCE = """
import os, signal
from pathlib import Path
from kit.models import WithLoss
from mlpipe.train import starting

def build(flag):
    fill = starting.fill
    def dies_once(*given):
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 and not Path(flag).exists():
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        fill(*given)
    starting.fill = dies_once
    return WithLoss(dropout=0.0)
"""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path, warm=True)
    cli.env["PYTHONPATH"] = str(Path(__file__).parents[1])
    return cli


def write_pipeline(cli: Cli, *stages: dict[str, Any]) -> None:
    (cli.folder / "pipeline.yaml").write_text(json.dumps({"version": 1, "name": "tiny", "stages": stages}))


def stage(
    name: str, strategy: str, workers: int, needs: tuple[str, ...] = (), **train: Any
) -> dict[str, Any]:
    data = {"entry": "kit.models:numbers", "args": {"size": 64}, "batch_size": 8}
    settings = {
        "steps": 4,
        "strategy": strategy,
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "checkpoint": {"every": "2 steps"},
    }
    body = {"data": data, "precision": "fp32", **settings, **train}
    return {"name": name, "needs": list(needs), "train": body, "resources": {"workers_per_node": workers}}


def records(cli: Cli, run: str, stage: str, attempt: int, kind: str) -> list[dict[str, Any]]:
    path = cli.store / f"runs/{run}/stages/{stage}/attempt-{attempt}/records/rank-0.jsonl"
    return [one for one in plans.lines(path.read_bytes()) if one["kind"] == kind]


def loss_of_numbers(model: torch.nn.Module) -> float:
    """Of the first step of `stage`, with its seed."""
    world = World(Mesh(), 0, CPU)
    loader = MicrobatchLoader(
        models.numbers("train", 64), world, seed=0, global_batch=8, micro_batch=8, seq_len=32
    )
    with torch.no_grad():
        total, count = LossModule(model, "cpu")(loader.step(0)[0].batch)
    return float(total / count)


def exported_loss(store: FolderStore, key: str, folder: Path) -> float:
    export_checkpoint(store, key, folder)
    model = models.Plain(dropout=0.0)
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"), strict=False)
    return loss_of_numbers(model)


TINY = (
    "library.command=[mlpipe-corpus, --out, '{{output}}', --tokenizer, bytes, --source, {docs}/adr]",
    "prose.command=[mlpipe-corpus, --out, '{{output}}', --tokenizer, bytes, --source, {docs}/runbooks]",
    "base.steps=4", "base.strategy=fsdp", "base.optimizer.warmup_steps=1", "tune.optimizer.warmup_steps=1",
    "base.model={preset: llama-1m, seq_len: 32, num_layers: 1}", "tune.steps=3", "tune.precision=fp32",
    "tune.model={preset: llama-1m, seq_len: 32, num_layers: 1}", "tune.resources.workers_per_node=1",
    "evaluate.gate=val_bits_per_byte < 100", "evaluate.max_tokens=512", "evaluate.generate_tokens=4",
)  # fmt: skip


def test_the_pipeline_of_a_fine_tuning_goes_on_from_its_base_and_says_so(cli: Cli):
    (cli.folder / "pipeline.yaml").write_text((ROOT / "pipelines/finetune.yaml").read_text())
    changes = [word for one in TINY for word in ("--set", one.replace("{docs}", str(ROOT / "docs")))]
    assert "starts from stage base" in cli("plan", "pipeline.yaml", *changes).stdout
    cli("run", "pipeline.yaml", "--run-id", "r", *changes)
    status = cli("status", "r").stdout
    assert "starts from run r, stage base, step 4" in status
    assert "parameters are frozen" in status
    found = cli.json("status", "r")["meta"]["init_from"]["tune"]["found"]
    assert found["key"].startswith("runs/r/stages/base/checkpoints/step-000000004/")
    assert cli.json("models", "show", "docs-lm", "candidate")["lineage"]["init_from"] == found
    assert "run r, stage base, step 4" in (cli.store / "runs/r/report.html").read_text()
    export_checkpoint(FolderStore(cli.store), found["key"], cli.folder / "base")
    state = safetensors.torch.load_file(cli.folder / "base/model.safetensors")
    plan = Plan.from_json((cli.store / "runs/r/stages/tune/attempt-1/plan.json").read_bytes())
    expected = first_loss(plan, {name.removeprefix("model."): tensor for name, tensor in state.items()})
    assert records(cli, "r", "tune", 1, "step")[0]["loss"] == pytest.approx(expected, rel=1e-6)
    refused = cli("resume", "r", "--set", "tune.init_from.step=2", "--set", "tune.steps=6", code=2).stderr
    assert "tune.init_from.step" in refused


def test_killed_while_loading_it_loads_again_and_resumed_it_needs_the_weights_no_more(cli: Cli):
    (cli.folder / "killed.py").write_text(KILLED_ONCE)
    torch.manual_seed(11)
    source = models.WithLoss(dropout=0.0)
    state = {name: tensor for name, tensor in source.state_dict().items() if name != "head.weight"}  # tied
    safetensors.torch.save_file(state, cli.folder / "w.safetensors")
    model = {"entry": "killed:build", "args": {"flag": str(cli.folder / "flag")}}
    write_pipeline(cli, stage("train", "fsdp", 2, model=model, init_from={"path": "w.safetensors"}))
    cli("run", "pipeline.yaml", "--run-id", "r")
    assert (cli.folder / "flag").exists()
    (start,) = records(cli, "r", "train", 1, "start")
    assert start["restart"] == 1
    assert "started from w.safetensors" in " ".join(start["notes"])
    steps = records(cli, "r", "train", 1, "step")
    assert steps[0]["loss"] == pytest.approx(loss_of_numbers(source), rel=1e-6)
    cli("models", "promote", "r", "--as", "m", "--alias", "good")
    (cli.folder / "w.safetensors").unlink()
    cli("resume", "r", "--set", "train.steps=6", "--set", "train.strategy=ddp")
    (start,) = records(cli, "r", "train", 2, "start")
    assert (start["start_step"], start["notes"]) == (4, [])
    assert len(records(cli, "r", "train", 2, "step")) == 2

    write_pipeline(cli, stage("tune", "ddp", 2, model=model, init_from={"model": "m@good"}, steps=1))
    cli("run", "pipeline.yaml", "--run-id", "s")
    expected = exported_loss(FolderStore(cli.store), "models/m/1", cli.folder / "promoted")
    assert records(cli, "s", "tune", 1, "step")[0]["loss"] == pytest.approx(expected, rel=1e-6)
    for verb in ("run", "plan", "submit"):
        missing = cli(verb, "pipeline.yaml", "--set", "tune.init_from.model=m@bad", code=2).stderr
        assert "pipeline.yaml:1:" in missing
        assert "there is no model m, version bad" in missing
    assert {run["run_id"] for run in cli.json("list")["runs"]} == {"r", "s"}  # what was refused left no run
