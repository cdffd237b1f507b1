"""Real Prometheus and Alertmanager on this machine, from PATH or from Debian packages unpacked once.

    PYTHONPATH=tests python -m kit.prometheus build
    PYTHONPATH=tests python -m kit.prometheus build-3

The first unpacks what the machine lacks into ~/.cache/mlpipe/servers (installed, the packages would start
daemons). The second builds a Prometheus 3 there, from its Go module, in some minutes: where there is one, the
queries are asked of both.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from kit.cluster_build import unpack
from kit.servers import ServerMissingError, built, cache, die_with_parent, end, free_port, go

# program -> the Debian package, and the program's name there
TOOLS = {
    "prometheus": ("prometheus", "prometheus"),
    "promtool": ("prometheus", "promtool"),
    "alertmanager": ("prometheus-alertmanager", "prometheus-alertmanager"),
}
_MODULE_3 = ("github.com/prometheus/prometheus", "v0.315.0")
SCRAPE_SECONDS = 1
# Debian's Alertmanager reads its templates in /usr/share, where those of an unpacked package are not: it gets
# a view of that folder of its own, in which they are.
_WITH_SHARE = (
    'mount -t overlay overlay -o "lowerdir=$1/usr/share:/usr/share" /usr/share && shift && exec "$@"'
)
_READY_SECONDS = 300
_ANSWER_SECONDS = 120


def tool(name: str) -> Path:
    """Raises ServerMissingError when the machine has none and none was unpacked."""
    package, renamed = TOOLS[name]
    if found := shutil.which(name) or shutil.which(renamed):
        return Path(found)
    if (path := cache() / f"debian-{package}" / "usr/bin" / renamed).exists():
        return path
    raise ServerMissingError(
        f"{name} is missing: install {package}, or run `PYTHONPATH=tests python -m kit.prometheus build`"
        " on Debian"
    )


def build() -> list[Path]:
    """Unpacks the packages of the tools that the machine lacks."""
    for name, (package, _) in TOOLS.items():
        try:
            tool(name)
        except ServerMissingError:
            built(cache() / f"debian-{package}", partial(unpack, package))
    return [tool(name) for name in TOOLS]


def path_3() -> Path:
    """Of a Prometheus 3; there is one if `build_3` made it."""
    return cache() / f"prometheus-{_MODULE_3[1]}"


def build_3() -> Path:
    """In a copy of the module's sources: `go install` refuses a module with replacements."""

    def make(folder: Path) -> None:
        told = go(["go", "mod", "download", "-json", "@".join(_MODULE_3)], folder)
        sources = folder / "sources"
        shutil.copytree(json.loads(told)["Dir"], sources)
        for path in (sources, *sources.rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        # without the service discoveries of clouds: they are most of the build, and files are enough here
        argv = [
            "go",
            "build",
            "-tags",
            "remove_all_sd",
            "-ldflags",
            "-s -w",
            "-o",
            str(folder / path_3().name),
            "./cmd/prometheus",
        ]
        go(["env", "GOWORK=off", "GOFLAGS=-trimpath -buildvcs=false -mod=mod", *argv], sources)

    return built(path_3(), make)


@dataclass
class Prometheus:
    """A running one. `targets`: its file of targets, read anew when it changes."""

    url: str
    targets: Path
    folder: Path | None = None  # of the run that it scrapes
    other: Prometheus | None = None  # of another version, over the same targets

    def scrape(self, ports: Sequence[int], **labels: str) -> None:
        """Adds targets on 127.0.0.1, with further labels, as a PodMonitor adds `node` and `pod`."""
        known = json.loads(self.targets.read_text())
        known.append({"targets": [f"127.0.0.1:{port}" for port in ports], "labels": labels})
        fresh = self.targets.with_suffix(".new")
        fresh.write_text(json.dumps(known))
        fresh.replace(self.targets)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query, now. Raises RuntimeError with Prometheus' own words."""
        path = f"/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        try:
            result: list[dict[str, Any]] = _json(self.url + path)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{expr}: {error.read().decode()}") from None
        return result

    def is_ready(self) -> bool:
        return _ready(self.url)

    def firing(self, run: str | None = None) -> dict[str, dict[str, str]]:
        """alertname -> labels of one of its firing alerts, of that run if one is named."""
        alerts = _json(f"{self.url}/api/v1/alerts")["data"]["alerts"]
        found = [one["labels"] for one in alerts if one["state"] == "firing"]
        return {one["alertname"]: one for one in found if run in (None, one.get("run"))}


@contextlib.contextmanager
def prometheus(
    folder: Path,
    *,
    rules: Path | None = None,
    alertmanager: str | None = None,
    program: Path | None = None,
    targets: Path | None = None,
) -> Iterator[Prometheus]:
    """Scrapes and evaluates `rules` once a second; sends alerts to the Alertmanager at that URL. `program`:
    another than this machine's. `targets`: the file of another one, whose targets this one scrapes too."""
    folder.mkdir(parents=True)
    if targets is None:
        targets = folder / "targets.json"
        targets.write_text("[]")
    config: dict[str, Any] = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "1s"},
        "scrape_configs": [
            {"job_name": "mlpipe", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]},
        ],
    }
    if rules is not None:
        config["rule_files"] = [str(rules)]
    if alertmanager is not None:
        address = alertmanager.removeprefix("http://")
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [address]}]}]}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(program or tool("prometheus")), "--config.file=prometheus.yml", "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    ]  # fmt: skip
    with _running(command, folder, f"http://{address}"):
        yield Prometheus(f"http://{address}", targets)


