"""The watch of RLJobs, by kopf: the only importer of it. It reads, and writes nothing: events alone are handled, so
that kopf keeps no finalizer, no annotation and no Kubernetes event of its own.

kopf runs in a thread with an event loop of its own: at its end it cancels every task of its loop.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import kopf

from operators.observed import Object
from operators.spec import API_VERSION

GROUP, VERSION = API_VERSION.split("/")
SILENCE_S = 100.0
PAGE = 100  # objects
IDENTITY: Any = "miles"
"""Of no use without peering; kopf would look up the name of the user, whom an image need not know."""


class Nothing(kopf.DiffBaseStorage):
    """What kopf compares objects with, for handlers of changes: there are none, and to copy each object costs more than
    all else that kopf does."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


Heard = Callable[[str | None, Object], None]
"""(ADDED, MODIFIED, DELETED, or None where a list told; the RLJob)."""


class WatchEnded(Exception):
    """kopf gave up."""


async def watch_jobs(
    connection: Callable[[], Awaitable[Mapping[str, Any]]], namespaces: Sequence[str], heard: Heard
) -> None:
    """Runs until cancelled; `heard` is called in the caller's loop. `connection`: how to reach the server. No
    namespaces: all. Raises WatchEnded when kopf ends: the definition of RLJobs is gone, or nothing answers for long."""
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    ended: asyncio.Future[None] = loop.create_future()
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.watching.inactivity_timeout = SILENCE_S
    settings.watching.chunk_size = PAGE
    settings.queueing.idle_timeout = 0.5
    settings.persistence.diffbase_storage = Nothing()
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(**await connection())

    async def on_event(event: Any, **_: Any) -> None:
        loop.call_soon_threadsafe(heard, event["type"], event["object"])

    kopf.on.login(registry=registry)(login)
    kopf.on.event(GROUP, VERSION, "rljobs", registry=registry)(on_event)

    # They warn that signals are not kopf's own to handle, and tell with tracebacks how it ends, which WatchEnded tells.
    for part in ("running", "orchestration"):
        logging.getLogger(f"kopf._core.reactor.{part}").setLevel(logging.CRITICAL)

    async def operate() -> None:
        try:
            await kopf.operator(
                registry=registry,
                settings=settings,
                clusterwide=not namespaces,
                namespaces=tuple(namespaces),
                stop_flag=stop,
                identity=IDENTITY,
            )
        finally:
            stop.set()  # kopf waits for it in a thread of the loop, and the end of the loop waits for that thread

    def run() -> None:
        fault: BaseException | None = None
        try:
            asyncio.run(operate())
        except BaseException as error:
            fault = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(_end, ended, fault)

    threading.Thread(target=run, name="kopf", daemon=True).start()
    try:
        await ended
    finally:
        stop.set()


def _end(ended: "asyncio.Future[None]", fault: BaseException | None) -> None:
    if not ended.done():
        ended.set_exception(WatchEnded(f"the watch of RLJobs ended: {fault or type(fault).__name__}"))
