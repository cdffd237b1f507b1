"""Runs of command stages as real processes: the DAG, failures, cancel, resume, dead drivers, exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner
from kit import clock
from kit.command_runs import Cli, shell, until, write_spec
from kit.synthetic_run import stage_plan, train_plan

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe._core.processes import start_time, this_process
from mlpipe.cli import wait
from mlpipe.cli.app import app
from mlpipe.cli.outcome import summary
from mlpipe.cli.session import CliSession
from mlpipe.spec.load import load_pipeline_text
from mlpipe.store import leases, runs
from mlpipe.store.folder import FolderStore
from mlpipe.store.runs import StageState
from mlpipe.submit import adopt, backends, detach, driver, held_lease, process
from mlpipe.submit.adopt import DriveRequest
from mlpipe.submit.executor import StopRequest
from mlpipe.submit.held_lease import HeldLease
from mlpipe.submit.submission import Submission

pytestmark = pytest.mark.unit

# Says that it has begun, and goes on when the test (or the file `go`) lets it.
WAITS = shell('echo begun; touch begun; while [ ! -e go ]; do sleep 0.05; done; echo ended; touch "$1/made"')


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def states(cli: Cli, run: str = "r") -> dict[str, str]:
    return {name: stage["state"] for name, stage in cli.json("status", run)["stages"].items()}


def patience(cli: Cli, seconds: float) -> None:
    """With which the next driver ends what the stage `a` left."""
    path = cli.store / "runs/r/stages/a/attempt-1/plan.json"
    plan = json.loads(path.read_text())
    plan["launch"]["shutdown_seconds"] = seconds
    path.write_text(json.dumps(plan))


def begun(cli: Cli) -> Path:
    return until(lambda: (path := cli.folder / "begun").exists() and path, "the stage to begin")


def stored(cli: Cli, run: str = "r") -> dict:
    return json.loads((cli.store / "runs" / run / "run.json").read_text())


@pytest.mark.parametrize("verb", ["run", "submit"])
@pytest.mark.parametrize("run_id", ["../x", ""])
def test_an_id_that_is_none_is_refused_before_the_store_is_made(tmp_path, monkeypatch, verb, run_id):
    monkeypatch.chdir(tmp_path)
    write_spec(tmp_path, {"a": ["true"]})
    done = CliRunner().invoke(app, [verb, "pipeline.yaml", "--run-id", run_id], obj=CliSession())
    assert f"{run_id!r} is not a run id" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline.yaml"]


def test_stages_hand_their_output_on_and_a_done_run_exits_0(cli: Cli):
    write_spec(
        cli.folder,
        {
            "make": shell('echo 42 > "$1/answer"; mkdir "$1/deep"; echo $MLPIPE_STAGE > "$1/deep/stage"'),
            "use": shell('cd "{{stages.make.output}}"; cat answer deep/stage > "$MLPIPE_OUTPUT/copy"'),
        },
        {"use": ["make"]},
    )
    done = cli("run", "pipeline.yaml", "--run-id", "r")
    assert "done" in done.stdout
    assert "report.html" in done.stdout
    copy = cli.store / "runs/r/stages/use/outputs/files/copy"
    assert copy.read_text() == "42\nmake\n"
    assert (cli.store / "runs/r/report.html").exists()
    assert not list((cli.folder / "cache" / "scratch").glob("*"))
    assert stored(cli)["driver"] is None
    assert "nothing" not in cli("resume", "r").stderr  # a done run stays as it is
    assert stored(cli)["stages"]["make"]["attempt"] == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores: stages take one each")
def test_independent_stages_run_side_by_side(cli: Cli):
    meet = "touch {0}; i=0; while [ ! -e {1} ]; do i=$((i+1)); [ $i -lt 600 ] || exit 9; sleep 0.05; done"
    write_spec(cli.folder, {"a": shell(meet.format("a", "b")), "b": shell(meet.format("b", "a"))})
    cli("run", "pipeline.yaml")


def test_what_comes_next_can_be_pasted(cli: Cli, tmp_path: Path):
    """Into a shell, whatever the folders are called; and it goes where the run went."""
    store = FolderStore(tmp_path / "my runs; touch x")
    done = {"train": StageState("done", attempt=1, outcome={"step": 3})}
    meta = {"spec": "my specs/a.yaml", "stages": ["train"]}
    for backend, start in (("local", ["run"]), ("kubernetes", ["submit", "--to", "kubernetes"])):
        runs.create_run(store, backend, "", "sha", ["train"], backend, meta)
        run = runs.update_run(store, backend, lambda run: replace(run, state="done", stages=done))
        plan = stage_plan(backend, "train", work=train_plan(3))
        store.put(f"{run.attempt_key('train')}/plan.json", plan.to_json().encode())
        lines = [line.strip() for line in summary(store, run, None).partition("next:")[2].splitlines()]
        commands = [shlex.split(line, comments=True) for line in lines if line]
        assert commands[0][:-2] == ["mlpipe", *start, "my specs/a.yaml", "--store", store.url]
        assert all(command[command.index("--store") + 1] == store.url for command in commands)


def test_a_failed_stage_exits_3_with_its_last_lines_and_the_others_go_on(cli: Cli):
    write_spec(
        cli.folder,
        {
            "bad": shell("echo one; echo 'the disk is on fire' >&2; exit 7"),
            "after": shell("true"),
            "later": shell("true"),
            "aside": shell("true"),
        },
        {"after": ["bad"], "later": ["after"]},
    )
    document = cli.json("run", "pipeline.yaml", "--run-id", "r", code=3)
    assert document["state"] == "failed"
    assert states(cli) == {"bad": "failed", "after": "skipped", "later": "skipped", "aside": "done"}
    bad = document["stages"]["bad"]
    assert bad["exit_code"] == 7
    assert "the disk is on fire" in bad["message"]
    assert "the disk is on fire" in cli("logs", "r", "--stage", "bad").stdout


def test_a_stage_killed_by_the_system_exits_3_and_names_the_signal(cli: Cli):
    write_spec(cli.folder, {"a": shell("kill -9 $$")})
    assert "SIGKILL (out of memory?)" in cli("run", "pipeline.yaml", code=3).stdout


def test_a_program_that_is_not_there_exits_2(cli: Cli):
    write_spec(cli.folder, {"a": ["no-such-program-anywhere"]})
    assert "no program 'no-such-program-anywhere'" in cli("run", "pipeline.yaml", code=2).stdout


def test_a_stage_that_outlives_its_timeout_exits_3(cli: Cli):
    write_spec(cli.folder, {"a": shell("sleep 300")}, a={"timeout": "1 s"})
    assert "timeout of 1 s" in cli("run", "pipeline.yaml", code=3).stdout


def test_a_store_that_is_deleted_under_a_run_exits_4(cli: Cli):
    """Under its driver, and under one who follows."""
    write_spec(cli.folder, {"a": shell(f"rm -r {cli.store}")})
    for verb in (["run"], ["submit", "--to", "local", "--wait"]):
        done = cli(*verb, "pipeline.yaml", "--run-id", "r", code=4)
        assert "somebody deleted" in done.stderr  # run.json, or the folder that is written into


def test_more_than_this_machine_has_is_refused_before_anything_runs(cli: Cli):
    cli("init", ".")
    more = "stages.train.resources"
    done = cli("run", "pipeline.yaml", "--set", f"{more}.nodes=2", code=2)
    assert f"--set {more}.nodes=1" in done.stderr
    asks = (f"{more}.gpus_per_node=8", f"{more}.gpu=L4", f"{more}.workers_per_node=8")
    done = cli("run", "pipeline.yaml", *(word for ask in asks for word in ("--set", ask)), code=2)
    assert "asks for 8 GPUs" in done.stderr
    assert cli.json("list")["runs"] == []


def test_tools_beside_python_are_found_without_activation(cli: Cli):
    write_spec(cli.folder, {"a": ["python", "-c", "import mlpipe"]})
    cli.env["PATH"] = "/usr/bin:/bin"
    cli("run", "pipeline.yaml")


def test_cancel_from_another_shell_then_resume_skips_what_is_done(cli: Cli):
    write_spec(
        cli.folder,
        {"first": shell('touch "$1/x"'), "second": WAITS, "third": shell("true")},
        {"second": ["first"], "third": ["second"]},
    )
    run = cli("submit", "pipeline.yaml", "--to", "local").stdout.strip()
    begun(cli)
    listed = cli.json("list")["runs"]
    assert [(found["run_id"], found["state"]) for found in listed] == [(run, "running")]
    assert "driven by process" in cli("status", run).stdout
    assert cli.json("cancel", run)["state"] == "cancelled"
    assert states(cli, run) == {"first": "done", "second": "cancelled", "third": "pending"}
    assert "cancelled by" in stored(cli, run)["message"]
    cli.json("cancel", run)  # again is no error
    (cli.folder / "go").touch()
    document = cli.json("resume", run)
    assert document["state"] == "done"
    assert [stage["attempt"] for stage in document["stages"].values()] == [1, 2, 1]


@pytest.mark.parametrize("is_heard", [True, False])
def test_ctrl_c_once_lets_the_stage_end_in_peace_and_exits_130(cli: Cli, is_heard: bool):
    """Also before `2>&1 | tee log`, which Ctrl-C ends first."""
    peace = shell("trap 'echo goodbye; exit 0' TERM; touch begun; while :; do sleep 0.05; done")
    write_spec(cli.folder, {"a": peace})
    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    begun(cli)
    if not is_heard:
        running.stderr.close()
        running.stderr = None
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 130
    assert not is_heard or "Ctrl-C again" in err
    assert "mlpipe resume r" in out
    assert states(cli) == {"a": "cancelled"}
    assert "goodbye" in cli("logs", "r").stdout


def test_ctrl_c_twice_stops_at_once(cli: Cli):
    write_spec(cli.folder, {"a": shell("trap '' TERM; touch begun; while :; do sleep 0.05; done")})
    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    begun(cli)
    holder = stored(cli)["driver"]["holder"]
    running.send_signal(signal.SIGINT)
    assert running.stderr is not None
    until(lambda: "Ctrl-C again" in running.stderr.readline(), "the first to be understood")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=300)
    assert running.returncode == 130
    assert stored(cli)["state"] == "cancelled"
    assert process.members(holder) == []


def test_sigterm_to_the_driver_exits_5(cli: Cli):
    write_spec(cli.folder, {"a": WAITS})
    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    begun(cli)
    running.terminate()
    running.communicate(timeout=300)
    assert running.returncode == 5
    assert stored(cli)["state"] == "cancelled"


def test_a_killed_driver_takes_its_stages_along_and_resume_goes_on(cli: Cli):
    # One child ignores SIGTERM in a session of its own: nothing but the driver's mark in it finds it.
    stubborn = shell(
        "setsid sh -c 'trap \"\" TERM; touch begun; while :; do sleep 0.05; done' & "
        "while [ ! -e go ]; do sleep 0.05; done"
    )
    write_spec(cli.folder, {"done": shell("true"), "a": stubborn}, {"a": ["done"]})
    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    begun(cli)
    holder = stored(cli)["driver"]["holder"]
    running.kill()
    running.communicate()
    patience(cli, 1.0)
    assert "nobody drives it; go on with mlpipe resume r" in cli("status", "r").stdout
    assert "nobody drives it: mlpipe resume r" in cli("list").stdout
    (cli.folder / "go").touch()
    resumed = cli("resume", "r")
    assert "the driver of run r is gone: waits until what is left of a has saved and ended" in resumed.stderr
    document = cli.json("status", "r")
    assert document["state"] == "done"
    assert [stage["attempt"] for stage in document["stages"].values()] == [1, 2]
    assert "is gone" not in cli("resume", "r").stderr
    assert process.members(holder) == []


@pytest.mark.parametrize("half", ["of this pipeline", "of another"])
def test_an_id_that_a_dead_client_claimed_is_shown_taken_over_or_cleared(cli: Cli, half: str):
    cli.shorten("mlpipe.store.runs:_CLAIM_SECONDS", 0.5)
    spec = write_spec(cli.folder, {"a": shell("true")})
    for run in ("r", "s"):
        claimed = cli.store / "runs" / run / "pipeline.yaml"
        claimed.parent.mkdir(parents=True)
        claimed.write_text(spec.read_text() + ("" if half == "of this pipeline" else "# before"))
        (cli.store / "index" / run).mkdir(parents=True)
        (cli.store / "index" / run / "000000-claimed").touch()
    listed = cli("list").stdout
    assert listed.count("claimed") == 2
    assert "mlpipe cancel r" in listed
    assert "was claimed and not begun" in cli("status", "r", code=2).stderr
    cli("submit", "pipeline.yaml", "--run-id", "r", "--wait")
    assert (cli.store / "runs/r/pipeline.yaml").read_text() == spec.read_text()
    assert "its id is free again" in cli("cancel", "s").stdout
    assert not (cli.store / "runs/s/pipeline.yaml").exists()
    assert [found["state"] for found in cli.json("list")["runs"]] == ["done"]


def test_cancel_replaces_a_dead_driver(cli: Cli):
    write_spec(cli.folder, {"a": WAITS, "b": shell("true")}, {"b": ["a"]})
    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    begun(cli)
    holder = stored(cli)["driver"]["holder"]
    running.kill()
    running.communicate()
    assert cli.json("cancel", "r")["state"] == "cancelled"
    assert states(cli) == {"a": "cancelled", "b": "skipped"}
    assert process.members(holder) == []


def test_a_run_has_one_driver(cli: Cli):
    write_spec(cli.folder, {"a": WAITS})
    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    begun(cli)
    assert "is driven by process" in cli("resume", "r", code=2).stderr
    running.terminate()
    running.communicate(timeout=300)
    (cli.folder / "begun").unlink()
    rivals = [cli.start("resume", "r") for _ in range(3)]
    begun(cli)
    (cli.folder / "go").touch()
    codes = []
    for rival in rivals:
        rival.communicate(timeout=300)
        codes.append(rival.returncode)
    assert 0 in codes
    assert set(codes) <= {0, 2}  # 0 also of one that came when the run was done
    assert stored(cli)["stages"]["a"]["attempt"] == 2


def test_submit_wait_exits_as_the_run_does_and_ctrl_c_only_detaches(cli: Cli):
    write_spec(cli.folder, {"a": WAITS})
    waiting = cli.start("submit", "pipeline.yaml", "--run-id", "r", "--wait")
    begun(cli)
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=300)
    assert waiting.returncode == 130, err
    assert "detached; run r goes on" in err
    again = cli.start("submit", "pipeline.yaml", "--run-id", "r", "--wait", "--output", "json")
    (cli.folder / "go").touch()
    out, _ = again.communicate(timeout=300)
    assert again.returncode == 0
    assert json.loads(out)["state"] == "done"
    assert Path(json.loads(out)["report"]).exists()
    assert stored(cli)["stages"]["a"]["attempt"] == 1  # adopted, not started again


def test_submit_of_another_pipeline_under_a_taken_id_is_refused(cli: Cli):
    write_spec(cli.folder, {"a": shell("true")})
    cli("submit", "pipeline.yaml", "--run-id", "r", "--wait")
    write_spec(cli.folder, {"a": shell("false")})
    assert "another pipeline" in cli("submit", "pipeline.yaml", "--run-id", "r", code=2).stderr


def test_stages_one_by_one(cli: Cli):
    write_spec(cli.folder, {"a": shell("true"), "b": shell("true")}, {"b": ["a"]})
    one = ("submit", "pipeline.yaml", "--run-id", "r", "--wait", "--stage")
    assert "has not done" in cli(*one, "b", code=2).stderr
    cli(*one, "a")
    assert states(cli) == {"a": "done", "b": "pending"}
    cli(*one, "b")
    assert stored(cli)["state"] == "done"


def test_stages_that_are_asked_for_at_once_share_a_driver_and_outlive_it(cli: Cli):
    """Each waits for the other's file. When the driver is killed, one of those who follow starts the next."""
    waits = "touch $PWD/%s; until [ -e %s ]; do sleep 0.05; done; until [ -e go ]; do sleep 0.05; done"
    write_spec(cli.folder, {"b": shell(waits % ("b", "c")), "c": shell(waits % ("c", "b"))})
    one = ("submit", "pipeline.yaml", "--run-id", "r", "--wait", "--stage")
    waiting = [cli.start(*one, name) for name in "bc"]  # the first also makes the run
    until(lambda: (cli.folder / "b").exists() and (cli.folder / "c").exists(), "both stages")
    driver = stored(cli)["driver"]
    os.kill(driver["pid"], signal.SIGKILL)
    until(lambda: (stored(cli)["driver"] or driver)["holder"] != driver["holder"], "another driver")
    (cli.folder / "go").touch()
    for one_waiting in waiting:
        _, err = one_waiting.communicate(timeout=300)
        assert one_waiting.returncode == 0, err
    run = stored(cli)
    assert run["state"] == "done"
    assert [stage["attempt"] for stage in run["stages"].values()] == [2, 2]
    assert list((cli.store / "runs/r/wanted").glob("*")) == []


