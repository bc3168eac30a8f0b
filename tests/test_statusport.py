"""What the operator asks of trainer rank 0, and what it makes of the answer."""

import asyncio
import contextlib
import json
import pathlib
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from operators import statusport
from operators.statusport import StatusPort, bearer, checked, last_words, rank_0

REPORT = {"phase": "training", "step": 3, "tokens_per_s": {"trained": 1.5}, "version": [0, 3]}


def pod(index: str = "0", attempt: int = 0, phase: str = "Running", ip: str | None = "10.0.0.1", **labels: str) -> Any:
    own = {
        "miles.dev/component": "trainer",
        "miles.dev/attempt": str(attempt),
        "batch.kubernetes.io/job-completion-index": index,
    }
    metadata = {"name": f"sums-trainer-{attempt}-{index}", "namespace": "team", "uid": f"{attempt}-{index}"}
    return {"metadata": metadata | {"labels": own | labels}, "status": {"phase": phase, "podIP": ip}}


class Trainer:
    """Answers as scripted."""

    def __init__(self) -> None:
        self.answer: Any = web.json_response(REPORT)
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked: list[str] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path} {request.headers.get('Authorization', '')}".strip())
        await self.answers.wait()
        return self.answer() if callable(self.answer) else web.json_response(self.answer)


@pytest.fixture
async def trainer() -> AsyncIterator[Trainer]:
    trainer = Trainer()
    trainer.answer = REPORT
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", trainer.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    trainer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield trainer
    await runner.cleanup()


@contextlib.asynccontextmanager
async def asking(url: str, timeout_s: float = 20.0) -> AsyncIterator[StatusPort]:
    port = StatusPort(url, timeout_s)
    try:
        yield port
    finally:
        await port.close()


async def test_the_report_of_rank_0_is_read_once_for_passes_close_together(trainer: Trainer) -> None:
    async with asking(trainer.url) as port:
        assert await port.report([pod("1"), pod("0")]) == REPORT
        assert await port.report([pod("0")]) == REPORT
    assert trainer.asked == ["GET /status"]


async def test_the_url_names_the_pod(trainer: Trainer) -> None:
    async with asking(trainer.url + "/{namespace}/{name}/{ip}") as port:
        assert await port.report([pod()]) == REPORT
    assert trainer.asked == ["GET /team/sums-trainer-0-0/10.0.0.1/status"]


def test_an_ipv6_address_is_put_in_brackets() -> None:
    assert StatusPort()._url(pod(ip="fd00::1")) == "http://[fd00::1]:8001"


@pytest.mark.parametrize(
    "pods",
    [
        [],
        [pod("1")],
        [pod(phase="Pending")],
        [pod(phase="Failed")],
        [pod(ip=None)],
        [pod(**{"miles.dev/component": "rollout"})],
    ],
)
async def test_where_rank_0_does_not_run_nobody_is_asked(trainer: Trainer, pods: list[Any]) -> None:
    async with asking(trainer.url) as port:
        assert await port.report(pods) is None
    assert trainer.asked == []


def test_of_two_attempts_the_newer_is_asked() -> None:
    found = rank_0([pod(attempt=9), pod(attempt=10), pod(attempt=2)])
    assert found is not None
    assert found["metadata"]["name"] == "sums-trainer-10-0"


async def test_a_late_answer_holds_up_no_pass_and_is_used_by_the_next(trainer: Trainer) -> None:
    trainer.answers.clear()
    async with asking(trainer.url, timeout_s=4.0) as port:
        assert await port.report([pod()]) is None
        trainer.answers.set()
        assert await port.report([pod()]) == REPORT
    assert trainer.asked == ["GET /status"]


async def test_one_that_does_not_answer_is_left_alone_for_a_while(trainer: Trainer) -> None:
    trainer.answers.clear()
    async with asking(trainer.url, timeout_s=0.5) as port:
        await port.report([pod()])
        await asyncio.sleep(0.5)
        for _ in range(5):
            assert await port.report([pod()]) is None
    assert trainer.asked == ["GET /status"]


async def test_where_nothing_listens_there_is_no_report() -> None:
    async with asking("http://127.0.0.1:9") as port:
        assert await port.report([pod()]) is None
        await port.pause([pod()], "secret")


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(text="x" * (statusport.LARGEST + 1)),
        lambda: web.Response(text=json.dumps(REPORT), status=500),
        lambda: web.Response(text="not json"),
        lambda: web.Response(text="[" * 50_000),
        lambda: web.Response(text="[]"),
        lambda: web.Response(text='{"step": 3}'),
        lambda: web.Response(status=302, headers={"Location": "http://169.254.169.254/"}),
    ],
    ids=["too large", "failed", "no JSON", "too deep", "a list", "no phase", "a redirect"],
)
async def test_what_is_no_report_is_none(trainer: Trainer, answer: Any) -> None:
    trainer.answer = answer
    async with asking(trainer.url) as port:
        assert await port.report([pod()]) is None
    assert len(trainer.asked) == 1


