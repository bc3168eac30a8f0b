"""pipeline.trainer, whole, with a worker that needs no vLLM (fake_worker): real store, protocol, model and ranks."""

import asyncio
import contextlib
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.request

import pytest
import torch

from pipeline import batching, codec, termination
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.background import Background
from pipeline.clock import SystemClock
from pipeline.config import RunConfig
from pipeline.lead import Lead
from pipeline.learner import Interrupted, Learner
from pipeline.model import attention
from pipeline.storage import Storage, StorageError, open_storage
from pipeline.trainer import Hopeless, Stopped, Trainer, _stop_on_signal
from pipeline.trainer_log import Collect, Fenced, GroupRef, Plan, Stop, Withdraw, decode
from pipeline.versions import Version
from tests import daemons, fake_worker, models

CPU = torch.device("cpu")
PPO = {"algorithm__type": "ppo", "algorithm__parameters": ALGORITHMS["ppo"].parameters}
EXPECTED = """
reward/mean reward/std reward/low/mean reward/frac_zero_std loss/policy loss/entropy actor/grad_norm actor/lr
actor/ppo_kl actor/clip_frac advantage/mean advantage/std mismatch/kl mismatch/logprob_abs_diff mismatch/ess
async/staleness_mean async/staleness_max async/queue_size async/dropped_stale async/wait_for_batch_s
response_length/mean response_length/max response_length/clip_ratio perf/samples_per_s perf/tokens_per_s
perf/tokens_per_s_per_rank perf/step_s perf/forward_backward_s perf/weight_publish_s perf/peak_memory_gib
"""


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one rank


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with a random Qwen2 of 0.1 M parameters."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    models.tiny(str(folder), layers=2, hidden=64)
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in the same order whatever else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def configure(tmp_path, tiny, name="run", **changes):
    content = {
        "name": "sums",
        "run_id": name,
        "model": {"uri": str(tiny), "path": str(tiny)},
        "data": {"sets": [{"name": "sums", "generator": "reasoning-gym/chain_sum"}]},
        "rewards": [{"name": "low", "library": "generator"}],
        "algorithm": {
            "type": "grpo",
            "total_steps": 6,
            "prompts_per_step": 2,
            "group_size": 4,
            "max_staleness": 0,
            "learning_rate": 1e-3,
            "sampling": {"max_new_tokens": 12},
            "parameters": ALGORITHMS["grpo"].parameters,
        },
        "rollout": {"poll_s": 0.02, "heartbeat_s": 0.3, "flush_s": 0.02, "max_model_len": 64},
        "trainer": {"max_tokens_per_micro_batch": 64, "lora": {"rank": 4, "alpha": 8}},
        "checkpoint": {"every_steps": 2, "keep_last": 2},
        "store": {"uri": f"file://{tmp_path}/{name}"},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = content
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return RunConfig.model_validate(content)


def storage_of(config):
    return open_storage(config.store.uri)


@contextlib.contextmanager
def worker(config, make=None, **options):
    """A fake worker at work, in a thread of its own."""
    background = Background()
    storage = storage_of(config)
    future = background.submit(fake_worker.work(config, storage, make or fake_worker.synthetic(config), **options))
    try:
        yield background
        if future.done():
            future.result()
    finally:
        background.close()


def train(config, stop_after=None):
    """Run one trainer in this process, as the only rank; `stop_after` a step it is asked to stop, as by SIGTERM."""
    background, stopping, storage = Background(), threading.Event(), storage_of(config)
    lead = Lead(config, storage, SystemClock(), random.Random(), stopping.set)
    loop = Trainer(config, storage, background, stopping, lead)
    record = lead.record

    async def record_and_stop(version, row):
        await record(version, row)
        if version.step == stop_after:
            stopping.set()

    lead.record = record_and_stop
    try:
        loop.run(CPU)
    finally:
        background.run(lead.close())
        background.close()
    return loop


def listed(config, folder):
    background = Background()
    try:
        storage = storage_of(config)
        infos = background.run(storage.list(folder))
        return {info.key: background.run(storage.get(info.key)).data for info in infos}
    finally:
        background.close()


def records(config):
    return [decode(data) for _, data in sorted(listed(config, "trainer/log").items())]


def trained(loop):
    return {name: tensor.clone() for name, tensor in loop.learner.tensors().items()}


def assert_same(first, second, tolerance=0.0):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=0, atol=tolerance), name


