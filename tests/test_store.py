"""`miles store`: the check of a store, and what a run has left in one."""

import asyncio
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from pipeline import experience, weights
from pipeline.archive import Shelf
from pipeline.config import RunConfig
from pipeline.coordinator import Coordinator
from pipeline.experience import Rollout, RolloutGroup
from pipeline.messages import WriterEntry, evaluation_key, shard_key
from pipeline.report import history
from pipeline.resume import State
from pipeline.storage import (
    MemoryBucket,
    MemoryStorage,
    Object,
    ObjectInfo,
    Storage,
    StorageError,
    open_storage,
)
from pipeline.store import __main__ as command
from pipeline.store import garbage, speed
from pipeline.store.garbage import Facts
from pipeline.trainer_log import GroupRef, Plan
from pipeline.versions import Version
from pipeline.writer import Report, Writer
from tests.conftest import SkippingClock, copy
from tests.test_storage import Careless

STEPS = 2


def group(index: int, completion: str = "4") -> RolloutGroup:
    rollouts = [
        Rollout([7, 2], [-0.5, -0.1], completion, "stop", reward, {"sum": reward}, None, [(0, Version(1, 0))])
        for reward in (0.0, 1.0)
    ]
    return RolloutGroup(index, "sums", "2 + 2 =", "4", [5, 9], rollouts, 0.0)


RUN = "store/default/sums/r1"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> pathlib.Path:
    """A folder with RUN, a run that two steps of two groups each have finished."""
    folder = tmp_path_factory.mktemp("finished")
    asyncio.run(_finish(open_storage(f"file://{folder}/{RUN}"), f"file://{folder}/{RUN}"))
    return folder


@pytest.fixture
def run(finished, tmp_path) -> str:
    """The URI of that run, in a folder of the test's own."""
    uri = f"file://{tmp_path}/{RUN}"
    told = (finished / RUN / "run.json").read_text().replace(str(finished), str(tmp_path))
    asyncio.run(copy(f"file://{finished}/{RUN}", uri))
    asyncio.run(open_storage(uri).put("run.json", told.encode()))
    return uri


@pytest.fixture
def folder(run, tmp_path) -> pathlib.Path:
    """The folder of that run, as `miles run` leaves it."""
    content = json.loads(tmp_path.joinpath("store/default/sums/r1/run.json").read_text())["config"]
    made = tmp_path / "runs/sums"
    made.joinpath("logs").mkdir(parents=True)
    made.joinpath("run.json").write_text(json.dumps(content))
    return made


async def _finish(storage: Storage, uri: str) -> None:
    clock = SkippingClock()
    config = RunConfig.model_validate(
        {
            "name": "sums",
            "run_id": "r1",
            "model": {"uri": "none", "path": "none"},
            "data": {"sets": []},
            "rewards": [{"name": "sum"}],
            "algorithm": {"type": "grpo", "total_steps": STEPS, "prompts_per_step": 2, "group_size": 2},
            "rollout": {"max_concurrent_groups": 2, "poll_s": 0.0},
            "store": {"uri": uri},
        }
    )
    await storage.create("run.json", json.dumps({"config": config.model_dump(mode="json")}).encode())
    trainer = Coordinator(storage, config, clock, random.Random(0))
    writer = Writer(storage, "rollout-0", clock, random.Random(1))
    await trainer.take_over()
    await writer.register()
    await trainer.publish(Version(1, 0))
    for step in range(1, STEPS + 1):
        plan = asyncio.create_task(trainer.next_plan(step))
        while not plan.done():
            clock.time += 10
            await trainer.tick()
            for index in (await writer.sync(Report(Version(1, step - 1)))).leases:
                await writer.commit([group(index, "four\x1b[2J" if index == 3 else "4")])
        await trainer.finish_step(step)
        await trainer.publish(Version(1, step))
    checkpoint = {"version": [1, STEPS], "state": {"coordinator": trainer.state()}}
    await storage.create(f"checkpoints/{Version(1, STEPS)}/MANIFEST.json", json.dumps(checkpoint).encode())
    await storage.create(f"checkpoints/{Version(1, 1)}/rank0.distcp", b"the trainer was killed before the manifest")
    await trainer.stop("complete")


