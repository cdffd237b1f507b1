"""Environment variables by which the processes of mlpipe tell each other something: one constant each, and
who sets and who reads it. What they mean to users stands in docs/reference/environment.md.

Those that others define (torchrun's, AWS's, Jenkins') have the names that everybody knows, and no constant.
"""

from collections.abc import Mapping

# By people, and by the steps of a Jenkinsfile; read by every command.
STORE = "MLPIPE_STORE"
CACHE = "MLPIPE_CACHE"  # set in every pod, too
CALIBRATE = "MLPIPE_CALIBRATE"  # off: this machine is not measured unasked, nor are its figures used
STORE_DEADLINE_SECONDS = "MLPIPE_STORE_DEADLINE_SECONDS"
NETWORKS = "MLPIPE_NETWORKS"  # the file of the user's own profiles; read by spec/network.py
MAX_USD = "MLPIPE_MAX_USD"  # of a run on rented machines; read by its driver

# By people, for the machines that are rented in their name; read by submit/rented/keys.py.
WORKER_ACCESS_KEY_ID = "MLPIPE_WORKER_AWS_ACCESS_KEY_ID"
WORKER_SECRET_ACCESS_KEY = "MLPIPE_WORKER_AWS_SECRET_ACCESS_KEY"
WORKER_SESSION_TOKEN = "MLPIPE_WORKER_AWS_SESSION_TOKEN"
WORKER_ROLE_ARN = "MLPIPE_WORKER_AWS_ROLE_ARN"

# Set by `mlpipe run --debug-rank`, for all that it starts: the rank, its terminal and our pid, like
# 0:/dev/pts/3:4711.
DEBUG_RANK = "MLPIPE_DEBUG_RANK"  # read by train/debugger.py

# Set by submit/sweeps/slots.py for all that it starts: bytes of this machine that a trial may plan with.
MEMORY = "MLPIPE_MEMORY_BYTES"  # read by plan/hardware.py

# Set by a backend for each process of a stage (submit/here.py, render/pod.py).
RUN_ID = "MLPIPE_RUN_ID"  # read by store/s3_identity.py and submit/process.py
STAGE = "MLPIPE_STAGE"  # read by submit/process.py
OUTPUT = "MLPIPE_OUTPUT"  # read by the user's command
NUM_NODES = "MLPIPE_NUM_NODES"  # of a command on several nodes; read by the user's command
NODE_RANK = "MLPIPE_NODE_RANK"  # of a command on several nodes; also read by submit/process.py
DRIVER = "MLPIPE_DRIVER"  # of the backend local; read by submit/process.py

# Set by train/launcher.py for the workers of its node; read by train/worker.py and train/preload.py.
PLAN = "MLPIPE_PLAN"
SCRATCH = "MLPIPE_SCRATCH"
FIRST_RESTART = "MLPIPE_FIRST_RESTART"

# Of an elastic training, set by train/supervisor.py for the launcher of each replica; on a cluster
# render/kubernetes.py sets REPLICA alone.
COORDINATOR = "MLPIPE_COORDINATOR"  # token@host:port; read by train/replicas/replicas.py
REPLICA = "MLPIPE_REPLICA"  # its number; read by train/launcher.py and train/session.py
SUPERVISOR = "MLPIPE_SUPERVISOR"  # its pid; read by train/launcher.py

# Set by submit/rented/order.py for a machine: what it is to do, as JSON.
RENTAL = "MLPIPE_RENTAL"  # read by submit/rented/machine.py

# Set by render/pod.py for a stage.
RENDEZVOUS = "MLPIPE_RENDEZVOUS"  # read by train/launcher.py
GANG_RESTART = "MLPIPE_GANG_RESTART"  # read by train/launcher.py
FIRST_NODE = "MLPIPE_FIRST_NODE"  # of a group of machines: its number in the gang; read by plan/gang_node.py
NUM_MACHINES = "MLPIPE_NUM_MACHINES"  # with spares: that came; read by train/preflight
METRICS_ADDRESS = "MLPIPE_METRICS_ADDRESS"  # read by train/session.py
METRICS_PORT = "MLPIPE_METRICS_PORT"  # read by train/session.py
NODE_NAME = "MLPIPE_NODE_NAME"  # read by the user's code

# Set by render/pod.py for a driver, whose lease says them (store/leases.py); POD_NAME also for a stage.
POD_NAME = "MLPIPE_POD_NAME"
POD_UID = "MLPIPE_POD_UID"


def is_on(switch: str) -> bool | None:
    """What CALIBRATE says, which is on unless it is set; None: neither on nor off."""
    words = {"on": True, "1": True, "yes": True, "true": True, "": True}
    return (words | {"off": False, "0": False, "no": False, "false": False}).get(switch.lower())


def is_ours(name: str) -> bool:
    return name.startswith("MLPIPE_")


def same_at_start(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether a process that has begun in one of these environments may go on in the other: what OpenMP, the
    allocator, the loader, Python and libraries read once is the same."""
    return _read_at_start(one) == _read_at_start(other)


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """All but what is read where it is used: ours, and some that launchers set."""
    later = {"CUDA_VISIBLE_DEVICES", "JOB_COMPLETION_INDEX"}
    later |= {"PYTHONUNBUFFERED", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    return {name: env[name] for name in env.keys() - later if not is_ours(name)}
