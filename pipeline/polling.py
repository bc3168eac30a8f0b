"""How often to look again for what somebody else writes: the rarer, the longer nothing has changed.

Looking every twentieth of the quiet time finds a change late by a twentieth of what was waited for anyway, and an hour
of quiet costs hundreds of requests instead of thousands.
"""

import math
import random

SHARE = 20
EARLIEST = 0.8
"""Of an interval, where chance shortens it most: so that those who wait for the same do not all ask at once."""
MEAN = (1 + EARLIEST) / 2


def patience(quiet_s: float, shortest_s: float, longest_s: float) -> float:
    """Seconds between two looks, `quiet_s` after the last change: `shortest_s` at first, never above `longest_s`."""
    return max(shortest_s, min(quiet_s / SHARE, longest_s))


def interval(quiet_s: float, shortest_s: float, longest_s: float, randomness: random.Random) -> float:
    """The same of one among many, who should not all look at once."""
    return max(shortest_s, patience(quiet_s, shortest_s, longest_s) * randomness.uniform(EARLIEST, 1.0))


def looks(quiet_s: float, shortest_s: float, longest_s: float) -> float:
    """How many there are in `quiet_s` without a change: the integral of 1 / patience."""
    longest_s = max(shortest_s, longest_s)
    first, last = min(quiet_s, SHARE * shortest_s), SHARE * longest_s
    between = SHARE * math.log(max(first, min(quiet_s, last)) / first) if first else 0.0
    return first / shortest_s + between + max(0.0, quiet_s - last) / longest_s
