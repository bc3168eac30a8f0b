"""The plan of a job, as `miles plan` prints it."""

from collections.abc import Iterator

from pipeline.config import RunConfig
from pipeline.plan import estimate, requests
from pipeline.plan.estimate import RolloutEstimate, TrainerEstimate
from pipeline.plan.machines import Machines
from pipeline.plan.rehearsal import Rehearsal

ORDER = ("weights", "gradients", "optimizer", "gathered layers", "activations", "logits", "reserve")
HOUR_S = 3600
UNTIMED = (
    "no estimate of the time: it hangs on the CPU's cores and what else they do. Measure a few steps, with miles run "
    "FILE --set spec.algorithm.totalSteps=3, or state --tflops and --bandwidth of a process"
)


def render(
    config: RunConfig,
    machines: Machines,
    took: Rehearsal,
    training: TrainerEstimate,
    serving: RolloutEstimate | None,
    price: float | None,
) -> str:
    """`price` of one device for an hour, in any currency; `serving` is None where nothing is generated."""
    lines = [*_head(config, machines, took), "", *_trainer(machines, training), ""]
    lines += [*_rollout(machines, serving), ""] if serving else []
    lines += [*_together(machines, training, serving), ""] if machines.together else []
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
    count = "1 server" if machines.servers == 1 else f"{machines.servers} servers"
    servers = f"{count} × {machines.devices_per_server}" if machines.servers else "stored samples"
    yield (
        f"{config.name}: {kind} of a model of {_count(took.parameters)} parameters, "
        f"{machines.nodes} × {machines.processes_per_node} training processes{copies}, {servers}, "
        f"{machines.device.name}"
    )


def _count(number: float) -> str:
    """7.62 billion, 134 million, 12.3 thousand, 640."""
    for size, word in ((1e9, " billion"), (1e6, " million"), (1e3, " thousand")):
        if number >= size:
            return f"{number / size:.3g}{word}"
    return f"{number:g}"


def _duration(seconds: float) -> str:
    """In the largest unit of which there is one at least."""
    for size, word in ((HOUR_S, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {word}"
    return f"{seconds:.3g} seconds"


def _row(name: str, gib: float, verdict: str = "") -> str:
    return f"  {name:<28}{gib:9.3f}{verdict}"


def _available(machines: Machines, gib: float) -> str:
    return f"  of {gib:.3g} ({machines.memory_from}): "


def _trainer(machines: Machines, training: TrainerEstimate) -> Iterator[str]:
    yield "a training process at its peak      GiB"
    for part in ORDER:
        if part in training.memory_gib:
            yield _row(part, training.memory_gib[part])
    verdict = "fits" if training.fits else "does not fit"
    yield _row("total", training.peak_gib, _available(machines, training.available_gib) + verdict)
    if training.offloaded_gib:
        yield _row("offloaded", training.offloaded_gib, "  of the node's own memory, for all its processes")


def _together(machines: Machines, training: TrainerEstimate, serving: RolloutEstimate | None) -> Iterator[str]:
    """Where one machine's memory is to hold them all."""
    yield "all processes on one machine        GiB"
    yield _row(f"training processes: {machines.ranks}", machines.ranks * training.peak_gib)
    if serving:
        yield _row(f"servers and workers: {machines.servers}", machines.servers * serving.peak_gib)
    verdict = "fits" if estimate.fits_together(machines, training, serving) else "does not fit"
    total = estimate.together_gib(machines, training, serving)
    yield _row("total", total, _available(machines, machines.device.memory_gib) + verdict)


def _rollout(machines: Machines, serving: RolloutEstimate) -> Iterator[str]:
    yield "a device of a vLLM server           GiB"
    yield _row("weights", serving.weights_gib)
    yield _row("cache of keys and values", serving.cache_gib)
    if serving.reserve_gib:
        yield _row("reserve, with the worker's", serving.reserve_gib)
    verdict = f"  {serving.sequences} sequences of full length at once, of {serving.wanted} that a worker asks for"
    if not serving.sequences:
        verdict = "  does not fit: no room for one sequence of full length"
    elif not serving.fits:
        verdict = _available(machines, serving.available_gib) + "does not fit"
    yield _row("total", serving.peak_gib, verdict)


def _requests(
    config: RunConfig, machines: Machines, training: TrainerEstimate, serving: RolloutEstimate
) -> Iterator[str]:
    rows = [("of an idle worker in an hour", requests.idle_worker(config))]
    if machines.device.timed:
        step_s = max(training.step_s, serving.step_s)
        waiting = 1 - training.step_s / step_s
        found = requests.per_million_rollouts(config, machines.servers, machines.ranks, step_s, waiting)
        rows.insert(0, ("for a million rollouts", found))
    yield "requests to the store, at most      PUT         GET        LIST"
    for name, each in rows:
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
    device = machines.device
    if not device.timed:
        yield UNTIMED
        return
    step_s = max(training.step_s, serving.step_s if serving else 0.0)
    seconds = step_s * config.algorithm.total_steps
    device_hours = seconds / HOUR_S * machines.devices
    yield "a step, prompts and completions at their longest"
    yield (
        f"  training     {training.step_s:8.1f} s  {training.micro_batches} micro-batches a process; computing "
        f"{training.compute_s:.1f} s ({machines.efficiency:.0%} of {device.tflops:g} TFLOP/s), "
        f"network {training.network_s:.1f} s ({machines.network_gbs:g} GB/s)"
    )
    if serving:
        yield f"  generation   {serving.step_s:8.1f} s  memory {device.bandwidth_gbs:g} GB/s"
    cost = f", {device_hours * price:.2f} at {price:g} a device and hour" if price is not None else ""
    yield (
        f"  {config.algorithm.total_steps} steps of the longer one: {_duration(seconds)}, "
        f"{device_hours:.3g} device hours{cost}"
    )
