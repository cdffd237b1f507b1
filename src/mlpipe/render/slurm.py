"""A Plan to the script that `sbatch` takes, one an attempt: a pure function, the same bytes each time.

The script holds the plan, and hands it to `mlpipe.submit.slurm.node` on every node by srun's standard input.
Signals go to it alone (`--signal=B:`, `scancel --batch`): it tells the launchers, by their pids. A signal to
the whole step reaches every rank twice, once from Slurm and once from torchrun: that means "leave at once".
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlpipe._core import environment
from mlpipe._core.errors import NON_RETRIABLE_CODES, SAVED_CODE, RenderError
from mlpipe.plan.plan import Plan
from mlpipe.plan.slurm import MIB, SlurmJob
from mlpipe.render.pod import COORDINATOR_BYTES

NODE_MODULE = "mlpipe.submit.slurm.node"
NON_RETRIABLE_BASE = 10  # a node adds it to its code: of all nodes' codes srun returns the highest
SIGNAL_SECONDS = 60  # Slurm looks at limits about once a minute, and may be late by as much
MAX_BYTES = 4 * 2**20  # slurmctld's default of max_script_size
COORDINATOR = "coordinator"  # of an elastic training; its other parts are numbers of replicas
_PREFIX = "mlpipe"
_END = "END_OF_PLAN"
_PATH = r"[A-Za-z0-9_.,@+=/-]+"  # neither blanks nor the % of patterns
_COMMENT, _NAME = "#SBATCH --comment=", "#SBATCH --job-name="
ARRAY_FIGURE = "%3a"  # in the name of a file: the task's index, as trials are numbered
_OF_THE_FIRST = ("licenses", "mail-type", "mail-user")  # of components: once for the whole job
_TASK = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"  # one task's; the array's own id is all of them


@dataclass(frozen=True)
class TaskArray:
    """Attempts of one stage of several runs, as the tasks of one job: their plans by index, of which `most`
    run at once. `owner`: the run that they belong to."""

    owner: str
    plans: Mapping[int, Plan]
    most: int

    @property
    def first(self) -> Plan:
        return self.plans[min(self.plans)]

    @property
    def name(self) -> str:
        return job_name(self.owner, self.first.stage, self.first.attempt)


def job_name(run_id: str, stage: str = "", attempt: int | None = None, part: str = "") -> str:
    """`mlpipe/RUN/STAGE/ATTEMPT`, of an elastic training with a part of it; what is left out ends it, so that
    it begins the names of all of a run."""
    name = f"{_PREFIX}/{run_id}/" + (f"{stage}/{attempt}" if stage else "")
    return f"{name}/{part}" if part else name


def parts_of(plan: Plan) -> list[str]:
    """Each has a job of its own: `COORDINATOR` and numbers of replicas; of what is not elastic "" alone."""
    replicas = plan.launch.replicas
    return [""] if replicas is None else [COORDINATOR, *map(str, range(replicas.most))]


def output_file(plan: Plan, part: str = "") -> str:
    """Where the job's own words go: beside the logs where the store is a folder, else into the folder where
    the run was asked for, as Slurm's own files do."""
    of_part = f"-{part}" if part else ""
    if "://" in plan.store_url:
        return f"slurm-{plan.run_id}-{plan.stage}-{plan.attempt}{of_part}.out"
    return f"{plan.store_url}/{plan.attempt_key}/logs/slurm{of_part}.log"


def array_script(array: TaskArray, jobs: Sequence[SlurmJob], output: str) -> str:
    """`jobs`: what each of its plans asks for, of which the largest memory and the longest save count;
    `output`: with `ARRAY_FIGURE`. Raises RenderError, also where they ask for different jobs."""
    seconds = max(plan.launch.shutdown_seconds for plan in array.plans.values())
    memory = max(job.memory_mib for job in jobs)
    heads = [
        (
            replace(plan, launch=plan.launch._replace(shutdown_seconds=seconds)),
            replace(job, memory_mib=memory),
        )
        for plan, job in zip(array.plans.values(), jobs, strict=True)
    ]
    plan, job = heads[0]
    if any(one != job or _options(other, one, "", "") != _options(plan, job, "", "") for other, one in heads):
        raise RenderError("the tasks of an array have one size, and these ask for several", where=plan.stage)
    return script(plan, job, output, array=array)


