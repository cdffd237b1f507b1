"""Seconds of collectives: alpha-beta. A ring's bytes at the slowest link's bandwidth, and a latency for each
of its steps. Standard library only."""

from __future__ import annotations

from typing import NamedTuple

from mlpipe.plan.hardware import Hardware

_WIRE_RATIO = 0.8  # share of their bandwidth that collectives get: stas00/ml-engineering, network/README.md
# Seconds of a ring's step. NCCL, src/graph/tuning.cc, hwLat and baseLat: Ring, Simple: NVLink 3.4 us, network
# 14; 8.4 for the call. gloo over loopback: assumed; a calibration measures the call with it.
_STEP_LINK, _STEP_NETWORK, _CALL = 3.4e-6, 14e-6, 8.4e-6
_STEP_GLOO = 60e-6
# Share of a GPU that a collective takes from what computes beside it: NCCL's all-gather 24 of an H100's 132
# multiprocessors (NVIDIA's developer forum, 337991).
_BESIDE = 24 / 132


class Wire(NamedTuple):
    """Collectives of one rank with `num_ranks` - 1 others that are `stride` ranks apart. `num_bytes`: of the
    whole tensor, gathered or before it is scattered."""

    hardware: Hardware

    def all_reduce(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """A reduce-scatter and an all-gather, in place."""
        return 2 * self._ring(num_bytes, num_ranks, stride)

    def all_gather(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """Of weights: on a CPU as calibrated, with all copies."""
        ring = self._ring(num_bytes, num_ranks, stride)
        return self._calibrated(ring, num_bytes, self.hardware.speed.gather_bytes_per_second)

    def reduce_scatter(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """Of gradients, likewise."""
        ring = self.scatter_activations(num_bytes, num_ranks, stride)
        return self._calibrated(ring, num_bytes, self.hardware.speed.scatter_bytes_per_second)

    def gather_activations(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """Without FSDP2's copies."""
        return self._ring(num_bytes, num_ranks, stride)

    def scatter_activations(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """Reduces and scatters. gloo reduces the whole on every rank (torch, ProcessGroupGloo.cpp)."""
        on_cpu = self.hardware.device == "cpu"
        return (2 if on_cpu else 1) * self._ring(num_bytes, num_ranks, stride)

    def all_to_all(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """Each rank has a share of the tensor, and sends each other rank as much of it: what is for other
        nodes by its own network port."""
        share, members = num_bytes / num_ranks, max(1, self.hardware.devices_per_node // stride)
        leaving = share * max(0, num_ranks - members) / num_ranks
        slowest = leaving / self._network(num_ranks * stride)
        if self.hardware.device == "cuda":
            slowest /= _WIRE_RATIO
        return max(self._ring(share, num_ranks, stride), slowest)

    def over(self, num_ranks: int) -> Wire:
        """For groups that reach over so many ranks, by the places of their machines."""
        rate = self._network(num_ranks)
        if rate == self.hardware.speed.network_bytes_per_second:
            return self
        speed = self.hardware.speed._replace(network_bytes_per_second=rate)
        return Wire(self.hardware._replace(speed=speed))

    def beside(self, seconds: float, computing: float) -> tuple[float, float]:
        """Of a collective of so many seconds beside so many of computing: what is not hidden, and what
        computing takes longer."""
        return max(0.0, seconds - computing), _BESIDE * min(seconds, computing)

    def send(self, num_bytes: float, stride: int) -> float:
        """To one rank that is so many ranks away."""
        return self._ring(2 * num_bytes, 2, stride)

    def hop(self, num_bytes: float, num_ranks: int, stride: int) -> float:
        """From each rank of a ring to the next, all at once: where the ring leaves the node, by one's own
        network port."""
        per_node = self.hardware.devices_per_node
        leaves = (num_ranks - 1) * stride >= per_node
        return self.over(num_ranks * stride).send(num_bytes, per_node if leaves else stride)

    def _ring(self, num_bytes: float, num_ranks: int, stride: int = 1) -> float:
        """`num_ranks` - 1 steps of a share. A ring through several nodes has as many network ports as it has
        members on a node."""
        if num_ranks == 1:
            return 0.0
        hardware, per_node = self.hardware, self.hardware.devices_per_node
        speed = hardware.speed
        steps, rate = num_ranks - 1, speed.link_bytes_per_second
        network_steps = 0
        if steps * stride >= per_node:
            members = max(1, per_node // stride)
            rate = min(rate, members * self._network(num_ranks * stride))
            network_steps = steps if members == 1 else max(1, num_ranks // members - 1)
        transfer = num_bytes * steps / num_ranks / rate
        if (
            hardware.device == "cpu"
        ):  # the link's rate was measured with an all-reduce, not read off a datasheet
            return transfer + speed.collective_seconds + steps * _STEP_GLOO
        latency = (steps - network_steps) * _STEP_LINK + network_steps * _STEP_NETWORK + _CALL
        return transfer / _WIRE_RATIO + latency

    def _network(self, num_ranks: int) -> float:
        """Bytes a second of one device within so many neighbouring ranks."""
        speed = self.hardware.speed
        if 0 < speed.rack_nodes * self.hardware.devices_per_node < num_ranks:
            return min(speed.network_bytes_per_second, speed.rack_bytes_per_second)
        return speed.network_bytes_per_second

    def _calibrated(self, ring: float, num_bytes: float, rate: float) -> float:
        """The ring is the slower where the calibration had fewer ranks, or one node."""
        if not ring or not rate:
            return ring
        return max(ring, num_bytes / rate + self.hardware.speed.collective_seconds)
