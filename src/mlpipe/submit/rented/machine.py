"""`python -m mlpipe.submit.rented.machine`: runs a stage on the machine that was rented for it.

It has no other way to its driver than the store: the driver renews `rental.json` of the attempt, and asks
there for a save. Without a sign of it, or near the end of the rental, the stage saves, too. The script that
started this (`order.py`) then ends the rental, whatever became of this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mlpipe._core import environment
from mlpipe._core.errors import EXIT_CODES, MlpipeError
from mlpipe._core.serial import to_json
from mlpipe.plan.plan import Plan
from mlpipe.store import outputs
from mlpipe.store.base import LogWriter, Store
from mlpipe.store.open import open_store
from mlpipe.store.outcome import AttemptOutcome, write_outcome

LEASE = "rental.json"  # of an attempt: written by the driver
BEAT = "postmortem/machine.json"  # of an attempt: written here
LOOK_SECONDS = 5.0
_BEAT_SECONDS = 30.0
_SECRET = ("CONTAINER_API_KEY", environment.RENTAL)  # of no use to a stage
_NETWORK = Path("/proc/net/dev")


@dataclass(frozen=True)
class Beat:
    """Of `BEAT`: bytes since the machine began, and whether its stage has ended."""

    received_bytes: int
    sent_bytes: int
    ended: bool = False


def main() -> int:
    """The exit code, for whoever reads the container's log."""
    settings = json.loads(os.environ[environment.RENTAL])
    store = open_store(settings["store"])
    key = settings["attempt_key"]
    try:
        plan = relocated(store.get(f"{key}/plan.json").decode(), settings["cache"], outputs.cache_folder())
        return _Machine(store, plan, settings).run()
    except (MlpipeError, OSError, ValueError) as error:
        kind = error.kind if isinstance(error, MlpipeError) else "infrastructure"
        code = EXIT_CODES[kind]
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        outcome = AttemptOutcome("failed", kind=kind, message=str(error), exit_code=code, time=time.time())
        write_outcome(store, f"{key}/outcome.json", outcome)
        return code


def relocated(text: str, there: str, here: Path) -> Plan:
    """The plan of a driver whose cache is `there`, for a machine with one `here`."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(one) for name, one in value.items()}
        if isinstance(value, list):
            return [moved(one) for one in value]
        if isinstance(value, str) and value.startswith(f"{there}/"):
            return f"{here}{value.removeprefix(there)}"
        return value

    return Plan.from_json(json.dumps(moved(json.loads(text))))


class _Machine:
    def __init__(self, store: Store, plan: Plan, settings: dict[str, Any]) -> None:
        self._store, self._plan, self._settings = store, plan, settings
        self._seen = b""
        self._heard = self._began = time.monotonic()
        self._told: float | None = None  # monotonic, when the stage was told to save
        self._beat_at = 0.0

    def run(self) -> int:
        plan = self._plan
        folder = Path(tempfile.mkdtemp(prefix="mlpipe-"))
        (folder / "plan.json").write_text(plan.to_json())
        argv = [sys.executable, "-P", "-m", plan.module]
        argv += ["--plan", str(folder / "plan.json"), "--scratch", str(folder)]
        env = {name: value for name, value in os.environ.items() if name not in _SECRET}
        env |= {**plan.launch.env, environment.RUN_ID: plan.run_id, environment.STAGE: plan.stage}
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        log = self._store.open_log(f"{plan.attempt_key}/logs/launcher.log")
        assert process.stdout is not None
        shipping = threading.Thread(target=_ship, args=[process.stdout, log])
        shipping.start()
        while (code := _wait(process, LOOK_SECONDS)) is None:
            self._look(process)
        shipping.join()
        self._beat(ended=True)
        return code if code >= 0 else EXIT_CODES["infrastructure"]

    def _look(self, process: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        stop = self._is_asked()
        late = now - self._began > self._settings["save_after_seconds"]
        late = late or time.time() > self._settings["save_at"]
        alone = now - self._heard > self._settings["lease_seconds"]
        if (stop or late or alone) and self._told is None:
            self._told = now
            process.send_signal(signal.SIGTERM)
        elif self._told is not None and now - self._told > self._plan.launch.shutdown_seconds:
            process.kill()
        if now - self._beat_at > _BEAT_SECONDS:
            self._beat()

    def _is_asked(self) -> bool:
        """Whether the driver asks for a save. One that has changed its lease is alive."""
        try:
            lease = self._store.get(f"{self._plan.attempt_key}/{LEASE}")
        except MlpipeError:
            return False  # a store that is away says nothing; for how long, the lease bounds
        if lease != self._seen:
            self._seen, self._heard = lease, time.monotonic()
        return bool(json.loads(lease).get("stop"))

    def _beat(self, ended: bool = False) -> None:
        """Says that this machine is there, and what it has received and sent."""
        received, sent = traffic(_NETWORK.read_text())
        beat = Beat(received, sent, ended)
        try:
            self._store.put(f"{self._plan.attempt_key}/{BEAT}", to_json(beat).encode())
            self._beat_at = time.monotonic()
        except MlpipeError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201


def traffic(text: str) -> tuple[int, int]:
    """Bytes received and sent, by /proc/net/dev, of all interfaces but the loopback."""
    rows = [line.partition(":") for line in text.splitlines() if ":" in line]
    fields = [rest.split() for name, _, rest in rows if name.strip() != "lo"]
    return sum(int(one[0]) for one in fields), sum(int(one[8]) for one in fields)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _ship(stream: IO[bytes], log: LogWriter) -> None:
    """Whole lines, to the store and to the container's own log."""
    for line in stream:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        try:
            log.write(line)
        except MlpipeError:
            continue
    log.close()


if __name__ == "__main__":
    sys.exit(main())
