"""`submit --to rented` whole: machines are local processes behind a stand-in of Vast.ai (`kit/vast.py`), the
store is a real MinIO, whose token service lends each machine its keys."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kit import vast as stand_in
from kit import warm
from kit.command_runs import Cli, until
from kit.undisturbed import Processes, check_processes, workers_of
from kit.vast import KEY, Instance, offer_row

from mlpipe._core.errors import StoreError
from mlpipe.store import catalogue, runs
from mlpipe.store.s3 import S3Store

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200)]
STEPS = 60
RUN = "lent-and-taken"  # no other test has it: its processes are looked for on the whole machine
TESTS = str(Path(__file__).parents[1])
SHORT = {
    "mlpipe.submit.rented.handle:LEASE_SECONDS": 4.0,
    "mlpipe.submit.rented.handle:_RENEW_SECONDS": 0.5,
    "mlpipe.submit.rented.handle:_POLL_SECONDS": 0.3,
    "mlpipe.submit.rented.rentals:_LOOK_SECONDS": 0.2,
    "mlpipe.submit.rented.machine:LOOK_SECONDS": 0.3,
    "mlpipe.submit.held_lease:_RENEW_SECONDS": 1.0,
}


def pipeline(folder: Path, hold: Path) -> dict[str, Any]:
    write = (
        "import sys; from pathlib import Path; from kit import plans; plans.write_tokens(Path(sys.argv[1]))"
    )
    model = {"entry": "kit.models:slow", "args": {"seconds": 0.5, "while_file": str(hold), "dropout": 0.0}}
    train = {
        "model": {**model, "seq_len": 32},
        "data": {"tokens": "{{stages.tokens.output}}", "batch_size": 8},
        "steps": STEPS,
        "strategy": "ddp",
        "precision": "fp32",
        "checkpoint": {"every": "4 steps", "keep": 2},
    }
    return {
        "version": 1,
        "name": "lent",
        "image": "registry.example.com/team/mlpipe:1",
        "stages": [
            {"name": "tokens", "command": [sys.executable, "-c", write, "{{output}}"]},
            {"name": "train", "needs": ["tokens"], "train": train, "resources": {"cpus": 1}},
        ],
    }


class Rented:
    """The command line of somebody with an account."""

    def __init__(self, folder: Path, account: stand_in.Vast, server: Any, url: str) -> None:
        pytest.importorskip("torch", reason="torch is missing: make install")
        self.cli, self.account, self.url = Cli(folder, warm=True), account, url
        self.hold = folder / "hold"
        self.hold.touch()
        for place, seconds in SHORT.items():
            self.cli.shorten(place, seconds)
        self.cli.env["PYTHONPATH"] += f":{TESTS}"
        names = ("PYTHONPATH", "KIT_SHORTENED", "MLPIPE_CALIBRATE")
        account.image = {name: self.cli.env[name] for name in names}
        self.cli.env |= {**server.environment(), **account.environment, "MLPIPE_STORE": url}
        self.store = S3Store.from_environment(url, server.environment())
        (folder / "pipeline.yaml").write_text(json.dumps(pipeline(folder, self.hold)))

    def fork_machines(self) -> None:
        """What runs on machines begins as forks, else as new interpreters."""
        programs = warm.programs(self.cli.folder / "bin", self.cli.env)
        forked = {name: programs[name] for name in ("PATH", "KIT_SESSION", "KIT_WARM")}
        # in whose temporary folder the servers of forks are
        self.account.image = {**self.account.image, **forked, "TMPDIR": tempfile.gettempdir()}

    def last_step(self) -> int:
        found = catalogue.latest(self.store, f"runs/{RUN}/stages/train")
        return found.step if found else 0

    def machine(self, attempt: int) -> Instance:
        """That of an attempt, once it trains."""

        def found() -> Instance | None:
            label = f"/{RUN}/train/{attempt}/"
            return next((one for one in self.account.instances.values() if label in one.body["label"]), None)

        return until(found, f"the machine of attempt {attempt}")

    def losses(self, attempts: int) -> dict[int, float]:
        """By step, as the last attempt that did it recorded them."""
        losses = {}
        for attempt in range(1, attempts + 1):
            data, _ = self.store.read_log(f"runs/{RUN}/stages/train/attempt-{attempt}/records/rank-0.jsonl")
            for line in data.decode().splitlines():
                record = json.loads(line)
                if record.get("kind") == "step":
                    losses[record["step"]] = record["loss"]
        return losses


@pytest.fixture
def rented(tmp_path: Path, server: Any, url: str) -> Iterator[Rented]:
    offers = [offer_row(number, cpu_cores_effective=1.0) for number in (11, 12, 13, 14)]
    with stand_in.vast(offers) as account:
        yield Rented(tmp_path, account, server, url)


def undisturbed(rented: Rented) -> tuple[Processes, dict[int, float]]:
    """Rank processes and losses of the same training on this machine."""
    folder = rented.cli.folder / "here"
    folder.mkdir()
    cli = Cli(folder, warm=True)
    cli.env["PYTHONPATH"] = TESTS
    (folder / "pipeline.yaml").write_text(json.dumps(pipeline(folder, folder / "none")))
    process = cli.start("run", "pipeline.yaml", "--run-id", RUN, "--quiet")
    workers = workers_of(RUN, 1)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err + out
    lines = (cli.store / f"runs/{RUN}/stages/train/attempt-1/records/rank-0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return workers, {one["step"]: one["loss"] for one in records if one.get("kind") == "step"}


def own(found: Processes) -> Processes:
    """Without what a machine and the kit add for themselves."""
    names = ("CONTAINER_ID", "TMPDIR", "LC_CTYPE", "KIT_SHORTENED", "KIT_SESSION", "PYTHONPATH")
    return {
        rank: (argv, {name: value for name, value in env.items() if name not in names})
        for rank, (argv, env) in found.items()
    }


@pytest.mark.parametrize("server", ["minio"], indirect=True)
def test_interrupted_and_abandoned_it_learns_the_same_and_owes_nothing(rented: Rented) -> None:
    cli, account = rented.cli, rented.account
    rented.fork_machines()
    shown = cli("submit", "pipeline.yaml", "--to", "rented", "--max-usd", "5", "--dry-run").stdout
    assert "4 machines could run it" in shown
    assert account.labels() == []
    cli("submit", "pipeline.yaml", "--to", "rented", "--max-usd", "5", "--run-id", RUN)

    first = rented.machine(1)
    there = workers_of(RUN, 1)
    until(lambda: rented.last_step() >= 4, "a checkpoint on the first machine")
    told = json.dumps(dict(first.body))
    assert KEY not in told
    assert cli.env["AWS_SECRET_ACCESS_KEY"] not in told
    lent = S3Store.from_environment(rented.url, first.body["env"])
    assert lent.exists(f"runs/{RUN}/pipeline.yaml")
    for key in (f"runs/{RUN}/run.json", "runs/other/stages/a/outputs/x", "models/m/1"):
        with pytest.raises(StoreError):
            lent.put(key, b"x")
    account.interrupt(first.number)

    second = rented.machine(2)
    assert second.offer["id"] != first.offer["id"]
    interrupted_at = rented.last_step()
    until(lambda: rented.last_step() >= interrupted_at + 4, "a checkpoint on the second machine")
    driver = runs.read_run(rented.store, RUN).driver
    assert driver is not None

    os.kill(driver.pid, signal.SIGKILL)
    until(lambda: not account.instances, "the machine to end its own rental")
    outcome = json.loads(rented.store.get(f"runs/{RUN}/stages/train/attempt-2/outcome.json"))
    assert outcome["outcome"] == "saved"
    assert any(
        path.endswith(f"/{second.number}/") for method, path, _ in account.requests if method == "DELETE"
    )

    rented.hold.unlink()
    cli("resume", RUN, "--quiet")
    assert cli.json("status", RUN)["state"] == "done"
    assert account.instances == {}
    workers, losses = undisturbed(rented)
    check_processes(own(workers), own(there))
    assert rented.losses(3) == losses
    check_bill(rented)


def check_bill(rented: Rented) -> None:
    """What the run says that it has spent is what it was billed, or a little more."""
    infos = rented.store.list(f"runs/{RUN}/rentals")
    rentals: list[Mapping[str, Any]] = [json.loads(rented.store.get(info.key)) for info in infos]
    assert all(one["ended"] is not None for one in rentals)
    said = sum((one["ended"] - one["asked"]) / 3600 * one["usd_per_hour"] for one in rentals)
    assert rented.account.usd() <= said <= 5.0


@pytest.mark.parametrize("server", ["minio"], indirect=True)
def test_what_is_cancelled_saves_and_goes_back(rented: Rented) -> None:
    cli, account = rented.cli, rented.account
    refused = cli("submit", "pipeline.yaml", "--to", "rented", "--max-usd", "0.1", code=4).stderr
    assert "no machine for rent finishes it" in refused
    cli("submit", "pipeline.yaml", "--to", "rented", "--max-usd", "5", "--run-id", RUN)
    until(lambda: rented.last_step() >= 4, "a checkpoint on a machine")
    (instance,) = account.instances.values()
    until(lambda: "of $5.00 spent" in cli("status", RUN).stdout, "what was spent")
    assert str(instance.number) in cli("doctor", "--for", "rented", code=None).stdout
    assert cli.json("cancel", RUN)["state"] == "cancelled"
    assert account.instances == {}
    assert rented.last_step() > 4  # it saved where it was
    assert "[rank 0]" in cli("logs", RUN, "--stage", "train").stdout
    check_bill(rented)
