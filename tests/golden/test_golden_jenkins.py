"""Jenkinsfiles of shipped pipelines and others, byte for byte; and what real Groovy, of the version that
Jenkins pins, reads in them and in some with hostile text.

`MLPIPE_UPDATE_GOLDEN=1` rewrites them; read the difference before committing it. That Groovy compiles a file
does not say that Jenkins takes it: no Jenkins runs here.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
import yaml
from kit import groovy
from kit.jenkinsfile import jenkinsfile, read
from kit.rendered import pipeline_of
from kit.servers import ServerMissingError

from mlpipe.render.jenkins import MAX_STAGES
from mlpipe.spec.load import load_pipeline_text

pytestmark = pytest.mark.golden
FOLDER = Path(__file__).parent / "jenkins"
ROOT = Path(__file__).resolve().parents[2]
HOSTILE = (
    "it's", "$HOME ${params.X} $(id) `id`", "\\u0027", "\\\\u0027", "\\\\\\u0027", "'''", '"""', "a\nb\r",
    "\\", "'",
    "\u202e\u2066", "*/ } } pipeline { //", "ü\U0001f600", "\x1b[31m", "x" * 10_000, "é'" * 1_000,
)  # fmt: skip


def case(name: str) -> str:
    if name == "diamond":
        text = (ROOT / "tests/unit/spec/good/diamond.yaml").read_text()
        return jenkinsfile(load_pipeline_text(text, "diamond.yaml"), "diamond.yaml", [], "runs")
    if name == "many":
        stages = "".join(
            f"  - {{name: s{n}, command: [x], needs: [{f's{n // 2}' if n else ''}]}}\n"
            for n in range(MAX_STAGES + 1)
        )
        pipeline = load_pipeline_text(f"version: 1\nname: many\nstages:\n{stages}", "many.yaml")
        return jenkinsfile(pipeline, "many.yaml", [], "s3://ml-runs/many")
    if name == "hostile":
        spec = "it's/\u202e\\u0027''' ${params.RUN_ID}\n.yaml"
        return jenkinsfile(pipeline_of("quickstart"), spec, ["name=a'b"], "s3://b/'''")
    if name == "sweep":
        text = (ROOT / "tests/unit/spec/good/sweep.yaml").read_text()
        return jenkinsfile(load_pipeline_text(text, "sweep.yaml"), "sweep.yaml", [], "s3://ml-runs/swept")
    pipeline = pipeline_of(name)
    return jenkinsfile(pipeline, f"pipelines/{name}.yaml", ["train.seed=7"], pipeline.store)


CASES = ("quickstart", "llm", "diamond", "many", "hostile", "sweep")


@pytest.mark.parametrize("name", CASES)
def test_jenkinsfiles(name: str) -> None:
    text = case(name)
    expected = FOLDER / f"{name}.Jenkinsfile"
    if os.environ.get("MLPIPE_UPDATE_GOLDEN"):
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(text)
    assert text == expected.read_text()


def test_every_file_has_its_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.Jenkinsfile")} == set(CASES)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, groovy.Compiled]]:
    """Text and what Groovy says of it: the golden files, hostile ones, the repository's, broken ones."""
    folder = tmp_path_factory.mktemp("jenkinsfiles")
    texts = {name: (FOLDER / f"{name}.Jenkinsfile").read_text() for name in CASES}
    for number, text in enumerate(HOSTILE):
        texts[f"hostile-{number}"] = jenkinsfile(pipeline_of("llm"), f"a{text}", [text], f"s3://{text}")
    texts["plain"] = jenkinsfile(pipeline_of("llm"), "a", ["b"], "s3://c")
    texts["unclosed"] = texts["plain"].removesuffix("}\n")
    texts["jobs"] = yaml.safe_load((ROOT / "k8s/jenkins/jcasc.yaml").read_text())["jobs"][0]["script"]
    texts["open-literal"] = texts["plain"].replace("label 'mlpipe'", "label 'mlpipe")
    paths = []
    for name, text in texts.items():
        path = folder / f"{name}.groovy"
        path.write_text(text)
        paths.append(path)
    try:
        results = groovy.compiled(paths)
    except ServerMissingError as error:
        pytest.skip(str(error))
    return dict(zip(texts, zip(texts.values(), results, strict=True), strict=True))


def test_groovy_compiles_each_golden_file(found: dict[str, tuple[str, groovy.Compiled]]) -> None:
    for name in CASES:
        compiled = found[name][1]
        assert compiled.error is None, name
        assert compiled.tree[0] == "pipeline"
    tree = found["diamond"][1].tree
    assert [line.strip() for line in tree].count("stage") == 7  # Validate, Plan, a, Level 2 (b, c), d
    assert [line.strip() for line in tree].count("parallel") == 1
    for name in ("unclosed", "open-literal"):
        assert found[name][1].error is not None


def test_groovy_compiles_the_job_dsl(found: dict[str, tuple[str, groovy.Compiled]]) -> None:
    compiled = found["jobs"][1]
    assert compiled.error is None
    names = [line for line in compiled.tree if not line.startswith(" ")]
    assert names == ["folder", "multibranchPipelineJob"] * 2


def test_groovy_reads_hostile_text_as_text(found: dict[str, tuple[str, groovy.Compiled]]) -> None:
    """The same calls as without it, and in `writeFile` the very text that the unit tests give to /bin/sh."""
    plain = found["plain"][1]
    for number in range(len(HOSTILE)):
        text, compiled = found[f"hostile-{number}"]
        assert compiled.error is None, HOSTILE[number]
        assert compiled.tree == plain.tree
        build = read(text)
        data = build.files[".mlpipe/data"]
        if "encoding: 'Base64'" in text:
            assert base64.b64encode(data).decode() in compiled.strings
        else:
            assert data.decode() in compiled.strings
        for other in (build.files[".mlpipe/arguments"].decode(), *build.commands):
            assert other in compiled.strings
