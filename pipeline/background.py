"""One explicit thread with an event loop: the store is spoken to while the training thread computes."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Coroutines handed in from any thread run in its loop, in the order in which they were handed in."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="store", daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for its result; whatever is awaited in it must have a deadline of its own."""
        return self.submit(coroutine).result()

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs and end the thread."""
        try:
            self.submit(_cancel_others()).result(timeout_s)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout_s)
            if not self.thread.is_alive():
                self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
