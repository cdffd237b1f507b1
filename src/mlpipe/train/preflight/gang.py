"""What the machines of a gang tell each other before there are ranks: who is there, what each has found, how
fast the links between them are and how far their clocks differ.

They meet at the address of torchrun's rendezvous, which is free until the preflight is over: the first
machine's process has to be gone before any torchrun starts, or one would meet the wrong server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mlpipe._core.errors import EXIT_CODES, TrainError
from mlpipe.train.preflight.machine import watched
from mlpipe.train.preflight.verdict import LINK, Report
from mlpipe.train.stop import die_with_parent, state_of

COME_SECONDS = 600.0  # images are pulled at different speeds; as torchrun's own rendezvous
CHECK_SECONDS = 60.0
_BEAT_SECONDS, _SILENT_BEATS = 1.0, 20  # a machine says that it is there; is not heard of, and believed lost
_GONE_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_FIRST_BYTES, _BYTES, _GPU_BYTES = 2**18, 2**22, 2**27
_GPU = ("cuda", "nccl")
_FIRST_TIMES, _MOST_TIMES, _LINK_SECONDS = 3, 20, 0.6
_MOST_ROUNDS = MOST_PAIRS = 8  # with so many others a machine tries its link
_PINGS = 5


class Gang:
    """Machine `index` of `size`. Making it waits for the others. Raises TrainError (infrastructure) naming
    who did not come. `lost`: who ended in its checks, or is heard of no more: nobody waits for it until the
    time of all checks is up. As a context: an error that leaves it is told to the others."""

    def __init__(self, endpoint: str, index: int, size: int, node: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self.index, self.size = index, size
        self._beats = beat(endpoint, index, size)  # before there is a server, which a fork would share
        patience = timedelta(seconds=COME_SECONDS)
        self._store = dist.TCPStore(
            host, int(port), size, is_master=index == 0, timeout=patience, wait_for_workers=False
        )
        self._store.set(f"here/{index}", node)
        self.lost: dict[int, str] = {}
        self._heard: dict[int, tuple[int, int]] = {}  # beats of each, and looks since that found no more
        self._looked, self._num_lost = 0.0, 0
        missing = self._wait("here", COME_SECONDS)
        if missing:
            raise TrainError(
                f"the preflight waited {COME_SECONDS:.0f} s for {_listed(missing)} of {size}",
                where=node,
                hint="look at what the others' pods or jobs wait for: mlpipe status",
                kind="infrastructure",
            )
        self.nodes = [self._store.get(f"here/{other}").decode() for other in range(size)]
        self._members: Sequence[int] = range(size)  # that try their links with each other
        self._device, self._bytes = torch.device("cpu"), _BYTES
        self._group: dist.ProcessGroup | None = None
        self.began = time.monotonic()
        self.seconds = 0.0  # of the checks so far, by the first machine's clock: all decide by the same

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        os.kill(self._beats, signal.SIGKILL)
        os.waitpid(self._beats, 0)
        if error is not None and not isinstance(error, RuntimeError):  # of these the others are the cause
            with suppress(RuntimeError):
                self._lose(self.index, f"failed in its checks: {error}")
                if self.index == 0 and isinstance(error, Exception):  # what it told goes with its server
                    self._wait("over", _GONE_SECONDS, [self.index])

    def _lose(self, index: int, words: str) -> None:
        """Whoever says it first is believed."""
        self._store.compare_set(f"lost/{index}", "", words)
        self._store.add("num_lost", 1)

    def _find_lost(self, missing: Collection[int]) -> None:
        """Whoever is lost by anybody's word, whatever it tells later: all must come to the same end. Of
        `missing` that are silent this machine says so."""
        if (now := time.monotonic()) - self._looked < _BEAT_SECONDS:
            return
        self._looked = now
        for index in missing:
            num, (known, looks) = self._store.add(f"beat/{index}", 0), self._heard.get(index, (-1, 0))
            # looks, not seconds: whoever stood still for a while has heard of nobody
            self._heard[index] = num, looks + 1 if num == known else 0
            if self._heard[index][1] == _SILENT_BEATS:
                self._lose(index, f"was not heard of for {_SILENT_BEATS * _BEAT_SECONDS:.0f} s")
        if (num := self._store.add("num_lost", 0)) != self._num_lost:
            self._num_lost = num
            for index in range(self.size):
                if self._store.check([f"lost/{index}"]):
                    self.lost[index] = self._store.get(f"lost/{index}").decode()

    def addresses(self, endpoint: str) -> list[str]:
        """Of all machines, as they are seen on the way to the first one."""
        host, _, port = endpoint.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=CHECK_SECONDS) as way:
            own = str(way.getsockname()[0])
        told = self.exchange("address", own)
        return [told.get(index, "") for index in range(self.size)]

    def exchange(self, key: str, value: Any) -> dict[int, Any]:
        """Everybody's `value` by index, of those who told it before the time of all checks was up."""
        self._store.set(f"{key}/{self.index}", json.dumps([time.monotonic() - self.began, value]))
        left = max(1.0, self.began + CHECK_SECONDS - time.monotonic())
        missing = self._wait(key, left)
        there = [index for index in range(self.size) if index not in missing and index not in self.lost]
        told = {index: json.loads(self._store.get(f"{key}/{index}")) for index in there}
        self.seconds = told[0][0] if 0 in told else CHECK_SECONDS
        return {index: value for index, (_, value) in told.items()}

    def _wait(self, key: str, seconds: float, without: Collection[int] = ()) -> list[int]:
        """Who has not told it when they are over."""
        deadline = time.monotonic() + seconds
        who = [index for index in range(self.size) if index not in without]
        while missing := [index for index in who if not self._store.check([f"{key}/{index}"])]:
            if key != "here":  # who has not come has no beats yet
                self._find_lost(missing)
            if time.monotonic() > deadline or self.lost.keys() >= set(missing):
                break
            time.sleep(_LOOK_SECONDS / 4)
        return missing

    def look_at_links(
        self, report: Report, pairs: Sequence[tuple[int, int]] | None, gpus: Sequence[int] | None = None
    ) -> None:
        """Into `report`: speeds between this machine and others, the best that was seen so far; its clock.
        `pairs`: only between these, one after the other while nobody else does anything; None: in rounds.
        `gpus`: the machines whose GPUs are tried, as ranks will send between them; None: all machines' CPUs,
        over TCP. Said once."""
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("gloo", self._store),
                rank=self.index,
                world_size=self.size,
                timeout=timedelta(seconds=CHECK_SECONDS),
            )
            if gpus is not None:
                self._use_gpus(gpus, report)
        if pairs is None and self.index in self._members:
            for place in rounds(self._members.index(self.index), len(self._members)):
                self._try(self._members[place], report)
        for one, other in pairs or ():
            if self.index in (one, other):
                self._try(one + other - self.index, report)
            dist.barrier()
        if report.links:
            report.figures["link_bytes_per_second"] = max(report.links.values())
        report.clock_seconds = self._clock()
        report.figures["clock_seconds"] = report.clock_seconds

    def _use_gpus(self, members: Sequence[int], report: Report) -> None:
        """One of each machine. All of them add up first: only then two of a group may speak by themselves."""
        kind, backend = _GPU
        self._members, self._device, self._bytes = members, torch.device(kind, 0), _GPU_BYTES
        if len(members) < 2:
            return
        if kind == "cuda" and self.index in members:
            torch.cuda.set_device(self._device)
        group = dist.new_group(list(members), timeout=timedelta(seconds=2 * CHECK_SECONDS), backend=backend)
        if not isinstance(group, dist.ProcessGroup):  # it is of others
            return
        self._group = group
        # NCCL sets itself up in the first sum, which no timeout of the group bounds
        timer = threading.Timer(CHECK_SECONDS, _no_answer)
        timer.daemon = True
        timer.start()
        took = []
        try:
            for _ in range(_FIRST_TIMES):
                added = torch.zeros(self._bytes, dtype=torch.uint8, device=self._device)
                began = self._now()
                dist.all_reduce(added, group=self._group)
                took.append(self._now() - began)
        finally:
            timer.cancel()
        passed = 2 * (len(members) - 1) / len(members) * self._bytes  # by each, round a ring
        report.figures["all_reduce_bytes_per_second"] = passed / min(took)

    def _now(self) -> float:
        """Once all that was asked of the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _try(self, other: int, report: Report) -> None:
        with watched(report, f"{LINK}{other}"):
            rate = self._link(other)
        report.links[other] = max(rate, report.links.get(other, 0.0))

    def _link(self, other: int) -> float:
        """Bytes a second in one direction, while as many go in the other, as in an all-reduce of two."""
        took = min(self._swap(other, _FIRST_BYTES) for _ in range(_FIRST_TIMES))
        slower = torch.tensor([took], dtype=torch.float64)
        theirs = torch.empty_like(slower)
        self._send_both(slower, theirs, other, None)
        passed = _LINK_SECONDS / max(took, theirs.item()) * _FIRST_BYTES
        size = next((one for one in (self._bytes, _BYTES) if one <= passed), None)
        if size is None:  # so slow that the first bytes say enough
            return _FIRST_BYTES / took
        return size / min(self._swap(other, size) for _ in range(min(_MOST_TIMES, int(passed / size))))

    def _swap(self, other: int, num_bytes: int) -> float:
        sent = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        received = torch.empty_like(sent)
        began = self._now()
        self._send_both(sent, received, other, self._group)
        return self._now() - began

    def _send_both(
        self, sent: torch.Tensor, received: torch.Tensor, other: int, group: dist.ProcessGroup | None
    ) -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, other, group), dist.P2POp(dist.irecv, received, other, group)]
        )
        for work in works:
            work.wait()

    def _clock(self) -> float:
        """Seconds by which this machine's clock is ahead of the first one's: of the quickest of a few
        questions, halfway between question and answer."""
        if self.index == 0:
            for other in range(1, self.size):
                for _ in range(_PINGS):
                    dist.recv(torch.empty(1), other)
                    dist.send(torch.tensor([time.time()], dtype=torch.float64), other)
            return 0.0
        pings = []
        for _ in range(_PINGS):
            asked, began = time.time(), time.perf_counter()
            dist.send(torch.zeros(1), 0)
            answer = torch.empty(1, dtype=torch.float64)
            dist.recv(answer, 0)
            took = time.perf_counter() - began
            pings.append((took, asked + took / 2 - answer.item()))
        return min(pings)[1]

    def leave(self, silent: Collection[int]) -> None:
        """The first machine when all but those that are `silent` have read what they need; the others when
        its server is gone."""
        self._store.set(f"over/{self.index}", "")
        if self.index == 0:
            self._wait("over", _GONE_SECONDS, silent)
            return
        deadline = time.monotonic() + _GONE_SECONDS
        while time.monotonic() < deadline:
            try:
                self._store.check(["here/0"])
            except (RuntimeError, OSError):
                return
            time.sleep(_LOOK_SECONDS)


def beat(endpoint: str, index: int, size: int) -> int:
    """Tells the others that machine `index` is there, while this process is and is not stopped. The pid of
    what does so: a process of its own, since CUDA as it starts may hold Python's lock for longer than the
    others wait."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        die_with_parent(parent)
        # `closerange` would try each number up to the limit; that of the listing itself is closed by then
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2:
                with suppress(OSError):
                    os.close(number)
        host, _, port = endpoint.rpartition(":")
        patience = timedelta(seconds=COME_SECONDS)
        store = dist.TCPStore(host, int(port), size, timeout=patience, wait_for_workers=False)
        while True:
            time.sleep(_BEAT_SECONDS)
            if state_of(parent) not in ("T", "t"):
                store.add(f"beat/{index}", 1)
    finally:
        os._exit(0)  # the first machine has left


def rounds(index: int, size: int) -> Iterator[int]:
    """With whom `index` tries its link, one after the other: in each round all are in pairs (of an odd number
    one rests). After the tables by which chess tournaments are paired."""
    even = size + size % 2
    step = max(1, -(-(even - 1) // _MOST_ROUNDS))
    for turn in range(0, even - 1, step):
        if index == even - 1:
            other = turn
        else:
            other = (2 * turn - index) % (even - 1)
            if other == index:
                other = even - 1
        if other < size:
            yield other


def _listed(indices: list[int]) -> str:
    return "machines " + ", ".join(map(str, indices)) if len(indices) > 1 else f"machine {indices[0]}"


def _no_answer() -> None:
    words = f"NCCL between the GPUs did not answer within {CHECK_SECONDS:.0f} s"
    print(f"error: {words}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(EXIT_CODES["infrastructure"])
