"""What pages show can be done: verbs, options, targets of make and files are there, and the loader reads what
they show of a pipeline's file."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import click
import pytest
import yaml

import mlpipe
from mlpipe._core.errors import MlpipeError
from mlpipe.cli.app import VERBS, LazyGroup
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "grafana/README.md")
]
PAGES += sorted(ROOT.glob("docs/**/*.md"))
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
OF_A_STAGE = ("needs", "command", "env", "timeout", "resources")
OTHERS = ("places", "networks", "kind", "rule_files", "podMonitor")  # keys of other files
TRAIN = "{model: {preset: llama-8b, seq_len: 8}, data: {tokens: x, batch_size: 64}, steps: 100}"
WHOLE = f"""
version: 1
name: shown
image: a
store: s3://bucket/a
stages:
  - {{name: corpus, command: ["true"]}}
  - name: train
    needs: [corpus]
    train: {TRAIN}
    resources: {{nodes: 2, workers_per_node: 8}}
  - {{name: evaluate, needs: [train], evaluate: {{}}}}
"""


def _console(text: str) -> Iterator[str]:
    for block in re.findall(r"^ *```(?:console|bash)\n(.*?)^ *```", text, flags=re.M | re.S):
        yield from re.findall(r"^\s*\w*\$ (.*)", re.sub(r"\\\n(\s*>)?", " ", block), flags=re.M)


def _inline(text: str) -> list[str]:
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def _unknown(words: list[str]) -> str | None:
    """What of a call of mlpipe there is not."""
    group: click.Command = LazyGroup()
    context, rest = click.Context(group), [word for word in words if word != "--debug"]
    while isinstance(group, click.Group):
        if not rest or rest[0] in ("--help", "--version"):
            return None
        found = group.get_command(context, rest[0])
        if found is None:
            return f"no verb {rest[0]}"
        group, context, rest = found, click.Context(found, parent=context), rest[1:]
    try:
        group.make_parser(context).parse_args(rest)
    except click.NoSuchOption as error:
        return error.format_message()
    except click.UsageError:  # a page says `--set` and means what follows
        pass
    return None


@PAGE
def test_what_is_called_is_there(page: Path) -> None:
    """Fails where a verb or an option of a page is renamed, or a target of make."""
    text, targets = page.read_text(), re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    problems = []
    for line in [*_console(text), *_inline(text)]:
        for call in re.findall(r"(?:^|[;|] ?|&& ?|until |\d )mlpipe ([a-z-].*?)(?: #|$| [|;&>]|\)$)", line):
            try:
                words = shlex.split(call.replace("...", "X"))
            except ValueError:  # a sign of more
                continue
            if problem := _unknown(words):
                problems.append(f"mlpipe {call}: {problem}")
        problems += [f"make {name}" for name in re.findall(r"^make ([a-z-]+)", line) if name not in targets]
    assert problems == []


def test_what_an_error_says_to_call_is_there() -> None:
    """Fails where a verb or an option that a hint, a note or a docstring names is renamed."""

    def texts(source: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else " X " for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value

    verbs = "|".join(VERBS)
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    said = {text for source in sources if "mlpipe " in source for text in texts(source)}
    calls = {call for text in said for call in re.findall(rf"\bmlpipe ((?:{verbs})\b[^\n`'|;,:.()]*)", text)}
    assert len(calls) > 100
    assert [f"{call}: {problem}" for call in sorted(calls) if (problem := _unknown(call.split()))] == []


@PAGE
def test_files_of_ours_that_are_named_are_there(page: Path) -> None:
    """Fails where a module is moved, or a test renamed."""
    ours = r"(?:(?:src|tests|docs|benchmarks|charts|grafana|k8s|pipelines)/[\w./-]*\.\w+|[\w/]+/\w+\.py)"
    folders = (ROOT, ROOT / "src/mlpipe", page.parent)
    named = {path for code in _inline(page.read_text()) for path in re.findall(f"^{ours}", code)}
    named -= {"torchft/ddp.py", "mlpipe/__init__.py"}
    assert [path for path in sorted(named) if not any((folder / path).exists() for folder in folders)] == []


def test_names_of_the_code_in_the_map_are_there() -> None:
    """Fails where a table, a class or a function is renamed that CONTRIBUTING.md sends people to."""
    inline = _inline((ROOT / "CONTRIBUTING.md").read_text())
    named = {code.split(".")[-1] for code in inline if re.fullmatch(r"[A-Za-z_.]*[A-Z_][A-Za-z_.]*", code)}
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    of_tests = (ROOT / "tests/unit/test_architecture.py").read_text() + (ROOT / "Makefile").read_text()
    known = set(re.findall(r"\w+", code + of_tests))
    assert len(named) > 40
    assert sorted(named - known) == []


@PAGE
def test_python_that_is_shown_is_python_and_calls_what_there_is(page: Path) -> None:
    """Fails where what `mlpipe` exports is renamed."""
    signatures = page == ROOT / "docs/reference/python.md"
    for block in (
        [] if signatures else re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), flags=re.M | re.S)
    ):
        compile(dedent(block), str(page), "exec")
    exported = {*mlpipe.__all__, "plan", "submit", "__init__"}
    called = {name for code in _inline(page.read_text()) for name in re.findall(r"^mlpipe\.(\w+)\(", code)}
    assert sorted(called - exported) == []


def _examples() -> list[Any]:
    """Each with the pipeline whose keys it has: the first whole one of its page, or `WHOLE`."""
    examples = []
    for page in (page for page in PAGES if page.name != "extend.md"):  # whose kinds and names are its own
        blocks = re.findall(r"^ *```yaml\n(.*?)^ *```", page.read_text(), flags=re.M | re.S)
        whole = next((text for text in blocks if text.startswith("version: 1") and "stages:" in text), WHOLE)
        for number, text in enumerate(blocks):
            examples.append(pytest.param(whole, text, id=f"{page.name}-{number}"))
    return examples


def _read(text: str) -> Any:
    """YAML with what stands for more left out."""
    text = re.sub(r"^ *\.\.\.\n", "", text, flags=re.M).replace("@sha256:...", "@sha256:" + "0" * 64)
    return yaml.safe_load(dedent(text.replace("{...}", TRAIN)))


@pytest.mark.parametrize(("whole", "text"), _examples())
def test_what_is_shown_of_a_pipeline_is_one(whole: str, text: str) -> None:
    """Fails where a key is renamed, a value gone, or an example no YAML."""
    shown, document = _read(text), _read(WHOLE) | _read(whole)
    (stage,) = (stage for stage in document["stages"] if stage["name"] == "train" or "tune" in stage["name"])
    if isinstance(shown, list):
        shown = shown[0]
        del shown["name"]
    for key, value in shown.items():
        if key in OTHERS:
            return
        if key == "train":
            stage["train"] |= value
        elif key == "patches":
            document["kubernetes"] = {key: value}
        elif key == "adapter" and "model" not in shown:
            stage["train"] |= {key: value, "init_from": {"path": "weights"}}
        elif key in OF_A_STAGE:
            stage[key] = value
        else:
            (document if key in Pipeline.model_fields else stage["train"])[key] = value
    load_pipeline_text(yaml.safe_dump(document), "page")


def test_mistakes_are_told_as_the_readme_shows() -> None:
    """Fails where the words of a mistake change."""
    broken = """version: 1
name: broken
stages:
  - name: corpus
    comand: [mlpipe-corpus, --out, "{{output}}"]
  - name: train
    needs: [corpsu]
    train:
      model: {preset: llama-1m, seq_len: 0512}
      data: {tokens: x, batch_size: 8}
      steps: 10
      strategy: fdsp
      checkpoint: {every: 100}
"""
    shown = (ROOT / "README.md").read_text().split("$ mlpipe validate broken.yaml\n")[1].split("```")[0]
    with pytest.raises(MlpipeError) as error:
        load_pipeline_text(broken, "broken.yaml")
    assert str(error.value).splitlines() == shown.splitlines()
