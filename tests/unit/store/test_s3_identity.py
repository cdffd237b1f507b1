"""Keys lent for a token, by a stand-in for the token service that is away, refuses or lends for a while; and
a bucket that does not say what is absent. A real token service: tests/services/test_s3_keys.py."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from mlpipe._core.errors import StoreError
from mlpipe.store import s3_identity
from mlpipe.store.s3 import S3Store

pytestmark = pytest.mark.unit

TOKEN = "token-that-nobody-may-see"
LENT = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>lent-{number}</AccessKeyId>
<SecretAccessKey>s</SecretAccessKey><SessionToken>t-{number}</SessionToken><Expiration>{ends}</Expiration>
</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
STAMPS = {
    "Z": lambda seconds: datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    "none": lambda seconds: datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
    "+02:00": lambda seconds: datetime.fromtimestamp(seconds, timezone(timedelta(hours=2))).isoformat(),
}
ERROR = "<Error><Code>{}</Code><Message>because</Message></Error>"


class Handler(BaseHTTPRequestHandler):
    """`server.lends`: what the next calls of the token service get, a status, or "keys"."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        assert self.path == "/"  # a token in a URL stands in the logs of proxies
        assert self.headers["Content-Type"] == "application/x-www-form-urlencoded"
        form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        server.asked.append({name: values[0] for name, values in parse_qs(form).items()})
        status = server.lends.pop(0) if server.lends else 200
        ends = server.stamp(server.now + 3600)
        text = (
            server.lent.format(number=len(server.asked), ends=ends)
            if status == 200
            else ERROR.format(server.says)
        )
        self.answer(status, text)

    def do_GET(self) -> None:
        server = self.server
        server.signed.append((self.headers["Authorization"], self.headers["x-amz-security-token"]))
        if "list-type" in self.path:
            self.answer(*server.listing)
        else:
            self.answer(*(server.gets.pop(0) if server.gets else (200, "data")))

    do_HEAD = do_GET

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Location", "/")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.lends, server.gets, server.signed = [], [], [], []
        server.lent, server.stamp = LENT, STAMPS["Z"]
        server.listing, server.says = (200, "<ListBucketResult/>"), "Refused"
        server.now = 1_000_000.0
        monkeypatch.setattr(s3_identity.time, "time", lambda: server.now)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def environment(server, tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    return {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.server_address[1]}",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/w",
        "MLPIPE_RUN_ID": "run one",
        "MLPIPE_STORE_DEADLINE_SECONDS": "5",
    }


@pytest.mark.parametrize("zone", STAMPS)
def test_keys_are_lent_once_and_again_when_three_quarters_of_their_life_are_over(server, environment, zone):
    server.stamp = STAMPS[zone]
    store = S3Store.from_environment("s3://bucket", environment)
    for _ in range(3):
        store.get("x")
    server.now += 2699
    store.get("x")
    assert len(server.asked) == 1
    server.now += 2
    store.get("x")
    assert len(server.asked) == 2
    assert [token for _, token in server.signed] == ["t-1"] * 4 + ["t-2"]
    assert "Credential=lent-2/" in server.signed[-1][0]
    assert server.asked[0] == {
        "Action": "AssumeRoleWithWebIdentity",
        "Version": "2011-06-15",
        "WebIdentityToken": TOKEN,
        "RoleArn": "arn:aws:iam::1:role/w",
        "RoleSessionName": "mlpipe-run-one",
    }


@pytest.mark.parametrize("status", [503, 403])
def test_while_nothing_new_is_lent_old_keys_serve_to_their_end(server, environment, status):
    store = S3Store.from_environment("s3://bucket", environment)
    store.get("x")
    server.now += 2701
    server.lends = [status] * 100
    for _ in range(3):
        store.get("x")
    assert len(server.asked) == 2  # it is not asked again at once
    server.now += 11
    store.get("x")
    assert len(server.asked) == 3
    server.now += 900
    with pytest.raises(StoreError, match=r"answered 503|lends no keys: 403 Refused because") as caught:
        store.get("x")
    assert TOKEN not in str(caught.value)
    server.lends = []
    assert store.get("x") == b"data"


def test_a_token_service_that_is_away_for_a_moment_is_asked_again(server, environment):
    server.lends = [503, 500]
    assert S3Store.from_environment("s3://bucket", environment).get("x") == b"data"


def test_an_answer_without_keys_is_an_error_and_the_session_is_the_users(server, environment):
    server.lent = (
        "<Credentials><AccessKeyId>a</AccessKeyId><SecretAccessKey>s</SecretAccessKey></Credentials>"
    )
    environment |= {"AWS_ROLE_SESSION_NAME": "me/" * 30, "AWS_CA_BUNDLE": "/ca.crt"}
    store = S3Store.from_environment("s3://bucket", environment)
    with pytest.raises(StoreError, match="the token service's answer has no keys") as caught:
        store.get("x")
    assert caught.value.where == environment["AWS_ENDPOINT_URL_S3"]
    assert server.asked[0]["RoleSessionName"] == ("me-" * 30)[:64]
    assert store._client.endpoint.credentials._pool.connection_pool_kw["ca_certs"] == "/ca.crt"
    for run_id, session in (("", "mlpipe"), ("r", "mlpipe-r")):
        del environment["AWS_ROLE_SESSION_NAME"], environment["AWS_CA_BUNDLE"]
        environment |= {"MLPIPE_RUN_ID": run_id, "AWS_ROLE_SESSION_NAME": "", "AWS_CA_BUNDLE": ""}
        with pytest.raises(StoreError, match="has no keys"):
            S3Store.from_environment("s3://bucket", environment).get("x")
        assert server.asked[-1]["RoleSessionName"] == session


