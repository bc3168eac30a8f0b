"""What accelerators can do, as their data sheets say (NVIDIA's, SXM where nothing else is said; AMD's)."""

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator, or what one process has of a CPU."""

    name: str
    memory_gib: float
    tflops: float
    """Largest dense bfloat16 (on a CPU float32) matrix throughput, 10¹² operations/s; nan: unknown."""
    bandwidth_gbs: float
    """Of its memory, 10⁹ bytes/s; nan: unknown."""
    reserve_gib: float = 0.0
    """Taken by CUDA, NCCL and cuBLAS, or on a CPU by Python and PyTorch, before anything else."""
    slack: float = 0.0
    """Share of the allocated memory that is lost to fragments."""

    @property
    def timed(self) -> bool:
        """Whether it is known how fast it is."""
        return not (math.isnan(self.tflops) or math.isnan(self.bandwidth_gbs))


GPU_RESERVE_GIB = 2.0
GPU_SLACK = 0.05
CPU_RESERVE_GIB = 1.0
GPUS = {
    name: Device(name, memory, tflops, bandwidth, GPU_RESERVE_GIB, GPU_SLACK)
    for name, memory, tflops, bandwidth in (
        ("A10", 24, 125, 600),
        ("A100-40", 40, 312, 1555),
        ("A100-80", 80, 312, 2039),
        ("L4", 24, 121, 300),
        ("L40S", 48, 362, 864),
        ("H20", 96, 148, 4000),
        ("H100", 80, 989, 3350),
        ("H100-PCIe", 80, 756, 2000),
        ("H100-NVL", 94, 835, 3900),
        ("H200", 141, 989, 4800),
        ("B200", 180, 2250, 8000),
        ("MI300X", 192, 1307, 5300),
    )
}
DEVICES = GPUS | {"cpu": Device("cpu", 8, math.nan, math.nan, CPU_RESERVE_GIB)}
"""By the name that `miles plan --device` takes. CPUs differ too much to say how fast a process is that has some
cores of one."""


def peak_tflops(driver_name: str) -> float | None:
    """Of the GPU that its driver calls so, `NVIDIA A100-SXM4-80GB`; None for one that is not in the table."""
    words = set(re.findall("[A-Za-z0-9]+", re.sub(r"(?<=\d)GB", "", driver_name)))
    known = [name for name in GPUS if words.issuperset(name.split("-"))]
    return GPUS[max(known, key=len)].tflops if known else None
