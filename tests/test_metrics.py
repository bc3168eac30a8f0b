"""pipeline.metrics: rows under the field's names, in the store and in the run's folder."""

import json

import numpy as np
import pytest

from pipeline import metrics
from pipeline.clock import SystemClock
from pipeline.storage import Conflict, MemoryStorage, Object
from pipeline.versions import Version


def test_a_group_without_spread_or_without_two_valid_samples_counts_as_zero_std():
    rewards = np.array([1.0, 1.0, 0.0, 1.0, np.nan, 1.0, np.nan, np.nan])
    groups = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    row = metrics.of_rewards(rewards, np.isfinite(rewards), groups, {})
    assert row["reward/frac_zero_std"] == 0.75  # all but group 1
    assert row["reward/mean"] == 0.8
    assert row["reward/frac_invalid"] == 0.375


def test_parts_of_the_reward_are_averaged_over_valid_samples():
    rewards, valid = np.array([1.0, 0.0, 5.0]), np.array([True, True, False])
    row = metrics.of_rewards(rewards, valid, np.array([0, 0, 1]), {"brief": np.array([0.2, 0.4, 9.0])})
    assert row["reward/brief/mean"] == pytest.approx(0.3)
    assert (row["reward/max"], row["reward/min"]) == (1.0, 0.0)


def test_no_valid_sample_at_all_still_gives_finite_numbers():
    rewards = np.array([np.nan, np.nan])
    row = metrics.of_rewards(rewards, np.isfinite(rewards), np.array([0, 0]), {"part": rewards})
    assert all(np.isfinite(value) for value in row.values())
    assert row["reward/frac_zero_std"] == 1.0


async def test_a_row_goes_to_the_store_and_to_the_run_folder(tmp_path):
    storage = MemoryStorage(SystemClock())
    recorder = metrics.Recorder(storage, tmp_path)
    await recorder.record(Version(2, 7), {"reward/mean": 0.5, "actor/ppo_kl": float("nan")}, created=12.0)
    recorder.close()
    stored = json.loads((await storage.get("metrics/v1/t000002-s00000000000000000007.json")).data)
    assert stored == {"term": 2, "step": 7, "time": 12.0, "reward/mean": 0.5, "actor/ppo_kl": None}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == stored
    assert list((tmp_path / "tensorboard").iterdir())


async def test_a_step_is_recorded_once_a_term():
    recorder = metrics.Recorder(MemoryStorage(SystemClock()), None)
    await recorder.record(Version(1, 1), {"reward/mean": 0.1}, created=0.0)
    await recorder.record(Version(2, 1), {"reward/mean": 0.1}, created=1.0)
    with pytest.raises(Conflict):
        await recorder.record(Version(2, 1), {"reward/mean": 0.2}, created=2.0)


def test_a_line_cut_by_a_kill_does_not_swallow_the_next_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    metrics.append(path, '{"step": 2}')
    assert path.read_text().splitlines() == ['{"step": 1}', '{"st', '{"step": 2}']


def test_the_steady_rate_is_all_samples_over_all_seconds_but_those_of_the_first_steps():
    rows = [{"perf/samples": 8.0, "perf/step_s": seconds} for seconds in (90.0, 30.0, 1.0, 3.0)]
    assert metrics.steady_rate(rows, "samples") == 4.0
    assert metrics.steady_rate(rows[:2], "samples") == pytest.approx(16 / 120)
    assert metrics.steady_rate([], "samples") == 0.0


async def test_stored_rows_are_read_back_by_step_each_from_the_highest_term():
    storage = MemoryStorage(SystemClock())
    recorder = metrics.Recorder(storage, None)
    for term, step in ((1, 1), (1, 2), (2, 2), (2, 10)):
        await recorder.record(Version(term, step), {"perf/samples": 1.0}, 0.0)
    await storage.put("metrics/v1/best.json", b"stray")
    assert [(row["term"], row["step"]) for row in await metrics.stored(storage)] == [(1, 1), (2, 2), (2, 10)]


@pytest.mark.parametrize("damaged", [b"{", b"[]", b"[" * 100_000, None])
async def test_a_damaged_row_is_left_out_and_said_so(clock, caplog, damaged):
    storage = MemoryStorage(clock)
    recorder = metrics.Recorder(storage, None)
    for step in (1, 2):
        await recorder.record(Version(1, step), {}, 0.0)
    key = f"metrics/v1/{Version(1, 2)}.json"
    whole = storage.memory.objects[key]
    storage.memory.objects[key] = Object(whole.info, damaged or whole.data[:-1], {} if damaged else whole.metadata)
    assert [row["step"] for row in await metrics.stored(storage)] == [1]
    assert f"the metrics of {Version(1, 2)} are damaged" in caplog.text
