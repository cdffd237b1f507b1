"""`mlpipe render --for jenkins`: the pipeline's stages, and no text of a user in Groovy or in a command.

Commands run in the real /bin/sh against a stand-in for mlpipe; what Groovy reads is compared in the golden
ring."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.command_runs import Cli
from kit.jenkinsfile import Build, Workspace, jenkinsfile, read
from kit.rendered import pipeline_of

from mlpipe._core.errors import RenderError
from mlpipe.render.jenkins import MAX_STAGES
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[3]
HOSTILE = (
    "it's",
    '"$HOME" `id` $(id) ${params.X}',
    "\\u0027 + 'x",
    "\\\\u0027",
    "'''",
    "a\nb",
    "a\r\nEND_OF_OVERRIDES\n",
    "$'\\x00'",
    "\u202ecod\u2066",
    "--help",
    "-",
    "*/ } } pipeline { //",
    "\udcff",  # a byte of a path that is not UTF-8
    "ü" * 5000,
)
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40),
    st.lists(st.sampled_from([*HOSTILE[:-1], "\\", "'", "$", "\n"]), min_size=1, max_size=6).map("".join),
)
BUILD = {
    "JENKINS_URL": "http://jenkins.example.com/",
    "JOB_NAME": "team/train",
    "BUILD_NUMBER": "7",
    "BUILD_STARTED": "1700000000000",
    "BACKEND": "kubernetes",
}
LLM = pipeline_of("llm")


def chain(count: int, **more: str) -> Pipeline:
    """Stages s0, s1, ..., each of which needs the one before."""
    stages = "".join(
        f"  - {{name: s{n}, command: [x], needs: [{f's{n - 1}' if n else ''}]}}\n" for n in range(count)
    )
    return load_pipeline_text(f"version: 1\nname: chain\nstages:\n{stages}", "chain.yaml")


def built(folder: Path, text: str, **parameters: str) -> tuple[Build, Workspace]:
    build = read(text)
    workspace = Workspace(folder, {**BUILD, **parameters})
    workspace.write(build)
    return build, workspace


def arguments(folder: Path, text: str, **parameters: str) -> list[str]:
    """What `mlpipe validate` is called with, after the verb."""
    build, workspace = built(folder, text, **parameters)
    (command,) = [line for line in build.commands if "mlpipe validate" in line]
    assert workspace.sh(command) == 0, workspace.said
    (call,) = workspace.calls()
    assert call[0] == b"validate"
    return [part.decode(errors="surrogateescape") for part in call[1:]]


def test_each_stage_submits_itself(tmp_path: Path) -> None:
    build, workspace = built(tmp_path, jenkinsfile(LLM, "pipelines/llm.yaml", ["train.steps=5"], "s3://a/b"))
    commands = [line for line in build.commands if "submit_stage" in line]
    run_ids = set()
    for line, name in zip(commands, ["corpus", "train", "evaluate", "promote"], strict=True):
        assert workspace.sh(line) == 0, workspace.said
        (call,) = workspace.calls()
        *head, run_id = call[:5]
        run_ids.add(run_id)
        assert head == [b"submit", b"--to", b"kubernetes", b"--run-id"]
        rest = [
            b"--stage",
            name.encode(),
            b"--wait",
            b"--set",
            b"train.steps=5",
            b"--",
            b"pipelines/llm.yaml",
        ]
        assert call[5:] == rest
    (run_id,) = run_ids
    assert re.fullmatch(rb"llm-7-[0-9a-f]{10}", run_id)


def test_a_build_has_its_own_run_and_a_parameter_names_another(tmp_path: Path) -> None:
    def run_id(**parameters: str) -> str:
        build, workspace = built(tmp_path, jenkinsfile(LLM, "llm.yaml", [], "runs"), **parameters)
        (command,) = [line for line in build.commands if "submit_stage train" in line]
        assert workspace.sh(command) == 0
        return workspace.calls()[0][4].decode()

    own = run_id()
    assert own == run_id()
    others = [run_id(BUILD_STARTED="1700000000001"), run_id(JOB_NAME="x"), run_id(JENKINS_URL="http://y/")]
    assert len({own, *others}) == 4
    assert run_id(RUN_ID="mine") == "mine"


def test_parameters_become_arguments(tmp_path: Path) -> None:
    text = jenkinsfile(LLM, "llm.yaml", ["a=b"], "runs")
    asked = {"OVERRIDES": "train.steps=5\r\n\r\n  name=$(id)'\"\\\nEND_OF_OVERRIDES", "STRATEGY": "fsdp"}
    assert arguments(tmp_path, text, **asked) == [
        "--set", "a=b", "--set", "train.steps=5", "--set", "  name=$(id)'\"\\", "--set", "END_OF_OVERRIDES",
        "--set", "stages.train.train.strategy=fsdp", "--", "llm.yaml",
    ]  # fmt: skip
    assert arguments(tmp_path, text, STRATEGY="as in the file") == ["--set", "a=b", "--", "llm.yaml"]
    both = arguments(tmp_path, jenkinsfile(pipeline_of("finetune"), "f.yaml", [], "runs"), STRATEGY="ddp")
    of_each = [f"stages.{name}.train.strategy=ddp" for name in ("base", "tune")]
    assert both == ["--set", of_each[0], "--set", of_each[1], "--", "f.yaml"]


def test_the_store_of_the_agent_comes_first(tmp_path: Path) -> None:
    build, workspace = built(tmp_path, jenkinsfile(LLM, "llm.yaml", [], "s3://it's/here"))
    show = '. ./.mlpipe/arguments; mlpipe show "$MLPIPE_STORE"'
    assert workspace.sh(show) == 0
    assert workspace.calls() == [[b"show", b"s3://it's/here"]]
    workspace.environment["MLPIPE_STORE"] = "s3://other"
    assert workspace.sh(show) == 0
    assert workspace.calls() == [[b"show", b"s3://other"]]
    assert build.commands[0] == "rm -rf .mlpipe"


def test_a_build_that_was_asked_for_gets_its_pipeline_from_the_store(tmp_path: Path) -> None:
    asked = {"STORE": "s3://it's/there", "RUN_ID": "r", "SPEC_DIGEST": "d" * 64}
    build, workspace = built(tmp_path, jenkinsfile(LLM, "llm.yaml", ["a=b"], "runs"), **asked)
    (command,) = [line for line in build.commands if "mlpipe validate" in line]
    assert workspace.sh(f'{command}; mlpipe show "$MLPIPE_STORE"') == 0, workspace.said
    spec = ".mlpipe/asked.yaml"
    stages = "corpus,train,evaluate,promote"
    found = [[part.decode() for part in call] for call in workspace.calls()]
    assert found == [
        ["spec", "--out", spec, "--digest", "d" * 64, "--stages", stages, "--", "r"],
        ["validate", "--", spec],
        ["show", "s3://it's/there"],
    ]


def test_a_stage_ends_as_its_submit_does(tmp_path: Path) -> None:
    build, workspace = built(tmp_path, jenkinsfile(LLM, "llm.yaml", [], "runs"))
    workspace.ends_with("submit", 4)
    assert workspace.sh(next(line for line in build.commands if "submit_stage" in line)) == 4
    assert len(workspace.calls()) == 1


def test_an_aborted_build_cancels_its_run(tmp_path: Path) -> None:
    text = jenkinsfile(LLM, "llm.yaml", [], "runs")
    (command,) = [line for line in read(text).commands if "mlpipe cancel" in line]
    nothing = Workspace(tmp_path / "empty", BUILD)
    (tmp_path / "empty").mkdir()
    assert nothing.sh(command) == 0  # aborted before it had a workspace
    _, workspace = built(tmp_path, text, RUN_ID="mine")
    assert workspace.sh(command) == 0
    argv = [b"cancel", b"--ignore-not-found", b"--timeout", b"12min", b"--", b"mine"]
    assert workspace.calls() == [argv]
    for code in (2, 4):  # its pods may go on
        workspace.ends_with("cancel", code)
        assert workspace.sh(command) == code


def test_stages_that_need_nothing_of_each_other_are_parallel() -> None:
    path = ROOT / "tests/unit/spec/good/diamond.yaml"
    text = jenkinsfile(load_pipeline_text(path.read_text(), "diamond.yaml"), "diamond.yaml", [], "runs")
    names = re.findall(r"stage\('(.*)'\)|(parallel) \{", text)
    assert ["".join(found) for found in names] == [
        "Validate", "Plan", "a", "Level 2", "parallel", "b", "c", "d"
    ]  # fmt: skip


def test_many_stages_are_a_loop_of_one_size() -> None:
    few, more, many = (
        jenkinsfile(chain(count), "c.yaml", [], "r") for count in (MAX_STAGES, MAX_STAGES + 1, 200)
    )
    assert "stage('s0')" in few
    assert "stage('s0')" not in more
    assert read(more).skeleton == read(many).skeleton
    names = read(many).files[".mlpipe/stages"].decode().split("\n\n")
    assert [name.strip() for name in names] == [f"s{n}" for n in range(200)]


@settings(max_examples=60)
@given(TEXT, TEXT, TEXT)
@example("a/" + HOSTILE[0], HOSTILE[2], HOSTILE[4])
@example(HOSTILE[12], HOSTILE[13], HOSTILE[8])
@example(HOSTILE[9], HOSTILE[5], HOSTILE[1])
def test_hostile_text_arrives_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, spec: str, override: str, store: str
) -> None:
    spec = spec.replace("/", "_").replace("..", "_")
    text = jenkinsfile(LLM, spec, [override], store)
    text.encode("ascii")
    plain = read(jenkinsfile(LLM, "llm.yaml", ["a=b"], "runs"))
    assert read(text).skeleton == plain.skeleton
    assert read(text).commands == plain.commands
    folder = tmp_path_factory.mktemp("build")
    assert arguments(folder, text) == ["--set", override, "--", spec]


def test_a_parameter_with_hostile_text_is_one_argument(tmp_path: Path) -> None:
    text = jenkinsfile(LLM, "llm.yaml", [], "runs")
    for line in (one for one in HOSTILE if "\n" not in one):
        found = arguments(tmp_path, text, OVERRIDES=line, STRATEGY=line)
        assert found == ["--set", line, "--set", f"stages.train.train.strategy={line}", "--", "llm.yaml"]


def test_what_cannot_be_said_is_refused() -> None:
    elastic = pipeline_of("finetune", "base.resources.nodes=2..4")
    long = ["a=" + "x" * 40_000]
    for pipeline, spec, overrides, words, where, hint in (
        (LLM, "/abs.yaml", [], "from the top", "/abs.yaml", "with a relative path"),
        (LLM, "../up.yaml", [], "from the top", "../up.yaml", "with a relative path"),
        (LLM, "a\0b", [], "NUL", "a\0b", "None"),
        (elastic, "f.yaml", [], "elastic", "stage 'base'", "one number of nodes: 4"),
        (LLM, "llm.yaml", long, "takes 32768", "llm.yaml", "into the pipeline file"),
    ):
        with pytest.raises(RenderError, match=words) as caught:
            jenkinsfile(pipeline, spec, overrides, "runs")
        assert caught.value.where == where
        assert hint in str(caught.value.hint)


def test_the_command_line(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    (tmp_path / "llm.yaml").write_text((ROOT / "pipelines/llm.yaml").read_text())
    render = ("render", "llm.yaml", "--for", "jenkins")
    text = cli(*render).stdout
    assert cli(*render, "--out", "ci/Jenkinsfile").stdout == "ci/Jenkinsfile\n"
    assert (tmp_path / "ci/Jenkinsfile").read_text() == text
    assert "1 file, the same" in cli(*render, "--out", "ci/Jenkinsfile", "--check").stdout
    done = cli(*render, "--out", "ci/Jenkinsfile", "--check", "--set", "train.seed=7", code=2)
    assert (
        "+                writeFile file: '.mlpipe/data', text: 'set -- --set train.seed=7\\n' +"
        in done.stdout
    )
    assert "is a folder of the agent" in cli(*render, "--store", "./runs").stderr
    assert "--for kubernetes" in cli(*render, "--stage", "train", code=2).stderr
    assert "from the top" in cli("render", str(tmp_path / "llm.yaml"), *render[2:], code=2).stderr
