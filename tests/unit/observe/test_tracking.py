"""Trackers: TensorBoard's files by its own reader, and a queue that no step waits for."""

from __future__ import annotations

import http.server
import json
import posixpath
import re
import subprocess
import sys
import threading
import tracemalloc
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.command_runs import until
from kit.tracked import START, resumed, run_of, save, step, validation
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mlpipe._core.errors import MlpipeError
from mlpipe._core.records import End, Tracked
from mlpipe._core.retry import AwayError
from mlpipe.observe.tracking import tensorboard, tracking
from mlpipe.observe.tracking.mlflow import Mlflow, MlflowApi, RefusedError, name_of, uri_of
from mlpipe.observe.tracking.tensorboard import TensorBoard, event, framed, last_step
from mlpipe.observe.tracking.tracker import scalars
from mlpipe.observe.tracking.tracking import Ending, Tracking
from mlpipe.observe.tracking.wandb import Wandb, check_installed
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit


class Bucket(FolderStore):
    """A folder that lets nobody look into it, as S3 does."""

    def local_path(self, key):
        return None

    def open_log(self, key):
        raise AssertionError("S3 cannot append to an object")


def read(folder) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def steps_of(found: EventAccumulator, tag: str = "train/loss") -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in found.Scalars(tag)]


@pytest.mark.parametrize("kind", [FolderStore, Bucket])
def test_tensorboards_reader_finds_each_step_once_after_a_kill(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(tensorboard, "_FULL_BYTES", 2000)  # several files on S3
    monkeypatch.setattr(tensorboard, "_UPLOAD_SECONDS", 0.0)
    store = kind(tmp_path)
    first = TensorBoard(store, run_of(attempt=1))
    assert first.begin(START) == 0
    first.log([step(number, loss=1.0) for number in range(1, 26)])
    first.log([save(20), validation(20, accuracy=0.25)])
    folder = tmp_path / "runs/r/stages/train/tensorboard"
    newest = max(folder.iterdir())
    newest.write_bytes(
        newest.read_bytes() + framed(event(1.0, step=99, values={"train/loss": 9.0}))[:-7]
    )  # torn

    again = TensorBoard(store, run_of(attempt=2))
    assert again.begin(resumed(20)) == 20
    again.log([step(number, loss=2.0) for number in range(21, 41)])
    again.end("done")
    found = read(folder)
    assert steps_of(found) == [(n, 1.0) for n in range(1, 21)] + [(n, 2.0) for n in range(21, 41)]
    texts = {
        tag: found.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]
    }
    assert steps_of(found, "validation/accuracy") == [(20, 0.25)]
    assert texts["sample/text_summary"] == "    def main\n"
    assert "steps: 40" in texts["config/text_summary"]
    assert texts["checkpoint/text_summary"] == "`checkpoints/step-20`"
    assert (len(list(folder.iterdir())) == 2) == (kind is FolderStore)


@given(
    number=st.integers(0, 2**40),
    values=st.dictionaries(st.text(min_size=1, max_size=9), st.floats(width=32, allow_nan=False), max_size=3),
)
def test_an_event_is_what_tensorboard_reads(number, values):
    from tensorboard.compat.proto.event_pb2 import Event

    parsed = Event.FromString(event(3.25, step=number, values=values, texts={"a": "b"}))
    assert (parsed.wall_time, parsed.step) == (3.25, number)
    assert {one.tag: one.simple_value for one in parsed.summary.value[:-1]} == values
    text = parsed.summary.value[-1]
    assert (text.metadata.plugin_data.plugin_name, text.tensor.string_val) == ("text", [b"b"])
    assert (
        last_step(framed(event(1.0, version=True)) + framed(event(1.0, step=number, values={"x": 1})))
        == number
    )
    torn = framed(event(1.0, step=number + 1, values={"x": 1}))
    whole = framed(event(1.0, step=number, values={"x": 1}))
    assert [last_step(whole + torn[:-cut]) for cut in (1, 5, 20)] == [number] * 3


def test_what_is_not_finite_is_told_as_it_is(tmp_path):
    board = TensorBoard(FolderStore(tmp_path), run_of())
    board.begin(START)
    board.log([step(1, loss=float("nan"))])
    ((number, loss),) = steps_of(read(tmp_path / "runs/r/stages/train/tensorboard"))
    assert number == 1
    assert loss != loss


