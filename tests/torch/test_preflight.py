"""Machines are checked before ranks start. Here they are processes of one machine, so that the limits of what
must pass are far below what a busy one reaches."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit import plans
from kit.command_runs import until
from kit.nvml import UUID, FakeNvml
from kit.servers import free_port
from kit.warm import Popen, of_plan

from mlpipe._core.cpu_load import Clock
from mlpipe._core.errors import NODE_FAULT_CODE, TrainError
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.plan import PreflightPlan
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import NODE_FAULT, read_outcome
from mlpipe.store.preflight import read_checked
from mlpipe.train.preflight import __main__ as preflight_main
from mlpipe.train.preflight import gang as gang_module
from mlpipe.train.preflight import machine, remembered
from mlpipe.train.preflight.gang import Gang
from mlpipe.train.preflight.verdict import Report

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
EASY = PreflightPlan(slow_ratio=0.001, clock_seconds=3600.0, disk_bytes=2**20, store_bytes_per_second=1e3)
# How fast these machines are nobody asks, for which each would compute for 2 s.
SHORTENED = {"mlpipe.train.preflight.machine:_LOOK_SECONDS": 0.05}


def gang(folder: Path, limits: PreflightPlan, size: int, broken: int | None = None, **changes):
    """Its plan, and the code of a launcher for each of its machines, spares among them, once they have ended.
    `broken`: which of them has too small a disk."""
    tokens = plans.write_tokens(folder / "tokens", num_tokens=2000)
    launch = {"num_nodes": size, "nproc_per_node": 1, "preflight": limits}
    plan = plans.train_plan(folder / "store", tokens, world_size=size, launch=launch, steps=2, **changes)
    (folder / "plan.json").write_text(plan.to_json())
    more = limits._replace(disk_bytes=2**60)
    refused = replace(plan, launch=plan.launch._replace(preflight=more))
    (folder / "plan-broken.json").write_text(refused.to_json())
    port = free_port()
    launchers = []
    for index in range(size + limits.spares):
        env = plans.environment() | {
            "JOB_COMPLETION_INDEX": str(index),
            "MLPIPE_RENDEZVOUS": f"localhost:{port}",
            "MLPIPE_NODE_NAME": f"n{index}",
            "MLPIPE_CACHE": str(folder / "cache"),
            "KIT_SHORTENED": json.dumps(SHORTENED),
            **({"MLPIPE_NUM_MACHINES": str(size + limits.spares)} if limits.spares else {}),
        }
        path = folder / ("plan-broken.json" if index == broken else "plan.json")
        argv = [sys.executable, "-m", "mlpipe.train.launcher", "--plan", str(path)]
        kind, env = of_plan(plan, env)
        launchers.append(Popen(kind, [*argv, "--scratch", str(folder / f"scratch-{index}")], env=env))
    codes = [launcher.wait(600) for launcher in launchers]
    return plan, codes


def test_a_gang_that_passes_trains_at_the_address_where_it_met(tmp_path):
    """Of two replicas of two stages the machines of one replica are neighbours."""
    mesh, pipeline = Mesh(pp=2, dp_replicate=2), PipelinePlan("1f1b", (1, 1))
    plan, codes = gang(tmp_path, EASY, 4, mesh=mesh, pipeline=pipeline, micro_batch=4, accumulation=2)
    assert codes == [0] * 4
    left = [[path.stem for path in (tmp_path / f"scratch-{n}").glob("outcome-*")] for n in range(4)]
    assert left == [["outcome-0"], ["outcome-2"], ["outcome-1"], ["outcome-3"]]
    checked = read_checked(FolderStore(tmp_path / "store"), plan.attempt_key)
    assert (set(checked.nodes), checked.words) == ({"n0", "n1", "n2", "n3"}, [])
    assert {"flops", "memory_bytes_per_second", "store_bytes_per_second", "link_bytes_per_second"} <= set(
        checked.nodes["n1"]
    )


def test_a_machine_that_passed_is_measured_again_after_an_hour_or_a_boot(tmp_path, monkeypatch):
    """Speeds alone: its disk and its store are looked at each time. Here nobody measures a second time."""
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))
    boot = tmp_path / "boot_id"
    boot.write_text("first")
    monkeypatch.setattr(remembered, "_BOOT", boot)
    now = [100.0]
    monkeypatch.setattr(remembered, "_now", lambda: now[0])
    launch = {"num_nodes": 1, "nproc_per_node": 1, "preflight": EASY}
    plan = plans.train_plan(tmp_path / "store", plans.write_tokens(tmp_path / "tokens"), launch=launch)
    store = FolderStore(tmp_path / "store")
    rates = {"flops": 2e9, "memory_bytes_per_second": 3e9}
    measured = []

    def speed(plan, limits, report):
        measured.append(report.node)
        report.figures |= rates

    monkeypatch.setattr(machine, "speed", speed)

    def look(limits=EASY, node="n0"):
        before, report = len(measured), Report(0, node)
        machine.look(plan, limits, tmp_path, store, report)
        assert report.faults == []
        assert report.figures.keys() >= {"disk_free_bytes", "store_bytes_per_second"}
        assert {name: report.figures[name] for name in rates} == rates
        return report, len(measured) > before

    first, was_measured = look()
    assert was_measured
    assert look()[1], "nobody has said yet that it passed"
    remembered.remember(plan, first)
    now[0] += 3599.0
    second, was_measured = look()
    assert (was_measured, second.figures[remembered.AGE]) == (False, 3599.0)
    remembered.remember(plan, second)  # makes it no younger
    assert look(node="n1")[1]
    assert look(EASY._replace(slow_ratio=0.5, expected_flops=5e9))[1]
    assert not look(EASY._replace(slow_ratio=0.5, expected_flops=4e9))[1]
    now[0] += 1.0
    assert look()[1]
    now[0] = 99.0  # of a file from elsewhere
    assert look()[1]
    now[0] = 101.0
    assert not look()[1]
    boot.write_text("second")
    assert look()[1]
    boot.write_text("first")
    (kept,) = (tmp_path / "cache" / "preflight").iterdir()
    for text in ("{", "[]", '{"at": 100, "flops": 1, "memory_bytes_per_second": NaN}'):
        kept.write_text(text)
        assert look()[1]


def test_who_is_slow_by_what_is_remembered_is_measured_before_it_is_blamed(tmp_path, monkeypatch):
    report = Report(0, "n0", {"flops": 1.0, "memory_bytes_per_second": 1.0, remembered.AGE: 60.0})
    monkeypatch.setattr(machine, "_device_speed", lambda *_: {"flops": 0.5, "memory_bytes_per_second": 0.25})
    launch = {"num_nodes": 1, "nproc_per_node": 1, "preflight": EASY}
    plan = plans.train_plan(tmp_path / "store", plans.write_tokens(tmp_path / "tokens"), launch=launch)
    machine.look_again(plan, EASY, FolderStore(tmp_path / "store"), report)
    assert report.figures.pop("store_bytes_per_second") > 0
    assert report.figures == {"flops": 0.5, "memory_bytes_per_second": 0.25}


def test_a_spare_has_the_ranks_of_the_first_machine_that_does_not_pass(tmp_path):
    """Of three machines the first one's disk is too small. The others train, at an address that they have
    told each other; all three end alike."""
    plan, codes = gang(tmp_path, EASY._replace(spares=1), 2, broken=0)
    assert codes == [0, 0, 0]
    store = FolderStore(tmp_path / "store")
    checked = read_checked(store, plan.attempt_key)
    assert (set(checked.nodes), list(checked.faults)) == ({"n0", "n1", "n2"}, ["n0"])
    assert read_outcome(store, f"{plan.attempt_key}/outcome.json").outcome == "done"
    assert read_outcome(store, f"{plan.attempt_key}/outcome-node-1.json").outcome == "done"
    assert len(plans.losses(tmp_path / "store", plan)) == 2
    assert not (tmp_path / "scratch-0" / "torchrun.log").exists()


def test_a_machine_that_dies_in_its_checks_is_not_waited_for(monkeypatch):
    """Of five machines one is killed, one ends by an error; one tells only then, and is waited for: its beats
    come. None waits for the end of all checks."""
    monkeypatch.setattr(gang_module, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(gang_module, "_SILENT_BEATS", 60)
    monkeypatch.setattr(gang_module, "CHECK_SECONDS", 3600.0)
    port, told = free_port(), threading.Event()

    def one(index):
        with contextlib.suppress(OSError), Gang(f"localhost:{port}", index, 5, f"n{index}") as gang:
            if index == 3:
                raise OSError("its disk is gone")
            if index == 2:
                told.wait(600)
            found = gang.exchange("alone", index)
            gang.leave([3, 4])
            return found, gang.lost
        return None

    def killed():
        store = torch.distributed.TCPStore("localhost", port, 5, wait_for_workers=False)
        store.set("here/4", "n4")
        while store.add("num_lost", 0) < 2:  # neither says what is not there
            time.sleep(0.05)
        told.set()

    with ThreadPoolExecutor(5) as pool:
        ends = [pool.submit(one, index) for index in range(4)]
        pool.submit(killed).result(600)
        lost = {3: "failed in its checks: its disk is gone", 4: "was not heard of for 3 s"}
        for index in range(3):
            assert ends[index].result(600) == ({0: 0, 1: 1, 2: 2}, lost)
        assert ends[3].result(600) is None


def test_a_machine_is_heard_of_while_something_holds_pythons_lock_and_not_while_it_is_stopped(monkeypatch):
    """As CUDA may as it starts. In the second part another process's states are told."""
    monkeypatch.setattr(gang_module, "_BEAT_SECONDS", 0.01)
    port = free_port()
    store = torch.distributed.TCPStore("localhost", port, 2, is_master=True, wait_for_workers=False)
    hold = ctypes.PyDLL(None).usleep

    def heard():
        before = store.add("beat/1", 0)
        hold(300_000)
        return store.add("beat/1", 0) - before > 2

    pid = gang_module.beat(f"localhost:{port}", 1, 2)
    try:
        until(heard, "beats")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    states = iter("TStX")
    monkeypatch.setattr(gang_module, "state_of", lambda _: next(states))
    os.waitpid(gang_module.beat(f"localhost:{port}", 0, 2), 0)
    assert store.add("beat/0", 0) == 2


