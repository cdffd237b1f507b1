"""What the test cluster runs, built or unpacked once into ~/.cache/mlpipe/servers (see kit/servers.py).

Kubernetes and its company come from the Go modules' own source; etcd, containerd, runc and the CNI plugins
from Debian packages, unpacked beside them where the machine has none (installed, they would start daemons).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kit.servers import ServerMissingError, built, cache, go

KUBERNETES = "v1.36.3"
_SOURCES = Path(__file__).parent / "go"
TOOLS = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "host-local": "containernetworking-plugins",  # not its `bridge`: iproute2 has one, too
}
_DEBIAN_FOLDERS = ("usr/bin", "usr/sbin", "usr/lib/cni")


class BuildError(Exception):
    """What Go said of sources that are all there."""


@dataclass(frozen=True)
class Program:
    """`module` at `version`. Built from go/<name>/main.go where there is one, else `package` of the module
    itself. `manifests`: files and folders of the module that the cluster applies, kept beside the binary."""

    module: str
    version: str
    package: str = ""
    ldflags: str = ""
    manifests: tuple[str, ...] = ()


PROGRAMS = {
    "pause": Program("", KUBERNETES),
    "kube": Program(
        "k8s.io/kubernetes",
        KUBERNETES,
        # clients choke on the version string of a build without it
        ldflags=f"-X k8s.io/component-base/version.gitVersion={KUBERNETES}",
    ),
    "coredns": Program("github.com/coredns/coredns", "v1.14.6"),
    "jobset": Program(
        "sigs.k8s.io/jobset",
        "v0.10.1",
        manifests=("config/components/crd/bases", "config/components/webhook"),
    ),
    "kueue": Program(
        "sigs.k8s.io/kueue",
        "v0.17.0",  # the newest that is to be had; it serves v1beta2 of its API, and v1beta1 still
        package="cmd/kueue",
        manifests=("config/components/crd/bases", "config/components/webhook"),
    ),
    "trainer": Program(
        "github.com/kubeflow/trainer/v2",
        "v2.2.0",  # that of Kueue's go.mod, and the first whose TrainJobs a Kueue can change
        package="cmd/trainer-controller-manager",
        manifests=("manifests/base/crds", "manifests/base/webhook"),
    ),
    "gpuplugin": Program("k8s.io/kubelet", KUBERNETES.replace("v1.", "v0.", 1)),
    "kwok": Program("sigs.k8s.io/kwok", "v0.8.0", package="cmd/kwok", manifests=("kustomize/stage",)),
}


def path_of(name: str) -> Path:
    """Where the binary lies, or would lie."""
    program = PROGRAMS[name]
    source = _SOURCES / name / "main.go"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:8] if source.exists() else ""
    return cache() / "-".join(filter(None, (name, program.version, digest)))


def binary(name: str) -> Path:
    """Raises ServerMissingError when it was not built."""
    path = path_of(name)
    if not path.exists():
        raise ServerMissingError(f"{path.name} is not built: install Go, then run `make cluster-build`")
    return path


def manifests(name: str) -> Path:
    """Folder with the program's manifests, in the layout of its module."""
    path = binary(name)
    return path.parent / f"{path.name}.manifests"


def tool(name: str) -> Path:
    """A program of the Debian packages (or a CNI plugin): the machine's own, else the unpacked one. Raises
    ServerMissingError when there is neither."""
    if own := shutil.which(name, path=f"{os.environ['PATH']}:/usr/lib/cni:/usr/sbin:/sbin"):
        return Path(own)
    for folder in _DEBIAN_FOLDERS:
        if (path := cache() / f"debian-{TOOLS[name]}" / folder / name).exists():
            return path
    raise ServerMissingError(
        f"{name} is missing: install {TOOLS[name]}, or run `make cluster-build` on Debian"
    )


