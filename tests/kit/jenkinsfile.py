"""Reads the Jenkinsfiles that mlpipe renders, and no others: which files the build writes, which commands its
stages run. What real Groovy reads in them is compared in the golden ring."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlpipe.render import jenkins
from mlpipe.spec.model import Pipeline
from mlpipe.submit import backends

LITERAL = re.compile(r"'''((?:[^\\]|\\.)*?)'''|'((?:[^'\\\n]|\\.)*)'", re.S)
_ESCAPE = re.compile(r"\\(.)", re.S)
_MEANING = {"n": "\n", "\\": "\\", "'": "'"}
_WRITE = re.compile(
    rf"writeFile file: (?P<name>{LITERAL.pattern}), (?:encoding: '(?P<encoding>Base64)', )?text: "
    rf"(?P<text>(?:{LITERAL.pattern})(?: \+\s+(?:{LITERAL.pattern}))*)",
    re.S,
)
# records each of its arguments, and ends as the file of its verb says
_FAKE = """#!/bin/sh
printf '%s\\0' "$#" "$@" >> "$RECORD"
if [ -e "$RECORD.$1" ]; then exit "$(cat "$RECORD.$1")"; fi
"""


@dataclass(frozen=True)
class Build:
    """`files`: what is written. `commands`: of `sh`, in order. `skeleton`: the rest, its literals empty."""

    files: dict[str, bytes]
    commands: list[str]
    skeleton: str


def jenkinsfile(pipeline: Pipeline, spec: str, overrides: Sequence[str], store: str) -> str:
    """As `mlpipe render --for jenkins` writes it."""
    return jenkins.jenkinsfile(pipeline, spec, overrides, store, backends.takers(pipeline))


def value(literal: str) -> str:
    match = LITERAL.fullmatch(literal)
    assert match is not None, literal
    inner = match[1] if match[1] is not None else match[2]
    return _ESCAPE.sub(lambda found: _MEANING[found[1]], inner)


def read(text: str) -> Build:
    files: dict[str, bytes] = {}

    def write(match: re.Match[str]) -> str:
        content = "".join(value(found.group()) for found in LITERAL.finditer(match["text"]))
        data = base64.b64decode(content, validate=True) if match["encoding"] else content.encode()
        files[value(match["name"])] = data
        return "writeFile"

    rest = _WRITE.sub(write, text)
    commands = [value(found) for found in re.findall(r"^\s*sh ('.*')$", rest, flags=re.M)]
    return Build(files, commands, LITERAL.sub("''", rest))


@dataclass
class Workspace:
    """Runs a build's commands in the real /bin/sh, with a stand-in for mlpipe that records its arguments."""

    folder: Path
    environment: dict[str, str]

    def write(self, build: Build) -> None:
        for name, data in build.files.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        self.prepare()

    def prepare(self) -> None:
        fake = self.folder / "bin" / "mlpipe"
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(_FAKE)
        fake.chmod(0o755)

    def sh(self, command: str) -> int:
        """As Jenkins runs it: `sh -xe`."""
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        env = {"PATH": path, "RECORD": str(self.folder / "record"), **self.environment}
        done = subprocess.run(
            ["/bin/sh", "-xe", "-c", command],
            cwd=self.folder,
            env=env,
            timeout=300,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.said = done.stderr.decode(errors="replace")
        return done.returncode

    def ends_with(self, verb: str, code: int) -> None:
        (self.folder / f"record.{verb}").write_text(str(code))

    def calls(self) -> list[list[bytes]]:
        """Arguments of each call since the last time this was asked."""
        record = self.folder / "record"
        data = record.read_bytes() if record.exists() else b""
        record.unlink(missing_ok=True)
        parts = data.split(b"\0")[:-1]
        found = []
        while parts:
            size = int(parts.pop(0))
            found.append(parts[:size])
            del parts[:size]
        return found
