"""One screen about one job: what it is doing, and if it is stuck, why and what to do. Pure.

    math-7b  Running for 7h 12m · step 412 of 1000 · ETA 10h 2m · policy t2-s412 · staleness mean 0.8 max 2
    reward   0.412 ▁▂▃▄▆▇█  (correct 0.520, brief -0.030) · response 311 tokens · eval aime avg@16 0.210
    speed    11.2k tok/s generated · 13.0k tok/s trained · trainer waits 3% · rollouts wait 12%
    rollout  4/4 ready (2 on spot) · queue 96 groups
    trainer  2/2 ready · checkpoint s400, 6m 2s ago · restarts 0 of 3 (+1 disruption)
    store    s3://team-a/miles/team-a/math-7b/3f0c… · 41.0 GiB in 1204 objects

In trouble the first line says what, the second why, the third what to do; the rest follows.
"""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from operators.figures import count, duration, number, one_line, size, sparkline
from operators.plugin import pods as pod_words
from operators.plugin import trouble
from operators.plugin.trouble import holds, moment, seconds_since

Object = Mapping[str, Any]
IN_PASSING = ("Suspending", "Restarting")
"""Phases whose beginning the status does not tell: the time since the job's start would be taken for it."""
BEFORE_STEPS = ("Pending", "Starting")
"""Phases that each attempt begins with."""
OVER = ("Complete", "Failed")
MOST_PODS = 3
"""Pods of a component that are told of, once they are not ready."""
LONGEST = 400
"""Characters of a cause; the whole of it is in `kubectl describe`."""


def screen(job: Object, pods: Sequence[Object] | None, now: datetime.datetime) -> str:
    """pods: those of the job; None: the user may not see them."""
    found = trouble.of(job, now)
    rows = [("reward", reward(job)), ("speed", speed(job))]
    rows += [("rollout", rollout(job, pods)), ("trainer", trainer(job, pods, now))]
    rows += reward_models(pods or ())
    rows += [("last", last_start(job, now)), ("store", store(job))]
    if pods is None:
        rows.append(("pods", "you may not list them; their state is only what the operator tells"))
    if found is None:
        rows.append(("waits", waits(job)))
    else:
        rows[:0] = [("why", shortened(found.why)), ("do", found.remedy)]
    return "\n".join(
        [headline(job, now, found.what if found else None), *(f"{name:<8} {text}" for name, text in rows if text)]
    )


def headline(job: Object, now: datetime.datetime, what: str | None = None) -> str:
    """what: the trouble that the job is in."""
    status, training = job.get("status", {}), job.get("status", {}).get("training", {})
    ended, began = status.get("completionTime"), status.get("startTime")
    if phase(job) in IN_PASSING:
        since = None
    elif phase(job) == "Suspended":
        since = seconds_since(trouble.conditions(job).get("Suspended", {}).get("lastTransitionTime"), now)
    elif phase(job) in BEFORE_STEPS and status.get("attempt", {}).get("number"):
        since = seconds_since(status["attempt"].get("time"), now)
    else:
        since = seconds_since(began or job["metadata"].get("creationTimestamp"), moment(ended) or now)
    lasting = "after" if ended else "for"
    parts = [f"{job['metadata']['name']}  {phase(job)}" + ("" if since is None else f" {lasting} {duration(since)}")]
    parts[0] += f": {what}" if what else ""
    if status.get("observedGeneration", 0) < job["metadata"].get("generation", 0) and status:
        parts.append("the last edit is not acted on yet")
    if training.get("totalSteps"):
        parts.append(f"step {training.get('step', 0)} of {training['totalSteps']}")
    if training.get("etaSeconds") and not ended:
        parts.append(f"ETA {duration(training['etaSeconds'])}")
    if training.get("policyVersion"):
        parts.append(f"policy {training['policyVersion']}")
    found = metrics(job)
    if "staleness/mean" in found:
        most = f" max {found['staleness/max']:.0f}" if "staleness/max" in found else ""
        parts.append(f"staleness mean {found['staleness/mean']:.1f}{most}")
    return " · ".join(parts)


def phase(job: Object) -> str:
    if job["metadata"].get("deletionTimestamp"):
        return "Deleting"
    return str(job.get("status", {}).get("phase") or "Pending")


def metrics(job: Object) -> dict[str, float]:
    """Numbers of the newest step; what is no number is left out."""
    told = job.get("status", {}).get("metrics", [])
    found = {entry["name"]: _finite(entry["value"]) for entry in told}
    return {name: value for name, value in found.items() if value is not None}


