"""Where a job would run: processes, servers, and the stated abilities of their devices."""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, or what one process has of a CPU, as its data sheet says."""

    name: str
    memory_gib: float
    tflops: float
    """Largest dense bfloat16 (on a CPU float32) matrix throughput, 10¹² operations/s."""
    bandwidth_gbs: float
    """Of its memory, 10⁹ bytes/s."""
    reserve_gib: float = 0.0
    """Taken by CUDA, NCCL and cuBLAS before anything else."""
    slack: float = 0.0
    """Share of the allocated memory that is lost to fragments."""


GPU_RESERVE_GIB = 2.0
GPU_SLACK = 0.05
DEVICES = {
    name: Device(name, memory, tflops, bandwidth, GPU_RESERVE_GIB, GPU_SLACK)
    for name, memory, tflops, bandwidth in (
        ("A100-40", 40, 312, 1555),
        ("A100-80", 80, 312, 2039),
        ("L40S", 48, 362, 864),
        ("H100", 80, 989, 3350),
        ("H200", 141, 989, 4800),
        ("B200", 180, 2250, 8000),
    )
} | {"cpu": Device("cpu", 8, 0.1, 20)}
"""By the name that --device takes; NVIDIA's data sheets, SXM where there are several."""


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

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def devices(self) -> int:
        return self.ranks + self.servers * self.devices_per_server
