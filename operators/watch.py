"""Keeps the cache true: lists a kind once, then follows its changes; lists again when the server has forgotten."""

import asyncio
import logging
from collections.abc import Callable

from operators.cache import Cache, JobKey, Name
from operators.cluster import CHILDREN, ApiError, Cluster
from operators.liveness import Health
from operators.observed import Object

KINDS = (*CHILDREN, "Pod", "Event")
"""What is followed. Warnings come last: they are kept for objects that are known."""
RETRY_S = 2.0
logger = logging.getLogger(__name__)


async def follow(
    cluster: Cluster,
    kind: str,
    namespace: str,
    health: Health,
    changed: Callable[[JobKey], None],
    listed: asyncio.Event,
) -> None:
    """Runs until cancelled. `changed` is told of every job of which something changed; `listed` is set once the cache
    holds what there is."""
    source = f"{kind} in {namespace}" if namespace else kind
    while True:
        try:
            version = await _list(cluster, kind, namespace, changed)
            health.expect(source)
            listed.set()
            while True:
                async for what, told in cluster.watch(kind, namespace, version):
                    health.beat(source)
                    version = told["metadata"]["resourceVersion"]
                    if key := _take(cluster.cache, kind, what, told):
                        changed(key)
                health.beat(source)
        except (ApiError, ValueError) as error:
            if not isinstance(error, ApiError) or error.status != 410:
                logger.warning(f"watch of {source} is begun anew: {error}")
            await asyncio.sleep(RETRY_S)


async def _list(cluster: Cluster, kind: str, namespace: str, changed: Callable[[JobKey], None]) -> str:
    names: list[Name] = []
    version = ""
    async for page, of_list in cluster.pages(kind, namespace):
        version = of_list
        for found in page:
            names.append(Name(found["metadata"]["namespace"], found["metadata"]["name"]))
            if key := cluster.cache.put(kind, found):
                changed(key)
    for key in cluster.cache.keep_only(kind, namespace, names):
        changed(key)
    return version


def _take(cache: Cache, kind: str, what: str, told: Object) -> JobKey | None:
    if what == "BOOKMARK":
        return None
    return cache.remove(kind, told) if what == "DELETED" else cache.put(kind, told)
