"""From what a step takes to verdicts, times and advice; pure arithmetic.

Training: operations over the efficient part of the stated throughput, or bytes over the network's, whichever takes
longer; what offloading moves to a device and back is not counted. Generation: a server makes one token of each of its
sequences per pass, which reads all weights and the sequences' keys and values from memory, or computes, whichever takes
longer; prompts are not counted, and sequences are half grown on average. The two overlap (algorithm.maxStaleness), so a
step takes as long as the longer one.
"""

import dataclasses
import math

from pipeline.config import RunConfig
from pipeline.plan.machines import GIB, SERVER_RESERVE_GIB, Machines
from pipeline.plan.rehearsal import Rehearsal

SERVED_BYTES = {"float32": 4, "bfloat16": 2}
"""Of each weight and each cached number in vLLM, which has the trainer's type."""
VLLM_SHARE = 0.9
"""Of a device's memory that vLLM takes (--gpu-memory-utilization)."""
STATE = ("weights", "gradients", "optimizer")
"""Parts that more processes share among them."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """What a cached token of the model consists of."""

    layers: int
    heads: int
    """Of keys and values."""
    head_size: int

    @property
    def numbers_per_token(self) -> int:
        return 2 * self.layers * self.heads * self.head_size


@dataclasses.dataclass(frozen=True)
class TrainerEstimate:
    memory_gib: dict[str, float]
    """By part, at the peak; `reserve` is what the device's own software takes."""
    available_gib: float
    offloaded_gib: float
    """Of the node's own memory, for all its processes."""
    micro_batches: int
    """Of one process in a step."""
    compute_s: float
    network_s: float

    @property
    def peak_gib(self) -> float:
        return sum(self.memory_gib.values())

    @property
    def fits(self) -> bool:
        return self.peak_gib <= self.available_gib

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.network_s)


@dataclasses.dataclass(frozen=True)
class RolloutEstimate:
    """Of one device of a server."""

    weights_gib: float
    cache_gib: float
    reserve_gib: float
    """Resident beside them; on a GPU within the tenth that vLLM leaves."""
    available_gib: float
    sequences: int
    """Of the longest kind, that the server's cache holds at once."""
    wanted: int
    """Sequences that a worker would have in hand at once."""
    step_s: float
    """All servers together, for the samples of one step."""

    @property
    def peak_gib(self) -> float:
        return self.weights_gib + self.cache_gib + self.reserve_gib

    @property
    def fits(self) -> bool:
        return self.sequences >= 1 and self.peak_gib <= self.available_gib * (1 + 1e-9)


def together_gib(machines: Machines, training: TrainerEstimate, serving: RolloutEstimate | None) -> float:
    """Of all processes of the job."""
    servers = machines.servers * machines.devices_per_server
    return machines.ranks * training.peak_gib + (servers * serving.peak_gib if serving else 0.0)


def fits_together(machines: Machines, training: TrainerEstimate, serving: RolloutEstimate | None) -> bool:
    return not machines.together or together_gib(machines, training, serving) <= machines.device.memory_gib


def trainer(machines: Machines, took: Rehearsal, micro_batches: int, tokens: int) -> TrainerEstimate:
    """`micro_batches` with `tokens` are what one process has of a real step."""
    device = machines.device
    memory = {part: size / GIB for part, size in took.memory.items()}
    memory["reserve"] = device.reserve_gib + device.slack * sum(memory.values())
    operations = took.operations * tokens / took.tokens
    traffic = took.traffic * micro_batches / took.micro_batches if machines.ranks > 1 else 0.0
    return TrainerEstimate(
        memory_gib=memory,
        available_gib=device.memory_gib,
        offloaded_gib=machines.processes_per_node * took.offloaded / GIB,
        micro_batches=micro_batches,
        compute_s=operations / (device.tflops * 1e12 * machines.efficiency),
        network_s=traffic / (machines.network_gbs * 1e9),
    )