def test_a_token_follows_no_redirect(server, environment):
    server.lends = [307]
    with pytest.raises(StoreError, match="lends no keys: 307 Refused because") as caught:
        S3Store.from_environment("s3://bucket", environment).get("x")
    assert len(server.asked) == 1
    assert caught.value.where == environment["AWS_ENDPOINT_URL_S3"]
    assert "AWS_ROLE_ARN" in caught.value.hint


def test_a_token_service_that_cannot_ask_the_issuer_is_asked_again(server, environment):
    server.lends, server.says = [400], "IDPCommunicationError"
    assert S3Store.from_environment("s3://bucket", environment).get("x") == b"data"
    assert len(server.asked) == 2


def test_keys_that_the_store_takes_no_more_are_replaced_once(server, environment):
    store = S3Store.from_environment("s3://bucket", environment)
    server.gets = [(400, ERROR.format("ExpiredToken"))]
    assert store.get("x") == b"data"
    assert [token for _, token in server.signed] == ["t-1", "t-2"]
    server.gets = [(403, ERROR.format("InvalidAccessKeyId"))] * 2
    with pytest.raises(StoreError, match="access key is unknown"):
        store.get("x")


def test_what_is_missing_is_said(server, environment):
    environment["AWS_WEB_IDENTITY_TOKEN_FILE"] += "-absent"
    with pytest.raises(StoreError, match="no token: No such file") as caught:
        S3Store.from_environment("s3://bucket", environment).get("x")
    assert (caught.value.kind, caught.value.where) == ("input", environment["AWS_WEB_IDENTITY_TOKEN_FILE"])
    for names in ({}, {"AWS_ACCESS_KEY_ID": "k", "AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}):
        with pytest.raises(StoreError, match="AWS_SECRET_ACCESS_KEY not set") as caught:
            S3Store.from_environment("s3://bucket", names)
        assert caught.value.kind == "input"


def test_a_buckets_name_is_checked_before_the_server_is_asked(environment):
    for url in ("s3://a", "s3:///x", "s3://Upper/x", f"s3://{'b' * 64}"):
        with pytest.raises(StoreError, match="names no bucket") as caught:
            S3Store.from_environment(url, environment)
        assert caught.value.kind == "input"
        assert "3 to 63" in caught.value.hint


@pytest.mark.parametrize(
    ("more", "url"),
    [
        ({}, "https://sts.eu-west-1.amazonaws.com"),
        (
            {"AWS_ENDPOINT_URL_S3": "https://bucket.vpce-1.s3.eu-west-1.vpce.amazonaws.com"},
            "https://sts.eu-west-1.amazonaws.com",
        ),
        ({"AWS_ENDPOINT_URL_S3": "http://minio:9000"}, "http://minio:9000"),
        ({"AWS_ENDPOINT_URL": "http://all:1", "AWS_ENDPOINT_URL_S3": "http://s3:1"}, "http://all:1"),
        ({"AWS_ENDPOINT_URL_S3": "http://s3:1", "AWS_ENDPOINT_URL_STS": "http://sts:1"}, "http://sts:1"),
    ],
)
def test_a_token_goes_to_the_stores_own_token_service(more, url):
    environment = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_REGION": "eu-west-1", **more}
    store = S3Store.from_environment("s3://bucket", environment)
    assert store._client.endpoint.credentials._endpoint == url


def test_keys_come_before_a_token_and_a_session_token_is_sent(server, environment):
    own = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "session"}
    S3Store.from_environment("s3://bucket", {**environment, **own}).get("x")
    assert server.signed[0][1] == "session"
    assert server.asked == []


def test_what_a_prefix_policy_hides_is_absent_if_the_list_says_so(server, environment):
    """AWS answers 403 for absent keys to whoever may not list the whole bucket."""
    store = S3Store.from_environment("s3://bucket", environment)
    denied = (403, ERROR.format("AccessDenied"))
    server.gets = [denied] * 2
    assert not store.exists("x")
    with pytest.raises(StoreError, match="no such object") as caught:
        store.get("x")
    assert caught.value.kind == "input"
    server.listing = (200, "<ListBucketResult><Contents><Key>x</Key></Contents></ListBucketResult>")
    server.gets = [denied] * 2
    for call in (store.exists, store.get):
        with pytest.raises(StoreError, match="access denied"):
            call("x")
    server.listing, server.gets = denied, [denied]
    with pytest.raises(StoreError, match="access denied"):
        store.get("x")
