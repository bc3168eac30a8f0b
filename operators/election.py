"""Which of the replicas acts: the one that holds a Lease, renewed every few seconds.

The client library's election knows no hand-over and ends with the first refused connection, so this is our own. Times
are compared on one clock only: a replica takes the Lease when it has not seen it change for as long as the Lease says.
A leader that could not renew stops before another can take over; one that is told to stop gives the Lease back.
"""

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from operators.observed import Object

LEASE_S = 12
"""So long a Lease that is not renewed keeps others away."""
RENEW_S = 2.0
STEP_DOWN_S = 9.0
"""A leader that could not renew for so long stops; in what is left of LEASE_S its last requests end."""
NAME = "miles-operator"
logger = logging.getLogger(__name__)


class LeaseLost(Exception):
    """This replica may no longer act."""


class Leases(Protocol):
    """The part of the API server that is needed; `operators.cluster` is the real one."""

    async def get(self, kind: str, namespace: str, name: str) -> Any | None: ...

    async def write_lease(self, lease: Object) -> Any: ...


class Election:
    """One replica's view. `refused` is what a request that fails raises; `alive` is
    called for every answer."""

    def __init__(
        self,
        leases: Leases,
        namespace: str,
        identity: str,
        refused: type[Exception],
        alive: Callable[[], None] = lambda: None,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self.leases, self.namespace, self.identity = leases, namespace, identity
        self.refused, self.alive, self.now = refused, alive, now
        self._seen: tuple[str, float] = ("", 0.0)  # version of the Lease, and since when it has stood
        self._lease: Any = None
        self._renewed = 0.0

    async def run(self, lead: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event) -> None:
        """Waits for the Lease, leads while it holds it, gives it back. Raises LeaseLost, and what `lead` raises."""
        while not await self.try_to_hold():
            if await _within(stop.wait(), RENEW_S):
                return
        logger.info(f"{self.identity} leads")
        leading = asyncio.create_task(lead(), name="lead")
        try:
            await self._renew_until(stop, leading)
        finally:
            leading.cancel()
            await asyncio.wait({leading}, timeout=STEP_DOWN_S)
            assert leading.done(), "what a leader began does not end; another must not begin beside it"
            await self._give_back()
        if leading.done() and not leading.cancelled():
            leading.result()

    def holds(self) -> bool:
        """Whether this replica may act now."""
        return _clock() - self._renewed < STEP_DOWN_S

    async def try_to_hold(self) -> bool:
        """Take or renew the Lease if that is possible. False too where the server refuses or does not answer."""
        began = _clock()
        try:
            async with asyncio.timeout(STEP_DOWN_S / 2):
                found = await self.leases.get("Lease", self.namespace, NAME)
                self.alive()
                if found is not None and not self._is_free(found):
                    return False
                self._lease = await self.leases.write_lease(self._wanted(found))
        except (self.refused, TimeoutError) as error:
            logger.warning(f"Lease {self.namespace}/{NAME}: {error or 'no answer'}")
            return False
        self._renewed = began
        return True

    async def _renew_until(self, stop: asyncio.Event, leading: "asyncio.Task[None]") -> None:
        stopped = asyncio.create_task(stop.wait())
        try:
            while True:
                async with asyncio.timeout_at(self._renewed + STEP_DOWN_S):
                    await asyncio.wait({stopped, leading}, timeout=RENEW_S, return_when=asyncio.FIRST_COMPLETED)
                    if stopped.done() or leading.done():
                        return
                    await self.try_to_hold()
        except TimeoutError:
            raise LeaseLost(f"Lease {self.namespace}/{NAME} could not be renewed for {STEP_DOWN_S:.0f} s") from None
        finally:
            stopped.cancel()

    def _is_free(self, found: Any) -> bool:
        holder, version = found["spec"].get("holderIdentity"), found["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, _clock())
        unchanged_s = _clock() - self._seen[1]
        return holder in (None, "", self.identity) or unchanged_s > found["spec"].get("leaseDurationSeconds", LEASE_S)

    def _wanted(self, found: Any | None) -> Any:
        now = self.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before: Any = found["spec"] if found else {}
        ours = before.get("holderIdentity") == self.identity
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": found["metadata"] if found else {"name": NAME, "namespace": self.namespace},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": LEASE_S,
                "acquireTime": before["acquireTime"] if ours and "acquireTime" in before else now,
                "renewTime": now,
                "leaseTransitions": before.get("leaseTransitions", 0) + (0 if ours else 1),
            },
        }

    async def _give_back(self) -> None:
        """So that another need not wait for the Lease to run out. Only if it is still ours: the version tells."""
        if not self.holds():
            return
        self._renewed = 0.0
        free = {**self._lease, "spec": {**self._lease["spec"], "holderIdentity": ""}}
        with contextlib.suppress(self.refused, TimeoutError):
            async with asyncio.timeout(STEP_DOWN_S / 2):
                await self.leases.write_lease(free)


async def _within(event: Awaitable[Any], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event
    except TimeoutError:
        return False
    return True


def _clock() -> float:
    return asyncio.get_running_loop().time()
