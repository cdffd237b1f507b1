"""`python -m benchmarks.goodput --minutes 30` (as root): how much of the time is training where things fail.

Three workers, each in a network namespace of its own, on a bridge in the one that this makes for itself,
where a MinIO of its own and the coordinator of the elastic side stand. A worker sleeps for each sample, so a
step of two takes half as long again as one of three: a worker that is missing is missed.

What befalls them is drawn from a seed, a failure every `--every` seconds on average, each kind as often as
the others:

- `rank`, `agent`, `launcher`: the worker's rank, its torchrun, or its launcher is killed (-9);
- `store`: MinIO is stopped for 20 s (SIGSTOP), so that requests hang;
- `link`: the worker's interface has no carrier for 15 s; what runs behind it goes on.

Who restarts what: a launcher that has ended is started again at once, of the elastic side it alone; of the
gang all three, after the others are killed, as a JobSet does. How long a pod takes to start is not in it.

The other sides are torchft, a torchrun a replica, by its own example, and the same with sums by its manager.
Nothing of ours stands above its torchrun, and a rank ends with it, as in a container: `agent` and `launcher`
are the same there. It uses no store.

Goodput is the number of samples that were learnt from the first failure's countdown to the end, over those
that would have been at the rate before it, when nothing has happened yet. Steps done again count once. A step
of ours always has as many samples; one of torchft has fewer where a replica is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import measure
from benchmarks.peers import sides

ROOT = Path(__file__).parents[1]
GOAL = 0.95
WORKERS = 3
BATCH = 12
KINDS = ("rank", "agent", "launcher", "store", "link")
TORCHFT = ("torchft", "torchft without its DDP")
SIDES = ("elastic", "gang restart", *TORCHFT)
HUB = "10.214.78.1"
_BY = ("work", "side")  # rows of which a run replaces
_INSIDE = "MLPIPE_BENCH_INSIDE"  # in namespaces of its own
_DEADLINE_SECONDS = 300.0  # of anything that is waited for
_SHIPPED_SECONDS = 15.0  # until what was recorded is in the store
_AT = """set -e; mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@" """


@dataclass(frozen=True)
class Failure:
    """`at`: seconds from the first countdown. `seconds`: how long it lasts."""

    at: float
    kind: str
    victim: int
    seconds: float = 0.0


def failures(minutes: float, every: float, seed: int, lasts: dict[str, float]) -> list[Failure]:
    """As many as there should be on average, at any time, none before the one before it has ended. All kinds
    come in turn, each time in another order."""
    draw, found, deck, over = random.Random(seed), list[Failure](), list[str](), 0.0
    number, latest = round(minutes * 60 / every), minutes * 60 - max(lasts.values(), default=0.0)
    for at in sorted(draw.uniform(0, latest) for _ in range(number)):
        deck = deck or draw.sample(KINDS, len(KINDS))
        kind = deck.pop()
        found.append(Failure(max(at, over), kind, draw.randrange(WORKERS), lasts.get(kind, 0.0)))
        over = found[-1].at + found[-1].seconds
    return found


@dataclass(frozen=True)
class Done:
    """A step that a worker recorded, at that time. `samples`: of all workers."""

    time: float
    step: int
    samples: int = BATCH


@dataclass(frozen=True)
class Found:
    """Of a side. `small_steps`: those of `steps` with fewer samples than a step before any failure. `pauses`:
    by kind, seconds of the longest pause between two steps after each failure."""

    goodput: float
    step_seconds: float
    steps: int
    small_steps: int
    pauses: dict[str, list[float]]
    counts: dict[str, int]


