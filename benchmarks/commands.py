"""`python -m benchmarks.commands`: `mlpipe --help`, validate, plan and render against other tools' commands.

The work is a training on 2 nodes of 8 GPUs (pipelines/llm.yaml, whose other three stages mlpipe does as
well). What another tool does nearest to it, without a server:

help      the `--help` of TorchX, Accelerate, dstack and SkyPilot (the Kubeflow SDK has no command line)
validate  SkyPilot: `Task.from_yaml(...).validate()`; dstack: `parse_run_configuration`, what its `apply`
          calls first; TorchX: `torchx run --dryrun` for its local scheduler
plan      TorchX, the same: nobody predicts memory or time, so this is only what a definition costs
render    TorchX: `torchx run --dryrun --scheduler kubernetes`; Kubeflow SDK: the TrainJob that `train`
          would send

Each is a process of its own, started from the shell's point of view; SkyPilot gets no GPU in its file, since
it would ask the network for its catalogue. Needs `make bench-tools`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import measure
from benchmarks.transfer import environment_of, versions

ROOT = Path(__file__).parents[1]
HELP_SECONDS = 0.1
SPEC = str(ROOT / "pipelines" / "llm.yaml")
_TORCHX = (
    "run --dryrun --workspace= -s {} dist.ddp -j 2x8 --gpu 8 --cpu 96 --memMB 1048576 "
    "--image registry.example.com/team/mlpipe:1.0 --script train.py"
)
_SKY_FILE = "name: train\nnum_nodes: 2\nresources: {cpus: 96+}\nrun: torchrun --nproc-per-node 8 train.py\n"
_SKY = "import sky\nsky.Task.from_yaml('sky.yaml').validate()"
_DSTACK_FILE = """type: task
name: train
nodes: 2
image: registry.example.com/team/mlpipe:1.0
commands: [torchrun --nproc-per-node 8 train.py]
resources: {gpu: "H100:8", cpu: 96.., memory: 1024GB..}
"""
_DSTACK = """import yaml
from dstack._internal.core.models.configurations import parse_run_configuration
parse_run_configuration(yaml.safe_load(open("dstack.yaml")))
"""
# `KubernetesBackend.train` up to its request, with a runtime that it would have asked the cluster for
_KUBEFLOW = """import yaml
from kubeflow.trainer.backends.kubernetes import utils
from kubeflow.trainer.constants import constants
from kubeflow.trainer.types import types
from kubeflow_trainer_api import models
kind = types.RuntimeKind.CLUSTER_TRAINING_RUNTIME
torch = types.RuntimeTrainer(types.TrainerType.CUSTOM_TRAINER, "torch", "image")
runtime = types.Runtime("torch", torch, kind)
trainer = types.CustomTrainerContainer(
    image="registry.example.com/team/mlpipe:1.0", num_nodes=2,
    resources_per_node={"gpu": 8, "cpu": 96, "memory": "1024Gi"},
)
job = models.TrainerV1alpha1TrainJob(
    apiVersion=constants.API_VERSION, kind=constants.TRAINJOB_KIND,
    metadata=models.IoK8sApimachineryPkgApisMetaV1ObjectMeta(name="train"),
    spec=models.TrainerV1alpha1TrainJobSpec(
        runtimeRef=models.TrainerV1alpha1RuntimeRef(name="torch", kind=kind.value),
        trainer=utils.get_trainer_cr_from_custom_trainer(runtime, trainer),
    ),
)
print(yaml.safe_dump(job.to_dict()))
"""


def works() -> dict[str, dict[str, list[str]]]:
    """By work, then side: the command."""

    def tool(name: str, program: str, *arguments: str) -> list[str]:
        return [str(environment_of(name) / "bin" / program), *arguments]

    mlpipe = str(Path(sys.executable).with_name("mlpipe"))
    local = tool("torchx", "torchx", *_TORCHX.format("local_cwd").split())
    kubernetes = _TORCHX.format("kubernetes -cfg queue=default,namespace=ml").split()
    return {
        "--help": {
            "mlpipe": [mlpipe, "--help"],
            "TorchX": tool("torchx", "torchx", "--help"),
            "Accelerate": tool("accelerate", "accelerate", "--help"),
            "dstack": tool("dstack", "dstack", "--help"),
            "SkyPilot": tool("skypilot", "sky", "--help"),
        },
        "validate": {
            "mlpipe": [mlpipe, "validate", SPEC],
            "TorchX": local,
            "dstack": tool("dstack", "python", "-c", _DSTACK),
            "SkyPilot": tool("skypilot", "python", "-c", _SKY),
        },
        "plan": {"mlpipe": [mlpipe, "plan", SPEC], "TorchX": local},
        "render": {
            "mlpipe": [mlpipe, "render", SPEC, "--for", "kubernetes"],
            "TorchX": tool("torchx", "torchx", *kubernetes),
            "Kubeflow SDK": tool("kubeflow", "python", "-c", _KUBEFLOW),
        },
    }


def timed(command: list[str], folder: Path) -> measure.Figures:
    """One process: wall seconds and CPU seconds, its children's included."""
    environment = {**measure.with_bytecode(), "HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    seconds, after = time.perf_counter() - began, os.times()
    if done.returncode:
        raise RuntimeError(f"{command} failed with {done.returncode}:\n{done.stderr[-2000:]}")
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": seconds, "cpu": spent}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", action="append", help="--only=validate; may be repeated")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    num_rounds = 1 if arguments.quick else arguments.rounds
    load_before = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (("sky.yaml", _SKY_FILE), ("dstack.yaml", _DSTACK_FILE), ("train.py", "")):
            (folder / file).write_text(text)
        for work, commands in works().items():
            if arguments.only and work not in arguments.only:
                continue
            turns = turns_of(commands, folder)
            for turn in turns.values():  # byte code and the disk's cache
                turn()
            found = measure.rounds(turns, num_rounds)
            more = rows_of(f"command line: {work}", found, tuple(commands)[1:])
            print(measure.table({"figures": more}), flush=True)
            rows += more
    body = measure.document(
        rows, rounds=num_rounds, load_before=load_before,
        versions={
            key: number
            for tool in ("torchx", "accelerate", "dstack", "skypilot", "kubeflow")
            for key, number in versions(tool, (tool,)).items()
        },
    )  # fmt: skip
    print(f"written to {measure.write('commands', body, arguments.results)}")
    return 0


def turns_of(commands: Mapping[str, list[str]], folder: Path) -> dict[str, Callable[[], measure.Figures]]:
    sides = {**commands, "TorchX again": commands["TorchX"]}
    return {name: lambda command=command: timed(command, folder) for name, command in sides.items()}


def rows_of(work: str, found: list[measure.Round], peers: tuple[str, ...]) -> list[dict]:
    def row(ours: str, name: str, key: str, peer: str, goal: float | None) -> dict:
        return measure.figure(
            work, name, "s", found, key, ours=ours, peer=peer, goal=goal, higher_is_better=False
        )

    rows = []
    for key, name in (("cpu", "CPU time"), ("wall", "wall time")):
        rows += [row("mlpipe", name, key, peer, 1.0) for peer in peers]
        rows.append(row("TorchX again", f"control: {name}", key, "TorchX", None))
    if work.endswith("--help"):
        spent = [one["mlpipe"]["cpu"] for one in found]
        rows.append(measure.alone(work, "CPU time against the goal", "s", spent, goal=HELP_SECONDS))
    return rows


if __name__ == "__main__":
    sys.exit(main())
