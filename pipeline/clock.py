"""Time and randomness, injected: the protocol runs unchanged in virtual time under a seed."""

import asyncio
import random
import time
from typing import Protocol

CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the Unix epoch; may jump, when somebody sets the machine's clock."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment; never jumps. Whatever is a duration is measured by it."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def ulid(now: float, randomness: random.Random) -> str:
    """A ULID (github.com/ulid/spec): 48 bits of milliseconds, 80 random bits, 26 characters, sorts by time."""
    number = (int(now * 1000) << 80) | randomness.getrandbits(80)
    return "".join(CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))