def test_what_the_first_machine_tells_of_itself_is_heard_before_its_server_goes(monkeypatch):
    """torch tells faults of a GPU by RuntimeErrors, as it does of peers that are gone."""
    monkeypatch.setattr(gang_module, "_BEAT_SECONDS", 0.05)
    port, heard = free_port(), threading.Event()

    def fails():
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore words")

    def one(index):
        with Gang(f"localhost:{port}", index, 2, f"n{index}") as gang:
            if index == 0:
                preflight_main._alone(Report(0, "n0"), fails)
            gang.exchange("alone", index)
            lost = gang.lost
            heard.set()
            gang._store.set("over/1", "")  # the server of a thread goes with nothing that it could wait for
            return lost

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(one, index) for index in range(2))
        with pytest.raises(TrainError, match="uncorrectable ECC") as failed:
            first.result(600)
        assert heard.is_set()
        assert (failed.value.kind, failed.value.where) == ("infrastructure", "n0")
        (words,) = second.result(600).values()
        assert words == "failed in its checks: n0: CUDA error: uncorrectable ECC error encountered"


def test_links_are_tried_between_the_gpus_of_machines_that_have_sound_ones():
    """Of three machines the second has none: it takes part in nothing but the clocks. GPUs are CPUs here."""
    argv = [sys.executable, "-m", "kit.gang_links"]
    more = ["3", str(free_port()), "[0, 2]"]
    machines = [
        Popen(
            "torchrun", [*argv, str(index), *more], env=plans.environment(), stdout=subprocess.PIPE, text=True
        )
        for index in range(3)
    ]
    first, second, third = (json.loads(machine.communicate(timeout=600)[0]) for machine in machines)
    assert (list(first["links"]), second["links"], list(third["links"])) == (["2"], {}, ["0"])
    assert set(second["figures"]) == {"clock_seconds"}
    for one in (first, third):
        assert one["figures"]["link_bytes_per_second"] > 0
        assert one["figures"]["all_reduce_bytes_per_second"] > 0