def test_what_dry_run_prints_is_what_runs(cli: Cli):
    show = (
        'echo "$0 $1" > "$1/seen"; env | grep -E "^(MLPIPE_|GREETING)" | grep -v DRIVER | sort >> "$1/seen"'
    )
    greeting = {"env": {"GREETING": "hello {{{{ {{output}}"}}
    later = [*shell('echo "$0 $1" > "$0/seen"')[:3], "{{output}}", "{{{{ {{stages.a.output}}/seen"]
    write_spec(cli.folder, {"a": shell(show), "b": later}, {"b": ["a"]}, a=greeting)
    printed = cli.json("submit", "pipeline.yaml", "--run-id", "r", "--dry-run")
    assert not cli.store.exists()
    cli("run", "pipeline.yaml", "--run-id", "r")
    stage, after = printed["stages"]
    assert after["argv"][-1] == later[-1]  # the output of a stage that has made none yet stays its name
    seen_later = f"{after['argv'][-2]} {{{{ {cli.store}/runs/r/stages/a/outputs/files/seen\n"
    assert (cli.store / "runs/r/stages/b/outputs/files/seen").read_text() == seen_later
    plan = json.loads((cli.store / "runs/r/stages/a/attempt-1/plan.json").read_text())
    assert stage["plan"] == plan
    assert stage["env"]["GREETING"] == f"hello {{{{ {stage['argv'][-1]}"
    seen = (cli.store / "runs/r/stages/a/outputs/files/seen").read_text().splitlines()
    assert seen[0] == " ".join(stage["argv"][-2:])
    ours = {name: value for name, value in cli.env.items() if name.startswith("MLPIPE_")}
    assert seen[1:] == sorted(f"{key}={value}" for key, value in {**stage["env"], **ours}.items())