def of_pod_monitor(monitor: dict[str, Any], pods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets of a PodMonitor, for a file of targets: Debian's Prometheus is built without the discovery
    of pods, and there is no Prometheus operator. Which pods, ports and labels are as that operator's; `pods`:
    of the monitor's namespace, as the API server gives them."""
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    found = []
    for pod in pods:
        chosen = wanted <= pod["metadata"]["labels"].items()
        if not chosen or pod["status"]["phase"] in ("Failed", "Succeeded") or "podIP" not in pod["status"]:
            continue
        meta = {"__meta_kubernetes_pod_node_name": pod["spec"]["nodeName"]}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            for container in pod["spec"]["containers"]:
                for port in container.get("ports", ()):
                    if port.get("name") != endpoint["port"]:
                        continue
                    labels = {
                        "namespace": pod["metadata"]["namespace"],
                        "pod": pod["metadata"]["name"],
                        "container": container["name"],
                        "endpoint": endpoint["port"],
                        "__metrics_path__": endpoint["path"],
                    }
                    for own in endpoint.get("relabelings", ()):
                        labels[own["targetLabel"]] = ";".join(meta[name] for name in own["sourceLabels"])
                    address = f"{pod['status']['podIP']}:{port['containerPort']}"
                    found.append({"targets": [address], "labels": labels})
    return found


@contextlib.contextmanager
def alertmanager(folder: Path) -> Iterator[str]:
    """Its URL. It keeps what it is sent and tells nobody."""
    folder.mkdir(parents=True)
    (folder / "alertmanager.yml").write_text(
        json.dumps({"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]})
    )
    address = f"127.0.0.1:{free_port()}"
    program = tool("alertmanager")
    command = [
        str(program), "--config.file=alertmanager.yml", "--storage.path=data",
        f"--web.listen-address={address}", "--cluster.listen-address=",
    ]  # fmt: skip
    if program.is_relative_to(cache()):
        root = program.parents[2]
        command = [
            "unshare",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            _WITH_SHARE,
            "sh",
            str(root),
            *command,
        ]
    with _running(command, folder, f"http://{address}"):
        yield f"http://{address}"


def hasty_rules(rules: Path, folder: Path) -> Path:
    """A copy of them in which alerts wait 5 s at most; not less: ranks are not scraped all at once."""
    known = yaml.safe_load(rules.read_text())
    for group in known["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "5s"
    copy = folder / "rules.yaml"
    copy.write_text(yaml.safe_dump(known))
    return copy


def has_data(server: Prometheus, expr: str) -> bool:
    return any(math.isfinite(float(sample["value"][1])) for sample in server.query(expr))


def alerts_at(url: str, run: str) -> dict[str, dict[str, Any]]:
    """alertname -> that alert of a run, as the Alertmanager has it."""
    alerts = _json(f"{url}/api/v2/alerts")
    return {one["labels"]["alertname"]: one for one in alerts if one["labels"].get("run") == run}


def _json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as answer:
        return json.load(answer)


@contextlib.contextmanager
def _running(command: list[str], folder: Path, url: str) -> Iterator[None]:
    log = folder / "server.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
    try:
        deadline = time.monotonic() + _READY_SECONDS
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} is not ready; its log ends:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        end(process)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
            return True
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    if arguments not in (["build"], ["build-3"]):
        print(__doc__)
        return 2
    try:
        print("\n".join(map(str, build() if arguments == ["build"] else [build_3()])))
    except ServerMissingError as error:
        print(error)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
