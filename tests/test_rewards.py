import asyncio
import os
import pathlib
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from pipeline.config import RewardConfig
from pipeline.prompts.generated import Generator
from pipeline.rewards.model import Unready
from pipeline.rewards.scorer import MOST_PROCESSES, Score, Scorer
from tests.conftest import SkippingClock

SAMPLE: dict[str, Any] = {
    "prompt": "2 + 2 =",
    "completion": "4",
    "answer": "4",
    "messages": None,
    "set": "sums",
    "index": 7,
    "prompt_ids": [1, 2],
    "completion_ids": [3],
    "tokens": 1,
    "finish_reason": "stop",
    "max_new_tokens": 100,
    "entry": None,
}


def function(folder: pathlib.Path, body: str, name: str = "mine", **options: Any) -> RewardConfig:
    """A reward whose file rewards.py has `body` as the function f's."""
    source = "import os, sys, time\ndef f(prompt, completion, answer, **metadata):\n" + textwrap.indent(body, "    ")
    (folder / f"{name}.py").write_text(source)
    return RewardConfig(name=name, function=f"{name}.py:f", folder=str(folder), **options)


async def score(*configs: RewardConfig, **changes: Any) -> Score:
    async with Scorer(configs) as scorer:
        return await scorer.score({**SAMPLE, **changes})


async def test_a_function_receives_prompt_completion_answer_and_metadata(tmp_path: pathlib.Path) -> None:
    body = "assert (prompt, completion, answer) == ('2 + 2 =', '4', '4')\n"
    body += "return 2 + metadata['index'] + metadata['level'] + metadata['bonus']"
    scored = await score(function(tmp_path, body, parameters={"bonus": 0.5}), level=3)
    assert scored == Score(12.5, {"mine": 12.5}, None)


async def test_why_a_reward_fails_is_in_the_log_at_once_and_then_rarely(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Scorer([function(tmp_path, "return metadata['answers']", on_error="zero")]) as scorer:
        for _ in range(9):
            await scorer.score(SAMPLE)
    told = "reward mine failed on {} samples so far, on this one: KeyError: 'answers' (mine.py, line 3)"
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("pipeline")]
    assert ours == [told.format(count) for count in (1, 2, 4, 8)]


async def test_a_function_receives_a_generated_item_as_far_as_json_goes(tmp_path: pathlib.Path) -> None:
    item = {"question": "?", "metadata": {"board": {(0, 1): "x"}, "size": (3, 4), "when": {1, 2}}}
    body = "metadata = metadata['item']['metadata']\n"
    body += "assert metadata == {'board': {}, 'size': [3, 4], 'when': '{1, 2}'}, metadata\nreturn 1"
    assert (await score(function(tmp_path, body), item=item)).total == 1.0


async def test_a_function_may_name_only_what_it_wants(tmp_path: pathlib.Path) -> None:
    (tmp_path / "short.py").write_text("def f(tokens, completion):\n    return len(completion) + tokens / 10\n")
    assert (await score(RewardConfig(name="a", function="short.py:f", folder=str(tmp_path)))).total == 1.1


async def test_a_function_may_live_in_an_installed_module() -> None:
    config = RewardConfig(name="a", function="pipeline.rewards.length:score", parameters={"buffer": 20})
    assert (await score(config, tokens=90)).total == -0.5


async def test_the_total_is_the_weighted_sum(tmp_path: pathlib.Path) -> None:
    one = function(tmp_path, "return 1", "one", weight=0.5)
    two = function(tmp_path, "return True", "two", weight=-2.0)
    assert await score(one, two) == Score(-1.5, {"one": 1.0, "two": 1.0}, None)