def test_a_run_trains_every_step_and_leaves_a_complete_record(tmp_path, tiny):
    config = configure(tmp_path, tiny)
    with worker(config):
        loop = train(config)
    plans = [record for record in records(config) if isinstance(record, Plan)]
    assert [plan.step for plan in plans] == [1, 2, 3, 4, 5, 6]
    assert sorted(group.index for plan in plans for group in plan.groups) == list(range(12))
    assert isinstance(records(config)[-1], Stop)
    assert records(config)[-1].reason == "complete"
    rows = [json.loads(data) for _, data in sorted(listed(config, "metrics/v1").items())]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for name in EXPECTED.split():
        assert all(row[name] is not None for row in rows), name
    assert {row["async/staleness_max"] for row in rows} == {0.0}
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert loop.lead.status()["phase"] == "complete"
    checkpoints = {key.split("/")[1][-2:] for key in listed(config, "checkpoints")}
    assert checkpoints == {"04", "06"}
    counted, left = loop.lead.status()["store"], listed(config, "")
    assert len(listed(config, "checkpoints")) < counted["objects"] <= len(left)
    assert sum(map(len, listed(config, "checkpoints").values())) < counted["bytes"] <= sum(map(len, left.values()))


# Going on after an interruption


def four_steps(tmp_path, tiny, **changes):
    """Checkpoints after steps 2 and 4."""
    return configure(tmp_path, tiny, algorithm__total_steps=4, **changes)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny):
    """The trained tensors of four steps in one go."""
    torch.set_num_threads(1)
    config = four_steps(tmp_path_factory.mktemp("uninterrupted"), tiny)
    with worker(config):
        return trained(train(config))


def test_a_stopped_and_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path, tiny, uninterrupted):
    config = four_steps(tmp_path, tiny)
    with worker(config):
        with pytest.raises(Stopped):
            train(config, stop_after=3)
        assert max(listed(config, "checkpoints")).split("/")[1].endswith("03")
        assert_same(trained(train(config)), uninterrupted)


def test_ppo_with_all_four_roles_and_an_adaptive_coefficient_resumes_bit_for_bit(tmp_path, tiny):
    changes = PPO | {
        "algorithm__total_steps": 4,
        "algorithm__kl_coefficient": 0.1,
        "algorithm__kl_target": 1e-3,
        "algorithm__kl_horizon": 20,
        "algorithm__kl_placement": "reward",
        "algorithm__parameters": PPO["algorithm__parameters"] | {"value_regularization": 0.1, "critic_warmup_steps": 1},
    }
    whole, halves = configure(tmp_path, tiny, "whole", **changes), configure(tmp_path, tiny, "halves", **changes)
    with worker(whole):
        expected = train(whole)
    with worker(halves):
        with pytest.raises(Stopped):
            train(halves, stop_after=2)
        loop = train(halves)
    assert {"model.value_head.weight", "optimizer.value_head.weight.exp_avg"} <= trained(loop).keys()
    assert_same(trained(loop), trained(expected))
    assert loop.learner.kl_coefficient == expected.learner.kl_coefficient != 0.1


class Killed(BaseException):
    """Nothing catches it: as if the process were gone."""


@pytest.mark.parametrize("moment", ["next_plan", "publish", "record"])
@pytest.mark.parametrize("step", [1, 2, 3], ids=["before a checkpoint", "at one", "after one"])
def test_a_killed_run_replays_its_log_and_ends_bit_for_bit_the_same(
    tmp_path, tiny, uninterrupted, monkeypatch, moment, step
):
    config = four_steps(tmp_path, tiny)
    original = getattr(Lead, moment)

    async def killed(lead, subject, *arguments, **options):
        result = await original(lead, subject, *arguments, **options)
        if getattr(subject, "step", subject) == step:
            raise Killed
        return result

    with worker(config):
        monkeypatch.setattr(Lead, moment, killed)
        with pytest.raises(Killed):
            train(config)
        monkeypatch.undo()
        loop = train(config)
    assert_same(trained(loop), uninterrupted)
    plans = [record for record in records(config) if isinstance(record, Plan)]
    assert [plan.step for plan in plans] == [1, 2, 3, 4]  # none is planned twice
    assert loop.version.term == 2


