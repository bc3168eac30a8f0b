"""pipeline.checkpoint: what was saved comes back bit by bit, on any number of ranks, or is said to be damaged."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from pipeline import checkpoint
from pipeline.background import Background
from pipeline.storage import FaultyBucket, Storage, StorageError, Transient, Unavailable, open_storage
from pipeline.trainer_log import Fenced
from pipeline.versions import Version
from tests import daemons

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one rank


@pytest.fixture
def background():
    thread = Background()
    yield thread
    thread.close()


@pytest.fixture
def store(tmp_path):
    return open_storage(f"file://{tmp_path}/store")


def tensors(value):
    return {
        "model.weight": torch.full((4, 3), float(value)),
        "optimizer.weight.exp_avg": torch.arange(12.0).reshape(4, 3) * value,
        "optimizer.weight.step": torch.tensor(float(value)),
        "model.half": torch.full((2,), 0.1 * value, dtype=torch.bfloat16),
    }


def save(store, background, term, step, **options):
    staged = checkpoint.stage(Version(term, step), tensors(step), {"step": step})
    files = background.run(checkpoint.upload(store, staged, **options))
    background.run(checkpoint.complete(store, staged, files))


def newest(store, background):
    return background.run(checkpoint.newest(store))


def load(store, background, into=None):
    into = tensors(0) if into is None else into
    return checkpoint.load(store, background.run, newest(store, background), into), into


def path(tmp_path, step, pattern):
    (found,) = pathlib.Path(f"{tmp_path}/store/checkpoints/{Version(1, step)}").glob(pattern)
    return found


def test_tensors_and_state_come_back_bit_by_bit(store, background):
    save(store, background, 1, 7)
    found, loaded = load(store, background)
    assert (found.version, found.state) == (Version(1, 7), {"step": 7})
    for name, tensor in tensors(7).items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype


def test_without_any_checkpoint_nothing_is_loaded(store, background):
    found, loaded = load(store, background)
    assert found is None
    assert torch.equal(loaded["model.weight"], torch.zeros(4, 3))


def test_a_higher_term_is_newer_than_a_higher_step(store, background):
    save(store, background, 1, 40)
    save(store, background, 2, 30)
    assert load(store, background)[0].version == Version(2, 30)


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda files: flip(files[0]),
        lambda files: files[0].write_bytes(files[0].read_bytes()[:-10]),
        lambda files: files[0].write_bytes(b""),
        lambda files: files[0].unlink(),
    ],
    ids=["bit flip", "truncated", "empty", "missing"],
)
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(
    store, background, tmp_path, caplog, damage
):
    save(store, background, 1, 20)
    save(store, background, 1, 40)
    damage([path(tmp_path, 40, "*.distcp")])
    found, loaded = load(store, background)
    assert found.version == Version(1, 20)
    assert torch.equal(loaded["model.weight"], tensors(20)["model.weight"])
    assert f"checkpoint {Version(1, 40)} is damaged" in caplog.text


def test_a_torn_manifest_is_no_checkpoint(store, background, tmp_path, caplog):
    save(store, background, 1, 20)
    save(store, background, 1, 40)
    manifest = path(tmp_path, 40, "MANIFEST.json")
    manifest.write_bytes(manifest.read_bytes()[:100])
    assert load(store, background)[0].version == Version(1, 20)
    assert "is damaged" in caplog.text


def test_a_checkpoint_without_manifest_does_not_exist(store, background, tmp_path):
    save(store, background, 1, 20)
    path(tmp_path, 20, "MANIFEST.json").unlink()
    assert load(store, background)[0] is None


def test_when_all_are_damaged_training_does_not_silently_begin_anew(store, background, tmp_path):
    save(store, background, 1, 20)
    flip(path(tmp_path, 20, "*.distcp"))
    with pytest.raises(StorageError, match=f"all 1 checkpoints are damaged; the newest is {Version(1, 20)}"):
        load(store, background)


def test_when_no_manifest_can_be_read_training_does_not_silently_begin_anew(store, background, tmp_path):
    save(store, background, 1, 20)
    path(tmp_path, 20, "MANIFEST.json").write_bytes(b"{")
    with pytest.raises(StorageError, match="the manifests of all 1 checkpoints are damaged"):
        newest(store, background)


HOSTILE = [
    {"version": ["a", 1]},
    {"version": [None, 1]},
    {"version": [9, 99]},
    {"version": 5},
    {"state": []},
    {"tensors": 0},
    {"files": None},
]


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_manifest_that_says_what_cannot_be_is_a_damaged_one(store, background, tmp_path, fault):
    save(store, background, 1, 20)
    save(store, background, 1, 40)
    key = f"checkpoints/{Version(1, 40)}/MANIFEST.json"
    content = json.loads(path(tmp_path, 40, "MANIFEST.json").read_text())
    background.run(store.put(key, json.dumps(content | fault).encode()))
    assert load(store, background)[0].version == Version(1, 20)


class Silent:
    """The store does not answer for one kind of object."""

    def __init__(self, operation: str, name: str):
        self.operation, self.name = operation, name

    async def before(self, operation: str, key: str) -> None:
        if operation == self.operation and key.endswith(self.name):
            raise Transient("503")

    async def after(self, operation: str, key: str) -> None:
        pass


def silent(store, operation, name):
    return Storage(FaultyBucket(store.bucket, Silent(operation, name)), deadline_s=0.0)


def test_a_store_that_does_not_answer_is_no_damage_and_costs_no_checkpoint(store, background):
    save(store, background, 1, 20)
    save(store, background, 1, 40)
    before = background.run(store.list("checkpoints"))
    down = silent(store, "read", f"{Version(1, 40)}/MANIFEST.json")
    with pytest.raises(Unavailable):
        newest(down, background)
    with pytest.raises(Unavailable):
        background.run(checkpoint.prune(down, Version(1, 40), keep_last=2))
    with pytest.raises(Unavailable):
        checkpoint.load(silent(store, "stat", ".distcp"), background.run, newest(store, background), tensors(0))
    assert background.run(store.list("checkpoints")) == before


def test_other_parameters_than_the_saved_ones_are_a_users_error(store, background):
    save(store, background, 1, 20)
    with pytest.raises(ValueError, match=r"holds other parameters .*1 differ, first model\.weight"):
        load(store, background, {**tensors(0), "model.weight": torch.zeros(4, 5)})


def test_nothing_in_a_checkpoint_is_ever_unpickled(store, background, tmp_path):
    save(store, background, 1, 20)
    names = {file.name for file in path(tmp_path, 20, "MANIFEST.json").parent.iterdir()}
    assert ".metadata" not in names
    manifest = json.loads(path(tmp_path, 20, "MANIFEST.json").read_text())
    assert set(manifest["files"]) == names - {"MANIFEST.json"}


def test_a_manifest_cannot_lead_out_of_its_folder(store, background, tmp_path):
    save(store, background, 1, 20)
    content = json.loads(path(tmp_path, 20, "MANIFEST.json").read_text())
    for tensor in content["tensors"].values():
        tensor["pieces"][0][2] = "../../secret"
    content["files"]["../../secret"] = {"size": 1, "sha256": ""}
    key = f"checkpoints/{Version(1, 20)}/MANIFEST.json"
    background.run(store.put(key, json.dumps(content).encode()))
    with pytest.raises(StorageError, match="damaged"):
        load(store, background)


def test_a_checkpoint_that_cannot_be_read_back_is_not_believed(store, background, monkeypatch):
    save(store, background, 1, 20)
    put_file = store.put_file

    async def corrupting(key, source):
        info = await put_file(key, source)
        if key.endswith(".distcp"):
            flip(pathlib.Path(store.bucket.name.removeprefix("file://")) / key)
        return info

    monkeypatch.setattr(store, "put_file", corrupting)
    with pytest.raises(StorageError):
        save(store, background, 1, 40)
    assert Version(1, 20) in {found.version for found in newest(store, background)}


def test_pruning_keeps_the_last_few_and_clears_unfinished_ones(store, background, tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(store, background, 1, step)
    path(tmp_path, 10, "MANIFEST.json").with_name("notes of mine~").touch()
    path(tmp_path, 10, "MANIFEST.json").unlink()
    kept = background.run(checkpoint.prune(store, Version(1, 40), keep_last=2))
    assert [(each.version, each.state) for each in kept] == [(Version(1, n), {"step": n}) for n in (40, 30)]
    left = {info.key.split("/")[1] for info in background.run(store.list("checkpoints")) if "mine" not in info.key}
    assert left == {str(Version(1, step)) for step in (30, 40, 50)}  # 50 is another trainer's


def test_a_trainer_whose_checkpoint_a_successor_has_pruned_learns_that_it_is_fenced(store, background):
    save(store, background, 1, 10)
    save(store, background, 2, 10)
    background.run(checkpoint.prune(store, Version(2, 10), keep_last=1))
    with pytest.raises(Fenced, match=r"another trainer has taken over"):
        background.run(checkpoint.prune(store, Version(1, 10), keep_last=1))
    assert [found.version for found in newest(store, background)] == [Version(2, 10)]


def test_a_fenced_trainer_that_prunes_late_leaves_one_to_go_on_from(store, background):
    save(store, background, 1, 5)
    loading = newest(store, background)  # the successor begins with (1, 5), and is slow
    save(store, background, 1, 10)  # the predecessor, fenced in the middle of this, does not know it yet
    background.run(checkpoint.prune(store, Version(1, 10), keep_last=1))
    with pytest.raises(StorageError, match="all 1 checkpoints are damaged"):
        checkpoint.load(store, background.run, loading, tensors(0))
    assert [found.version for found in newest(store, background)] == [Version(1, 10)]


RANKS = """
import sys, torch
from pipeline import checkpoint, distributed
from pipeline.background import Background
from pipeline.saver import Saver
from pipeline.storage import open_storage
from pipeline.versions import Version