def rollout(config: RunConfig, machines: Machines, parameters: int, attention: Attention) -> RolloutEstimate:
    device, split = machines.device, machines.devices_per_server
    longest, completion = config.rollout.max_model_len, config.algorithm.sampling.max_new_tokens
    on_cpu, size = device.name == "cpu", SERVED_BYTES[config.trainer.dtype]
    weights = parameters * size / split
    available = VLLM_SHARE * device.memory_gib * GIB
    cache = machines.cpu_cache_gib * GIB if on_cpu else max(0.0, available - weights)
    per_token = attention.numbers_per_token * size / min(split, attention.heads)
    sequences = math.floor(cache / per_token / longest)
    wanted = config.rollout.max_concurrent_groups * config.algorithm.group_size
    samples = config.algorithm.prompts_per_step * config.algorithm.group_size / max(1, machines.servers)
    at_once = max(1, min(sequences, wanted, math.ceil(samples)))
    read = weights + at_once * per_token * (longest - completion / 2)
    computed = 2 * parameters / split * at_once
    pass_s = max(read / (device.bandwidth_gbs * 1e9), computed / (device.tflops * 1e12 * machines.efficiency))
    return RolloutEstimate(
        weights_gib=weights / GIB,
        cache_gib=cache / GIB,
        reserve_gib=SERVER_RESERVE_GIB if on_cpu else 0.0,
        available_gib=(device.memory_gib if on_cpu else available / GIB),
        sequences=sequences,
        wanted=wanted,
        step_s=samples / at_once * completion * pass_s,
    )


def advice(
    config: RunConfig, machines: Machines, training: TrainerEstimate, serving: RolloutEstimate | None
) -> list[str]:
    """What to change in the RLJob so that it fits; nothing if it does. `serving` is None where nothing is generated."""
    found = _for_trainer(config, machines, training) + (_for_rollout(machines, serving) if serving else [])
    if not found and not fits_together(machines, training, serving):
        return ["a machine with more memory, or fewer processes: spec.trainer.processesPerNode, spec.rollout.replicas"]
    return found


def _for_trainer(config: RunConfig, machines: Machines, training: TrainerEstimate) -> list[str]:
    if training.fits:
        return []
    found = []
    excess = training.peak_gib - training.available_gib
    working = training.memory_gib.get("activations", 0.0)
    if not config.trainer.activation_checkpointing and working > 0.1 * training.available_gib:
        found.append(
            f"spec.trainer.activationCheckpointing: true: of {working:.1f} GiB of activations it keeps those of a few "
            "layers, and takes about a third more time"
        )
    limit, longest = config.trainer.max_tokens_per_micro_batch, config.rollout.max_model_len
    if limit > longest:
        saved = working * (1 - longest / limit)
        found.append(f"spec.trainer.maxTokensPerMicroBatch: {longest} (now {limit}): about {saved:.1f} GiB less")
    replicas = config.trainer.model_replicas
    if replicas > 1:
        found.append(
            f"spec.trainer.modelReplicas: 1 (now {replicas}): one copy of weights and optimizer, for all nodes"
        )
    state = sum(training.memory_gib.get(part, 0.0) for part in STATE)
    room = training.available_gib - (training.peak_gib - state)
    if room > 0:
        needed = replicas * math.ceil(state * machines.ranks / replicas / room)
        found.append(
            f"more training processes: {needed} (now {machines.ranks}) share weights, gradients and optimizer so that "
            f"the {excess:.1f} GiB too many are gone: spec.trainer.nodes: "
            f"{math.ceil(needed / machines.processes_per_node)}"
        )
    if config.trainer.offload != "all":
        found.append(
            f"spec.trainer.offload: all: {state:.1f} GiB of weights, gradients and optimizer in the node's own memory "
            "instead, for much longer steps"
        )
    if config.trainer.lora is None:
        found.append("spec.trainer.lora: {}: gradients and optimizer of an adapter only, and weights in two bytes each")
    return found or ["a device with more memory"]


def _for_rollout(machines: Machines, serving: RolloutEstimate) -> list[str]:
    if serving.fits:
        return []
    if machines.device.name == "cpu":
        if serving.sequences:
            return ["a machine with more memory for the server"]
        name = "spec.rollout.template.env: VLLM_CPU_KVCACHE_SPACE"
        return [f"{name}: more than the {serving.cache_gib:g} GiB, which hold no sequence of full length"]
    whole = serving.weights_gib * machines.devices_per_server
    needed = 2 ** math.ceil(math.log2(max(2.0, whole / (0.8 * serving.available_gib))))
    reason = f"{whole:.1f} GiB of weights leave no room for the cache of one sequence"
    return [f"spec.rollout.tensorParallelSize: {needed} (now {machines.devices_per_server}): {reason}"]
