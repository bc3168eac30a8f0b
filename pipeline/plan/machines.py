"""Where a job would run: processes, servers, and their devices."""

import dataclasses

from pipeline.devices import Device

GIB = 2**30
SERVER_RESERVE_GIB = 3.5
"""Resident code and libraries of vLLM on a CPU, with the worker beside it."""


@dataclasses.dataclass(frozen=True)
class Machines:
    """All that a job is given."""

    device: Device
    nodes: int
    processes_per_node: int
    servers: int
    """Rollout workers, each with a vLLM server."""
    devices_per_server: int
    """Devices that one server splits the model over."""
    network_gbs: float
    """10⁹ bytes/s that a training process moves to and from the others."""
    efficiency: float
    """Share of a device's largest throughput that training reaches."""
    memory_from: str
    """Where the device's memory is known from, in a word or two."""
    cpu_cache_gib: float
    """Keys and values that a server on a CPU holds."""
    together: bool
    """Whether all processes share one machine's memory, which is then the device's."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def devices(self) -> int:
        return self.ranks + self.servers * self.devices_per_server
