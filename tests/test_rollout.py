"""The worker's loop, with a fake engine and a trainer that says what the test wants, in virtual time."""

import asyncio
import collections
import dataclasses
import json
import math
import pathlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from pipeline import codec, experience, rollout, weights
from pipeline.config import (
    AlgorithmConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    PromptSetConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    StoreConfig,
)
from pipeline.coordinator import Coordinator
from pipeline.evaluation import open_sets
from pipeline.experience import RolloutGroup
from pipeline.inference import Completion, EngineLost, FakeEngine, Weights
from pipeline.messages import CONTROL_KEY, ControlState, EvaluationRequest, Heartbeat, WriterEntry, evaluation_key
from pipeline.policies import Policies
from pipeline.prompts import PromptSource
from pipeline.rewards.scorer import Score
from pipeline.sampling import TOLD, Sampler
from pipeline.storage import MemoryStorage, StorageError
from pipeline.tokenizer import Tokenizer
from pipeline.versions import Version
from pipeline.writer import Superseded, Writer
from tests.simulation import VirtualClock, VirtualLoop
from tests.test_tokenizer import folder as tokenizer_folder

EOS = 1
GROUP = 3


def completion(prompt_ids: list[int], version: Version) -> Completion:
    """Ids that name the version that made them; "ab" is not re-encoded as it was sampled (F17)."""
    return Completion([10 + version.step, 11, EOS], [-0.5, -0.25, -0.125], f"by {version.step}", "stop")


class TextScorer:
    """Scores a text by itself: its last number; "?" cannot be scored."""

    configs = (RewardConfig(name="number", library="length"),)

    def __init__(self) -> None:
        self.failures: collections.Counter[str] = collections.Counter()
        self.seconds = 0.0
        self.asked: list[dict[str, Any]] = []

    async def score(self, arguments: dict[str, Any]) -> Score:
        await asyncio.sleep(self.seconds)
        self.asked.append(arguments)
        if arguments["completion"] == "?":
            return Score(None, {}, "reward number: no answer within 5 s")
        value = float(arguments["completion"].split()[-1])
        return Score(value, {"number": value}, None)


class Trainer:
    """Says in control/state.json what a test wants, and reads what the workers deliver."""

    def __init__(self, storage: MemoryStorage) -> None:
        self.storage = storage
        self.state = ControlState(term=1, step=0, version=None, writers={})

    async def tell(self, **changes: Any) -> None:
        self.state = dataclasses.replace(self.state, **changes)
        await self.storage.put(CONTROL_KEY, self.state.encode())

    async def grant(self, worker: rollout.Worker, leases: dict[int, int], **changes: Any) -> None:
        entry = WriterEntry(instance="rollout-0", leases=leases, acknowledged=0)
        await self.tell(writers={**self.state.writers, worker.writer.ulid: entry}, **changes)

    async def publish(self, version: Version, kind: str = "base") -> None:
        await weights.publish(self.storage, version, None, kind)
        await self.tell(version=version)

    async def delivered(self, ulid: str | None = None) -> dict[int, RolloutGroup]:
        groups = {}
        for info in await self.storage.list("rollouts"):
            found = await self.storage.get(info.key)
            assert found is not None
            table = codec.decode(found.data, group_size=GROUP)
            if ulid is None or ulid in info.key:
                groups.update({group.index: group for group in experience.rows(table, 0, table.num_rows)})
        return groups

    async def heartbeat(self, worker: rollout.Worker) -> Heartbeat:
        found = await self.storage.get(f"writers/{worker.writer.ulid}.json")
        assert found is not None
        return Heartbeat.decode(found.data)


@dataclasses.dataclass
class Stage:
    trainer: Trainer
    worker: rollout.Worker
    engine: FakeEngine
    scorer: TextScorer
    running: asyncio.Task[None]

    async def until(self, condition: Callable[[], Awaitable[Any]] | Callable[[], Any], limit_s: float = 60.0) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while True:
            met = condition()
            if asyncio.iscoroutine(met):
                met = await met
            if met:
                return
            if self.running.done():
                self.running.result()
            assert loop.time() < deadline, "it does not come to this"
            await asyncio.sleep(0.05)

    async def delivers(self, *indices: int) -> dict[int, RolloutGroup]:
        async def all_there() -> bool:
            return set(indices) <= (await self.trainer.delivered()).keys()

        await self.until(all_there)
        return await self.trainer.delivered()


