"""The small HTTP server of trainer rank 0 and of each rollout worker: what it is doing, whether it is well.

GET /status (JSON), /metrics (Prometheus), /healthz, /readyz; POST /pause asks the process to checkpoint and stop,
and wants the bearer token. Runs in the caller's event loop; the callbacks must not block.
"""

import hmac
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

PORT_VARIABLE = "MILES_STATUS_PORT"
HOST_VARIABLE = "MILES_STATUS_HOST"
TOKEN_VARIABLE = "MILES_STATUS_TOKEN"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusServer:
    """Serves what the callbacks answer.

    status: the JSON of /status. gauges: numbers for /metrics, by slash-separated name.
    ready: None where the process is ready, else what it waits for. pause: None where there is nothing to pause.
    """

    def __init__(
        self,
        prefix: str,
        status: Callable[[], Mapping[str, Any]],
        gauges: Callable[[], Mapping[str, float]],
        ready: Callable[[], str | None] = lambda: None,
        pause: Callable[[], None] | None = None,
        token: str | None = None,
    ) -> None:
        self.prefix, self.status, self.gauges = prefix, status, gauges
        self.ready, self.pause, self.token = ready, pause, token
        self.runner: web.AppRunner | None = None

    async def start(self, port: int, host: str = "0.0.0.0") -> int:
        """Listen on `port` (0: any free one); returns the port. Raises OSError where it is taken."""
        application = web.Application(client_max_size=1 << 16)
        application.add_routes(
            [
                web.get("/status", self._status),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.post("/pause", self._pause),
            ]
        )
        self.runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, host, port)
        await site.start()
        return int(self.runner.addresses[0][1])

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(text=json.dumps(finite(self.status())), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=prometheus(self.prefix, self.gauges()).encode(), headers={"Content-Type": METRICS_TYPE}
        )

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        waiting_for = self.ready()
        return web.Response(text=f"{waiting_for or 'ok'}\n", status=503 if waiting_for else 200)

    async def _pause(self, request: web.Request) -> web.Response:
        if self.pause is None:
            raise web.HTTPNotFound(text="there is nothing to pause here\n")
        if not self._authorised(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized(text="a bearer token is needed\n", headers={"WWW-Authenticate": "Bearer"})
        self.pause()
        return web.Response(text="stopping after a checkpoint\n", status=202)

    def _authorised(self, header: str) -> bool:
        """Without a token of our own nobody is authorised."""
        return bool(self.token) and hmac.compare_digest(header.encode(), f"Bearer {self.token}".encode())


async def serve(server: StatusServer, environment: Mapping[str, str] = os.environ) -> int | None:
    """Start `server` where MILES_STATUS_PORT asks for it; returns the port. Raises ValueError for a port in use."""
    port = environment.get(PORT_VARIABLE)
    if not port:
        return None
    server.token = environment.get(TOKEN_VARIABLE)
    try:
        return await server.start(int(port), environment.get(HOST_VARIABLE, "0.0.0.0"))
    except OSError as error:
        raise ValueError(f"{PORT_VARIABLE}={port}: cannot listen ({error.strerror}); choose a free port") from None


def prometheus(prefix: str, gauges: Mapping[str, float]) -> str:
    """The text exposition format: `reward/frac_zero_std` becomes `<prefix>_reward_frac_zero_std`."""
    lines = []
    for name, value in sorted(gauges.items()):
        metric = re.sub(r"[^a-zA-Z0-9_]", "_", f"{prefix}_{name}")
        number = str(float(value)).replace("nan", "NaN").replace("inf", "+Inf").replace("-+", "-")
        lines.append(f"# TYPE {metric} gauge\n{metric} {number}\n")
    return "".join(lines)


def finite(value: Any) -> Any:
    """`value` with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