def test_what_goes_round_a_ring_of_devices_is_measured():
    assert machine.peer_speed([torch.device("cpu")] * 3) > 0


def test_an_error_that_the_driver_reports_of_a_gpu_is_a_fault(monkeypatch):
    """The card and its library are made up."""
    card = SimpleNamespace(uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(machine.torch.cuda, "get_device_properties", lambda one: card)
    for xids, words in (([], []), ([79], ["GPU 0 reported error Xid 79 while it was tried"])):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(xids=xids))
        assert machine._watch_errors([torch.device("cuda", 0)])() == words
    assert machine._watch_errors([torch.device("cpu")])() == []


def test_a_machine_that_does_not_pass_is_named_and_no_rank_starts(tmp_path):
    limits = PreflightPlan(0.001, 3600.0, 2**60, 1e3)
    plan, codes = gang(tmp_path, limits, 1)
    assert codes == [NODE_FAULT_CODE]
    store = FolderStore(tmp_path / "store")
    ended = read_outcome(store, f"{plan.attempt_key}/outcome.json")
    assert (ended.kind, ended.cause) == ("infrastructure", NODE_FAULT)
    assert ended.message.startswith("the machines did not pass the preflight: n0: ")
    assert list(read_checked(store, plan.attempt_key).faults) == ["n0"]
    assert not store.exists(f"{plan.attempt_key}/records/rank-0.jsonl")


ECC, EVENT = "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.hw_slowdown"
THROTTLE = "clocks_throttle_reasons.hw_slowdown"