async def aside(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


Test = Callable[[Stage], Awaitable[None]]


@pytest.fixture
def play(tmp_path: pathlib.Path) -> Callable[..., None]:
    """Runs a test against a running worker, in virtual time; the base policy (1, 0) is published."""

    def run(test: Test, script: Callable[..., Completion] = completion, faults: Any = None, **changes: Any) -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(asyncio.wait_for(stage(test, tmp_path, script, faults, changes), 10_000))
        finally:
            loop.close()

    return run


def configure(folder: pathlib.Path, changes: dict[str, Any]) -> RunConfig:
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        rows = [{"prompt": f"p{n}", "answer": str(n), "level": n} for n in range(1000)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer_folder(folder)
    sampling = SamplingConfig(temperature=0.9, max_new_tokens=20)
    algorithm = {"type": "grpo", "group_size": GROUP, **changes.pop("algorithm", {})}
    return RunConfig(
        name="test",
        run_id="1",
        model=ModelConfig(uri="file:///model", path=str(folder)),
        data=DataConfig(sets=[PromptSetConfig(name="rows", uri=str(prompts))]),
        rewards=[],
        algorithm=AlgorithmConfig(total_steps=9, prompts_per_step=4, sampling=sampling, **algorithm),
        rollout=RolloutConfig(**{"max_model_len": 100, **changes}),
        evaluation=EvaluationConfig(
            sets=[
                PromptSetConfig(name="first", uri=str(prompts), limit=5, samples=2),
                PromptSetConfig(name="greedy", uri=str(prompts), limit=2, samples=4, temperature=0),
            ]
        ),
        store=StoreConfig(uri="memory://test"),
    )


async def stage(
    test: Test, folder: pathlib.Path, script: Callable[..., Completion], faults: Any, changes: dict[str, Any]
) -> None:
    clock = VirtualClock()
    config = configure(folder, changes)
    trainer = Trainer(MemoryStorage(clock))
    storage = MemoryStorage(clock, faults, trainer.storage.memory, deadline_s=30)
    engine, scorer = FakeEngine(clock, script, seconds=1.0), TextScorer()
    worker = rollout.Worker(
        config,
        storage,
        Writer(storage, "rollout-0", clock, random.Random(0)),
        PromptSource(config.data),
        Sampler(engine, Tokenizer(config.model.path), scorer, clock, None, config.rollout.max_model_len),
        open_sets(config),
        clock,
        Policies(storage, config, folder / "scratch"),
        aside,
    )
    (folder / "scratch").mkdir(exist_ok=True)
    await trainer.publish(Version(1, 0))
    running = asyncio.create_task(worker.run())
    try:
        await test(Stage(trainer, worker, engine, scorer, running))
    finally:
        worker.stop()
        await asyncio.wait({running}, timeout=200)
        if not running.done():
            running.cancel()
    if not isinstance(running.exception(), Superseded | None):
        running.result()


def test_leased_prompts_come_back_as_whole_groups_with_the_very_ids_that_were_sampled(play: Any) -> None:
    async def test(stage: Stage) -> None:
        await stage.trainer.grant(stage.worker, {3: 0, 8: 0})
        groups = await stage.delivers(3, 8)
        source = PromptSource(stage.worker.config.data)
        for index in (3, 8):
            group, expected = groups[index], source.at(index)
            assert (group.set, group.prompt, group.answer) == ("rows", expected.text, expected.answer)
            assert len(group.rollouts) == GROUP
            for sample in group.rollouts:
                assert sample.completion_ids == [10, 11, EOS]
                assert sample.logprobs == [-0.5, -0.25, -0.125]
                assert (sample.reward, sample.rewards, sample.invalid) == (0.0, {"number": 0.0}, None)
                assert sample.spans == [(0, Version(1, 0))]
        levels = {source.at(index).row["level"] for index in (3, 8)}
        assert {asked["level"] for asked in stage.scorer.asked} == levels
        assert {frozenset(asked) for asked in stage.scorer.asked} == {TOLD | source.columns} == {TOLD | {"level"}}

    play(test)


def test_a_greedy_baseline_is_one_more_sample_that_is_scored_and_not_trained(play: Any) -> None:
    async def test(stage: Stage) -> None:
        asked = []
        generate = stage.engine.generate

        async def watched(prompt_ids: list[int], n: int, sampling: Any) -> list[Completion]:
            asked.append((n, sampling.temperature))
            return await generate(prompt_ids, n, sampling)

        stage.engine.generate = watched  # type: ignore[method-assign]
        await stage.trainer.grant(stage.worker, {0: 0})
        samples = (await stage.delivers(0))[0].rollouts
        assert asked == [(GROUP - 1, 0.9), (1, 0.0)]
        assert [sample.invalid for sample in samples] == [None] * (GROUP - 1) + ["greedy baseline"]
        assert samples[-1].reward == 0.0

    play(test, algorithm={"type": "remax", "group_size": GROUP - 1})


def test_every_eos_id_is_sent_and_a_truncated_row_is_left_as_it_was_sampled(play: Any) -> None:
    """F18."""

    def cut(prompt_ids: list[int], version: Version) -> Completion:
        return Completion([11, 12, 13], [-1.0] * 3, "1", "length")

    async def test(stage: Stage) -> None:
        asked = []
        generate = stage.engine.generate

        async def watched(prompt_ids: list[int], n: int, sampling: Any) -> list[Completion]:
            asked.append(sampling)
            return await generate(prompt_ids, n, sampling)

        stage.engine.generate = watched  # type: ignore[method-assign]
        await stage.trainer.grant(stage.worker, {0: 0})
        for sample in (await stage.delivers(0))[0].rollouts:
            assert (sample.completion_ids, sample.finish_reason) == ([11, 12, 13], "length")
        assert (asked[0].stop_ids, asked[0].temperature, asked[0].max_new_tokens) == ((EOS,), 0.9, 20)

    play(test, cut)


def test_an_index_waits_for_the_version_it_may_be_generated_with(play: Any) -> None:
    async def test(stage: Stage) -> None:
        await stage.trainer.grant(stage.worker, {1: 0, 2: 1})
        await stage.delivers(1)
        await asyncio.sleep(20)
        assert (await stage.trainer.delivered()).keys() == {1}
        await stage.trainer.publish(Version(1, 1))
        groups = await stage.delivers(2)
        assert groups[2].rollouts[0].spans == [(0, Version(1, 1))]
        assert groups[2].rollouts[0].completion_ids[0] == 11

    play(test)


def test_weights_change_between_sequences_only_and_nothing_is_begun_meanwhile(play: Any) -> None:
    """F14; FakeEngine asserts that nothing runs while weights are loaded."""

    async def test(stage: Stage) -> None:
        await stage.trainer.grant(stage.worker, dict.fromkeys(range(40), 0))
        stage.engine.seconds = 5.0
        await stage.until(lambda: stage.engine.running == 4)
        await stage.trainer.publish(Version(1, 1))
        await stage.until(lambda: stage.worker.engine.version == Version(1, 1))
        stage.engine.seconds = 0.1
        groups = await stage.delivers(*range(40))
        for index, group in groups.items():
            step = 0 if index < 4 else 1
            assert {sample.completion_ids[0] for sample in group.rollouts} == {10 + step}
            assert all(sample.oldest == Version(1, step) for sample in group.rollouts)

    play(test, max_concurrent_groups=4)


def test_only_higher_versions_are_loaded(play: Any) -> None:
    """F16: a restarted trainer that names an older version does not roll the worker back; a higher term does."""

    async def test(stage: Stage) -> None:
        await stage.trainer.publish(Version(1, 3))
        await stage.until(lambda: stage.engine.version == Version(1, 3))
        await stage.trainer.publish(Version(1, 2))
        await asyncio.sleep(20)
        assert stage.engine.version == Version(1, 3)
        await stage.trainer.publish(Version(2, 1))
        await stage.until(lambda: stage.engine.version == Version(2, 1))

    play(test)


def test_a_server_that_restarts_gets_its_weights_again_before_anything_else(play: Any) -> None:
    async def test(stage: Stage) -> None:
        await stage.trainer.publish(Version(1, 2))
        await stage.until(lambda: stage.engine.version == Version(1, 2))
        await stage.trainer.grant(stage.worker, dict.fromkeys(range(8), 0))
        await stage.until(lambda: stage.engine.running == 8)
        stage.engine.restart()
        groups = await stage.delivers(*range(8))
        assert [loaded.version for loaded in stage.engine.loaded][-2:] == [Version(1, 2)] * 2
        assert all(group.rollouts[0].completion_ids[0] == 12 for group in groups.values())
        assert (await stage.trainer.heartbeat(stage.worker)).failures == {}

    play(test)


def test_the_prompt_that_kills_the_server_is_found_and_the_others_are_delivered(play: Any) -> None:
    async def test(stage: Stage) -> None:
        poison = Tokenizer(stage.worker.config.model.path).encode(PromptSource(stage.worker.config.data).at(5).content)
        generate = stage.engine.generate

        async def fragile(prompt_ids: list[int], n: int, sampling: Any) -> list[Completion]:
            if prompt_ids == poison and stage.engine.version is not None:
                await asyncio.sleep(0.1)
                stage.engine.restart()
            return await generate(prompt_ids, n, sampling)

        stage.engine.generate = fragile  # type: ignore[method-assign]
        await stage.trainer.grant(stage.worker, dict.fromkeys(range(16), 0))
        await stage.delivers(*(set(range(16)) - {5}))

        async def reported() -> bool:
            return (await stage.trainer.heartbeat(stage.worker)).failures.keys() == {5}

        await stage.until(reported)
        assert 5 not in await stage.trainer.delivered()
        assert len(stage.engine.loaded) < 10

    play(test)


def test_an_engine_error_costs_that_index_alone(play: Any) -> None:
    from pipeline.inference import EngineError

    async def test(stage: Stage) -> None:
        generate = stage.engine.generate
        refused = Tokenizer(stage.worker.config.model.path).encode(PromptSource(stage.worker.config.data).at(2).content)

        async def fragile(prompt_ids: list[int], n: int, sampling: Any) -> list[Completion]:
            if prompt_ids == refused:
                raise EngineError("/v1/completions answered 400")
            return await generate(prompt_ids, n, sampling)

        stage.engine.generate = fragile  # type: ignore[method-assign]
        await stage.trainer.grant(stage.worker, dict.fromkeys(range(6), 0))
        await stage.delivers(0, 1, 3, 4, 5)

        async def reported() -> bool:
            failures = (await stage.trainer.heartbeat(stage.worker)).failures
            return failures == {2: "EngineError: /v1/completions answered 400"}

        await stage.until(reported)
        assert len(stage.engine.loaded) == 1

    play(test)


BAD = {
    "empty completion": Completion([], [], "", "stop"),
    "logprob nan": Completion([11], [math.nan], "1", "stop"),
    "logprob -inf": Completion([11], [-math.inf], "1", "stop"),
    "logprob -9999": Completion([11], [-9999.0], "1", "stop"),
    "logprob 0.5": Completion([11], [0.5], "1", "stop"),
    "1 logprobs for 2 tokens": Completion([11, 12], [-1.0], "1", "stop"),
    "token id 9999 is outside the vocabulary of 105": Completion([9999], [-1.0], "1", "stop"),
    "reward number: no answer within 5 s": Completion([11], [-1.0], "?", "stop"),
}


@pytest.mark.parametrize(("reason", "bad"), BAD.items())
def test_one_bad_sample_is_rejected_alone_and_says_why(play: Any, reason: str, bad: Completion) -> None:
    """F19."""
    count = 0

    def script(prompt_ids: list[int], version: Version) -> Completion:
        nonlocal count
        count += 1
        return bad if count == 2 else Completion([11], [1e-7], "1", "stop")

    async def test(stage: Stage) -> None:
        await stage.trainer.grant(stage.worker, {0: 0, 1: 0})
        groups = await stage.delivers(0, 1)
        samples = [sample for group in groups.values() for sample in group.rollouts]
        assert [sample.invalid for sample in samples if sample.invalid] == [reason]
        assert [sample.reward for sample in samples if sample.invalid] == [None]
        assert [sample.logprobs for sample in samples if not sample.invalid] == [[0.0]] * 5

    play(test, script)


def test_a_prompt_that_leaves_no_room_is_delivered_as_rejected_and_not_sent(play: Any) -> None:
    """F19: max_len+1. Delivered, so that the trainer drops it once instead of having it tried again."""

    async def test(stage: Stage) -> None:
        length = len(Tokenizer(stage.worker.config.model.path).encode("p0"))
        stage.worker.sampler.max_model_len = length + 20 - 1
        await stage.trainer.grant(stage.worker, {0: 0})
        group = (await stage.delivers(0))[0]
        for sample in group.rollouts:
            assert sample.invalid is not None
            assert "exceed rollout.maxModelLen" in sample.invalid
        assert stage.engine.most_running == 0
        stage.worker.sampler.max_model_len = 1000
        await stage.trainer.grant(stage.worker, {1: 0})
        assert (await stage.delivers(1))[1].rollouts[0].invalid is None

    play(test)


def test_no_more_groups_run_at_a_time_than_allowed_and_scoring_does_not_count(play: Any) -> None:
    async def test(stage: Stage) -> None:
        stage.scorer.seconds = 50.0
        await stage.trainer.grant(stage.worker, dict.fromkeys(range(20), 0))
        await stage.until(lambda: len(stage.worker.groups.scoring) >= 12)
        assert stage.engine.most_running == 3
        await stage.delivers(*range(20))

    play(test, max_concurrent_groups=3)


def test_a_lease_that_is_taken_back_is_aborted(play: Any) -> None:
    async def test(stage: Stage) -> None:
        stage.engine.seconds = 30.0
        await stage.trainer.grant(stage.worker, {0: 0, 1: 0})
        await stage.until(lambda: stage.engine.running == 2)
        await stage.trainer.grant(stage.worker, {1: 0})
        await stage.until(lambda: stage.engine.running == 1)
        assert (await stage.delivers(1)).keys() == {1}

    play(test)


def test_a_revoked_worker_aborts_and_goes_on_as_a_new_writer(play: Any) -> None:
    async def test(stage: Stage) -> None:
        stage.engine.seconds = 30.0
        old = stage.worker.writer.ulid
        await stage.trainer.grant(stage.worker, {0: 0, 1: 0})
        await stage.until(lambda: stage.engine.running == 2)
        await stage.trainer.tell(writers={old: WriterEntry("rollout-0", {}, acknowledged=0, final=0)})
        await stage.until(lambda: stage.worker.writer.ulid != old and stage.engine.running == 0)
        stage.engine.seconds = 1.0
        await stage.trainer.grant(stage.worker, {1: 0})
        assert (await stage.delivers(1)).keys() == {1}
        assert not await stage.trainer.delivered(old)

    play(test)


def test_a_worker_whose_instance_another_process_took_ends(play: Any) -> None:
    async def test(stage: Stage) -> None:
        await stage.trainer.tell(
            writers={
                stage.worker.writer.ulid: WriterEntry("rollout-0", {}, acknowledged=0, final=0),
                "NEWER": WriterEntry("rollout-0", {}, acknowledged=0),
            }
        )
        await asyncio.wait({stage.running}, timeout=60)
        assert isinstance(stage.running.exception(), Superseded)

    play(test)


def test_on_sigterm_what_is_finished_is_delivered_and_the_rest_handed_back_in_time(play: Any) -> None:
    async def test(stage: Stage) -> None:
        await stage.trainer.grant(stage.worker, {0: 0, **dict.fromkeys(range(1, 9), 7)})
        stage.engine.seconds = 3.0
        await stage.until(lambda: stage.engine.running == 1)
        hangs = asyncio.create_task(asyncio.sleep(0))
        started = asyncio.get_running_loop().time()
        stage.worker.stop()
        await asyncio.wait({stage.running, hangs})
        await stage.running
        assert asyncio.get_running_loop().time() - started < rollout.LEAVE_S
        assert (await stage.trainer.delivered()).keys() == {0}
        last = await stage.trainer.heartbeat(stage.worker)
        assert last.draining
        assert last.handed_back == tuple(range(1, 9))

    play(test)


def test_on_sigterm_a_group_that_takes_too_long_is_handed_back(play: Any) -> None:
    async def test(stage: Stage) -> None:
        await stage.trainer.grant(stage.worker, {0: 0, 1: 0})
        stage.engine.seconds = 300.0
        await stage.until(lambda: stage.engine.running == 2)
        started = asyncio.get_running_loop().time()
        stage.worker.stop()
        await stage.running
        assert asyncio.get_running_loop().time() - started < rollout.LEAVE_S
        assert (await stage.trainer.heartbeat(stage.worker)).handed_back == (0, 1)
        assert stage.engine.running == 0

    play(test)


def test_a_worker_that_is_stopped_because_the_run_is_over_finishes_no_group(play: Any) -> None:
    async def test(stage: Stage) -> None:
        stage.engine.seconds = 5.0
        await stage.trainer.grant(stage.worker, {0: 0})
        await stage.until(lambda: stage.engine.running == 1)
        await stage.trainer.tell(stop="complete")
        started = asyncio.get_running_loop().time()
        stage.worker.stop()
        await stage.running
        assert asyncio.get_running_loop().time() - started < 1.0
        assert not await stage.trainer.delivered()

    play(test)


def test_when_the_run_is_over_the_worker_ends_by_itself(play: Any) -> None:
    async def test(stage: Stage) -> None:
        stage.engine.seconds = 300.0
        await stage.trainer.grant(stage.worker, {0: 0})
        await stage.until(lambda: stage.engine.running == 1)
        await stage.trainer.tell(stop="complete")
        await asyncio.wait({stage.running}, timeout=20)
        assert stage.running.done()

    play(test)


def test_a_run_that_had_ended_when_the_worker_came_is_waited_for_until_a_trainer_takes_it_up(play: Any) -> None:
    async def test(stage: Stage) -> None:
        await stage.trainer.tell(stop="complete")
        await stage.until(lambda: stage.worker.waiting_for() == "a trainer to take up the run, which had ended")
        await asyncio.wait({stage.running}, timeout=60)
        assert not stage.running.done()
        assert stage.engine.version is None, "nothing is loaded for a run that has ended"
        await stage.trainer.tell(term=2, stop=None)
        await stage.trainer.grant(stage.worker, {0: 0})
        await stage.delivers(0)
        await stage.trainer.tell(stop="complete")
        await asyncio.wait({stage.running}, timeout=20)
        assert stage.running.done()

    play(test)


@pytest.mark.parametrize(
    ("changes", "shards"),
    [
        ({"shard_groups": 2, "flush_s": 1e6}, 3),
        ({"flush_s": 1e6}, 1),
        ({"flush_s": 0.0, "max_concurrent_groups": 2}, 3),
    ],
)
def test_a_shard_is_written_when_it_is_full_or_nothing_more_is_on_its_way_or_it_has_waited(
    play: Any, changes: dict[str, Any], shards: int
) -> None:
    async def test(stage: Stage) -> None:
        await stage.trainer.grant(stage.worker, dict.fromkeys(range(6), 0))
        await stage.delivers(*range(6))
        assert len(await stage.trainer.storage.list("rollouts")) == shards

    play(test, **changes)


class Outage:
    """The store answers nothing while `on`."""

    def __init__(self) -> None:
        self.on = False

    async def before(self, operation: str, key: str) -> None:
        if self.on:
            await asyncio.sleep(1)
            raise StorageError("no answer")

    async def after(self, operation: str, key: str) -> None:
        pass


def test_groups_that_were_finished_while_the_store_was_away_are_delivered_afterwards(play: Any) -> None:
    outage = Outage()

    async def test(stage: Stage) -> None:
        await stage.trainer.grant(stage.worker, dict.fromkeys(range(6), 0))
        await stage.until(lambda: stage.engine.running == 6)
        outage.on = True
        await asyncio.sleep(120)
        assert not await stage.trainer.delivered()
        outage.on = False
        await stage.delivers(*range(6))
        assert stage.engine.most_running == 6

    play(test, faults=outage)


def test_a_store_that_never_comes_back_ends_the_worker(play: Any) -> None:
    outage = Outage()

    async def test(stage: Stage) -> None:
        outage.on = True
        await asyncio.wait({stage.running}, timeout=2 * rollout.OUTAGE_S)
        assert isinstance(stage.running.exception(), StorageError)
        stage.running = asyncio.create_task(asyncio.sleep(0))  # type: ignore[assignment]

    with pytest.raises(StorageError):
        play(test, faults=outage)


def test_heartbeats_go_on_while_weights_take_long_to_load(play: Any) -> None:
    async def test(stage: Stage) -> None:
        load = stage.engine.load

        async def slow(prepared: Weights) -> None:
            await asyncio.sleep(600)
            await load(prepared)

        stage.engine.load = slow  # type: ignore[method-assign]
        await asyncio.sleep(300)
        beat = await stage.trainer.heartbeat(stage.worker)
        assert VirtualClock().now() - beat.refreshed < 10
        assert beat.version is None

    play(test)


def test_weights_that_cannot_be_loaded_end_the_worker_after_a_few_tries(play: Any) -> None:
    tries = 0

    async def test(stage: Stage) -> None:
        async def broken(prepared: Weights) -> None:
            nonlocal tries
            tries += 1
            raise EngineLost("vLLM is not ready")

        stage.engine.load = broken  # type: ignore[method-assign]
        await asyncio.wait({stage.running}, timeout=60)

    with pytest.raises(EngineLost):
        play(test)
    assert tries == rollout.TRIES


async def evaluation_of(stage: Stage, step: int) -> dict[str, Any]:
    async def there() -> bool:
        return await stage.trainer.storage.get(evaluation_key(step)) is not None

    await stage.until(there)
    found = await stage.trainer.storage.get(evaluation_key(step))
    assert found is not None
    content: dict[str, Any] = json.loads(found.data)
    return content


def test_an_evaluation_uses_exactly_the_version_it_names_and_work_goes_on_with_the_newest(play: Any) -> None:
    async def test(stage: Stage) -> None:
        await stage.until(lambda: stage.engine.version == Version(1, 0))
        for version in (Version(1, 1), Version(1, 4)):
            await weights.publish(stage.trainer.storage, version, None, "base")
        request = EvaluationRequest(step=1, version=Version(1, 1), writer=stage.worker.writer.ulid)
        await stage.trainer.grant(stage.worker, {0: 2}, evaluation=request, version=Version(1, 4))
        result = await evaluation_of(stage, 1)
        assert (result["step"], result["version"]) == (1, [1, 1])
        first, greedy = result["sets"]["first"], result["sets"]["greedy"]
        assert (first["avg@2"], first["pass@2"], first["count"], first["per_prompt"]) == (1.0, 1.0, 5, [1.0] * 5)
        assert (greedy["avg@1"], greedy["samples"], greedy["count"]) == (1.0, 1, 2)
        samples = await stage.trainer.storage.get(evaluation_key(1).replace(".json", ".parquet"))
        assert samples is not None
        table = codec.decode(samples.data)
        groups = experience.rows(table, 0, table.num_rows)
        assert [group.prompt for group in groups] == ["p0", "p1", "p2", "p3", "p4", "p0", "p1"]
        assert {sample.oldest for group in groups for sample in group.rollouts} == {Version(1, 1)}
        await stage.trainer.tell(evaluation=None)
        assert (await stage.delivers(0))[0].rollouts[0].oldest == Version(1, 4)

    play(test)


def test_an_evaluation_is_repeated_when_the_server_dies_and_given_up_with_a_reason(play: Any) -> None:
    async def test(stage: Stage) -> None:
        generate = stage.engine.generate
        deaths = 1

        async def fragile(*arguments: Any) -> list[Completion]:
            nonlocal deaths
            if deaths:
                deaths -= 1
                stage.engine.restart()
            return await generate(*arguments)

        stage.engine.generate = fragile  # type: ignore[method-assign]
        await stage.until(lambda: stage.engine.version == Version(1, 0))
        request = EvaluationRequest(step=0, version=Version(1, 0), writer=stage.worker.writer.ulid)
        await stage.trainer.tell(evaluation=request)
        assert (await evaluation_of(stage, 0))["sets"]["first"]["count"] == 5
        deaths = 10**6
        await stage.trainer.tell(evaluation=dataclasses.replace(request, step=1))
        result = await evaluation_of(stage, 1)
        assert result["sets"] == {}
        assert "weights" in result["error"] or "restarted" in result["error"]

    play(test)


def test_an_evaluation_that_is_withdrawn_is_aborted(play: Any) -> None:
    async def test(stage: Stage) -> None:
        stage.engine.seconds = 1000.0
        request = EvaluationRequest(step=0, version=Version(1, 0), writer=stage.worker.writer.ulid)
        await stage.trainer.tell(evaluation=request)
        await stage.until(lambda: stage.engine.running > 0)
        await stage.trainer.tell(evaluation=None)
        await stage.until(lambda: stage.engine.running == 0)
        stage.engine.seconds = 1.0
        await stage.trainer.grant(stage.worker, {0: 0})
        await stage.delivers(0)

    play(test)


def test_work_is_left_where_it_is_as_soon_as_the_worker_is_to_stop(play: Any) -> None:
    async def test(stage: Stage) -> None:
        stopping = asyncio.Event()
        waiting = asyncio.create_task(rollout.unless(stopping, asyncio.sleep(600)))
        await asyncio.sleep(1)
        assert not waiting.done()
        stopping.set()
        await asyncio.wait_for(waiting, 1)

    play(test)


def test_status_tells_what_the_worker_does_and_what_it_waits_for(play: Any) -> None:
    async def test(stage: Stage) -> None:
        stage.engine.seconds = 30.0
        await stage.until(lambda: stage.worker.waiting_for() is None)
        await stage.trainer.grant(stage.worker, {0: 0, 1: 0, 2: 9})
        await stage.until(lambda: stage.engine.running == 2)
        status = stage.worker.status()
        assert (status["version"], status["running"], status["writer"]) == ([1, 0], 2, stage.worker.writer.ulid)
        await stage.delivers(0, 1)
        assert stage.worker.status()["generated_tokens"] == 2 * GROUP * 3
        assert stage.worker.status()["tokens_per_s"] == pytest.approx(2 * GROUP * 3 / 60)
        stage.engine.restart()
        assert stage.worker.waiting_for() == "weights to be loaded"
        assert all(isinstance(value, int | float) for value in stage.worker.gauges().values())

    play(test)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "MILES_CONFIG is not set"),
        ({"MILES_CONFIG": "/gone"}, "/gone: No such file"),
        ({"MILES_CONFIG": "broken.json"}, "configuration: name: Field required"),
        ({"MILES_CONFIG": "run.json"}, "VLLM_URL is not set"),
        (
            {"MILES_CONFIG": "run.json", "VLLM_URL": "http://127.0.0.1:9", "MILES_INSTANCE": "r"},
            "no row has the field 'question'",
        ),
        (
            {"MILES_CONFIG": "wants.json", "VLLM_URL": "http://127.0.0.1:9", "MILES_INSTANCE": "r"},
            "reward a: wants.py:f: there is no argument colour; name one of answer, completion, completion_ids, ",
        ),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_3(
    tmp_path: pathlib.Path,
    environment: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = configure(tmp_path, {})
    rows = PromptSetConfig(name="rows", uri=str(tmp_path / "prompts.jsonl"), prompt_field="question")
    store = StoreConfig(uri=f"file://{tmp_path}/store")
    config = config.model_copy(update={"data": DataConfig(sets=[rows]), "store": store})
    (tmp_path / "run.json").write_text(config.model_dump_json())
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "wants.py").write_text("def f(completion, level, colour): ...")
    wants = {
        "data": DataConfig(sets=[rows.model_copy(update={"prompt_field": "prompt"})]),
        "rewards": [RewardConfig(name="a", function="wants.py:f", folder=str(tmp_path))],
    }
    (tmp_path / "wants.json").write_text(config.model_copy(update=wants).model_dump_json())
    monkeypatch.chdir(tmp_path)
    for name in ("MILES_CONFIG", "MILES_INSTANCE", "VLLM_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PYTHONHASHSEED": "0", "MILES_TERMINATION_LOG": str(tmp_path / "end"), **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        rollout.main()
    assert ended.value.code == 3
    assert message in (tmp_path / "end").read_text()
    assert (tmp_path / "end").read_text() == capsys.readouterr().err


def linear_model(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A base with one linear layer, and an adapter of rank 1 that adds 2 to all its weights."""
    import numpy as np
    import safetensors.numpy

    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    adapter.mkdir()
    safetensors.numpy.save_file({"model.q.weight": np.zeros((3, 2), np.float32)}, base / "model.safetensors")
    lora = {"A": np.ones((1, 2), np.float32), "B": np.ones((3, 1), np.float32)}
    named = {f"base_model.model.model.q.lora_{part}.weight": value for part, value in lora.items()}
    safetensors.numpy.save_file(named, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 2}))
    return base, adapter


@pytest.mark.parametrize("loading", ["merge", "hot"])
async def test_an_adapter_is_merged_beside_the_server_or_handed_over_as_it_is(
    tmp_path: pathlib.Path, loading: Any
) -> None:
    import safetensors.numpy

    base, adapter = linear_model(tmp_path)
    storage, version = MemoryStorage(VirtualClock()), Version(1, 3)
    await weights.publish(storage, version, str(adapter), "adapter")
    config = configure(tmp_path, {"adapter_loading": loading})
    config = config.model_copy(update={"model": ModelConfig(uri="file:///model", path=str(base))})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    policies = Policies(storage, config, scratch)
    prepared = await policies.prepare(version)
    assert prepared.version == version
    if loading == "hot":
        assert prepared.kind == "adapter"
        assert (pathlib.Path(prepared.folder) / "adapter_model.safetensors").is_file()
    else:
        assert prepared.kind == "merged"
        merged = safetensors.numpy.load_file(pathlib.Path(prepared.folder) / "model.safetensors")
        assert (merged["model.q.weight"] == 2.0).all()
    policies.keep_only(version)
    assert list(scratch.iterdir()) == ([scratch / str(version)] if loading == "hot" else [])
    policies.keep_only(Version(1, 4))
    assert not list(scratch.iterdir())


def test_workers_and_the_real_coordinator_train_every_index_once_within_the_staleness_bound(
    tmp_path: pathlib.Path,
) -> None:
    """Two workers, one of whose servers restarts in between; weights are published after every step."""

    async def run() -> None:
        clock = VirtualClock()
        config = configure(tmp_path, {"poll_s": 0.2})
        store = MemoryStorage(clock)
        workers, engines = [], []
        for number in range(2):
            engine, storage = (
                FakeEngine(clock, completion, seconds=1.0 + number),
                MemoryStorage(clock, None, store.memory),
            )
            scratch = tmp_path / f"scratch{number}"
            scratch.mkdir()
            sampler = Sampler(engine, Tokenizer(config.model.path), TextScorer(), clock, None, 100)
            worker = rollout.Worker(
                config,
                storage,
                Writer(storage, f"rollout-{number}", clock, random.Random(number)),
                PromptSource(config.data),
                sampler,
                [],
                clock,
                Policies(storage, config, scratch),
                aside,
            )
            workers.append(worker)
            engines.append(engine)
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        coordinator = Coordinator(MemoryStorage(clock, None, store.memory), config, clock, random.Random(9))
        await coordinator.take_over()
        await weights.publish(store, Version(1, 0), None, "base")
        await coordinator.publish(Version(1, 0))
        tasks.append(asyncio.create_task(coordinator.run()))
        trained: list[int] = []
        for step in range(1, 10):
            plan = await coordinator.next_plan(step)
            for planned in plan.groups:
                found = await store.get(planned.key)
                assert found is not None
                [group] = experience.rows(codec.decode(found.data), planned.start, planned.stop)
                assert all(step - 1 - sample.oldest.step <= 1 for sample in group.rollouts)
                trained.append(group.index)
            if step == 4:
                engines[0].restart()
            await weights.publish(store, Version(1, step), None, "base")
            await coordinator.finish_step(step)
            await coordinator.publish(Version(1, step))
        assert sorted(trained) == list(range(36))
        await coordinator.stop("complete")
        await asyncio.wait_for(asyncio.gather(*tasks[:2]), 60)
        tasks[2].cancel()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(asyncio.wait_for(run(), 10_000))
    finally:
        loop.close()


class Looks:
    """When control/state.json was read."""

    def __init__(self) -> None:
        self.at: list[float] = []

    async def before(self, operation: str, key: str) -> None:
        if (operation, key) == ("read", CONTROL_KEY):
            self.at.append(VirtualClock().now())

    async def after(self, operation: str, key: str) -> None:
        pass


def test_a_worker_without_work_looks_less_and_less_often_and_at_once_when_there_is_some(play: Any) -> None:
    looks = Looks()

    async def test(stage: Stage) -> None:
        poll_s, heartbeat_s = stage.worker.config.rollout.poll_s, stage.worker.config.rollout.heartbeat_s
        await asyncio.sleep(600)
        assert looks.at[3] - looks.at[2] == pytest.approx(poll_s)
        gaps = np.diff(looks.at[-40:])
        assert gaps.min() > 0.79 * heartbeat_s
        assert gaps.max() < 1.01 * heartbeat_s
        assert len(set(gaps.round(3))) > 30
        beat = await stage.trainer.heartbeat(stage.worker)
        assert VirtualClock().now() - beat.refreshed < 2 * heartbeat_s
        await stage.trainer.grant(stage.worker, {0: 0})
        granted = VirtualClock().now()
        await stage.until(lambda: stage.engine.running == 1)
        assert VirtualClock().now() - granted < heartbeat_s + 0.1
        await stage.delivers(0)
        assert np.diff(looks.at[-2:])[0] == pytest.approx(poll_s)

    play(test, faults=looks)
