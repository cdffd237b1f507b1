"""A stand-in for an OpenID Connect provider, such as a cluster's API server is for its ServiceAccounts: the
two documents that a token service reads, and tokens signed with its key."""

from __future__ import annotations

import base64
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from Crypto.Hash import SHA256
from Crypto.PublicKey import RSA
from Crypto.Signature import pkcs1_15

AUDIENCE = "sts.amazonaws.com"


class Issuer:
    """`url`: of the provider, on 127.0.0.1."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._key = RSA.generate(2048)
        self._id = secrets.token_hex(4)

    @property
    def config_url(self) -> str:
        return f"{self.url}/.well-known/openid-configuration"

    def token(self, subject: str, seconds: float, audience: str = AUDIENCE) -> str:
        """As the kubelet writes one for a pod of the ServiceAccount `subject`, good for `seconds`."""
        now = int(time.time())
        head = {"alg": "RS256", "kid": self._id, "typ": "JWT"}
        claims = {"iss": self.url, "sub": subject, "aud": [audience], "iat": now, "exp": now + int(seconds)}
        signed = ".".join(_encoded(json.dumps(part).encode()) for part in (head, claims))
        return f"{signed}.{_encoded(pkcs1_15.new(self._key).sign(SHA256.new(signed.encode())))}"

    def documents(self) -> dict[str, Any]:
        """By path."""
        numbers = {"n": self._key.n, "e": self._key.e}
        key = {name: _encoded(n.to_bytes((n.bit_length() + 7) // 8, "big")) for name, n in numbers.items()}
        return {
            "/.well-known/openid-configuration": {
                "issuer": self.url,
                "jwks_uri": f"{self.url}/openid/v1/jwks",
                "response_types_supported": ["id_token"],
                "subject_types_supported": ["public"],
                "id_token_signing_alg_values_supported": ["RS256"],
            },
            "/openid/v1/jwks": {
                "keys": [{"kty": "RSA", "use": "sig", "alg": "RS256", "kid": self._id, **key}]
            },
        }


@contextmanager
def issuer() -> Iterator[Issuer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        found = Issuer(f"http://127.0.0.1:{server.server_address[1]}")
        server.documents = found.documents()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield found
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        document = self.server.documents.get(self.path)  # type: ignore[attr-defined]
        body = json.dumps(document).encode()
        self.send_response(200 if document else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