def test_a_damaged_newest_checkpoint_costs_steps_but_not_the_result(tmp_path, tiny, uninterrupted, caplog):
    config = four_steps(tmp_path, tiny)
    with worker(config):
        with pytest.raises(Stopped):
            train(config, stop_after=3)
        newest = max(pathlib.Path(f"{tmp_path}/run/checkpoints").iterdir())
        next(newest.glob("*.distcp")).write_bytes(b"torn")
        assert_same(trained(train(config)), uninterrupted)
    assert f"checkpoint {newest.name} is damaged" in caplog.text


@pytest.mark.parametrize("failures", [0, 1], ids=["slow", "failing once"])
def test_a_stop_waits_until_the_checkpoint_is_in_the_store(
    tmp_path, tiny, uninterrupted, monkeypatch, caplog, failures
):
    config = four_steps(tmp_path, tiny)
    put_file, attempts = Storage.put_file, []

    async def slow(storage, key, path):
        if key.endswith(".distcp"):
            attempts.append(key)
            await asyncio.sleep(0.3)
            if len(attempts) <= failures:
                raise StorageError(f"PUT {key}: no answer")
        return await put_file(storage, key, path)

    with worker(config):
        monkeypatch.setattr(Storage, "put_file", slow)
        with pytest.raises(Stopped):
            train(config, stop_after=2)
        monkeypatch.undo()
        assert max(listed(config, "checkpoints")).split("/")[1].endswith("02")
        assert len(attempts) == 1 + failures
        assert ("could not be written" in caplog.text) == bool(failures)
        assert_same(trained(train(config)), uninterrupted)


def test_a_stop_that_outlasts_its_grace_ends_without_a_checkpoint_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("MILES_TERMINATION_LOG", f"{tmp_path}/termination")
    stopping, ended = threading.Event(), []
    monkeypatch.setattr(os, "_exit", ended.append)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _stop_on_signal(stopping, grace_s=0.05)
        signal.raise_signal(signal.SIGTERM)
        assert stopping.is_set()
        wait_until(lambda: ended)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == [termination.FAILED]
    assert "no checkpoint was written within 0.05 s; the one before it stands" in (tmp_path / "termination").read_text()


def test_a_finished_run_that_is_started_again_trains_nothing_and_ends_complete(
    tmp_path, tiny, uninterrupted, monkeypatch
):
    monkeypatch.setenv("MILES_RUN_DIR", f"{tmp_path}/local")
    config = four_steps(tmp_path, tiny)
    with worker(config):
        train(config)
    summary = json.loads((tmp_path / "local" / "summary.json").read_text())
    with worker(config, instance="rollout-1"):
        loop = train(config)
    again = json.loads((tmp_path / "local" / "summary.json").read_text())
    assert again == summary | {"term": 2}
    assert again["samples_per_s"] > 0
    assert_same(trained(loop), uninterrupted)
    assert [record.reason for record in records(config) if isinstance(record, Stop)] == ["complete", "complete"]


def test_a_trainer_that_another_has_replaced_ends_fenced(tmp_path, tiny):
    config = configure(tmp_path, tiny)
    first: list[BaseException] = []

    def run_first():
        try:
            train(config)
        except Exception as error:
            first.append(error)

    thread = threading.Thread(target=run_first)
    thread.start()  # waits: there is no worker
    wait_until(lambda: any(key.startswith("weights") for key in listed(config, "weights")))
    with worker(config):
        loop = train(config)
    thread.join(50)
    assert isinstance(first[0], Fenced)
    assert loop.version == Version(2, 6)


