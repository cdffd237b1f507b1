"""The check of Declarative pipelines in `kit/groovy/Model.groovy`: wrong files, each refused for its own
reason, and right ones, which are not. The rules are those of jenkins.io, "Pipeline Syntax"; no Jenkins was
asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import groovy
from kit.servers import ServerMissingError

pytestmark = pytest.mark.golden
ROOT = Path(__file__).resolve().parents[2]

FILE = "%s"
PIPELINE = "pipeline {\nagent any\nstages {\nstage('a') {\nsteps {\necho 'x'\n}\n}\n}\n%s\n}"
BARE = "pipeline {\n%s\n}"
STAGES = "pipeline {\nagent any\nstages {\n%s\n}\n}"
STAGE = STAGES % "stage('a') {\n%s\n}"
STEPS = STAGE % "steps {\n%s\n}"
WHEN = STAGE % "when {\n%s\n}\nsteps {\necho 'x'\n}"
STAGE_OPTIONS = STAGE % "options {\n%s\n}\nsteps {\necho 'x'\n}"
INPUT = STAGE % "input {\n%s\n}\nsteps {\necho 'x'\n}"
AGENT = STAGE % "agent %s\nsteps {\necho 'x'\n}"
OPTIONS, PARAMETERS, POST, ENVIRONMENT = (
    PIPELINE % f"{name} {{\n%s\n}}" for name in ("options", "parameters", "post", "environment")
)
OK = "steps {\necho 'x'\n}"
S = f"stage('s') {{\n{OK}\n}}"

# template: {text: what the check says of it}
WRONG: dict[str, dict[str, str]] = {
    FILE: {
        "": "the file has",
        "node {\n}": "the file has [node], not one pipeline",
        "def x = 1\npipeline {\n}": "the file has",
        "import x.Y\nY.z()": "the file has",
        PIPELINE % "" + "\n" + PIPELINE % "": "the file has [pipeline, pipeline], not one pipeline",
        "pipelines {\n}": "the file has [pipelines], not one pipeline",
        "pipeline()": "pipeline has no block",
        "if (x) {\npipeline {\n}\n}": "the file has",
        PIPELINE % "}": "unexpected token",
        PIPELINE % "post {\nalways {\necho 'x\n}\n}": "expecting '''",
    },
    BARE: {
        "": "pipeline has no agent, stages",
        "agent any": "pipeline has no stages",
        f"stages {{\n{S}\n}}": "pipeline has no agent",
        f"agnet any\nstages {{\n{S}\n}}": "pipeline has agnet",
        f"agent any\nstage('a') {{\n{OK}\n}}": "pipeline has stage",
        f"agent any\n{OK}\nstages {{\n{S}\n}}": "pipeline has steps",
        f"agent any\nagent any\nstages {{\n{S}\n}}": "pipeline has a second agent",
        f"agent any\nstages {{\n{S}\n}}\nstages {{\n{S}\n}}": "pipeline has a second stages",
        f"agent any\nwhen {{\nbranch 'x'\n}}\nstages {{\n{S}\n}}": "pipeline has when",
        f"agent any\ninput {{\nmessage 'x'\n}}\nstages {{\n{S}\n}}": "pipeline has input",
        f"agent any\nstages {{\n{S}\n}}\nx = 1": "pipeline has",
        f"agent any\nif (x) {{\n}}\nstages {{\n{S}\n}}": "pipeline has",
        f"agent any\nstages {{\n{S}\n}}\nnotifications {{\n}}": "pipeline has notifications",
        "agent any\nstages 'a'": "stages has no block",
    },
    STAGES: {
        "": "stages has no stage",
        OK: "stages has steps",
        "echo 'x'": "stages has echo",
        f"{S}\n{S}": "two stages are named 's'",
        f"stage('') {{\n{OK}\n}}": "a stage's name is empty",
        f"stage('  ') {{\n{OK}\n}}": "a stage's name is empty",
        f'stage("a${{x}}") {{\n{OK}\n}}': "a stage's name is a$x",
        f"stage(1) {{\n{OK}\n}}": "a stage's name is 1",
        f"stage {{\n{OK}\n}}": "a stage's name is missing",
        "stage('a')": "a stage's name is missing",
        "stage('a') {\n}": "stage 'a' has none of steps, stages, parallel, matrix",
        f"stage('a') {{\nparallel {{\n{S}\n}}\n}}\n{S}": "two stages are named 's'",
        "for (x in y) {\n}": "stages has",
        f"parallel {{\n{S}\n}}": "stages has parallel",
    },
    STAGE: {
        "agent any": "none of steps",
        f"step {{\n}}\n{OK}": "stage 'a' has step",
        f"{OK}\n{OK}": "stage 'a' has a second steps",
        f"{OK}\nstages {{\n{S}\n}}": "stage 'a' has steps and stages",
        f"{OK}\nparallel {{\n{S}\n}}": "stage 'a' has steps and parallel",
        f"parallel {{\n{S}\n}}\nstages {{\nstage('t') {{\n{OK}\n}}\n}}": "has parallel and stages",
        f"failFast true\n{OK}": "stage 'a' has failFast without parallel",
        "parallel {\n}": "parallel has no stage",
        "stages {\n}": "stages has no stage",
        f"parallel {{\n{OK}\n}}": "parallel has steps",
        f"parallel {{\nstage('b') {{\nparallel {{\n{S}\n}}\n}}\n}}": "stage 'b' has parallel within parallel",
        f"parallel {{\nstage('b') {{\nstages {{\nstage('c') {{\nparallel {{\n{S}\n}}\n}}\n}}\n}}\n}}": (
            "stage 'c' has parallel within parallel"
        ),
        f"parameters {{\n}}\n{OK}": "stage 'a' has parameters",
        f"triggers {{\n}}\n{OK}": "stage 'a' has triggers",
        f"always {{\n}}\n{OK}": "stage 'a' has always",
        f"def x = 1\n{OK}": "stage 'a' has",
        f"{OK}\npost {{\n}}": "post has no condition",
        "steps": "stage 'a' has",
        "sh 'x'": "stage 'a' has sh",
    },
    AGENT: {
        "{\n}": "agent names none of label",
        "'linux'": "agent is linux: write any, none or a block",
        "all": "agent is all",
        "{\nlable 'x'\n}": "agent has lable",
        "{\nlabel 'x'\nnode 'y'\n}": "agent has label and node",
        "{\nlabel\n}": "agent has",
        "{\nlabel 'x', 'y'\n}": "label is not one value",
        "{\nimage 'x'\n}": "agent has image",
        "{\nany\n}": "agent has",
    },
    STEPS: {
        "": "steps has nothing",
        "def x = 1": "steps has",
        "x = 1": "steps has",
        "if (true) {\nsh 'x'\n}": "steps has",
        "for (x in y) {\nsh x\n}": "steps has",
        "try {\nsh 'x'\n} catch (e) {\n}": "steps has",
        "return": "steps has",
        "env.put('a', 'b')": "steps has",
        "new Date()": "steps has",
        "'text'": "steps has",
        "shell 'x'": "steps has shell",
        "Sh 'x'": "unexpected token: x",
        "sh()": "sh says nothing",
        "sh script: 'x', returnstatus: true": "sh has returnstatus",
        "sh 'x', 'y'": "sh has 2 values without a name",
        "sh {\necho 'x'\n}": "sh has a block",
        "timeout(time: 5, unit: 'MINUTES')": "timeout has no block",
        "timeout(5) {\nsh 'x'\n}": "timeout has values without names",
        "timeout(time: '5') {\nsh 'x'\n}": "timeout's time is 5",
        "timeout(unit: 'HOURS') {\nsh 'x'\n}": "timeout's time is missing",
        "timeout(time: 5, units: 'HOURS') {\nsh 'x'\n}": "timeout has units",
        "timeout(time: 5, unit: 'HOUR') {\nsh 'x'\n}": "timeout's unit is HOUR",
        "timeout(time: 5, unit: 'HOURS') {\n}": "timeout has nothing",
        "timeout(time: 5, unit: 'HOURS') {\ndef x = 1\n}": "timeout has",
        "script 'x'": "script has no block",
        "node('x')": "node has no block",
        "stage('b') {\necho 'x'\n}": "steps has stage",
        "writeFile file: 'x'": "writeFile has no text",
        "writeFile text: 'x'": "writeFile has no file",
        "writeFile 'x', 'y'": "writeFile has 2 values without a name",
        "archiveArtifacts allowEmptyArchive: true": "archiveArtifacts has no artifacts",
        "archiveArtifacts artifact: 'x'": "archiveArtifacts has artifact",
        "junit results: 'x'": "junit has results",
        "checkout()": "checkout says nothing",
    },
    WHEN: {
        "": "when has no condition",
        "beforeAgent true": "when has no condition",
        "expresion {\ntrue\n}": "when has expresion",
        "expression true": "expression has no block",
        "expression {\n}": "expression is empty",
        "not {\n}": "not has 0 conditions",
        "not {\nchangeRequest()\nchangeRequest()\n}": "not has 2 conditions",
        "not true": "not has no block",
        "anyOf {\n}": "anyOf has 0 conditions",
        "allOf {\n}": "allOf has 0 conditions",
        "params.X": "when has",
        "beforeAgent 'yes'\nchangeRequest()": "beforeAgent is yes",
        "beforeAgent true\nbeforeAgent true\nchangeRequest()": "when has a second beforeAgent",
        "beforeStage true\nchangeRequest()": "when has beforeStage",
        "branch()": "branch says nothing",
        "not {\nbeforeAgent true\n}": "when has beforeAgent",
    },
    OPTIONS: {
        "": "options is empty",
        "durability('x')": "options has durability",
        "buildDiscard(x)": "options has buildDiscard",
        "timeout(time: 1)\ntimeout(time: 2)": "options has a second timeout",
        "timeout 5": "timeout has values without names",
        "timeout(time: 1, unit: 'DAY')": "timeout's unit is DAY",
        "timeout(minutes: 1)": "timeout has minutes",
        "retry('3')": "retry is 3, not a number",
        "x = 1": "options has",
    },
    STAGE_OPTIONS: {
        "": "options of stage 'a' is empty",
        "buildDiscarder(logRotator(numToKeepStr: '5'))": "options of stage 'a' has buildDiscarder",
        "disableConcurrentBuilds()": "options of stage 'a' has disableConcurrentBuilds",
        "parallelsAlwaysFailFast()": "options of stage 'a' has parallelsAlwaysFailFast",
        "durabilityHint('MAX_SURVIVABILITY')": "options of stage 'a' has durabilityHint",
    },
    PARAMETERS: {
        "boolParam(name: 'A')": "parameters has boolParam",
        "string(defaultValue: 'x')": "string has no name",
        "string('A')": "string has values without names",
        "string(name: 'A', default: 'x')": "string has default",
        "choice(name: 'A')": "choice has no choices",
        "string(name: 'A', choices: ['x'])": "string has choices",
        "booleanParam(name: 'A', trim: true)": "booleanParam has trim",
        "A = 'x'": "parameters has",
    },
    POST: {
        "": "post has no condition",
        "finally {\necho 'x'\n}": "unexpected token: finally",
        "abort {\necho 'x'\n}": "post has abort",
        "failed {\necho 'x'\n}": "post has failed",
        "always {\n}": "always has nothing",
        "always {\nif (x) {\n}\n}": "always has",
        "always 'x'": "always has no block",
        "always {\necho 'x'\n}\nalways {\necho 'x'\n}": "post has a second always",
        "steps {\necho 'x'\n}": "post has steps",
        "echo 'x'": "post has echo",
    },
    ENVIRONMENT: {
        "": "environment is empty",
        "A 'x'": "unexpected token: x",
        "A = 1": "environment A is 1",
        "A = ['x']": "environment A is",
        "A = x": "environment A is x",
        "def A = 'x'": "environment has",
        "A = 'x'\nA = 'y'": "environment has a second A",
        "A.b = 'x'": "environment has",
        "if (x) {\nA = 'x'\n}": "environment has",
    },
    INPUT: {
        "": "input has no message",
        "ok 'yes'": "input has no message",
        "message 'x'\ntext 'y'": "input has text",
        "message 'x'\nmessage 'y'": "input has a second message",
        "message 'x', 'y'": "message is not one value",
        "message 'x'\nsubmitters 'y'": "input has submitters",
    },
}

RIGHT: dict[str, tuple[str, ...]] = {
    BARE: (f"stages {{\n{S}\n}}\nagent none", f"agent {{\nlabel 'x'\n}}\nstages {{\n{S}\n}}"),
    STAGES: (f"{S}\nstage('t') {{\n{OK}\n}}", f'stage("plain") {{\n{OK}\n}}'),
    STAGE: (
        f"stages {{\n{S}\n}}",
        f"agent any\nparallel {{\n{S}\nstage('b') {{\nstages {{\nstage('c') {{\n{OK}\n}}\n}}\n}}\n}}",
        f"environment {{\nA = 'x'\n}}\n{OK}\npost {{\nalways {{\necho 'x'\n}}\n}}",
    ),
    AGENT: ("none", "any", "{ label 'x' }", '{ label "${params.A}" }'),
    STEPS: (
        "sh 'x'; sh 'y'", "sh(script: 'x', label: 'y')", "script {\ndef x = 1\nif (x) { echo 'x' }\n}",
        "timeout(time: 5, unit: 'MINUTES') {\nnode('x') {\nsh 'x'\n}\n}", "writeFile file: 'x', text: 'y'",
        "junit 'x.xml'", "junit testResults: 'x.xml', allowEmptyResults: true", "checkout scm",
        "archiveArtifacts 'x'", "error 'x'",
    ),
    WHEN: (
        "changeRequest()", "not { changeRequest() }", "beforeAgent true\nexpression { params.A }",
        "beforeOptions true\nbeforeInput true\nnot { not { changeRequest() } }\nexpression { true }",
    ),
    OPTIONS: (
        "timestamps()\ndisableConcurrentBuilds()", "timeout(time: 5, unit: 'MINUTES')",
        "buildDiscarder(logRotator(numToKeepStr: '5'))\nskipDefaultCheckout()", "retry(3)",
    ),
    STAGE_OPTIONS: ("lock(resource: 'x')\ntimeout(time: 1, unit: 'DAYS')", "retry(2)"),
    PARAMETERS: (
        "string(name: 'A')\ntext(name: 'B', defaultValue: '', trim: true)\nbooleanParam(name: 'C')",
        "choice(name: 'A', choices: ['x', 'y'], description: 'z')",
    ),
    POST: ("always { echo 'x' }\ncleanup { echo 'y' }", "unsuccessful { sh 'x' }\naborted { sh 'y' }"),
    ENVIRONMENT: ("A = 'x'", 'A = "${x}"\nB = \'y\' + "z"'),
    INPUT: ("message 'x'", "message 'x'\nok 'y'\nsubmitter 'a,b'\nid 'z'"),
}  # fmt: skip

# right for a Jenkins, and unknown to the interpreter, which says so instead of guessing
REFUSED = {
    AGENT: {"{ docker 'x' }": "agent has docker"},
    WHEN: {"branch 'main'": "when has branch", "anyOf { changeRequest() }": "when has anyOf"},
    PIPELINE: {"triggers { cron('@daily') }": "pipeline has triggers"},
    STAGE_OPTIONS: {"lock(label: 'x')": "lock has [label]"},
    PARAMETERS: {"password(name: 'A')": "parameters has password"},
    ENVIRONMENT: {"A = credentials('x')": "environment has credentials"},
    POST: {"changed { echo 'x' }": "post has changed"},
}


def test_each_wrong_file_is_refused_for_its_own_reason(tmp_path: Path) -> None:
    """All in one JVM. The repository's own files are the longest of the right ones."""
    cases: list[tuple[str, str | None, str]] = [
        *(
            (template % text, words, kind)
            for kind, table in (("Wrong", WRONG), ("Refused", REFUSED))
            for template, found in table.items()
            for text, words in found.items()
        ),
        *((template % text, None, "") for template, found in RIGHT.items() for text in found),
        *((path.read_text(), None, "") for path in sorted((ROOT / "tests/golden/jenkins").glob("*"))),
        ((ROOT / "Jenkinsfile").read_text(), None, ""),
    ]  # fmt: skip
    assert sum(kind == "Wrong" for _, _, kind in cases) >= 100
    files = [tmp_path / f"{number}.groovy" for number in range(len(cases))]
    for path, (text, _, _) in zip(files, cases, strict=True):
        path.write_text(text)
    try:
        found = groovy.checked(files)
    except ServerMissingError as error:
        pytest.skip(str(error))
    missed = []
    for (text, words, kind), said in zip(cases, found, strict=True):
        if words is None:
            good = said is None
        else:  # what Groovy itself does not parse has no kind
            good = (
                said is not None
                and words in said
                and (said.startswith(kind) or "token" in said or "'''" in said)
            )
        if not good:
            missed.append((text, words, said))
    assert not missed, "\n".join(f"{text!r}: {words!r}, not {said!r}" for text, words, said in missed)
