"""Images without a registry: OCI archives written here, and the worker's content mounted by the runtime.

The worker's image is little more than empty directories. The machine's /usr, this Python installation, its
virtual environment and the sources are bind mounts, read-only, that the runtime adds to every container
(`base_spec`). So pods look as they would with a real image of several gigabytes: no volume and no patch makes
them differ from what a user submits, and namespaces that enforce `restricted`, which refuse hostPath volumes,
take them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.cluster_build import binary, tool

PAUSE = "mlpipe.test/pause:1"
WORKER = "mlpipe.test/worker:1"
USER_ID = 10001
_REPOSITORY = Path(__file__).parents[2]
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class Image:
    """`name` with its tag; `digest`: sha256:... of the manifest."""

    name: str
    digest: str
    archive: Path

    @property
    def by_digest(self) -> str:
        return f"{self.name.rpartition(':')[0]}@{self.digest}"


def pause_image(folder: Path) -> Image:
    layer = _layer({"pause": binary("pause").read_bytes()})
    return _write(folder / "pause.tar", PAUSE, layer, {"Entrypoint": ["/pause"]})


def worker_image(folder: Path) -> Image:
    """Runs whatever command as uid 10001, with the virtual environment's programs on PATH."""
    files: dict[str, bytes | str] = {
        "etc/passwd": f"root:x:0:0::/:/bin/sh\nmlpipe:x:{USER_ID}:{USER_ID}::/tmp:/bin/sh\n".encode(),
        "etc/group": f"root:x:0:\nmlpipe:x:{USER_ID}:\n".encode(),
    }
    files |= {name: os.readlink(f"/{name}") for name in _links()}
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
    config = {
        "User": f"{USER_ID}:{USER_ID}",
        "WorkingDir": "/",
        "Env": [f"PATH={path}", "HOME=/tmp", "LANG=C.UTF-8"],
    }
    return _write(folder / "worker.tar", WORKER, _layer(files, folders=["tmp", "var/tmp"]), config)


def base_spec(path: Path) -> Path:
    """Writes the OCI runtime specification that every container starts from."""
    done = subprocess.run([tool("ctr"), "oci", "spec"], capture_output=True, check=True, timeout=60)
    spec: dict[str, Any] = json.loads(done.stdout)
    del spec["process"]["rlimits"]  # 1024 open files; the daemon's own limit is the usual one
    spec["mounts"] += [
        {
            "destination": str(one),
            "source": str(one),
            "type": "bind",
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }
        for one in _mounts()
    ]
    path.write_text(json.dumps(spec))
    return path


def _mounts() -> list[Path]:
    """What the worker sees of the machine, without folders inside others of the list."""
    wanted = [
        Path("/usr"),
        Path(sys.base_prefix),
        Path(sys.prefix),
        *(_REPOSITORY / n for n in ("src", "pipelines", "tests")),
    ]
    wanted += [Path(f"/{name}") for name in ("lib", "lib64", "bin") if name not in _links()]
    return [one for one in wanted if one.exists() and not any(other in one.parents for other in wanted)]


def _links() -> list[str]:
    """/lib and its like, where they point into /usr."""
    return [name for name in ("lib", "lib64", "bin", "sbin") if Path(f"/{name}").is_symlink()]


def _layer(files: Mapping[str, bytes | str], folders: Sequence[str] = ()) -> bytes:
    """A tar of files (bytes), links (text) and folders that everyone may write to."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size, entry.mode = len(content), 0o755
                archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _write(path: Path, name: str, layer: bytes, config: Mapping[str, object]) -> Image:
    blobs: dict[str, bytes] = {}

    def add(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    layers = [add(layer, _LAYER)]
    described = {
        "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layers[0]["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": add(json.dumps(described).encode(), _CONFIG),
        "layers": layers,
    }
    entry = add(json.dumps(manifest).encode(), _MANIFEST)
    index = {"schemaVersion": 2, "manifests": [{**entry, "annotations": {"io.containerd.image.name": name}}]}
    blobs |= {"index.json": json.dumps(index).encode(), "oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
    with tarfile.open(path, "w") as archive:
        for blob, content in blobs.items():
            info = tarfile.TarInfo(blob)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return Image(name, str(entry["digest"]), path)
