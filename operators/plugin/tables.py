"""Tables of `kubectl miles list`, `events` and `top`. Pure; every row a tuple of texts."""

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from operators.figures import duration, number, one_line
from operators.plugin import pods as pod_words
from operators.plugin import status, trouble
from operators.plugin.trouble import seconds_since

Object = Mapping[str, Any]
Row = tuple[str, ...]
MOST_EVENTS = 50
LONGEST_CELL = 1000  # characters


def table(rows: Sequence[Row]) -> str:
    """Columns as wide as their widest text, the first row their titles."""
    rows = [tuple(one_line(text, LONGEST_CELL) for text in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def jobs(found: Sequence[Object], now: datetime.datetime, with_namespace: bool) -> str:
    ordered = sorted(found, key=_key)
    rows = [job_row(job, now) for job in ordered]
    titles: Row = ("NAME", "PHASE", "STEP", "REWARD", "ROLLOUTS", "RESTARTS", "AGE", "TROUBLE")
    if with_namespace:
        titles = ("NAMESPACE", *titles)
        rows = [(_key(job)[0], *row) for job, row in zip(ordered, rows, strict=True)]
    return table([titles, *rows])


def job_row(job: Object, now: datetime.datetime) -> Row:
    told = job.get("status", {})
    training, rollout = told.get("training", {}), told.get("rollout", {})
    mean = status.metrics(job).get("reward/mean")
    found = trouble.of(job, now)
    return (
        str(job["metadata"]["name"]),
        status.phase(job),
        f"{training.get('step', 0)}/{training.get('totalSteps') or job['spec']['algorithm']['totalSteps']}",
        "" if mean is None else number(mean),
        f"{rollout.get('ready', 0)}/{rollout.get('desired', 0)}",
        str(told.get("restarts", 0)),
        duration(seconds_since(job["metadata"].get("creationTimestamp"), now) or 0),
        found.reason if found else "",
    )


def concerning(job: Object, pods: Iterable[Object], events: Iterable[Object]) -> list[Object]:
    """Events about the job, its children and its pods, those that are gone included; oldest first.

    A pod that is gone is known by its name alone, so events from before the job was created are left out: they may be
    about an earlier job of that name.
    """
    metadata = job["metadata"]
    uids = {metadata["uid"], *(pod["metadata"]["uid"] for pod in pods)}
    child = re.compile(rf"{re.escape(metadata['name'])}-(trainer|rollout|config|status|reward)(-.*)?")
    found = []
    for event in events:
        about = event["involvedObject"]
        named = about.get("kind") != "RLJob" and child.fullmatch(str(about.get("name", "")))
        recent = moment(event) >= str(metadata.get("creationTimestamp", ""))
        if about.get("uid") in uids or (named and recent):
            found.append(event)
    return sorted(found, key=moment)[-MOST_EVENTS:]


def events(found: Sequence[Object], now: datetime.datetime) -> str:
    rows = [
        (
            f"{duration(seconds_since(moment(event), now) or 0)} ago",
            str(event.get("type", "")),
            f"{event['involvedObject'].get('kind', '')}/{event['involvedObject'].get('name', '')}",
            str(event.get("reason", "")),
            status.shortened(str(event.get("message", ""))) + (f" (×{times})" if (times := _times(event)) > 1 else ""),
        )
        for event in found
    ]
    return table([("WHEN", "TYPE", "OBJECT", "REASON", "MESSAGE"), *rows])


def moment(event: Object) -> str:
    """When it last happened."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next((time for time in times if time), event["metadata"].get("creationTimestamp", "")))


def top(job: Object, pods: Sequence[Object], used: Mapping[str, tuple[str, str]]) -> str:
    """used: pod → (CPU, memory) as the metrics server says; empty where there is none."""
    rows = [
        (
            pod_words.name(pod),
            pod_words.component(pod),
            *used.get(pod_words.name(pod), ("?", "?")),
            str(gpus(pod)),
            str(pod_words.restarts(pod)),
            status.shortened(pod_words.words(pod), 80),
        )
        for pod in sorted(pods, key=lambda pod: (pod_words.component(pod), pod_words.name(pod)))
    ]
    lines = [table([("POD", "PART", "CPU", "MEMORY", "GPUS", "RESTARTS", "STATE"), *rows])]
    speed = status.speed(job)
    return "\n".join([*lines, f"\n{speed}"] if speed else lines)


def usage(text: str) -> dict[str, tuple[str, str]]:
    """What `kubectl top pods --no-headers` prints, by pod."""
    fields = [line.split() for line in text.splitlines()]
    return {line[0]: (line[1], line[2]) for line in fields if len(line) >= 3}


def gpus(pod: Object) -> int:
    limits = [container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]]
    return sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)


def _times(event: Object) -> int:
    return int((event.get("series") or {}).get("count") or event.get("count") or 1)


def _key(job: Object) -> tuple[str, str]:
    return str(job["metadata"]["namespace"]), str(job["metadata"]["name"])