def judge(
    done: dict[int, list[Done]], struck: list[tuple[float, Failure]], begin: float, end: float, calm: int
) -> Found:
    """`done`: by worker. `struck`: with the times at which they came. Before `begin` there were at least
    `calm` steps that nothing befell."""
    in_time = sorted((one for lines in done.values() for one in lines), key=lambda one: one.time)
    before = [one for one in in_time if one.time <= begin]
    first_of = {one.step: one.time for one in reversed(before)}
    last = before[-1].step
    step_seconds = (first_of[last] - first_of[last - calm]) / calm
    within = [one for one in in_time if begin < one.time <= end]
    samples_of = {one.step: one.samples for one in in_time if one.time <= end}
    # one that nobody recorded counts as whole
    samples = [samples_of.get(step, BATCH) for step in range(last + 1, (within or before)[-1].step + 1)]
    rate = sum(samples_of.get(step, BATCH) for step in range(last - calm + 1, last + 1)) / (
        step_seconds * calm
    )
    times = [one.time for one in in_time if one.time <= end] + [end]
    gaps = list(pairwise(times))
    struck = [one for one in struck if one[0] < end]  # a worker may not have been there to be struck in time
    ends = [at for at, _ in struck[1:]] + [end]
    pauses: dict[str, list[float]] = {}
    for (at, failure), until in zip(struck, ends, strict=True):
        longest = max(later - earlier for earlier, later in gaps if later > at and earlier < until)
        pauses.setdefault(failure.kind, []).append(longest)
    numbers = {worker: Counter(one.step for one in lines) for worker, lines in done.items()}
    known = set().union(*numbers.values())
    counts = {
        "steps that nobody recorded": len(set(range(min(known), max(known) + 1)) - known),
        "steps done again": sum(max(of[step] for of in numbers.values()) - 1 for step in known),
    }
    small = sum(one < BATCH for one in samples)
    goodput = sum(samples) / rate / (end - begin)
    return Found(goodput, step_seconds, len(samples), small, pauses, counts)


