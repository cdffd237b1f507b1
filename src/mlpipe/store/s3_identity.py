"""In whose name requests to S3 are made: with keys that were given, or with keys lent for a token that the
cluster gives each pod (web identity: OpenID Connect, STS AssumeRoleWithWebIdentity).

minio-py's WebIdentityProvider writes the token into a URL, and so into proxies' logs and its own error
messages, has no deadline, and asks only when the keys are as good as over.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlencode, urlsplit
from xml.etree import ElementTree

import urllib3
from minio.credentials.credentials import Credentials
from minio.credentials.providers import Provider, StaticProvider

from mlpipe._core import environment
from mlpipe._core.errors import StoreError
from mlpipe.store.s3_timely import timely_pool

CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
PAUSE_SECONDS = 10.0  # between two tries to renew keys that are still good
RENEWED_AT = 0.75  # of the keys' life
_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


class TokenServiceAwayError(Exception):
    """Worth another try."""


class LentKeys(Provider):
    """Keys for the token in `token_file` (read anew each time: the cluster renews it). Safe to share between
    threads. `endpoint`: of the token service. `role`: ARN; a server that knows the role by the token needs
    none. `session`: name that the server's audit shows."""

    def __init__(
        self, token_file: Path, endpoint: str, role: str | None, session: str, ca_file: str | None
    ) -> None:
        self._token_file, self._endpoint, self._role = token_file, endpoint, role
        self._session = re.sub(r"[^\w+=,.@-]", "-", session)[:64].ljust(2, "-")  # what AWS takes
        self._pool = timely_pool(
            retries=False,
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
            ca_certs=ca_file,
        )
        self._lock = threading.Lock()
        self._keys: Credentials | None = None
        self._ends = self._renew_at = 0.0  # Unix seconds

    def retrieve(self) -> Credentials:
        """Keys that are good now, renewed long before their end: while the token service is away, those that
        are there serve on. Raises TokenServiceAwayError, or StoreError when it refuses."""
        keys = self._keys
        if keys is not None and time.time() < self._renew_at:
            return keys
        with self._lock:
            if self._keys is not None and time.time() < self._renew_at:
                return self._keys  # another thread was here
            try:
                keys, ends = self._lent()
            except (TokenServiceAwayError, StoreError):
                if self._keys is None or time.time() >= self._ends:
                    raise
                self._renew_at = time.time() + PAUSE_SECONDS
                return self._keys
            now = time.time()
            self._keys, self._ends, self._renew_at = keys, ends, now + RENEWED_AT * (ends - now)
            return keys

    def refused(self, keys: Credentials) -> None:
        """The store takes `keys` no more, whatever their end says: others at the next call."""
        with self._lock:
            if self._keys is keys:
                self._keys = None

    def _lent(self) -> tuple[Credentials, float]:
        """Keys, and when they end (Unix seconds)."""
        asked = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "WebIdentityToken": self._token(),
        }
        if self._role is not None:
            asked |= {"RoleArn": self._role, "RoleSessionName": self._session}
        try:
            reply = self._pool.request(
                "POST",
                self._endpoint,
                body=urlencode(asked),
                headers={"Content-Type": "application/x-www-form-urlencoded"},
                redirect=False,
            )
        except urllib3.exceptions.HTTPError as error:
            message = f"no token service at {self._endpoint}: {type(error).__name__}"
            raise TokenServiceAwayError(message) from None
        texts = _texts(reply.data)
        if reply.status in _TRANSIENT or texts.get("Code") == "IDPCommunicationError":
            raise TokenServiceAwayError(f"the token service {self._endpoint} answered {reply.status}")
        if reply.status != 200:
            raise StoreError(
                f"the token service lends no keys: {reply.status} {texts.get('Code', '')} "
                f"{texts.get('Message', '')}".rstrip(),
                where=self._endpoint,
                hint="check AWS_ROLE_ARN, AWS_ENDPOINT_URL_STS, and whom the role trusts: issuer, audience "
                "and ServiceAccount of the token",
            )
        try:
            ends = datetime.fromisoformat(texts["Expiration"])
            ends = ends if ends.tzinfo else ends.replace(tzinfo=UTC)
            keys = Credentials(texts["AccessKeyId"], texts["SecretAccessKey"], texts["SessionToken"])
        except (KeyError, ValueError):
            raise StoreError("the token service's answer has no keys", where=self._endpoint) from None
        return keys, ends.timestamp()

    def _token(self) -> str:
        try:
            return self._token_file.read_text().strip()
        except (OSError, ValueError) as error:
            raise StoreError(
                f"no token: {getattr(error, 'strerror', None) or 'not text'}",
                where=str(self._token_file),
                hint="AWS_WEB_IDENTITY_TOKEN_FILE names the file that the cluster writes",
                kind="input",
            ) from None


def from_environment(environ: Mapping[str, str], region: str, store_endpoint: str) -> Provider:
    """The usual AWS names, keys before a token. StoreError (input) when there is neither."""
    absent = [name for name in _KEYS if not environ.get(name)]
    if not absent:
        access_key, secret_key = (environ[name] for name in _KEYS)
        return StaticProvider(access_key, secret_key, environ.get("AWS_SESSION_TOKEN") or None)
    token_file = environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    if not token_file or len(absent) < len(_KEYS):
        raise StoreError(
            f"no credentials: {' and '.join(absent)} not set",
            hint="export them, or AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN",
            kind="input",
        )
    endpoint = environ.get("AWS_ENDPOINT_URL_STS") or environ.get("AWS_ENDPOINT_URL")
    if not endpoint:  # MinIO is its own token service; a token goes to no other server than the store's
        aws = (urlsplit(store_endpoint).hostname or "").endswith(".amazonaws.com")
        endpoint = f"https://sts.{region}.amazonaws.com" if aws else store_endpoint
    run_id = environ.get(environment.RUN_ID, "")
    session = environ.get("AWS_ROLE_SESSION_NAME") or f"mlpipe-{run_id}".rstrip("-")
    role = environ.get("AWS_ROLE_ARN") or None
    return LentKeys(Path(token_file), endpoint, role, session, environ.get("AWS_CA_BUNDLE"))


def _texts(data: bytes) -> dict[str, str]:
    """Each XML element's text by its name, namespaces dropped; empty for what is no XML."""
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return {}
    return {element.tag.rpartition("}")[2]: element.text or "" for element in root.iter()}
