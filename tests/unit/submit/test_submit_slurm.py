"""`--to slurm` against stand-ins of its commands: what is asked and understood, when answers are lost."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from kit.rendered import pipeline_of, plan_of

from mlpipe._core.errors import MlpipeError, RenderError
from mlpipe.plan.slurm import slurm_job
from mlpipe.plan.work import TrainPlan
from mlpipe.render.slurm import comment, job_name, script
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.problems import SpecErrors
from mlpipe.store import runs
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import NODE_FAULT, AttemptOutcome
from mlpipe.store.runs import StageState
from mlpipe.submit import handle
from mlpipe.submit.executor import Ended
from mlpipe.submit.handle import elsewhere
from mlpipe.submit.slurm import client, doctor, jobs, node, scripts
from mlpipe.submit.slurm.clear import clear
from mlpipe.submit.slurm.pending import remedy, why_waiting

pytestmark = pytest.mark.unit
LOOK_SECONDS = jobs.FIRST_POLL_SECONDS  # in earnest
PIPELINE = """\
version: 1
name: p
stages:
  - name: a
    command: [make]
slurm:
"""
# Of 22.05.8, as its squeue and sbatch say them.
WAITS = {
    "Priority": "higher priority",
    "Resources": "not enough nodes",
    "ReqNodeNotAvail, UnavailableNodes:n1": "sinfo -R",
    "BadConstraints": "slurm.constraint",
    "PartitionTimeLimit": "slurm.time",
    "PartitionConfig": "resources.nodes",
    "QOSMaxGRESPerUser": "GPUs",
    "QOSGrpGRES": "GPUs",
    "AssocGrpCPUMinutesLimit": "",
    "AssocMaxJobsLimit": "jobs",
    "QOSMaxWallDurationPerJobLimit": "time",
    "JobHeldUser": "scontrol release",
    "launch failed requeued held": "its start failed",
    "SomethingNew": "SomethingNew",
}


@pytest.mark.parametrize("reason", WAITS)
def test_why_a_job_waits_stands_in_words(reason: str) -> None:
    said = why_waiting(7, "PENDING", reason)
    assert said.startswith("Slurm job 7 waits: ")
    assert WAITS[reason] in said
    assert reason.partition(",")[0] in said
    assert why_waiting(7, "RUNNING", "None") == ""


@pytest.mark.parametrize(
    "section",
    [
        "  options: {comment: mine}",
        "  options: {signal: 'B:TERM@10'}",
        "  options: {time: '10'}",
        "  options: {--exclusive: ''}",
        '  options: {mail-user: "a\\nrm"}',
        '  partition: "gpu\\n#SBATCH --uid=0"',
        "  partition: gpu --uid=0",
        "  options: {mail-user: me --uid=0}",
        "  options: {mail-user: 'me#'}",
        "  options: {comm: mine}",
        "  constraint: a100; rm -rf",
        "  stages: {b: {partition: gpu}}",
        "  stages: {a: {options: {nodes: '2'}}}",
        "  stages: {a: {groups: [{}, {}]}}",
        "  container: {runtime: pyxis}",
        "  modules: ['$(id)']",
        "  container: {runtime: pyxis, image: a, mounts: ['/a,/etc']}",
        "  scratch: '/a,/etc'",
    ],
)
def test_what_would_break_a_job_is_refused_with_its_line(section: str) -> None:
    with pytest.raises(SpecErrors) as refused:
        load_pipeline_text(PIPELINE + section + "\n", "p.yaml")
    assert [problem.line for problem in refused.value.problems] == [7]


def test_a_path_that_slurm_would_read_otherwise_is_refused() -> None:
    spec = pipeline_of("llm")
    for output in ("/a b/log", "/a/%j/log", "/a\n#SBATCH --uid=0"):
        with pytest.raises(RenderError, match="path") as refused:
            script(plan_of(spec, "train"), slurm_job(spec, "train"), output)
        assert refused.value.where == "train"
        assert "write a store whose path" in str(refused.value.hint)


def test_a_script_that_slurmctld_would_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = pipeline_of("llm")
    plan, job = plan_of(spec, "corpus"), slurm_job(spec, "corpus")
    comments = len("#SBATCH --comment=mlpipe::\n") + 16 + 64
    monkeypatch.setattr("mlpipe.render.slurm.MAX_BYTES", len(script(plan, job, "o")) - comments)
    script(plan, job, "o")
    with pytest.raises(RenderError, match=r"the script has \d+ bytes, Slurm takes \d+") as refused:
        script(plan, job, "oo")
    assert refused.value.where == "corpus"
    assert "read them from a file" in str(refused.value.hint)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins: each is a line of shell, and writes its arguments down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(jobs, "FIRST_POLL_SECONDS", 0.05)
    monkeypatch.setattr(handle, "_LOOK_SECONDS", 0.01)
    return folder


def stand_in(folder: Path, name: str, line: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{folder}/calls"\n{line}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def followed(tmp_path: Path, folder: Path, *, stopping: bool = False) -> tuple[Ended, list[str]]:
    """The end of a stage, and what was called for it."""
    spec = pipeline_of("llm")
    plan = plan_of(spec, "corpus")
    text = script(plan, slurm_job(spec, "corpus"), "slurm.out")
    followed = jobs.JobHandle(FolderStore(tmp_path / "store"), plan, str(tmp_path), text)
    if stopping:
        followed.terminate()
    followed._thread.join(60)
    ended = followed.poll()
    assert ended is not None
    return ended, (folder / "calls").read_text().splitlines()


def listed(tmp_path: Path, state: str, number: int = 7) -> str:
    """A line of squeue, of the stage's job."""
    spec = pipeline_of("llm")
    plan = plan_of(spec, "corpus")
    text = script(plan, slurm_job(spec, "corpus"), "slurm.out")
    return f"{number}|{state}|None|0|1|n1|mlpipe/{plan.run_id}/corpus/1|{jobs.comment(text)}|"


