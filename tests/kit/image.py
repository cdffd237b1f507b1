"""The real images: a base by debootstrap, Containerfile and Containerfile.cli by buildah, a registry.

    PYTHONPATH=tests python -m kit.image build [Containerfile]     # default: Containerfile.cli

builds on Debian, as root, into a storage of its own in ~/.cache/mlpipe/servers, with what was built before.
The base stands in for docker.io/library/python:3.13-slim-bookworm where no registry can be reached: the same
Debian with Debian's own Python, without what the official image leaves out, too (documentation, languages,
bytecode).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import urllib3
from kit import cluster_build
from kit.cluster import Cluster
from kit.cluster_control import REGISTRY
from kit.servers import ServerMissingError, built, cache

ROOT = Path(__file__).parents[2]
CLI = "Containerfile.cli"
BASE = "localhost/mlpipe-base:bookworm"
_ARCHIVE = "base-bookworm-1.tar"
_PACKAGES = "python3-minimal,python3-venv,ca-certificates"
_LEFT_OUT = [f"usr/share/{name}" for name in ("doc", "info", "lintian", "locale", "man")]
_LEFT_OUT += ["dev", "proc", "sys", "var/cache", "var/lib/apt/lists", "var/log"]
_SECONDS = 1800
_REGISTRY_SECONDS = 60


class ImageError(Exception):
    """What buildah said."""


@dataclass(frozen=True)
class Built:
    """`name` in the storage. `layers_bytes`: unpacked, the base's first."""

    name: str
    layers_bytes: tuple[int, ...]


def build(containerfile: str = CLI) -> Built:
    """Builds, or finds everything built. Raises ServerMissingError, which says what to install, and
    ImageError."""
    check_machine()
    registry_program()
    _base()
    name = f"localhost/mlpipe{'-cli' if containerfile == CLI else ''}:test"
    # The machine's certificates, a proxy's own among them, and settings to heed them; none is in the image.
    settings = {
        "/etc/pip.conf": "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n",
        "/etc/uv/uv.toml": "system-certs = true\n",
    }
    volumes = ["--volume=/etc/ssl/certs:/etc/ssl/certs:ro"]
    for target, text in settings.items():
        path = _storage() / Path(target).name
        path.write_text(text)
        volumes.append(f"--volume={path}:{target}:ro")
    command = ["build", "--isolation=chroot", "--layers", f"--build-arg=BASE={BASE}", *volumes]
    _buildah(*command, f"--file={ROOT / containerfile}", f"--tag={name}", str(ROOT))
    return Built(name, _layers(name))


def check_machine() -> None:
    """Raises ServerMissingError."""
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            raise ServerMissingError(f"{program} is missing: install it (Debian: {program})")
    if os.geteuid():
        raise ServerMissingError("images are built by debootstrap and buildah: run it as root on Debian")


def check_built() -> None:
    """Raises ServerMissingError where not even what Debian gives to it is here."""
    check_machine()
    registry_program()
    if not (cache() / _ARCHIVE).exists():
        raise ServerMissingError("the image's base is not built: run `make cluster-build` on Debian")


def registry_program() -> Path:
    """Debian's, unpacked: installed, it would start a daemon."""
    if own := shutil.which("docker-registry"):
        return Path(own)
    folder = built(cache() / "debian-docker-registry", partial(cluster_build.unpack, "docker-registry"))
    return folder / "usr/bin/docker-registry"


def push(image: Built, running: Cluster, folder: Path) -> tuple[str, int]:
    """Starts a registry in the cluster's network, for as long as the calling thread lives, and pushes there.
    What pods pull, by digest, and the size of its layers as pulled, in bytes."""
    config = folder / "registry.json"  # which is YAML
    storage = {"filesystem": {"rootdirectory": str(folder / "registry")}}
    config.write_text(json.dumps({"version": 0.1, "http": {"addr": REGISTRY}, "storage": storage}))
    with (folder / "registry.log").open("wb") as log:
        process = running.popen([registry_program(), "serve", config], stdout=log, stderr=log)

    def get(path: str) -> Any:
        kind = "application/vnd.oci.image.manifest.v1+json"
        with running.inside(), urllib3.PoolManager(retries=False, timeout=5.0) as pool:
            try:
                return pool.request("GET", f"http://{REGISTRY}/v2/{path}", headers={"Accept": kind})
            except urllib3.exceptions.HTTPError:
                assert process.poll() is None, (folder / "registry.log").read_text()[-2000:]
                return None  # not listening yet

    running.wait_until("the registry", lambda: get(""), _REGISTRY_SECONDS)
    name = f"{REGISTRY}/{image.name.rpartition('/')[2].partition(':')[0]}"
    digest = folder / "digest"
    command = ["push", "--tls-verify=false", f"--digestfile={digest}", image.name, f"docker://{name}:test"]
    done = running.run(_command(*command), timeout=_SECONDS)
    assert done.returncode == 0, done.stderr
    manifest = json.loads(get(f"{name.partition('/')[2]}/manifests/{digest.read_text()}").data)
    return f"{name}@{digest.read_text()}", sum(layer["size"] for layer in manifest["layers"])


def _base() -> None:
    archive = built(cache() / _ARCHIVE, _bootstrap)
    if _buildah("images", "--quiet", "--filter", f"reference={BASE}").strip():
        return
    container = _buildah("from", "scratch").strip()
    try:
        _buildah("add", container, str(archive), "/")
        _buildah(
            "config", "--env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container
        )
        _buildah("commit", container, BASE)
    finally:
        _buildah("rm", container)


def _bootstrap(folder: Path) -> None:
    tree = folder / "tree"
    command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise ServerMissingError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (tree / "usr/local/bin/python").symlink_to("/usr/bin/python3")  # as the official image names it
    left_out = ["--exclude=__pycache__", *(f"--exclude=./{name}/*" for name in _LEFT_OUT)]
    target = folder / _ARCHIVE
    subprocess.run(
        ["tar", "-C", tree, "--numeric-owner", *left_out, "-cf", target, "."], check=True, timeout=300
    )


def _layers(name: str) -> tuple[int, ...]:
    found = json.loads(_buildah("inspect", "--type=image", name))
    store = _storage() / "root"
    (listed,) = store.glob("*-layers/layers.json")
    sizes = {
        one["diff-digest"]: one["diff-size"] for one in json.loads(listed.read_text()) if "diff-size" in one
    }
    return tuple(sizes[digest] for digest in found["OCIv1"]["rootfs"]["diff_ids"])


def _storage() -> Path:
    folder = cache() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _command(*arguments: str) -> list[str]:
    return ["buildah", f"--root={_storage()}/root", f"--runroot={_storage()}/run", *arguments]


def _buildah(*arguments: str) -> str:
    done = subprocess.run(_command(*arguments), capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise ImageError(f"buildah {arguments[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def main(arguments: list[str]) -> int:
    if arguments[:1] != ["build"]:
        print(__doc__)
        return 2
    try:
        image = build(*arguments[1:])
    except (ServerMissingError, ImageError) as error:
        print(error, file=sys.stderr)
        return 4 if isinstance(error, ServerMissingError) else 1
    print(f"{image.name}: {sum(image.layers_bytes) / 1e6:.1f} MB")
    for size in image.layers_bytes:
        print(f"  layer of {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