def keys(uri: str) -> set[str]:
    return {info.key for info in asyncio.run(open_storage(uri).list(""))}


def test_the_check_says_what_holds_and_how_fast_it_is_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed, "LARGE", 1_000_000)
    assert command.main(["check", f"file://{tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines[:6]] == ["yes"] * 6
    assert "puts, 32 at once" in "".join(lines)
    assert list(tmp_path.iterdir()) == []


def test_the_check_of_a_store_leaves_what_it_rests_on(run, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "LARGE", 1_000_000)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file() and "locks" not in path.parts)
    assert command.main(["check", str(tmp_path / "store/default/sums/r1")]) == 0
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file() and "locks" not in path.parts) == before


def test_the_check_of_a_store_that_lets_every_writer_win_names_what_fails_and_the_remedy(capsys):
    MemoryBucket._named["careless"] = Careless(SkippingClock())
    assert command.main(["check", "memory://careless"]) == 2
    said = capsys.readouterr()
    assert "no  conditional create has one winner (If-None-Match)" in said.out
    assert "yes read after write" in said.out
    assert "use a store with atomic conditional writes" in said.err


class Denying(MemoryBucket):
    async def write(self, key, data, metadata, condition):
        raise StorageError(f"{self.name}/{key}: access denied (InvalidAccessKeyId: none); check the credentials")

    async def read(self, key):
        return await self.write(key, b"", {}, None)


def test_the_check_of_a_store_that_does_nothing_at_all_says_why_in_one_line(capsys):
    MemoryBucket._named["denying"] = Denying(SkippingClock(), "memory://denying")
    assert command.main(["check", "memory://denying"]) == 2
    said = capsys.readouterr()
    reason = "memory://denying: access denied (InvalidAccessKeyId: none); check the credentials"
    assert (said.out, said.err) == ("", f"miles store check: {reason}\n")


@pytest.mark.parametrize("name", ["{root}/tipo", "file://{root}/tipo", "file://{root}?x=1", "file://{root}#f", "tipo"])
def test_the_check_makes_no_mistyped_folder(name, tmp_path, monkeypatch, capsys):
    root = tmp_path / "store"
    root.mkdir()
    monkeypatch.chdir(root)
    assert command.main(["check", name.format(root=root)]) == 2
    assert "there is no such folder; make it first (mkdir -p)" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [root]


@pytest.mark.parametrize("verb", [["ls"], ["head"], ["stats"], ["export", "x.jsonl"], ["gc", "--dry-run"]])
def test_who_only_looks_writes_nothing_to_the_store(run, verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "store/default/sums/r1"
    shutil.rmtree(folder / ".miles")
    assert command.main([verb[0], "store/default/sums/r1", *verb[1:]]) == 0
    assert not folder.joinpath(".miles").exists()


def test_a_relative_folder_is_a_place(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "LARGE", 1_000_000)
    monkeypatch.chdir(tmp_path / "store/default/sums")
    assert command.main(["ls", "r1"]) == 0
    assert "run.json" in capsys.readouterr().out
    tmp_path.joinpath("new ü").mkdir()
    assert command.main(["check", "../../../new ü"]) == 0


def test_ls_says_when_a_copied_folder_has_lost_its_checksums(run, tmp_path, capsys):
    folder = tmp_path / "store/default/sums/r1"
    subprocess.run(["cp", "-a", str(folder), str(tmp_path / "copy")], check=True, timeout=60)
    assert command.main(["ls", str(tmp_path / "copy")]) == 0
    count = len(keys(run))
    assert f"miles store ls: {count} objects have no checksum beside them" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["store", "store/default/sums/r1/rollouts", "."])
