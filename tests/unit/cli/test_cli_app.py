"""The group of verbs: its help is cheap, its errors are words and documented exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from kit.command_runs import Cli
from kit.rendered import PIPELINES, QUICKSTART

from mlpipe._core.errors import EXIT_CODES
from mlpipe.cli import app, session

pytestmark = pytest.mark.unit
HEAVY = (
    "torch",
    "kubernetes",
    "jenkins",
    "minio",
    "pydantic",
    "numpy",
    "yaml",
    "prometheus_client",
    "urllib3",
)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_help_imports_nothing_heavy():
    script = f"""
import sys
from mlpipe.cli.app import run_app
try:
    run_app(["--help"])
except SystemExit as exit:
    assert exit.code == 0
    print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", app.VERBS)
def test_help_of_every_verb_imports_nothing_heavy(verb: str):
    script = f"""
import sys
from mlpipe.cli.app import run_app
try:
    run_app([{verb!r}, "--help"])
except SystemExit as exit:
    assert exit.code == 0
    print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_verb_takes_the_shared_options(cli: Cli):
    def leaves(command):
        return (
            [leaf for sub in command.commands.values() for leaf in leaves(sub)]
            if hasattr(command, "commands")
            else [command]
        )

    for verb in app.VERBS:
        for leaf in leaves(app.app.get_command(None, verb)):
            options = {option for parameter in leaf.params for option in parameter.opts}
            assert {"--output", "--store", "--quiet", "--debug"} <= options, verb


def test_a_usage_error_exits_2_and_suggests(cli: Cli):
    done = cli("staus", "x", code=2)
    assert "Did you mean 'status'?" in done.stderr
    for word, verb in {"stop": "cancel", "ls": "list", "version": "--version"}.items():  # of other tools
        assert f"Did you mean {verb!r}?" in cli(word, "x", code=2).stderr
    assert {*app._ELSEWHERE.values()} - app.VERBS.keys() == {"--help", "--version"}
    cli("status", code=2)
    cli("--nonsense", code=2)


def test_bad_input_exits_2_with_a_hint(cli: Cli):
    done = cli("status", "nobody", code=2)
    assert done.stdout == ""
    assert "there is no run nobody" in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in cli("status", "nobody", "--debug", code=2).stderr


def test_an_error_is_a_document_under_json(cli: Cli):
    error = cli.json("status", "nobody", code=2)["error"]
    assert error["kind"] == "input"
    assert "no run" in error["message"]


@pytest.mark.parametrize("words", [("--nope", "--output", "json"), ("--output=json", "--nope")])
def test_a_mistake_in_the_command_line_is_a_document_under_json(cli: Cli, words: tuple[str, ...]):
    error = json.loads(cli("status", *words, code=2).stdout)["error"]
    assert (error["kind"], error["where"], error["hint"]) == ("input", None, "mlpipe status --help")
    assert "--nope" in error["message"]
    assert cli("validate", "p.yaml", "--set", "a=--output json", "--nope", code=2).stdout == ""  # of a value


def test_infrastructure_exits_4(cli: Cli):
    cli.store.mkdir()
    (cli.store / "probe").write_text("a file where a folder should be")
    (cli.folder / "pipeline.yaml").write_text("version: 1\nname: a\nstages: [{name: a, command: ['true']}]\n")
    assert "error:" in cli("run", "pipeline.yaml", code=4).stderr


def test_a_store_that_is_a_file_exits_2(cli: Cli):
    cli.store.write_text("a file where the store's folder should be")
    assert f"{cli.store}: is a file; a folder is needed here" in cli("list", code=2).stderr


def test_a_bug_exits_1_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def broken(self, *_):
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(session.CliSession, "open_store", broken)
    with pytest.raises(SystemExit) as exit_:
        app.run_app(["list"])
    assert exit_.value.code == EXIT_CODES["bug"] == 1
    err = capsys.readouterr().err
    assert err == "a bug in mlpipe: ZeroDivisionError: of all things; run again with --debug to see where\n"
    with pytest.raises(SystemExit):
        app.run_app(["list", "--debug"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "/full/x"), "error: /full/x: No space left on device"),
        (MemoryError(), "error: this process has no memory left"),
    ],
)
def test_what_the_machine_refuses_is_no_bug(monkeypatch, capsys, error: Exception, words: str):
    def refused(self, *_):
        raise error

    monkeypatch.setattr(session.CliSession, "open_store", refused)
    with pytest.raises(SystemExit) as exit_:
        app.run_app(["list"])
    assert exit_.value.code == EXIT_CODES["infrastructure"]
    assert words in capsys.readouterr().err


def test_a_note_that_nobody_can_hear_ends_nothing(monkeypatch: pytest.MonkeyPatch):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        session.CliSession().note("a terminal that is gone")
        session.CliSession().write("\rlikewise")
        monkeypatch.undo()


def test_a_traceback_that_nobody_can_hear_changes_no_exit_code(cli: Cli):
    """As of a driver whose log is on a full disk: it was a bug."""
    argv = [sys.executable, "-m", "mlpipe.cli", "status", "r", "--debug", "--store", str(cli.store)]
    with open("/dev/full", "w") as full:
        assert subprocess.run(argv, stderr=full, timeout=300, check=False).returncode == 2


def test_streams_that_are_closed_are_nowhere(cli: Cli):
    argv = [sys.executable, "-m", "mlpipe.cli", "list", "--store", str(cli.store)]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *argv]
    assert subprocess.run(closed, timeout=300, check=False).returncode == 0


def test_ctrl_c_while_a_module_is_imported_exits_130(tmp_path: Path):
    """See `session.Interrupt`: what was caught must not come back as death by SIGINT."""
    (tmp_path / "interrupted.py").write_text(
        "from mlpipe.cli import app\n"
        "def main(*_, **__):\n"
        "    try:\n"
        "        exec('import os, signal; os.kill(os.getpid(), signal.SIGINT)')\n"
        "    except KeyboardInterrupt:\n"
        "        return 130\n"
        "app.app.main = main\n"
        "app.run_app()\n"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, timeout=300)
    assert done.returncode == EXIT_CODES["interrupted"]


@pytest.mark.parametrize("word", ["schema", "--help", "--version"])
def test_a_reader_that_leaves_is_no_error(cli: Cli, word: str):
    process = cli.start(word)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=300) == 141


def test_no_colour_without_a_terminal_or_with_no_color(cli: Cli):
    assert "\x1b" not in cli("doctor", code=None).stdout


def test_json_of_verbs_without_a_run(cli: Cli):
    assert cli.json("list")["runs"] == []
    assert cli.json("schema")["type"] == "object"
    assert {"usable", "findings"} <= cli.json("doctor", code=None).keys()


def test_init_writes_a_valid_pipeline_once(cli: Cli):
    done = cli.json("init", "new")
    assert cli.json("validate", done["file"])["valid"]
    assert "exists already" in cli("init", "new", code=2).stderr
    shipped = Path(__file__).resolve().parents[3] / "pipelines" / "quickstart.yaml"
    assert (cli.folder / done["file"]).read_bytes() == shipped.read_bytes()
    for folder, pasted in {"a b": "'a b/pipeline.yaml'", "-x": "./-x/pipeline.yaml"}.items():
        assert cli("init", "--", folder).stdout.endswith(f"; run it with: mlpipe run {pasted}\n")


def test_init_writes_the_store_that_is_given(cli: Cli):
    for store in ("s3://bucket/x", "~/my runs: #1"):
        file = cli.json("init", store[-1], "--store", store)["file"]
        assert yaml.safe_load((cli.folder / file).read_text())["store"] == store
        assert cli.json("validate", file)["valid"]
    assert "names no bucket" in cli("init", "bad", "--store", "s3://b", code=2).stderr
    assert not (cli.folder / "bad").exists()


@pytest.mark.parametrize(
    ("number", "code", "hint"), [(errno.EROFS, 4, "is it full, read-only"), (errno.ENOTDIR, 2, "is a file")]
)
def test_a_file_that_cannot_be_written_says_what_to_do(
    monkeypatch, capsys, number: int, code: int, hint: str
):
    def refused(self, *_, **__):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(SystemExit) as exit_:
        app.run_app(["init", "new"])
    assert exit_.value.code == code
    told = capsys.readouterr().err
    assert f"error: new: {os.strerror(number)}\n  hint: " in told
    assert hint in told


def test_validate_prints_every_mistake_and_exits_2(cli: Cli):
    (cli.folder / "bad.yaml").write_text(
        "version: 1\nname: UPPER\nstagess: []\n"
        "stages:\n  - {name: a, comand: [x]}\n  - {name: a, command: []}\n"
    )
    done = cli("validate", "bad.yaml", code=2)
    assert done.stdout.count("bad.yaml:") >= 4
    document = cli.json("validate", "bad.yaml", code=2)
    assert document["valid"] is False
    assert all(problem["line"] for problem in document["files"][0]["problems"])
    refused = cli("run", "bad.yaml", code=2)
    assert refused.stderr == done.stdout
    assert cli.json("run", "bad.yaml", code=2)["error"]["problems"] == document["files"][0]["problems"]


def test_plan_compares_strategies(cli: Cli):
    cli("init", ".")
    text = cli("plan", "pipeline.yaml", "--stage", "train").stdout
    assert "ddp" in text
    assert "->" in text
    train = cli.json("plan", "pipeline.yaml", "--set", "stages.train.train.strategy=fsdp")["stages"][1]
    assert train["plan"]["train"]["strategy"] == "fsdp"
    assert {found["strategy"] for found in train["strategies"]} >= {"single", "ddp", "fsdp"}
    assert "no stage 'x'" in cli("plan", "pipeline.yaml", "--stage", "x", code=2).stderr


@pytest.mark.parametrize("amount", ["nan", "-5", "0", "inf"])
def test_a_budget_is_an_amount(cli: Cli, amount: str):
    cli("init", ".")
    refused = cli("plan", "pipeline.yaml", "--stage", "train", "--budget-usd", amount, code=2).stderr
    assert "is not an amount above 0" in refused


def test_nodes_and_budgets_of_what_is_no_training_are_refused(cli: Cli):
    cli("init", ".")
    for words in (("--budget-usd", "5"), ("--nodes", "1..2")):
        assert "of trainings" in cli("plan", "pipeline.yaml", "--stage", "corpus", *words, code=2).stderr


def test_a_switch_that_is_neither_on_nor_off_is_refused(cli: Cli):
    cli.env["MLPIPE_CALIBRATE"] = "bogus"
    assert "MLPIPE_CALIBRATE is 'bogus'\n  hint: write off" in cli("list", code=2).stderr
    cli("--version")
    cli.env["MLPIPE_CALIBRATE"] = "No"
    cli("list")


def test_plan_for_a_backend_is_what_would_run_there(tmp_path, monkeypatch):
    """Its pods compute in fp32, whatever this machine's CPU can."""
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n")
    monkeypatch.setattr("mlpipe._core.cpus._CPUINFO", tmp_path / "cpuinfo")

    def made(verb: str, *words: str) -> str:
        sets = [word for override in QUICKSTART for word in ("--set", override)]
        words = (verb, str(PIPELINES / "quickstart.yaml"), "--stage", "train", *sets, *words)
        done = CliRunner().invoke(app.app, words, obj=session.CliSession())
        assert done.exit_code == 0, done.output
        return done.stdout

    def planned(*words: str) -> dict:
        (stage,) = json.loads(made("plan", "--output", "json", *words))["stages"]
        return stage["plan"]

    there = planned("--for", "kubernetes")
    manifests = list(yaml.safe_load_all(made("render", "--for", "kubernetes", "--run-id", "r")))
    (sent,) = [
        json.loads(one["data"]["plan.json"]) for one in manifests if "plan.json" in one.get("data", {})
    ]
    assert sent == {**there, "run_id": "r"}
    assert there["train"]["precision"] == "fp32"
    assert planned("--for", "slurm")["train"]["precision"] == "fp32"
    assert planned()["train"]["precision"] == planned("--for", "local")["train"]["precision"] == "bf16"


