"""`python -m mlpipe.train.supervisor --plan PLAN --scratch DIR`: an elastic training on this machine.

Runs the coordinator, and a launcher for each replica in a folder of its own. A launcher that is lost is
started again; how many there should be `mlpipe scale` says, in the store. No torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mlpipe._core import environment
from mlpipe._core.cpus import num_cpus
from mlpipe._core.errors import EXIT_CODES, FATAL_KINDS, KINDS_BY_CODE, SAVED_CODE, MlpipeError, StoreError
from mlpipe._core.records import Launched, LaunchEnded
from mlpipe.plan.plan import Plan
from mlpipe.plan.process import main_of_stage
from mlpipe.store import replicas as wanted_replicas
from mlpipe.store.open import open_store
from mlpipe.store.outcome import AttemptOutcome, read_outcome, write_outcome
from mlpipe.store.runs import append_event
from mlpipe.train.replicas.coordinator import LONELY_SECONDS, Coordinator
from mlpipe.train.replicas.membership import Membership
from mlpipe.train.replicas.telling import best, tell_quorums

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 2.0  # for how many replicas are wanted
_ADDRESS = "127.0.0.1"


def main(argv: list[str] | None = None) -> int:
    return main_of_stage("mlpipe.train.supervisor", __doc__, argv, _run)


def _run(plan: Plan, path: Path, scratch: Path) -> int:
    return Supervisor(plan, path, scratch).run()


@dataclass
class Replica:
    """One that was started: `starts` times, by now as `process`. `retired`: told to leave."""

    number: int
    process: subprocess.Popen[bytes]
    starts: int = 1
    retired: bool = False


class Supervisor:
    """Of one attempt."""

    def __init__(self, plan: Plan, plan_path: Path, scratch: Path) -> None:
        assert plan.launch.replicas is not None
        self.plan, self.plan_path, self.scratch = plan, plan_path, scratch
        self.limits, self.nproc = plan.launch.replicas, plan.launch.nproc_per_node
        self.store = open_store(plan.store_url)
        self.gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        self.wanted = self._first_number()
        self.membership = Membership(self.nproc, self.limits.fewest, self.limits.most, self.wanted)
        self.coordinator = Coordinator(self.membership, _ADDRESS, LONELY_SECONDS)
        self.replicas: dict[int, Replica] = {}
        self.ended: list[AttemptOutcome] = []
        self.failed: AttemptOutcome | None = None  # of which the whole training does
        self.num_signals = 0
        self.restarts = 0
        self.num_told = 0
        self.looked = time.monotonic()

    def run(self) -> int:
        """To the end of the last replica."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        key = f"{self.plan.attempt_key}/outcome.json"
        self.store.delete([key])
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self.plan_path = self._share_machine()
        append_event(self.store, self.plan.attempt_key, Launched())
        told = 0
        for number in range(self.wanted):
            self._start(number)
        while self.replicas:
            if self.num_signals > told:
                told = self.num_signals
                self._signal_all(signal.SIGTERM)
            for one in list(self.replicas.values()):
                if (code := one.process.poll()) is not None:
                    self._after(one, code)
            self._tell_quorums()
            self._watch_coordinator()
            self._look()
            time.sleep(_POLL_SECONDS)
        self._tell_quorums()
        return self._end(key)

    def _share_machine(self) -> Path:
        """The plan of a replica, whose ranks have this machine for themselves as far as it knows: waiting
        threads of more than there are cores take the time of those that compute."""
        launch = self.plan.launch
        threads = max(1, int(launch.env.get("OMP_NUM_THREADS", "1")) // self.wanted)
        of_replica = launch._replace(env={**launch.env, "OMP_NUM_THREADS": str(threads)})
        path = self.scratch / "plan-of-replica.json"
        path.write_text(replace(self.plan, launch=of_replica).to_json())
        return path

    # -- replicas -----------------------------------------------------------------------------------

    def _first_number(self) -> int:
        """As many as this machine has cores or GPUs for, within the limits."""
        room = len(self.gpus) if self.plan.launch.device == "cuda" else num_cpus()
        return max(self.limits.fewest, min(self.limits.most, room // self.nproc))

    def _start(self, number: int, starts: int = 1) -> None:
        scratch = self.scratch / f"replica-{number}"
        scratch.mkdir(exist_ok=True)
        env = {
            **os.environ,
            environment.COORDINATOR: self.coordinator.where,
            environment.REPLICA: str(number),
            environment.SUPERVISOR: str(os.getpid()),
        }
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[number * self.nproc : (number + 1) * self.nproc])
        argv = [sys.executable, "-P", "-m", "mlpipe.train.launcher"]
        argv += ["--plan", str(self.plan_path), "--scratch", str(scratch)]
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL)
        self.replicas[number] = Replica(number, process, starts)

    def _after(self, one: Replica, code: int) -> None:
        """The launcher of a replica has ended."""
        del self.replicas[one.number]
        outcome = read_outcome(self.store, f"{self.plan.attempt_key}/outcome-replica-{one.number}.json")
        if outcome is None:
            words = f"the launcher of replica {one.number} was killed, or ended with code {code}"
            kind = KINDS_BY_CODE.get(code, "infrastructure")
            if self.num_signals:  # perhaps before it had a handler
                words, kind = "stopped before a checkpoint could be saved", "cancelled"
            outcome = AttemptOutcome("failed", kind=kind, message=words, time=time.time())
        self.restarts += outcome.restarts
        if outcome.outcome != "failed" or one.retired:
            if not one.retired:
                self.ended.append(outcome)
            if outcome.outcome == "done":
                self._send_home()
            return
        if self.failed is not None or self.num_signals or any(done.outcome == "done" for done in self.ended):
            self.ended.append(outcome)
            return
        if outcome.kind in FATAL_KINDS or outcome.cause == "not_finite":
            self._fail(outcome)  # the others would come to the same
            return
        again = outcome.kind == "infrastructure" or outcome.cause == "hang"
        if again and one.starts <= self.plan.launch.max_restarts:
            self._say(f"replica {one.number} is started again: {outcome.message}")
            self.restarts += 1
            self._start(one.number, one.starts + 1)
        elif len([other for other in self.replicas.values() if not other.retired]) < self.limits.fewest:
            self._fail(outcome)
        else:
            self._say(f"replica {one.number} is given up, the others go on: {outcome.message}")

    def _send_home(self) -> None:
        """Those who came when all was done."""
        took_part = self.membership.quorums[-1].members
        for one in self.replicas.values():
            if one.number not in took_part:
                one.retired = True
                one.process.kill()

    def _fail(self, outcome: AttemptOutcome) -> None:
        self.failed = outcome
        self._signal_all(signal.SIGTERM)
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, signum: signal.Signals) -> None:
        for one in self.replicas.values():
            one.process.send_signal(signum)

    def _look(self) -> None:
        """How many replicas are wanted, now and then."""
        if time.monotonic() - self.looked < _LOOK_SECONDS or self.num_signals or self.failed is not None:
            return
        self.looked = time.monotonic()
        try:
            wanted = wanted_replicas.wanted(self.store, self.plan.attempt_key)
        except StoreError as error:
            self._say(f"nobody knows how many replicas are wanted: {error}")
            return
        if wanted is None or wanted == self.wanted:
            return
        self.wanted = max(self.limits.fewest, min(self.limits.most, wanted))
        staying = sorted(one.number for one in self.replicas.values() if not one.retired)
        for number in staying[self.wanted :]:
            self.replicas[number].retired = True
            self.replicas[number].process.terminate()
        free = (
            number for number in range(self.limits.most + len(self.replicas)) if number not in self.replicas
        )
        for _ in range(self.wanted - len(staying)):
            self._start(next(free))

    # -- what is told -------------------------------------------------------------------------------

    def _tell_quorums(self) -> None:
        """Into events.jsonl."""
        self.num_told = tell_quorums(self.membership, self.num_told, self.store, self.plan.attempt_key)

    def _say(self, words: str) -> None:
        print(words, flush=True)  # noqa: T201

    def _watch_coordinator(self) -> None:
        if self.coordinator.is_hung() and self.failed is None:
            words = "the coordinator of the replicas hangs"
            hint, now = "mlpipe resume goes on from the last checkpoint", time.time()
            hang = AttemptOutcome("failed", kind="infrastructure", message=words, hint=hint, time=now)
            self._fail(hang)

    def _end(self, key: str) -> int:
        ended = self.failed or best(self.ended)
        code = EXIT_CODES[ended.kind or "failed"] if ended.outcome == "failed" else 0
        code = SAVED_CODE if ended.outcome == "saved" else code
        ended = replace(ended, restarts=self.restarts, exit_code=code)
        if ended.outcome == "failed":
            self._say(f"error: {MlpipeError(ended.message, where=ended.where, hint=ended.hint)}")
        try:
            append_event(
                self.store, self.plan.attempt_key, LaunchEnded(outcome=ended.outcome, message=ended.message)
            )
            write_outcome(self.store, key, ended)
        except StoreError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
            return code or EXIT_CODES[error.kind]
        return code

    def _on_signal(self, signum: int, frame: object) -> None:
        self.num_signals += 1


if __name__ == "__main__":
    sys.exit(main())