def test_ls_of_what_is_no_run_counts_no_file_that_is_none_of_its_objects(run, place, tmp_path, capsys):
    tmp_path.joinpath("notes").write_text("mine")
    assert command.main(["ls", str(tmp_path / place)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lies = tmp_path.rglob("*") if place == "." else (tmp_path / place).rglob("*")
    count = sum(path.is_file() and ".miles" not in path.parts for path in lies)
    assert said.out.splitlines()[-1].split()[0] == str(count)


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/"])
@pytest.mark.parametrize("verb", [["ls"], ["check"], ["head"], ["stats"], ["export", "x.jsonl"], ["gc"]])
def test_the_folder_of_a_run_stands_for_its_place_in_the_store(folder, run, form, verb, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "LARGE", 1_000_000)
    monkeypatch.chdir(tmp_path)
    before = sorted(folder.rglob("*"))
    said = []
    for place in (form.format(folder), run):
        assert command.main([verb[0], place, *verb[1:]]) == 0
        said.append(re.sub(r" +[\d.,]+ (m?s|MB/s|/s)", "", capsys.readouterr().out))
    assert verb[0] == "gc" or said[0] == said[1]
    assert sorted(folder.rglob("*")) == before


def test_ls_shows_no_control_sequence(tmp_path, capsys):
    tmp_path.joinpath("four\x1b[2J").write_text("mine")
    assert command.main(["ls", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "four\\x1b[2J" in said
    assert "\x1b" not in said


def test_a_dead_endpoint_is_named_at_once_and_how_long_it_is_tried():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"  # nobody listens
    environment = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.store", "ls", "s3://bucket/run"],
        stderr=subprocess.PIPE, text=True, env=os.environ | environment,
    )  # fmt: skip
    try:
        said = process.stderr.readline()
    finally:
        process.kill()
        process.communicate()
    assert f"endpoint {url}, as AWS_ENDPOINT_URL says, does not answer" in said
    assert said.endswith("trying again for 120 s\n")


def test_ls_counts_what_lies_below_each_name(run, capsys):
    assert command.main(["ls", run]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = {line.split()[-1]: line.split()[0] for line in said.out.splitlines()}
    assert lines["rollouts/"] == "4"
    assert lines["run.json"] == "1"
    assert lines["trainer/"] == "4"


def test_head_shows_the_newest_samples_and_no_control_sequence(run, capsys):
    assert command.main(["head", run, "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert "index 3 of sums: 2 + 2 =" in said
    assert "1: reward 1, policy 0, 2 tokens, stop: four\\x1b[2J" in said
    assert "\x1b" not in said


def test_stats_count_steps_groups_and_tokens(run, capsys):
    assert command.main(["stats", run]) == 0
    said = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["store"] == run
    assert said["steps planned"] == "2 of 2"
    assert re.fullmatch(r"4, \d+\.\d KB", said["shards"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", said["last shard written"])
    assert said["groups planned"] == "4"
    assert said["samples"] == "8"
    assert said["completion tokens"] == "16, 2.0 a sample"
    assert said["over"] == "complete"


@pytest.mark.parametrize("verb", [["stats"], ["export", "samples.parquet"], ["gc"]])
def test_a_run_of_many_steps_and_attempts_can_be_counted_exported_and_tidied(run, verb, tmp_path):
    folder = tmp_path / "store/default/sums/r1"
    for name in ("metrics/v1", "attempts"):
        folder.joinpath(name).mkdir(parents=True)
    for step in range(1, STEPS + 1):
        folder.joinpath(f"metrics/v1/{Version(1, step)}.json").write_text("{}")
        folder.joinpath(f"attempts/{step}.json").write_bytes(folder.joinpath("run.json").read_bytes())
    assert command.main([verb[0], run, *(str(tmp_path / name) for name in verb[1:])]) == 0


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_thinned_items_are_evenly_spread_and_end_with_the_last(count):
    chosen = history.thin(range(7), count)
    assert (len(chosen), chosen[-1]) == (min(count, 7), 6)
    assert chosen[0] == (0 if count > 1 else 6)


def test_export_holds_the_trained_samples_in_the_order_of_the_steps(run, tmp_path):
    parquet, lines = tmp_path / "samples.parquet", tmp_path / "samples.jsonl"
    assert command.main(["export", run, str(parquet)]) == 0
    table = pq.read_table(parquet)
    assert table.column_names == ["step", *experience.SCHEMA.names]
    assert table["step"].to_pylist() == [1] * 4 + [2] * 4
    assert sorted(table["index"].to_pylist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert command.main(["export", run, str(lines)]) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["index"] for row in rows] == table["index"].to_pylist()
    assert rows[0]["rewards"] == {"sum": 0.0}


def test_head_stats_and_export_take_the_samples_that_a_condition_chooses(run, tmp_path, capsys):
    assert command.main(["head", run, "--where", "reward = 1 and index < 3", "-n", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2
    assert shown[1].startswith("  1: reward 1")
    assert command.main(["stats", run, "--where", "reward = 1"]) == 0
    said = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (said["samples"], said["reward"]) == ("4 of 8", "1.0000 mean")
    file = tmp_path / "samples.parquet"
    assert command.main(["export", run, str(file), "--where", "reward = 1 and not index = 2"]) == 0
    table = pq.read_table(file)
    assert sorted(table["index"].to_pylist()) == [0, 1, 3]
    assert set(table["reward"].to_pylist()) == {1.0}


@pytest.mark.parametrize("verb", ["head", "stats", "export"])
def test_a_condition_that_is_none_is_refused_with_its_place(run, verb, tmp_path, capsys):
    file = [str(tmp_path / "samples.parquet")] if verb == "export" else []
    with pytest.raises(SystemExit) as ended:
        command.main([verb, run, *file, "--where", "reword > 1"])
    assert ended.value.code == 2
    assert "argument --where: character 1: there is no column reword" in capsys.readouterr().err


def test_a_condition_that_chooses_nothing_says_so(run, tmp_path, capsys):
    assert command.main(["export", run, str(tmp_path / "samples.parquet"), "--where", "reward > 7"]) == 2
    assert "no sample is like that" in capsys.readouterr().err
    assert command.main(["stats", run, "--where", "reward > 7"]) == 0
    assert "0 of 8" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["head", "export"])
def test_a_reward_that_the_run_does_not_have_is_named(run, verb, tmp_path, capsys):
    file = [str(tmp_path / "samples.parquet")] if verb == "export" else []
    assert command.main([verb, run, *file, "--where", "rewards['some'] > 0"]) == 2
    assert "no sample is like that; the run has no reward some, but sum" in capsys.readouterr().err
    assert not list(tmp_path.glob("samples*"))


def test_a_sample_that_took_no_part_is_not_exported(run, tmp_path):
    """Half of each group is invalid in a run that trains these again."""
    uri, file = f"file://{tmp_path}/store/default/sums/r2", tmp_path / "samples.parquet"
    asyncio.run(_again(open_storage(uri), run))
    assert command.main(["export", uri, str(file)]) == 0
    table = pq.read_table(file)
    assert table["reward"].to_pylist() == [1.0] * 4
    assert table["invalid"].null_count == 4


async def _again(storage: Storage, source: str) -> None:
    """The run at `source`, trained again from its stored samples, those with a reward of 1."""
    there = open_storage(source)
    content = json.loads((await there.get("run.json")).data)
    content["config"]["data"]["replay_from"] = {"uri": source, "where": "reward = 1"}
    content["config"]["rewards"] = []
    await storage.create("run.json", json.dumps(content).encode())
    for info in await there.list("trainer"):
        await storage.create(info.key, (await there.get(info.key)).data)


def test_who_looks_for_samples_in_a_run_that_has_none_of_its_own_is_told_where_they_are(run, tmp_path, capsys):
    uri = f"file://{tmp_path}/store/default/sums/r2"
    asyncio.run(_again(open_storage(uri), run))
    assert command.main(["head", uri]) == 2
    assert f"this run has no samples of its own: it trains those of {run}\n" in capsys.readouterr().err
    assert command.main(["stats", uri]) == 0
    assert re.search(rf"trains again +{run} where reward = 1\n", capsys.readouterr().out)


def test_shards_that_are_gone_are_counted_in_one_line(run, tmp_path, capsys):
    for shard in sorted(tmp_path.glob("store/default/sums/r1/rollouts/v1/*/*.parquet"))[:3]:
        shard.unlink()
    assert command.main(["export", run, str(tmp_path / "samples.parquet")]) == 1
    said = capsys.readouterr()
    assert "samples.parquet: 2 samples of 1 step\n" in said.out
    assert said.err == "left out: 3 groups of 2 steps (1 to 2): their shards are gone, as by store.retention: window\n"
    assert command.main(["stats", run]) == 0
    assert "; those of 3 planned groups are gone\n" in capsys.readouterr().out
    assert command.main(["export", run, str(tmp_path / "none.parquet"), "--where", "reward > 7"]) == 2
    assert "no sample is like that; left out: 3 groups of 2 steps" in capsys.readouterr().err


@pytest.mark.parametrize(("file", "reason"), [("none/x.jsonl", "No such file"), ("taken.jsonl", "Is a directory")])
def test_a_file_that_cannot_be_written_is_named_with_the_reason_and_leaves_nothing(run, file, reason, tmp_path, capsys):
    taken = tmp_path / "taken.jsonl"
    taken.mkdir()
    before = sorted(tmp_path.iterdir())
    assert command.main(["export", run, str(tmp_path / file)]) == 2
    assert f"{tmp_path}/{file} cannot be written: {reason}" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_stats_pass_over_a_shard_whose_bytes_have_changed(run, tmp_path, capsys):
    shard = min(tmp_path.glob("store/default/sums/r1/rollouts/v1/*/*.parquet"))
    with open(shard, "r+b") as file:
        file.write(b"X")
    assert command.main(["stats", run]) == 0
    assert re.search(r"samples +6\n", capsys.readouterr().out)


STATE = State().to_json()
WRITER = WriterEntry("rollout-0", {}, acknowledged=0).to_json()
HOSTILE = [
    {"version": ["a", 1]},
    {"version": [9, 9]},
    {"state": {"coordinator": STATE | {"writers": []}}},
    {"state": {"coordinator": STATE | {"writers": {"A": {"instance": "i", "leases": 5}}}}},
    {"state": {"coordinator": STATE | {"position": "x"}}},
    {"state": {"coordinator": STATE | {"writers": {"A": WRITER | {"cursor": "x"}}}}},
    {"state": []},
]


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_manifest_that_says_what_cannot_be_is_no_checkpoint_for_gc(run, fault):
    content = {"version": [1, 1], "state": {"coordinator": STATE}} | fault
    manifest = json.dumps(content).encode()
    asyncio.run(open_storage(run).put(f"checkpoints/{Version(1, 1)}/MANIFEST.json", manifest))
    assert command.main(["gc", "--dry-run", "--retention", "window", run]) == 0


def test_export_leaves_out_what_is_damaged_and_says_so(run, tmp_path, capsys):
    damaged = next(key for key in sorted(keys(run)) if key.startswith("rollouts/"))
    tmp_path.joinpath("store/default/sums/r1", damaged).write_bytes(b"rot")
    assert command.main(["export", run, str(tmp_path / "samples.parquet")]) == 1
    said = capsys.readouterr()
    assert "6 samples of 2 steps" in said.out
    assert re.fullmatch(rf"left out: step 1: 1 group: .*{damaged}.*\n", said.err)


def test_export_of_a_copy_names_the_damaged_shard_and_the_damaged_record_of_the_log(run, tmp_path, capsys):
    damaged = next(key for key in sorted(keys(run)) if key.startswith("rollouts/"))
    folder = tmp_path / "store/default/sums/r1"
    shutil.rmtree(folder / ".miles")
    folder.joinpath(damaged).write_bytes(b"rot")
    record = f"trainer/log/{2:020d}.json"
    folder.joinpath(record).write_text("{}")
    assert command.main(["export", run, str(tmp_path / "samples.parquet")]) == 1
    said = capsys.readouterr()
    assert "2 samples of 1 step\n" in said.out
    assert said.err.count("left out: ") == 2
    assert f"left out: {record} is damaged" in said.err
    assert damaged in said.err


@pytest.mark.parametrize("content", [b"rot", b""])
async def test_a_shard_that_is_no_parquet_is_named_although_its_sha256_is_that_of_the_log(clock, content):
    storage = MemoryStorage(clock)
    info = await storage.create("rollouts/v1/A/0.parquet", content)
    said = await Shelf(storage).table(GroupRef(0, info.key, info.sha256, 0, 2))
    assert str(said).startswith("rollouts/v1/A/0.parquet: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "file:///nowhere/at/all"], "there is no such folder"),
        (["stats", "file:///nowhere/at/all"], "there is no such folder"),
        (["export", "{run}", "samples.csv"], "the name must end in .parquet or .jsonl"),
        (["check", "gs://bucket"], "neither s3://bucket/prefix nor file:///folder"),
    ],
)
def test_a_users_mistake_is_one_line(run, arguments, message, capsys):
    assert command.main([argument.format(run=run) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


# Garbage


FOREIGN = ["weights/notes", "checkpoints/notes", "checkpoints/old/x", "rollouts/v1/foo.parquet", "rollouts/v1/A/foo"]
FOREIGN += ["writers/.DS_Store", "writers/notes", "evaluations/v1/.x.parquet", "evaluations/v1/mine.parquet"]
FOREIGN += [f"weights/{Version(1, 0)}/.DS_Store", f"checkpoints/{Version(1, 0)}/.DS_Store"]
FOREIGN += ["probe/notes", "probe/.DS_Store", f"rollouts/v1/A copy/{0:020d}.parquet"]
FOREIGN += [f"{folder}/{Version(1, 0)}/{name}" for folder in ("weights", "checkpoints") for name in ("a b", "notes~")]


@pytest.mark.parametrize("key", FOREIGN)
def test_what_is_none_of_the_runs_is_passed_over(key):
    newer = [*versions("weights", 1, 2, 3, 4, 5), *versions("checkpoints", 1)]
    assert key not in removed([*objects(key), *newer], checkpoints={Version(1, 1): State()})


@pytest.mark.parametrize("verb", ["head", "stats", "gc"])
def test_a_foreign_file_among_the_rollouts_stops_no_command(run, verb, tmp_path):
    tmp_path.joinpath("store/default/sums/r1/rollouts/v1/.DS_Store").write_bytes(b"mine")
    assert command.main([verb, run, *(["--retention", "window"] if verb == "gc" else [])]) == 0


async def test_a_foreign_file_stops_no_collection_of_weights(clock):
    storage = MemoryStorage(clock)
    await storage.create("weights/notes", b"mine")
    assert await weights.collect(storage, Version(1, 1), {Version(1, 1)}) == []
    assert await weights.published(storage) == set()
    await storage.create(weights.key(Version(1, 0), "MANIFEST.json"), b"{}")
    for name in (".DS_Store", "a b"):
        key = weights.key(Version(1, 0), name)
        storage.memory.objects[key] = Object(ObjectInfo(key, 4, "e", clock.time), b"mine", {})
    assert await weights.collect(storage, Version(1, 1), set()) == [Version(1, 0)]
    assert len(storage.memory.objects) == 3


def test_a_copy_of_a_run_is_tidied_where_it_lies_and_the_original_is_left_alone(run, tmp_path, capsys):
    before, copy = keys(run), tmp_path / "copy"
    shutil.copytree(tmp_path / "store/default/sums/r1", copy)
    assert command.main(["gc", str(copy)]) == 0
    assert f"deleted from {copy.as_uri()}" in capsys.readouterr().out
    assert keys(run) == before
    assert before - keys(copy.as_uri()) == {f"checkpoints/{Version(1, 1)}/rank0.distcp"}


@pytest.mark.parametrize("torn", ["{}", "[1]", "null", "NaN", ""])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_dead_workers_torn_heartbeat_and_hidden_files_stop_no_gc(run, torn, sealed, tmp_path):
    folder = tmp_path / "store/default/sums/r1"
    (heartbeat,) = folder.glob("writers/*.json")
    heartbeat.write_text(torn)
    if not sealed:
        shutil.rmtree(folder / ".miles")
    for name in ("writers/.x.json", "evaluations/v1/.x.json"):
        folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(name).write_text("{")
    assert command.main(["gc", run]) == 0


@pytest.mark.parametrize("torn", ["{}", "[1]", "null", ""])
def test_a_torn_control_file_is_named_by_gc_with_its_remedy(run, torn, tmp_path, capsys):
    tmp_path.joinpath("store/default/sums/r1/control/state.json").write_text(torn)
    assert command.main(["gc", run]) == 2
    assert re.search(r"control/state.json .*; while nothing of the run is going on, delete it", capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["head", "stats", "export", "gc"])
@pytest.mark.parametrize("damaged", ["run.json", f"checkpoints/{Version(1, STEPS)}/MANIFEST.json"])
def test_a_deeply_nested_object_is_damaged_like_any_other(run, verb, damaged, tmp_path, capsys):
    tmp_path.joinpath("store/default/sums/r1", damaged).write_text("[" * 100_000)
    shutil.rmtree(tmp_path / "store/default/sums/r1/.miles")
    file = [str(tmp_path / "samples.parquet")] if verb == "export" else []
    assert command.main([verb, run, *file]) == (2 if damaged == "run.json" else 0)
    assert capsys.readouterr().err.count("\n") == (damaged == "run.json")


@pytest.mark.parametrize("place", ["store/default/sums/r1", "folder"])
def test_a_run_of_another_version_is_called_so_with_the_fields_that_are_not_understood(run, place, tmp_path, capsys):
    record = json.loads(tmp_path.joinpath("store/default/sums/r1/run.json").read_text())
    record["config"]["algorithm"]["correction"] = {"shape": "round"}
    tmp_path.joinpath("folder").mkdir()
    tmp_path.joinpath(place, "run.json").write_text(json.dumps(record if place != "folder" else record["config"]))
    shutil.rmtree(tmp_path / "store/default/sums/r1/.miles")
    assert command.main(["stats", str(tmp_path / place)]) == 2
    said = capsys.readouterr().err
    assert "run.json: this run comes from another version of Miles" in said
    assert "does not understand algorithm.correction" in said


@pytest.mark.parametrize("sets", [3, None, {"sums": 3}, {"sums": {"avg@1": "x"}}, {"sums": {"avg@1": 0.5}}])
def test_a_damaged_evaluation_stops_no_gc(run, sets):
    asyncio.run(open_storage(run).create(evaluation_key(1), json.dumps({"sets": sets}).encode()))
    assert command.main(["gc", run]) == 0


def test_a_dry_run_names_what_could_go_and_deletes_nothing(run, capsys):
    before = keys(run)
    assert command.main(["gc", "--dry-run", "--retention", "window", run]) == 0
    said = capsys.readouterr().out
    assert "unfinished checkpoints" in said
    assert f"checkpoints/{Version(1, 1)}/rank0.distcp" in said
    assert keys(run) == before


def test_a_dry_run_names_what_killed_writers_have_left_beside_the_objects_and_gc_removes_it(run, tmp_path, capsys):
    left = [tmp_path / "store/default/sums/r1/.miles/temporary" / name for name in ("old", "new")]
    for file in left:
        file.write_bytes(b"cut off")
    os.utime(left[0], (0, 0))
    assert command.main(["gc", "--dry-run", run]) == 0
    said = capsys.readouterr().out
    assert "temporary files of processes that were killed" in said
    assert ".miles/temporary/old" in said
    assert ".miles/temporary/new" not in said
    assert command.main(["gc", run]) == 0
    assert [file.exists() for file in left] == [False, True]


def test_what_a_run_that_is_over_needs_no_more_is_deleted(run, capsys):
    before = keys(run)
    assert command.main(["gc", run]) == 0
    assert before - keys(run) == {f"checkpoints/{Version(1, 1)}/rank0.distcp"}  # the run keeps all its rollouts


def test_nothing_of_a_run_that_is_not_over_is_deleted(run, capsys):
    asyncio.run(open_storage(run).delete(f"trainer/log/{3:020d}.json"))
    before = keys(run)
    assert command.main(["gc", run]) == 2
    assert "the run is not over" in capsys.readouterr().err
    assert keys(run) == before


def objects(*names: str, modified: float = 0.0) -> list[ObjectInfo]:
    return [ObjectInfo(name, 1, "e", modified) for name in names]


def versions(folder: str, *steps: int, manifest: bool = True) -> list[ObjectInfo]:
    names = ["data", "MANIFEST.json"] if manifest else ["data"]
    return objects(*(f"{folder}/{Version(1, step)}/{name}" for step in steps for name in names))


FACTS = Facts(
    now=1e6,
    retention="window",
    lease_timeout_s=60.0,
    keep_last=2,
    max_staleness=1,
    checkpoints={
        Version(1, 10): State(step=10, cursors={"A": 4, "B": 0}),
        Version(1, 20): State(step=20, cursors={"A": 9, "B": 3}),
        Version(1, 5): State(step=5, cursors={"A": 1, "B": 0}),
    },
)


def removed(found: list[ObjectInfo], **changes) -> set[str]:
    return {removal.key for removal in garbage.plan(found, dataclasses.replace(FACTS, **changes))}


def test_checkpoints_before_the_last_few_go_manifest_first_and_unfinished_older_ones_too():
    found = versions("checkpoints", 5, 10, 20) + versions("checkpoints", 15, 25, manifest=False)
    gone = [removal.key for removal in garbage.plan(found, FACTS)]
    assert gone == [f"checkpoints/{Version(1, 5)}/{name}" for name in ("MANIFEST.json", "data")] + [
        f"checkpoints/{Version(1, 15)}/data"
    ]


def test_weights_stay_that_workers_of_any_allowed_staleness_may_load_or_that_are_in_use():
    found = versions(weights.FOLDER, 1, 2, 3, 4, 5) + versions(weights.FOLDER, 0, 6, manifest=False)
    gone = {key.split("/")[1] for key in removed(found, in_use=frozenset({Version(1, 1)}))}
    assert gone == {str(Version(1, 2)), str(Version(1, 0))}


def test_rollouts_stay_that_the_oldest_kept_checkpoint_would_read_again():
    shards = objects(*(shard_key("A", number) for number in (3, 4)), shard_key("B", 0))
    assert removed(shards) == {shard_key("A", 3)}
    assert removed(shards, retention="all") == set()
    plan = Plan(21, 1, (GroupRef(0, shard_key("gone", 1), "", 0, 2),))
    shards = objects(*(shard_key("gone", number) for number in (0, 1)), shard_key("told", 0))
    assert removed(shards, records=(plan,), roster=frozenset({"told"})) == {shard_key("gone", 0)}


def test_leftovers_go_when_nobody_can_be_writing_them_any_more():
    first, second = (evaluation_key(step).removesuffix(".json") for step in (1, 2))
    old = ["writers/A.json", f"probe/{'0a' * 8}/3/b/c", f"{first}.parquet", f"{second}.parquet"]
    assert removed(objects(*old, f"{second}.json")) == set(old) - {f"{second}.parquet"}
    assert removed(objects(*old, modified=1e6 - 100)) == set()


def test_nothing_else_is_ever_removed():
    found = objects(
        "run.json", "attempts/0.json", "trainer/log/0.json", "control/state.json", "metrics/v1/x.json", "mine"
    )
    assert removed(found) == set()


def test_without_a_complete_checkpoint_no_rollout_and_no_checkpoint_goes():
    found = versions("checkpoints", 5, manifest=False) + objects(shard_key("A", 0))
    assert removed(found, checkpoints={}) == set()
