"""The status port of trainer rank 0, over HTTP: its report, and the request to checkpoint and stop.

A trainer is not trusted: its answer is bounded and reduced to the fields that are known. Passes never wait long for
one: an answer that is late is used by a later pass, and one that does not answer is left alone for a while.
"""

import asyncio
import dataclasses
import hashlib
import hmac
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from operators.containers import STATUS_PORT
from operators.figures import one_line
from operators.names import attempt_of
from operators.observed import Object

LARGEST = 64 << 10  # bytes of an answer
LONGEST = 200  # characters of a text in it, and entries of a map
LONGEST_KEY = 48  # characters, so that the name of every metric in the status is whole
LARGEST_NUMBER = 1e15
AT_ONCE = 64  # requests
FRESH_S = 3.0
"""An answer is used again for so long."""
SILENT_S = 30.0
"""After no answer, so long until the next question."""
MOST = 10_000  # pods whose last answer is kept
REPORT_PREFIX = "report: "
"""Of the line in the termination message; see pipeline.termination."""
URL = f"http://{{ip}}:{STATUS_PORT}"

Report = Mapping[str, Any]


@dataclasses.dataclass
class Question:
    asked: float
    task: "asyncio.Task[Report | None]"


class StatusPort:
    """`url`: where a pod answers, with {ip}, {namespace} and {name} of the pod. `timeout_s`: for a whole answer."""

    def __init__(self, url: str = URL, timeout_s: float = 2.0):
        self.url, self.timeout_s = url, timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._questions: OrderedDict[str, Question] = OrderedDict()  # pod's uid → the last one

    async def close(self) -> None:
        for question in self._questions.values():
            question.task.cancel()
        if self._session is not None:
            await self._session.close()

    async def report(self, pods: Sequence[Object]) -> Report | None:
        """What rank 0 among `pods` tells; None where none runs, or it does not answer (in time)."""
        pod = rank_0(pods)
        if pod is None:
            return None
        question = self._questions.get(pod["metadata"]["uid"])
        if question is None or self._is_old(question):
            question = self._ask(pod)
        await asyncio.wait({question.task}, timeout=self.timeout_s / 4)
        return question.task.result() if question.task.done() else None

    async def pause(self, pods: Sequence[Object], token: str) -> None:
        """Ask rank 0 to checkpoint and stop; the caller sees by its report, or by its end, whether it does."""
        pod = rank_0(pods)
        if pod is None:
            return
        try:
            headers = {"Authorization": f"Bearer {token}"}
            async with self._limit, self._http().post(f"{self._url(pod)}/pause", headers=headers):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass

    def _ask(self, pod: Object) -> Question:
        uid = pod["metadata"]["uid"]
        question = Question(asyncio.get_running_loop().time(), asyncio.create_task(self._read(self._url(pod))))
        self._questions[uid] = question
        self._questions.move_to_end(uid)
        while len(self._questions) > MOST:
            self._questions.popitem(last=False)
        return question

    def _is_old(self, question: Question) -> bool:
        if not question.task.done():
            return False
        silent = question.task.cancelled() or question.task.result() is None
        return asyncio.get_running_loop().time() - question.asked > (SILENT_S if silent else FRESH_S)

    async def _read(self, url: str) -> Report | None:
        try:
            async with self._limit, self._http().get(f"{url}/status", allow_redirects=False) as response:
                if response.status != 200:
                    return None
                data = b""
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > LARGEST:
                        return None
                return checked(json.loads(data))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError):
            return None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self.timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def _url(self, pod: Object) -> str:
        ip = pod["status"]["podIP"]
        metadata = pod["metadata"]
        return self.url.format(
            ip=f"[{ip}]" if ":" in ip else ip, namespace=metadata["namespace"], name=metadata["name"]
        )


def last_words(pods: Sequence[Object]) -> Report | None:
    """The report that rank 0 of a trainer that is complete has left in its termination message, if it has."""
    for pod in filter(_is_rank_0, pods):
        for container in pod.get("status", {}).get("containerStatuses") or ():
            ended = container.get("state", {}).get("terminated") or {}
            if ended.get("exitCode") == 0:
                for line in str(ended.get("message") or "").splitlines():
                    if line.startswith(REPORT_PREFIX):
                        return _parsed(line.removeprefix(REPORT_PREFIX))
    return None


def _parsed(text: str) -> Report | None:
    try:
        return checked(json.loads(text))
    except (ValueError, RecursionError):
        return None


def rank_0(pods: Sequence[Object]) -> Object | None:
    """The running pod of the newest trainer attempt's first node."""
    running = [pod for pod in pods if _is_rank_0(pod) and pod.get("status", {}).get("phase") == "Running"]
    running = [pod for pod in running if pod["status"].get("podIP")]
    return max(running, key=lambda pod: attempt_of(pod["metadata"]), default=None)


def _is_rank_0(pod: Object) -> bool:
    labels = pod["metadata"].get("labels", {})
    index = labels.get("batch.kubernetes.io/job-completion-index")
    return bool(labels.get("miles.dev/component") == "trainer" and index == "0")


def bearer(key: bytes, uid: str) -> str:
    """Who knows it may pause the trainer of the job with this uid."""
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest()


def checked(told: Any) -> Report | None:
    """The known fields of the answer whose values are what they should be; None where it is no report at all."""
    if not isinstance(told, Mapping) or not isinstance(told.get("phase"), str):
        return None
    found = {name: kind(told.get(name)) for name, kind in FIELDS.items()}
    return {name: value for name, value in found.items() if value is not None}


def _text(value: Any) -> str | None:
    return one_line(value, LONGEST) if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < LARGEST_NUMBER else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and _number(value) is not None and value >= 0 else None


def _version(value: Any) -> list[int] | None:
    """(term, step) of a policy."""
    counts = [_count(item) for item in value] if isinstance(value, list) and len(value) == 2 else [None]
    return [count for count in counts if count is not None] if None not in counts else None


def _map(kind: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any] | None]:
    def checked_map(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        items = list(value.items())[:LONGEST]
        found = {(_text(name) or "?")[:LONGEST_KEY]: kind(item) for name, item in items}
        return {name: item for name, item in found.items() if item is not None}

    return checked_map


FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "phase": _text,
    "waiting_for": _text,
    "losses": _text,
    "step": _count,
    "checkpoint_step": _count,
    "version": _version,
    "eta_s": _number,
    "reward_mean": _number,
    "reward": _map(_number),
    "evaluation": _map(_map(_number)),
    "tokens_per_s": _map(_number),
    "waits": _map(_number),
    "store": _map(_count),
    "samples_per_s": _number,
    "staleness_mean": _number,
    "staleness_max": _number,
    "queue_groups": _number,
    "response_length_mean": _number,
}
"""What a report may say (pipeline.lead writes it)."""