def wait_until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Kinds of training


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer__lora": None},
        {"algorithm__updates_per_step": 2},
        {"algorithm__kl_coefficient": 0.1},
        {"algorithm__kl_coefficient": 0.1, "algorithm__kl_placement": "reward", "algorithm__kl_estimator": "k1"},
        {"algorithm__kl_coefficient": 0.1, "trainer__lora": None},
        {"algorithm__max_staleness": 2, "algorithm__lr_schedule": "cosine", "algorithm__warmup_steps": 1},
        PPO,
        PPO | {"trainer__lora": None, "algorithm__updates_per_step": 2},
    ],
    ids=["full", "two updates", "kl in the loss", "kl in the reward", "full with kl", "stale", "ppo", "full ppo"],
)
def test_every_kind_of_training_runs_and_changes_the_policy(tmp_path, tiny, changes):
    config = configure(tmp_path, tiny, algorithm__total_steps=3, checkpoint__every_steps=0, **changes)
    with worker(config):
        loop = train(config)
    rows = [json.loads(data) for _, data in sorted(listed(config, "metrics/v1").items())]
    assert [row["actor/skipped"] for row in rows] == [0.0] * 3
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert max(row["async/staleness_max"] for row in rows) <= config.algorithm.max_staleness
    if config.algorithm.kl_coefficient and config.algorithm.kl_placement == "loss":
        assert abs(rows[0]["loss/kl"]) < 1e-6  # the reference is where training starts
        assert rows[-1]["loss/kl"] > 1e-6
    published = sorted(listed(config, "weights"))
    assert any(name.endswith("adapter_model.safetensors" if config.trainer.lora else "model.safetensors")
               for name in published)  # fmt: skip
    assert loop.version.step == 3


def test_only_weights_that_somebody_may_ask_for_are_kept(tmp_path, tiny):
    config = configure(tmp_path, tiny, algorithm__max_staleness=1)
    with worker(config):
        train(config)
    assert sorted({key.split("/")[1][-2:] for key in listed(config, "weights")}) == ["04", "05", "06"]


def test_experience_that_no_checkpoint_needs_is_deleted_where_that_is_asked_for(tmp_path, tiny, uninterrupted):
    config = four_steps(
        tmp_path, tiny, store__retention="window", rollout__lease_timeout_s=1.5, checkpoint__keep_last=1
    )
    with worker(config) as background:
        with pytest.raises(Stopped):
            train(config, stop_after=3)
        before = set(listed(config, "rollouts/v1"))
        background.run(asyncio.sleep(2))  # the grace period
        assert_same(trained(train(config)), uninterrupted)
    assert before - set(listed(config, "rollouts/v1"))
    assert [record.below for record in records(config) if isinstance(record, Collect)] == sorted(
        record.below for record in records(config) if isinstance(record, Collect)
    )


def test_a_shard_that_rots_after_it_was_planned_costs_its_groups_and_not_the_run(tmp_path, tiny, monkeypatch, caplog):
    config = configure(
        tmp_path, tiny, algorithm__prompts_per_step=3, algorithm__total_steps=3, rollout__max_concurrent_groups=1
    )

    async def plan_and_rot(self, step, next_plan=Lead.next_plan):
        plan = await next_plan(self, step)
        if step == 2:
            tmp_path.joinpath("run", plan.groups[1].key).write_bytes(b"rot")
        return plan

    monkeypatch.setattr(Lead, "next_plan", plan_and_rot)
    with worker(config):
        loop = train(config)
    assert loop.version.step == 3
    assert "step 2 is trained without the groups of" in caplog.text
    records = [decode(data) for _, data in sorted(listed(config, "trainer/log").items())]
    (withdrawn,) = [record for record in records if isinstance(record, Withdraw)]
    assert [drop.reason for drop in withdrawn.drops] == ["damaged"]


def test_a_step_that_has_lost_all_its_shards_ends_the_run_in_one_sentence(tmp_path, tiny, monkeypatch):
    config = configure(tmp_path, tiny)

    async def plan_and_delete(self, step, next_plan=Lead.next_plan):
        plan = await next_plan(self, step)
        for group in plan.groups:
            tmp_path.joinpath("run", group.key).unlink(missing_ok=True)
        return plan

    monkeypatch.setattr(Lead, "next_plan", plan_and_delete)
    with (
        worker(config),
        pytest.raises(Hopeless, match=r"step 1: none of its groups can be read any more .*restore these"),
    ):
        train(config)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(tmp_path, tiny):
    config = configure(tmp_path, tiny)
    learner = Learner(config, CPU)
    batch = synthetic_batch(config)
    learner.update(batch, 1, lambda: False)
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    loss = learner.algorithm.loss

    def poisoned(*arguments):
        value, logged = loss(*arguments)
        return value * float("nan"), logged

    learner.algorithm = types.SimpleNamespace(advantages=learner.algorithm.advantages, loss=poisoned)
    assert learner.update(batch, 2, lambda: False)["actor/skipped"] == 1.0
    assert_same(learner.tensors(), before)
    learner.algorithm.loss = loss
    assert learner.update(batch, 3, lambda: False)["actor/skipped"] == 0.0


