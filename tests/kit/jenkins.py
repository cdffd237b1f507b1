"""A stand-in for a Jenkins: its HTTP interface as the client uses it, on a real socket. It runs no builds; a
test says when one leaves the queue, logs and ends. No Jenkins was at hand to compare it with; it follows
ParameterizedJobMixIn.java (201 and Location, 409, 500, defaults), Queue.java (items, 404 after they expire),
stapler's LargeText.java (X-Text-Size, X-More-Data, a start past the end), jenkins.io (crumbs).
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

CONTEXT = "/jenkins"
USER, TOKEN, PASSWORD = "anna", "11a-token-of-anna", "password-of-anna"


@dataclass
class FakeBuild:
    number: int
    parameters: dict[str, str]
    log: bytes = b""
    result: str | None = None
    complete: bool = False  # the log


@dataclass
class FakeJob:
    """`defaults`: its parameters, a list being choices, and None where there is no default; None: it has no
    parameters."""

    defaults: dict[str, str | list[str] | None] | None
    disabled: bool = False
    builds: list[FakeBuild] = field(default_factory=list)


@dataclass
class Item:
    number: int
    job: str
    parameters: dict[str, str]
    why: str | None = "Waiting for next available executor"
    build: FakeBuild | None = None
    cancelled: bool = False


@dataclass
class Fault:
    """What happens to the next `times` requests whose `METHOD path` has `pattern`. `lost`: it is carried out,
    and the connection is closed instead of an answer; `closed`: before anything; else that status."""

    pattern: str
    kind: str | int
    times: int = 1


class FakeJenkins:
    def __init__(self) -> None:
        self.jobs: dict[str, FakeJob] = {}
        self.items: list[Item] = []
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # METHOD target, as they came
        self.crumbs: dict[str, str] = {}  # session -> crumb
        self.allowed = True
        self.moved: str | None = None  # whereto every request is sent on
        self.lock = threading.RLock()
        self.url = ""

    def start(self, item: Item) -> FakeBuild:
        """It leaves the queue."""
        with self.lock:
            job = self.jobs[item.job]
            item.build = FakeBuild(len(job.builds) + 1, item.parameters)
            item.why = None
            job.builds.append(item.build)
            return item.build

    def fault(self, request: str) -> str | int | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault.kind
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    jenkins: FakeJenkins

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        with self.jenkins.lock:
            self.jenkins.requests.append(f"{self.command} {self.path}")
        if self.jenkins.moved is not None:
            self._answer(302, b"", {"Location": self.jenkins.moved})
            return
        kind = self.jenkins.fault(f"{self.command} {self.path}")
        if kind == "closed":
            self.close_connection = True
            return
        if isinstance(kind, int):
            self._answer(kind, b"<html>an error of Jenkins itself</html>")
            return
        with self.jenkins.lock:
            status, data, headers = self._serve(body)
        if kind == "lost":
            self.close_connection = True
            return
        self._answer(status, data, headers)

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"X-Jenkins": "2.462.3", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _serve(self, body: str) -> tuple[int, bytes, dict[str, str]]:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        path = parts.path.removeprefix(CONTEXT)
        if (refused := self._refused(path)) is not None:
            return refused
        if path == "/crumbIssuer/api/json":
            session = secrets.token_hex(8)
            crumb = self.jenkins.crumbs[session] = secrets.token_hex(16)
            document = {"crumb": crumb, "crumbRequestField": "Jenkins-Crumb"}
            cookie = {"Set-Cookie": f"JSESSIONID.1a={session}; Path={CONTEXT}; HttpOnly"}
            return 200, json.dumps(document).encode(), cookie
        if path == "/queue/api/json":
            items = [item for item in self.jenkins.items if item.build is None and not item.cancelled]
            return _json({"items": [self._item(item) for item in items]})
        if match := re.fullmatch(r"/queue/item/([0-9]+)/api/json", path):
            for item in self.jenkins.items:
                if item.number == int(match[1]):
                    return _json(self._item(item))
        if path == "/queue/cancelItem":
            for item in self.jenkins.items:
                item.cancelled |= item.number == int(query["id"][0])
            return 302, b"", {"Location": self.jenkins.url}
        if match := re.fullmatch(r"((?:/job/[^/]+)+)/(.*)", path):
            name = "/".join(unquote(part) for part in match[1].split("/job/")[1:])
            if name in self.jenkins.jobs:
                return self._job(name, self.jenkins.jobs[name], match[2], query, body)
        return 404, b"<html>Not Found</html>", {}

    def _refused(self, path: str) -> tuple[int, bytes, dict[str, str]] | None:
        scheme, _, encoded = self.headers.get("Authorization", "").partition(" ")
        user, _, secret = base64.b64decode(encoded).decode().partition(":")
        if scheme != "Basic" or user != USER or secret not in (TOKEN, PASSWORD):
            return 401, b"<html>Unauthorized</html>", {}
        if not self.jenkins.allowed:
            return 403, b"<html>anna is missing the Job/Build permission</html>", {}
        if self.command == "POST" and secret != TOKEN:  # tokens need no crumb
            match = re.search(r"JSESSIONID\.1a=([0-9a-f]+)", self.headers.get("Cookie", ""))
            crumb = self.jenkins.crumbs.get(match[1]) if match else None
            if crumb is None or crumb != self.headers.get("Jenkins-Crumb"):
                return 403, b"<html>No valid crumb was included in the request</html>", {}
        return None

    def _item(self, item: Item) -> dict[str, Any]:
        job = "".join(f"/job/{part}" for part in item.job.split("/"))
        return {
            "_class": "hudson.model.Queue$LeftItem" if item.build else "hudson.model.Queue$BuildableItem",
            "id": item.number,
            "why": item.why,
            "cancelled": item.cancelled,
            # Jenkins' own idea of its address
            "task": {"url": f"http://elsewhere.example.com{CONTEXT}{job}/"},
            "actions": [{}, _parameters(item.parameters)],
            "executable": {"number": item.build.number} if item.build else None,
        }

    def _job(
        self, name: str, job: FakeJob, rest: str, query: dict[str, list[str]], body: str
    ) -> tuple[int, bytes, dict[str, str]]:
        if rest == "api/json":
            definitions = [_definition(*one) for one in (job.defaults or {}).items()]
            builds = [
                {
                    "number": build.number,
                    "result": build.result,
                    "actions": [{}, _parameters(build.parameters)],
                }
                for build in reversed(job.builds)
            ]
            return _json({"property": [{}, {"parameterDefinitions": definitions}], "builds": builds})
        if rest in ("build", "buildWithParameters") and self.command == "POST":
            if job.disabled:
                return 409, b"<html>is not buildable</html>", {}
            if rest == "buildWithParameters" and job.defaults is None:
                return 500, b"<html>IllegalStateException: is not parameterized</html>", {}
            given = dict(parse_qsl(body, keep_blank_values=True))
            parameters = {
                key: given.get(key, str(value[0] if isinstance(value, list) else value or ""))
                for key, value in (job.defaults or {}).items()
            }
            for item in self.jenkins.items:  # the same twice in the queue is one
                if item.job == name and item.parameters == parameters and item.build is None:
                    break
            else:
                item = Item(100 + len(self.jenkins.items), name, parameters)
                self.jenkins.items.append(item)
            location = f"http://elsewhere.example.com{CONTEXT}/queue/item/{item.number}/"
            return 201, b"", {"Location": location}
        number, _, rest = rest.partition("/")
        if not number.isdigit() or not 0 < int(number) <= len(job.builds):
            return 404, b"", {}
        build = job.builds[int(number) - 1]
        if rest == "api/json":
            return _json({"building": build.result is None, "result": build.result})
        if rest == "stop" and self.command == "POST":
            build.result, build.complete = "ABORTED", True
            return 302, b"", {"Location": self.jenkins.url}
        if rest == "logText/progressiveText":
            start = int(query.get("start", ["0"])[0])
            end = len(build.log) if build.complete else build.log.rfind(b"\n") + 1  # whole lines
            start = 0 if start > end else start
            more = {} if build.complete else {"X-More-Data": "true"}
            return 200, build.log[start:end], {"X-Text-Size": str(end), **more}
        return 404, b"", {}


def _definition(name: str, default: str | list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "type": "StringParameterDefinition"}
    if isinstance(default, list):
        found |= {"type": "ChoiceParameterDefinition", "choices": default}
    return {**found, "defaultParameterValue": None if default is None else {"name": name}}


def _parameters(values: dict[str, str]) -> dict[str, Any]:
    return {"parameters": [{"name": name, "value": value} for name, value in values.items()]}


def _json(document: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(document).encode(), {"Content-Type": "application/json"}


@contextlib.contextmanager
def fake_jenkins() -> Iterator[FakeJenkins]:
    jenkins = FakeJenkins()
    handler = type("Handler", (_Handler,), {"jenkins": jenkins})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        jenkins.url = f"http://127.0.0.1:{server.server_port}{CONTEXT}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield jenkins
        finally:
            server.shutdown()
            thread.join(300)
            assert not thread.is_alive(), "the stand-in did not stop within 10 s"
