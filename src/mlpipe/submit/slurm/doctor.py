"""What is missing to run on a Slurm cluster, each thing with its remedy; asked as whoever calls."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator

from mlpipe.submit.slurm import client
from mlpipe.submit.submission import Finding, attempt

_COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
_SHOWN = 8


def examine(store: Iterable[Finding]) -> Iterator[Finding]:
    """Up to the first thing without which nothing else can be told."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        yield Finding(
            "commands",
            "fail",
            f"there is no {', '.join(missing)} in PATH",
            "run mlpipe on a login node, or install Slurm's client (Debian: slurm-client)",
        )
        return
    version = attempt("commands", lambda: client.run(["sbatch", "--version"]))
    if isinstance(version, Finding):
        yield version
        return
    yield Finding("commands", "ok", version.strip())
    ping = attempt("controller", lambda: client.run(["scontrol", "ping"]))
    if isinstance(ping, Finding):
        yield ping
        return
    if " is UP" not in ping:
        yield Finding("controller", "fail", ping.strip(), "ask the cluster's administrators")
        return
    yield Finding("controller", "ok", ping.strip())
    yield _partitions()
    if (preemption := _preemption()) is not None:
        yield preemption
    yield _jobs()
    overriding = sorted(name for name in os.environ if name.startswith("SBATCH_"))
    if overriding:
        yield Finding(
            "environment",
            "warn",
            f"{', '.join(overriding)} would change jobs behind the script's back, so mlpipe leaves them out",
            "write them in the pipeline file: slurm.account, slurm.partition, ...",
        )
    yield from store


def _partitions() -> Finding:
    text = attempt("partitions", lambda: client.run(["sinfo", "--noheader", "--format=%P|%a|%l|%D|%G"]))
    if isinstance(text, Finding):
        return text
    lines = [line.split("|") for line in text.splitlines() if line.count("|") == 4]
    up = [
        f"{name} ({nodes} nodes, {gres}, {limit})"
        for name, state, limit, nodes, gres in lines
        if state == "up"
    ]
    if not up:
        return Finding("partitions", "fail", "no partition takes jobs", "see sinfo")
    more = f" and {len(up) - _SHOWN} more" if len(up) > _SHOWN else ""
    return Finding("partitions", "ok", ", ".join(up[:_SHOWN]) + more)


def _preemption() -> Finding | None:
    """Whether a training can save before a job of a higher priority takes its nodes; None: none does."""
    asked = (["show", "config"], ["--oneliner", "show", "partition"])
    told = attempt("preemption", lambda: [client.run(["scontrol", *words]) for words in asked])
    if isinstance(told, Finding):
        return told
    config = dict(re.findall(r"^(\w+) *= (.*)$", told[0], re.MULTILINE))
    if not re.search("REQUEUE|CANCEL", config.get("PreemptMode", "")):
        return None
    if "qos" in config.get("PreemptType", ""):  # by whose time of grace a job is preempted then
        return Finding(
            "preemption",
            "warn",
            "jobs are preempted by QOS, whose time of grace is not looked at here",
            "sacctmgr show qos format=name,gracetime,preemptmode",
        )
    partitions = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in told[1].splitlines()]
    hasty = [
        one["PartitionName"] for one in partitions if one["GraceTime"] == "0" and one["PreemptMode"] != "OFF"
    ]
    if "preempt_send_user_signal" not in config.get("SlurmctldParameters", ""):
        where, lacks = "", "SlurmctldParameters=preempt_send_user_signal, and a GraceTime of the partitions"
    elif hasty:
        where, lacks = f" in {', '.join(hasty[:_SHOWN])}", "a GraceTime of these partitions"
    else:
        return Finding("preemption", "ok", "a training saves before a job of a higher priority has its nodes")
    words = f"a training that is preempted{where} loses what it did since its last checkpoint"
    return Finding("preemption", "warn", words, f"ask the cluster's administrators for {lacks}")


def _jobs() -> Finding:
    jobs = attempt("jobs", lambda: client.jobs(""))
    if isinstance(jobs, Finding):
        return jobs
    alive = [job for job in jobs if not job.has_ended]
    return Finding("jobs", "ok", f"you have {len(alive)} under way")
