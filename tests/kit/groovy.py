"""The Groovy that Jenkins pins and its CPS engine, to compile and to run Jenkinsfiles: needs Java, and three
jars from Maven Central.

    PYTHONPATH=tests python -m kit.groovy build

fetches them into ~/.cache/mlpipe/servers (or $MLPIPE_CACHE/servers), once, with Maven; the first test that
needs them does so too. This is no Jenkins: `groovy/execute.groovy` knows what mlpipe writes.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
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


def _groovy(
    script: str, text: str, started: Callable[[subprocess.Popen[str]], None] = lambda jvm: None
) -> Any:
    """The last line that the script prints. Raises ServerMissingError."""
    if shutil.which("java") is None:
        raise ServerMissingError("Groovy needs Java: install a JRE (17 is known to work), and maven")
    path = ":".join(map(str, [*build(), _SCRIPTS]))
    with subprocess.Popen(
        ["java", "-XX:TieredStopAtLevel=1", "-cp", path, "groovy.ui.GroovyMain", _SCRIPTS / script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as jvm:
        started(jvm)
        try:
            out, err = jvm.communicate(text, timeout=_RUN_SECONDS)
        except BaseException:
            jvm.kill()
            raise
    if jvm.returncode:
        raise AssertionError(f"{script} failed: {out}{err}")
    return json.loads(out.splitlines()[-1])


def compiled(files: Sequence[Path]) -> list[Compiled]:
    """All in one JVM. Raises ServerMissingError."""
    found = _groovy("describe.groovy", "".join(f"{path}\n" for path in files))
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
    found = _groovy("execute.groovy", json.dumps({"check": [str(path) for path in files]}))
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
    started: Callable[[subprocess.Popen[str]], None] = lambda jvm: None,
    **more: Any,
) -> Ran:
    """One build, in `workspace`; beside it, `log` and what was archived. A file `abort` there aborts it.
    `started` is called with the JVM. `more`: see `groovy/execute.groovy`."""
    asked = {
        "file": str(file),
        "workspace": str(workspace),
        "environment": dict(environment),
        "parameters": dict(parameters or {}),
        "abort": str(workspace.parent / "abort"),
        **more,
    }
    found = _groovy("execute.groovy", json.dumps(asked), started)
    stages = [(name, result) for name, result in found["stages"]]
    return Ran(found["result"], stages, found["events"], found["error"])


if __name__ == "__main__":
    if sys.argv[1:] != ["build"]:
        sys.exit(__doc__)
    try:
        print(*build(), sep="\n")
    except ServerMissingError as error:
        sys.exit(f"{error}")
