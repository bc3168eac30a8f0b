"""The operator's work queue: one entry and one worker a key, growing delays, nothing lost, nothing unbounded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from operators.queue import FIRST_DELAY_S, LONGEST_DELAY_S, WorkQueue, delay_after, drawn_apart
from tests.virtual import in_virtual_time

Visit = Callable[[str], Awaitable[float | None]]


@contextlib.asynccontextmanager
async def working(queue: WorkQueue[str], visit: Visit, workers: int = 4) -> AsyncIterator[None]:
    task = asyncio.create_task(queue.work(visit, workers))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


class Recorder:
    """Remembers visits; each lasts until `release`, if `held`."""

    def __init__(self, held: bool = False) -> None:
        self.seen: list[str] = []
        self.gate = asyncio.Event()
        self.now: dict[str, int] = {}
        self.most_at_once: dict[str, int] = {}
        if not held:
            self.gate.set()

    async def __call__(self, key: str) -> float | None:
        self.seen.append(key)
        self.now[key] = self.now.get(key, 0) + 1
        self.most_at_once[key] = max(self.most_at_once.get(key, 0), self.now[key])
        await self.gate.wait()
        self.now[key] -= 1
        return None


@in_virtual_time
async def test_a_key_that_is_added_many_times_is_worked_on_once() -> None:
    queue, visit = WorkQueue[str](), Recorder()
    for _ in range(100):
        queue.add("a")
    assert queue.depth() == 1
    async with working(queue, visit):
        await settle()
    assert visit.seen == ["a"]


@in_virtual_time
async def test_keys_are_worked_on_in_the_order_in_which_they_came() -> None:
    queue, visit = WorkQueue[str](), Recorder()
    for key in ("c", "a", "b", "c"):
        queue.add(key)
    async with working(queue, visit, workers=1):
        await settle()
    assert visit.seen == ["c", "a", "b"]


@in_virtual_time
async def test_what_is_urgent_overtakes_echoes_but_for_every_eighth() -> None:
    queue, visit = WorkQueue[str](), Recorder()
    for number in range(4):
        queue.add(f"echo-{number}", delay_s=0.1)
    await asyncio.sleep(1)
    for number in range(10):
        queue.add(f"new-{number}")
    async with working(queue, visit, workers=1):
        await settle()
    assert visit.seen[:9] == [*(f"new-{number}" for number in range(7)), "echo-0", "new-7"]
    assert len(visit.seen) == len(set(visit.seen)) == 14


@in_virtual_time
async def test_an_echo_that_waits_becomes_urgent_by_an_urgent_call() -> None:
    queue, visit = WorkQueue[str](), Recorder()
    for key in ("a", "b"):
        queue.add(key, delay_s=0.1)
    await asyncio.sleep(1)
    queue.add("b")
    assert queue.depth() == 2
    async with working(queue, visit, workers=1):
        await settle()
    assert visit.seen == ["b", "a"]


@in_virtual_time
async def test_an_appointment_made_while_a_key_is_worked_on_does_not_double_one_that_follows_at_once() -> None:
    queue, visit = WorkQueue[str](), Recorder(held=True)
    queue.add("a")
    async with working(queue, visit):
        await settle()
        queue.add("a", delay_s=5)
        queue.add("a")
        visit.gate.set()
        await asyncio.sleep(20)
    assert visit.seen == ["a", "a"]


@in_virtual_time
async def test_no_two_workers_have_the_same_key_and_a_key_added_meanwhile_comes_again() -> None:
    queue, visit = WorkQueue[str](), Recorder(held=True)
    queue.add("a")
    async with working(queue, visit):
        await settle()
        queue.add("a")
        queue.add("a")
        await settle()
        assert visit.seen == ["a"]
        visit.gate.set()
        await settle()
    assert visit.seen == ["a", "a"]
    assert visit.most_at_once == {"a": 1}


@in_virtual_time
async def test_different_keys_are_worked_on_at_once_and_never_more_than_there_are_workers() -> None:
    queue, visit = WorkQueue[str](), Recorder(held=True)
    for key in "abcdef":
        queue.add(key)
    async with working(queue, visit, workers=3):
        await settle()
        assert visit.seen == ["a", "b", "c"]
        assert queue.depth() == 3
        visit.gate.set()
        await settle()
    assert visit.seen == list("abcdef")


@in_virtual_time
async def test_a_failing_key_comes_back_later_and_later_and_holds_up_nobody() -> None:
    queue = WorkQueue[str]()
    times: list[float] = []
    others: list[str] = []

    async def visit(key: str) -> float | None:
        if key == "bad":
            times.append(asyncio.get_running_loop().time())
            raise ValueError("no")
        others.append(key)
        return None

    queue.add("bad")
    async with working(queue, visit, workers=1):
        await asyncio.sleep(0.02)
        queue.add("good")
        await settle()
        assert others == ["good"]
        await asyncio.sleep(FIRST_DELAY_S * 3.3)
    assert len(times) == 3
    first, second = times[1] - times[0], times[2] - times[1]
    assert 0.7 * FIRST_DELAY_S < first < second


@pytest.mark.parametrize("jitter", [0.0, 1.0])
def test_delays_double_up_to_a_limit(jitter: float) -> None:
    delays = [delay_after(failures, jitter) for failures in (1, 2, 3, 10, 1000)]
    share = 1 - 0.25 * jitter
    assert delays == [
        share * each for each in (FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S)
    ]


@pytest.mark.parametrize(("delay", "found"), [(600, 599), (10, 9), (2, 2), (0, 0)])
def test_appointments_are_up_to_a_second_earlier_but_for_short_ones(delay: float, found: float) -> None:
    assert (drawn_apart(delay, 0.0), drawn_apart(delay, 1.0)) == (delay, found)


@in_virtual_time
async def test_keys_that_come_together_do_not_come_back_together() -> None:
    queue, times = WorkQueue[str](), dict[str, float]()

    async def visit(key: str) -> float | None:
        times[key] = asyncio.get_running_loop().time()
        return 10.0

    for number in range(100):
        queue.add(str(number))
    async with working(queue, visit):
        await asyncio.sleep(100)
    phases = sorted(when % 10 for when in times.values())
    assert phases[-1] - phases[0] > 2


@in_virtual_time
async def test_after_a_success_the_first_delay_is_the_shortest_again() -> None:
    queue = WorkQueue[str]()
    outcomes = iter([ValueError, ValueError, None, ValueError, None])
    times: list[float] = []

    async def visit(key: str) -> float | None:
        times.append(asyncio.get_running_loop().time())
        if (outcome := next(outcomes)) is not None:
            raise outcome("no")
        return None

    queue.add("a")
    async with working(queue, visit):
        await asyncio.sleep(FIRST_DELAY_S * 3.3)
        assert len(times) == 3
        queue.add("a")
        await asyncio.sleep(FIRST_DELAY_S * 1.2)
    assert len(times) == 5
    assert times[4] - times[3] < FIRST_DELAY_S * 1.1


@in_virtual_time
async def test_echoes_do_not_cut_a_failures_delay_short_but_news_does() -> None:
    queue, seen = WorkQueue[str](), []

    async def visit(key: str) -> float | None:
        seen.append(key)
        raise ValueError("no")

    queue.add("a")
    async with working(queue, visit):
        await settle()
        for _ in range(5):
            queue.add("a", 0.01)
        await asyncio.sleep(FIRST_DELAY_S / 2)
        assert seen == ["a"]
        queue.add("a")
        await settle()
        assert seen == ["a", "a"]


@in_virtual_time
async def test_a_key_that_is_added_while_its_failing_visit_runs_still_waits() -> None:
    queue, gate, seen = WorkQueue[str](), asyncio.Event(), []

    async def visit(key: str) -> float | None:
        seen.append(key)
        await gate.wait()
        raise ValueError("no")

    queue.add("a")
    async with working(queue, visit):
        await settle()
        queue.add("a")
        gate.set()
        await settle()
    assert seen == ["a"]


@in_virtual_time
async def test_a_visit_says_when_it_wants_the_key_back() -> None:
    queue, seen = WorkQueue[str](), []

    async def visit(key: str) -> float | None:
        seen.append(key)
        return 0.05 if len(seen) == 1 else None

    queue.add("a")
    async with working(queue, visit):
        await settle()
        assert seen == ["a"]
        await asyncio.sleep(0.1)
    assert seen == ["a", "a"]


@in_virtual_time
async def test_of_two_appointments_the_earlier_stands() -> None:
    queue, visit = WorkQueue[str](), Recorder()
    queue.add("a", 30.0)
    queue.add("a", 0.05)
    queue.add("a", 20.0)
    queue.add("b", 30.0)
    queue.add("b")
    async with working(queue, visit):
        await settle()
        assert visit.seen == ["b"]
        await asyncio.sleep(0.1)
    assert visit.seen == ["b", "a"]


@in_virtual_time
async def test_what_it_keeps_is_bounded_by_the_number_of_keys() -> None:
    queue, visit = WorkQueue[str](), Recorder()
    for number in range(10_000):
        queue.add(f"key-{number % 7}", delay_s=number % 3)
    assert queue.depth() + len(queue._later) <= 7
    async with working(queue, visit):
        await settle()
    assert not queue.busy


@in_virtual_time
async def test_it_is_stalled_when_keys_wait_and_none_is_finished() -> None:
    queue, visit = WorkQueue[str](), Recorder(held=True)
    assert queue.stalled_s() == 0
    queue.add("a")
    async with working(queue, visit):
        await asyncio.sleep(0.1)
        assert 0.09 < queue.stalled_s() < 1
        visit.gate.set()
        await settle()
        assert queue.stalled_s() == 0


@in_virtual_time
async def test_a_long_queue_that_moves_is_not_stalled() -> None:
    queue = WorkQueue[str]()

    async def visit(key: str) -> float | None:
        await asyncio.sleep(0.02)
        return None

    for number in range(10):
        queue.add(str(number))
    async with working(queue, visit, workers=1):
        await asyncio.sleep(0.15)
        assert queue.depth() > 0
        assert queue.stalled_s() < 0.1


@in_virtual_time
async def test_the_time_that_a_key_waited_is_told() -> None:
    waited: list[float] = []
    queue, visit = WorkQueue[str](waited.append), Recorder()
    queue.add("a")
    await asyncio.sleep(0.05)
    async with working(queue, visit):
        await settle()
    assert len(waited) == 1
    assert waited[0] >= 0.05


@in_virtual_time
async def test_what_is_not_urgent_has_half_of_the_workers_at_most() -> None:
    queue, visit = WorkQueue[str](), Recorder(held=True)
    for number in range(6):
        queue.add(f"echo-{number}", delay_s=0.1 + number / 100)
    async with working(queue, visit, workers=4):
        await asyncio.sleep(1)
        assert visit.seen == ["echo-0", "echo-1"]
        for number in range(3):
            queue.add(f"new-{number}")
        await settle()
        assert visit.seen[2:] == ["new-0", "new-1"]
        visit.gate.set()
        await asyncio.sleep(1)
    assert len(visit.seen) == len(set(visit.seen)) == 9


@in_virtual_time
@pytest.mark.parametrize(("lasts", "rest"), [(0.1, 1.0), (3.0, 3.0)])
async def test_after_a_visit_a_key_rests_as_long_as_that_took_from_all_but_news(lasts: float, rest: float) -> None:
    queue, ends = WorkQueue[str](spacing_s=1.0), list[float]()
    begins: list[float] = []

    async def visit(key: str) -> float | None:
        begins.append(asyncio.get_running_loop().time())
        await asyncio.sleep(lasts)
        ends.append(asyncio.get_running_loop().time())
        return None

    queue.add("a")
    async with working(queue, visit):
        await asyncio.sleep(lasts / 2)
        queue.add("a", 0.01)  # while it is worked on
        await asyncio.sleep(lasts / 2 - 0.001)
        queue.add("a", 0.2)  # due when it rests
        await asyncio.sleep(rest + lasts + 0.1)
        queue.add("a", 0.2)  # while it rests
        queue.add("a")  # news
        await asyncio.sleep(lasts + 0.1)
    assert [begin - end for begin, end in zip(begins[1:], ends, strict=False)] == pytest.approx([rest, 0.099], abs=2e-3)