def test_records_become_scalars_by_name():
    found = scalars(step(3, loss=1.5, lr=0.1, mfu_ratio=0.5))
    assert (found["train/loss"], found["train/lr"], found["train/mfu"]) == (1.5, 0.1, 0.5)
    assert "train/tokens_per_second" not in found  # not known is not 0
    assert scalars(save(3)) == {"checkpoint/seconds": 2.0, "checkpoint/stall_seconds": 0.5}
    assert scalars(save(3, error="full")) == {}


class Fake:
    """Keeps what it is told. `away`: raised by the next calls, one each."""

    name, where, url = "fake", "http://fake", "http://fake/run"

    def __init__(self, known: int = 0) -> None:
        self.known = known
        self.told: list = []
        self.ended: list = []
        self.away: list = []
        self.gate = threading.Event()
        self.gate.set()

    def _answer(self) -> None:
        self.gate.wait(300)
        if self.away:
            raise self.away.pop(0)

    def begin(self, start):
        self._answer()
        return self.known

    def log(self, records):
        self._answer()
        self.told += [record.step for record in records]

    def end(self, outcome):
        self._answer()
        self.ended.append(outcome)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tracking, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(tracking, "_UNTIL_WARNED_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "END_SECONDS", 300.0)
    monkeypatch.setattr(tracking, "HASTY_SECONDS", 300.0)


def tracking_of(fake, history=lambda first, last: [], written=None) -> Tracking:
    return Tracking(fake, history, (written if written is not None else []).append, lambda: None)


DONE = End(outcome="done", step=9, message="")


def test_all_is_told_in_order_also_what_a_killed_process_kept_and_a_server_away_missed(quick, caplog):
    fake, written = Fake(known=3), []
    fake.away = [AwayError("refused", applied=True)] * 4
    asked = []

    def history(first, last):
        asked.append((first, last))
        return [step(number) for number in range(first, last + 1)]

    one = tracking_of(fake, history, written)
    one.on_start(resumed(5))
    for number in range(6, 300):
        one.on_step(step(number))
    one.on_end(DONE)
    assert asked == [(4, 5)]
    assert fake.told == list(range(4, 300))
    assert fake.ended == ["done"]
    (record,) = written
    assert isinstance(record, Tracked)
    assert (record.tracker, record.url) == ("fake", "http://fake/run")
    assert caplog.text.count("is away (refused)") == 1


def test_a_tracker_that_hangs_holds_nobody_up_and_what_it_misses_is_counted(quick, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_WAITING", 100)
    monkeypatch.setattr(tracking, "HASTY_SECONDS", 0.05)
    fake, beats = Fake(), []
    fake.gate.clear()
    one = Tracking(fake, lambda first, last: [], [].append, lambda: beats.append(1))
    one.on_start(START)
    for number in range(1, 251):
        one.on_step(step(number))
    assert one.num_dropped == 150
    one.on_end(End(outcome="saved", step=250, message=""))
    assert beats
    assert "fake at http://fake has not heard of 251 records" in caplog.text
    fake.gate.set()


@pytest.mark.parametrize(
    "error", [MlpipeError("who are you?", kind="input"), RuntimeError("a bug of theirs")]
)
def test_one_that_refuses_is_off_and_the_rest_goes_on(quick, caplog, error):
    fake = Fake()
    fake.away = [error]
    one = tracking_of(fake)
    one.on_start(START)
    until(lambda: one._is_off, "the refusal")
    one.on_step(step(1))
    one.on_end(DONE)
    assert (fake.told, fake.ended, one.num_dropped) == ([], [], 0)
    assert (
        f"fake is off; the training goes on without it: {'who' if 'who' in str(error) else 'Runtime'}"
        in caplog.text
    )


def test_one_that_refuses_a_record_still_hears_of_the_end(quick, caplog):
    fake = Fake()
    one = tracking_of(fake)
    one.on_start(START)
    until(lambda: one._has_begun, "the begin")
    fake.away = [MlpipeError("not so", kind="infrastructure")]
    one.on_step(step(1))
    one.on_step(step(2))
    until(lambda: one._is_off, "the refusal")
    one.on_end(DONE)
    assert fake.ended == ["done"]
    assert caplog.text.count("fake is off") == 1


def test_trackers_that_hang_share_one_deadline(quick, monkeypatch):
    beats: list[int] = []
    clock = SimpleNamespace(monotonic=lambda: float(len(beats)))  # each beat takes a second
    monkeypatch.setattr(tracking, "time", clock)
    monkeypatch.setattr(tracking, "END_SECONDS", 6.0)
    ending, fakes = Ending(), [Fake(), Fake(), Fake()]
    them = [
        Tracking(fake, lambda first, last: [], [].append, lambda: beats.append(1), ending) for fake in fakes
    ]
    for one in them:
        one.on_start(START)
        until(lambda one=one: one._has_begun, "the begin")
    for fake in fakes:
        fake.gate.clear()
    for one in them:
        one.on_end(DONE)
    assert len(beats) == 6
    for fake in fakes:
        fake.gate.set()


def test_a_step_and_its_validation_are_told_at_once(quick, monkeypatch):
    """Of a process that is killed between the two, the next one would miss the validation for ever: trackers
    know the last step that they were told."""
    monkeypatch.setattr(tracking, "_BATCH", 3)
    calls: list[list[str]] = []
    fake = Fake()
    fake.log = lambda records: calls.append([f"{one.kind} {one.step}" for one in records])  # type: ignore[method-assign]
    missed = [step(1), step(2), step(3), validation(3), step(4)]
    one = tracking_of(fake, lambda first, last: missed)
    one.on_start(resumed(4))
    for number in (5, 6, 7):
        one.on_step(step(number))
    until(lambda: sum(map(len, calls)) == 7, "all but the last step, which a validation may follow")
    one.on_validation(validation(7))
    one.on_step(step(8))
    until(lambda: sum(map(len, calls)) == 9, "the validation")
    one.on_end(DONE)
    with_validation = [call for call in calls if any("validation" in told for told in call)]
    assert [call[-2:] for call in with_validation] == [["step 3", "validation 3"], ["step 7", "validation 7"]]
    assert calls[-1] == ["step 8"]


def test_forty_thousand_steps_keep_no_memory(quick):
    """Neither where the tracker follows nor where it hangs."""
    for hangs in (False, True):
        fake = Fake()
        fake.log = lambda records: None  # type: ignore[method-assign]
        if hangs:
            fake.gate.clear()
        one = tracking_of(fake)
        one.on_start(START)
        tracemalloc.start()
        for number in range(1, 40_001):
            one.on_step(step(number))
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 8e6
        assert len(one._waiting) <= tracking.MAX_WAITING
        fake.gate.set()
        one.on_end(DONE)


@pytest.fixture
def stand_in():
    """A server that answers what `answers` holds, or, asked to, nothing at all."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.bodies.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            server.asked.append((self.path.partition("?")[0], self.headers.get("Authorization")))
            status, body = server.answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "http://elsewhere.invalid/")
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.answers, server.bodies = [], [], []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_what_mlflow_answers_is_away_or_refused(stand_in):
    api = MlflowApi(stand_in.url, {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "hush"})
    for status in (429, 500, 503):
        stand_in.answers = [(status, b"busy")]
        with pytest.raises(AwayError, match=str(status)):
            api.post("runs/create")
    for status, body, words in (
        (401, b"no", "MLFLOW_TRACKING_TOKEN"),
        (302, b"", "is this the address"),
        (200, b"<html>", "is this the address"),
        (400, b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "not so"}', "not so"),
    ):
        stand_in.answers = [(status, body)]
        with pytest.raises(RefusedError) as caught:
            api.post("runs/create")
        assert words in str(caught.value)
        assert "hush" not in str(caught.value)
    assert {login for _, login in stand_in.asked} == {"Basic bWU6aHVzaA=="}
    assert len(stand_in.asked) == 7  # a redirect is not followed: the login goes to one address
    with pytest.raises(AwayError):
        MlflowApi("http://127.0.0.1:9", {}).get("x")


def test_mlflows_address_comes_from_the_file_or_the_environment_and_holds_no_login(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert uri_of({"uri": "http://a:1"}) == "http://a:1"
    with pytest.raises(MlpipeError, match="nothing says where MLflow is"):
        uri_of({})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://b:2")
    assert uri_of({}) == "http://b:2"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hush@b:2")
    with pytest.raises(MlpipeError, match="holds a login") as caught:
        uri_of({})
    assert "hush" not in str(caught.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")
    with pytest.raises(MlpipeError, match="is 'databricks'"):
        uri_of({})


def test_without_its_package_wandb_is_refused_by_the_extra(monkeypatch):
    monkeypatch.setattr("mlpipe.observe.tracking.wandb.find_spec", lambda name: None)
    with pytest.raises(MlpipeError, match=r"pip install 'mlpipe\[wandb\]'") as caught:
        check_installed()
    assert caught.value.kind == "input"


@given(st.text(st.sampled_from("ab@/. _-é(:\n"), max_size=12) | st.text(max_size=300))
@example("..a/b")
def test_every_name_becomes_one_that_mlflow_takes(name):
    """Its own rule (mlflow/utils/validation.py)."""
    found = name_of(name)
    assert re.fullmatch(r"[/\w.\- ]+", found)
    assert len(found) <= 250
    assert posixpath.normpath(found) == found
    assert not found.startswith(("/", ".."))
    assert name_of(found) == found


def test_mlflow_gets_names_that_it_takes_and_what_it_refuses_all_the_same_is_left_out(stand_in, caplog):
    refusal = (400, b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "not so"}')
    made = b'{"run": {"info": {"run_id": "i"}}}'
    told = [(200, b'{"experiment": {"experiment_id": "0"}}'), (200, b"{}"), (200, made), (200, b"{}")]
    stand_in.answers = [*told, refusal, (200, b"{}"), refusal, (200, b"{}"), (200, b"{}")]
    one = Mlflow({"uri": stand_in.url}, run_of(decided={"args": {"f1.cat (big)": 1}}))
    one.begin(START)
    one.log([validation(1, **{"recall@5": 0.25, "recall:5": 0.75})])
    one.log([validation(2, **{"recall@5": 0.5})])
    one.end("done")
    params, _, first, second, end = map(json.loads, stand_in.bodies[4:])
    assert params["params"] == [{"key": "args.f1.cat _big_", "value": "1"}]
    assert [(row["key"], row["value"]) for row in first["metrics"]] == [("validation/recall_5", 0.25)]
    assert second["metrics"][0]["value"] == 0.5
    assert end["status"] == "FINISHED"
    assert caplog.text.count("left out") == 1


def test_wandb_out_of_reach_is_away_and_its_end_has_a_deadline(monkeypatch, tmp_path):
    class CommError(Exception):
        pass

    class AuthenticationError(CommError):
        pass

    def init(**given):
        asked.append(given["settings"])
        raise raised[-1]

    asked: list = []
    raised: list[Exception] = [CommError("no route\nwhile retrying")]
    errors = SimpleNamespace(CommError=CommError, AuthenticationError=AuthenticationError)
    torn: list[bool] = []
    package = SimpleNamespace(init=init, Settings=dict, errors=errors, teardown=lambda: torn.append(True))
    monkeypatch.setitem(sys.modules, "wandb", package)
    with pytest.raises(AwayError, match=r"^no route$"):
        Wandb({}, run_of(), tmp_path).begin(START)
    assert torn  # else its next init says that the run's id is in use
    raised.append(AuthenticationError("who?"))
    with pytest.raises(AuthenticationError):
        Wandb({}, run_of(), tmp_path).begin(START)
    assert 0 < asked[0]["finish_timeout"] < tracking.END_SECONDS


def test_a_hook_that_hangs_at_the_end_of_the_process_changes_nothing(tmp_path):
    """The watchdog ends the process, as it would have ended."""
    program = f"""
import atexit, pathlib, time
from mlpipe.train import watchdog
watchdog._LEAVING_SECONDS = 0.1
atexit.register(time.sleep, 3600)
watchdog.Watchdog(pathlib.Path({str(tmp_path)!r}), rank=0, timeout_seconds=0.0).leaving(0)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=300).returncode == 0
    assert not list(tmp_path.iterdir())