def test_a_command_that_asks_for_more_gpus_than_there_are_says_so_and_runs(cli: Cli):
    three, one = ({"resources": {"gpus_per_node": number, "gpu": "H100-80GB"}} for number in (3, 1))
    write_spec(cli.folder, {"a": shell("true"), "b": shell("true")}, a=three, b=one)
    for visible, said in {"0": "is 1", "0,1": "are 2"}.items():
        cli.env["CUDA_VISIBLE_DEVICES"] = visible
        done = cli("run", "pipeline.yaml", "--run-id", f"r{visible[-1]}")
        assert done.stderr.count("asks for") == 1
        assert f"'a' asks for 3 GPUs, and there {said} here: its command runs all the same" in done.stderr
        assert states(cli, f"r{visible[-1]}") == {"a": "done", "b": "done"}


def test_logs_can_be_cut_and_followed(cli: Cli):
    write_spec(cli.folder, {"a": shell("seq 100"), "b": WAITS}, {"b": ["a"]})
    cli("submit", "pipeline.yaml", "--run-id", "r")
    begun(cli)
    until(lambda: "begun" in cli("logs", "r").stdout, "the log to arrive")
    following = cli.start("logs", "-f", "r", "--stage", "b")
    assert following.stdout is not None
    assert following.stdout.readline() == "begun\n"
    (cli.folder / "go").touch()
    out, _ = following.communicate(timeout=300)
    assert following.returncode == 0
    assert out == "ended\n"
    assert cli("logs", "r", "--stage", "a", "--tail", "2").stdout == "99\n100\n"
    assert cli("logs", "r", "--tail", "1").stdout == "a | 100\nb | ended\n"
    assert cli.json("logs", "r", "--stage", "b")["logs"][0]["text"] == "begun\nended\n"


