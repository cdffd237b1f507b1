"""Helm 4, built from its Go module, for the tests of the chart.

    PYTHONPATH=tests python -m kit.helm build

builds it beside the test servers, once; it needs Go.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kit.servers import ServerMissingError, built, cache, go

MODULE, VERSION = "helm.sh/helm/v4/cmd/helm", "v4.3.1"
_COMMAND_SECONDS = 300


def binary_path() -> Path:
    return cache() / f"helm-{VERSION}"


def binary() -> Path:
    """Raises ServerMissingError when it was not built."""
    if not (path := binary_path()).exists():
        raise ServerMissingError("helm is not built: install Go, then run `make servers`")
    return path


def build() -> Path:
    """Builds helm unless it is there. Raises ServerMissingError when it cannot."""

    def make(folder: Path) -> None:
        go(["go", "install", "-ldflags", "-s -w", f"{MODULE}@{VERSION}"], folder)
        (folder / "helm").rename(folder / binary_path().name)

    return built(binary_path(), make)


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs it, offline and without a look at anybody's cluster, plugins or repositories."""
    with tempfile.TemporaryDirectory() as folder:
        homes = {f"HELM_{kind}_HOME": f"{folder}/{kind}" for kind in ("CACHE", "CONFIG", "DATA")}
        return subprocess.run(
            [binary(), *arguments],
            env={**os.environ, **homes, "HELM_PLUGINS": f"{folder}/plugins", "KUBECONFIG": os.devnull},
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )


def main(arguments: list[str]) -> int:
    if arguments != ["build"]:
        print(__doc__)
        return 2
    try:
        print(f"helm: {build()}")
    except ServerMissingError as error:
        print(error)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