@pytest.mark.parametrize(
    ("cards", "knows", "words", "unread"),
    [
        ([("H100", "0", "Not Active")] * 2, {ECC, EVENT, THROTTLE}, [], []),
        ([("H100", "0", "Not Active")], {ECC, EVENT}, ["nvidia-smi shows 1 GPUs of 2"], []),
        (
            [("H100", "0", "Not Active"), ("H100", "3", "Active")],
            {ECC, EVENT},
            [
                "GPU 1 (H100) has 3 memory errors that ECC could not correct",
                "GPU 1 (H100) is slowed down by its hardware (heat or power)",
            ],
            [],
        ),
        (
            [("T4", "0", "Active"), ("T4", "[N/A]", "Not Active")],
            {ECC, THROTTLE},
            ["GPU 0 (T4) is slowed down by its hardware (heat or power)"],
            [f"GPU 1 (T4) does not tell {ECC}: N/A"],
        ),
        (
            [("H200", "[Not Supported]", "Active")] * 2,
            {ECC},
            [],
            [
                f"nvidia-smi knows no {EVENT}",
                *(f"GPU {number} (H200) does not tell {ECC}: Not Supported" for number in (0, 1)),
            ],
        ),
        ([], {ECC, EVENT}, ["nvidia-smi ended with 15: Unable to determine the device handle"], []),
    ],
)
def test_what_a_made_up_nvidia_smi_tells_of_dead_gpus(tmp_path, monkeypatch, cards, knows, words, unread):
    """It refuses a query with a field that its driver does not know, as nvidia-smi does, and names one."""
    answers = [
        {"index": str(at), "name": card[0], ECC: card[1], EVENT: card[2]} for at, card in enumerate(cards)
    ]
    program = tmp_path / "nvidia-smi"
    program.write_text(f"""#!{sys.executable} -S
import sys
(fields,) = [one.partition("=")[2].split(",") for one in sys.argv if one.startswith("--query-gpu=")]
for field in fields:
    if field not in {sorted({"index", "name", *knows})}:
        sys.exit(print(f'Field "{{field}}" is not a valid field to query.') or 2)
if not {answers}:
    sys.exit(print("Unable to determine the device handle") or 15)
for card in {answers}:
    print(", ".join(card[field.replace("throttle", "event")] for field in fields))
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 2)
    told = []
    assert machine.gpus(2, told) == words
    assert told == unread


def test_without_nvidia_smi_the_gpus_that_torch_sees_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 7)
    assert machine.gpus(8, []) == ["torch sees 7 GPUs of 8"]


def test_a_nvidia_smi_that_hangs_is_a_fault(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_SMI_SECONDS", 0.2)
    assert machine.gpus(8, []) == ["nvidia-smi did not answer within 0 s: a GPU or its driver hangs"]


def test_a_store_that_gives_back_other_bytes_is_a_fault(tmp_path, monkeypatch):
    store = FolderStore(tmp_path)
    monkeypatch.setattr(store, "get", lambda key: b"other")
    assert machine.reach_store(store, "a/b", EASY, Report(0, "n0")) == [
        "the store gave back other bytes than were written"
    ]


def test_a_figure_is_doubted_only_if_others_took_the_cpus_in_each_look(monkeypatch):
    """Clocks: of two CPUs that others keep busy for a second, of two that nobody uses."""
    busy = [Clock(0.0, 2, 0.0, 0.0, 0.0), Clock(1.0, 2, 2.0, 0.0, 1.0)]
    idle = [Clock(0.0, 2, 0.0, 0.0, 0.0), Clock(1.0, 2, 0.0, 0.0, 0.0)]
    report = Report(0, "n0")
    seen = []
    for clocks in (busy, busy, idle, busy):
        left = iter(clocks)
        monkeypatch.setattr(machine.Clock, "read", lambda left=left: next(left))
        with machine.watched(report, "flops"):
            pass
        seen.append(report.busy["flops"] is not None)
    assert seen == [True, True, False, False]


def test_a_machine_without_an_active_rdma_port_is_at_fault(tmp_path, monkeypatch):
    """The files are made up, as the kernel writes them; the limit is this process's, and the capability."""
    monkeypatch.setattr(machine, "may_lock", lambda: True)
    assert machine.rdma(tmp_path) == [f"no port for RDMA is active: {tmp_path} has no devices"]
    for number, state in ((0, "1: DOWN"), (1, "2: INIT")):
        port = tmp_path / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    (told,) = machine.rdma(tmp_path)
    assert told == "no port for RDMA is active: port 1 of mlx5_0 1: DOWN, port 1 of mlx5_1 2: INIT"
    (tmp_path / "mlx5_1/ports/1/state").write_text("4: ACTIVE\n")
    assert machine.rdma(tmp_path) == []
    monkeypatch.setattr(machine, "may_lock", lambda: False)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (65536, 65536))
    assert machine.rdma(tmp_path) == [
        "64.0 KiB of memory may be pinned, and RDMA pins its buffers: ulimit -l unlimited, or "
        "network.pinned_memory in pods"
    ]