def test_an_output_that_was_committed_counts_even_if_nobody_noted_it(cli: Cli):
    write_spec(cli.folder, {"a": shell('date +%N > "$1/x"'), "b": shell("exit 1")}, {"b": ["a"]})
    cli("run", "pipeline.yaml", "--run-id", "r", code=3)
    run = stored(cli)
    run["stages"]["a"] |= {"state": "running", "outcome": {}}
    (cli.store / "runs/r/run.json").write_text(json.dumps(run))
    made = (cli.store / "runs/r/stages/a/outputs/files/x").read_text()
    cli("resume", "r", code=3)
    assert stored(cli)["stages"]["a"]["state"] == "done"
    assert stored(cli)["stages"]["a"]["attempt"] == 1
    assert (cli.store / "runs/r/stages/a/outputs/files/x").read_text() == made


def test_overrides_are_kept_over_resumes(cli: Cli):
    write_spec(cli.folder, {"a": shell("exit ${CODE}")}, a={"env": {"CODE": "1"}})
    cli("run", "pipeline.yaml", "--run-id", "r", "--set", "stages.a.env.CODE=4", code=3)
    assert stored(cli)["stages"]["a"]["exit_code"] == 4
    cli("resume", "r", code=3)
    assert stored(cli)["stages"]["a"]["exit_code"] == 4
    cli("resume", "r", "--set", "stages.a.env.CODE=0")
    assert stored(cli)["state"] == "done"


