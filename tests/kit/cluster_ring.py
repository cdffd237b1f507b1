"""What the cluster ring needs and this machine has not, a line each, and exit code 4; else nothing, and 0.

    PYTHONPATH=tests python -m kit.cluster_ring

Where it says nothing, a test of the ring that is skipped is a failure.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kit import cluster, cluster_build, image, servers, slurm
from kit.cluster_process import ClusterError, Namespaces
from kit.servers import ServerMissingError


def needs() -> list[Callable[[], object]]:
    """Each raises ServerMissingError where something is missing."""
    return [
        cluster.check_machine,
        _namespaces,
        *(partial(cluster_build.binary, name) for name in cluster_build.PROGRAMS),
        *(partial(cluster_build.tool, name) for name in cluster_build.TOOLS),
        partial(servers.binary, "minio"),
        image.check_built,
        slurm.check_machine,
    ]


def _namespaces() -> None:
    """Of its own, with layered file systems in them, where `tests/cluster/conftest.py` has its nodes."""
    folder = Path(tempfile.mkdtemp(prefix="mlpipe-ring-", dir="/var/tmp"))
    try:
        for name in ("lower", "upper", "work", "merged"):
            (folder / name).mkdir()
        layers = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
        Namespaces(f"ip link set lo up\nmount -t overlay overlay -o '{layers}' '{folder}/merged'").close()
    except (ClusterError, OSError) as error:
        raise ServerMissingError(str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    missing = []
    for need in needs():
        try:
            need()
        except ServerMissingError as error:
            missing.append(str(error))
    print(*missing, sep="\n", end="\n" if missing else "")
    return 4 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
