"""pipeline.saver on one rank: training goes on beside an upload, and only what is proven counts."""

import asyncio
import pathlib

import pytest
import torch

from pipeline import checkpoint
from pipeline.background import Background
from pipeline.saver import Saver
from pipeline.storage import StorageError, open_storage
from pipeline.versions import Version

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one rank

FIRST, SECOND, THIRD = Version(1, 10), Version(1, 20), Version(1, 30)


@pytest.fixture
def background():
    thread = Background()
    yield thread
    thread.close()


@pytest.fixture
def store(tmp_path, monkeypatch):
    """One whose uploads wait for `store.gate`, and fail as long as `store.broken`."""
    opened = open_storage(f"file://{tmp_path}/store")
    opened.gate, opened.broken = asyncio.Event(), False
    opened.gate.set()
    put_file = opened.put_file

    async def gated(key, path):
        await opened.gate.wait()
        if opened.broken:
            raise StorageError(f"PUT {key}: no answer")
        return await put_file(key, path)

    monkeypatch.setattr(opened, "put_file", gated)
    return opened


@pytest.fixture
def told():
    """What the saver says of complete checkpoints: (version, proven)."""
    return []


@pytest.fixture
def saver(store, background, told):
    async def completed(version, proven):
        told.append((version, proven))

    return Saver(store, background, completed)


def shut(store, background, closed=True):
    async def change():
        store.gate.clear() if closed else store.gate.set()

    background.run(change())


def stored(store, background):
    return [found.version for found in background.run(checkpoint.newest(store))]


def test_training_goes_on_while_a_checkpoint_is_uploaded_and_it_holds_what_was_then(saver, store, background, told):
    weights = torch.full((3,), 1.0)
    shut(store, background)
    saver.begin(FIRST, {"w": weights}, {"step": 10})
    weights.fill_(2.0)
    saver.settle()
    assert (saver.saved, stored(store, background), told) == (None, [], [])
    shut(store, background, closed=False)
    saver.settle(wait=True)
    assert (saver.saved, told) == (FIRST, [(FIRST, True)])
    loaded = {"w": torch.zeros(3)}
    found = background.run(checkpoint.newest(store))
    assert checkpoint.load(store, background.run, found, loaded).state == {"step": 10}
    assert torch.equal(loaded["w"], torch.full((3,), 1.0))


def test_the_next_one_waits_for_the_one_before_so_that_they_become_complete_in_order(saver, store, background, told):
    for version in (FIRST, SECOND):
        saver.begin(version, {"w": torch.zeros(3)}, {})
    assert saver.saved == FIRST
    saver.settle(wait=True)
    assert [version for version, _ in told] == [FIRST, SECOND]


def test_without_reading_it_back_nobody_is_told_that_it_is_proven(saver, told):
    saver.begin(FIRST, {"w": torch.zeros(3)}, {}, read_back=False)
    saver.settle(wait=True)
    assert told == [(FIRST, False)]


def test_an_upload_that_fails_is_reported_and_the_checkpoint_before_it_stands(saver, store, background, caplog):
    saver.begin(FIRST, {"w": torch.zeros(3)}, {})
    saver.settle(wait=True)
    store.broken = True
    saver.begin(SECOND, {"w": torch.zeros(3)}, {})
    saver.settle(wait=True)
    assert (saver.saved, stored(store, background)) == (FIRST, [FIRST])
    assert f"checkpoint {SECOND} could not be written (PUT " in caplog.text
    store.broken = False
    saver.begin(THIRD, {"w": torch.zeros(3)}, {})
    saver.settle(wait=True)
    assert saver.saved == THIRD


def test_the_second_failure_in_a_row_ends_the_run(saver, store):
    store.broken = True
    saver.begin(FIRST, {"w": torch.zeros(3)}, {})
    saver.settle(wait=True)
    saver.begin(SECOND, {"w": torch.zeros(3)}, {})
    with pytest.raises(StorageError, match=f"2 checkpoints in a row could not be written, the last {SECOND}: PUT "):
        saver.settle(wait=True)


def test_a_failure_behind_a_complete_checkpoint_is_no_failure_to_write_it(store, background):
    async def completed(version, proven):
        raise StorageError("LIST checkpoints: no answer")

    saver = Saver(store, background, completed)
    saver.begin(FIRST, {"w": torch.zeros(3)}, {})
    with pytest.raises(RuntimeError, match=f"behind checkpoint {FIRST}: LIST checkpoints"):
        saver.settle(wait=True)


@pytest.mark.parametrize("end", ["settle", "fail", "discard"])
def test_no_files_stay_behind_here(saver, store, background, tmp_path, monkeypatch, end):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store.broken = end == "fail"
    if end == "discard":
        shut(store, background)
    saver.begin(FIRST, {"w": torch.zeros(3)}, {})
    if end == "discard":
        saver.discard()
    else:
        saver.settle(wait=True)
    assert not list(pathlib.Path(tmp_path).glob("miles-checkpoint-*"))