def test_a_terminal_gets_ctrl_c_through_its_line_discipline(cli: Cli):
    write_spec(cli.folder, {"a": WAITS})
    ours, theirs = os.openpty()
    # setsid --ctty makes the pty the controlling terminal of a new session, as a login shell has it
    running = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *cli_argv("run", "pipeline.yaml", "--run-id", "r")],
        cwd=cli.folder,
        env={**cli.env, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    begun(cli)
    os.write(ours, b"\x03")
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # EIO: the other side closed the terminal
        os.close(ours)
    assert running.wait(timeout=300) == 130, seen.decode()
    assert b"stopping: saving at the next step (Ctrl-C again: at once)" in seen
    assert b"\x1b[" in seen  # colours, on a terminal
    assert stored(cli)["state"] == "cancelled"


def cli_argv(*arguments: str) -> list[str]:
    import sys

    return [sys.executable, "-m", "mlpipe.cli", *arguments]


@pytest.mark.parametrize("is_first", [True, False])
def test_who_submits_a_run_second_at_once_leaves_it_to_the_first(tmp_path, monkeypatch, is_first):
    store = FolderStore(tmp_path / "store")
    runs.create_run(store, "r", "version: 1\n", "d", ["a"], "local", {"folder": str(tmp_path)})

    def argv(*_: object, seen: int) -> list[str]:
        if not is_first:
            other = runs.Lease("other", "elsewhere", 1, time.time() + 600, "another", 1)
            runs.update_run(store, "r", lambda run: replace(run, driver=other))
        return ["sh", "-c", "echo error: no >&2; exit 2"]

    monkeypatch.setattr(detach, "driver_argv", argv)
    if is_first:
        with pytest.raises(SubmitError, match="the driver ended at once: no") as caught:
            detach.detach(store, "r")
        assert caught.value.kind == "input"
    else:
        detach.detach(store, "r")
    log = detach.driver_log(store, "r")
    log.unlink()
    log.symlink_to(tmp_path / "mine")  # by others who write into the store
    with pytest.raises(SubmitError, match="cannot be written"):
        detach.detach(store, "r")
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("said", "fault", "words"),
    [
        ("", errno.ENOSPC, " (no space, or no quota, is left on the disk of {store})"),
        (
            "Traceback (most recent call l",
            errno.EDQUOT,
            " (no space, or no quota, is left on the disk of {store})",
        ),
        (
            "error: one\nsteps\nerror: run.json: no space left\n  hint: free some\n",
            errno.ENOSPC,
            " (run.json: no space left)",
        ),
        ("error: one\nsteps\n", errno.EACCES, ""),  # it was killed
        ("error: one\nsteps\n", None, ""),
    ],
)
def test_why_a_driver_has_ended_is_said(tmp_path, monkeypatch, said, fault, words):
    """Of a full disk `submit` said that there is a bug, or nothing, and `status` that nobody drives it."""
    store = FolderStore(tmp_path / "store")
    runs.create_run(store, "r", "version: 1\n", "d", ["a"], "local", {"folder": str(tmp_path)})
    script = ["sh", "-c", f"printf '{said}'; exit 4"]
    monkeypatch.setattr(detach, "driver_argv", lambda *_, seen: script)
    if fault is not None:
        refused = mock.Mock(side_effect=OSError(fault, os.strerror(fault)))
        monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    words = words.format(store=store.url)
    with pytest.raises(SubmitError, match="the driver ended at once: ") as caught:
        detach.detach(store, "r")
    assert caught.value.kind == "infrastructure"
    assert words[2:-1] in caught.value.message
    run = runs.read_run(store, "r")
    why = backends.of_run(run).why_undriven
    assert why(store, run) == f"nobody drives it{words}; go on with mlpipe resume r"
    late = replace(run, updated=time.time() + 100)  # driven by another since, in a terminal
    assert why(store, late) == "nobody drives it; go on with mlpipe resume r"


