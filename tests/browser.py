"""A page in headless Chromium, driven over its DevTools protocol: what a person would see, asserted.

    async with browser.page(path.as_uri(), width=1400, dark=True) as page:
        assert await page.evaluate("document.title") == "…"
        assert page.errors == []

`errors` holds uncaught exceptions, console errors and refusals of the page's security policy, `requests` every URL that
the page asked for. Chromium is a system package (Debian: chromium).
"""

import asyncio
import base64
import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

DEADLINE_S = 40.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def executable() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = asyncio.Event()
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited. Raises RuntimeError if it throws."""
        arguments = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = await self.call("Runtime.evaluate", **arguments)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", script))
        return answer["result"].get("value")

    async def screenshot(self, path: str | os.PathLike[str], full: bool = False) -> None:
        """A PNG of the window, or with `full` of the whole page."""
        picture = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=full, **await self._clip(full)
        )
        pathlib.Path(path).write_bytes(base64.b64decode(picture["data"]))

    async def move(self, x: float, y: float) -> None:
        """The mouse to a place in the window, in CSS pixels."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], DEADLINE_S)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def listen(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(event["exceptionDetails"]["exception"].get("description", "exception"))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(argument.get("value")) for argument in event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.errors.append(event["entry"]["text"])

    async def _clip(self, full: bool) -> dict[str, Any]:
        if not full:
            return {}
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


@contextlib.asynccontextmanager
async def page(url: str, width: int = 1400, height: int = 1000, dark: bool = False) -> AsyncIterator[Page]:
    """Open `url` in a window of `width` × `height` CSS pixels; everything is ended and removed afterwards."""
    async with _chromium() as endpoint, aiohttp.ClientSession() as session:
        async with session.put(f"{endpoint}/json/new?about:blank") as answer:
            target = (await answer.json())["webSocketDebuggerUrl"]
        async with session.ws_connect(target, max_msg_size=0) as socket:
            opened = Page(socket)
            listener = asyncio.create_task(opened.listen())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await opened.call(f"{domain}.enable")
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await opened.call("Emulation.setEmulatedMedia", features=[scheme])
            window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            await opened.call("Emulation.setDeviceMetricsOverride", **window)
            opened.loaded.clear()
            await opened.call("Page.navigate", url=url)
            await asyncio.wait_for(opened.loaded.wait(), DEADLINE_S)
            # Two frames later the page has been laid out and drawn.
            await opened.evaluate(
                "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
            )
            yield opened
        await asyncio.wait_for(listener, DEADLINE_S)


@contextlib.asynccontextmanager
async def _chromium() -> AsyncIterator[str]:
    program = executable()
    assert program is not None, "no chromium on this machine"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            *FLAGS,
            f"--user-data-dir={folder}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{await _port(pathlib.Path(folder, 'DevToolsActivePort'), process)}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _port(file: pathlib.Path, process: asyncio.subprocess.Process) -> int:
    """The port that Chromium chose; raises TimeoutError if it does not say so in time."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            assert process.returncode is None, f"chromium ended with {process.returncode}"
            if file.exists() and (lines := file.read_text().split()):
                return int(lines[0])
            await asyncio.sleep(0.05)
