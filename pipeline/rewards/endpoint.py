"""A reward behind a URL: POST {prompt, completion, answer, metadata}, which replies {"score": number} and may add
"steps": [[position, reward], …]."""

import asyncio
from typing import Any

import aiohttp

from pipeline.rewards.values import Value, parsed
from pipeline.usercode.process import SampleError, encoded

CONCURRENT_REQUESTS = 32
JSON = {"Content-Type": "application/json"}


class Endpoint:
    def __init__(self, name: str, url: str, timeout_s: float) -> None:
        self.name, self._url = name, url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=self._timeout)

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def score(self, arguments: dict[str, Any]) -> Value:
        """What was replied; raises SampleError where there is none in time."""
        metadata = {key: value for key, value in arguments.items() if key not in ("prompt", "completion", "answer")}
        body = {key: arguments[key] for key in ("prompt", "completion", "answer")}
        return parsed(await self.post(self._url, {**body, "metadata": metadata}))

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        assert self._session, "start() comes first"
        async with self._slots:
            try:
                async with self._session.post(url, data=encoded(body), headers=JSON) as response:
                    if response.status != 200:
                        text = " ".join((await response.text()).split())
                        raise SampleError(f"{url} answered {response.status}: {text[:200]}")
                    return await response.json(content_type=None)
            except TimeoutError:
                raise SampleError(f"no answer within {self._timeout.total:g} s") from None
            except (aiohttp.ClientError, ValueError, RecursionError) as error:
                raise SampleError(f"{url}: {error}") from None
