"""Whose keys may do what, on a MinIO with real policies, users and its token service."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from kit import oidc, plans
from kit.command_runs import until
from kit.servers import ServerMissingError, s3_server

from mlpipe._core.errors import StoreError
from mlpipe.observe.profiles.stored import profiles_of_stage
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.work import TrackerPlan
from mlpipe.store import catalogue, outputs, profiles, registry, runs
from mlpipe.store.blobs import read_blob, write_blob
from mlpipe.store.preflight import Checked, probe_key, read_checked, write_checked
from mlpipe.store.profiles import ProfileRequest
from mlpipe.store.s3 import S3Store
from mlpipe.store.s3_policy import policy

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]

URL = "s3://team-bucket/team/runs"
WORKER = "system:serviceaccount:ml:mlpipe-worker"
TOKEN_SECONDS = 12


@pytest.fixture(scope="module")
def issuer():
    with oidc.issuer() as one:
        yield one


@pytest.fixture(scope="module")
def minio(issuer, tmp_path_factory):
    """It asks `issuer` whose token it is shown, and takes the policy of the token's subject."""
    identity = {"CONFIG_URL": issuer.config_url, "CLIENT_ID": oidc.AUDIENCE, "CLAIM_NAME": "sub"}
    variables = {f"MINIO_IDENTITY_OPENID_{name}": value for name, value in identity.items()}
    try:
        with s3_server("minio", tmp_path_factory.mktemp("keys"), **variables) as server:
            server.make_bucket("team-bucket")
            server.make_bucket("others")
            yield server
    except ServerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def keys(minio):
    """Environments, by who asks."""
    return {
        "driver": minio.add_user("team-driver", policy(URL, "driver")),
        "worker": minio.add_user("worker-of-run", policy(URL, "worker", "run")),
        "any worker": minio.add_user("team-worker", policy(URL, "worker")),
    }


def opened(environment, url=URL):
    return S3Store.from_environment(url, {**environment, "MLPIPE_STORE_DEADLINE_SECONDS": "30"})


@pytest.fixture
def token_file(issuer, minio, tmp_path):
    """As the kubelet keeps it: renewed before it ends, and its keys with it."""
    minio.add_policy(WORKER, policy(URL, "worker", "run"))
    path, done = tmp_path / "token", threading.Event()

    def write():
        made = tmp_path / "next"
        made.write_text(issuer.token(WORKER, TOKEN_SECONDS))
        made.rename(path)

    def renew():
        while not done.wait(0.5):
            write()

    write()
    thread = threading.Thread(target=renew)
    thread.start()
    yield path
    done.set()
    thread.join(300)


def keyless(minio, token_file):
    known = {name: value for name, value in minio.environment().items() if "_KEY" not in name}
    return {**known, "AWS_WEB_IDENTITY_TOKEN_FILE": str(token_file)}


def test_workers_train_and_write_nothing_but_what_their_stages_make(minio, keys, token_file, tmp_path):
    driver, worker = opened(keys["driver"]), opened(keys["worker"])
    driver.probe()
    for run_id in ("run", "other"):
        runs.create_run(driver, run_id, "version: 1\n", "sha", ["train"], "kubernetes", {})
    tokens = plans.write_tokens(tmp_path / "tokens")
    digest = outputs.commit_output(worker, "runs/run/stages/corpus", tokens)
    held = tmp_path / "held"
    held.touch()
    slow = ModelPlan(Entry("kit.models:slow", {"seconds": 1.5, "while_file": str(held)}), None, 32, ())
    train = plans.train_plan(URL, tokens, world_size=1, steps=6, every=2, model=slow)
    checkpoint = train.work.checkpoint._replace(keep=1)
    track = (TrackerPlan("tensorboard"),)
    train = replace(train, work=train.work._replace(checkpoint=checkpoint, track=track))
    train = replace(train, inputs=("runs/run/stages/corpus",))
    driver.put(f"{train.attempt_key}/plan.json", train.to_json().encode())
    profiles.ask(driver, train.attempt_key, ProfileRequest("asked", 1))
    environment = {**plans.environment(), "MLPIPE_CACHE": str(tmp_path / "cache")}
    stages = {
        "train": (train, keys["worker"]),
        "evaluate": (plans.evaluate_plan(train), keyless(minio, token_file)),
    }
    for name, (plan, own) in stages.items():
        process = plans.start(plan, tmp_path / name, env={**environment, **own})
        until(lambda: not profiles.is_asked(driver, train.attempt_key), "the request to be heard")
        held.unlink(missing_ok=True)
        assert process.wait(300) == 0, plans.log_of(tmp_path / name)
        assert driver.exists(f"{plan.attempt_key}/outcome.json")
        assert driver.read_log(f"{plan.attempt_key}/events.jsonl")[0]
        assert driver.list_logs(f"{plan.attempt_key}/records")
    assert list(driver.list(f"{train.stage_key}/tensorboard"))
    ((profiled,),) = [one.ranks for one in profiles_of_stage(driver, train.stage_key)]
    assert (profiled.rank, profiled.num_steps) == (0, 1)
    (kept,) = catalogue.list_checkpoints(driver, train.stage_key)  # workers prune, too
    assert kept.step == 6
    assert (tmp_path / "cache" / "outputs" / digest).is_dir()
    assert registry.promote(driver, "lm", "best", kept.key, {}) == 1

    kept_out = [
        "runs/run/pipeline.yaml",
        "runs/run/run.json",
        "runs/run/cancel",
        f"{train.attempt_key}/plan.json",
        "runs/other/pipeline.yaml",
        "runs/other/run.json",
        "runs/other/stages/train/checkpoints/step-000000002/1-x/MANIFEST.json",
        "index/run/000001-done",
        "models/lm/1/MANIFEST.json",
        "models/lm/aliases/best",
    ]
    before = {key: driver.get(key) for key in kept_out if driver.exists(key)}
    for store in (worker, opened(keyless(minio, token_file))):
        for key in kept_out:
            for act in (
                lambda store=store, key=key: store.put(key, b"mine"),
                lambda store=store, key=key: store.put_if_absent(key, b"mine"),
                lambda store=store, key=key: store.copy(f"{train.attempt_key}/outcome.json", key),
                lambda store=store, key=key: store.delete([key]),
            ):
                with pytest.raises(StoreError, match=r"access denied|cannot delete: AccessDenied"):
                    act()
        for key in ("runs/other/pipeline.yaml", "models/lm/1/MANIFEST.json"):
            with pytest.raises(StoreError, match="access denied"):
                store.get(key)
        for prefix in ("", "runs", "runs/other"):
            with pytest.raises(StoreError, match="access denied"):
                list(store.list(prefix))
    assert {key: driver.get(key) for key in before} == before
    assert set(before) < set(kept_out)
    for store in (
        opened(keys["driver"], "s3://others/x"),
        opened(keys["driver"], "s3://team-bucket/their/x"),
    ):
        with pytest.raises(StoreError, match="access denied"):
            store.put("runs/run/run.json", b"mine")


