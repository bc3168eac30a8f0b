"""How a command that somebody waits for at a terminal ends: with a line or nothing, never with a traceback."""

import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130


def run(command: Callable[[], int]) -> NoReturn:
    """Exit with the code that `command` returns; with 130 where Ctrl-C came first, and with 0 where the reader of its
    output, such as head, has seen enough."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where the terminal's encoding lacks a letter
    try:
        code = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        code = 0
    sys.exit(code)