WRONG = {
    "step": ["abc", -5, 10**30, 1.5, True, None],
    "checkpoint_step": ["x", -1],
    "version": [{"a": 1}, 7, [1], [1, 2, 3], [1, "2"], [-1, 0]],
    "eta_s": [[1], float("nan"), float("inf")],
    "reward_mean": [10**400, -(10**400), "1", True],
    "reward": [[1], 3, "x"],
    "evaluation": [3, [{"a": 1}]],
    "tokens_per_s": [[3], 3],
    "store": [[3], 3],
    "waiting_for": [3, ["a"]],
    "unknown": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_field_of_a_report_that_is_not_what_it_should_be_is_left_out(name: str, value: Any) -> None:
    assert checked({"phase": "training", name: value}) == {"phase": "training"}


def test_what_the_operator_reads_of_a_report_comes_through() -> None:
    sources = [source.read_text() for source in pathlib.Path(statusport.__file__).parent.glob("*.py")]
    read = {name for source in sources for name in re.findall(r'report(?: or \{\}\))?\.get\("(\w+)"', source)}
    assert {"phase", "losses", "waiting_for", "checkpoint_step", "store"} <= read
    assert read <= set(statusport.FIELDS)


def test_entries_of_a_map_that_are_no_numbers_are_left_out() -> None:
    told = {"phase": "training", "reward": {"a": 1, "b": "2", "c": float("nan")}, "evaluation": {"a": 3, "b": {"d": 4}}}
    assert checked(told) == {"phase": "training", "reward": {"a": 1}, "evaluation": {"b": {"d": 4}}}


def test_counts_of_the_store_are_whole_and_not_negative() -> None:
    told = {"phase": "training", "store": {"bytes": -1, "objects": "2", "both": 1.5, "few": 3}}
    assert checked(told) == {"phase": "training", "store": {"few": 3}}


def test_texts_and_maps_of_a_report_are_short_and_can_be_printed() -> None:
    found = checked(
        {
            "phase": "p" * 10_000,
            "waiting_for": "a\x1b[2Jb\ud800",
            "reward": {"k" * 10_000: 1, "\ud800": 2} | {f"part{number}": 1 for number in range(10_000)},
        }
    )
    assert found is not None
    assert found["phase"] == "p" * (statusport.LONGEST - 1) + "…"
    assert found["waiting_for"] == "a?[2Jb?"
    assert len(found["reward"]) == statusport.LONGEST
    assert list(found["reward"])[:2] == ["k" * statusport.LONGEST_KEY, "?"]


def test_a_label_that_is_no_number_stands_for_the_first_attempt() -> None:
    found = rank_0([pod(attempt=1), pod(attempt=0, **{"miles.dev/attempt": "boom"})])
    assert found is not None
    assert found["metadata"]["name"] == "sums-trainer-1-0"


async def test_a_pause_is_asked_for_with_the_token(trainer: Trainer) -> None:
    async with asking(trainer.url) as port:
        await port.pause([pod("1"), pod("0")], "secret")
    assert trainer.asked == ["POST /pause Bearer secret"]


def test_the_token_follows_from_key_and_uid_alone() -> None:
    assert bearer(b"key", "uid-1") == bearer(b"key", "uid-1")
    assert len({bearer(b"key", "uid-1"), bearer(b"key", "uid-2"), bearer(b"other", "uid-1")}) == 3
    assert len(bearer(b"key", "uid-1")) == 64


def ended(message: str, code: int = 0, **place: Any) -> Any:
    found = pod(**place, phase="Succeeded" if code == 0 else "Failed")
    found["status"]["containerStatuses"] = [{"state": {"terminated": {"exitCode": code, "message": message}}}]
    return found


def test_a_trainer_that_is_complete_leaves_its_last_report_behind() -> None:
    line = f"a warning\nreport: {json.dumps(REPORT)}\n"
    assert last_words([pod(index="1"), ended(line)]) == REPORT


@pytest.mark.parametrize(
    "pods",
    [
        [],
        [pod()],
        [ended("")],
        [ended("report: {")],
        [ended("report: [1]")],
        [ended(f"report: {json.dumps(REPORT)}", code=1)],
        [ended(f"report: {json.dumps(REPORT)}", index="1")],
    ],
)
def test_anything_else_in_a_termination_message_is_no_report(pods: Any) -> None:
    assert last_words(pods) is None