def test_a_disk_that_takes_a_part_of_a_write_is_full(tmp_path, monkeypatch):
    with open(tmp_path / "part", "wb", buffering=0) as part:
        taken = mock.MagicMock(**{"write.return_value": 100, "fileno.return_value": part.fileno()})
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: contextlib.nullcontext(taken))
        assert detach._is_full(tmp_path)
    monkeypatch.undo()
    assert not detach._is_full(tmp_path)


@pytest.mark.parametrize("late", [100, -20, 7200, 3590])
def test_a_driver_whose_clock_is_another_one_is_not_driven_out(tmp_path, monkeypatch, late):
    """Its lease is over by this machine's clock, but it renews it; one that is silent is taken over. The last
    one is a process of this machine, whose clock has jumped an hour."""
    store = FolderStore(tmp_path)
    runs.create_run(store, "r", "version: 1\n", "d", ["a"], "local", {})
    lease = runs.Lease("other", "elsewhere", 1, time.time() - late, "another", 1)
    if late == 3590:
        parent = os.getppid()
        known = {"namespace": this_process().namespace, "started": start_time(parent)}
        lease = replace(lease, pid=parent, **known)
    runs.update_run(store, "r", lambda run: replace(run, driver=lease))

    class Elsewhere(clock.Clock):
        def sleep(self, seconds):
            super().sleep(seconds)
            if is_alive and len(self.pauses) == 9:
                expires = time.time() + 60 if late == 3590 else lease.expires + 10
                renewed = replace(lease, expires=expires)
                runs.update_run(store, "r", lambda run: replace(run, driver=renewed))

    for is_alive in (True, False):
        monkeypatch.setattr(held_lease, "time", passes := Elsewhere())
        runs.update_run(store, "r", lambda run: replace(run, driver=lease))
        if late == 100 and is_alive:
            with pytest.raises(
                StoreError, match="on elsewhere, whose clock and this machine's differ"
            ) as caught:
                HeldLease(store, "r").__enter__()
            assert caught.value.kind == "input"
        elif late < 0 or (late == 3590 and is_alive):
            with pytest.raises(StoreError, match=rf"is driven by process {lease.pid} on elsewhere"):
                HeldLease(store, "r").__enter__()
        else:
            notes: list[str] = []
            with HeldLease(store, "r", note=notes.append) as held:
                assert runs.read_run(store, "r").driver.holder == held.holder
            assert (sum(passes.pauses) > 10) == (late in (100, 3590))
            watched = " s ago by this machine's clock: watching for 15 s whether it still is"
            assert [watched in text for text in notes] == [True] * (late in (100, 3590))


