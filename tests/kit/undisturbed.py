"""A run that nothing befell, on this machine, and what must equal it: losses, weights, rank processes."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from kit import processes
from kit.command_runs import Cli, until
from kit.place import STEPS, Place

from mlpipe._core.records import Step
from mlpipe.observe.records import read_records
from mlpipe.store import catalogue
from mlpipe.store.base import Store
from mlpipe.store.folder import FolderStore

STAGE = "stages/train"
WORKER = "mlpipe.train.worker"
TORCHRUN = "mlpipe.train.torchrun"  # whose command line a rank has until it has its own
# torchrun's own variables, and what tells one machine from another
OWN: tuple[str, ...] = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ROLE_NAME",
)
OWN += ("LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_", "TORCH_", "HOSTNAME")
OWN += ("HOME", "USER", "PATH", "LANG", "PWD", "SHLVL", "_", "KUBERNETES_", "AWS_", "JOB_COMPLETION_")
OWN += ("SLURM", "SRUN_", "ENVIRONMENT", "XDG_")
PLACES = ("MLPIPE_PLAN", "MLPIPE_SCRATCH", "MLPIPE_CACHE")  # the same names, other folders
LOCAL_ONLY = ("MLPIPE_DRIVER",)
GANG_ONLY: tuple[str, ...] = (
    "MLPIPE_POD_NAME",
    "MLPIPE_NODE_NAME",
    "MLPIPE_RENDEZVOUS",
    "MLPIPE_GANG_RESTART",
)
GANG_ONLY += ("MLPIPE_METRICS_ADDRESS", "MLPIPE_METRICS_PORT")
Processes = dict[int, tuple[list[str], dict[str, str]]]  # by rank: argv, environment


class Hold:
    """A model that takes seconds a step until it is released: a fault during its training meets it there."""

    def __init__(self) -> None:
        # in a folder that pods see: the virtual environment is mounted into them
        self.path = Path(sys.prefix) / f"hold-{secrets.token_hex(4)}"
        args = {"seconds": 1.5, "while_file": str(self.path)}
        self.model = {"entry": "kit.models:held", "args": args}

    def __enter__(self) -> Hold:
        self.path.touch()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self.path.unlink(missing_ok=True)


class Undisturbed:
    """The run itself: of one machine with as many ranks as the pods of `spec` have."""

    def __init__(self, folder: Path, spec: Path) -> None:
        self.spec = spec
        cli = Cli(folder)
        cli.env["PATH"] = os.environ["PATH"]
        same = [f"--set=stages.train.resources.{what}" for what in ("workers_per_node=2", "nodes=1")]
        run_id = f"undisturbed-{secrets.token_hex(4)}"  # another test process may have one, too
        process = cli.start("run", str(spec), "--run-id", run_id, *same)
        self.workers = workers_of(run_id, 2)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err + out
        store = FolderStore(cli.store)
        self.losses, self.digest = losses(store, run_id), last_digest(store, run_id)
        assert sorted(self.losses) == list(range(1, STEPS + 1))

    def check(self, place: Place, run_id: str, *, records_lost: bool = False) -> None:
        """The run on the cluster has the same weights and losses; `records_lost`: with a node, those that had
        not been shipped."""
        with place.cluster.inside():
            store = place.store()
            found = losses(store, run_id)
            assert found.items() <= self.losses.items() if records_lost else found == self.losses
            assert last_digest(store, run_id) == self.digest


def losses(store: Store, run_id: str) -> dict[int, float]:
    """By step, over all attempts."""
    found: dict[int, float] = {}
    attempt = 1
    while records := read_records(store, f"runs/{run_id}/{STAGE}/attempt-{attempt}", 0):
        found |= {r.step: r.loss for r in records if isinstance(r, Step) and r.loss is not None}
        attempt += 1
    return found


def last_digest(store: Store, run_id: str) -> str:
    last = catalogue.latest(store, f"runs/{run_id}/{STAGE}")
    assert last is not None
    assert last.step == STEPS
    return processes.digest_of(store, last.key)


def check_processes(here: Processes, there: Processes) -> None:
    """Rank processes of one machine and of a gang are the same, but for what tells places apart and for what
    they inherit from whoever runs the tests."""
    for rank, (argv, env) in here.items():
        assert there[rank][0] == argv
        ours, theirs = (
            {
                name: value
                for name, value in found.items()
                if not name.startswith(OWN) and name not in (*PLACES, "MLPIPE_RUN_ID", "MLPIPE_STORE")
            }
            for found in (env, there[rank][1])
        )
        ours = {name: value for name, value in ours.items() if name not in os.environ or name in theirs}
        ours = {name: value for name, value in ours.items() if name not in LOCAL_ONLY}
        theirs = {name: value for name, value in theirs.items() if name not in GANG_ONLY}
        different = {name for name, _ in ours.items() ^ theirs.items()}
        assert not different, sorted(different)


def workers_of(run_id: str, count: int) -> Processes:
    """argv and environment by rank, of the rank processes of a run on this machine, in a pod or not."""

    def seen() -> Processes:
        found = {rank: (argv, env) for _, rank, argv, env in ranks(run_id)}
        return found if len(found) == count else {}

    return until(seen, f"{count} workers of {run_id}")


def ranks(run_id: str) -> list[tuple[int, int, list[str], dict[str, str]]]:
    """pid, rank, argv and environment (less torchrun's own variables) of each that is alive here, in
    whichever cluster: no other test has a run of that name (`kit/run_ids.py`)."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "comm").read_text().strip()
            if not name.startswith("rank "):  # of a thousand processes the most, again and again
                continue
            argv = (path / "cmdline").read_text().rstrip("\0").split("\0")
            lines = (path / "environ").read_text().split("\0")
            leads = os.getsid(int(path.name)) == int(path.name)  # what a rank forks has its name and words
        except OSError:
            continue
        env = dict(line.split("=", 1) for line in lines if "=" in line)
        ours = leads and argv[0] == sys.executable  # not of another checkout whose tests run here, too
        is_rank = ours and WORKER in argv and TORCHRUN not in argv
        if is_rank and env.get("MLPIPE_RUN_ID") == run_id:
            found.append((int(path.name), int(name.removeprefix("rank ")), argv, env))
    return found
