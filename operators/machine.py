"""What this machine has: GPUs and free ports. Standard library only."""

import os
import re
import socket
from collections.abc import Mapping

PORTS_TRIED = 100


def gpu_ids(environment: Mapping[str, str], devices: str = "/dev") -> tuple[str, ...]:
    """The NVIDIA GPUs that may be used, as CUDA_VISIBLE_DEVICES names them; without loading CUDA."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(part.strip() for part in chosen.split(",") if part.strip() not in ("", "-1"))
    found = [name for name in os.listdir(devices) if re.fullmatch(r"nvidia\d+", name)]
    return tuple(str(number) for number in range(len(found)))


class Ports:
    """Gives each pod a port of its own for every port it wants: that very one if possible, the same one ever after.

    A given port is reserved until `close`: bound but not listened to, so that a second run on this machine goes past
    it while the first one's server, which may start much later, can still listen (both set SO_REUSEADDR).
    """

    def __init__(self) -> None:
        self.given: dict[tuple[str, int], int] = {}
        self.reserved: dict[int, socket.socket] = {}

    def __call__(self, pod: str, wanted: int) -> int:
        if (pod, wanted) not in self.given:
            candidates = (*range(wanted, min(wanted + PORTS_TRIED, 65536)), 0)
            held = next(held for port in candidates if (held := reserve(port)) is not None)
            port = held.getsockname()[1]
            self.given[pod, wanted], self.reserved[port] = port, held
        return self.given[pod, wanted]

    def close(self) -> None:
        for held in self.reserved.values():
            held.close()


def reserve(port: int) -> socket.socket | None:
    """A socket bound to `port` on all addresses (0: to any port), if nobody else is bound there; None otherwise."""
    held = socket.socket()
    try:
        held.bind(("", port))
    except OSError:
        held.close()
        return None
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held
