"""`python -m operators`: the operator, as one of any number of replicas."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket

from operators import telemetry
from operators.cache import Cache
from operators.cluster import ApiError, Cluster, load_configuration
from operators.controller import LEASE, Controller
from operators.election import Election, LeaseLost
from operators.liveness import Health
from operators.reconcile import reconcile
from operators.resolve import Platform
from operators.statusport import URL, StatusPort


def arguments() -> argparse.Namespace:
    defaults = Platform()
    parser = argparse.ArgumentParser(prog="python -m operators", description="Acts on the RLJobs of a cluster.")
    parser.add_argument("--namespace", default="", type=listed, help="namespaces, separated by commas; none: all")
    parser.add_argument("--all-namespaces", action="store_true", help="whatever --namespace says")
    parser.add_argument("--image", default=defaults.image, help="of containers that name none and have no GPU")
    parser.add_argument("--gpu-image", default=defaults.gpu_image, help="of containers that name none and have GPUs")
    parser.add_argument("--service-accounts", default="", type=listed, help="that a job may name, separated by commas")
    parser.add_argument("--egress-cidrs", default=defaults.egress_cidrs, type=listed, help="that pods may reach")
    parser.add_argument("--egress-ports", default=defaults.egress_ports, type=numbers, help="that pods may reach")
    parser.add_argument("--workers", type=int, default=64, help="jobs that are worked on at once")
    parser.add_argument("--status-timeout", type=float, default=2.0, help="seconds that a trainer has for its report")
    parser.add_argument("--status-url", default=URL, help="where a trainer answers: {ip}, {namespace}, {name}")
    parser.add_argument("--port", type=int, default=8080, help="of /healthz, /readyz and /metrics")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser.parse_args()


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in listed(text))


async def serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    own = os.environ.get("POD_NAMESPACE", "default")
    identity = f"{os.environ.get('POD_NAME', socket.gethostname())}-{os.getpid()}"
    health = Health()
    metrics = telemetry.Telemetry(health)
    platform = Platform(
        image=options.image,
        gpu_image=options.gpu_image,
        service_accounts=options.service_accounts,
        operator_namespace=own,
        egress_cidrs=options.egress_cidrs,
        egress_ports=options.egress_ports,
    )
    async with contextlib.AsyncExitStack() as stack:
        status = StatusPort(options.status_url, options.status_timeout)
        stack.push_async_callback(status.close)
        cluster = Cluster(await load_configuration(), Cache(), status, metrics.counted)
        stack.push_async_callback(cluster.close)
        await stack.enter_async_context(telemetry.serving(metrics, options.port))
        election = Election(cluster, own, identity, ApiError, lambda: health.beat(LEASE), cluster.clock.now)
        cluster.may_write = election.holds
        namespaces = () if options.all_namespaces else options.namespace

        async def lead() -> None:
            cluster.cache = Cache()
            controller = Controller(
                cluster,
                reconcile,
                platform,
                health,
                metrics,
                namespaces,
                options.workers,
                election.holds,
                cluster.clock.now,
            )
            await controller.lead(own)

        while not stop.is_set():
            try:
                await election.run(lead, stop)
            except LeaseLost as error:
                logging.getLogger("operators").warning(f"stands by again: {error}")


def main() -> None:
    options = arguments()
    telemetry.log_json(options.log_level)
    try:
        asyncio.run(serve(options))
    except ValueError as error:
        raise SystemExit(f"operators: {error}") from None
    except ExceptionGroup:
        logging.getLogger("operators").exception("the operator ends; another replica, or this one anew, goes on")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
