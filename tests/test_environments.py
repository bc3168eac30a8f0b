"""pipeline.environments: episodes between a scripted policy and real environment processes."""

import asyncio
import dataclasses
import math
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from pipeline import batching, codec, experience, metrics
from pipeline.algorithms.samples import Samples
from pipeline.clock import SystemClock
from pipeline.config import EnvironmentConfig, RewardConfig
from pipeline.experience import RolloutGroup
from pipeline.inference import VLLM, Completion, EngineLost, Sampling
from pipeline.prompts import Prompt
from pipeline.prompts.generated import Generator
from pipeline.sampling import Sampler
from pipeline.tokenizer import Tokenizer
from pipeline.versions import Version
from tests.environments import sampling_with, source
from tests.fake_vllm import FakeVLLM
from tests.test_inference import listening, weights
from tests.test_rewards import assert_ended
from tests.test_tokenizer import folder as tokenizer_folder

START, END = 2, 3  # <|im_start|>, <|im_end|>
SAMPLING = Sampling(temperature=1.0, max_new_tokens=60)
PROMPT = Prompt(7, "sums", "2+3+4?", "9", {"level": 3})


class Policy:
    """An engine that says the given texts, a character a token; logprobs are −1, −2 … within each turn."""

    def __init__(self, tokenizer: Tokenizer, *texts: str, forever: bool = False) -> None:
        self.version: Version | None = Version(1, 4)
        self.tokenizer, self.texts, self.forever = tokenizer, list(texts), forever
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(self, prompt_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append((prompt_ids, sampling))
        text = self.texts[0] if self.forever else self.texts.pop(0)
        if text == "lost":
            raise EngineLost("gone")
        ids = [*ids_of(self.tokenizer, text), END][: sampling.max_new_tokens]
        finish = "stop" if ids[-1] == END else "length"
        return [Completion(ids, [-float(i + 1) for i in range(len(ids))], text, finish)] * n

    async def load(self, weights: Any) -> None: ...

    async def close(self) -> None: ...


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer._tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def tokenizer(tmp_path: pathlib.Path) -> Tokenizer:
    (tmp_path / "model").mkdir()
    return Tokenizer(tokenizer_folder(tmp_path / "model", config={"eos_token_id": END}))


async def group_of(sampler: Sampler, samples: int = 1, prompt: Prompt = PROMPT) -> RolloutGroup:
    return await sampler.score(await sampler.generate(prompt, samples, SAMPLING))


CALCULATOR = """\
if completion.startswith('add '):
    return [{'role': 'tool', 'content': str(sum(map(int, completion.split()[1:])))}], -0.25, False
return None, float(completion == self.answer), True
"""
REMEMBER = "def reset(self, answer):\n    self.answer = answer\n"


async def test_a_three_turn_tool_episode_equals_what_was_computed_by_hand(
    tmp_path: pathlib.Path, tokenizer: Tokenizer
) -> None:
    engine = Policy(tokenizer, "add 2 3", "add 5 4", "9")
    async with sampling_with(source(tmp_path, CALCULATOR, REMEMBER), engine, tokenizer) as sampler:
        group = await group_of(sampler)
    (sample,) = group.rollouts

    def ids(text: str) -> list[int]:
        return ids_of(tokenizer, text)

    prompt = [0, START, *ids("user\n2+3+4?"), END, *ids("\n"), START, *ids("assistant\n")]
    calls = [[*ids("add 2 3"), END], [*ids("add 5 4"), END], [*ids("9"), END]]
    tools = [
        [*ids("\n"), START, *ids(f"tool\n{value}"), END, *ids("\n"), START, *ids("assistant\n")] for value in (5, 9)
    ]
    whole = [*calls[0], *tools[0], *calls[1], *tools[1], *calls[2]]
    assert (group.prompt_ids, group.prompt) == (prompt, "2+3+4?")
    assert sample.completion_ids == whole
    assert [asked for asked, _ in engine.asked] == [
        prompt,
        [*prompt, *calls[0], *tools[0]],
        [*prompt, *calls[0], *tools[0], *calls[1], *tools[1]],
    ], "ids that were sampled are the ids that the next turn saw"

    mask = [True] * 8 + [False] * len(tools[0]) + [True] * 8 + [False] * len(tools[1]) + [True] * 2
    logprobs = [-float(n) for turn in (8, 8, 2) for n in range(1, turn + 1)]
    assert sample.mask.tolist() == mask
    assert [math.isnan(value) for value in sample.logprobs] == [not inside for inside in mask]
    assert [value for value in sample.logprobs if not math.isnan(value)] == logprobs
    assert (sample.reward, sample.rewards, sample.invalid) == (0.5, {"environment": 0.5}, None)
    assert [(turn.observation, turn.text) for turn in sample.turns] == [
        (False, "add 2 3"),
        (True, "5"),
        (False, "add 5 4"),
        (True, "9"),
        (False, "9"),
    ]
    assert (sample.completion, sample.finish_reason) == ("9", "stop")
    assert [turn.reward for turn in sample.turns] == [-0.25, None, -0.25, None, 1.0]
    check_training(group, prompt, whole, mask, logprobs)


def check_training(
    group: RolloutGroup, prompt: list[int], whole: list[int], mask: list[bool], logprobs: list[float]
) -> None:
    """What the shard and the packed micro-batch make of the sample."""
    table = codec.decode(codec.encode([group]))
    (back,) = experience.rows(table, 0, 1)[0].rollouts
    assert back.turns == group.rollouts[0].turns
    batch = batching._batch(table, np.zeros(1, np.int64))
    assert (batch.lengths.tolist(), batch.turns.tolist()) == ([18], [3])
    assert metrics.of_turns(batch.turns, np.diff(batch.completions.offsets) - batch.lengths) == {
        "episode/turns_mean": 3.0,
        "episode/turns_max": 3.0,
        "episode/observation_length_mean": float(len(whole) - 18),
    }
    assert metrics.of_responses(batch.lengths, batch.truncated)["response_length/mean"] == 18.0
    assert batch.credits is not None
    assert batch.credits.tolist() == [0.0] * 7 + [-0.25] + [0.0] * 7 + [-0.25] + [0.0, 1.0]
    check_returns(batch)
    ((part,),) = batching.pack(batch, batch.valid, ranks=1, max_tokens=1000)
    assert part.input_ids.tolist() == [*prompt, *whole[:-1]]
    assert part.position_ids.tolist() == list(range(len(prompt) + len(whole) - 1))
    inside = [position for position, sampled in enumerate(mask) if sampled]
    assert part.target.tolist() == [whole[position] for position in inside]
    assert part.source.tolist() == [len(prompt) + position - 1 for position in inside]
    assert part.sampled.tolist() == logprobs
    assert part.column.tolist() == list(range(18))
    assert part.mask.all()


async def test_over_http_each_turn_is_asked_with_the_ids_so_far(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    fake = FakeVLLM()
    config = source(tmp_path, "return f\"not {completion}\", 0.5, metadata['turn'] == 3")
    async with listening(fake) as url:
        engine = VLLM(url, SystemClock())
        await engine.load(weights(tmp_path, 5))
        async with sampling_with(config, engine, tokenizer) as sampler:
            samples = (await group_of(sampler, 2)).rollouts
        await engine.close()
    asked = [body for path, body in fake.calls if path == "/v1/completions"]
    assert len(asked) == 6
    prompt = tokenizer.encode(PROMPT.content)
    reply = [END, *ids_of(tokenizer, "\n"), START, *ids_of(tokenizer, "user\nnot 5"), END]
    reply += [*ids_of(tokenizer, "\n"), START, *ids_of(tokenizer, "assistant\n")]
    for sample in samples:
        assert sample.completion_ids == [15, 2, *reply, 15, 2, *reply, 15, 2]
        assert (sample.reward, sample.spans) == (1.5, [(0, Version(1, 5))])
    turns = [prompt, [*prompt, 15, 2, *reply], [*prompt, 15, 2, *reply, 15, 2, *reply]]
    assert sorted((body["prompt"] for body in asked), key=len) == [ids for ids in turns for _ in samples]
    assert {(len(body["prompt"]), body["max_tokens"]) for body in asked} == {
        (len(ids), left) for ids, left in zip(turns, (60, 58, 56), strict=True)
    }


def check_returns(batch: batching.Batch) -> None:
    """Rewards −.25, −.25 and 1 after the 8th, 16th and 18th token that the policy sampled; observations are skipped."""
    samples = Samples(batch.rewards, batch.valid, batch.groups, batch.lengths, credits=batch.credits)
    assert samples.discounted(samples.token_rewards, 1.0).tolist() == [0.5] * 8 + [0.75] * 8 + [1.0] * 2
    halved = samples.discounted(samples.token_rewards, 0.5)
    assert halved[15:].tolist() == [-0.25 + 0.25, 0.5, 1.0]
    assert halved[7] == -0.25 + 0.5**8 * -0.25 + 0.5**10
    assert samples.scores.tolist() == [0.5]
    uncredited = dataclasses.replace(samples, credits=None)
    assert uncredited.token_rewards.tolist() == [0.0] * 17 + [0.5]


FAILURES = {
    "raise ValueError('no such move')": "ValueError: no such move (mine.py, line 6)",
    "os._exit(9)": "its process died",
    "os.kill(os.getpid(), 9)": "its process died",
    "time.sleep(60)": "no answer within 2 s",
    "return 'go on', 1.0": "step returned \"('go on', 1.0)\", not (observation, reward, done)",
    "return None, 0.0, False": "step returned no observation, and the episode is not done",
    "return 5, 0.0, False": "returned '5', neither text nor messages {role, content} of others",
    "return [{'role': 'assistant', 'content': 'I'}], 0.0, False": "returned \"[{'role': 'assistant'",
    "return 'x', 'high', False": "returned str 'high', not a number",
    "raise SystemExit": "SystemExit",
}


@pytest.mark.parametrize(("body", "reason"), FAILURES.items())
async def test_an_environment_that_fails_costs_that_sample_alone_and_says_why(
    tmp_path: pathlib.Path, tokenizer: Tokenizer, body: str, reason: str
) -> None:
    config = source(tmp_path, f"if completion == 'bad':\n    {body}\nreturn None, 1.0, True")
    if "sleep" in body:
        config = config.model_copy(update={"timeout_s": 2.0})
    async with sampling_with(config, Policy(tokenizer, "good", "bad", "good"), tokenizer) as sampler:
        samples = (await group_of(sampler, 3)).rollouts
    (bad,) = (sample for sample in samples if sample.turns[0].text == "bad")
    assert bad.invalid is not None
    assert bad.invalid.startswith(f"environment: {reason}")
    assert bad.turns, "people can read how far it came"
    assert [sample.reward for sample in samples if sample is not bad] == [1.0, 1.0]


async def test_a_reward_that_is_no_finite_number_costs_the_sample(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    config = source(tmp_path, "return None, float('nan'), True")
    async with sampling_with(config, Policy(tokenizer, "x"), tokenizer) as sampler:
        (sample,) = (await group_of(sampler)).rollouts
    assert sample.invalid == "reward environment: returned nan"


async def test_a_lost_server_loses_the_whole_group_and_ends_its_episodes(
    tmp_path: pathlib.Path, tokenizer: Tokenizer
) -> None:
    config = source(tmp_path, f"open('{tmp_path}/' + str(os.getpid()), 'w')\nreturn 'go on', 0.0, False")
    async with sampling_with(config, Policy(tokenizer, "a", "b", "lost"), tokenizer) as sampler:
        with pytest.raises(EngineLost):
            await group_of(sampler, 2)
        for path in tmp_path.glob("[0-9]*"):
            await assert_ended(int(path.name))


LIMITS: list[tuple[dict[str, Any], int, list[int], str]] = [
    ({"max_turns": 2}, 1000, [60, 54], "turns"),
    ({}, 1000, [60, 54, 48, 42, 36, 30, 24, 18, 12, 6], "sampled tokens"),
    ({"max_tokens_per_turn": 4, "max_turns": 3}, 1000, [4, 4, 4], "tokens of a turn"),
    ({}, 110, [60, 54, 24], "the model's context"),
]


@pytest.mark.parametrize(("changes", "context", "budgets", "limit"), LIMITS, ids=[row[-1] for row in LIMITS])
async def test_an_episode_ends_at_each_limit_as_truncated_and_its_rewards_count(
    tmp_path: pathlib.Path, tokenizer: Tokenizer, changes: dict[str, Any], context: int, budgets: list[int], limit: str
) -> None:
    config = source(tmp_path, "return 'more', 1.0, False").model_copy(update=changes)
    engine = Policy(tokenizer, "12345", forever=True)
    async with sampling_with(config, engine, tokenizer, context) as sampler:
        (sample,) = (await group_of(sampler)).rollouts
    assert [sampling.max_new_tokens for _, sampling in engine.asked] == budgets
    assert (sample.finish_reason, sample.reward, sample.invalid) == ("length", float(len(budgets)), None)
    assert not sample.turns[-1].observation
    assert len(engine.asked[0][0]) + len(sample.completion_ids) <= context


async def test_an_episode_that_takes_too_long_costs_the_sample(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    config = source(tmp_path, "time.sleep(0.1)\nreturn 'more', 1.0, False")
    config = config.model_copy(update={"episode_timeout_s": 0.3, "max_turns": 1000})
    async with sampling_with(config, Policy(tokenizer, "", forever=True), tokenizer) as sampler:
        (sample,) = (await group_of(sampler)).rollouts
    assert sample.invalid == "environment: the episode was not over within 0.3 s"


async def test_a_turn_that_the_trainer_cannot_use_costs_the_sample(
    tmp_path: pathlib.Path, tokenizer: Tokenizer
) -> None:
    class Odd(Policy):
        async def generate(self, prompt_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
            return [Completion([10**6], [-1.0], "?", "stop")]

    async with sampling_with(source(tmp_path, "return None, 1.0, True"), Odd(tokenizer), tokenizer) as sampler:
        (sample,) = (await group_of(sampler)).rollouts
    assert sample.invalid == "environment: token id 1000000 is outside the vocabulary of 105"


OPENING = "def reset(self, level, prompt):\n    return [{'role': 'user', 'content': f'level {level}'}]\n"


async def test_what_reset_returns_follows_the_prompt(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    config = source(tmp_path, "return None, float(len(metadata['messages'])), True", OPENING)
    async with sampling_with(config, Policy(tokenizer, "a", "b"), tokenizer) as sampler:
        group = await group_of(sampler, 2)
    assert group.prompt == "user: 2+3+4?\n\nuser: level 3"
    assert group.prompt_ids == tokenizer.encode(
        [{"role": "user", "content": "2+3+4?"}, {"role": "user", "content": "level 3"}]
    )
    assert [sample.reward for sample in group.rollouts] == [3.0, 3.0]


async def test_samples_whose_beginnings_differ_make_no_group(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    config = source(tmp_path, "return None, 1.0, True", "def reset(self):\n    return str(random.random())\n")
    async with sampling_with(config, Policy(tokenizer, "x", forever=True), tokenizer) as sampler:
        samples = (await group_of(sampler, 3)).rollouts
    assert samples[0].invalid is None
    assert [sample.invalid for sample in samples[1:]] == [
        "environment: reset gave samples of one prompt different beginnings"
    ] * 2


@pytest.mark.parametrize(("library", "rewards"), [("environment", [0.5, None, 2.0]), ("generator", [0.0, None, 0.0])])
async def test_a_turns_reward_is_stored_as_it_counts_in_the_samples(
    tmp_path: pathlib.Path, tokenizer: Tokenizer, library: str, rewards: list[float | None]
) -> None:
    config = source(tmp_path, "return 'on', 1.0 if completion == 'a' else 4.0, completion == 'b'")
    reward = RewardConfig(name="r", library=library, weight=0.5, timeout_s=30, on_error="zero")
    async with sampling_with(config, Policy(tokenizer, "a", "b"), tokenizer, 1000, reward) as sampler:
        (sample,) = (await group_of(sampler)).rollouts
    assert [turn.reward for turn in sample.turns] == rewards


async def test_other_rewards_are_told_the_conversation_and_its_last_turn(
    tmp_path: pathlib.Path, tokenizer: Tokenizer
) -> None:
    body = "import json\ndef f(completion, messages, tokens, completion_ids, episode_reward):\n"
    body += "    assert [m['role'] for m in messages] == ['user', 'assistant', 'tool', 'assistant', 'tool'], messages\n"
    body += "    return len(completion) + tokens / 100 + episode_reward\n"
    (tmp_path / "reward.py").write_text(body)
    reward = RewardConfig(name="told", function="reward.py:f", folder=str(tmp_path))
    engine = Policy(tokenizer, "add 2 3", "add 5 4", "9")
    async with sampling_with(source(tmp_path, CALCULATOR, REMEMBER), engine, tokenizer, 1000, reward) as sampler:
        (sample,) = (await group_of(sampler)).rollouts
    assert sample.invalid is None
    assert sample.reward == pytest.approx(1 + 0.18 + 0.5)


async def test_a_process_reward_of_an_observation_counts_at_the_token_sampled_before_it(
    tmp_path: pathlib.Path, tokenizer: Tokenizer
) -> None:
    last = "len(completion_ids) - 1"
    body = f"def f(completion_ids):\n    return 0, [(0, 1.0), (7, 2.0), (8, 4.0), (12, 8.0), ({last}, 16.0)]\n"
    (tmp_path / "reward.py").write_text(body)
    reward = RewardConfig(name="graded", function="reward.py:f", folder=str(tmp_path), weight=0.5)
    engine = Policy(tokenizer, "add 2 3", "add 5 4", "9")
    async with sampling_with(source(tmp_path, CALCULATOR, REMEMBER), engine, tokenizer, 1000, reward) as sampler:
        (sample,) = (await group_of(sampler)).rollouts
    assert (sample.invalid, sample.reward) == (None, 15.5)
    assert sample.steps == [(0, 0.5), (7, 7.0), (len(sample.completion_ids) - 1, 8.0)]
    group = RolloutGroup(0, "", "", "", [1], [sample], 0.0)
    batch = batching._batch(codec.decode(codec.encode([group])), np.zeros(1, np.int64))
    assert batch.credits is not None
    assert batch.credits.tolist() == [0.5] + [0.0] * 6 + [7.0] + [0.0] * 9 + [8.0]


# Processes


PLACES = "def __init__(self):\n    self.pid, self.draw = os.getpid(), random.random()\n"


async def test_each_episode_has_a_process_of_its_own_with_its_own_random_numbers(
    tmp_path: pathlib.Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    body = "assert os.getpid() == self.pid\nassert 'hush' not in repr(os.environ)\n"
    body += f"open(f'{tmp_path}/{{self.pid}}', 'w').write(str(self.draw))\nreturn 'on', 0.0, completion == 'b'"
    config = source(tmp_path, body, PLACES)
    async with sampling_with(config, Policy(tokenizer, *"aaabbb"), tokenizer) as sampler:
        samples = (await group_of(sampler, 3)).rollouts
        assert [sample.invalid for sample in samples] == [None] * 3
        files = list(tmp_path.glob("[0-9]*"))
        assert len({path.read_text() for path in files}) == 3
        for path in files:
            await assert_ended(int(path.name))


async def test_an_episode_ends_with_all_that_it_started(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    body = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    body += f"open('{tmp_path}/pid', 'w').write(str(child.pid))\nreturn None, 1.0, True"
    async with sampling_with(source(tmp_path, body), Policy(tokenizer, "x"), tokenizer) as sampler:
        await group_of(sampler)
        await assert_ended(int((tmp_path / "pid").read_text()))


async def test_no_more_episodes_run_at_once_than_the_concurrency_allows(
    tmp_path: pathlib.Path, tokenizer: Tokenizer
) -> None:
    body = f"mine = f'{tmp_path}/{{os.getpid()}}'\nopen(mine, 'w')\n"
    body += f"count = len([name for name in os.listdir('{tmp_path}') if name.isdigit()])\n"
    body += "time.sleep(0.05)\nos.remove(mine)\nreturn None, float(count), True"
    config = source(tmp_path, body).model_copy(update={"concurrency": 2})
    async with sampling_with(config, Policy(tokenizer, "x", forever=True), tokenizer) as sampler:
        samples = (await group_of(sampler, 6)).rollouts
    assert {sample.reward for sample in samples} <= {1.0, 2.0}


async def test_a_process_that_died_between_episodes_is_replaced(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    config = source(tmp_path, "return None, float(os.getppid()), True")
    async with sampling_with(config, Policy(tokenizer, "x", forever=True), tokenizer) as sampler:
        (before,) = (await group_of(sampler)).rollouts
        assert before.reward
        os.kill(int(before.reward), 9)
        (after,) = (await group_of(sampler)).rollouts
    assert after.invalid is None
    assert after.reward != before.reward


async def test_closing_ends_the_processes(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    config = source(tmp_path, "return None, float(os.getppid()), True")
    async with sampling_with(config, Policy(tokenizer, "x"), tokenizer) as sampler:
        (sample,) = (await group_of(sampler)).rollouts
    assert sample.reward
    await assert_ended(int(sample.reward))


async def test_a_cancelled_episode_leaves_nothing_to_the_next(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    config = source(tmp_path, "time.sleep(0.5 if completion == 'slow' else 0)\nreturn None, float(completion), True")
    async with sampling_with(config, Policy(tokenizer, "slow", "1", "2", "3"), tokenizer) as sampler:
        slow = asyncio.create_task(group_of(sampler))
        await asyncio.sleep(0.2)
        slow.cancel()
        rewards = [(await group_of(sampler)).rollouts[0].reward for _ in range(3)]
    assert rewards == [1.0, 2.0, 3.0]


# What is refused at the start


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"code": "mine.py:Yours"}, "has no function or class Yours"),
    ({"code": "gone.py:Mine"}, "there is no file"),
    ({"code": "mine.py:os"}, "has no function or class os"),
    ({"code": "mine.py:stepless"}, "it has no method step"),
    ({"parameters": {"speed": 3}}, "unexpected keyword argument 'speed'"),
    ({"library": "reasoning-gym"}, "give exactly one of code and library"),
    ({"code": None, "library": "chess"}, "library 'chess' is none of reasoning-gym"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
async def test_an_environment_that_cannot_be_loaded_is_refused_at_the_start(
    tmp_path: pathlib.Path, tokenizer: Tokenizer, changes: dict[str, Any], message: str
) -> None:
    config = source(tmp_path, "return None, 1.0, True", "def __init__(self): pass\n").model_copy(update=changes)
    with open(tmp_path / "mine.py", "a") as file:
        file.write("\ndef stepless(): pass\n")
    with pytest.raises(ValueError, match=r"^environment") as caught:
        async with sampling_with(config, Policy(tokenizer), tokenizer):
            pass
    assert message in str(caught.value)


# reasoning-gym


def generated() -> Prompt:
    entry = Generator("sums", "reasoning-gym/chain_sum", {}, 0, held_out=False).entry(3)
    return Prompt(3, "sums", entry.question, entry.answer, {}, entry)


ATTEMPTS = [
    (["right"], 1.0),
    (["no", "right"], 0.5),
    (["no", "?", "right"], 0.25),
    (["no", "?", "almost"], 0.25 * 0.5),
]
"""Answers, and the return at discount 0.5; an answer among as many other characters scores a half."""


async def test_reasoning_gym_gives_another_attempt_after_a_wrong_answer(tokenizer: Tokenizer) -> None:
    prompt = generated()
    assert prompt.answer
    words = {"right": prompt.answer, "almost": prompt.answer + "!" * len(prompt.answer)}
    said = [words.get(answer, answer) for answers, _ in ATTEMPTS for answer in answers]
    config = EnvironmentConfig(library="reasoning-gym", parameters={"attempts": 3, "discount": 0.5}, timeout_s=30)
    async with sampling_with(config, Policy(tokenizer, *said), tokenizer) as sampler:
        samples = [(await group_of(sampler, prompt=prompt)).rollouts[0] for _ in ATTEMPTS]
    assert [sample.reward for sample in samples] == pytest.approx([reward for _, reward in ATTEMPTS])
    for sample, (answers, _) in zip(samples, ATTEMPTS, strict=True):
        told = [turn.text for turn in sample.turns if turn.observation]
        assert told == ["That is wrong. Try again."] * (len(answers) - 1)