def _finite(text: str) -> float | None:
    """The number that the text says; None where it says none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def reward(job: Object) -> str | None:
    found = metrics(job)
    mean = found.get("reward/mean")
    if mean is None:
        return None
    parts = {name.split("/")[1]: value for name, value in found.items() if name.startswith("reward/")}
    terms = ", ".join(f"{name} {number(value)}" for name, value in parts.items() if name != "mean")
    means = map(_finite, job["status"].get("training", {}).get("rewards", []))
    course = sparkline([value for value in means if value is not None])
    told = [" ".join(filter(None, (number(mean), course))) + (f"  ({terms})" if terms else "")]
    if "response_length/mean" in found:
        told.append(f"response {found['response_length/mean']:.0f} tokens")
    return " · ".join([*told, *evaluations(found)])


def speed(job: Object) -> str | None:
    found = metrics(job)
    words = {
        "tokens_per_s/generated": "tok/s generated",
        "tokens_per_s/trained": "tok/s trained",
        "samples_per_s": "samples/s",
    }
    parts = [f"{count(found[name])} {unit}" for name, unit in words.items() if name in found]
    waits = {"waits/trainer": "trainer waits", "waits/rollout": "rollouts wait"}
    parts += [f"{words} {found[name]:.0%}" for name, words in waits.items() if name in found]
    return " · ".join(parts) or None


def evaluations(found: Mapping[str, float]) -> Iterator[str]:
    """ "eval aime avg@16 0.210"."""
    for name, value in found.items():
        if name.startswith("evaluation/") and "@" in name:
            yield f"eval {name.removeprefix('evaluation/').replace('/', ' ')} {number(value)}"


def component(job: Object, part: str, pods: Sequence[Object] | None) -> str | None:
    """ "4/4 ready", with what its pods do where some are not ready."""
    told = job.get("status", {}).get(part, {})
    if not told:
        return None
    ready = f"{told.get('ready', 0)}/{told.get('desired', 0)} ready"
    ready += f" ({told['spot']} on spot)" if told.get("spot") else ""
    return " · ".join([ready, *doings(pod_words.of(pods or (), part))])


def rollout(job: Object, pods: Sequence[Object] | None) -> str | None:
    found, queue = component(job, "rollout", pods), metrics(job).get("queue/groups")
    if found is None:
        return None
    scaled = job["status"]["rollout"].get("autoscaled", {}).get("message")
    told = [found, *([] if queue is None else [f"queue {queue:.0f} groups"])]
    return " · ".join([*told, *([f"autoscaled from {scaled}"] if scaled else [])])


def trainer(job: Object, pods: Sequence[Object] | None, now: datetime.datetime) -> str | None:
    """Of a job that is over no pod of the trainer is wanted any longer."""
    found = component(job, "trainer", pods)
    if found is None:
        return None
    ready = [] if phase(job) in OVER else [found]
    return " · ".join([*ready, *checkpoint_and_restarts(job, now)])


def doings(pods: Sequence[Object]) -> list[str]:
    """What the pods that are not ready do, a few of them by name."""
    busy = [pod for pod in pods if not pod_words.is_ready(pod) and pod_words.words(pod) != "finished"]
    shown = [f"{pod_words.name(pod)} {shortened(pod_words.words(pod), 160)}" for pod in busy[:MOST_PODS]]
    return shown + ([f"and {len(busy) - MOST_PODS} more"] if len(busy) > MOST_PODS else [])


def checkpoint_and_restarts(job: Object, now: datetime.datetime) -> Iterator[str]:
    status = job["status"]
    checkpoint = status.get("lastCheckpoint")
    if checkpoint:
        age = seconds_since(checkpoint.get("time"), now)
        yield f"checkpoint s{checkpoint.get('step', 0)}" + ("" if age is None else f", {duration(age)} ago")
    allowed = job["spec"].get("runPolicy", {}).get("maxRestarts")
    restarts, disruptions = status.get("restarts", 0), status.get("disruptions", 0)
    text = f"restarts {restarts}" + (f" of {allowed}" if allowed is not None else "")
    yield text + (f" (+{disruptions} disruption{'s' if disruptions > 1 else ''})" if disruptions else "")


def reward_models(pods: Sequence[Object]) -> list[tuple[str, str]]:
    found = pod_words.of(pods, "reward")
    ready = sum(pod_words.is_ready(pod) for pod in found)
    return [("rewards", " · ".join([f"{ready}/{len(found)} ready", *doings(found)]))] if found else []


def waits(job: Object) -> str | None:
    """For what a job that is all right is not ready yet."""
    ready = trouble.conditions(job).get("Ready", {})
    return shortened(str(ready.get("message"))) if ready.get("reason") == "Starting" else None


def last_start(job: Object, now: datetime.datetime) -> str | None:
    """Why the present attempt of the trainer began, if it is not the first."""
    attempt = job.get("status", {}).get("attempt", {})
    if not attempt.get("number"):
        return None
    age = seconds_since(attempt.get("time"), now)
    text = f"attempt {attempt['number']}: {str(attempt.get('cause', '')).lower()}"
    text += "" if age is None else f" {duration(age)} ago"
    wait = seconds_since(attempt.get("notBefore"), now)
    if wait is not None and wait < 0:
        text += f", starts in {duration(-wait)}"
    return shortened(text + (f" ({attempt['message']})" if attempt.get("message") else ""))


def store(job: Object) -> str:
    found = job.get("status", {}).get("store")
    return store_uri(job) + (f" · {size(found.get('bytes', 0))} in {found.get('objects', 0)} objects" if found else "")


def store_uri(job: Object) -> str:
    """The run's own prefix in the store, as run.json has it: root, namespace, name, uid."""
    metadata = job["metadata"]
    root = str(job["spec"]["store"]["uri"]).rstrip("/")
    return f"{root}/{metadata['namespace']}/{metadata['name']}/{metadata['uid']}"


def shortened(text: str, longest: int = LONGEST) -> str:
    return one_line(text, longest)


def suspended_already(job: Object) -> bool:
    return bool(job["spec"].get("suspend")) or holds(job, "Suspended")