async def test_a_process_reward_gives_a_number_and_rewards_of_tokens_which_are_summed_and_weighted(
    tmp_path: pathlib.Path,
) -> None:
    one = function(tmp_path, "return 0.5, [(2, 1.0), (0, -0.25), (2, 0.5)]", "one", weight=2.0)
    two = function(tmp_path, "return 1, ((2, 4),)", "two", weight=-0.25)
    scored = await score(one, two, completion_ids=[7, 8, 9])
    assert scored == Score(3.5 - 1.25, {"one": 1.75, "two": 5.0}, None, {0: -0.5, 2: 2.0})
    assert list(scored.steps) == [0, 2]


async def test_rewards_of_tokens_cannot_be_rescaled(tmp_path: pathlib.Path) -> None:
    scored = await score(function(tmp_path, "return 0.5, [(0, 1.0)]", clip=5.0))
    assert scored.invalid == (
        "reward mine: returned rewards of tokens, which cannot be rescaled: leave out normalize and clip"
    )


FAILURES = {
    "return 1.0, [(1, 0.5)]": "returned a reward for token 1; the completion has 1",
    "return 1.0, [(-1, 0.5)]": "returned a reward for token -1; the completion has 1",
    "return 1.0, [(0, float('nan'))]": "returned nan",
    "return 1.0, [0.5]": "returned '(1.0, [0.5])', neither a number nor (number, [(position, reward), …])",
    "return 1.0, 2.0, 3.0": "returned '(1.0, 2.0, 3.0)', neither a number nor (number, [(position, reward), …])",
    "return 1.0, [(0, 'high')]": "returned str 'high', not a number",
    "raise ValueError('no such thing')": "ValueError: no such thing (mine.py, line 3)",
    "return float('nan')": "returned nan",
    "return float('-inf')": "returned -inf",
    "return 'high'": "returned str 'high', not a number",
    "return None": "returned NoneType",
    "return 10 ** 400": "OverflowError",
    "sys.exit(0)": "SystemExit",
    "os._exit(9)": "its process died (exit code 9)",
    "os.kill(os.getpid(), 11)": "its process died (signal 11)",
    "return bytearray(8 << 30)": "MemoryError",
    "time.sleep(60)": "no answer within 1 s",
}


@pytest.mark.parametrize(("body", "reason"), FAILURES.items())
async def test_a_reward_that_fails_costs_that_sample_alone_and_says_why(
    tmp_path: pathlib.Path, body: str, reason: str
) -> None:
    # A good sample, too, needs a process and its turn, for which a busy machine takes its time.
    limit = {"timeout_s": 1.0} if "sleep" in body else {}
    config = function(tmp_path, f"if completion == 'bad': {body}\nreturn 1", **limit)
    async with Scorer([config]) as scorer:
        samples = [{**SAMPLE, "completion": text} for text in ("good", "bad", "good", "good")]
        scores = await asyncio.gather(*map(scorer.score, samples))
    assert [scored.total for scored in scores] == [1.0, None, 1.0, 1.0]
    assert scores[1].invalid is not None
    assert scores[1].invalid.startswith(f"reward mine: {reason}")
    assert scorer.failures == {"mine": 1}


async def test_a_reward_that_forks_and_returns_twice_gives_each_sample_its_own_score(tmp_path: pathlib.Path) -> None:
    config = function(tmp_path, "os.fork()\nreturn float(len(completion))")
    async with Scorer([config]) as scorer:
        scores = [await scorer.score({**SAMPLE, "completion": "x" * n}) for n in (1, 2, 3, 4)]
    assert [scored.total for scored in scores] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("line", ['{"score": 5.0}', '{"id": "0", "score": 5.0}', "what?", "5", "[" * 5000, "9" * 5000])
async def test_a_reply_that_a_function_forges_costs_that_sample_alone(tmp_path: pathlib.Path, line: str) -> None:
    body = "import contextlib\nif completion == 'bad':\n    for number in range(3, 20):\n"
    body += f"        with contextlib.suppress(OSError): os.write(number, {line.encode() + bytes([10])!r})\n"
    config = function(tmp_path, body + "return float(len(completion))")
    async with Scorer([config]) as scorer:
        scores = [await scorer.score({**SAMPLE, "completion": text}) for text in ("x", "bad", "xx", "xxxx")]
    assert [scored.total for scored in scores] == [1.0, None, 2.0, 4.0]
    assert scores[1].invalid == "reward mine: its process gave a reply that does not belong to this sample"