async def kept(version, proven):
    pass

uri, action = sys.argv[1:]
device = distributed.start()
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
values = {name: value.detach().clone() for name, value in module.named_parameters()}
if action == "load":
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
distributed.shard(module, list(module), device, torch.float32)
tensors = {name: value.detach() for name, value in distributed.own_parameters(module).items()}
tensors["step"] = torch.tensor(3.0 if action == "save" else 0.0)
background, storage = Background(), open_storage(uri)
if action == "save":
    saver = Saver(storage, background, kept if distributed.rank() == 0 else None)
    saver.begin(Version(1, 3), tensors, {"step": 3})
    saver.settle(wait=True)
else:
    found = distributed.broadcast(background.run(checkpoint.newest(storage)) if distributed.rank() == 0 else None)
    assert checkpoint.load(storage, background.run, found, tensors).state == {"step": 3}
    assert tensors.pop("step") == 3.0
    for name, tensor in distributed.gathered(tensors):
        assert torch.equal(tensor, values[name]), name
print("ranks", distributed.world_size())
distributed.stop()
"""


def run_ranks(count, uri, action):
    with daemons.held_port() as port:
        start_ranks(count, uri, action, port)


def start_ranks(count, uri, action, port):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, uri, action],
            env={**environment, "RANK": str(rank), "WORLD_SIZE": str(count)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
        assert f"ranks {count}" in output


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("before", "after"), [(2, 3)])
def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path, before, after):
    uri = f"file://{tmp_path}/store"
    run_ranks(before, uri, "save")
    run_ranks(after, uri, "load")
