import dataclasses

import pytest

from pipeline.messages import Heartbeat, writer_key
from pipeline.roster import GONE_AFTER, Known, Roster
from pipeline.storage import MemoryStorage, Object, ObjectInfo
from pipeline.versions import Version


@pytest.fixture
def store(clock) -> MemoryStorage:
    return MemoryStorage(clock)


@pytest.fixture
def roster(store: MemoryStorage) -> Roster:
    return Roster(store, lease_timeout_s=60.0, longest_beat_s=10.0)


async def beat(store: MemoryStorage, ulid: str, instance: str = "rollout-0", **changes) -> None:
    await store.put(writer_key(ulid), dataclasses.replace(Heartbeat(ulid, instance), **changes).encode())


async def test_only_heartbeats_that_have_changed_are_read_again(store: MemoryStorage, roster: Roster, clock):
    await beat(store, "A")
    await roster.refresh()
    heard = roster.writers["A"].heartbeat
    await roster.refresh()
    assert roster.writers["A"].heartbeat is heard
    clock.time += 1
    await beat(store, "A", version=Version(1, 2))
    await roster.refresh()
    assert roster.writers["A"].heartbeat == Heartbeat("A", "rollout-0", Version(1, 2))


async def test_an_unknown_writer_that_has_written_shards_is_revoked_on_sight_and_none_of_them_counts(
    store: MemoryStorage, roster: Roster
):
    await beat(store, "A", sequence=17)
    await beat(store, "B", "rollout-1")
    assert await roster.refresh() == []
    known = {ulid: (known.cursor, known.final) for ulid, known in roster.writers.items()}
    assert known == {"A": (0, 0), "B": (0, None)}


async def test_a_known_writer_stays_what_it_was_whatever_it_has_written(store: MemoryStorage, roster: Roster):
    roster.writers["A"] = Known("A", "rollout-0", cursor=3)
    await beat(store, "A", sequence=17)
    await roster.refresh()
    assert (roster.writers["A"].cursor, roster.writers["A"].final) == (3, None)


async def test_silence_is_counted_in_the_trainers_writes_each_at_most_the_longest_beat(
    store: MemoryStorage, roster: Roster
):
    await beat(store, "A")
    roster.wrote(1_700_000_000.0)
    assert await roster.refresh() == []
    for second in (5, 8, 3608, 3600):  # an hour's gap counts as 10 s, a clock that went back as nothing
        roster.wrote(1_700_000_000.0 + second)
    assert roster.silence(roster.writers["A"]) == 5 + 3 + 10


async def test_a_writer_is_revoked_when_it_has_been_silent_for_longer_than_its_leases_last(
    store: MemoryStorage, roster: Roster, clock
):
    await beat(store, "A", "rollout-0")
    await beat(store, "B", "rollout-1")
    roster.wrote(clock.time)
    for _ in range(6):
        clock.time += 10
        await beat(store, "B", "rollout-1", refreshed=clock.time)
        assert await roster.refresh() == []
        roster.wrote(clock.time)
    clock.time += 10
    roster.wrote(clock.time)
    assert [(known.ulid, reason) for known, reason in await roster.refresh()] == [("A", "silent for 70 s")]


async def test_of_one_slot_only_the_newest_incarnation_stays(store: MemoryStorage, roster: Roster):
    for ulid in ("B", "A", "C"):
        await beat(store, ulid)
    await beat(store, "0", "rollout-1")
    revoked = await roster.refresh()
    assert sorted((known.ulid, reason) for known, reason in revoked) == [
        ("A", "replaced by C"),
        ("B", "replaced by C"),
    ]


async def test_an_unreadable_heartbeat_is_passed_over_until_it_is_readable(store: MemoryStorage, roster: Roster, clock):
    await store.put(writer_key("A"), b"{}")
    await beat(store, "B")
    torn = store.memory.objects[writer_key("B")]
    store.memory.objects[writer_key("B")] = Object(torn.info, torn.data[:-1], torn.metadata)
    assert await roster.refresh() == []
    assert roster.writers == {}
    clock.time += 1
    await beat(store, "A")
    await roster.refresh()
    assert list(roster.writers) == ["A"]


@pytest.mark.parametrize("named", ["../x", "B", "a/b", ""])
async def test_a_heartbeat_that_names_another_writer_than_its_key_is_none(store: MemoryStorage, roster: Roster, named):
    """Else keys made of it would end the trainer, and control/state.json would name it to each successor."""
    await store.put(writer_key("A"), Heartbeat(named, "rollout-0").encode())
    assert await roster.refresh() == []
    assert roster.writers == {}


async def test_what_writers_long_gone_have_left_is_deleted_and_the_others_stay(
    store: MemoryStorage, roster: Roster, clock
):
    await beat(store, "LOST", "rollout-1")
    roster.wrote(clock.time)
    await roster.refresh()
    await beat(store, "STRANGER", "rollout-2")
    clock.time += GONE_AFTER * 60.0 + 1
    await beat(store, "LIVE", "rollout-0")
    roster.wrote(clock.time)
    await roster.refresh()
    assert sorted(store.memory.objects) == [writer_key("LIVE"), writer_key("LOST")]  # LOST is still to be told so
    del roster.writers["LOST"]
    await roster.refresh()
    assert list(store.memory.objects) == [writer_key("LIVE")]


async def test_files_that_are_no_heartbeats_are_neither_read_nor_deleted(store: MemoryStorage, roster: Roster, clock):
    old = ObjectInfo("writers/.DS_Store", 4, "e", clock.time)
    store.memory.objects[old.key] = Object(old, b"mine", {})
    await store.put("writers/notes.txt", b"mine")
    clock.time += GONE_AFTER * 60.0 + 1
    roster.wrote(clock.time)
    assert await roster.refresh() == []
    assert sorted(store.memory.objects) == ["writers/.DS_Store", "writers/notes.txt"]
