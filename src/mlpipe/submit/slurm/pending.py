"""Why a job waits, in words: squeue's reasons (squeue(1), slurm.h of 22.05 to 25.05) with their remedies."""

from __future__ import annotations

import re

# The first that fits, of a reason; what nobody foresaw is told as Slurm says it.
_REASONS = {
    r"None": "it is new, or about to start",
    r"Priority": "jobs of a higher priority are before it: wait, or ask for less",
    r"Resources": "not enough nodes, cores, memory or GPUs are free: wait, or ask for less",
    r"Dependency(NeverSatisfied)?": "a job of the same name has not ended: see squeue --me",
    r"JobArrayTaskLimit": "as many of its sweep run as may at a time: see sweep.max_parallel",
    r"BeginTime": "it was queued again and may not begin yet",
    r"JobHeldUser": "it is held: scontrol release it",
    r"JobHeldAdmin": "it is held by an administrator, or since its start failed: see scontrol show job",
    r"(job )?(launch failed )?requeued (in )?held( state)?": "its start failed on a node and it is held: see "
    "scontrol show job",
    r"JobHoldMaxRequeue": "it was requeued too often and is held: look at its nodes",
    r"PartitionDown|PartitionInactive": "it takes no jobs now: see sinfo, or change slurm.partition",
    r"PartitionConfig|PartitionNodeLimit": "the partition has, or allows, fewer nodes or less time: lower "
    "resources.nodes or slurm.time, or change slurm.partition",
    r"PartitionTimeLimit": "the partition allows less time: lower slurm.time, or change slurm.partition",
    r"ReqNodeNotAvail": "nodes that it needs are down, drained or reserved: see sinfo -R",
    r"NodeDown": "a node that it needs is down: see sinfo -R",
    r"BadConstraints": "no node can satisfy it: look at slurm.constraint and resources",
    r"(Invalid)?Reservation(Deleted)?": "its reservation is not there or has not begun: see scontrol show "
    "reservation",
    r"Licenses": "it waits for licences: see scontrol show lic",
    r"(Invalid)?Account(NotAllowed)?": "the account is not valid there: look at slurm.account",
    r"InvalidQOS|QOS(NotAllowed|Required)": "it is not valid there: look at slurm.qos",
    r"Prolog": "its nodes are being prepared",
    r"FrontEndDown|SystemFailure": "Slurm itself has failed: ask its administrators",
    r"(QOS|Assoc)\w*(GRES|GPU)\w*": "your account or QOS has as many GPUs as it may: wait, or ask for fewer",
    r"(QOS|Assoc)\w*CPU\w*": "your account or QOS has as many cores as it may: wait, or ask for fewer",
    r"(QOS|Assoc)\w*Mem\w*": "your account or QOS has as much memory as it may: wait, or ask for less",
    r"(QOS|Assoc)\w*Node\w*": "your account or QOS has as many nodes as it may: wait, or ask for fewer",
    r"(QOS|Assoc)\w*(Wall|Time|Minutes|RunMin\w*)\w*": "the time of your account or QOS is used up, or the "
    "job asks for more than it may: lower slurm.time",
    r"(QOS|Assoc)\w*(Job|Submit)\w*|MaxJobs\w*": "your account or QOS has as many jobs as it may: wait",
    r"(QOS|Assoc)\w*Limit": "a limit of your account or QOS is reached: see sacctmgr show qos, assoc",
}
# In other states than PENDING.
_STATES = {
    "CONFIGURING": "its nodes are being started",
    "REQUEUED": "it is queued again",
    "REQUEUE_HOLD": "it is held: scontrol release it",
    "SPECIAL_EXIT": "it is held: scontrol release it",
    "SUSPENDED": "it is suspended, for a job of a higher priority or by hand: scontrol resume it",
    "STOPPED": "it is stopped by a signal",
}
# What sbatch says when it refuses.
_REFUSALS = {
    r"invalid account": "look at slurm.account: sacctmgr show assoc user=$USER",
    r"invalid partition|partition.*not available": "look at slurm.partition: sinfo -s",
    r"invalid qos": "look at slurm.qos: sacctmgr show qos",
    r"invalid feature": "look at slurm.constraint: sinfo -o '%N %f'",
    r"invalid generic resource|gres": "look at slurm.gpu_type and resources.gpus_per_node: sinfo -o '%N %G'",
    r"time limit": "lower slurm.time, or use another slurm.partition: sinfo -o '%P %l'",
    r"node count": "lower resources.nodes, or use another slurm.partition: sinfo -s",
    r"requested node configuration|cpu count|memory specification": "no node of the partition has that: look "
    "at resources and slurm.partition: sinfo -N -o '%N %c %m %G'",
    r"reservation": "look at slurm.reservation: scontrol show reservation",
    r"qos.*limit|assoc.*limit|accounting/qos policy": "your account or QOS allows less: see sacctmgr "
    "show qos, assoc",
    r"unrecognized option|invalid .*specification": "look at slurm.options: man sbatch",
    r"configuration source|fetch_config|slurm\.conf": "this machine knows no cluster: use a login "
    "node, or set SLURM_CONF",
    r"access/permission denied": "look at slurm.partition and slurm.account: who may use them?",
}


def why_waiting(job_id: str, state: str, reason: str) -> str:
    """Of a job under way; "" when it runs."""
    words = _words(reason) if state == "PENDING" else _STATES.get(state)
    return f"Slurm job {job_id} waits: {words}" if words else ""


def _words(reason: str) -> str:
    """`reason`: squeue's."""
    name = reason.strip("()").partition(",")[0]
    for pattern, words in _REASONS.items():
        if re.fullmatch(pattern, name, re.IGNORECASE):
            return words if name == "None" else f"{words} ({name})"
    return reason or "no reason given"


def remedy(words: str) -> str | None:
    """Of what a command complained of; None where nobody foresaw it."""
    return next((remedy for pattern, remedy in _REFUSALS.items() if re.search(pattern, words, re.I)), None)
