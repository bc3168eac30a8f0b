"""How often to look again for what somebody else writes: the rarer, the longer nothing has changed.

Looking every twentieth of the quiet time finds a change late by a twentieth of what was waited for anyway, and an hour
of quiet costs hundreds of requests instead of thousands.
"""

import random

SHARE = 20
EARLIEST = 0.8
"""Of an interval, where chance shortens it most: so that those who wait for the same do not all ask at once."""
MEAN = (1 + EARLIEST) / 2


def interval(quiet_s: float, shortest_s: float, longest_s: float, randomness: random.Random) -> float:
    """Seconds to the next look, `quiet_s` after the last change: `shortest_s` at first, never above `longest_s`."""
    wanted = min(quiet_s / SHARE, longest_s) * randomness.uniform(EARLIEST, 1.0)
    return max(shortest_s, wanted)
