"""A proxy before a real S3 server that breaks what passes through it, by seed or by script.

    async with FaultProxy(server.endpoint, by_seed(7, rate=0.1)) as proxy:
        storage = open_storage("s3://miles/run", proxy.endpoint)

The Host header travels unchanged, so requests keep their signatures. Every connection carries one request, which is
read whole before it is passed on; so is its answer.
"""

import asyncio
import collections
import contextlib
import dataclasses
import email.utils
import random
import re
import socket
import struct
import time
import urllib.parse
from collections.abc import Callable, Collection

LATENCY_S = 0.5
SKEW_S = 3600.0
LONGEST_HEAD = 1 << 20

FAULTS = {
    "latency": "the answer is late",
    "500": "refused: an internal error",
    "503": "refused: slow down",
    "429": "refused: too many requests",
    "409": "refused: a rival is still writing (conditional writes)",
    "reset": "the connection is reset before the request arrives",
    "stall": "the request never arrives, and nothing comes back until the client gives up",
    "torn request": "the connection is reset when half of the body has arrived (writes)",
    "lost response": "the request takes effect, then the connection is reset",
    "torn body": "the answer breaks off half way (answers with a body)",
    "bit flip": "one bit of an object's bytes is another one for its reader (reads)",
    "stale list": "a listing is the one before, or empty if there was none (listings)",
    "clock skew": "the server's Date, and the time at which the object changed, are an hour off",
}
CODES = {
    "500": ("Internal Server Error", "InternalError"),
    "503": ("Service Unavailable", "SlowDown"),
    "429": ("Too Many Requests", "TooManyRequests"),
    "409": ("Conflict", "ConditionalRequestConflict"),
}
NO_OBJECTS = (
    b'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
)


@dataclasses.dataclass(frozen=True)
class Request:
    head: bytes
    """Request line and headers, with the empty line behind them."""
    body: bytes
    whole: bool
    """The client did not break off."""

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode()

    @property
    def target(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def lists(self) -> bool:
        return "list-type" in urllib.parse.parse_qs(urllib.parse.urlsplit(self.target).query)

    def admits(self, fault: str) -> bool:
        """Whether `fault` can befall such a request."""
        if fault == "409":
            return re.search(rb"\r\nif-(none-)?match:", self.head.lower()) is not None and self.method == "PUT"
        needs = {
            "torn request": len(self.body) > 1,
            "torn body": self.method == "GET",
            "bit flip": self.method == "GET" and not self.lists,
            "stale list": self.lists,
        }
        return needs.get(fault, True)


Choose = Callable[[Request], str | None]
"""The fault that befalls a request, None for none."""


def by_seed(seed: int, rate: float, kinds: Collection[str] = tuple(FAULTS)) -> Choose:
    """A share `rate` of the requests fails, each in one of the `kinds` that it admits."""
    randomness = random.Random(seed)

    def choose(request: Request) -> str | None:
        able = [kind for kind in kinds if request.admits(kind)]
        return randomness.choice(able) if able and randomness.random() < rate else None

    return choose


def first(times: int, kind: str, method: str = "", target: str = "") -> Choose:
    """The first `times` requests that admit `kind`, of this method and with `target` in their path or query."""
    left = times

    def choose(request: Request) -> str | None:
        nonlocal left
        if not left or method not in ("", request.method) or target not in request.target or not request.admits(kind):
            return None
        left -= 1
        return kind

    return choose


class FaultProxy:
    """`choose` may be replaced at any time. `requests` counts by method, `faults` by kind those that took place."""

    def __init__(self, upstream: str, choose: Choose = lambda request: None, seed: int = 0):
        place = urllib.parse.urlsplit(upstream)
        assert place.hostname
        assert place.port
        self._upstream = (place.hostname, place.port)
        self.choose = choose
        self.requests: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self._random = random.Random(seed)
        self._listings: dict[str, bytes] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "FaultProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=LONGEST_HEAD, backlog=1024)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._serve(reader, writer)
        finally:
            self._serving.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await _receive(reader)
        self.requests[request.method] += 1
        fault = self.choose(request) if request.whole else "torn request"
        if fault:
            self.faults[fault] += 1
        if fault in CODES:
            writer.write(_refusal(fault))
        elif fault == "reset":
            _reset(writer)
        elif fault == "stall":
            await reader.read()
        else:
            await self._pass_on(request, fault, writer)

    async def _pass_on(self, request: Request, fault: str | None, writer: asyncio.StreamWriter) -> None:
        stop = len(request.body) // 2 if fault == "torn request" and request.whole else None
        answer = await self._ask(request, stop)
        if fault == "latency":
            await asyncio.sleep(LATENCY_S)
        if fault == "lost response" or not answer:
            _reset(writer)
            return
        head, _, body = answer.partition(b"\r\n\r\n")
        if request.lists and b" 200 " in head.split(b"\r\n", 1)[0]:
            before = self._listings.get(request.target, _answer("200 OK", NO_OBJECTS))
            self._listings[request.target] = answer
            answer = before if fault == "stale list" else answer
        elif fault == "bit flip" and body:
            answer = head + b"\r\n\r\n" + _flipped(body, self._random.randrange(8 * len(body)))
        if fault == "clock skew":
            answer = _skewed(answer, self._random.choice([-SKEW_S, SKEW_S]))
        if fault == "torn body":
            answer = answer[: len(answer) - len(body) // 2 - 1]
        writer.write(answer)
        await writer.drain()

    async def _ask(self, request: Request, stop: int | None = None) -> bytes:
        """The server's answer; with `stop` it gets only so many bytes of the body and no time to answer."""
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(request.head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + request.body[:stop])
            await writer.drain()
            if stop is not None or not request.whole:
                _reset(writer)
                return b""
            return await reader.read()
        finally:
            writer.close()


async def _receive(reader: asyncio.StreamReader) -> Request:
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower(), "obstore sends lengths"
    length = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
    try:
        return Request(head, await reader.readexactly(int(length[1]) if length else 0), True)
    except asyncio.IncompleteReadError as error:
        return Request(head, error.partial, False)


def _reset(writer: asyncio.StreamWriter) -> None:
    peer: socket.socket = writer.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _refusal(kind: str) -> bytes:
    reason, code = CODES[kind]
    return _answer(f"{kind} {reason}", f"<Error><Code>{code}</Code><Message>{FAULTS[kind]}</Message></Error>".encode())


def _answer(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return (
        f"{head}Date: {email.utils.formatdate(time.time(), usegmt=True)}\r\nConnection: close\r\n\r\n".encode() + body
    )


def _flipped(body: bytes, bit: int) -> bytes:
    changed = bytearray(body)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _skewed(answer: bytes, seconds: float) -> bytes:
    def shift(match: re.Match[bytes]) -> bytes:
        moved = email.utils.parsedate_to_datetime(match[2].decode()).timestamp() + seconds
        return match[1] + email.utils.formatdate(moved, usegmt=True).encode()

    head, _, body = answer.partition(b"\r\n\r\n")
    return re.sub(rb"(\r\n(?:Date|Last-Modified): )([^\r]+)", shift, head) + b"\r\n\r\n" + body