@pytest.mark.parametrize("then", ["return 1", "time.sleep(60)", "os._exit(9)"])
async def test_a_daemon_that_a_function_leaves_behind_does_not_hold_up_the_end(
    tmp_path: pathlib.Path, then: str
) -> None:
    body = f"if os.fork() == 0:\n    os.setsid()\n    open('{tmp_path}/pid', 'w').write(str(os.getpid()))\n"
    config = function(tmp_path, f"{body}    time.sleep(60)\n    os._exit(0)\ntime.sleep(0.1)\n{then}", timeout_s=1.0)
    started = time.monotonic()
    try:
        scored = await score(config)
        assert time.monotonic() - started < 30
        assert scored.total == 1.0 or scored.invalid == "reward mine: no answer within 1 s"
    finally:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        os.kill(int((tmp_path / "pid").read_text()), 9)


async def test_a_process_that_cannot_be_started_costs_the_sample(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    async with Scorer([function(tmp_path, "if completion == 'bad': os._exit(9)\nreturn 1")]) as scorer:
        await scorer.score({**SAMPLE, "completion": "bad"})
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "create_subprocess_exec", refuse)
            refused = await scorer.score(SAMPLE)
        assert refused.invalid is not None
        assert "Too many open files" in refused.invalid
        assert (await scorer.score(SAMPLE)).total == 1.0


async def test_an_exception_that_cannot_be_printed_is_told_by_its_type(tmp_path: pathlib.Path) -> None:
    body = "class Odd(Exception):\n    def __str__(self): raise RuntimeError\nraise Odd"
    scored = await score(function(tmp_path, body))
    assert scored.invalid == "reward mine: Odd: (it cannot be printed) (mine.py, line 5)"


async def test_an_argument_that_nothing_offers_is_named_with_what_is(tmp_path: pathlib.Path) -> None:
    (tmp_path / "wants.py").write_text("def f(completion, solution, style='x'):\n    return len(solution)\n")
    config = RewardConfig(name="a", function="wants.py:f", folder=str(tmp_path))
    scored = await score(config)
    assert scored.invalid is not None
    assert scored.invalid.startswith("reward a: there is no argument solution; name one of answer, completion,")
    assert (await score(config, solution="abc")).total == 3.0


async def test_an_argument_that_no_sample_can_have_is_refused_before_any_is_scored(tmp_path: pathlib.Path) -> None:
    (tmp_path / "wants.py").write_text("def f(completion, solution, scale):\n    return 1.0\n")
    config = RewardConfig(name="a", function="wants.py:f", folder=str(tmp_path), parameters={"scale": 2})
    refusal = "^reward a: wants.py:f: there is no argument solution; name one of answer, completion, scale, or give"
    with pytest.raises(ValueError, match=refusal):
        async with Scorer([config], {"completion", "answer"}):
            pass
    async with Scorer([config], {"completion", "answer", "solution"}) as scorer:
        assert (await scorer.score({"completion": "x", "completion_ids": [1], "solution": "y"})).total == 1.0


async def test_a_failed_reward_counts_as_zero_where_that_is_asked_for(tmp_path: pathlib.Path) -> None:
    fails = function(tmp_path, "raise ValueError", "fails", on_error="zero", weight=5.0)
    works = function(tmp_path, "return 2", "works")
    assert await score(fails, works) == Score(2.0, {"fails": 0.0, "works": 2.0}, None)


async def test_what_a_function_prints_does_not_disturb_its_answers(tmp_path: pathlib.Path) -> None:
    body = (
        "print('{\"score\": 100}'); os.write(1, b'noise\\n'); os.system('echo more'); return 1 + len(sys.stdin.read())"
    )
    assert (await score(function(tmp_path, body))).total == 1.0