class Net:
    """The bridge, and a namespace for each worker. `argv` is what starts a program there: its own process."""

    def __init__(self, folder: Path) -> None:
        self._hosts = folder / "hosts"
        lines = [f"{self.address(one)} {self.name(one)}\n" for one in (None, *range(WORKERS))]
        self._hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
        Path("/run/netns").mkdir(exist_ok=True)
        _call("mount", "-t", "tmpfs", "none", "/run/netns")  # names that vanish with this process
        _call("ip", "link", "set", "lo", "up")
        _call("ip", "link", "add", "hub", "type", "bridge")
        _call("ip", "address", "add", f"{HUB}/24", "dev", "hub")
        _call("ip", "link", "set", "hub", "up")
        for worker in range(WORKERS):
            place = self.name(worker)
            _call("ip", "netns", "add", place)
            _call("ip", "link", "add", place, "type", "veth", "peer", "name", "eth0", "netns", place)
            _call("ip", "link", "set", place, "master", "hub", "up")
            _call("ip", "-n", place, "address", "add", f"{self.address(worker)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _call("ip", "-n", place, "link", "set", interface, "up")

    def address(self, worker: int | None) -> str:
        """None: of the hub."""
        return HUB if worker is None else f"10.214.78.{10 + worker}"

    def name(self, worker: int | None) -> str:
        return "hub" if worker is None else f"worker-{worker}"

    def argv(self, worker: int | None) -> list[str]:
        """The host's name is that of its address: by it torch and mlpipe find their interface."""
        name = self.name(worker)
        enter = [] if worker is None else ["nsenter", f"--net=/run/netns/{name}"]
        own = ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", _AT, "sh"]
        return [*enter, *own, str(self._hosts), name]

    def cut(self, worker: int) -> None:
        _call("ip", "link", "set", self.name(worker), "down")

    def heal(self, worker: int) -> None:
        _call("ip", "link", "set", self.name(worker), "up")


class Side(ABC):
    """Three launchers, which are started again: each by itself, or, of a gang, all when one has ended.
    `record`: what a worker says of its start and of each step (`kind`, `time`, `step`)."""

    is_gang = False
    hub: subprocess.Popen[bytes] | None = None  # by which the workers meet

    def __init__(self, folder: Path, net: Net, environment: dict[str, str]) -> None:
        from kit import processes

        self.processes, self.net, self.folder, self.environment = processes, net, folder, environment
        self.restarts = 0  # of the gang
        self.struck = list[tuple[float, Failure]]()
        self.launchers = list[subprocess.Popen[bytes]]()

    @abstractmethod
    def launch(self, worker: int) -> subprocess.Popen[bytes]:
        """Starts it."""

    @abstractmethod
    def records(self, worker: int) -> list[Any]:
        """All that it has said so far."""

    def samples(self, record: Any) -> int:
        return BATCH

    @abstractmethod
    def pid(self, kind: str, worker: int) -> int | None:
        """None: it is not there now."""

    def start(self, argv: list[str], worker: int | None, **more: str) -> subprocess.Popen[bytes]:
        from kit.servers import die_with_parent

        scratch = self.scratch(worker)
        scratch.mkdir(exist_ok=True)
        with (scratch / "log").open("ab") as log:
            return subprocess.Popen(
                [*self.net.argv(worker), *argv],
                env={**self.environment, **more},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def scratch(self, worker: int | None) -> Path:
        return self.folder / self.net.name(worker)

    def tend(self) -> None:
        """Who has ended is started again."""
        if self.hub is not None and self.hub.poll() is not None:
            raise RuntimeError(f"what the workers meet by ended: {self._log(None)}")
        ended = [worker for worker, one in enumerate(self.launchers) if one.poll() is not None]
        if ended and self.is_gang:
            self.end()
            self.restarts += 1
            ended = list(range(WORKERS))
        for worker in ended:
            self.launchers[worker] = self.launch(worker)

    def until(self, what: str, check: Callable[[], Any], pause: float = 0.2) -> None:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not check():
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited for {what}: {self._log(0)}")
            self.tend()
            time.sleep(pause)

    def wait(self, until: float) -> None:
        while (left := until - time.time()) > 0:
            self.tend()
            time.sleep(min(0.2, left))

    def strike(self, failure: Failure, store: int) -> None:
        """`store`: MinIO's process. Returns when it is over."""
        victim, lasts = failure.victim, time.time() + failure.seconds
        if failure.kind == "store":
            os.kill(store, signal.SIGSTOP)
            self.struck.append((time.time(), failure))
            self.wait(lasts)
            os.kill(store, signal.SIGCONT)
        elif failure.kind == "link":
            self.net.cut(victim)
            self.struck.append((time.time(), failure))
            self.wait(lasts)
            self.net.heal(victim)
        else:  # one that is still coming back from the blow before is not struck until it is there
            self.until("a worker to strike", lambda: self.pid(failure.kind, victim) is not None)
            pid = self.pid(failure.kind, victim)
            if pid is not None:
                self.processes.kill([pid])
            self.struck.append((time.time(), failure))

    def done(self) -> dict[int, list[Done]]:
        return {
            rank: [
                Done(one.time, one.step, self.samples(one))
                for one in self.records(rank)
                if one.kind == "step"
            ]
            for rank in range(WORKERS)
        }

    def unstruck_restarts(self) -> int:
        """Of workers that nobody killed."""
        kills = Counter(one.victim for _, one in self.struck if one.kind not in ("store", "link"))
        starts = {r: sum(one.kind == "start" for one in self.records(r)) for r in range(WORKERS)}
        return sum(max(0, starts[rank] - 1 - kills[rank]) for rank in starts)

    def end(self) -> None:
        launchers = [one for one in (self.hub, *self.launchers) if one is not None]
        for one in launchers:
            self.processes.kill(self.processes.tree(one.pid))
        for one in launchers:
            one.wait(_DEADLINE_SECONDS)

    def _log(self, worker: int | None) -> str:
        return (self.scratch(worker) / "log").read_text(errors="replace")[-3000:]


class Ours(Side):
    """`elastic`: each launcher is a replica; else they are one gang. `every`: steps between its checkpoints.
    `seconds`: of a sample, forward."""

    def __init__(
        self, folder: Path, net: Net, environment: dict[str, str], elastic: bool, every: int, seconds: float
    ) -> None:
        from kit import plans

        from mlpipe.plan.entry import Entry
        from mlpipe.plan.model import ModelPlan
        from mlpipe.plan.plan import Replicas
        from mlpipe.store.open import open_store

        super().__init__(folder, net, {**plans.environment(), **environment})
        self.is_gang = not elastic
        model = ModelPlan(Entry("kit.models:paced", {"seconds": [seconds] * WORKERS}), None, 32, ())
        launch: dict[str, Any] = {"max_restarts": 1000, "num_nodes": 1 if elastic else WORKERS}
        launch |= {"nproc_per_node": 1, "replicas": Replicas(1, WORKERS) if elastic else None}
        self.plan = plans.train_plan(
            f"s3://goodput/{folder.name}",
            plans.write_tokens(folder / "tokens"),
            strategy="single" if elastic else "ddp",
            world_size=1 if elastic else WORKERS,
            steps=1_000_000,
            every=every,
            model=model,
            launch=launch,
            global_batch=BATCH,
            micro_batch=BATCH if elastic else BATCH // WORKERS,
            hang_timeout_seconds=600.0,
        )
        self.store = open_store(self.plan.store_url)
        (folder / "plan.json").write_text(self.plan.to_json())
        self.hub = self._start("mlpipe.train.coordinate", None) if elastic else None
        self.launchers = [self.launch(worker) for worker in range(WORKERS)]

    def launch(self, worker: int) -> subprocess.Popen[bytes]:
        if not self.is_gang:
            return self._start("mlpipe.train.launcher", worker, MLPIPE_REPLICA=str(worker))
        return self._start(
            "mlpipe.train.launcher",
            worker,
            JOB_COMPLETION_INDEX=str(worker),
            MLPIPE_RENDEZVOUS=f"{self.net.address(0)}:29500",
            MLPIPE_GANG_RESTART=str(self.restarts),
        )

    def _start(self, module: str, worker: int | None, **more: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", module, "--plan", str(self.folder / "plan.json")]
        return self.start([*argv, "--scratch", str(self.scratch(worker))], worker, **more)

    def pid(self, kind: str, worker: int) -> int | None:
        launcher = self.launchers[worker]
        if kind == "launcher":
            return launcher.pid if launcher.poll() is None else None
        if kind == "agent":
            found: int | None = self.processes.torchrun_of(launcher)
            return found
        pid: int | None = self.processes.worker_of(self.scratch(worker), worker if self.is_gang else 0)
        return None if pid is None or self.processes.gone([pid]) else pid

    def records(self, worker: int) -> list[Any]:
        from mlpipe.observe.records import read_records

        return read_records(self.store, self.plan.attempt_key, worker)


class Torchft(Side):
    """By its train_ddp.py, started as its README and its TorchX component do: a torchrun a replica, and a
    lighthouse where our coordinator stands. `ddp`: see `peers/torchft_ddp.py`."""

    def __init__(self, folder: Path, net: Net, ddp: bool, seconds: float) -> None:
        self._python = sides.python_of("torchft_ddp")
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        super().__init__(
            folder, net, {**measure.with_bytecode(), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        )
        self._work = {"seconds": seconds, "batch": BATCH // WORKERS, "ddp": ddp}
        lighthouse = [str(Path(self._python).parent / "torchft_lighthouse"), "--min_replicas", "1"]
        lighthouse += ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        self.hub = self.start(lighthouse, None)
        self.launchers = [self.launch(worker) for worker in range(WORKERS)]

    def launch(self, worker: int) -> subprocess.Popen[bytes]:
        argv = [self._python, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=1"]
        argv += [f"--master_addr={self.net.name(worker)}", f"--master_port={29600 + worker}"]
        return self.start(
            [*argv, "--max_restarts=10", "-m", "benchmarks.peers.torchft_ddp"],
            worker,
            REPLICA_GROUP_ID=str(worker),
            NUM_REPLICA_GROUPS=str(WORKERS),
            TORCHFT_LIGHTHOUSE=f"http://{self.net.name(None)}:29510",
            BENCHMARK=json.dumps({**self._work, "records": str(self._records(worker))}),
        )

    def pid(self, kind: str, worker: int) -> int | None:
        torchrun = self.launchers[worker]
        if kind != "rank":
            return torchrun.pid if torchrun.poll() is None else None
        ranks = [pid for pid in self.processes.children(torchrun.pid) if not self.processes.gone([pid])]
        return ranks[0] if ranks else None

    def records(self, worker: int) -> list[Any]:
        path = self._records(worker)
        lines = path.read_text().splitlines() if path.exists() else []
        return [SimpleNamespace(**json.loads(line)) for line in lines]

    def samples(self, record: Any) -> int:
        return int(record.participants) * BATCH // WORKERS

    def _records(self, worker: int) -> Path:
        return self.scratch(worker) / "records.jsonl"


def struck(side: Side, plan: list[Failure], minutes: float, calm: int, store: int) -> Found:
    try:
        side.until(
            "steps of all", lambda: min(len(lines) for lines in side.done().values()) > calm + 2, pause=1.0
        )
        begin = time.time()
        for failure in plan:
            side.wait(begin + failure.at)
            side.strike(failure, store)
        end = begin + minutes * 60
        side.wait(end)
        side.wait(end + _SHIPPED_SECONDS)
        found = judge(side.done(), side.struck, begin, end, calm)
        if not side.is_gang:
            found.counts["restarts of workers that were not struck"] = side.unstruck_restarts()
        return found
    finally:
        side.end()


@contextmanager
def minio(folder: Path, net: Net) -> Iterator[tuple[int, dict[str, str]]]:
    """Its process, and the environment of who uses it."""
    from kit import servers

    data = folder / "data"
    data.mkdir()
    address = f"{HUB}:9000"
    command, environment = servers.command_of("minio", servers.binary("minio"), address, data)
    with (folder / "minio.log").open("wb") as log:
        process = subprocess.Popen(
            [*net.argv(None), *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=servers.die_with_parent,
        )
    try:
        server = servers.S3Server("minio", f"http://{address}", process.pid, data)
        servers.wait_until_ready("minio", address, process)
        server.make_bucket("goodput")
        yield process.pid, server.environment()
    finally:
        process.kill()
        process.wait(_DEADLINE_SECONDS)


def _call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def rows_of(found: dict[str, Found], work: str) -> list[dict[str, Any]]:
    rows = []
    for side, one in found.items():
        goal = GOAL if side == "elastic" else None
        alone = partial(measure.alone, work, side=side)
        rows.append(alone("goodput", "ratio", [one.goodput], goal=goal, higher_is_better=True))
        rows.append(alone("step before any failure", "s", [one.step_seconds]))
        rows.append(alone("steps", "", [one.steps], higher_is_better=True))
        rows.append(alone("steps of fewer samples", "", [one.small_steps]))
        for what, count in one.counts.items():
            row = alone(what, "", [count])
            rows.append(row if goal is None else {**row, "met": count == 0, "goal": 0.0})
        for kind in KINDS:
            if seconds := one.pauses.get(kind):
                rows.append(alone(f"longest pause after {kind}", "s", seconds))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half a minute, short failures: does it run?")
    parser.add_argument("--minutes", type=float, default=30.0, help="of each side")
    parser.add_argument("--every", type=float, default=120.0, help="seconds between failures, on average")
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SIDES, help="one side; the rows of the others stay")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="nothing runs: results of other runs are added"
    )
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    for path in arguments.merge or ():
        print(f"into {measure.add('goodput', json.loads(path.read_text()), arguments.results, _BY)}")
    if arguments.merge:
        return 0
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        own = ["unshare", "--net", "--mount", "--propagation", "private"]
        os.execvp(own[0], [*own, sys.executable, "-m", "benchmarks.goodput", *sys.argv[1:]])
    sys.path.insert(0, str(ROOT / "tests"))
    minutes, every, calm = arguments.minutes, arguments.every, 20
    lasts = {"store": 20.0, "link": 15.0}
    if arguments.quick:
        minutes, every, calm, lasts = 0.5, 4.0, 3, {"store": 2.0, "link": 2.0}
    plan = failures(minutes, every, arguments.seed, lasts)
    load_before = os.getloadavg()[0]
    sample = arguments.step_seconds / 2 / (BATCH // WORKERS)  # forward, and as long backward
    work = f"{WORKERS} workers, {minutes:g} min, {len(plan)} failures"
    drawn = [[round(one.at, 1), one.kind, one.victim] for one in plan]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        net = Net(folder)
        pid, environment = stack.enter_context(minio(folder, net))
        os.environ.update(environment)
        for side in (arguments.only,) if arguments.only else SIDES:
            mine = folder / side.replace(" ", "-")
            mine.mkdir()
            if side in TORCHFT:
                one: Side = Torchft(mine, net, side == "torchft", sample)
            else:
                one = Ours(mine, net, environment, side == "elastic", arguments.save_every, sample)
            found = struck(one, plan, minutes, calm, pid)
            print(f"{side}: {found}", flush=True)
            measure.tell(
                "goodput",
                rows_of({side: found}, work),
                arguments.results,
                by=_BY,
                minutes=minutes,
                every=every,
                seed=arguments.seed,
                step_seconds=arguments.step_seconds,
                save_every=arguments.save_every,
                failures=drawn,
                load_before=load_before,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
