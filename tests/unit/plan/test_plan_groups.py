"""Plans of trainings on machines that differ."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rendered import IMAGE, pipeline_of, plan_of

from mlpipe._core.errors import PlanError
from mlpipe.cli.plan_table import mixed_words
from mlpipe.plan.asked_groups import parse_groups, plan_groups
from mlpipe.plan.build import stage_hardware
from mlpipe.plan.gang_node import GangNode
from mlpipe.plan.plan import Plan
from mlpipe.plan.scaling import scale_stage
from mlpipe.plan.shares import bounds
from mlpipe.plan.slurm import slurm_job
from mlpipe.plan.training import compare, explain_groups
from mlpipe.render.kubernetes import stage_objects
from mlpipe.submit.kubernetes.objects import made_of
from mlpipe.submit.kubernetes.placement import num_pods

pytestmark = pytest.mark.unit
PIPELINE = pipeline_of("llm")
SMALL = pipeline_of(
    "llm", "train.model.preset=llama-350m", "train.model.seq_len=2048", "train.data.batch_tokens=4194304"
)

OLD = pipeline_of("llm", "train.model.preset=llama-125m", "train.model.seq_len=1024", "train.precision=auto")


def mixed(pipeline, groups):
    return plan_groups(pipeline, "train", stage_hardware(pipeline, "train", cluster=True), groups)


@pytest.mark.parametrize(
    "text", ["", "2xH100-80GB", "2xH100-80GB,", "0xH100-80GB,1xT4", "H100-80GB,T4", "1xT4,2xH100"]
)
def test_what_names_no_groups_is_refused(text):
    with pytest.raises(PlanError) as refused:
        parse_groups(text)
    assert refused.value.where == "--groups"


def test_groups_of_one_class_are_one_gang_of_it():
    found = mixed(PIPELINE, "1xH100-80GB, 3xH100-80GB")
    hardware = stage_hardware(PIPELINE, "train", cluster=True)
    (row,) = scale_stage(PIPELINE, "train", hardware, "4")
    assert [one.share_ratio for one in found.groups] == [0.25, 0.75]
    assert found.step_seconds == found.even_seconds
    # of all strategies; here only of those whose workers may have unequal shares
    assert found.step_seconds == pytest.approx(row.best.step_seconds, rel=0.12)


@settings(max_examples=3, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(["H200", "H100-80GB", "A100-80GB", "A100-40GB"])),
        min_size=2,
        max_size=3,
    )
)
def test_shares_follow_speed_and_no_worker_waits_longer_than_for_a_sample(groups):
    found = mixed(SMALL, ",".join(f"{number}x{gpu}" for number, gpu in groups))
    assert sum(one.share_ratio for one in found.groups) == pytest.approx(1)
    assert [(one.num_nodes, one.name) for one in found.groups] == groups
    assert found.step_seconds <= found.even_seconds * (1 + 1e-9)
    assert found.step_seconds == max(one.step_seconds for one in found.groups)
    fast = min(found.groups, key=lambda one: one.step_seconds / one.sequences)
    assert fast.sequences == max(one.sequences for one in found.groups)
    for one in found.groups:
        assert one.step_seconds * (one.sequences + 1) / one.sequences >= found.step_seconds * 0.99
        assert one.micro_batch <= one.sequences
        assert (
            one.memory_bytes
            < {"H200": 141, "H100-80GB": 80, "A100-80GB": 80, "A100-40GB": 40}[one.name] * 1e9 * 1.08
        )


def test_a_group_pays_for_the_time_in_which_it_has_less_to_do():
    found = mixed(SMALL, "2xH100-80GB,2xA100-80GB")
    for one in found.groups:
        tokens = one.share_ratio * found.tokens_per_second * 3600
        assert one.usd_per_million_tokens == pytest.approx(one.usd_per_hour / tokens * 1e6)


def test_a_card_without_bf16_sets_the_precision_of_all_and_what_fits_nowhere_says_so():
    assert mixed(OLD, "1xH100-80GB,1xV100").groups[0].share_ratio > 0.5
    with pytest.raises(PlanError, match="fits in the memory of each group"):
        mixed(PIPELINE, "1xH100-80GB,1xT4")
    with pytest.raises(PlanError, match="some would have no sample"):
        mixed(PIPELINE, "1xH100-80GB,900xA100-80GB")


IN_FILE = "train.resources=[{nodes: 2, gpus_per_node: 8, gpu: H200}, {nodes: 4, gpus_per_node: 8, gpu: %s}]"


def test_groups_in_the_file_are_planned_as_asked_for_and_the_plan_says_what_each_does():
    """The trainer deals a batch by the speeds that the plan has, as the plan says."""
    pipeline = pipeline_of("llm", IN_FILE % "A100-80GB")
    plan, asked = plan_of(pipeline, "train"), mixed(PIPELINE, "2xH200,4xA100-80GB")
    train, launch = plan.work.training, plan.launch
    assert train.groups == asked.groups
    assert (train.strategy, train.communication) == (asked.strategy, "resident")
    assert (launch.num_nodes, launch.nproc_per_node) == (6, 8)
    ends = bounds(train.global_batch, 48, train.speeds)
    counts = [stop - start for start, stop in pairwise(ends)]
    fast, slow = train.groups
    assert (max(counts[:16]), max(counts[16:])) == (fast.sequences, slow.sequences)
    assert sum(counts[:16]) == fast.share_ratio * train.global_batch
    assert train.group_of(15) is fast
    assert train.group_of(16) is train.group_of(47) is slow
    assert train.activation_checkpointing == "selective", "what most is computed again, for what goes by it"
    assert {fast.activation_checkpointing, slow.activation_checkpointing} == {"none", "selective"}
    assert train.micro_batch == min(fast.micro_batch, slow.micro_batch)
    assert train.predicted.step_seconds == pytest.approx(asked.step_seconds, rel=1e-4)
    assert train.peak_flops == pytest.approx((989.4e12 + 2 * 312e12) / 3, rel=0.01), "their mean, for the MFU"
    assert Plan.from_json(plan.to_json()) == plan


def test_what_the_file_says_of_speed_or_layout_counts_and_what_does_not_fit_says_on_which_machine():
    said = (
        "train.compile=block",
        "train.stragglers=move_load",
        "train.data.micro_batch=auto",
        "train.strategy=auto",
    )
    for own, strategy in (
        ("train.strategy=fsdp", "fsdp"),
        ("train.mesh={dp_shard: 16, dp_replicate: 3}", "hsdp"),
        ("train.strategy=hsdp", "hsdp"),
    ):
        train = plan_of(pipeline_of("llm", *said, IN_FILE % "A100-80GB", own), "train").work.training
        assert train.strategy == strategy
        assert strategy == "fsdp" or 16 % train.mesh.dp_shard == 0, "a copy of the weights is of one class"
        assert train.groups[0].micro_batch == train.groups[1].micro_batch, "whoever compiles, for one size"
    twice = "train.resources=[{speed: 3}, {speed: 1, nodes: 2}]"
    small = plan_of(pipeline_of("quickstart", twice, "train.data.batch_size=10"), "train")
    assert [one.sequences for one in small.work.training.groups] == [6, 2]
    assert (small.launch.num_nodes, small.launch.nproc_per_node) == (3, 1)
    here = stage_hardware(pipeline_of("quickstart", twice), "train")
    assert (here.num_nodes, here.devices_per_node) == (1, 3), "workers on CPUs stand side by side here"
    assert [one.num_nodes for one in here.groups] == [1, 2]
    with pytest.raises(PlanError, match=r"zero2 needs .* of 1.* on T4"):
        plan_of(pipeline_of("llm", "train.precision=fp32", IN_FILE % "T4"), "train")


def test_workers_that_compute_the_same_samples_are_of_one_class_and_have_one_share():
    """Of 16 and 32 workers: so many data ranks, each with the samples that the plan says."""
    for own, ranks in (
        ("train.mesh={dp_shard: fill, tp: 4}", (4, 8)),
        ("train.mesh={dp_shard: fill, cp: 2, tp: 4}", (2, 4)),
        ("train.mesh={pp: 2, dp_shard: 8, dp_replicate: fill}", (8, 16)),
    ):
        train = plan_of(pipeline_of("llm", IN_FILE % "A100-80GB", own), "train").work.training
        fast, slow = train.groups
        assert (fast.num_workers, slow.num_workers) == (16, 32)
        ends = bounds(train.global_batch, sum(ranks), train.speeds)
        counts = [stop - start for start, stop in pairwise(ends)]
        assert (max(counts[: ranks[0]]), max(counts[ranks[0] :])) == (fast.sequences, slow.sequences)
        assert [train.group_of(rank).name for rank in (ranks[0] - 1, ranks[0])] == ["H200", "A100-80GB"]
        assert fast.step_seconds / fast.sequences < slow.step_seconds / slow.sequences


def test_axes_within_a_class_are_found_where_data_parallelism_does_not_fit_the_least_machine():
    """Where load moves, those along which it can."""
    pipeline = pipeline_of("llm", IN_FILE % "A100-40GB", "train.stragglers=move_load")
    train = plan_of(pipeline, "train").work.training
    mesh = train.mesh
    assert mesh.tp > 1 == mesh.pp == mesh.ep
    assert train.groups[1].memory_bytes < 40 * 2**30
    assert len(train.speeds) == mesh.num_data_ranks
    found = mixed(PIPELINE, "2xH200,4xA100-40GB")
    assert found.mesh == mesh
    assert f"train: {{mesh: {{dp_shard: {mesh.dp_shard}, tp: {mesh.tp}}}, strategy" in mixed_words(found)[1]
    alike = "train.resources={nodes: 4, gpus_per_node: 8, gpu: A100-40GB}"
    alone = plan_of(pipeline_of("llm", alike, "train.stragglers=move_load"), "train").work.training
    assert alone.mesh.tp > 1
    assert (alone.communication, alone.reshard_after_forward) == ("resident", False)


def test_what_was_tried_and_what_each_group_would_do_alone_is_told():
    """Also of two groups that are worth less together than one of them."""
    pipeline = pipeline_of("llm", IN_FILE % "A100-80GB", "train.strategy=zero2")
    hardware = stage_hardware(pipeline, "train", cluster=True)
    first, *alone = explain_groups(pipeline, "train", hardware)
    assert first.startswith("zero2 (dp_shard 48): a step of ")
    assert first.endswith(" <- chosen")
    assert [line.partition(": ")[0] for line in alone] == [
        "alone, 2 nodes x 8 x H200",
        "alone, 4 nodes x 8 x A100-80GB",
    ]
    small = pipeline_of("llm", IN_FILE % "T4", "train.precision=fp32")
    told = explain_groups(small, "train", stage_hardware(small, "train", cluster=True))
    assert not any("chosen" in line for line in told)
    assert any(line.startswith("zero2 needs ") and line.endswith(" on T4") for line in told)


def test_an_evaluation_of_such_a_training_runs_on_its_first_group_and_nothing_else_is_said_of_them():
    pipeline = pipeline_of("llm", IN_FILE % "A100-80GB")
    assert compare(pipeline, "train", stage_hardware(pipeline, "train", cluster=True)) == []
    quick = pipeline_of("quickstart", "train.resources=[{nodes: 2}, {nodes: 1}]", "train.data.batch_size=9")
    launch = plan_of(quick, "evaluate").launch
    assert (launch.num_nodes, launch.nproc_per_node) == (2, 1)


def test_a_model_whose_size_nobody_knows_is_dealt_by_the_peaks():
    own = ("train.model={entry: 'package.models:build', seq_len: 32}", "train.precision=fp32")
    train = plan_of(pipeline_of("llm", IN_FILE % "A100-80GB", *own), "train").work.training
    fast, slow = train.groups
    assert fast.speed / slow.speed > 2
    assert (fast.step_seconds, fast.memory_bytes) == (None, None)


def test_nodes_are_numbered_over_the_groups_and_a_patch_is_of_all_pods(monkeypatch):
    """The pods of a group count from 0: which node of the gang the first one is, they are told."""
    image = f"image={IMAGE}"
    patch = "kubernetes.patches=[{target: {kind: Pod}, strategic: {spec: {hostNetwork: true}}}]"
    jobset = stage_objects(plan_of(pipeline_of("llm", IN_FILE % "A100-80GB", image, patch), "train"))[-1]
    pods = [job["template"]["spec"]["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]]
    assert [pod["hostNetwork"] for pod in pods] == [True, True]
    assert num_pods(jobset) == 6
    assert [one["kind"] for one in made_of(jobset)] == ["Job", "Pod", "Job", "Pod"]
    env = {one["name"]: one.get("value") for one in pods[1]["containers"][0]["env"]}
    monkeypatch.setenv("MLPIPE_FIRST_NODE", env["MLPIPE_FIRST_NODE"])
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert GangNode.from_environment().index == 5
    assert (
        len({one["value"] for pod in pods for one in pod["containers"][0]["env"] if "RENDEZ" in one["name"]})
        == 1
    )


def test_groups_are_components_of_a_job_of_slurm_which_is_told_whose_nodes_are_which():
    pipeline = pipeline_of("llm", IN_FILE % "A100-80GB", "slurm.constraint=ib")
    with pytest.raises(PlanError, match="nothing tells Slurm which nodes have H200, and which A100-80GB"):
        slurm_job(pipeline, "train")
    groups = "slurm.stages={train: {qos: high, groups: [{}, {constraint: old, partition: p}]}}"
    job = slurm_job(
        pipeline_of("llm", IN_FILE % "A100-80GB, cpus: 64", "slurm.constraint=ib", groups), "train"
    )
    (other,) = job.others
    assert (job.constraint, job.partition, job.qos, job.cpus) == ("ib", None, "high", 32)
    assert (other.constraint, other.partition, other.qos, other.cpus) == ("old", "p", "high", 64)
    alike = pipeline_of("quickstart", "train.resources=[{speed: 2}, {speed: 1}]", "train.data.batch_size=9")
    assert len(slurm_job(alike, "train").others) == 1, "of CPUs nobody says more"
