"""Puts together what a pass looks at: the RLJob, its children and pods from the cache.

The cache may lag, that of RLJobs too; operators.controller says how far what the watch told of them will do. Where a
decision hangs on something being gone (a new attempt, a suspension), Jobs and pods are read from the server too: a pod
that the cache does not know yet would let two attempts train at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from operators.cache import JobKey
from operators.cluster import CHILDREN, Cluster
from operators.names import attempt_of
from operators.observed import Object, Observed, concerns_us
from operators.spec import KIND
from operators.statusport import last_words


async def observe(cluster: Cluster, key: JobKey, told: bool = False) -> Observed | None:
    """None: there is no such RLJob, or none that concerns us. `told`: the RLJob that the watch told will do. Raises
    ApiError."""
    job = cluster.cache.find(KIND, key.namespace, key.name) if told else None
    if job is None:
        job = await cluster.get(KIND, key.namespace, key.name)
    if job is None:
        cluster.forget(key)
    if job is None or not concerns_us(job):
        return None
    uid = job["metadata"]["uid"]
    children, pods = (cluster.cache.of(uid, kinds, key.namespace) for kinds in (CHILDREN, ["Pod"]))
    if needs_the_truth(job, children):
        jobs = [each for each in await cluster.list_job("Job", key.namespace, uid) if _is_owned(each, uid)]
        children = [child for child in children if child["kind"] != "Job"] + jobs
        pods = await cluster.list_job("Pod", key.namespace, uid)
    return Observed(
        job=job,
        children=children,
        pods=pods,
        foreign=await cluster.foreign(key, uid),
        refused=cluster.refused(key),
        report=await reported(cluster, pods),
        spot_nodes=cluster.cache.spot_nodes,
        events=_warnings(cluster, [*children, *pods]),
    )


async def reported(cluster: Cluster, pods: Sequence[Object]) -> Mapping[str, Any] | None:
    """What the trainer among these pods of a job tells, or told in the end."""
    return await cluster.status.report(pods) or last_words(pods)


def needs_the_truth(job: Object, children: Sequence[Object]) -> bool:
    """Whether what the pass decides hangs on Jobs or pods being gone, or on what the pods of an ended Job say."""
    status = job.get("status", {})
    if "completionTime" in status:
        return False
    if job["spec"].get("suspend"):
        return True
    attempt = status.get("attempt", {})
    trainers = [child for child in children if _is_job(child)]
    if [attempt_of(trainer["metadata"]) for trainer in trainers] != [attempt.get("number", 0)]:
        return bool(trainers) or "time" in attempt
    return any(_has_ended(trainer) for trainer in trainers)


def _has_ended(job: Object) -> bool:
    conditions = job.get("status", {}).get("conditions", ())
    return any(entry["type"] in ("Complete", "Failed") and entry["status"] == "True" for entry in conditions)


def _is_job(child: Object) -> bool:
    return bool(child["kind"] == "Job")


def _is_owned(child: Object, uid: str) -> bool:
    return any(
        owner.get("controller") and owner["uid"] == uid for owner in child["metadata"].get("ownerReferences", ())
    )


def _warnings(cluster: Cluster, objects: Sequence[Object]) -> list[Any]:
    places = [each["metadata"] for each in objects]
    found = [warning for here in places for warning in cluster.cache.of(here["uid"], ["Event"], here["namespace"])]
    return sorted(found, key=lambda warning: str(warning.get("lastTimestamp") or warning.get("eventTime") or ""))