def test_an_answer_that_was_lost_submits_no_second_job(tmp_path: Path, commands: Path) -> None:
    """sbatch says that it timed out, and the job is there."""
    there = f"echo '{listed(tmp_path, 'FAILED')}'"
    stand_in(commands, "squeue", f"if [ -e '{commands}/sent' ]; then {there}; fi")
    error = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    stand_in(commands, "sbatch", f"touch '{commands}/sent'; echo '{error}' >&2; exit 1")
    ended, calls = followed(tmp_path, commands)
    assert (ended.state, ended.kind) == ("failed", "infrastructure")
    assert "Slurm job 7 ended as FAILED" in ended.message
    assert sum(call.startswith("sbatch") for call in calls) == 1


def test_nodes_to_be_avoided_are_added_to_those_of_the_script(tmp_path: Path, commands: Path) -> None:
    """On the command line, which stands above it."""
    stand_in(commands, "sbatch", f"echo \"$@\" >> '{tmp_path}/said'; echo 7")
    for text in ("#SBATCH --exclude=n1,n[3-4]\n", "true\n"):
        assert client.submit(text, str(tmp_path), avoid=["n7", "n8"]) == "7"
    client.submit("#SBATCH --exclude=n1\n", str(tmp_path))
    assert (tmp_path / "said").read_text().splitlines() == [
        "--parsable --exclude=n1,n[3-4],n7,n8",
        "--parsable --exclude=n7,n8",
        "--parsable",
    ]