async def test_a_hanging_function_ends_with_all_that_it_started(tmp_path: pathlib.Path) -> None:
    body = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    body += f"open('{tmp_path}/pid', 'w').write(str(child.pid))\ntime.sleep(60)"
    scored = await score(function(tmp_path, body, timeout_s=3.0))
    assert scored.invalid == "reward mine: no answer within 3 s"
    await assert_ended(int((tmp_path / "pid").read_text()))


async def test_closing_the_scorer_ends_its_processes(tmp_path: pathlib.Path) -> None:
    scored = await score(function(tmp_path, "return os.getpid()"))
    assert scored.total is not None
    await assert_ended(int(scored.total))


async def assert_ended(pid: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"process {pid} lives on")


async def test_a_cancelled_score_does_not_leave_its_answer_to_the_next(tmp_path: pathlib.Path) -> None:
    config = function(tmp_path, "time.sleep(0.3 if completion == 'slow' else 0); return len(completion)")
    async with Scorer([config]) as scorer:
        slow = asyncio.create_task(scorer.score({**SAMPLE, "completion": "slow"}))
        await asyncio.sleep(0.1)
        slow.cancel()
        scores = [await scorer.score({**SAMPLE, "completion": "x" * n}) for n in range(5)]
    assert [scored.total for scored in scores] == [0, 1, 2, 3, 4]


async def test_a_function_sees_none_of_the_runs_secrets(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("MILES_STATUS_TOKEN", "hush")
    body = "return float('hush' in repr(os.environ) or os.getppid() == int(os.environ.get('X', 0)))"
    assert (await score(function(tmp_path, body))).total == 0.0


async def test_a_function_cannot_fill_the_disk(tmp_path: pathlib.Path) -> None:
    body = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    body += f"open('{tmp_path}/big', 'wb').write(bytes(100 << 20))"
    scored = await score(function(tmp_path, body))
    assert scored.invalid is not None
    assert "File too large" in scored.invalid


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": "mine.py:g"}, "has no function or class g"),
        ({"function": "gone.py:f"}, "there is no file"),
        ({"function": "no.such.module:f"}, "No module named 'no'"),
        ({"function": "mine.py"}, "neither module:function nor file.py:function"),
        ({"function": "broken.py:f"}, "SyntaxError"),
        ({"library": "maths"}, "library 'maths' is none of environment, generator, math-verify, length"),
        ({}, "give exactly one of"),
        ({"function": "mine.py:f", "endpoint": "http://x"}, "give exactly one of"),
        ({"model": "http://x", "parameters": {"form": "xml"}}, "use chat, text or ids"),
    ],
)
async def test_a_reward_that_cannot_be_loaded_is_refused_at_the_start(
    tmp_path: pathlib.Path, options: dict[str, Any], message: str
) -> None:
    function(tmp_path, "return 1")
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match="reward r") as caught:
        await score(RewardConfig(name="r", folder=str(tmp_path), **options))
    assert message in str(caught.value)


async def test_two_rewards_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="distinct"):
        await score(function(tmp_path, "return 1"), function(tmp_path, "return 1"))


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0)])
async def test_length_penalises_the_last_tokens_before_the_limit(tokens: int, expected: float) -> None:
    from pipeline.rewards.length import score as penalty

    assert penalty(tokens=tokens, max_new_tokens=100, buffer=20) == expected
    assert penalty(tokens=tokens, max_new_tokens=100, buffer=20, factor=2.0) == 2 * expected


MATHEMATICS = [
    (r"so it is $\frac{1}{2}$.", "0.5", 1.0),
    (r"The answer is \boxed{12}", "12", 1.0),
    ("The answer is 12.", "12", 1.0),
    ("The answer is 13.", "12", 0.0),
    (r"$x^2 - 1$", "$(x-1)(x+1)$", 1.0),
    ("I do not know", "12", 0.0),
    ("", "12", 0.0),
]


