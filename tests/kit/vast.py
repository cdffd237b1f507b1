"""A stand-in of Vast.ai's API on this machine, for tests: its machines are local processes.

It is not Vast.ai. It knows the requests that `submit/rented/vast.py` sends, as the vendor's SDK (1.9.1) sends
them and reads their answers; `kit/vast_sdk.py` drives it with that SDK. What it bills is exact.

`faults` says for each request, by its number, what goes wrong with it:
"lost": the connection is cut before anything is done; "unheard": after it is done; "busy": 503, before;
"limited": 429, before; "moved": 302 to `url`/elsewhere; "late": the connection is cut, and it is done 40
requests later.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "account-key-of-the-stand-in"
Faults = Callable[[int], str | None]


def offer_row(number: int, **changes: Any) -> dict[str, Any]:
    """An offer as the vendor lists it: one RTX 4090 in Germany."""
    return {
        "id": number,
        "ask_contract_id": number,
        "machine_id": 1000 + number,
        "host_id": 7,
        "gpu_name": "RTX 4090",
        "num_gpus": 1,
        "gpu_ram": 24564,
        "cpu_cores_effective": 16.0,
        "cpu_ram": 64000,
        "disk_space": 500.0,
        "disk_bw": 3000.0,
        "dph_base": 0.4,
        "dph_total": 0.42,
        "min_bid": 0.2,
        "storage_total_cost": 0.02,
        "inet_down": 800.0,
        "inet_up": 800.0,
        "inet_down_cost": 0.0,
        "inet_up_cost": 0.0,
        "pcie_bw": 22.0,
        "bw_nvlink": 0.0,
        "reliability": 0.998,
        "geolocation": "Germany, DE",
        "duration": 30 * 86400.0,
        "verified": True,
        "external": False,
        "rentable": True,
        "rented": False,
        **changes,
    }


@dataclass
class Instance:
    """A machine that somebody has. `ended`: of its bill."""

    number: int
    offer: Mapping[str, Any]
    body: Mapping[str, Any]
    key: str
    began: float
    ended: float | None = None
    process: subprocess.Popen[bytes] | None = None
    actual: str | None = "running"
    granted: str = "running"

    def usd(self, now: float) -> float:
        rate = self.body["price"] + self.offer["storage_total_cost"] if self.body["price"] else None
        rate = self.offer["dph_total"] if rate is None else rate
        return float(rate) * ((now if self.ended is None else self.ended) - self.began) / 3600

    def row(self) -> dict[str, Any]:
        has_ended = self.process is not None and self.process.poll() is not None
        return {
            "id": self.number,
            "machine_id": self.offer["machine_id"],
            "label": self.body["label"],
            "actual_status": "exited" if has_ended else self.actual,
            "cur_state": self.granted,
            "intended_status": "running",
            "status_msg": "stand-in",
            "start_date": self.began,
            "extra_env": [[name, value] for name, value in self.body["env"].items()],
            "dph_total": self.offer["dph_total"],
        }


@dataclass
class Vast:
    """The account of one user. `runs`: whether machines run their script. `time`: of the bills."""

    offers: list[dict[str, Any]]
    runs: bool = True
    faults: Faults = lambda number: None
    time: Callable[[], float] = time.time
    instances: dict[int, Instance] = field(default_factory=dict)  # those that are there
    past: list[Instance] = field(default_factory=list)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    late: dict[int, tuple[str, str, Any, str]] = field(default_factory=dict)
    url: str = ""
    image: Mapping[str, str] = field(default_factory=dict)  # environment that the image sets
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def environment(self) -> dict[str, str]:
        """Of who has the account."""
        return {"VAST_URL": self.url, "VAST_API_KEY": KEY}

    def usd(self) -> float:
        """The bill of all machines, until now."""
        now = self.time()
        return sum(one.usd(now) for one in [*self.past, *self.instances.values()])

    def labels(self) -> list[str]:
        """Of all that was ever rented, in turn."""
        return [one.body["label"] for one in [*self.past, *self.instances.values()]]

    def interrupt(self, number: int) -> None:
        """Somebody bids more: the machine stops at once, and its disk goes on to cost."""
        with self.lock:
            instance = self.instances[number]
            self._kill(instance)
            instance.actual, instance.granted = "exited", "stopped"

    def answer(self, method: str, path: str, body: Any, key: str) -> tuple[int, dict[str, Any]]:
        """Status and document."""
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        with self.lock:
            mine = next((one.number for one in self.instances.values() if one.key == key), None)
            if key != KEY and mine is None:
                return 401, {"success": False, "error": "auth_error", "msg": "Invalid user key"}
            if key == KEY and (method, parts.path) == ("POST", "/api/v0/bundles/"):
                return 200, {"offers": self._search(body)}
            if key == KEY and (method, parts.path) == ("GET", "/api/v1/instances/"):
                return 200, self._page(query)
            if key == KEY and method == "PUT" and (found := re.fullmatch(r"/api/v0/asks/(\d+)/", parts.path)):
                return self._rent(int(found[1]), body)
            if found := re.fullmatch(r"/api/v0/instances/(\d+)/", parts.path):
                number = int(found[1])
                if key != KEY and number != mine:
                    return 403, {"success": False, "error": "auth_error", "msg": "not yours"}
                if number not in self.instances:
                    return 404, {"success": False, "error": "no_such_instance", "msg": "no such instance"}
                return self._one(method, number)
            return 404, {"success": False, "error": "no_such_path"}

    def _search(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        def fits(row: Mapping[str, Any]) -> bool:
            for name, rules in asked.items():
                if not isinstance(rules, dict):
                    continue
                for rule, value in rules.items():
                    has = row[name]
                    if not {"eq": has == value, "gte": has >= value}[rule]:
                        return False
            return True

        rows = [dict(row, is_bid=asked["type"] == "bid") for row in self.offers if fits(row)]
        rows.sort(key=lambda row: row["dph_total"])
        return rows[: asked.get("limit", 64)]

    def _rent(self, number: int, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        offer = next((row for row in self.offers if row["id"] == number and not row["rented"]), None)
        if offer is None:
            return 410, {"success": False, "error": "no_such_ask", "msg": f"no such ask {number}"}
        if body["price"] is not None and body["price"] < offer["min_bid"]:
            return 400, {"success": False, "error": "bid_too_low", "msg": "the bid is too low"}
        offer["rented"] = True
        contract = 5000 + len(self.past) + len(self.instances)
        instance = Instance(contract, offer, body, f"key-of-{contract}", self.time())
        self.instances[contract] = instance
        if self.runs:
            instance.process = self._start(instance)
        return 200, {"success": True, "new_contract": contract, "instance_api_key": instance.key}

    def _start(self, instance: Instance) -> subprocess.Popen[bytes]:
        """As `docker run --entrypoint sh`: nothing of this process's environment but where programs are."""
        folder = self.folder / str(instance.number)
        folder.mkdir()
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            **self.image,
            **instance.body["env"],
            "CONTAINER_ID": str(instance.number),
            "CONTAINER_API_KEY": instance.key,
        }
        with (folder / "container.log").open("ab") as log:
            return subprocess.Popen(
                [instance.body["onstart"], *instance.body["args"]],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _page(self, query: Mapping[str, str]) -> dict[str, Any]:
        numbers = sorted(self.instances)
        start, limit = int(query.get("after_token", 0)), int(query.get("limit", 25))
        rows = [self.instances[number].row() for number in numbers[start : start + limit]]
        more = start + limit if start + limit < len(numbers) else None
        return {"success": True, "instances": rows, "next_token": more, "total_instances": len(numbers)}

    def _one(self, method: str, number: int) -> tuple[int, dict[str, Any]]:
        instance = self.instances[number]
        if method == "DELETE":
            instance.ended = self.time()
            self.past.append(self.instances.pop(number))
            next(row for row in self.offers if row["id"] == instance.offer["id"])["rented"] = False
            # after the answer: it may be the machine that asks
            threading.Timer(0.2 if self.runs else 0.0, self._kill, [instance]).start()
            return 200, {"success": True}
        if method == "GET":
            return 200, {"instances": instance.row()}
        return 400, {"success": False, "error": "bad_request"}

    def _kill(self, instance: Instance) -> None:
        """All processes of the machine: each has its number in its environment."""
        if instance.process is None:
            return
        mark = f"CONTAINER_API_KEY={instance.key}\0".encode()
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in Path(entry.path, "environ").read_bytes() + b"\0":
                    os.kill(int(entry.name), signal.SIGKILL)
        instance.process.wait(30)

    @cached_property
    def folder(self) -> Path:
        """Of machines that run."""
        return Path(tempfile.mkdtemp(prefix="mlpipe-vast-"))

    def close(self) -> None:
        """Ends what is left."""
        for instance in [*self.instances.values(), *self.past]:
            self._kill(instance)
        if "folder" in vars(self):
            shutil.rmtree(self.folder, ignore_errors=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    vast: Vast

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        with self.vast.lock:
            number = len(self.vast.requests)
            self.vast.requests.append((self.command, self.path, body))
        fault = self.vast.faults(number)
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        for at in list(self.vast.late):
            if at <= number:
                self.vast.answer(*self.vast.late.pop(at))
        if fault == "late":
            self.vast.late[number + 40] = (self.command, self.path, body, key)
        if fault in ("lost", "late"):
            return self._cut()
        if fault in ("busy", "limited"):
            return self._reply(503 if fault == "busy" else 429, {"success": False, "msg": fault})
        if fault == "moved":
            return self._reply(302, {}, {"Location": f"{self.vast.url}/elsewhere"})
        status, document = self.vast.answer(self.command, self.path, body, key)
        if fault == "unheard":
            return self._cut()
        return self._reply(status, document)

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _reply(
        self, status: int, document: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def log_message(self, *_: Any) -> None:
        """Nothing: `requests` has it."""


@contextlib.contextmanager
def vast(offers: list[dict[str, Any]], **settings: Any) -> Iterator[Vast]:
    """A running one."""
    made = Vast(offers, **settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"vast": made}))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        made.close()
