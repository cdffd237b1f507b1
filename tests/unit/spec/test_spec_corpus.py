"""Good and bad pipeline files: what the loader says, word by word, and that the JSON Schema agrees.

`MLPIPE_UPDATE_GOLDEN=1` rewrites the expected lines; read the difference before committing it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import jsonschema
import pytest

from mlpipe.spec.load import load_pipeline, load_pipeline_text, read_pipeline
from mlpipe.spec.problems import SpecErrors
from mlpipe.spec.schema import json_schema
from mlpipe.spec.tree import parse

pytestmark = pytest.mark.unit
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
GOOD = sorted([*(HERE / "good").glob("*.yaml"), *(ROOT / "pipelines").rglob("*.yaml")])
BAD = sorted((HERE / "bad").glob("*.yaml"))
SCHEMA = jsonschema.Draft202012Validator(json_schema())

# Files whose only mistakes are those that a JSON Schema cannot say: rules between values, and YAML itself.
BEYOND_THE_SCHEMA = {
    "cycle.yaml": "needs form a circle",
    "duplicates.yaml": "two stages of one name, a duplicate key",
    "float-for-int.yaml": "to JSON Schema 10.0 is an integer",
    "secret.yaml": "a variable that looks like a secret",
    "trainjob-queue.yaml": "a queue beside a field of older TrainJobs",
    "torchrun-env.yaml": "a variable that torchrun sets",
    "placeholder.yaml": "a placeholder to a stage that is not needed",
    "batch.yaml": "batch_tokens is not a multiple of seq_len",
    "mesh.yaml": "a mesh for other workers",
    "decay.yaml": "decay_steps without wsd",
    "track-twice.yaml": "a tracker that stands there twice",
    "optimizer-rules.yaml": "figures of an optimizer that do not go together",
    "links-rules.yaml": "what is sent compressed, or in buckets, by workers that have no copies",
    "offload.yaml": "what is to wait on the host, and is not kept, or cannot be updated there",
    "float8.yaml": "what products in float8 do not go with",
    "fused-loss.yaml": "a head that is not known, that has an adapter, or that is split over workers",
    "hang.yaml": "a hang_timeout in which no step is done",
    "profile.yaml": "a step to profile behind the last one",
    "gpu.yaml": "GPUs without a model",
    "gpu-classes.yaml": "what a class of GPUs has not, and what a gang cannot use",
    "seq_len.yaml": "a model of one's own, fed with tokens, without seq_len",
    "no-train.yaml": "an evaluation that needs no training",
    "kubernetes-rules.yaml": "values that Kueue, a toleration or a pod's own volumes rule out",
    "spares.yaml": "spares of a gang whose pods start one by one, or are neighbours by place",
    "gangs.yaml": "what pods of one kind, claims, and Volcano cannot do; a GPU that nobody has",
    "trainjob.yaml": "what the runtime of a TrainJob says, and not the TrainJob",
    "sweep-rules.yaml": "what a sweep and the rest of its file must agree in",
    "sweep-asha.yaml": "a first rung beyond the last step, a metric that is known too late",
    "sweep-metric.yaml": "a metric of one's own without a mode",
    "sweep-unmeasured.yaml": "a metric that nothing measures",
    "sweep-together.yaml": "values of a sweep that are wrong together",
    "start-rules.yaml": "weights of a stage that is not needed, a map with more stars on one side",
    "pipeline.yaml": "a pipeline without stages, and numbers that its schedule cannot do",
    "context.yaml": "an exchange between workers that share no sequence, and packed samples",
    "anchor.yaml": "an anchor",
    "ambiguous.yaml": "an unquoted word that parsers read differently",
}


def problems_of(path: Path) -> list[str]:
    with pytest.raises(SpecErrors) as caught:
        load_pipeline_text(path.read_bytes(), path.name)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("path", GOOD, ids=lambda p: p.name)
def test_good_files_load_and_resolve_to_an_equal_pipeline(path: Path) -> None:
    pipeline = load_pipeline(path)
    resolved = pipeline.resolved_yaml()
    again = load_pipeline_text(resolved, "resolved")
    assert again == pipeline
    assert again.resolved_yaml() == resolved
    assert again.digest == pipeline.digest


def test_text_and_pipeline_are_of_one_reading(tmp_path: Path) -> None:
    """A pipe can be read once: `mlpipe run <(...)`. The text is what a run keeps."""
    text = "version: 1\nname: piped\nstages: [{name: a, command: [echo, $X]}]\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    written = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    writer = threading.Thread(target=lambda: pipe.write_bytes(written), daemon=True)
    writer.start()
    told, pipeline = read_pipeline(pipe, overrides=["name=other"])
    writer.join(300)
    assert not writer.is_alive()
    assert (told, pipeline.name) == (text, "other")


@pytest.mark.parametrize("path", GOOD, ids=lambda p: p.name)
def test_the_schema_takes_good_files(path: Path) -> None:
    for text in (path.read_text(), load_pipeline(path).resolved_yaml()):
        root, problems = parse(text, path.name)
        assert root is not None
        assert not problems
        SCHEMA.validate(root.plain())


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.name)
def test_bad_files_say_every_mistake(path: Path) -> None:
    found = problems_of(path)
    expected = path.with_suffix(".txt")
    if os.environ.get("MLPIPE_UPDATE_GOLDEN"):
        expected.write_text("\n".join(found) + "\n")
    assert found == expected.read_text().splitlines()


@pytest.mark.parametrize("path", BAD, ids=lambda p: p.name)
def test_the_schema_refuses_bad_files_except_what_it_cannot_say(path: Path) -> None:
    problems_of(path)
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return  # not text, so nothing a schema is asked about
    root, _ = parse(text, path.name)
    if root is None:
        return  # not YAML, likewise
    assert SCHEMA.is_valid(root.plain()) == (path.name in BEYOND_THE_SCHEMA)


def test_what_is_listed_as_beyond_the_schema_exists() -> None:
    assert {path.name for path in BAD} >= BEYOND_THE_SCHEMA.keys()


def test_six_mistakes_give_six_lines() -> None:
    assert len(problems_of(HERE / "bad" / "six.yaml")) == 6


def test_the_schema_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