def test_a_run_of_the_same_id_in_another_store_keeps_its_jobs(tmp_path: Path, commands: Path) -> None:
    """One user, two stores: `cancel` of one's run ended the other's jobs. The driver had another name for the
    folder that the store is."""
    spec, store = pipeline_of("llm"), FolderStore(tmp_path / "store")
    runs.create_run(store, "r", "", "", ["corpus"], "slurm", {})
    going = {"corpus": StageState("running", attempt=1)}
    run = runs.update_run(store, "r", lambda run: replace(run, state="running", stages=going))
    plan = replace(plan_of(spec, "corpus", run_id="r"), store_url=f"{tmp_path}/mounted/store")
    store.put(f"{run.attempt_key('corpus')}/plan.json", plan.to_json().encode())
    urls = {7: plan.store_url, 8: "s3://theirs/runs", 9: store.url}
    texts = {
        number: script(replace(plan, store_url=url), slurm_job(spec, "corpus"), "slurm.out")
        for number, url in urls.items()
    }
    waits = "PENDING|None|0|0||mlpipe/r/corpus/1"
    comments = {number: comment(text) for number, text in texts.items()}
    comments[10] = f"mlpipe:{64 * 'a'}"  # of an mlpipe whose comments told no store
    lines = [
        f"[ -e '{commands}/{number}' ] || echo '{number}|{waits}|{text}|'"
        for number, text in comments.items()
    ]
    stand_in(commands, "squeue", "\n".join(lines))
    stand_in(commands, "scancel", f"touch '{commands}/'$1")
    clear(store, run, timeout_seconds=60)
    calls = (commands / "calls").read_text().splitlines()
    assert [call for call in calls if call.startswith("scancel")] == ["scancel 7", "scancel 9", "scancel 10"]


def test_of_two_jobs_of_one_attempt_the_later_one_goes(tmp_path: Path, commands: Path) -> None:
    """The first answer came so late that the stage was submitted again."""
    both = [listed(tmp_path, "RUNNING"), listed(tmp_path, "PENDING", 8)]
    line = "\n".join(f"echo '{one}'" for one in both)
    end = f"echo '{listed(tmp_path, 'FAILED')}'"
    stand_in(commands, "squeue", f"if [ -e '{commands}/gone' ]; then {end}; else {line}\nfi")
    stand_in(commands, "scancel", f"touch '{commands}/gone'")
    _, calls = followed(tmp_path, commands)
    assert "scancel 8" in calls
    assert not any(call.startswith("sbatch") for call in calls)


def test_what_slurm_fails_to_say_once_ends_no_stage_and_is_asked_again(
    tmp_path: Path, commands: Path
) -> None:
    """squeue and scancel each fail with words that nobody knows; another job's comment has two lines."""
    once = "[ -e '{0}' ] || {{ touch '{0}'; echo 'error: RPC limit exceeded' >&2; exit 1; }}"
    told, end = f"'{commands}/told'", f"echo '{listed(tmp_path, 'CANCELLED')}'"
    listing = f"printf '9|RUNNING|None|0|0|n1|mine|two\\nlines|\\n'; if [ -e {told} ]; then {end}; else "
    listing += f"echo '{listed(tmp_path, 'PENDING')}'; fi"
    first = f"'{commands}/first'"
    asked = f"[ -e {first} ] || {{ touch {first}; {listing}; exit; }}"
    stand_in(commands, "squeue", f"{asked}\n{once.format(commands / 'squeued')}\n{listing}")
    stand_in(commands, "scancel", f"{once.format(commands / 'scancelled')}\ntouch {told}")
    ended, calls = followed(tmp_path, commands, stopping=True)
    assert ended.state == "cancelled", ended
    assert calls.count("scancel 7") == 2


def test_a_job_that_is_cancelled_near_its_limit_is_told_once_and_not_queued_again(
    tmp_path: Path, commands: Path
) -> None:
    """The limit's signal comes while the ranks are being told."""
    spec = pipeline_of("llm")
    text = script(plan_of(spec, "train"), slurm_job(spec, "train"), "slurm.out")
    told = f"'{commands}/told'"
    step = f"cat >/dev/null; kill -USR2 $PPID; until [ -e {told} ]; do sleep 0.05; done; exit 5"
    stand_in(commands, "srun", f'case "$*" in *--overlap*) kill -USR1 $PPID; touch {told};; *) {step};; esac')
    stand_in(commands, "scontrol", "exit 1")
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(["bash"], input=text, env=env, text=True, check=False, timeout=120)
    calls = (commands / "calls").read_text().splitlines()
    assert done.returncode == 5
    assert [call.split()[1] for call in calls if "--overlap" in call] == ["--overlap"]
    assert not any(call.startswith("scontrol") for call in calls)


