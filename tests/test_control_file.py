import dataclasses
import secrets

import pytest

from pipeline.control_file import ControlFile
from pipeline.messages import CONTROL_KEY, ControlState, WriterEntry
from pipeline.storage import MemoryStorage, Object, Storage, StorageError, Transient
from pipeline.trainer_log import Fenced, TrainerLog
from pipeline.versions import Version

FIRST = ControlState(term=1, step=0, version=None, writers={})


def at_step(step: int) -> ControlState:
    return dataclasses.replace(FIRST, step=step)


async def present(store: MemoryStorage) -> ControlState:
    found = await store.get(CONTROL_KEY)
    assert found is not None
    return ControlState.decode(found.data)


async def test_a_successor_takes_the_file_as_it_is_and_marks_it_with_its_term(clock):
    store = MemoryStorage(clock)
    old, new = ControlFile(store), ControlFile(store)
    assert (await old.seize(FIRST))[0] is None
    left = dataclasses.replace(
        FIRST, step=3, version=Version(1, 3), writers={"A": WriterEntry("rollout-0", {4: 2}, 1)}, stop="failed"
    )
    await old.write(lambda: left)
    assert (await new.seize(dataclasses.replace(FIRST, term=2)))[0] == left
    assert await present(store) == dataclasses.replace(left, term=2, stop=None, replaying=True)
    with pytest.raises(Fenced, match="term 2"):
        await old.write(lambda: at_step(4))


async def test_a_trainer_that_comes_too_late_cannot_take_the_file(clock):
    store = MemoryStorage(clock)
    await ControlFile(store).seize(dataclasses.replace(FIRST, term=3))
    with pytest.raises(Fenced, match="term 3"):
        await ControlFile(store).seize(dataclasses.replace(FIRST, term=2))


async def test_what_the_predecessor_writes_at_the_last_moment_counts(clock):
    store = MemoryStorage(clock)
    old = ControlFile(store)
    await old.seize(FIRST)

    class LastWords:
        said = False

        async def before(self, operation: str, key: str) -> None:
            if operation == "write" and not self.said:
                self.said = True
                await old.write(lambda: at_step(9))

        async def after(self, operation: str, key: str) -> None:
            pass

    new = ControlFile(MemoryStorage(clock, LastWords(), store.memory))
    left, _ = await new.seize(dataclasses.replace(FIRST, term=2))
    assert left == at_step(9)
    assert (await present(store)).step == 9


async def test_an_unchanged_state_is_written_only_to_keep_it_fresh(clock):
    store = MemoryStorage(clock)
    file = ControlFile(store)
    await file.seize(FIRST)
    assert await file.write(lambda: at_step(1)) is not None
    assert await file.write(lambda: at_step(1)) is None
    clock.time += 5
    info = await file.write(lambda: at_step(1), fresh=True)
    assert info is not None
    assert info.modified == clock.time


async def test_a_write_whose_outcome_stayed_unknown_does_not_fence_its_own_trainer(clock):
    class Silence:
        on = False

        async def before(self, operation: str, key: str) -> None:
            if self.on and operation != "write":
                raise Transient("time-out")

        async def after(self, operation: str, key: str) -> None:
            if self.on:
                raise Transient("time-out")

    silence = Silence()
    store = MemoryStorage(clock, silence, deadline_s=5.0)
    file = ControlFile(store)
    await file.seize(FIRST)
    silence.on = True
    with pytest.raises(StorageError):
        await file.write(lambda: at_step(1))
    silence.on = False
    await file.write(lambda: at_step(2))
    assert await present(store) == at_step(2)


async def test_a_deleted_run_is_said_to_be_deleted(clock):
    store = MemoryStorage(clock)
    file = ControlFile(store)
    await file.seize(FIRST)
    await store.delete(CONTROL_KEY)
    with pytest.raises(StorageError, match="is gone"):
        await file.write(lambda: at_step(1))


async def test_a_file_deleted_while_the_run_goes_on_is_written_anew_whoever_sees_that_first(clock):
    store = MemoryStorage(clock)
    await TrainerLog(store).take_over()
    old, new = ControlFile(store), ControlFile(store)
    await old.seize(FIRST)
    await store.delete(CONTROL_KEY)
    await old.write(lambda: at_step(1))
    assert await present(store) == at_step(1)
    await new.seize(dataclasses.replace(FIRST, term=2))
    await store.delete(CONTROL_KEY)
    await old.write(lambda: at_step(2))  # fenced, and cannot know it
    ours = dataclasses.replace(FIRST, term=2, step=1)
    await new.write(lambda: ours)
    assert await present(store) == ours
    with pytest.raises(Fenced, match="term 2"):
        await old.write(lambda: at_step(3))


@pytest.mark.slow
async def test_a_trainer_that_is_overtaken_right_after_its_write_does_not_learn_its_successors_etag(s3_server):
    """A PUT's response has no LastModified, so S3Bucket looks again: what it sees may be another's object by then."""
    from pipeline.storage.s3 import S3Bucket

    class Overtaken(S3Bucket):
        rival: ControlFile | None = None

        async def stat(self, key: str):
            if self.rival:
                rival, self.rival = self.rival, None
                await rival.seize(dataclasses.replace(FIRST, term=2))
            return await super().stat(key)

    place = ("miles", f"tests/{secrets.token_hex(8)}", s3_server.endpoint, s3_server.region)
    bucket = Overtaken(*place)
    old = ControlFile(Storage(bucket))
    await old.seize(FIRST)
    bucket.rival = ControlFile(Storage(S3Bucket(*place)))
    await old.write(lambda: at_step(1))
    with pytest.raises(Fenced, match="term 2"):
        await old.write(lambda: at_step(2))


@pytest.mark.parametrize("torn", [b"", b"{}", b"[1]", b"null"])
@pytest.mark.parametrize("metadata", [{}, {"sha256": "another"}])
async def test_a_damaged_file_is_named_with_its_remedy_whoever_meets_it(clock, torn, metadata):
    store = MemoryStorage(clock)
    file = ControlFile(store)
    written = await file.seize(FIRST)
    info = dataclasses.replace(written[1], etag="later")
    store.memory.objects[CONTROL_KEY] = Object(info, torn, metadata)
    for attempt in (ControlFile(store).seize(dataclasses.replace(FIRST, term=2)), file.write(lambda: at_step(1))):
        with pytest.raises(ValueError, match=r"control/state.json .*; while nothing of the run is going on, delete it"):
            await attempt
