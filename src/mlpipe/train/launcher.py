"""`python -m mlpipe.train.launcher --plan PLAN --scratch DIR`: one a node (PID 1 of its pod), above torchrun.

torchrun exits 1 whatever its workers return and restarts a worker that exits 5, so our documented exit
codes come from here, out of what the workers left in the scratch folder. The launcher starts torchrun,
asks for a graceful stop on the first SIGTERM or SIGINT and ends everything on the second, ends a run that
a restart would only repeat, ships the workers' output to the store, and writes `outcome.json`. No torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlpipe._core import environment
from mlpipe._core.errors import EXIT_CODES, NODE_FAULT_CODE, SAVED_CODE, MlpipeError, StoreError
from mlpipe._core.records import Launched, LaunchEnded, Preflight, Record
from mlpipe.plan.gang_node import GangNode
from mlpipe.plan.plan import Plan
from mlpipe.plan.process import fetch_inputs, main_of_stage
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.outcome import NODE_FAULT, AttemptOutcome, write_outcome
from mlpipe.store.runs import append_event
from mlpipe.train import forked, outcome, stop
from mlpipe.train.logs import LogShipper
from mlpipe.train.outcome import Outcome
from mlpipe.train.profile_watch import PROFILE_FILE, ProfileWatch
from mlpipe.train.room import check_room
from mlpipe.train.slow_nodes import SLOW_FILE
from mlpipe.train.stop import STOP_FILE, any_alive, die_with_parent

# Numbers of restarts that one start of a gang has for torchrun's rounds: a node that is cut off and comes
# back begins one, too, which `max_restarts` does not bound.
RESTARTS_OF_A_GANG = 1000
_POLL_SECONDS = 0.1
# A node whose peers are gone ends after the node that is to blame: whoever watches sees the cause first.
_BLAMELESS_SECONDS = 15.0
# From a rank's word that the run is over to the end of torchrun by force: the others write their stacks.
_FATAL_GRACE_SECONDS = 6.0
_KILL_GRACE_SECONDS = 10.0
# The kernel sends the parent's death signal once for each of its threads, one after the other. So a second
# signal means "at once" only if the parent is still there a moment later.
_SECOND_SIGNAL_SECONDS = 0.5


def main(argv: list[str] | None = None) -> int:
    if environment.SUPERVISOR in os.environ:
        die_with_parent(int(os.environ[environment.SUPERVISOR]))
    return main_of_stage("mlpipe.train.launcher", __doc__, argv, _run)


def _run(plan: Plan, path: Path, scratch: Path) -> int:
    if plan.kind.runs != "workers":
        raise ValueError(f"a {plan.kind} stage has no workers")
    return Launcher(plan, path, scratch).run()


class Launcher:
    """Of one node: runs torchrun to its end, once."""

    def __init__(self, plan: Plan, plan_path: Path, scratch: Path) -> None:
        self.plan = plan
        self.node = GangNode.from_environment()
        if not plan.launch.num_spares:  # else the preflight says whose ranks are here
            self.node = replace(self.node, index=self._number_at(self.node.index))
        self.first_restart = self.node.gang_restart * RESTARTS_OF_A_GANG
        self.outcome_key = f"{plan.attempt_key}/{self.node.name('outcome', '.json')}"
        self.plan_path = plan_path
        self.scratch = scratch
        self.store: Store = open_store(plan.store_url)
        self.parent = os.getppid()
        self.hang_timeout_seconds = plan.work.training.hang_timeout_seconds
        self.stopped: dict[int, float] = {}  # rank: since when, of the monotonic clock
        self.slow = b""
        self.is_spare = False
        self.num_signals = 0
        self.stop_deadline = float("inf")
        self.kill_deadline = float("inf")
        self.fatal_since = float("inf")  # a rank has said that it is over

    def run(self) -> int:
        """To the end of torchrun, or of what comes before it; the exit code."""
        log_dir = self.scratch / "logs"
        self._clear_scratch(log_dir)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self.store.delete([self.outcome_key])  # of this node's pod before a restart of the gang
        if self.node.replica is not None:  # which may have been another node's
            from mlpipe.store.preflight import slow_key

            self.store.delete([slow_key(self.plan.attempt_key, self.node.replica)])
        if not fetch_inputs(self.store, self.plan, lambda: self._on_signal(signal.SIGTERM, None)):
            return self._end_before_ranks(_cancelled("stopped before its ranks began"))
        check_room(self.plan.work.training.shared_memory_bytes)
        self._event(Launched())
        if self.plan.launch.preflight is not None and (failed := self._preflight()) is not None:
            return self._end_before_ranks(failed)
        if self.is_spare:
            from mlpipe.train.spare import stand_by

            return stand_by(self.store, self.plan, self.node.rendezvous, lambda: self.num_signals > 0)
        torchrun_log = self.scratch / "torchrun.log"
        process = self._start_torchrun(torchrun_argv(self.plan, log_dir, self.node), torchrun_log)
        watch = (
            ProfileWatch(self.store, self.plan.attempt_key, self.scratch)
            if self.node.index == 0 and not self.node.replica  # where rank 0 is
            else None
        )
        shipper = LogShipper(
            self.store,
            self.plan.attempt_key,
            log_dir,
            self.scratch,
            first_restart=self.first_restart,
            first_rank=self.node.index * self.plan.launch.nproc_per_node,
        )
        shipper.rank_offset = (self.node.replica or 0) * self.plan.launch.nproc_per_node
        while process.poll() is None:
            shipper.ship()
            self._ship_slow()
            self._name_stopped()
            self._end_if_overdue(process)
            time.sleep(_POLL_SECONDS)
        if watch is not None:
            watch.close()
        shipper.ship()
        restarts = self._num_restarts(log_dir)
        ended = self._outcome(process.returncode, torchrun_log.read_text(errors="replace"), restarts)

        def keep() -> None:
            if ended.outcome == "failed":
                self.keep_postmortem(torchrun_log)
            shipper.close()

        return self._tell_end(ended, restarts, keep, is_to_blame=_is_to_blame(ended))

    def _clear_scratch(self, log_dir: Path) -> None:
        """Of what a launcher before this one left there."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        of_ranks = ("outcome-*.json", "fatal-*.json", "pid-*", "stacks-*", "flight-rank-*")
        for stale in (*of_ranks, STOP_FILE, SLOW_FILE, PROFILE_FILE):
            for path in self.scratch.glob(stale):
                path.unlink()
        shutil.rmtree(log_dir, ignore_errors=True)

    def _start_torchrun(self, argv: list[str], output: Path) -> subprocess.Popen[bytes]:
        """Before any thread exists here. It begins as our fork where we are one that has imported torch."""
        env = self._environment()
        forks = forked.fits(env)
        begin = partial(forked.begin_torchrun, os.getpid(), argv, env)
        with output.open("wb") as log:
            return subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=begin if forks else partial(die_with_parent, os.getpid()),
                restore_signals=not forks,  # a new interpreter ignores SIGPIPE again, as we do
            )

    def _preflight(self) -> Outcome | None:
        """None: the machines passed."""
        from mlpipe.store.preflight import write_checked
        from mlpipe.train.preflight.start import at_fault, run_preflight

        alone = self.plan.launch.num_nodes == 1
        found = run_preflight(
            self.plan_path,
            self.scratch,
            self._environment(),
            alone=alone,
            stopped=lambda: self.num_signals > 0,
        )
        limits = self.plan.launch.preflight
        if isinstance(found, Outcome):
            if self.node.index and limits is not None and limits.spares and not self.num_signals:
                print(f"{found.message}: perhaps the others go on", flush=True)  # noqa: T201
                self.is_spare = True
                return None
            return found
        checked, ranked = found
        if self.node.index == 0:
            write_checked(self.store, self.plan.attempt_key, checked)
            self._event(Preflight(seconds=checked.seconds, nodes=list(checked.nodes), faults=checked.words))
        if ranked is None:
            return at_fault(checked) if checked.words else None
        self.is_spare = self.node.index not in ranked.indices
        index = self.node.index
        if not self.is_spare:
            index = self._number_at(ranked.indices.index(index))
        self.node = replace(self.node, index=index, rendezvous=ranked.rendezvous)
        self.outcome_key = f"{self.plan.attempt_key}/{self.node.name('outcome', '.json')}"
        return None

    def _end_before_ranks(self, ended: Outcome) -> int:
        """The exit code."""
        from mlpipe.train.preflight.start import LOG

        def keep() -> None:
            if (log := self.scratch / LOG).exists():
                name = self.node.name("preflight", ".log")
                self.store.put(f"{self.plan.attempt_key}/postmortem/{name}", log.read_bytes())

        return self._tell_end(ended, 0, keep, is_to_blame=_exit_code(ended) != EXIT_CODES["infrastructure"])

    def _tell_end(self, ended: Outcome, restarts: int, keep: Callable[[], None], *, is_to_blame: bool) -> int:
        """To whoever reads our output, and to the store, which `keep` gives the rest; the exit code."""
        exit_code = _exit_code(ended)
        if ended.outcome == "failed":
            failure = MlpipeError(ended.message, where=ended.where, hint=ended.hint)
            print(f"error: {failure}", file=sys.stderr, flush=True)  # noqa: T201
        try:
            self._event(LaunchEnded(outcome=ended.outcome, message=ended.message))
            self._store_outcome(ended, restarts, exit_code)
            keep()
        except StoreError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
            return exit_code or EXIT_CODES[error.kind]
        if self.plan.launch.num_nodes > 1 and not is_to_blame:
            _wait_until(lambda: self.num_signals > 0, _BLAMELESS_SECONDS)
        return exit_code

    def _ship_slow(self) -> None:
        """What rank 0 says of nodes that are slow, if it is here and has something new to say."""
        with contextlib.suppress(FileNotFoundError):
            told = (self.scratch / SLOW_FILE).read_bytes()
            if told != self.slow:
                from mlpipe.store.preflight import write_slow

                with contextlib.suppress(StoreError):  # no reason to end a training: tried again
                    write_slow(self.store, self.plan.attempt_key, told, self.node.replica)
                    self.slow = told

    def _event(self, event: Record) -> None:
        """Into events.jsonl, of the first node only: one writer at a time. For replicas: the supervisor."""
        if self.node.index == 0 and self.node.replica is None:
            append_event(self.store, self.plan.attempt_key, event)

    def _store_outcome(self, ended: Outcome, restarts: int, exit_code: int) -> None:
        of_attempt = AttemptOutcome(
            ended.outcome,
            kind=ended.kind,
            cause=ended.cause,
            message=ended.message,
            where=ended.where,
            hint=ended.hint,
            step=ended.step,
            checkpoint=ended.checkpoint,
            restarts=self.node.gang_restart + restarts,  # how many; their numbers leave room for torchrun's
            exit_code=exit_code,
            time=ended.time,
            details=ended.details,
        )
        write_outcome(self.store, self.outcome_key, of_attempt)

    def _num_restarts(self, log_dir: Path) -> int:
        """By the folder that torchrun makes for each. After a fatal failure it may start workers once more,
        which leave at once: these do not count."""
        fatal = [path.stat().st_mtime for path in outcome.fatal_files(self.scratch)]
        restarts = [
            int(path.name.removeprefix("attempt_"))
            for path in log_dir.glob("*/attempt_*")
            if not fatal or path.stat().st_mtime <= min(fatal)
        ]
        return max(restarts, default=0)

    def _environment(self) -> dict[str, str]:
        launch = self.plan.launch
        threads = max(1, len(os.sched_getaffinity(0)) // launch.nproc_per_node)
        return {
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            **launch.env,
            environment.PLAN: str(self.plan_path),
            environment.SCRATCH: str(self.scratch),
            environment.FIRST_RESTART: str(self.first_restart),
            **self._place(),
            "PYTHONUNBUFFERED": "1",
            # One shared TCPStore outlives a restart in place and keeps the addresses of dead workers.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def _place(self) -> dict[str, str]:
        """In its gang, where that is not what its pod or job was told."""
        if self.node == GangNode.from_environment():
            return {}
        place = {"JOB_COMPLETION_INDEX": str(self.node.index), environment.RENDEZVOUS: self.node.rendezvous}
        return place | ({environment.FIRST_NODE: "0"} if environment.FIRST_NODE in os.environ else {})

    def _number_at(self, place: int) -> int:
        launch = self.plan.launch
        mesh = self.plan.work.training.mesh
        return mesh.number_at(place, launch.nproc_per_node) if launch.num_nodes > 1 else place

    def _on_signal(self, signum: int, frame: object) -> None:
        self.num_signals += 1
        if self.num_signals == 1:
            (self.scratch / STOP_FILE).touch()
            self.stop_deadline = time.monotonic() + self.plan.launch.shutdown_seconds
        else:
            self.kill_deadline = min(self.kill_deadline, time.monotonic() + _SECOND_SIGNAL_SECONDS)

    def _end_if_overdue(self, process: subprocess.Popen[bytes]) -> None:
        """The graceful stop took too long or a second signal came; or a rank said that it is over."""
        if self.kill_deadline < float("inf") and os.getppid() != self.parent:
            self.num_signals, self.kill_deadline = 1, float("inf")
        if time.monotonic() >= min(self.stop_deadline, self.kill_deadline):
            _end(process, grace_seconds=0 if self.num_signals > 1 else _KILL_GRACE_SECONDS)
        elif self.num_signals and not any_alive(self.scratch) and not self._is_leaving():
            # nothing here to save; torchrun may be waiting for peers that are gone, or start ranks anew
            _end(process, grace_seconds=_KILL_GRACE_SECONDS)
        elif outcome.fatal_files(self.scratch):
            self.fatal_since = min(self.fatal_since, time.monotonic())
            if time.monotonic() - self.fatal_since > _FATAL_GRACE_SECONDS or not any_alive(self.scratch):
                _end(process, grace_seconds=_KILL_GRACE_SECONDS)

    def _is_leaving(self) -> bool:
        """Ranks have said how their work ended; what other packages do at a process's end takes a while."""
        return self.plan.launch.num_nodes == 1 and any(self.scratch.glob("outcome-*.json"))

    def _name_stopped(self) -> None:
        """The watchdog of a stopped rank is stopped, too: the launcher has its word, as soon as another rank
        ends the run because it waits, or when the rank has been stopped for as long. When all others here
        have had theirs, it is killed: it would not hear a SIGTERM."""
        now = time.monotonic()
        pids = stop.ranks(self.scratch, stopped=True)
        self.stopped = {rank: self.stopped.get(rank, now) for rank in pids}
        waited = self.stopped and outcome.any_hang(self.scratch)
        for rank, since in self.stopped.items():
            if waited or now - since > self.hang_timeout_seconds:
                words = f"is stopped, by a signal (SIGSTOP) or a debugger, since {now - since:.0f} s"
                if not self._spoke(rank):
                    outcome.write(self.scratch, outcome.hang(rank, 0, words), fatal=True)
                if all(map(self._spoke, stop.ranks(self.scratch))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pids[rank], signal.SIGKILL)

    def _spoke(self, rank: int) -> bool:
        return (self.scratch / f"fatal-{rank}.json").exists()

    def _outcome(self, returncode: int, torchrun_log: str, restarts: int) -> Outcome:
        fatal = [outcome.read(path) for path in outcome.fatal_files(self.scratch)]
        if fatal and all("waiting" in worker.details for worker in fatal):
            for rank in stop.ranks(self.scratch).keys() - {worker.rank for worker in fatal}:
                if not (self.scratch / f"outcome-{rank}.json").exists():
                    fatal.append(
                        outcome.hang(
                            rank, 0, "hangs, and so does its watchdog: native code that holds Python's lock?"
                        )
                    )
        if fatal:
            return min(fatal, key=lambda worker: ("waiting" in worker.details, worker.time))
        ended = [outcome.read(path) for path in self.scratch.glob("outcome-*.json")]
        for worker in sorted(ended, key=lambda worker: worker.rank):
            if worker.outcome in ("done", "saved") and (
                returncode == 0 or self.num_signals or worker.rank == 0
            ):
                return worker
        good = [worker for worker in ended if worker.kind is None or worker.details]
        if returncode == 0 and good:
            return good[0]
        if self.num_signals:
            how = "at once" if self.num_signals > 1 else "before a checkpoint could be saved"
            why = "".join(f": {worker.message}" for worker in ended[:1])
            return _cancelled(f"stopped {how}{why}")
        if returncode < 0:  # not of the worker's doing: it has no report either
            how = signal.Signals(-returncode).name
            return Outcome(
                "failed",
                kind="infrastructure",
                message=f"torchrun was killed by {how}",
                hint="out of memory? look at the kernel's log",
                time=time.time(),
                killed_here=True,
            )
        return _failure(torchrun_log, [worker for worker in ended if worker.outcome == "failed"], restarts)

    def keep_postmortem(self, torchrun_log: Path) -> None:
        """torchrun's own log, and what the ranks wrote: stacks, flight recordings of NCCL, outcomes."""
        kept_log = self.node.name("torchrun", ".log")
        self.store.put(f"{self.plan.attempt_key}/postmortem/{kept_log}", torchrun_log.read_bytes())
        paths: list[Path] = []
        for kept in ("stacks-rank-*.txt", "flight-rank-*", "outcome-*.json", "fatal-*.json"):
            paths += self.scratch.glob(kept)
        for path in paths:
            name = self.node.name(path.stem, path.suffix) if self.node.replica is not None else path.name
            self.store.put(f"{self.plan.attempt_key}/postmortem/{name}", path.read_bytes())


def torchrun_argv(plan: Plan, log_dir: Path, node: GangNode) -> list[str]:
    """The command line of torchrun on `node`."""
    launch = plan.launch
    argv = [sys.executable, "-P", "-m", "mlpipe.train.torchrun"]
    argv += ["--nnodes", str(launch.num_nodes), "--nproc-per-node", str(launch.nproc_per_node)]
    argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", node.rendezvous, "--rdzv-id", plan.run_id]
    if node.num_machines is not None:  # by the name of the endpoint it would have to guess
        argv += ["--rdzv-conf", f"is_host={'true' if node.index == 0 else 'false'}"]
    if launch.num_nodes == 1:
        argv += ["--local-addr", "localhost"]
    argv += ["--max-restarts", str(launch.max_restarts), "--monitor-interval", "0.1"]
    if _torchrun_has("--shutdown-timeout"):
        argv += ["--shutdown-timeout", str(int(launch.shutdown_seconds))]
    argv += ["--redirects", "3", "--log-dir", str(log_dir)]
    return [*argv, *launch.argv]


def _torchrun_has(option: str) -> bool:
    """torch 2.11 lacks --shutdown-timeout. Read from its source: importing it costs 2 s."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise MlpipeError(
            "training needs torch, which is not installed here",
            hint="pip install 'mlpipe[train]'",
            kind="infrastructure",
        )
    return option in (Path(torch.origin).parent / "distributed" / "run.py").read_text()


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _end(process: subprocess.Popen[bytes], *, grace_seconds: float) -> None:
    """SIGTERM, then SIGKILL. The workers die with torchrun."""
    if grace_seconds:
        process.terminate()
        try:
            process.wait(grace_seconds)
            return
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    process.wait(_KILL_GRACE_SECONDS)


def _cancelled(words: str) -> Outcome:
    return Outcome("failed", kind="cancelled", message=words, time=time.time())


def _is_to_blame(ended: Outcome) -> bool:
    """Whether this node knows that it is the cause, and not another one that it lost or waits for."""
    if "waiting" in ended.details:
        return False
    return ended.kind != "infrastructure" or ended.killed_here


def _exit_code(ended: Outcome) -> int:
    if ended.outcome == "saved":
        return SAVED_CODE
    if ended.cause == NODE_FAULT:
        return NODE_FAULT_CODE
    return 0 if ended.outcome == "done" else EXIT_CODES[ended.kind or "failed"]


def _failure(torchrun_log: str, failed: list[Outcome], restarts: int) -> Outcome:
    """The first cause. A rank that a signal ended has no words, and torchrun's report may put first a peer
    that lost it; else the first to have failed speaks."""
    after = f" (after {restarts} restarts)" if restarts else ""
    reported = re.findall(r"^ *rank +: (\d+) .*\n *exitcode +: (-?\d+)", torchrun_log, flags=re.MULTILINE)
    if reported:  # the root cause, as torchrun sees it, stands last
        rank, exitcode = min(((int(r), int(code)) for r, code in reversed(reported)), key=_has_words)
        if exitcode < 0:
            name = signal.Signals(-exitcode).name
            crashed = name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
            return Outcome(
                "failed",
                rank=rank,
                kind="failed" if crashed else "infrastructure",
                message=f"rank {rank} was killed by {name}{after}",
                where=f"rank {rank}",
                hint="a native crash: its log has the last words"
                if crashed
                else "out of memory? look at the kernel's log; `mlpipe plan` says what it needs",
                time=time.time(),
                killed_here=name != "SIGTERM",  # which is torchrun's, to the peers of one that failed
            )
        if not failed:
            return Outcome(
                "failed",
                rank=rank,
                kind="failed",
                message=f"rank {rank} exited with code {exitcode}{after}",
                where=f"rank {rank}",
                hint="its log has the last words",
                time=time.time(),
            )
    if failed:
        first = min(failed, key=lambda worker: worker.time)
        words, newline, calls = first.message.partition("\n")
        return replace(first, message=words + after + newline + calls)
    last = "\n".join(torchrun_log.strip().splitlines()[-5:])
    return Outcome(
        "failed", kind="infrastructure", message=f"torchrun failed{after}: {last}", time=time.time()
    )


def _has_words(reported: tuple[int, int]) -> bool:
    """Of (rank, exit code). SIGTERM is torchrun's, to the peers of one that failed."""
    return reported[1] >= 0 or reported[1] == -signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
