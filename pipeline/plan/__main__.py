"""Command line of `miles plan`, which gives the RunConfig and the numbers of processes; the user states the rest."""

import argparse
import asyncio
import dataclasses
import logging
import os
import sys

from pipeline import config as configuration
from pipeline import terminal
from pipeline.devices import DEVICES
from pipeline.plan.machines import GIB, Machines

REFUSED = 2  # exit code for what the user must mend
TOO_LARGE = 1
NETWORK_GBS = {False: 300.0, True: 50.0}
"""Between GPUs of one node (NVLink), and of several (400 Gbit/s each)."""


def main() -> int:
    options = parse(sys.argv[1:])
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # misses Triton, which nothing here uses
    try:
        from pipeline.plan import planner
    except ModuleNotFoundError as error:
        return refuse(f"needs {error.name}, which is not installed: pip install 'miles[trainer]'")
    try:
        config = configuration.load(options.config)
        text, fits = asyncio.run(planner.plan(config, machines(options), options.model_config, options.price))
    except ValueError as error:
        return refuse(str(error))
    print(text)
    return 0 if fits else TOO_LARGE


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="miles plan",
        description="Memory of each process, time and cost of a job, before it runs anywhere. Exit code 1: too large.",
        epilog="A device is as its data sheet says; --memory, --tflops and --bandwidth replace these figures, and "
        "are the only ones to say how fast a CPU is.",
    )
    parser.add_argument("config", metavar="FILE", help="an RLJob")
    for name in ("nodes", "processes-per-node", "servers", "devices-per-server"):
        parser.add_argument(f"--{name}", type=int, default=1, help=argparse.SUPPRESS)  # from the RLJob
    parser.add_argument("--cpu-cache", type=positive, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument("--one-machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=DEVICES, default="H100", help="default: H100, or cpu for jobs without GPUs")
    parser.add_argument("--memory", type=positive, metavar="GIB", help="memory of one device")
    parser.add_argument("--tflops", type=positive, metavar="N", help="largest throughput of one device, 10¹²/s")
    parser.add_argument("--bandwidth", type=positive, metavar="GBS", help="memory bandwidth of one device, 10⁹ bytes/s")
    parser.add_argument(
        "--network", type=positive, metavar="GBS", help="of one training process (default: 300 in a node, 50 between)"
    )
    parser.add_argument(
        "--efficiency",
        type=share,
        default=0.4,
        metavar="SHARE",
        help="of --tflops that training reaches, see perf/mfu of a run (default 0.4)",
    )
    parser.add_argument("--price", type=positive, metavar="N", help="of one device for an hour")
    parser.add_argument(
        "--model-config", metavar="FILE", help="the model's config.json, or a folder with it, instead of spec.model"
    )
    return parser.parse_args(arguments)


def machines(options: argparse.Namespace) -> Machines:
    together = options.one_machine and options.device == "cpu"
    memory, memory_from = memory_of(options.device, options.memory, together)
    stated = {"memory_gib": memory, "tflops": options.tflops, "bandwidth_gbs": options.bandwidth}
    return Machines(
        device=dataclasses.replace(
            DEVICES[options.device], **{name: value for name, value in stated.items() if value is not None}
        ),
        memory_from=memory_from,
        cpu_cache_gib=options.cpu_cache,
        together=together,
        nodes=options.nodes,
        processes_per_node=options.processes_per_node,
        servers=options.servers,
        devices_per_server=options.devices_per_server,
        network_gbs=options.network or NETWORK_GBS[options.nodes > 1],
        efficiency=options.efficiency,
    )


def memory_of(device: str, stated: float | None, together: bool) -> tuple[float, str]:
    """GiB, and where they are known from."""
    if stated is not None:
        return stated, "--memory"
    if together:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, "this machine"
    return DEVICES[device].memory_gib, "assumed; --memory replaces it" if device == "cpu" else f"{device}'s data sheet"


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def share(text: str) -> float:
    if (value := positive(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is more than 1")
    return value


def refuse(reason: str) -> int:
    print(f"miles plan: {reason}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    terminal.run(main)
