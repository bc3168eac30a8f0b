"""How a data-plane process ends: its exit code, and one line that says why.

The line goes to standard error and, appended, to the termination message of the container (the file that
MILES_TERMINATION_LOG names, else /dev/termination-log where Kubernetes mounts one). All ranks of a node share
that file, so the first line in it is the first cause; the kubelet keeps its last 4096 bytes.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

COMPLETE = 0
"""total_steps reached and the stop record written; nothing else exits with it."""
FAILED = 1
USER_ERROR = 3
"""Trying again with the same configuration cannot help."""
STOPPED = 4
"""Stopped early on request; a checkpoint is written."""
FENCED = 5
"""A trainer of a higher term has taken over."""

FILE_VARIABLE = "MILES_TERMINATION_LOG"
KUBERNETES_FILE = "/dev/termination-log"
STOPPED_PREFIX = "stopped on request"
REPORT_PREFIX = "report: "
REPORT_LIMIT = 3000  # bytes, with those of earlier lines below the kubelet's 4096
LINE_LIMIT = 1000  # bytes a rank may take of the kubelet's 4096


def path() -> str | None:
    """The termination-message file, or None where there is none to write to."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return named
    return KUBERNETES_FILE if os.path.isfile(KUBERNETES_FILE) and os.access(KUBERNETES_FILE, os.W_OK) else None


def report(message: str) -> None:
    """Write one line, prefixed with the rank if there is one, to standard error and the termination message."""
    rank = os.environ.get("RANK")
    line = (f"[rank {rank}] " if rank is not None else "") + " ".join(message.split())
    print(line, file=sys.stderr, flush=True)
    file = path()
    if file is None:
        return
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode()[:LINE_LIMIT] + b"\n")
    finally:
        os.close(descriptor)


def conclude(report: Mapping[str, Any]) -> None:
    """Leave the last report of a run that is complete to whoever reads the termination message: nobody may have asked
    for it in the seconds between the last step and the end. Of a long one only what is a plain value."""
    file = path()
    if file is None:
        return
    line = REPORT_PREFIX + json.dumps(report)
    if len(line) > REPORT_LIMIT:
        line = REPORT_PREFIX + json.dumps({k: v for k, v in report.items() if not isinstance(v, Mapping)})
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(line[:REPORT_LIMIT] + "\n")


def clear() -> None:
    """Forget what an earlier incarnation of this process wrote."""
    file = path()
    if file is not None and os.path.exists(file):
        os.truncate(file, 0)


def text() -> str:
    """What has been reported so far, by any rank of this node."""
    file = path()
    if file is None or not os.path.exists(file):
        return ""
    with open(file, encoding="utf-8", errors="replace") as stream:
        return stream.read()