@pytest.mark.parametrize(
    ("backend", "says"), [("x", "no backend 'x'"), ("rented", "submit --to rented --dry-run")]
)
def test_plan_for_a_backend_that_is_none_or_has_no_machines_yet_is_refused(cli: Cli, backend, says):
    cli("init", ".")
    assert says in cli("plan", "pipeline.yaml", "--for", backend, code=2).stderr


def test_plan_needs_no_credentials_and_no_network(cli: Cli):
    cli("init", ".")
    stages = cli.json("plan", "pipeline.yaml", "--store", "s3://bucket/prefix/")["stages"]
    assert {stage["plan"]["store_url"] for stage in stages} == {"s3://bucket/prefix"}


@pytest.mark.parametrize(
    ("folder", "environment", "says"),
    [
        (b"bad\xff", {}, "its name is not UTF-8"),
        ("größe".encode(), {"LC_ALL": "C", "PYTHONUTF8": "0"}, "reads names of files as ascii"),
    ],
    ids=["bytes", "locale"],
)
def test_a_folder_that_no_record_could_name_is_refused_before_anything_is_written(
    tmp_path, folder, environment, says
):
    here = os.fsencode(tmp_path) + b"/" + folder
    os.mkdir(here)
    text = "version: 1\nname: small\nstages: [{name: hello, command: [echo, hi]}]\n"
    (Path(os.fsdecode(here)) / "p.yaml").write_text(text)
    for store in ([], ["--store", str(tmp_path / "store")]):
        argv = [sys.executable, "-m", "mlpipe.cli", "run", "p.yaml", *store]
        env = {**os.environ, "PYTHONCOERCECLOCALE": "0", **environment}
        done = subprocess.run(argv, cwd=here, env=env, capture_output=True, timeout=300, check=False)
        assert (done.returncode, done.stdout) == (2, b""), done.stderr
        assert says in done.stderr.decode()
        assert b"hint: " in done.stderr
    assert os.listdir(here) == [b"p.yaml"]
    assert [path.name for path in tmp_path.iterdir()] == [os.fsdecode(folder)]
