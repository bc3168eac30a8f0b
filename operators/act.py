"""Carries a Plan out, in the order that makes it safe to be killed after any of its requests.

What pods need, their configuration and the policies that confine them, is there before they are; within each of the two
groups requests go out together, so that a new job has its children after few round trips of a busy API server.
A request that fails ends the pass: the error propagates, and the next pass plans anew from what it observes then. A
child that the API server refuses for what it is ends it last: people are to read in the status what the job waits for.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from operators.observed import Event, Object, Observed, Plan

WORKLOADS = ("Deployment", "Job")


class Refused(Exception):
    """The API server will take a child as little the next time, unless somebody acts: a quota, a rule, a field."""


class Cluster(Protocol):
    """What the API server, and a trainer's status port, can be asked for. `operators.cluster` is the real one."""

    async def pause(self, job: Object, pods: Sequence[Object]) -> None:
        """Ask trainer rank 0 among `pods` to checkpoint and stop. One that does not answer is no error."""

    async def ensure_token(self, job: Object) -> None:
        """Create the Secret that lets the trainer know our requests, unless there is one."""

    async def apply(self, desired: Mapping[str, Any]) -> None:
        """Server-side apply, by force. Raises Refused."""

    async def delete(self, kind: str, name: str, namespace: str, uid: str) -> None:
        """Delete in the background the very object with that uid. One that is gone, or another's, is no error."""

    async def delete_job(self, job: Object) -> None:
        """Delete the RLJob itself, in the background, if it is still the one observed."""

    async def write_status(self, job: Object, status: Mapping[str, Any]) -> None:
        """Replace the status. Raises where the RLJob is no longer at the resourceVersion observed."""

    async def post_event(self, job: Object, event: Event) -> None: ...


async def carry_out(plan: Plan, observed: Observed, cluster: Cluster) -> None:
    """Raises what the cluster raises; what was done before that stays done. No pod begins without what it needs."""
    job, namespace = observed.job, observed.job["metadata"]["namespace"]
    if plan.pause:
        await cluster.pause(job, observed.pods)
    workloads = [desired for desired in plan.apply if desired["kind"] in WORKLOADS]
    needed = [cluster.apply(desired) for desired in plan.apply if desired["kind"] not in WORKLOADS]
    if any(desired["kind"] == "Job" for desired in workloads):
        needed.append(cluster.ensure_token(job))
    refused = await _together(needed) or await _together([cluster.apply(desired) for desired in workloads])
    for deletion in plan.delete:
        await cluster.delete(deletion.key.kind, deletion.key.name, namespace, deletion.uid)
    if plan.delete_job:
        await cluster.delete_job(job)
    if plan.status is not None:
        await cluster.write_status(job, plan.status)
    for event in plan.events:
        await cluster.post_event(job, event)
    if refused is not None:
        raise refused


async def _together(requests: Sequence[Awaitable[None]]) -> Refused | None:
    """Waits for all of them, also where one fails; then raises the first failure, or returns the first refusal."""
    answers = await asyncio.gather(*requests, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, Refused):
            raise answer
    return next((answer for answer in answers if isinstance(answer, Refused)), None)