def test_of_several_updates_one_that_is_not_finite_is_told_as_their_share(tmp_path, tiny):
    config = configure(tmp_path, tiny, algorithm__updates_per_step=2)
    learner = Learner(config, CPU)
    batch = synthetic_batch(config)
    wanted = learner.update(batch, 1, lambda: False)["actor/grad_norm"]
    assert wanted > 0
    real, norms = learner._apply_gradients, []

    def second_is_damaged():
        norms.append(real())
        return (math.nan, 0.0) if len(norms) == 2 else norms[0]

    learner._apply_gradients = second_is_damaged
    row = learner.update(batch, 2, lambda: False)
    assert (row["actor/skipped"], row["actor/grad_norm"]) == (0.5, norms[0][0])


def test_several_such_steps_in_a_row_end_the_run_with_a_remedy(tmp_path, tiny):
    loop = Trainer(configure(tmp_path, tiny), None, None, threading.Event(), None)
    for step in (1, 2, 3, 4):
        loop._count_skips({"actor/skipped": 1.0}, step)
    loop._count_skips({"actor/skipped": 0.0}, 5)
    for step in (6, 7, 8, 9):
        loop._count_skips({"actor/skipped": 1.0}, step)
    with pytest.raises(Hopeless, match=r"5 steps in a row, the last of them step 10: .*learning_rate"):
        loop._count_skips({"actor/skipped": 1.0}, 10)


def synthetic_batch(config):
    """The batch of a plan whose groups are synthetic 0 and 1."""
    background, storage = Background(), open_storage(f"memory://{time.monotonic_ns()}")
    try:
        make = fake_worker.synthetic(config)
        data = codec.encode([make(index, Version(1, 0)) for index in (0, 1)])
        info = background.run(storage.create("shard.parquet", data))
        size = config.algorithm.group_size
        groups = tuple(GroupRef(n, "shard.parquet", info.sha256, n * size, (n + 1) * size) for n in (0, 1))
        return background.run(batching.load_plan(storage, Plan(1, 1, groups)))
    finally:
        background.close()


def test_a_step_that_is_interrupted_changes_nothing(tmp_path, tiny):
    config = configure(tmp_path, tiny, trainer__max_tokens_per_micro_batch=24)
    learner = Learner(config, CPU)
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    answers = iter([False, True])  # after the first micro-batch
    with pytest.raises(Interrupted):
        learner.update(synthetic_batch(config), 1, lambda: next(answers))
    assert_same(learner.tensors(), before)
    assert all(parameter.grad is None for parameter in learner.parameters.values())


# Evaluation and delivery