async def test_math_verify_compares_as_mathematics() -> None:
    async with Scorer([RewardConfig(name="correct", library="math-verify", timeout_s=30)]) as scorer:
        for completion, answer, expected in MATHEMATICS:
            scored = await scorer.score({**SAMPLE, "completion": completion, "answer": answer})
            assert scored.total == expected, completion


async def test_math_verify_without_a_reference_costs_the_sample() -> None:
    scored = await score(RewardConfig(name="correct", library="math-verify", timeout_s=30), answer=None)
    assert scored.invalid is not None
    assert "no answer to compare with" in scored.invalid


@pytest.mark.parametrize("parameters", [[{"library": "generator", "name": "own"}], []])
async def test_a_generated_prompt_is_scored_by_its_own_scorer_which_is_the_default(
    parameters: list[dict[str, Any]],
) -> None:
    configs = [RewardConfig(timeout_s=30, **options) for options in parameters]
    entry = Generator("sums", "reasoning-gym/chain_sum", {}, 0, held_out=False).entry(3)
    async with Scorer(configs) as scorer:
        samples = [f" {entry.answer}\n", f"<answer>1</answer> no, <answer>{entry.answer}</answer>", "what?"]
        scores = [
            (await scorer.score({**SAMPLE, "completion": text, "entry": entry.encoded()})).total for text in samples
        ]
    assert scores[0] == 1.0
    assert scores[1] == 1.0
    assert scores[2] is not None
    assert scores[2] < 0.1


async def test_a_prompt_from_a_file_has_no_scorer_of_its_own() -> None:
    scored = await score(RewardConfig(name="own", library="generator", timeout_s=30))
    assert scored.invalid is not None
    assert "set sums is not generated" in scored.invalid


Reply = Callable[[web.Request], Awaitable[web.Response]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Reply], Awaitable[str]]]:
    runners = []

    async def start(reply: Reply) -> str:
        application = web.Application()
        application.router.add_post("/{path:.*}", reply)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_an_endpoint_receives_the_sample_and_replies_its_score(serve: Callable[[Reply], Awaitable[str]]) -> None:
    received = []

    async def reply(request: web.Request) -> web.Response:
        received.append(await request.json())
        return web.json_response({"score": 0.25, "steps": [[0, -1.5]]})

    url = await serve(reply)
    assert await score(RewardConfig(name="far", endpoint=url), level=3) == Score(-1.25, {"far": -1.25}, None, {0: -1.5})
    assert {key: received[0][key] for key in ("prompt", "completion", "answer")} == {
        "prompt": "2 + 2 =",
        "completion": "4",
        "answer": "4",
    }
    assert received[0]["metadata"]["level"] == 3


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, '{"points": 1}', 'the reply is not {"score": number}'),
        (200, '{"score": "1"}', 'the reply is not {"score": number}'),
        (200, '{"score": NaN}', "returned nan"),
        (200, '{"score": 1, "steps": 5}', "the steps of the reply are not [[position, reward], …]"),
        (200, '{"score": 1, "steps": [[0.5, 1]]}', "the steps of the reply are not [[position, reward], …]"),
        (200, '{"score": 1, "steps": [[1, 1]]}', "returned a reward for token 1; the completion has 1"),
        (200, "what?", "Expecting value"),
        (200, '{"score": ' + "9" * 400 + "}", "not a usable number"),
        (200, '{"score": ' + "9" * 5000 + "}", "integer string conversion"),
        (200, "[" * 100_000, "recursion"),
        (500, "broken", "answered 500: broken"),
    ],
)
async def test_an_endpoint_that_gives_no_score_costs_the_sample(
    serve: Callable[[Reply], Awaitable[str]], status: int, body: str, reason: str
) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    scored = await score(RewardConfig(name="far", endpoint=await serve(reply)))
    assert scored.invalid is not None
    assert reason in scored.invalid


