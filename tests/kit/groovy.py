"""The Groovy that Jenkins pins and its CPS engine, to compile and to run Jenkinsfiles: needs Java, and three
jars from Maven Central.

    PYTHONPATH=tests python -m kit.groovy build

fetches them into ~/.cache/mlpipe/servers (or $MLPIPE_CACHE/servers), once, with Maven; the first test that
needs them does so too. This is no Jenkins: `groovy/execute.groovy` knows what mlpipe writes.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.servers import ServerMissingError, cache

JARS = {  # those of the plugin workflow-cps
    "groovy-all-2.4.21.jar": "org.codehaus.groovy:groovy-all:2.4.21",
    "groovy-cps-1.31.jar": "com.cloudbees:groovy-cps:1.31",
    "guava-11.0.1.jar": "com.google.guava:guava:11.0.1",
}
_FETCH_SECONDS = 300
_RUN_SECONDS = 600
_SCRIPTS = Path(__file__).parent / "groovy"


@dataclass(frozen=True)
class Compiled:
    """`tree`: the calls by name, indented. `strings`: the constant text of their arguments, in order."""

    tree: tuple[str, ...]
    strings: tuple[str, ...]
    error: str | None


def build() -> list[Path]:
    """The jars, fetched unless they are there. Raises ServerMissingError."""
    cache().mkdir(parents=True, exist_ok=True)
    for name, artifact in JARS.items():
        if not (cache() / name).exists():
            with tempfile.TemporaryDirectory(dir=cache()) as folder:  # whole, or not at all
                _maven("dependency:get", f"-Dartifact={artifact}:jar", "-Dtransitive=false")
                _maven("dependency:copy", f"-Dartifact={artifact}:jar", f"-DoutputDirectory={folder}")
                (Path(folder) / name).rename(cache() / name)
    return [cache() / name for name in JARS]


def _maven(*arguments: str) -> None:
    if shutil.which("mvn") is None:
        raise ServerMissingError("Groovy is fetched with Maven: install maven (and a Java to run it)")
    try:
        subprocess.run(
            ["mvn", "-q", "-B", *arguments],
            capture_output=True,
            text=True,
            timeout=_FETCH_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        said = getattr(error, "stdout", None) or ""
        raise ServerMissingError(
            f"Groovy could not be fetched from Maven Central: {error} {said}"[:1000]
        ) from None


class Jvm:
    """A JVM that runs scripts of `groovy/`, one after the other. Raises ServerMissingError. It ends with this
    process, whose pipe it reads."""

    def __init__(self) -> None:
        if shutil.which("java") is None:
            raise ServerMissingError("Groovy needs Java: install a JRE (17 is known to work), and maven")
        path = ":".join(map(str, [*build(), _SCRIPTS]))
        options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", path]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._lock = threading.Lock()
        self.process = subprocess.Popen(
            ["java", *options, "groovy.ui.GroovyMain", _SCRIPTS / "serve.groovy"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def run(self, script: str, text: str) -> Any:
        """The last line that the script prints. Raises AssertionError with what ended it, or the JVM."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line, watchdog = "", threading.Timer(_RUN_SECONDS, self.process.kill)
        watchdog.start()
        try:
            with self._lock, contextlib.suppress(BrokenPipeError):
                print(json.dumps({"script": str(_SCRIPTS / script), "text": text}), file=self.process.stdin)
                self.process.stdin.flush()
                line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            self._errors.seek(0)
            raise AssertionError(f"{script} ended its JVM: {self._errors.read()}")
        answer = json.loads(line)
        if answer["error"] is not None:
            raise AssertionError(f"{script} failed: {answer['out']}{answer['error']}")
        return json.loads(answer["out"].splitlines()[-1])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._errors.close()


@functools.cache
def _shared() -> Jvm:
    jvm = Jvm()
    atexit.register(jvm.close)
    return jvm


def compiled(files: Sequence[Path]) -> list[Compiled]:
    """Raises ServerMissingError."""
    found = _shared().run("describe.groovy", "".join(f"{path}\n" for path in files))
    return [
        Compiled(
            tuple(one.get("tree", ())),
            tuple(base64.b64decode(text).decode() for text in one.get("strings", ())),
            one.get("error"),
        )
        for one in (found[str(path)] for path in files)
    ]


def checked(files: Sequence[Path]) -> list[str | None]:
    """What is wrong with each file, as far as the interpreter knows Declarative pipelines."""
    found = _shared().run("execute.groovy", json.dumps({"check": [str(path) for path in files]}))
    return [found[str(path)] for path in files]


@dataclass(frozen=True)
class Ran:
    """`result`: of the build, or REFUSED. `stages`: in the order in which they began, with their results.
    `events`: of agents, locks, input and test reports."""

    result: str
    stages: list[tuple[str, str]]
    events: list[str]
    error: str | None


def executed(
    file: Path,
    workspace: Path,
    environment: Mapping[str, str],
    parameters: Mapping[str, str | bool] | None = None,
    *,
    jvm: Jvm | None = None,
    **more: Any,
) -> Ran:
    """One build, in `workspace`; beside it, `log` and what was archived. A file `abort` there aborts it.
    `jvm`: another than that of the other builds. `more`: see `groovy/execute.groovy`."""
    asked = {
        "file": str(file),
        "workspace": str(workspace),
        "environment": dict(environment),
        "parameters": dict(parameters or {}),
        "abort": str(workspace.parent / "abort"),
        **more,
    }
    found = (jvm or _shared()).run("execute.groovy", json.dumps(asked))
    stages = [(name, result) for name, result in found["stages"]]
    return Ran(found["result"], stages, found["events"], found["error"])


if __name__ == "__main__":
    if sys.argv[1:] != ["build"]:
        sys.exit(__doc__)
    try:
        print(*build(), sep="\n")
    except ServerMissingError as error:
        sys.exit(f"{error}")
