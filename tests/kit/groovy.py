"""The Groovy that Jenkins pins, to compile Jenkinsfiles with: needs Java, and the jar from Maven Central.

    PYTHONPATH=tests python -m kit.groovy build

fetches it into ~/.cache/mlpipe/servers (or $MLPIPE_CACHE/servers), once; it needs Maven. That a file compiles
does not make it a Jenkinsfile: no step, section or option is known here.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kit.servers import ServerMissingError, cache

VERSION = "2.4.21"
_FETCH_SECONDS = 300
_COMPILE_SECONDS = 300
_SCRIPT = Path(__file__).parent / "groovy" / "describe.groovy"


@dataclass(frozen=True)
class Compiled:
    """`tree`: the calls by name, indented. `strings`: the constant text of their arguments, in order."""

    tree: tuple[str, ...]
    strings: tuple[str, ...]
    error: str | None


def jar_path() -> Path:
    return cache() / f"groovy-all-{VERSION}.jar"


def build() -> Path:
    path = jar_path()
    if path.exists():
        return path
    if shutil.which("mvn") is None:
        raise ServerMissingError("Groovy is fetched with Maven: install maven (and a Java to run it)")
    path.parent.mkdir(parents=True, exist_ok=True)
    artifact = f"-Dartifact=org.codehaus.groovy:groovy-all:{VERSION}:jar"
    for goal in (
        ["dependency:get", artifact, "-Dtransitive=false"],
        ["dependency:copy", artifact, f"-DoutputDirectory={path.parent}"],
    ):
        done = subprocess.run(
            ["mvn", "-q", "-B", *goal], capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False
        )
        if done.returncode:
            raise ServerMissingError(f"Groovy could not be fetched: {done.stdout[-500:]}{done.stderr[-500:]}")
    return path


def compiled(files: Sequence[Path]) -> list[Compiled]:
    """All in one JVM. Raises ServerMissingError."""
    if not jar_path().exists() or shutil.which("java") is None:
        raise ServerMissingError(
            "Groovy is not there: install Java and Maven, then run "
            "`PYTHONPATH=tests python -m kit.groovy build`"
        )
    done = subprocess.run(
        ["java", "-XX:TieredStopAtLevel=1", "-cp", jar_path(), "groovy.ui.GroovyMain", _SCRIPT],
        input="".join(f"{path}\n" for path in files),
        capture_output=True,
        text=True,
        timeout=_COMPILE_SECONDS,
        check=True,
    )
    found = json.loads(done.stdout)
    return [
        Compiled(
            tuple(one.get("tree", ())),
            tuple(base64.b64decode(text).decode() for text in one.get("strings", ())),
            one.get("error"),
        )
        for one in (found[str(path)] for path in files)
    ]


if __name__ == "__main__":
    if sys.argv[1:] != ["build"]:
        sys.exit(__doc__)
    try:
        print(build())
    except ServerMissingError as error:
        sys.exit(f"{error}")