async def test_an_endpoint_that_hangs_or_is_gone_costs_the_sample_in_bounded_time(
    serve: Callable[[Reply], Awaitable[str]],
) -> None:
    async def reply(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    hanging = await score(RewardConfig(name="far", endpoint=await serve(reply), timeout_s=0.3))
    assert hanging.invalid == "reward far: no answer within 0.3 s"
    gone = await score(RewardConfig(name="far", endpoint="http://127.0.0.1:9/", timeout_s=0.3))
    assert gone.invalid is not None
    assert gone.invalid.startswith("reward far: no answer within 0.3 s: http://127.0.0.1:9/: Cannot connect")


async def test_a_sample_survives_that_its_reward_server_is_replaced(
    serve: Callable[[Reply], Awaitable[str]],
) -> None:
    answers = [503, 429, None, 200]

    async def reply(request: web.Request) -> web.Response:
        status = answers.pop(0)
        if status is None:
            assert request.transport
            request.transport.abort()
            return web.Response()
        return web.json_response({"score": 2.0}, status=status)

    scored = await score(RewardConfig(name="far", endpoint=await serve(reply), timeout_s=60.0))
    assert (scored.total, answers) == (2.0, [])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (
            "chat",
            {"messages": [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]},
        ),
        ("text", {"input": "2 + 2 =4"}),
        ("ids", {"input": [[1, 2, 3]]}),
    ],
)
async def test_a_reward_model_gives_its_raw_logit(
    serve: Callable[[Reply], Awaitable[str]], form: str, expected: dict[str, Any]
) -> None:
    received = []

    async def reply(request: web.Request) -> web.Response:
        received.append((request.path, await request.json()))
        return web.json_response({"data": [{"index": 0, "data": [-1.5]}]})

    config = RewardConfig(name="rm", model=await serve(reply), parameters={"form": form})
    assert (await score(config)).total == -1.5
    assert received == [("/pooling", {**expected, "task": "classify", "use_activation": False})]


@pytest.fixture
async def starting() -> AsyncIterator[tuple[str, list[int]]]:
    """(URL of a reward model's server, what its /health answers, the last of them for ever)."""
    answers = [503, 503, 200]

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=answers.pop(0) if len(answers) > 1 else answers[0])

    application = web.Application()
    application.router.add_get("/health", health)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", answers
    await runner.cleanup()


async def test_a_reward_model_is_waited_for_until_its_server_has_loaded_it(starting: tuple[str, list[int]]) -> None:
    url, answers = starting
    said = []

    class Told(SkippingClock):
        async def sleep(self, seconds: float) -> None:
            said.append(scorer.waiting_for)
            await super().sleep(seconds)

    async with Scorer([RewardConfig(name="judge", model=url)]) as scorer:
        await scorer.until_ready(Told())
        assert (said, answers, scorer.waiting_for) == (["reward model judge"] * 2, [200], None)


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9"], ids=["never ready", "nobody there"])
async def test_a_reward_model_that_never_comes_up_is_not_waited_for_longer_than_it_may_take(
    starting: tuple[str, list[int]], url: str | None
) -> None:
    starting[1][:] = [503]
    async with Scorer([RewardConfig(name="judge", model=url or starting[0])]) as scorer:
        with pytest.raises(Unready, match=r"reward model judge: http.* is not ready after 600 s"):
            await scorer.until_ready(SkippingClock())


async def test_samples_are_scored_by_a_bounded_number_of_processes(tmp_path: pathlib.Path) -> None:
    config = function(tmp_path, "time.sleep(0.01); return os.getpid()")
    async with Scorer([config]) as scorer:
        scores = await asyncio.gather(*(scorer.score(SAMPLE) for _ in range(40)))
    assert 1 <= len({scored.total for scored in scores}) <= min(MOST_PROCESSES, os.cpu_count() or 1)