def script(plan: Plan, job: SlurmJob, output: str, part: str = "", *, array: TaskArray | None = None) -> str:
    """`output`: the file for what the job says besides its logs, as the nodes see it. `part`: of `parts_of`.
    `array`: of all of them instead of `plan`, which has their size. Raises RenderError."""
    if re.fullmatch(_PATH, output.replace(ARRAY_FIGURE, "") if array else output) is None:
        raise RenderError(
            f"{output!r} is no path that stands in a script for Slurm",
            where=plan.stage,
            hint="write a store whose path has letters, digits and any of '_.,@+=/-' alone",
        )
    if part == COORDINATOR:
        job = replace(job, cpus=1, memory_mib=COORDINATOR_BYTES // MIB, gpus=0)
    name = array.name if array else job_name(plan.run_id, plan.stage, plan.attempt, part)
    options = _options(plan, job, name, output)
    if array:
        options.append(f"array={_ranges(array.plans)}%{array.most}")
    head = [f"#SBATCH --{option}" for option in options]
    for number, other in enumerate(job.others, start=1):
        head.append("#SBATCH hetjob")
        head += [f"#SBATCH --{option}" for option in _of_component(plan, other, number, name)]
    text = "\n".join(["#!/bin/bash", *head, "", _body(plan, job, name, part, array), ""])
    if len(text.encode()) > MAX_BYTES:
        raise RenderError(
            f"the script has {len(text.encode())} bytes, Slurm takes {MAX_BYTES}",
            where=plan.stage,
            hint="shorten the arguments of the stage, or read them from a file",
        )
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text.replace("#!/bin/bash\n", f"#!/bin/bash\n{_COMMENT}{store_mark(plan.store_url)}{digest}\n", 1)


def comment(text: str) -> str:
    """Of a script: by it a job is known as the very same."""
    return text.split(_COMMENT, 1)[1].split("\n", 1)[0]


def store_mark(store_url: str) -> str:
    """What the comments of all jobs of runs in that store begin with: names do not tell it."""
    return f"{_PREFIX}:{hashlib.sha256(store_url.encode()).hexdigest()[:16]}:"


def name_of(text: str) -> str:
    """Of a script: the name of its job."""
    return text.split(_NAME, 1)[1].split("\n", 1)[0]


def _options(plan: Plan, job: SlurmJob, name: str, output: str) -> list[str]:
    nodes, spares = _nodes(plan)[0], plan.launch.num_spares
    options = [f"job-name={name}", f"nodes={nodes}", *_of_nodes(nodes, job)]
    if spares:  # as many as are free; with a number of tasks Slurm gives the fewest
        options[1:4] = [f"nodes={nodes}-{plan.launch.num_machines}"]
    if plan.kind.is_training:  # what begins anew would reach the limit anew, and queue for ever
        shutdown = plan.launch.shutdown_seconds
        ahead = math.ceil(min(shutdown + SIGNAL_SECONDS, (job.time_seconds or math.inf) / 2))
        options.append(f"signal=B:USR1@{min(ahead, 65535)}")
    options += ["requeue", "open-mode=append", f"output={output}", "export=ALL"]
    options.append("dependency=singleton")  # one that was submitted twice never runs beside itself
    return options + _own(plan, job)


def _of_component(plan: Plan, job: SlurmJob, number: int, name: str) -> list[str]:
    """Of a heterogeneous job one behind the first, whose script, signals and comment are those of all. Its
    name begins otherwise: it is no job of its own that somebody looks for."""
    nodes = _nodes(plan)[number]
    own = [one for one in _own(plan, job) if one.partition("=")[0] not in _OF_THE_FIRST]
    return [f"job-name=group-{number}/{name}", f"nodes={nodes}", *_of_nodes(nodes, job), "requeue", *own]


def _nodes(plan: Plan) -> list[int]:
    """Of each component of the job."""
    groups = plan.work.training.groups if plan.kind.is_training else ()
    return [one.num_nodes for one in groups] or [plan.launch.num_nodes]


def _of_nodes(nodes: int, job: SlurmJob) -> list[str]:
    options = [f"ntasks={nodes}", "ntasks-per-node=1"]
    options += [f"cpus-per-task={job.cpus}", f"mem={job.memory_mib}M"]
    if job.gpus:
        options.append("gres=" + ":".join(filter(None, ("gpu", job.gpu_type, str(job.gpus)))))
    for option in ("partition", "account", "qos", "reservation", "constraint"):
        if (value := getattr(job, option)) is not None:
            options.append(f"{option}={value}")
    if job.time_seconds is not None:
        options.append(f"time={math.ceil(job.time_seconds / 60)}")
    return options


def _own(plan: Plan, job: SlurmJob) -> list[str]:
    own = dict(job.options)
    if plan.launch.avoid:
        own["exclude"] = ",".join(filter(None, (own.get("exclude"), *plan.launch.avoid)))
    return [f"{option}={value}" if value else option for option, value in sorted(own.items())]


def _ranges(indices: Iterable[int]) -> str:
    """`0-2,5`."""
    spans: list[list[int]] = []
    for index in sorted(indices):
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _tasks(array: TaskArray) -> str:
    """The first one's plan whole; of each, where it differs: paths as in a JSON pointer."""
    plain = {index: json.loads(plan.to_json()) for index, plan in array.plans.items()}
    first = plain[min(plain)]
    tasks = [
        f'  "{index}": {json.dumps(dict(_differences(first, one)), ensure_ascii=False)}'
        for index, one in sorted(plain.items())
    ]
    text = f'{{"owner": {json.dumps(array.owner)}, "tasks": {{\n' + ",\n".join(tasks)
    return f'{text}\n}}, "plan": {array.first.to_json().rstrip()}\n}}'


def _differences(first: Any, other: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if first == other:
        return
    deeper = isinstance(first, dict) and isinstance(other, dict) and first.keys() == other.keys()
    if deeper and not any("/" in key for key in first):
        for key, value in other.items():
            yield from _differences(first[key], value, f"{path}/{key}")
    else:
        yield path, other


def plan_of_task(text: bytes, index: int) -> tuple[Plan, str]:
    """From what an array's script holds, with the owner of them all. Raises ValueError."""
    document = json.loads(text)
    plain = document["plan"]
    for path, value in document["tasks"][str(index)].items():
        *folders, name = path.split("/")[1:]
        at = plain
        for folder in folders:
            at = at[folder]
        at[name] = value
    return Plan.from_json(json.dumps(plain)), document["owner"]


@dataclass(frozen=True)
class _Step:
    """What runs on the nodes of a component. `group`: srun's option for it; `first`: which node of the gang
    its first one is; of a plain job both are empty."""

    job: SlurmJob
    nodes: int | str
    group: str = ""
    first: int | None = None

    @property
    def every_node(self) -> str:
        return f"{self.group}--nodes={self.nodes} --ntasks={self.nodes} --ntasks-per-node=1"

    @property
    def tell(self) -> str:
        number = "$SLURM_NODEID" if self.first is None else f"$(({self.first} + SLURM_NODEID))"
        return f"""\
  srun --overlap {self.every_node} --mem=0 --gres=none sh -c \\
    'at=$0-{number} n=60  # in /tmp another user might have made it, with a pid of our own
    # file systems that map owners show another one, and the process says whose it is
    job() {{ tr "\\0" "\\n" <"/proc/$1/environ" | grep -qx "SLURM_JOB_ID=$SLURM_JOB_ID"; }}
    ours() {{
      pid=$(cat "$at/pid") && [ "$pid" ] && [ ! -L "$at" ] && {{ [ -O "$at" ] || job "$pid"; }}
    }} 2>/dev/null
    until ours || [ $((n -= 1)) = 0 ]; do sleep 1; done
    ours && kill -TERM "$pid"' "$scratch"\n"""

    def start(self, command: str, together: int) -> str:
        """But for its standard input."""
        options = f"--cpus-per-task={self.job.cpus} --kill-on-bad-exit={together}"
        if self.group:  # else each asks for what the batch script's component has (SLURM_MEM_PER_NODE)
            options += f" --mem={self.job.memory_mib}M"
        return f"srun {self.every_node} {options} {command}"


def _steps(plan: Plan, job: SlurmJob) -> list[_Step]:
    if not job.others:
        every = "$SLURM_JOB_NUM_NODES" if plan.launch.num_spares else plan.launch.num_nodes
        return [_Step(job, every)]
    nodes = _nodes(plan)
    return [
        _Step(one, nodes[number], f"--het-group={number} ", sum(nodes[:number]))
        for number, one in enumerate((job, *job.others))
    ]


def _started(steps: Sequence[_Step], command: str, together: int, document: str) -> str:
    """In the background, all with the same standard input; `step`: the process of each."""
    text = f"<<'{_END}'"
    if len(steps) == 1:
        begun = f"{steps[0].start(command, together)} {text} &\n{document}\n{_END}\nstep=$!"
        return f"{begun} early=$asked"
    lines = [f"plan() {{ cat {text}", document, _END, "}", "begun="]
    for step in steps:
        # a component's steps know neither of the others nor how many nodes these have
        lines.append(f"plan | {environment.FIRST_NODE}={step.first} {step.start(command, together)} &")
        lines.append('begun="$begun $!"')
    return "\n".join([*lines, "step=$begun early=$asked"])


_WAIT = """\
until wait "$step"; code=$?; [ "$code" -le 128 ] || ! kill -0 "$step" 2>/dev/null; do :; done"""
_WAIT_FOR_ALL = """\
code=0
for one in $step; do  # the highest code, as srun has it of its nodes
  until wait "$one"; last=$?; [ "$last" -le 128 ] || ! kill -0 "$one" 2>/dev/null; do :; done
  [ "$last" -le "$code" ] || code=$last
done"""


def _body(plan: Plan, job: SlurmJob, name: str, part: str, array: TaskArray | None) -> str:
    # of two clusters jobs of one number may meet on a machine, or in a folder of both
    attempt = hashlib.sha256(f"{plan.store_url} {name}".encode()).hexdigest()[:12]
    nodes, steps = plan.launch.num_nodes, _steps(plan, job)
    scratch = '"${TMPDIR:-/tmp}"' if job.scratch is None else shlex.quote(job.scratch)
    codes = "|".join(str(NON_RETRIABLE_BASE + code) for code in NON_RETRIABLE_CODES)
    modules = "".join(f"module load -- {shlex.quote(name)} || exit 4\n" for name in job.modules)
    # torchrun ends with its peers; other programs would wait for a node that is gone
    together = int(plan.kind.runs == "command" and nodes > 1)
    # a coordinator would wait for the ranks; the next start of it knows as much, by them
    own = _TASK if array else "$SLURM_JOB_ID"
    near = "scontrol requeue $SLURM_JOB_ID" if part == COORDINATOR else "ask requeue"
    # in a gang of commands it may be srun that stopped a node, for one that failed
    preempted = f"  {SAVED_CODE}:)  # whoever else stops a rank does not so without end\n"
    preempted += f"    scontrol show job \"{own}\" | grep -q 'PreemptTime=[0-9]' && asked=requeue ;;\n"
    preempted = preempted if job.max_requeues and not together else ""
    document = (_tasks(array) if array else plan.to_json()).rstrip()
    begin = _started(steps, _command(job, part, array), together, document)
    tell = "".join(step.tell for step in steps)
    wait = _WAIT if len(steps) == 1 else _WAIT_FOR_ALL
    return f"""\
# Written by mlpipe: change the pipeline file, not this one.
scratch={scratch}/{_PREFIX}-$SLURM_JOB_ID-{attempt}
asked= step=
tell() {{  # the launchers of all nodes tell their ranks to save and stop
{tell}}}
ask() {{  # told once, whatever comes meanwhile; what was cancelled is not queued again
  local before=$asked
  [ "$before" = cancel ] || asked=$1
  [ -n "$before" ] || [ -z "$step" ] || tell
}}
trap '{near}' USR1  # the time limit is near
trap 'ask cancel' USR2  # mlpipe cancel
trap 'asked=${{asked:-cancel}}' TERM  # scancel: the ranks have heard it themselves
{modules}export {environment.RENDEZVOUS}="$SLURMD_NODENAME:$((10000 + SLURM_JOB_ID % 20000))"
{begin}
[ -z "$early" ] || tell  # whoever asked before there were launchers
{wait}
case "$code:$asked" in
  0:*) exit 0 ;;
  {codes.replace("|", ":*|")}:*) exit $((code - {NON_RETRIABLE_BASE})) ;;  # it would come again
  *:cancel) exit {SAVED_CODE} ;;
{preempted}esac
if [ "$asked" = requeue ] || [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_requeues} ]; then
  scontrol requeue "{own}" && sleep 60
fi
exit "$code"\
"""


def _command(job: SlurmJob, part: str, array: TaskArray | None) -> str:
    command = shlex.join([job.python, "-P", "-m", NODE_MODULE]) + ' --scratch "$scratch"'
    command += f" --part {part}" if part else ""
    command += ' --task "$SLURM_ARRAY_TASK_ID"' if array else ""
    container = job.container
    if container is None:
        return command
    mounts = ",".join(f"{folder}:{folder}" for folder in container.mounts)
    scratch = '"${scratch%/*}:${scratch%/*}"'
    if container.runtime == "pyxis":
        also = f"{scratch}{',' + shlex.quote(mounts) if mounts else ''}"
        image = shlex.quote(container.image)
        return f"--container-image={image} --container-mounts={also} {command}"
    binds = f"--bind {scratch}" + (f" --bind {shlex.quote(mounts)}" if mounts else "")
    nv = " --nv" if job.gpus else ""
    return f"apptainer exec{nv} {binds} {shlex.quote(container.image)} {command}"