def test_who_asks_for_a_stage_is_not_taken_for_heard_while_checkpoints_are_deleted(tmp_path, monkeypatch):
    """A driver's Job that began just then ended as done, and nobody drove the stage."""
    store = FolderStore(tmp_path / "store")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_spec(tmp_path, {"a": shell("true")})
    text = (tmp_path / "pipeline.yaml").read_text()
    pipeline = load_pipeline_text(text, "x")
    runs.create_run(store, "r", text, pipeline.digest, ["a"], "local", {"folder": str(tmp_path)})
    options = driver.DriveOptions("a", for_followers=True, trust_store=True)
    with HeldLease(store, "r"):
        assert driver.drive(store, "r", options, stop=StopRequest()).state == "pending"  # that one hears it
    with HeldLease(store, "r", deletes=True), pytest.raises(StoreError, match="are being deleted by process"):
        driver.drive(store, "r", options, stop=StopRequest())

    def refused(*_: object) -> None:
        """By a deletion that has ended when the driver looks who it was."""
        with HeldLease(store, "r", deletes=True):
            leases.is_driven(store, runs.read_run(store, "r"))

    monkeypatch.setattr(driver, "_lease", refused)
    with pytest.raises(StoreError, match="are being deleted by process"):
        driver.drive(store, "r", options, stop=StopRequest())


def test_a_run_is_neither_made_nor_begun_where_its_driver_has_no_scratch(tmp_path, monkeypatch):
    """It said that it runs, for ever. A driver elsewhere has scratch of its own."""
    store, backend = FolderStore(tmp_path / "store"), backends.load("local")({})
    spec = write_spec(tmp_path, {"a": shell("true")})
    text = spec.read_text()
    pipeline = load_pipeline_text(text, "x")
    asked = Submission(str(spec), text, (), pipeline, store.url, str(tmp_path), run_id="r")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MLPIPE_CACHE", str(spec))
    with pytest.raises(SubmitError, match=r"scratch: cannot be written: Not a directory") as caught:
        adopt.create(store, backend, asked, CliSession())
    assert "MLPIPE_CACHE" in caught.value.hint
    assert not store.root.exists()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(type(backend), "has_own_driver", True)
        adopt.create(store, backend, asked, CliSession())
    made = runs.read_run(store, "r")
    with pytest.raises(SubmitError, match="scratch: cannot be written"):
        driver.drive(store, "r", stop=StopRequest())
    assert runs.read_run(store, "r") == made
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))
    assert driver.drive(store, "r", stop=StopRequest()).state == "done"
    assert list((tmp_path / "cache/scratch").iterdir()) == []


