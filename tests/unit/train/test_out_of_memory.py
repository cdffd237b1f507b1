"""What is out of memory, when it is tried again, and what is said to take less."""

from __future__ import annotations

import pytest
from kit.synthetic_run import train_plan

from mlpipe.plan.mesh import Mesh
from mlpipe.plan.work import Prediction
from mlpipe.train.out_of_memory import comes_again, is_out_of_memory, remedy

pytestmark = pytest.mark.unit


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


def test_it_is_known_by_torchs_class_and_by_the_words_of_drivers_and_kernels():
    found = [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 8 bytes"
        ),
    ]
    assert all(map(is_out_of_memory, found))
    assert not is_out_of_memory(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_it_comes_again_where_an_earlier_start_ended_after_the_same_step(tmp_path):
    tries = [(7, 0), (7, 0), (9, 1), (9, 2)]  # of one start two ranks
    assert [comes_again(tmp_path, *one) for one in tries] == [False, False, False, True]


def test_what_takes_less_is_what_the_plan_does_not_have():
    plan = train_plan(2)._replace(
        micro_batch=8,
        smaller_micro_batches=(2,),
        activation_checkpointing="selective",
        mesh=Mesh(dp_replicate=2),
        offload="off",
        predicted=Prediction(3 * 2**30, 1.0, 1.0, 1.0),
        memory_bytes=4 * 2**30,
    )
    less = "micro_batch: 2 (it was 8), activation_checkpointing: full (it was selective), strategy: fsdp"
    told = (
        f"the plan expected 3.0 GiB of 4.0 GiB a worker; less take, the cheapest first: {less}, offload: opti"
    )
    assert remedy(plan).startswith(told)
    sharded = plan._replace(mesh=Mesh(dp_shard=2), activation_checkpointing="full", smaller_micro_batches=())
    assert "first: micro_batch: 4 (it was 8), offload: activations, offload: optimizer;" in remedy(sharded)
    assert "first: more or larger devices;" in remedy(sharded._replace(micro_batch=1, offload="all"))
