"""Probes of a process on this machine, with Kubernetes' rules: HTTP answers of 200 to 399 pass, as does an exit code 0
and an accepted connection; what is not answered in time fails."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Mapping

import aiohttp


@dataclasses.dataclass(frozen=True)
class Probe:
    """One of: exec (`command`), httpGet (`port` and `path`), tcpSocket (`port`). Thresholds as in Kubernetes."""

    command: tuple[str, ...] = ()
    port: int = 0
    path: str | None = None
    initial_delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    failure_threshold: int = 3
    success_threshold: int = 1


async def verdicts(
    probe: Probe, http: aiohttp.ClientSession, environment: Mapping[str, str], folder: str
) -> AsyncIterator[bool]:
    """Probes for ever; a verdict each time as many in a row as its threshold agree. environment, folder: commands'."""
    await asyncio.sleep(probe.initial_delay_s)
    agreed, last = 0, None
    while True:
        passed = await passes(probe, http, environment, folder)
        agreed = agreed + 1 if passed == last else 1
        last = passed
        if agreed == (probe.success_threshold if passed else probe.failure_threshold):
            yield passed
        await asyncio.sleep(probe.period_s)


async def passes(probe: Probe, http: aiohttp.ClientSession, environment: Mapping[str, str], folder: str) -> bool:
    try:
        async with asyncio.timeout(probe.timeout_s):
            if probe.command:
                return await execute(probe.command, environment, folder) == 0
            if probe.path is not None:
                url = f"http://127.0.0.1:{probe.port}{probe.path}"
                async with http.get(url, allow_redirects=False) as response:
                    return 200 <= response.status < 400
            _, writer = await asyncio.open_connection("127.0.0.1", probe.port)
            writer.close()
            return True
    except (TimeoutError, OSError, aiohttp.ClientError):
        return False


async def execute(command: tuple[str, ...], environment: Mapping[str, str], folder: str) -> int:
    """The exit code of a command; it is killed with its process group when the probe's time is up."""
    null = asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(
        *command, stdin=null, stdout=null, stderr=null, env=environment, cwd=folder, process_group=0
    )
    try:
        return await child.wait()
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
