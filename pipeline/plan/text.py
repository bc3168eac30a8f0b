"""The plan of a job, as `miles plan` prints it."""

from collections.abc import Iterator

from pipeline.config import RunConfig
from pipeline.plan import estimate, requests
from pipeline.plan.estimate import RolloutEstimate, TrainerEstimate
from pipeline.plan.machines import Machines
from pipeline.plan.rehearsal import Rehearsal

ORDER = ("weights", "gradients", "optimizer", "gathered layers", "activations", "logits", "reserve")
HOUR_S = 3600


def render(
    config: RunConfig,
    machines: Machines,
    took: Rehearsal,
    training: TrainerEstimate,
    serving: RolloutEstimate | None,
    price: float | None,
) -> str:
    """`price` of one device for an hour, in any currency; `serving` is None where nothing is generated."""
    lines = [*_head(config, machines, took), "", *_trainer(training), ""]
    lines += [*_rollout(machines, serving), ""] if serving else []
    lines += _time(config, machines, training, serving, price)
    lines += ["", *_requests(config, machines, training, serving)] if serving else []
    found = estimate.advice(config, machines, training, serving)
    if found:
        lines += ["", "to make it fit, one of these, or several:", *(f"  - {line}" for line in found)]
    return "\n".join(lines)


def _head(config: RunConfig, machines: Machines, took: Rehearsal) -> Iterator[str]:
    lora = config.trainer.lora
    kind = f"a LoRA adapter of rank {lora.rank}" if lora else "all weights"
    replicas = config.trainer.model_replicas
    copies = f" with {replicas} copies of the model" if replicas > 1 else ""
    servers = f"{machines.servers} servers × {machines.devices_per_server}" if machines.servers else "stored samples"
    yield (
        f"{config.name}: {kind} of a model of {took.parameters / 1e9:.2f} billion parameters, "
        f"{machines.nodes} × {machines.processes_per_node} training processes{copies}, {servers}, "
        f"{machines.device.name}"
    )


def _trainer(training: TrainerEstimate) -> Iterator[str]:
    yield "a training process at its peak      GiB"
    for part in ORDER:
        if part in training.memory_gib:
            yield f"  {part:<28}{training.memory_gib[part]:9.2f}"
    verdict = "fits" if training.fits else "does not fit"
    yield f"  {'total':<28}{training.peak_gib:9.2f}  of {training.available_gib:g}: {verdict}"
    if training.offloaded_gib:
        yield f"  {'offloaded':<28}{training.offloaded_gib:9.2f}  of the node's own memory, for all its processes"


def _rollout(machines: Machines, serving: RolloutEstimate) -> Iterator[str]:
    yield "a device of a vLLM server           GiB"
    yield f"  {'weights':<28}{serving.weights_gib:9.2f}"
    yield f"  {'cache of keys and values':<28}{serving.cache_gib:9.2f}"
    verdict = f"{serving.sequences} sequences of full length at once, of {serving.wanted} that a worker asks for"
    if not serving.fits:
        verdict = "does not fit: no room for one sequence of full length"
    yield f"  {'total':<28}{serving.available_gib:9.2f}  {verdict}"


def _requests(
    config: RunConfig, machines: Machines, training: TrainerEstimate, serving: RolloutEstimate
) -> Iterator[str]:
    step_s = max(training.step_s, serving.step_s)
    waiting = 1 - training.step_s / step_s
    found = requests.per_million_rollouts(config, machines.servers, machines.ranks, step_s, waiting)
    idle = requests.idle_worker(config)
    yield "requests to the store, at most      PUT         GET        LIST"
    for name, each in (("for a million rollouts", found), ("of an idle worker in an hour", idle)):
        yield f"  {name:<28}{each.put:11,.0f} {each.get:11,.0f} {each.list:11,.0f}  ${each.dollars:.4g}"
    prices = ", ".join(f"{kind} {price:g}" for kind, price in requests.PER_MILLION.items())
    yield f"  dollars a million: {prices} (S3 Standard, us-east-1)"


def _time(
    config: RunConfig,
    machines: Machines,
    training: TrainerEstimate,
    serving: RolloutEstimate | None,
    price: float | None,
) -> Iterator[str]:
    step_s = max(training.step_s, serving.step_s if serving else 0.0)
    hours = step_s * config.algorithm.total_steps / HOUR_S
    device = machines.device
    yield "a step, prompts and completions at their longest"
    yield (
        f"  training     {training.step_s:8.1f} s  {training.micro_batches} micro-batches a process; computing "
        f"{training.compute_s:.1f} s ({machines.efficiency:.0%} of {device.tflops:g} TFLOP/s), "
        f"network {training.network_s:.1f} s ({machines.network_gbs:g} GB/s)"
    )
    if serving:
        yield f"  generation   {serving.step_s:8.1f} s  memory {device.bandwidth_gbs:g} GB/s"
    cost = f", {hours * machines.devices * price:.0f} at {price:g} a device and hour" if price is not None else ""
    yield (
        f"  {config.algorithm.total_steps} steps of the longer one: {hours:.1f} hours, "
        f"{hours * machines.devices:.0f} device hours{cost}"
    )