def test_evaluations_are_asked_for_at_the_start_every_so_often_and_at_the_end(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("MILES_RUN_DIR", f"{tmp_path}/local")
    config = configure(
        tmp_path, tiny, evaluation={"every_steps": 4, "sets": [{"name": "held-out", "generator": "reasoning-gym/x"}]},
        output={"uri": f"file://{tmp_path}/output"},
    )  # fmt: skip
    with worker(config):
        loop = train(config)
    results = {json.loads(data)["step"]: json.loads(data) for data in listed(config, "evaluations/v1").values()}
    assert sorted(results) == [0, 4, 6]
    assert results[0]["sets"]["held-out"]["kind"] == "base"
    assert results[4]["sets"]["held-out"]["kind"] == "adapter"
    assert loop.lead.status()["evaluation"]["held-out"]["step"] == 6

    summary = json.loads((tmp_path / "local" / "summary.json").read_text())
    compared = summary["evaluation"]["held-out"]
    assert compared["after"] > compared["before"]
    assert compared["low"] < compared["difference"] < compared["high"]
    assert summary["output"] == {"uri": f"file://{tmp_path}/output", "version": [1, 6]}
    assert summary["samples_per_s"] > 0
    lines = [json.loads(line) for line in (tmp_path / "local" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_the_delivered_adapter_loads_with_peft_and_is_the_trained_policy(tmp_path, tiny):
    config = configure(tmp_path, tiny, output={"uri": f"file://{tmp_path}/output"})
    with worker(config):
        loop = train(config)
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    delivered = peft.PeftModel.from_pretrained(base, f"{tmp_path}/output").eval()
    transformers.AutoTokenizer.from_pretrained(f"{tmp_path}/output")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        loop.learner.policy.base.set_attn_implementation(attention.STOCK)
        expected = loop.learner.policy.base(ids).logits
        assert torch.allclose(delivered(ids).logits, expected, atol=1e-5)
    assert json.loads((tmp_path / "output" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny)
    assert "LoRA adapter (rank 4, alpha 8)" in (tmp_path / "output" / "README.md").read_text()


def test_the_best_version_is_delivered_where_that_is_asked_for(tmp_path, tiny):
    config = configure(
        tmp_path, tiny, evaluation={"every_steps": 2, "sets": [{"name": "held-out", "generator": "reasoning-gym/x"}]},
        output={"uri": f"file://{tmp_path}/output", "what": "best"}, trainer__lora=None,
    )  # fmt: skip
    best_at_2 = {0: 0.1, 2: 0.9, 4: 0.2, 6: 0.3}
    with worker(config, scores=best_at_2.get):
        train(config)
    manifest = json.loads((tmp_path / "output" / "MANIFEST.json").read_text())
    assert manifest["version"] == [1, 2]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(manifest["files"])
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "output")


def test_the_best_version_survives_a_restart_from_a_checkpoint_before_it(tmp_path, tiny, monkeypatch):
    config = configure(
        tmp_path, tiny, evaluation={"every_steps": 2, "sets": [{"name": "held-out", "generator": "reasoning-gym/x"}]},
        output={"uri": f"file://{tmp_path}/output", "what": "best"}, checkpoint__every_steps=3,
    )  # fmt: skip
    record = Lead.record

    async def killed(lead, version, row):
        await record(lead, version, row)
        if version.step == 5:
            await lead.scoreboard.wait()
            raise Killed

    with worker(config, scores={0: 0.1, 2: 0.2, 4: 0.9, 6: 0.3}.get):
        monkeypatch.setattr(Lead, "record", killed)
        with pytest.raises(Killed):
            train(config)
        monkeypatch.undo()
        train(config)
    assert json.loads((tmp_path / "output" / "MANIFEST.json").read_text())["version"] == [1, 4]


def test_steps_that_are_replayed_publish_no_weights(tmp_path, tiny, monkeypatch):
    config = configure(tmp_path, tiny, checkpoint__every_steps=0, algorithm__max_staleness=4)
    record = Lead.record

    async def killed(lead, version, row):
        await record(lead, version, row)
        if version.step == 4:
            raise Killed

    with worker(config):
        monkeypatch.setattr(Lead, "record", killed)
        with pytest.raises(Killed):
            train(config)
        monkeypatch.undo()
        train(config)
    second = sorted(key.split("/")[1][-2:] for key in listed(config, "weights") if "t000002" in key and "MANIF" in key)
    assert second == ["04", "05", "06"]


def test_the_policy_learns_from_samples_of_its_published_weights(tmp_path, tiny):
    config = configure(
        tmp_path, tiny, algorithm__total_steps=20, algorithm__prompts_per_step=4, algorithm__group_size=8,
        algorithm__max_staleness=1, algorithm__learning_rate=2e-2, trainer__max_tokens_per_micro_batch=512,
    )  # fmt: skip
    torch.manual_seed(0)
    sampled = fake_worker.Sampled(config, storage_of(config), border=40)
    with worker(config, sampled):
        train(config)
    rows = [json.loads(data) for _, data in sorted(listed(config, "metrics/v1").items())]
    rewards = [row["reward/mean"] for row in rows]
    # Which version samples what is a matter of time: it learns 0.17 or more, and chance alone makes 0.02.
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.1, rewards
    # The sampler is transformers on merged weights, the trainer its own pass with the adapter: they must agree.
    assert max(row["mismatch/logprob_abs_diff"] for row in rows if row["async/staleness_max"] == 0) < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tiny_ppo_job_learns(tmp_path, tiny):
    config = configure(
        tmp_path, tiny, algorithm__type="ppo", algorithm__total_steps=25, algorithm__prompts_per_step=8,
        algorithm__group_size=8, algorithm__learning_rate=3e-3, trainer__max_tokens_per_micro_batch=1024,
        trainer__lora=None, checkpoint__every_steps=0,
        algorithm__parameters=PPO["algorithm__parameters"] | {"critic_learning_rate_scale": 2.0},
    )  # fmt: skip
    torch.manual_seed(0)
    sampled = fake_worker.Sampled(config, storage_of(config), border=14)
    with worker(config, sampled):
        train(config)
    rows = [json.loads(data) for _, data in sorted(listed(config, "metrics/v1").items())]
    rewards = [row["reward/mean"] for row in rows]
    assert rewards[0] < 0.2
    assert sum(rewards[-5:]) / 5 > 0.8, rewards
    assert max(row["critic/explained_var"] for row in rows) > 0


# As a process, under torchrun


@contextlib.contextmanager
def launched(config, tmp_path, ranks):
    """`python -m pipeline.launch`; (process, port of its status server)."""
    (tmp_path / "run.json").write_text(config.model_dump_json())
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PET_NPROC_PER_NODE": str(ranks),
        "MILES_CONFIG": str(tmp_path / "run.json"),
        "MILES_TERMINATION_LOG": str(tmp_path / "termination"),
        "MILES_STATUS_HOST": "127.0.0.1",
        "MILES_STATUS_TOKEN": "secret",
    }
    with daemons.held_port() as port, open(tmp_path / "output.txt", "a") as output:
        environment["MILES_STATUS_PORT"] = str(port)
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.launch"], env=environment, stdout=output, stderr=output
        )
        try:
            yield process, port
        finally:
            process.kill()
            process.wait()


def stopped_after(config, tmp_path, process, step, stop):
    """Ask it to stop once `step` is trained; its exit code."""
    wait_until(lambda: process.poll() is not None or len(listed(config, "metrics/v1")) >= step, 120)
    stop()
    assert process.wait(90) is not None
    return process.returncode, (tmp_path / "termination").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_stop_together_and_one_rank_goes_on_to_the_same_result(tmp_path, tiny):
    config, whole = configure(tmp_path, tiny), configure(tmp_path, tiny, "whole")
    with worker(whole):
        uninterrupted = trained(train(whole))

    def pause():
        request = urllib.request.Request(f"http://127.0.0.1:{port}/pause", method="POST")
        request.add_header("Authorization", "Bearer secret")
        assert urllib.request.urlopen(request, timeout=30).status == 202

    with worker(config):
        with launched(config, tmp_path, ranks=2) as (process, port):
            code, reason = stopped_after(config, tmp_path, process, 1, pause)
        assert code == termination.STOPPED, (tmp_path / "output.txt").read_text()
        assert reason.count("stopped on request: checkpoint t000001-s") == 2
        with launched(config, tmp_path, ranks=2) as (process, port):
            already = len(listed(config, "metrics/v1"))
            code, reason = stopped_after(config, tmp_path, process, already + 1, process.terminate)
        assert code == termination.STOPPED, (tmp_path / "output.txt").read_text()
        assert "stopped on request: checkpoint t000002-s" in reason
        loop = train(config)
    assert loop.version == Version(3, 6)
    assert_same(trained(loop), uninterrupted, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_that_waits_for_workers_says_so_and_stops_at_once(tmp_path, tiny):
    config = configure(tmp_path, tiny)
    with launched(config, tmp_path, ranks=1) as (process, port):

        def status():
            with contextlib.suppress(OSError):
                return json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=30))
            assert process.poll() is None, (tmp_path / "output.txt").read_text()
            return {}

        wait_until(lambda: status().get("waiting_for"), 120)
        assert status()["waiting_for"] == "rollout workers (none registered)"
        assert status()["phase"] == "waiting"
        process.terminate()
        assert process.wait(60) == termination.STOPPED


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_users_error_found_by_a_rank_exits_3_with_its_one_line(tmp_path, tiny):
    config = configure(tmp_path, tiny, trainer__lora={"rank": 4, "alpha": 8, "targets": ["no_such_layer"]})
    with launched(config, tmp_path, ranks=2) as (process, _):
        assert process.wait(120) == termination.USER_ERROR
    reason = (tmp_path / "termination").read_text()
    assert reason.startswith("[rank ")
    assert "trainer.lora.targets: the model has no layers called no_such_layer" in reason
    assert "Traceback" not in (tmp_path / "output.txt").read_text()