@pytest.mark.parametrize("state", ["running", "done"])
def test_who_deletes_checkpoints_drives_nothing_and_keeps_nobody_from_the_end(tmp_path, monkeypatch, state):
    store, session = FolderStore(tmp_path), CliSession()
    runs.create_run(store, "r", "version: 1\n", "d", ["a"], "local", {"folder": str(tmp_path)})
    runs.update_run(store, "r", lambda run: replace(run, state=state))
    request = DriveRequest(backends.load("local"), store, "r", None, None, session)

    class Deleting(clock.Clock):
        def sleep(self, seconds):
            super().sleep(seconds)
            held.__exit__()

    monkeypatch.setattr(wait, "time", passes := Deleting())
    with HeldLease(store, "r", deletes=True) as held:
        status = ["status", "r", "--store", store.url, "--output"]
        text, document = (
            CliRunner().invoke(app, [*status, form], obj=CliSession()).stdout for form in ("text", "json")
        )
        assert ("\n  held, to delete checkpoints, by process" in text) == (state == "running")
        assert json.loads(document)["driver_alive"] is False
        if state == "done":
            assert (wait.wait_for(session, request), passes.pauses) == (0, [])
        else:  # no driver could start now
            with pytest.raises(SubmitError, match="the driver of run r is gone"):
                wait.wait_for(session, request)
            assert passes.pauses


def test_a_run_that_is_cancelled_before_its_driver_begins_is_not_begun(tmp_path, monkeypatch):
    """`submit` starts the driver as `mlpipe resume`: it went on with what `cancel` had said is cancelled."""
    store = FolderStore(tmp_path)
    runs.create_run(store, "r", "version: 1\n", "d", ["a"], "local", {"folder": str(tmp_path)})
    started: list[int] = []

    def argv(*_: object, seen: int) -> list[str]:
        driver.cancel(store, "r", "asked to", timeout_seconds=5)
        started.append(seen)
        return ["sh", "-c", "exit 5"]

    monkeypatch.setattr(detach, "driver_argv", argv)
    detach.detach(store, "r")
    ended = driver.drive(store, "r", driver.DriveOptions(seen=started[0]), stop=StopRequest())
    assert (ended.state, started) == ("cancelled", [1])


def test_a_run_that_ends_while_it_is_cancelled_stays_as_it_ended(tmp_path, monkeypatch):
    store = FolderStore(tmp_path)
    runs.create_run(store, "r", "version: 1\n", "d", ["a"], "local", {})

    class Quick:
        def clear(self, *_, **__):
            runs.update_run(store, "r", lambda run: replace(run, state="done"))

    monkeypatch.setattr(backends, "of_run", lambda run: Quick())
    assert driver.cancel(store, "r", "asked to", timeout_seconds=5).state == "done"


def test_drivers_that_alternate_are_not_watched_for_ever(tmp_path, monkeypatch):
    """Each took the lease from the other, by a clock that is 100 s behind."""
    store = FolderStore(tmp_path)
    runs.create_run(store, "r", "version: 1\n", "d", ["a"], "local", {})

    def take(number: int) -> None:
        lease = runs.Lease(f"other-{number % 2}", "elsewhere", 1, time.time() - 100 + number, "another", 1)
        runs.update_run(store, "r", lambda run: replace(run, driver=lease))

    class Elsewhere(clock.Clock):
        def sleep(self, seconds):
            super().sleep(seconds)
            assert len(self.pauses) < 100, "it waits for ever"
            if len(self.pauses) % 9 == 0:
                take(len(self.pauses))

    take(0)
    monkeypatch.setattr(held_lease, "time", passes := Elsewhere())
    with pytest.raises(StoreError, match="on elsewhere, whose clock and this machine's differ"):
        HeldLease(store, "r").__enter__()
    assert len(passes.pauses) == 9