@pytest.mark.parametrize(
    ("stage", "overrides", "time", "again"),
    [
        ("train", (), "2026-11-24T21:00:00", True),
        ("train", (), "None", False),  # somebody else stopped them, 40 times
        ("train", ("slurm.max_requeues=0",), "2026-11-24T21:00:00", False),
        # srun stops a gang of which one has failed
        ("corpus", ("corpus.resources.nodes=2",), "2026-11-24T21:00:00", False),
    ],
)
def test_a_job_that_slurm_preempts_is_queued_again_however_often(
    tmp_path: Path, commands: Path, stage: str, overrides: tuple[str, ...], time: str, again: bool
) -> None:
    """With a time of grace its processes are told, its script is not."""
    spec = pipeline_of("llm", *overrides)
    text = script(plan_of(spec, stage), slurm_job(spec, stage), "slurm.out")
    stand_in(commands, "srun", "cat >/dev/null; exit 5")
    told = f"   PreemptEligibleTime=2026-11-24T20:00:00 PreemptTime={time}"  # of scontrol 22.05
    stand_in(commands, "scontrol", f'[ "$1" = show ] || exit 1; echo "{told}"')
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_RESTART_COUNT": "40"}
    done = subprocess.run(["bash"], input=text, env=env, text=True, check=False, timeout=120)
    assert done.returncode == 5
    assert ("scontrol requeue 7" in (commands / "calls").read_text().splitlines()) == again


def test_a_stage_that_cannot_go_on_is_not_queued_again_by_its_limit() -> None:
    spec = pipeline_of("llm", "slurm.time=20 min")
    texts = {name: script(plan_of(spec, name), slurm_job(spec, name), "o") for name in ("corpus", "train")}
    assert ["--signal=B:USR1" in texts[name] for name in texts] == [False, True]
    short = pipeline_of("llm", "slurm.time=2 min")  # less than it has to save: half is for that
    assert "--signal=B:USR1@60\n" in script(plan_of(short, "train"), slurm_job(short, "train"), "o")


def test_the_coordinator_of_replicas_takes_no_gpu_and_one_core() -> None:
    spec = pipeline_of("llm", "train.resources.nodes=1..2", "train.strategy=fsdp")
    text = script(plan_of(spec, "train"), slurm_job(spec, "train"), "o", "coordinator")
    assert "#SBATCH --gres" not in text
    assert "#SBATCH --cpus-per-task=1\n" in text


def test_a_training_that_would_begin_again_is_not_queued_again_when_it_fails() -> None:
    """As a trial of `mlpipe tune`."""
    spec = pipeline_of("llm")
    plan = plan_of(spec, "train")
    assert isinstance(plan.work, TrainPlan)
    trial = replace(plan, work=plan.work._replace(resume=False))
    found = [scripts.of_plan(spec, one) for one in (plan, trial)]
    assert ['SLURM_RESTART_COUNT:-0}" -lt 0 ]' in text for text in found] == [False, True]


def test_of_a_gang_of_commands_all_end_with_the_first_that_fails() -> None:
    for nodes, stage, together in ((2, "corpus", 1), (1, "corpus", 0), (2, "train", 0)):
        spec = pipeline_of("llm", f"{stage}.resources.nodes={nodes}")
        text = script(plan_of(spec, stage), slurm_job(spec, stage), "o")
        assert f" --kill-on-bad-exit={together} " in text


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_folders_of_a_container_are_one_word_of_the_shell(runtime: str) -> None:
    spec = pipeline_of(
        "llm", f"slurm.container={{runtime: {runtime}, image: '/i m.sif', mounts: [/a b, /c$d]}}"
    )
    text = script(plan_of(spec, "train"), slurm_job(spec, "train"), "o")
    (line,) = [line for line in text.splitlines() if line.startswith("srun --nodes")]
    assert "'/a b:/a b,/c$d:/c$d'" in line
    assert "'/i m.sif'" in line
    assert " --part " not in line  # which only what is elastic has
    alone = script(plan_of(spec, "corpus"), slurm_job(spec, "corpus"), "o")
    assert (" --nv " in text, " --nv " in alone) == (runtime == "apptainer", False)  # the second has no GPU
    bare = pipeline_of("llm", f"slurm.container={{runtime: {runtime}, image: i}}")
    text = script(plan_of(bare, "corpus"), slurm_job(bare, "corpus"), "o")
    scratch = '"${scratch%/*}:${scratch%/*}"'
    pyxis = f"--container-image=i --container-mounts={scratch} python"
    assert (pyxis if runtime == "pyxis" else f"apptainer exec --bind {scratch} i python") in text


