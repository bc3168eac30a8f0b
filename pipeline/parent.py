"""For a process that is of no use without the one that started it: the kernel is to end it as well.

A server or launcher that is killed by SIGKILL can no longer end its children, and they would go on holding memory and
processors. Linux only. Limits: a child asks for itself alone, not for what it starts in its turn; and where the parent
has gone before the child asks, nothing happens.
"""

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """SIGKILL for this process as soon as the thread that started it has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
