"""What a rank has at hand for a stage: process group, device, store, records. One a process."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mlpipe._core import environment
from mlpipe._core.errors import StoreError, TrainError
from mlpipe._core.records import Start
from mlpipe.observe.metrics import RankMetrics, start_metrics
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.store.open import open_store
from mlpipe.store.runs import read_run
from mlpipe.train.outcome import Outcome
from mlpipe.train.rank_process import RankProcess
from mlpipe.train.recorder import Recorder
from mlpipe.train.stop import Stop
from mlpipe.train.watchdog import STARTING_SECONDS, Watchdog
from mlpipe.train.world import World

_log = logging.getLogger(__name__)
# The watchdog, which knows more, speaks before a collective's own timeout.
_AFTER_WATCHDOG = timedelta(seconds=60)
_COORDINATION_SECONDS = 300.0


def meet(backend: str, timeout: timedelta) -> None:
    """All ranks. Process groups that are made later wait as long: torch gives them 10 minutes with NCCL and
    30 with gloo, however patient the plan is."""
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    dist.init_process_group(backend, timeout=timeout)


class Session:
    """Made by the worker, when it has its signal handlers: meets the other ranks and opens the store."""

    def __init__(
        self, plan: Plan, process: RankProcess, stop: Stop, watchdog: Watchdog, began: float
    ) -> None:
        self.plan = plan
        self.process = process
        self.stop = stop
        self.watchdog = watchdog
        self.began = began
        part = plan.work.training
        self.world = World(part.mesh, process.rank, self._device())
        if part.deterministic:
            if part.compile == "off":  # as below, but for inductor's own setting, whose import costs 1 s
                torch.set_deterministic_debug_mode("error")
            else:
                torch.use_deterministic_algorithms(True)
        timeout = timedelta(seconds=max(part.hang_timeout_seconds, STARTING_SECONDS)) + _AFTER_WATCHDOG
        watchdog.beat("meeting the other ranks", 0, waiting=True)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        meet(backend, timeout)
        if dist.get_world_size() != part.mesh.world_size:
            raise TrainError(
                f"{dist.get_world_size()} workers were started, the plan is for {part.mesh.world_size}",
                hint="start it with mlpipe, not with torchrun alone",
                kind="input",
            )
        self.store = open_store(plan.store_url)
        # of an elastic training: which one this is, and how many take part
        self.replica = int(os.environ[environment.REPLICA]) if plan.launch.replicas is not None else 0
        self.num_replicas = 1
        metrics = None
        if plan.launch.metrics_port is not None:
            # In a pod the ports are fixed and seen from outside, whatever the spec says.
            fixed = os.environ.get(environment.METRICS_PORT)
            port, beside = int(fixed or plan.launch.metrics_port), 0 if fixed else self.replica
            metrics = start_metrics(
                RankMetrics(
                    plan.run_id, plan.stage, self.rank, info=self._info(), gpu_uuid=gpu_uuid(self.device)
                ),
                port + process.local_rank + beside * self.world.size if port else 0,
                os.environ.get(environment.METRICS_ADDRESS) or "127.0.0.1",
            )
        self.metrics_port = metrics.port if metrics else None
        self.recorder = Recorder(
            self.store,
            plan.attempt_key,
            rank=self.rank,
            restart=process.restart,
            metrics=metrics,
            siblings=process.local_world_size if process.local_rank == 0 else 0,
        )

    @property
    def rank(self) -> int:
        """Of all ranks, by which logs and records are named."""
        return self.world.rank + self.replica * self.world.size

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self.world.device

    def _device(self) -> torch.device:
        if self.plan.launch.device == "cpu":
            return torch.device("cpu")
        if not torch.cuda.is_available() or torch.cuda.device_count() <= self.process.local_rank:
            raise TrainError(
                f"the plan needs a GPU for local rank {self.process.local_rank}, torch sees "
                f"{torch.cuda.device_count()}",
                hint="mlpipe doctor says what is missing; without GPUs set resources.gpus_per_node to 0",
                kind="input",
            )
        torch.cuda.set_device(self.process.local_rank)
        return torch.device("cuda", self.process.local_rank)

    def _info(self) -> dict[str, str]:
        """What run.json knows, for the labels of mlpipe_run_info; nothing where there is none to read."""
        try:
            meta = read_run(self.store, self.plan.run_id).meta
        except StoreError:
            return {}
        known = {"git_sha": meta.get("git_commit"), "jenkins_build": meta.get("jenkins_build")}
        return {label: str(value) for label, value in known.items() if value}

    def coordination_store(self) -> dist.Store:
        """A connection of its own to the group's TCPStore: a blocking call on the group's would keep the
        collectives waiting. With one rank nobody else needs to hear. Others wait as long for one that is
        debugged as the watchdog does."""
        debugged = environment.DEBUG_RANK in os.environ
        patience = self.plan.work.training.hang_timeout_seconds if debugged else _COORDINATION_SECONDS
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
        )

    def record_start(self, part: TrainPlan, **fields: Any) -> Start:
        """The start record, as it was written: what the session knows, and `fields` of `Start`."""
        start = Start(
            world_size=self.world.size * self.num_replicas,
            strategy=part.strategy,
            mesh=asdict(part.mesh),
            device="cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            device_type=self.device.type,
            seq_len=part.model.seq_len,
            global_batch=part.global_batch,
            precision=part.precision,
            steps=part.steps,
            torch=torch.__version__,
            host=socket.gethostname(),
            pid=os.getpid(),
            metrics_port=self.metrics_port,
            seconds_since_spawn=time.time() - self.began,
            **fields,
        )
        return self.recorder.write(start)

    def run(self, progress: list[int]) -> Outcome:
        """`progress[0]` follows the last finished step, for the message if this fails."""
        ended: Outcome = self.plan.kind.part("worker").run(self, self.plan.work, progress)
        return ended

    def close(self) -> None:
        """Records that the store does not take any more are no reason to fail, and hide none."""
        try:
            self.recorder.close()
        except StoreError as error:
            _log.warning("the last records are lost: %s", error)


def gpu_uuid(device: torch.device) -> str | None:
    """By which NVML knows the device, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