@pytest.mark.parametrize(
    ("image", "of_enroot"),
    [
        ("registry.example.com/team/mlpipe:1.0", "registry.example.com#team/mlpipe:1.0"),
        ("registry:5000/mlpipe", "registry:5000#mlpipe"),
        ("localhost/mlpipe", "localhost#mlpipe"),
        ("docker.io/team/mlpipe:1", "team/mlpipe:1"),
        ("team/mlpipe:1", "team/mlpipe:1"),
        ("mlpipe:1.0", "mlpipe:1.0"),
        ("docker://registry.example.com/mlpipe", None),
        ("images/mlpipe.sif", None),
    ],
)
def test_the_image_of_pods_is_named_as_the_runtime_takes_it(image: str, of_enroot: str | None) -> None:
    """pyxis took `registry/image` for one of Docker Hub (github.com/NVIDIA/pyxis/issues/39), apptainer for a
    file."""
    of_apptainer = image if of_enroot is None else f"docker://{image}"
    for runtime, expected in (("pyxis", of_enroot or image), ("apptainer", of_apptainer)):
        spec = pipeline_of("llm", f"image={image}", f"slurm.container={{runtime: {runtime}}}")
        container = slurm_job(spec, "train").container
        assert container is not None
        assert container.image == expected
        said = pipeline_of("llm", f"slurm.container={{runtime: {runtime}, image: {image}}}")
        container = slurm_job(said, "train").container
        assert container is not None
        assert container.image == image


def test_the_name_of_a_run_begins_those_of_its_jobs_and_of_no_others() -> None:
    """By it they are all found, and ended."""
    names = [job_name("r", "a", 1, part) for part in ("", "coordinator", "3")]
    assert names == ["mlpipe/r/a/1", "mlpipe/r/a/1/coordinator", "mlpipe/r/a/1/3"]
    assert all(name.startswith(job_name("r")) for name in names)
    assert not job_name("r2", "a", 1).startswith(job_name("r"))


def test_nodes_that_did_not_pass_a_preflight_are_left_out_beside_ones_own() -> None:
    pipeline = pipeline_of("llm", "slurm.options={exclude: n9}")
    plan = plan_of(pipeline, "train")
    plan = replace(plan, launch=plan.launch._replace(avoid=("n1", "n2")))
    text = script(plan, slurm_job(pipeline, "train"), "out")
    assert [line for line in text.splitlines() if "--exclude" in line] == ["#SBATCH --exclude=n9,n1,n2"]


@pytest.mark.parametrize(("avoided", "lost"), [(0, True), (7, True), (8, False)])
def test_a_preflight_that_names_machines_is_tried_elsewhere_for_a_while(avoided: int, lost: bool) -> None:
    plan = plan_of(pipeline_of("llm"), "train")
    plan = replace(plan, launch=plan.launch._replace(avoid=tuple(f"n{i}" for i in range(avoided))))
    waited = AttemptOutcome("failed", kind="infrastructure", message="a peer is gone", time=1.0)
    fault = AttemptOutcome("failed", kind="infrastructure", cause=NODE_FAULT, message="n2: slow", time=2.0)
    ended = elsewhere(plan, [waited, fault])
    assert ended is not None
    assert (ended.lost, ended.state, ended.message) == (lost, "failed", "n2: slow")
    assert elsewhere(plan, [waited]) is None


