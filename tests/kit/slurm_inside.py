"""The inside of `tests/kit/slurm.py`: run by `unshare --net --mount --uts --pid`, it makes a network of nodes
with names, starts munged, slurmctld and a slurmd in each node's own network, says "up", and stays until its
stdin ends.

Every node has a host name and an address of its own: Slurm compares names, and torchrun must find node 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

_DEADLINE_SECONDS = 120.0
_CONF = """\
ClusterName=kit
SlurmctldHost=login
AuthInfo=socket={munge}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0,requeue_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait={kill_wait}
MinJobAge=300
InactiveLimit=0
GresTypes=gpu
NodeName={nodes} CPUs={cpus} RealMemory=16000 Gres=gpu:h100:{gpus} State=UNKNOWN
PartitionName=batch Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
PartitionName=short Nodes={nodes} MaxTime=5 State=UP PriorityTier=1
"""


def main(folder: Path, num_nodes: int) -> None:
    """Returns when stdin ends; what was started dies with the pid namespace. A line there is the name of a
    node that was killed, and is started again."""
    names = [f"n{i}" for i in range(1, num_nodes + 1)]
    _network(folder, names)
    gpus = folder / "gpus"
    gpus.mkdir()
    for number in range(2):
        os.mknod(gpus / f"nvidia{number}", 0o20666, os.makedev(1, 3))
    nodes, munge = f"n[1-{num_nodes}]", folder / "munge" / "socket"
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(
        _CONF.format(folder=folder, munge=munge, nodes=nodes, cpus=8, gpus=2, kill_wait=30, grace=60)
    )
    (folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={gpus}/nvidia[0-1]\n")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    _munged(folder / "munge")
    log = (folder / "out.log").open("ab")
    subprocess.Popen(["slurmctld", "-D", "-c"], stdout=log, stderr=log)
    for number, name in enumerate(names, start=1):
        start_node(folder, name, number)
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while _idle() < num_nodes:
        if time.monotonic() > deadline:
            sys.exit(f"nodes are not idle after {_DEADLINE_SECONDS:.0f} s: {_sinfo()}")
        time.sleep(0.05)
    print("up", flush=True)
    for line in sys.stdin:
        name = line.strip()
        start_node(folder, name, names.index(name) + 1)


def _network(folder: Path, names: list[str]) -> None:
    hosts = ["127.0.0.1 localhost", "10.77.0.254 login"]
    hosts += [f"10.77.0.{number} {name}" for number, name in enumerate(names, start=1)]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    _run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    _run("hostname", "login")
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "br0", "type", "bridge")
    _run("ip", "addr", "add", "10.77.0.254/24", "dev", "br0")
    _run("ip", "link", "set", "br0", "up")


def start_node(folder: Path, name: str, number: int) -> None:
    """A slurmd in a network and with a host name of its own; waits on stdin until it has its cable."""
    inside = (
        f"hostname {name} && read _ && ip link set lo up && ip link set e{number} name eth0 && "
        f"ip addr add 10.77.0.{number}/24 dev eth0 && ip link set eth0 up && exec slurmd -D -N {name}"
    )
    log = (folder / "out.log").open("ab")
    node = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-ec", inside], stdin=subprocess.PIPE, stdout=log, stderr=log
    )
    own = os.stat("/proc/self/ns/net").st_ino
    while os.stat(f"/proc/{node.pid}/ns/net").st_ino == own:
        time.sleep(0.01)
    (folder / f"{name}.uts").write_text(os.readlink(f"/proc/{node.pid}/ns/uts"))
    _run("ip", "link", "add", f"v{number}", "type", "veth", "peer", "name", f"e{number}")
    _run("ip", "link", "set", f"e{number}", "netns", str(node.pid))
    _run("ip", "link", "set", f"v{number}", "master", "br0", "up")
    assert node.stdin is not None
    node.stdin.write(b"\n")
    node.stdin.close()


def _munged(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
    _run("munged", "--force", f"--socket={folder / 'socket'}", *files)


def _idle() -> int:
    return sum(line == "idle" for line in _sinfo().split())


def _sinfo() -> str:
    done = subprocess.run(["sinfo", "-h", "-N", "-p", "batch", "-o", "%T"], capture_output=True, text=True)
    return done.stdout + done.stderr


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
