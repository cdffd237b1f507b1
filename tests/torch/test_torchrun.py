"""mlpipe.train.torchrun is torchrun, but its ranks are forks of a process that has imported torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kit.plans import environment, train_plan
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

from mlpipe.train import torchrun

pytestmark = pytest.mark.torch

# What a rank finds as it begins, and then an end of each kind.
RANK = """
import json, multiprocessing, os, sys
from pathlib import Path

fds = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
found = {
    "modules": [name for name in ("torch", "mlpipe.train.prepare") if name in sys.modules],
    "threads": len(os.listdir("/proc/self/task")),
    "sockets": sum(fd.startswith("socket:") for fd in fds),
    "session": os.getsid(0) == os.getpid(),
    "argv": sys.argv[1:],
    "name": Path("/proc/self/comm").read_text().strip(),
    "command": Path("/proc/self/cmdline").read_text().split("\\0")[1:5],
    "own": os.environ["MARK"],
    "start method": multiprocessing.get_start_method(allow_none=True),
    "parent": os.getppid(),
    "can use GPUs": not sys.modules["torch"].cuda._is_in_bad_fork(),
}
Path(sys.argv[1], f"{restart}-{rank}.json").write_text(json.dumps(found))
print("standard output of", rank)
print("standard error of", rank, file=sys.stderr)
if rank == 0 and restart < 4:  # the others would be ended by SIGTERM: too early, perhaps
    import time

    time.sleep(600)
if restart == 0:
    raise ValueError("raised")
if restart == 1:
    sys.exit(7)
if restart == 2:
    sys.exit("words")
if restart == 3:
    os.kill(os.getppid(), 9)  # the fork server, and so all ranks
if rank == 0:
    os._exit(0)
