"""A stand-in for a Kubernetes API server, on a real socket: for faults that a real one does not do on demand.

    with ApiServer() as server:
        environment = {"KUBECONFIG": str(server.kubeconfig(folder))}
        server.inject("POST", "/jobs", Fault("lose"))       # of the next such request
        ...
        server.objects[("jobs", "a")], server.requests      # ["POST /apis/batch/v1/namespaces/ml/jobs", ...]

It stores what it is sent and answers as the API server of 1.36 does, Status objects included; it validates
nothing and runs nothing. That mlpipe gets along with the real one is what tests/cluster shows.

What a fault does to a request (`status`: answered so; nothing is applied, but for lose):

    reset      connection closed without FIN, nothing applied
    lose       applied, connection closed instead of the answer
    cut        applied, half of the answer, then closed
    page       a proxy's HTML page with `status`
    status     a Status object with `status`, `message` and `headers`
    pass       none, for one that is to come later

Lists have a version, from which a watch goes on; see `put`, `drop`, `compact`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "ml"
TOKEN = "token-that-nobody-may-see"
_GROUPS = {
    "batch": "jobs",
    "jobset.x-k8s.io": "jobsets",
    "trainer.kubeflow.org": "trainjobs",
    "kueue.x-k8s.io": "workloads",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    how: Literal["reset", "lose", "cut", "page", "status", "pass"]
    status: int = 500
    message: str = "injected"
    headers: Mapping[str, str] = field(default_factory=dict)


class ApiServer:
    """Listens on a free port of 127.0.0.1 while it is entered.

    objects: by plural and name, of the one namespace. missing: plurals whose CRD is not installed. denied:
    "verb resource" pairs that RBAC refuses. held: names that stay, being deleted, when they
    are deleted in the foreground: what they own is still there.
    page: objects on a page of a list. versions: that are served, by group; of others every one.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {}
        self.missing: set[str] = set()
        self.denied: set[str] = set()
        self.held: set[str] = set()
        self.versions = {"kueue.x-k8s.io": ["v1beta1", "v1beta2"]}
        self.page = 500
        self.closed = True
        self.token = TOKEN
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.news = threading.Condition(self.lock)
        self.events: list[
            tuple[str, str, Json]
        ] = []  # what, plural, object; the version is the number of them
        self.oldest = 0  # version that a watch may go on from
        self.watches = 0  # open ones
        self.faults: list[tuple[str, str, Fault]] = []
        self._server: _Server | None = None
        self._port = 0
        self.put("namespaces", {"metadata": {"name": NAMESPACE, "labels": {}}})

    def __enter__(self) -> ApiServer:
        self.back()
        return self

    def __exit__(self, *_: object) -> None:
        self.away()

    def away(self) -> None:
        """Open connections are cut, new ones refused."""
        if self._server is not None:
            with self.news:
                self.closed = True
                self.news.notify_all()
            self._server.shutdown()
            self._server.server_close()
            for connection in list(self._server.connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._server = None

    def back(self) -> None:
        """On the port of before."""
        self.closed = False
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.stand_in = self
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kubeconfig(self, folder: Path, *, namespace: str | None = NAMESPACE, token: str = TOKEN) -> Path:
        """With one context, `test`, that it is the current one of."""
        context = {"cluster": "c", "user": "u", **({"namespace": namespace} if namespace else {})}
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": context}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(body))
        return path

    def inject(self, method: str, path: str, fault: Fault, times: int = 1) -> None:
        """For the next `times` requests of `method` whose path contains `path`."""
        with self.lock:
            self.faults += [(method, path, fault)] * times

    def put(self, plural: str, body: Json) -> Json:
        """As its controllers would: makes it, or changes it."""
        with self.news:
            return self._put(plural, body)

    def _put(self, plural: str, body: Json) -> Json:
        body["metadata"].setdefault("uid", secrets.token_hex(8))
        key = plural, body["metadata"]["name"]
        self.note("MODIFIED" if key in self.objects else "ADDED", plural, body)
        self.objects[key] = body
        return body

    def drop(self, plural: str, name: str) -> None:
        """It is gone."""
        with self.news:
            self.note("DELETED", plural, self.objects.pop((plural, name)))

    def compact(self) -> None:
        """No watch may go on from before; open ones are told so (410)."""
        with self.news:
            self.oldest = len(self.events) + 1
            self.note("BOOKMARK", "", {"metadata": {}})

    def note(self, what: str, plural: str, body: Json) -> None:
        """Under the lock."""
        self.events.append((what, plural, copy.deepcopy(body)))
        self.news.notify_all()

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for found in self.faults:
                if found[0] == method and found[1] in path:
                    self.faults.remove(found)
                    return found[2]
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    stand_in: ApiServer

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: set[socket.socket] = set()

    def handle_error(self, *_: object) -> None:
        """Connections that a test cut are no news."""


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        connections = cast(_Server, self.server).connections
        connections.add(self.connection)
        super().handle()
        connections.discard(self.connection)

    def _serve(self) -> None:
        server = cast(_Server, self.server).stand_in
        length = int(self.headers.get("Content-Length", 0))
        body: Json = json.loads(self.rfile.read(length)) if length else {}
        with server.lock:
            server.requests.append(f"{self.command} {self.path}")
            server.headers.append(dict(self.headers))
        fault = server.take_fault(self.command, self.path)
        if fault is None or fault.how in ("lose", "cut", "pass"):
            status, answer = self._answer(server, body)
        elif fault.how == "status":
            status, answer = fault.status, _status(fault.status, fault.message)
        else:
            status, answer = fault.status, "<html>Bad gateway</html>"
        if status == 200 and "watch=true" in self.path:
            self._watch(server)
            return
        text = answer if isinstance(answer, str) else json.dumps(answer)
        data = text.encode()
        if fault is not None and fault.how in ("reset", "lose"):
            self._drop()
            return
        self.send_response(status)
        for name, value in (fault.headers if fault else {}).items():
            self.send_header(name, value)
        kind = "text/plain" if isinstance(answer, str) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault is not None and fault.how == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self._drop()
            return
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = do_PATCH = _serve

    def _watch(self, server: ApiServer) -> None:
        """In chunks, each an event; until the server goes away or the version is too old."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        plural, at = url.path.rpartition("/")[2], int(query["resourceVersion"])
        self.close_connection = True
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with server.news:
            server.watches += 1
        try:
            while True:
                with server.news:
                    while len(server.events) <= at and not server.closed:
                        server.news.wait(60)
                    if server.closed:
                        return
                    found, at = server.events[at:], len(server.events)
                    too_old = at - len(found) < server.oldest
                if too_old:
                    found = [("ERROR", plural, _status(410, "too old resource version"))]
                for what, kind, body in found:
                    if kind == plural and (what == "ERROR" or _matches(body, query)):
                        line = json.dumps({"type": what, "object": body}).encode() + b"\n"
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                if too_old:
                    self.wfile.write(b"0\r\n\r\n")
                    return
        except OSError:
            return
        finally:
            with server.news:
                server.watches -= 1

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()

    def _answer(self, server: ApiServer, body: Json) -> tuple[int, Json | str]:
        if self.headers.get("Authorization") != f"Bearer {server.token}":
            return 401, _status(401, "Unauthorized")
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        try:
            with server.lock:
                return self._apply(server, url.path.strip("/").split("/"), query, body)
        except _Refused as refusal:
            return refusal.status, _status(refusal.status, refusal.message)

    def _apply(
        self, server: ApiServer, parts: list[str], query: Mapping[str, str], body: Json
    ) -> tuple[int, Json | str]:
        if parts == ["version"]:
            return 200, {"major": "1", "minor": "36", "gitVersion": "v1.36.3"}
        if parts[-1] == "selfsubjectaccessreviews":
            asked = body["spec"]["resourceAttributes"]
            allowed = f"{asked['verb']} {asked['resource']}" not in server.denied
            return 201, {**body, "status": {"allowed": allowed}}
        if parts[0] == "apis" and len(parts) < 4:
            if _GROUPS.get(parts[1], "") in server.missing:
                return 404, "404 page not found\n"
            versions = [{"version": one} for one in server.versions.get(parts[1], ("v1",))]
            return 200, {"kind": "APIGroup", "versions": versions}
        if parts[0] == "apis" and parts[2] not in server.versions.get(parts[1], (parts[2],)):
            return 404, "404 page not found\n"
        if "namespaces" in parts:
            at = parts.index("namespaces")
            namespace, rest = parts[at + 1], parts[at + 2 :] or ["namespaces", parts[at + 1]]
        else:  # of the whole cluster
            namespace, rest = NAMESPACE, parts[2 if parts[0] == "api" else 3 :]
        plural, name = rest[0], rest[1] if len(rest) > 1 else ""
        if plural in server.missing:
            return 404, "404 page not found\n"
        verb = {"POST": "create", "DELETE": "delete", "PATCH": "patch"}.get(
            self.command, "get" if name else "list"
        )
        if f"{verb} {plural}" in server.denied:
            message = (
                f'{plural} is forbidden: User "ann" cannot {verb} resource "{plural}" in API group '
                f'"" in the namespace "{namespace}"'
            )
            raise _Refused(403, message)
        if self.command == "POST":
            return self._create(server, namespace, plural, query, body)
        if not name:
            return 200, _page(list(_listed(server, plural, query)), query, server.page, len(server.events))
        found = server.objects.get((plural, name)) if namespace == NAMESPACE else None
        if found is None:
            raise _Refused(404, f'{plural} "{name}" not found')
        wanted = body.get("preconditions", {}).get("uid") if self.command == "DELETE" else None
        if wanted not in (None, found["metadata"]["uid"]):
            raise _Refused(
                409, f'Operation cannot be fulfilled on {plural} "{name}": the UID in the precondition'
            )
        if self.command == "DELETE":
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            stays = name in server.held and body.get("propagationPolicy") == "Foreground"
            if not stays:
                del server.objects[plural, name]
            server.note("MODIFIED" if stays else "DELETED", plural, found)
        if self.command == "PATCH":
            found["metadata"].update(body.get("metadata", {}))
            if "spec" in body:
                found["spec"].update(body["spec"])
        return 200, found

    def _create(
        self, server: ApiServer, namespace: str, plural: str, query: Mapping[str, str], body: Json
    ) -> tuple[int, Json]:
        name = body["metadata"]["name"]
        if namespace != NAMESPACE:
            raise _Refused(404, f'namespaces "{namespace}" not found')
        if (plural, name) in server.objects:
            raise _Refused(409, f'{plural} "{name}" already exists')
        if "dryRun" not in query:
            server._put(plural, body)
        return 201, body

    def log_message(self, format: str, *args: object) -> None:
        """Tests look at `ApiServer.requests`."""


def _listed(server: ApiServer, plural: str, query: Mapping[str, str]) -> Iterator[Json]:
    for (kind, _), found in sorted(server.objects.items()):
        if kind == plural and _matches(found, query):
            yield found


def _matches(found: Json, query: Mapping[str, str]) -> bool:
    labels = dict(pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair)
    fields = [pair.split("=") for pair in query.get("fieldSelector", "").split(",") if pair]
    own = found["metadata"].get("labels", {})
    return labels.items() <= own.items() and all(
        (_field(found, path.removesuffix("!")) == value) != path.endswith("!") for path, value in fields
    )


def _field(found: Json, path: str) -> Any:
    for part in path.split("."):
        found = found.get(part, {})
    return found


def _page(found: list[Json], query: Mapping[str, str], size: int, version: int) -> Json:
    """`continue` is the place where the next page begins; without `limit` there is one page."""
    start = int(query.get("continue", 0))
    end = start + size if "limit" in query else len(found)
    return {
        "kind": "List",
        "metadata": {"resourceVersion": str(version), **({"continue": str(end)} if end < len(found) else {})},
        "items": found[start:end],
    }


def _status(code: int, message: str) -> Json:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}