def test_a_stranger_of_the_same_name_is_not_adopted(tmp_path: Path, commands: Path) -> None:
    other = listed(tmp_path, "RUNNING").replace("mlpipe:", "other:")
    stand_in(commands, "squeue", f"echo '{other}'")
    ended, _ = followed(tmp_path, commands)
    assert ended.kind == "input"
    assert "another job has the name" in ended.message


def test_a_job_that_waits_is_cancelled_and_one_that_runs_is_told(tmp_path: Path, commands: Path) -> None:
    for state, call in (("PENDING", "scancel 7"), ("RUNNING", "scancel --batch --signal=USR2 7")):
        told, end = f"'{commands}/told'", f"echo '{listed(tmp_path, 'CANCELLED')}'"
        stand_in(
            commands, "squeue", f"if [ -e {told} ]; then {end}; else echo '{listed(tmp_path, state)}'; fi"
        )
        stand_in(commands, "scancel", f"touch {told}")
        ended, calls = followed(tmp_path, commands, stopping=True)
        assert ended.state == "cancelled"
        assert call in calls
        (commands / "told").unlink()


def test_a_task_is_told_once_however_long_scancel_would_ask_again(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm says so where others of its array wait, and has signalled it. Any other silence is no answer."""
    monkeypatch.setattr(client, "_SIGNAL_SECONDS", 1.0)
    told = "echo 'scancel: Job is in transitional state, retrying' >&2"
    stand_in(commands, "scancel", f"{told}; exec sleep 600")
    client.signal("7_1", "USR2")
    stand_in(commands, "scancel", "exec sleep 600")
    with pytest.raises(client.AwayError, match="did not answer within 1 s"):
        client.signal("7_1", "USR2")


def test_a_job_that_is_queued_again_starts_before_its_time_but_not_in_the_second_of_its_end(
    tmp_path: Path, commands: Path
) -> None:
    """Slurm 22.05 would end it as FAILED: slurmd says that its credential is revoked."""
    assert LOOK_SECONDS >= 1, "of two looks the second is in another second"
    line = listed(tmp_path, "PENDING").split("|")
    waits, end = "|".join([*line[:2], "BeginTime", "1", *line[4:]]), listed(tmp_path, "FAILED")
    stand_in(commands, "squeue", f"if [ -e '{commands}/told' ]; then echo '{end}'; else echo '{waits}'; fi")
    stand_in(commands, "scontrol", f"touch '{commands}/told'")
    _, calls = followed(tmp_path, commands)
    assert [call.split()[0] for call in calls] == ["squeue", "squeue", "squeue", "scontrol", "squeue"]
    assert "scontrol update JobId=7 StartTime=now" in calls


@pytest.mark.parametrize(
    ("mode", "parameters", "grace", "found"),
    [
        ("OFF", "(null)", 0, None),
        ("GANG,SUSPEND", "(null)", 0, None),
        ("REQUEUE", "(null)", 60, ("warn", "preempted loses", "SlurmctldParameters")),
        (
            "REQUEUE",
            "idle_on_node_suspend,preempt_send_user_signal",
            0,
            ("warn", "in batch loses", "GraceTime"),
        ),
        ("CANCEL", "preempt_send_user_signal", 60, ("ok", "saves before", "")),
    ],
)
def test_whether_preempted_trainings_save_is_told(
    commands: Path, mode: str, parameters: str, grace: int, found: tuple[str, str, str] | None
) -> None:
    """In the words of scontrol 22.05."""
    config = f"PreemptMode             = {mode}\nSlurmctldParameters     = {parameters}"
    partitions = f"PartitionName=batch GraceTime={grace} PreemptMode={mode}\n"
    partitions += "PartitionName=urgent GraceTime=0 PreemptMode=OFF"
    stand_in(commands, "scontrol", f'case "$*" in *config) echo "{config}";; *) echo "{partitions}";; esac')
    told = doctor._preemption()
    assert (told is None) == (found is None)
    if told is not None and found is not None:
        assert (told.level, found[1] in told.detail, found[2] in (told.remedy or "")) == (
            found[0],
            True,
            True,
        )


def test_a_time_of_grace_by_qos_is_not_guessed(commands: Path) -> None:
    config = "PreemptMode             = REQUEUE\nPreemptType             = preempt/qos"
    stand_in(commands, "scontrol", f'case "$*" in *config) echo "{config}";; esac')
    told = doctor._preemption()
    assert told is not None
    assert (told.level, "sacctmgr" in (told.remedy or "")) == ("warn", True)


def test_a_refusal_has_its_remedy(commands: Path) -> None:
    stand_in(
        commands,
        "sbatch",
        "echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1",
    )
    with pytest.raises(MlpipeError) as refused:
        client.submit("#!/bin/bash\n", ".", test_only=True)
    assert refused.value.kind == "input"
    assert "slurm.qos" in (refused.value.hint or "")
    assert remedy("never heard of") is None
    assert "SLURM_CONF" in str(remedy("fatal: Could not establish a configuration source"))


def test_what_would_stand_above_the_script_is_not_inherited(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(commands, "sbatch", "env; echo 5")
    for name in ("SBATCH_PARTITION", "SLURM_NNODES", "MLPIPE_DRIVER", "SLURM_CONF", "AWS_REGION"):
        monkeypatch.setenv(name, "here")
    said = client.run(["sbatch"])
    assert [
        name for name in ("SBATCH_PARTITION", "SLURM_NNODES", "MLPIPE_DRIVER") if f"{name}=" in said
    ] == []
    assert "SLURM_CONF=here" in said
    assert "AWS_REGION=here" in said


def test_a_store_that_a_node_does_not_see_is_named(tmp_path: Path) -> None:
    plan = plan_of(pipeline_of("quickstart", f"store={tmp_path}"), "train")
    with pytest.raises(MlpipeError, match="n2 does not find the run") as refused:
        node.check_store(plan, "n2", f"{plan.attempt_key}/plan.json")
    assert refused.value.kind == "input"
    assert "s3://" in (refused.value.hint or "")
    assert [node._code(code) for code in (0, 2, 3, 4, 5, -9)] == [0, 12, 13, 4, 5, 4]


def test_a_scratch_folder_that_is_not_the_jobs_own_is_neither_taken_nor_cleared(tmp_path: Path) -> None:
    """In /tmp another user may have been there first. One that this job's start before left is made anew."""
    folder, elsewhere_ = tmp_path / "new" / "mlpipe-7-0", tmp_path / "elsewhere"
    (elsewhere_ / "kept").mkdir(parents=True)
    for _ in range(2):
        with node.own_folder(folder):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert list(folder.iterdir()) == []
            (folder / "scratch").mkdir()
        assert not folder.exists()
        folder.mkdir()
        (folder / "of the start before").mkdir()
    node.shutil.rmtree(folder)
    folder.symlink_to(elsewhere_)
    with pytest.raises(MlpipeError, match="File exists") as refused, node.own_folder(folder):
        pass
    assert (refused.value.kind, refused.value.hint) == (
        "infrastructure", "write another one: slurm.scratch"
    )  # fmt: skip
    assert (folder / "kept").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder another user's")
def test_whoever_makes_the_scratch_folder_first_has_nobody_killed(tmp_path: Path, commands: Path) -> None:
    """The pid that a job tells to save is read in a folder of its own user, which is no link, or is of the
    job itself."""
    spec = pipeline_of("llm", f"slurm.scratch={tmp_path}")
    text = script(plan_of(spec, "train"), slurm_job(spec, "train"), "o")
    assert "-0/pid" not in text
    tell = text[text.index("scratch=") : text.index("ask() {")] + "tell\n"
    stand_in(commands, "srun", 'while [ "$1" != sh ]; do shift; done; SLURM_NODEID=0 exec "$@"')
    stand_in(commands, "sleep", ":")
    (name,) = re.findall(r"mlpipe-\$SLURM_JOB_ID(-\w+)", text)
    folder, kept = tmp_path / f"mlpipe-7{name}-0", tmp_path / "kept"
    with subprocess.Popen(["sh", "-c", "read _"], stdin=subprocess.PIPE) as victim:
        folder.mkdir()
        (folder / "pid").write_text(str(victim.pid))

        def told() -> int | None:
            done = subprocess.run(["bash", "-c", tell], env={**os.environ, "SLURM_JOB_ID": "7"}, timeout=60)
            return victim.poll() if done.returncode else victim.wait(60)

        os.chown(folder, 65534, -1)
        assert told() is None
        os.chown(folder, 0, -1)
        folder.rename(kept)
        folder.symlink_to(kept)
        assert told() is None
        folder.unlink()
        kept.rename(folder)
        assert told() == -signal.SIGTERM
    os.chown(folder, 65534, -1)  # as a file system shows it that maps owners: the process is the job's own
    env = {**os.environ, "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["sh", "-c", "read _"], stdin=subprocess.PIPE, env=env) as victim:
        (folder / "pid").write_text(str(victim.pid))
        assert told() == -signal.SIGTERM


def test_spares_are_asked_for_as_far_as_nodes_are_free() -> None:
    spec = pipeline_of("llm", "train.resources.preflight=auto", "train.resources.spares=2")
    plan = plan_of(spec, "train")
    text = script(plan, slurm_job(spec, "train"), "o")
    assert [line for line in text.splitlines() if line.startswith("#SBATCH --nodes")] == [
        "#SBATCH --nodes=2-4"
    ]
    assert "#SBATCH --ntasks" not in text, "or the fewest are given, by Slurm 22.05"
    assert "--nodes=2 " not in text, "each step is on all machines that came"
    every = "--nodes=$SLURM_JOB_NUM_NODES --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 "
    assert text.count(every) == 2, "when it starts, and when it is told"
    env = {"SLURM_NODEID": "3", "SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "n4"}
    assert node.variables(plan, env)["MLPIPE_NUM_MACHINES"] == "4"
    without = plan_of(pipeline_of("llm", "train.resources.preflight=auto"), "train")
    assert "MLPIPE_NUM_MACHINES" not in node.variables(without, env)


def test_groups_of_machines_are_components_that_are_no_jobs_of_their_own() -> None:
    """What is of the whole job stands once; what is of nodes for each component."""
    groups = "train.resources=[{nodes: 2}, {nodes: 1, memory: 8 GiB}]"
    options = "slurm.options={exclude: n1, mail-type: END}"
    with pytest.raises(SpecErrors, match="3 groups, and the stage's resources have 2"):
        pipeline_of("quickstart", groups, "slurm.stages={train: {groups: [{}, {}, {}]}}")
    spec = pipeline_of("quickstart", groups, options, "train.data.batch_size=9")
    plan = plan_of(spec, "train")
    plan = replace(plan, launch=plan.launch._replace(avoid=("n7",)))
    text = script(plan, slurm_job(spec, "train"), "o")
    first, second = text.partition("\n\n")[0].split("#SBATCH hetjob\n")
    assert [first.count(f"--{one}") for one in ("mail-type", "signal", "output", "comment")] == [1, 1, 1, 1]
    assert [second.count(f"--{one}") for one in ("mail-type", "signal", "output", "comment")] == [0, 0, 0, 0]
    assert [part.count("exclude=n1,n7\n") + part.count("exclude=n1,n7") for part in (first, second)] == [2, 1]
    assert "--nodes=2\n" in first
    assert "--nodes=1\n" in second
    assert "--mem=8192M\n" in second
    name = job_name(plan.run_id, "train", 1)
    assert f"--job-name={name}\n" in first
    assert not second.partition("job-name=")[2].startswith("mlpipe"), "nobody takes it for a second one"
    assert text.count("MLPIPE_FIRST_NODE=2 srun --het-group=1 --nodes=1 ") == 1
    assert text.count("'at=$0-$((2 + SLURM_NODEID)) ") == 1, "who is told is who was started there"