def build(name: str) -> Path:
    """Builds the program unless it is there."""
    program, path = PROGRAMS[name], path_of(name)
    if (_SOURCES / name).exists():
        return built(path, lambda folder: _build_own(name, program, folder / path.name))
    return built(path, lambda folder: _build_module(program, folder, path))


def unpack_debian() -> None:
    """Unpacks the packages that the machine lacks. Raises ServerMissingError where that fails."""
    for name, package in TOOLS.items():
        try:
            tool(name)
        except ServerMissingError:
            built(cache() / f"debian-{package}", partial(unpack, package))


def build_all() -> list[Path | ServerMissingError]:
    """Each program, or why it is not to be had. Raises BuildError for one that is, and does not build."""
    found: list[Path | ServerMissingError] = []
    try:
        unpack_debian()
    except ServerMissingError as error:
        found.append(error)
    for name in PROGRAMS:
        try:
            found.append(build(name))
        except ServerMissingError as error:
            found.append(error)
    return found


def _build_own(name: str, program: Program, target: Path) -> None:
    folder = target.parent / "source"
    folder.mkdir()
    shutil.copy(_SOURCES / name / "main.go", folder)
    (folder / "go.mod").write_text(_go_mod(name, program))
    _go_build("mod", program, target, ".", folder)


def _go_mod(name: str, program: Program) -> str:
    """Requires the one module, with its own settings. k8s.io/kubernetes replaces its staging modules by
    folders that the served module lacks: the same modules' releases, v0.X for its v1.X, stand in for them."""
    if not program.module:
        return f"module mlpipe.test/{name}\n"
    theirs = Path(_download(program)["GoMod"]).read_text()
    lines = [f"module mlpipe.test/{name}", *re.findall(r"^(?:go|godebug) .*$", theirs, re.M)]
    lines.append(f"require {program.module} {program.version}")
    staging = program.version.replace("v1.", "v0.", 1)
    lines += [
        f"replace {one} => {one} {staging}" for one in re.findall(r"^\t(\S+) => \./staging", theirs, re.M)
    ]
    return "\n".join(lines) + "\n"


def _build_module(program: Program, folder: Path, path: Path) -> None:
    # not `go install`: that asks for the list of versions, which is not to be had for every module
    source = Path(_download(program)["Dir"])
    _go_build("readonly", program, folder / path.name, f"./{program.package}", source)
    target = path.parent / f"{path.name}.manifests"
    shutil.rmtree(target, ignore_errors=True)
    for one in program.manifests:
        shutil.copytree(source / one, target / one, copy_function=shutil.copyfile)
    for made in [target, *target.rglob("*")] if program.manifests else []:
        made.chmod(0o755 if made.is_dir() else 0o644)  # the module cache is read-only


def _go_build(mod: str, program: Program, target: Path, package: str, folder: Path) -> None:
    """Raises ServerMissingError where a module is not to be had, BuildError where all are here."""
    flags = [f"-mod={mod}", "-ldflags", f"-s -w {program.ldflags}"]
    try:
        go(["go", "build", *flags, "-o", str(target), package], folder)
    except ServerMissingError as error:
        with contextlib.suppress(ServerMissingError):
            go(["env", "GOPROXY=off", "go", "list", f"-mod={mod}", "-deps", package], folder)
            raise BuildError(str(error)) from None
        raise


def _download(program: Program) -> dict[str, str]:
    text = go(["go", "mod", "download", "-json", f"{program.module}@{program.version}"], cache())
    described: dict[str, str] = json.loads(text)
    return described


def unpack(package: str, folder: Path) -> None:
    if shutil.which("apt-get") is None:
        raise ServerMissingError(f"no apt-get to get it from: install {package}")
    download = ["apt-get", "download", "-qq", package]
    if subprocess.run(download, cwd=folder, capture_output=True, timeout=300).returncode:
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True, timeout=300)
        done = subprocess.run(download, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise ServerMissingError(
                f"install {package}; {' '.join(download)} failed:\n{done.stderr[-1000:]}"
            )
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, folder / f"debian-{package}"], check=True, timeout=300)
