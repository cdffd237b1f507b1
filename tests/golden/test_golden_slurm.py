"""The script that sbatch is given, byte for byte but for its digest and the plan in it.

`MLPIPE_UPDATE_GOLDEN=1` rewrites them; read the difference before committing it.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe.plan.slurm import slurm_job
from mlpipe.render.slurm import ARRAY_FIGURE, TaskArray, array_script, comment, script

pytestmark = pytest.mark.golden
HERE = Path(__file__).parent / "slurm"
EVERYTHING = (
    "slurm.partition=gpu",
    "slurm.account=ml-team",
    "slurm.qos=high",
    "slurm.reservation=spring",
    "slurm.constraint=h100&nvlink",
    "slurm.gpu_type=h100",
    "slurm.time=8 h",
    "slurm.options={exclusive: '', mail-type: END}",
    "slurm.python=/opt/ml env/bin/python",
    "slurm.modules=[cuda/12.8, nccl]",
    "slurm.container={runtime: pyxis, mounts: [/data]}",
    "slurm.scratch=/local/nvme",
    "slurm.stages={train: {qos: urgent, options: {mail-type: ALL}}}",
)
ELASTIC = (*QUICKSTART, "train.resources.nodes=2..4", "slurm.time=8 h")
PARTS = {"coordinator": "coordinator", "replica": "3"}
GROUPS = (
    "train.resources=[{nodes: 2, gpus_per_node: 8, gpu: H100-80GB}, "
    "{nodes: 4, gpus_per_node: 8, gpu: A100-80GB, cpus: 64, memory: 128 GiB}]",
    "slurm.time=8 h",
    "slurm.options={mail-type: END, exclusive: ''}",
    "slurm.stages={train: {groups: [{gpu_type: h100}, {gpu_type: a100, partition: old}]}}",
)
CASES = {
    "two-nodes": ("quickstart", "train", QUICKSTART),
    "command": ("llm", "corpus", ("slurm.time=20 min",)),
    "everything": ("llm", "train", EVERYTHING),
    "coordinator": ("quickstart", "train", ELASTIC),
    "replica": ("quickstart", "train", ELASTIC),
    "groups": ("llm", "train", GROUPS),
    "apptainer": ("llm", "train", ("slurm.container={runtime: apptainer, image: /images/ml pipe.sif}",)),
}


def rendered(name: str) -> tuple[str, str]:
    """The script, and the plan that it must hold."""
    pipeline, stage, overrides = CASES[name]
    spec = pipeline_of(pipeline, *overrides)
    plan = plan_of(spec, stage)
    return script(plan, slurm_job(spec, stage), "slurm.out", PARTS.get(name, "")), plan.to_json()


@pytest.mark.parametrize("name", CASES)
def test_scripts(name: str) -> None:
    text, plan = rendered(name)
    assert text.count(f"\n{plan.rstrip()}\nEND_OF_PLAN\n") == 1
    text = text.replace(plan.rstrip(), "PLAN").replace(comment(text), "mlpipe:DIGEST")
    expected = HERE / f"{name}.sbatch"
    if os.environ.get("MLPIPE_UPDATE_GOLDEN"):
        expected.write_text(text)
    assert text == expected.read_text()


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_bash(name: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=rendered(name)[0], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_job_is_known_by_all_that_its_script_says() -> None:
    seen = {comment(rendered(name)[0]) for name in CASES}
    assert len(seen) == len(CASES)
    assert all(re.fullmatch(r"mlpipe:[0-9a-f]{16}:[0-9a-f]{64}", one) for one in seen)


def test_an_array_of_a_sweep() -> None:
    """Its first trial's plan is whole; others' are what differs."""
    plans, jobs = {}, []
    for index, rate in enumerate((0.001, 0.0003)):
        spec = pipeline_of("quickstart", *QUICKSTART, f"train.train.optimizer.lr={rate}")
        plans[index] = plan_of(spec, "train", run_id=f"swept-{index:03}")
        jobs.append(slurm_job(spec, "train"))
    text = array_script(TaskArray("swept", plans, 2), jobs, f"swept/slurm-{ARRAY_FIGURE}.log")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = text.replace(plans[0].to_json().rstrip(), "PLAN").replace(comment(text), "mlpipe:DIGEST")
    text = text.replace(plans[1].spec_digest, "SPEC")
    expected = HERE / "array.sbatch"
    if os.environ.get("MLPIPE_UPDATE_GOLDEN"):
        expected.write_text(text)
    assert text == expected.read_text()
