"""pipeline.scoreboard: when an evaluation is due, which version is the best, what was gained."""

import json
import random
import types

import pytest

from pipeline.config import RunConfig
from pipeline.coordinator import Coordinator
from pipeline.messages import evaluation_key
from pipeline.scoreboard import Scoreboard
from pipeline.storage import MemoryStorage, Object
from pipeline.versions import Version


def scoreboard(every_steps=0, total_steps=10, sets=("held-out",)):
    config = RunConfig.model_validate(
        {
            "name": "run",
            "run_id": "r",
            "model": {"uri": "m", "path": "m"},
            "data": {"sets": []},
            "rewards": [],
            "algorithm": {"type": "grpo", "total_steps": total_steps, "prompts_per_step": 1, "group_size": 2},
            "evaluation": {"every_steps": every_steps, "sets": [{"name": name, "uri": "x"} for name in sets]},
            "store": {"uri": "memory://x"},
        }
    )
    coordinator = types.SimpleNamespace(assignments=types.SimpleNamespace(pending={}))
    return Scoreboard(config, coordinator, clock=None)


def result(step, *scores, term=1):
    sets = {
        f"set-{number}": {"avg@4": sum(per_prompt) / len(per_prompt), "per_prompt": list(per_prompt)}
        for number, per_prompt in enumerate(scores)
    }
    return {"step": step, "version": [term, step], "sets": sets}


@pytest.mark.parametrize(
    ("every_steps", "due"), [(0, [0, 10]), (1, list(range(11))), (4, [0, 4, 8, 10]), (20, [0, 10])]
)
def test_an_evaluation_is_due_at_the_start_at_the_end_and_every_so_many_steps(every_steps, due):
    assert [step for step in range(11) if scoreboard(every_steps).due(step)] == due


def test_without_sets_none_is_ever_due():
    assert not any(scoreboard(1, sets=()).due(step) for step in range(11))


def test_the_best_version_has_the_highest_mean_over_all_sets_the_earliest_of_equals_and_is_not_the_base():
    board = scoreboard()
    assert board.best() is None
    board.results = {0: result(0, [0.9], [0.9])}
    assert board.best() is None
    board.results |= {4: result(4, [0.8], [0.2]), 6: result(6, [0.6], [0.6]), 8: result(8, [0.6], [0.6])}
    assert board.best()["version"] == [1, 6]


def test_an_evaluation_that_failed_is_never_the_best():
    board = scoreboard()
    board.results = {4: {"step": 4, "version": [1, 4], "sets": {}, "error": "engine lost"}}
    assert board.best() is None


def test_the_improvement_is_paired_by_prompt_with_its_interval():
    board = scoreboard()
    board.results = {0: result(0, [0, 0, 1, 0]), 5: result(5, [0, 0, 0, 0]), 10: result(10, [1, 0, 1, 1])}
    gained = board.improvement()["set-0"]
    assert (gained["step"], gained["before"], gained["after"], gained["difference"]) == (10, 0.25, 0.75, 0.5)
    assert gained["low"] == pytest.approx(-0.066, abs=1e-3)
    assert gained["high"] == pytest.approx(1.066, abs=1e-3)


def test_an_interval_that_cannot_be_had_is_left_out():
    board = scoreboard()
    board.results = {0: result(0, [0.5]), 10: result(10, [0.7])}
    assert board.improvement() == {"set-0": {"step": 10, "before": 0.5, "after": 0.7}}


DAMAGED = [
    b"{",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"version": ["a", 1], "sets": {}}',
    b'{"version": [1, 4], "sets": {"a": 5}}',
]
DAMAGED += [b'{"version": [1, 4], "sets": {"a": {"avg@1": "x", "per_prompt": []}}}', None]


@pytest.mark.parametrize("damaged", DAMAGED)
@pytest.mark.parametrize("moment", ["restore", "collect"])
async def test_a_damaged_result_is_a_missing_evaluation_and_does_not_end_the_run(clock, caplog, damaged, moment):
    storage = MemoryStorage(clock)
    board = scoreboard(every_steps=4)
    board.coordinator = Coordinator(storage, board.config, clock, random.Random(0))
    for step, score in ((0, 0.5), (4, 0.9), (8, 0.7)):
        await storage.create(evaluation_key(step), json.dumps(result(step, [score, score])).encode())
    whole = storage.memory.objects[evaluation_key(4)]
    data, metadata = (damaged, {}) if damaged else (whole.data[:-1], whole.metadata)
    storage.memory.objects[evaluation_key(4)] = Object(whole.info, data, metadata)
    for _ in range(2):
        await (board.restore() if moment == "restore" else board.collect(10))
    assert sorted(board.results) == [0, 8]
    assert board.best()["version"] == [1, 8]
    assert board.improvement()["set-0"]["after"] == 0.7
    assert not board.wants(4)
    assert "the evaluation of step 4 is damaged" in caplog.text
    await board.coordinator.evaluate(4, Version(1, 4))
    assert not board.pending