def test_workers_of_all_runs_write_no_state_of_any(keys):
    worker = opened(keys["any worker"])
    worker.put("runs/third/stages/train/checkpoints/x", b"theirs, too: the price of keys for all runs")
    attempt_key = "runs/third/stages/train/attempt-1"
    worker.put(probe_key(attempt_key, 3), b"tried")
    worker.delete([probe_key(attempt_key, 3)])
    write_checked(worker, attempt_key, Checked(seconds=1.0))
    assert read_checked(worker, attempt_key) == Checked(seconds=1.0)
    for key in (
        "runs/third/run.json",
        "runs/third/stages/train/attempt-1/plan.json",
        "index/third/000001-done",
    ):
        with pytest.raises(StoreError, match="access denied"):
            worker.put(key, b"mine")


def test_lent_keys_are_renewed_before_their_end_under_a_long_upload(minio, token_file, monkeypatch):
    store = opened(keyless(minio, token_file))
    monkeypatch.setattr(store, "part_bytes", 2**18)
    lender = store._client.endpoint.credentials
    seen = [lender.retrieve()]
    data = bytes(range(256)) * 2**12

    def chunks():
        for start in range(0, len(data), 2**18):
            yield data[start : start + 2**18]
            until(lambda: lender.retrieve() != seen[-1], "other keys")
            seen.append(lender.retrieve())

    key = "runs/run/stages/train/checkpoints/long"
    blob = write_blob(store, key, chunks(), block_bytes=2**16)
    assert len(seen) == 1 + len(data) // 2**18
    found = bytearray(len(data))
    read_blob(store, blob, 0, found)
    assert bytes(found) == data
    lender._keys = replace(seen[0], secret_key=seen[0].secret_key)  # long over, though it does not know
    assert store.get(f"{key}/p00000")[:4] == data[:4]
    assert lender.retrieve() not in seen[:-1]


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (lambda issuer: issuer.token(WORKER, -60), "Token is expired"),
        (lambda issuer: issuer.token(WORKER, 600, audience="other"), "lends no keys"),
        (lambda issuer: issuer.token("system:serviceaccount:ml:stranger", 600), "None of the given policies"),
        (lambda issuer: issuer.token(WORKER, 600)[:-8] + "AAAAAAAA", "lends no keys"),
    ],
)
def test_a_token_that_is_not_trusted_is_refused_in_words_that_do_not_show_it(
    issuer, minio, tmp_path, token, message
):
    minio.add_policy(WORKER, policy(URL, "worker", "run"))
    text = token(issuer)
    (tmp_path / "token").write_text(text)
    with pytest.raises(StoreError, match=message) as caught:
        opened(keyless(minio, tmp_path / "token")).get("runs/run/run.json")
    assert caught.value.kind == "infrastructure"
    assert text not in str(caught.value)
    assert "AWS_ROLE_ARN" in caught.value.hint