"""


def test_a_rank_is_a_fork_with_nothing_of_torchruns_but_its_modules(tmp_path: Path) -> None:
    (tmp_path / "a_rank.py").write_text(RANK)
    (tmp_path / "found").mkdir()
    (tmp_path / "manifest.json").touch()  # of the tokens that nobody reads
    plan = tmp_path / "plan.json"
    plan.write_text(train_plan(tmp_path, tmp_path, world_size=2).to_json())
    argv = [sys.executable, "-m", "mlpipe.train.torchrun", "--standalone", "--nproc-per-node", "2"]
    argv += ["--max-restarts", "4", "--monitor-interval", "0.1", "--redirects", "3", "--log-dir", "logs"]
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*argv, "-m", "a_rank", str(tmp_path / "found"), "--flag", "a b"],
        env={**env, "MLPIPE_PLAN": str(plan), "MARK": "mine", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "found").iterdir()}
    assert set(found) >= {"0-1", "1-1", "2-1", "3-1", "4-0", "4-1"}
    parents: dict[bool, set[int]] = {False: set(), True: set()}  # by whether the first server was killed
    for name, about in found.items():
        arguments = [str(tmp_path / "found"), "--flag", "a b"]
        parents[name[0] == "4"].add(about.pop("parent"))
        assert about == {
            "modules": ["torch", "mlpipe.train.prepare"],
            "threads": 1,
            "sockets": 0,
            "session": True,
            "argv": arguments,
            "name": f"rank {name[-1]}",
            "command": ["-u", "-m", "a_rank", arguments[0]],
            "own": "mine",
            "start method": None,
            "can use GPUs": True,
        }, name
    assert [len(found) for found in parents.values()] == [1, 1]  # one import for all of them
    errors = {
        path.parent.parent.name: path.read_text() for path in (tmp_path / "logs").glob("*/*/1/stderr.log")
    }
    assert "ValueError: raised" in errors["attempt_0"]
    assert errors["attempt_2"] == "standard error of 1\nwords\n"
    assert errors["attempt_4"] == "standard error of 1\n"
    output = next((tmp_path / "logs").glob("*/attempt_4/0/stdout.log"))
    assert output.read_text() == "standard output of 0\n"
    assert "exitcode: 1) local_rank: 1" in done.stderr.replace("failed (", "")
    assert "exitcode: 7) local_rank: 1" in done.stderr.replace("failed (", "")


def test_a_rank_that_was_buried_and_not_told_of_ends_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server waits for a rank, then writes its code: between the two torchrun signals nobody."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    handler = subprocess_handler.SubprocessHandler
    monkeypatch.setattr(subprocess_handler, "Popen", subprocess_handler.Popen)
    monkeypatch.setattr(handler, "close", handler.close)
    torchrun._fork_in(subprocess_handler)
    buried = subprocess.Popen(["true"])
    buried.wait(timeout=300)
    closed = object.__new__(handler)
    closed.proc, closed._stdout, closed._stderr = buried, None, None
    closed.close(signal.SIGTERM)


def test_what_befell_a_rendezvous_is_named_without_a_look_at_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    record = rendezvous._BackendRendezvousStateHolder._record
    holder = SimpleNamespace(_settings=SimpleNamespace(run_id="r"))
    monkeypatch.setattr(rendezvous, "construct_and_record_rdzv_event", lambda name, **_: found.append(name))
    monkeypatch.setattr(rendezvous, "get_method_name", rendezvous.get_method_name)  # which ends with the test

    def befell() -> None:
        record(cast(Any, holder), "words")

    befell()
    torchrun._name_callers()
    monkeypatch.setattr(rendezvous.inspect, "stack", None)
    befell()
    assert found == ["SimpleNamespace.befell"] * 2


def test_a_fork_server_that_has_just_been_killed_is_asked_again() -> None:
    answers = iter([EOFError("unexpected EOF"), ConnectionRefusedError(), None])

    class Process:
        def start(self) -> None:
            if (answer := next(answers)) is not None:
                raise answer

    torchrun._start(cast(Any, Process()))
    assert next(answers, "none left") == "none left"


def test_nodes_are_numbered_by_their_places_where_torchrun_would_go_by_names(monkeypatch):
    """As the one that completes a rendezvous numbers them all: each has told its description, no more."""
    monkeypatch.setattr(rendezvous._NodeDesc, "__lt__", rendezvous._NodeDesc.__lt__)
    generator = rendezvous.DynamicRendezvousHandler._node_desc_generator
    monkeypatch.setattr(generator, "_local_id", 0)
    state, told = rendezvous._RendezvousState(), {}
    for place in (2, 10, 0, 1):
        torchrun._number_nodes(place)
        told[place] = generator.generate(f"gang-0-{place}.gang")
        state.participants[told[place]] = 0
    completes = SimpleNamespace(
        _node="gang", _settings=SimpleNamespace(run_id="r"), _state=state, _record=lambda **_: None
    )
    rendezvous._DistributedRendezvousOpExecutor._mark_rendezvous_complete(completes)
    assert [state.participants[told[place]] for place in (0, 1, 2, 10)] == [0, 1, 2, 3]


def test_a_node_that_owes_its_restart_to_another_has_the_same_number_as_that_one(monkeypatch):
    """The agent whose own rank failed has a restart less to go; the one that heard of it before its rank did
    has not, and each starts ranks in the second round."""
    told = {}

    def start(self, group):
        told[self.name] = group.spec.max_restarts - self._remaining_restarts
        return {}

    monkeypatch.setattr(LocalElasticAgent, "_start_workers", start)
    torchrun._count_rounds()
    holder = SimpleNamespace(state=SimpleNamespace(round=1))
    spec = SimpleNamespace(max_restarts=3, rdzv_handler=SimpleNamespace(_state_holder=holder))
    for name, left in (("failed", 2), ("heard of it", 3)):
        agent = SimpleNamespace(name=name, _remaining_restarts=left)
        LocalElasticAgent._start_workers(agent, SimpleNamespace(spec=spec))
        assert agent._remaining_restarts == left, "what may still fail is its own"
    assert told == {"failed": 1, "heard of it": 1}
