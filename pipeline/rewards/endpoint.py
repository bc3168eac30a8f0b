"""A reward behind a URL: POST {prompt, completion, answer, metadata}, which replies {"score": number} and may add
"steps": [[position, reward], …].

Scoring changes nothing at the server, so a server that is gone or has too much to do, as it is while it is replaced, is
asked again until the reward's timeout is over.
"""

import asyncio
import random
import time
from typing import Any

import aiohttp

from pipeline.rewards.values import Value, parsed
from pipeline.usercode.process import SampleError, encoded

CONCURRENT_REQUESTS = 32
JSON = {"Content-Type": "application/json"}
BUSY = (429, 502, 503, 504)
"""Answers of a server, or of what stands before it, that is to be asked again."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class _Again(Exception):
    """No answer yet; says why."""


class Endpoint:
    def __init__(self, name: str, url: str, timeout_s: float) -> None:
        self.name, self._url = name, url
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def score(self, arguments: dict[str, Any]) -> Value:
        """What was replied; raises SampleError where there is none in time."""
        metadata = {key: value for key, value in arguments.items() if key not in ("prompt", "completion", "answer")}
        body = {key: arguments[key] for key in ("prompt", "completion", "answer")}
        return parsed(await self.post(self._url, {**body, "metadata": metadata}))

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        data, pause = encoded(body), FIRST_PAUSE_S
        async with self._slots:
            deadline = time.monotonic() + self._timeout_s
            while True:
                try:
                    return await self._answer(url, data, deadline - time.monotonic())
                except _Again as again:
                    if time.monotonic() + pause > deadline:
                        raise SampleError(f"no answer within {self._timeout_s:g} s: {again}") from None
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _answer(self, url: str, data: bytes, limit_s: float) -> Any:
        assert self._session, "start() comes first"
        limit = aiohttp.ClientTimeout(total=max(limit_s, 0.001))  # 0 would be none
        try:
            async with self._session.post(url, data=data, headers=JSON, timeout=limit) as response:
                if response.status == 200:
                    return await response.json(content_type=None)
                said = f"{url} answered {response.status}: {' '.join((await response.text()).split())[:200]}"
        except TimeoutError:
            raise SampleError(f"no answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Again(f"{url}: {error}") from None
        except (aiohttp.ClientError, ValueError, RecursionError) as error:
            raise SampleError(f"{url}: {error}") from None
        raise (_Again if response.status in BUSY else SampleError)(said)
