import json

from pipeline.leases import Frontier, Lease, Ledger
from pipeline.messages import WriterEntry, shard_key
from pipeline.resume import State, entries, expired
from pipeline.roster import Known
from pipeline.storage import ObjectInfo
from pipeline.versions import Version


def test_the_state_survives_being_json():
    state = State(
        term=2,
        step=7,
        position=12,
        frontier=Frontier(5, [7]),
        writers={"A": WriterEntry("rollout-0", {8: 6}, acknowledged=4, final=4)},
        cursors={"A": 3},
        evaluations={6: Version(2, 6)},
        time=17.5,
    )
    content = json.loads(json.dumps(state.to_json()))
    again = State.from_json(content)
    assert again.to_json() == content == state.to_json()
    assert (again.writers, again.cursors, again.evaluations) == (state.writers, state.cursors, state.evaluations)


def test_each_writer_is_described_with_its_own_leases():
    ledger = Ledger()
    ledger.lease(3, Lease("A", 2, 0.0))
    roster = [Known("A", "rollout-0", cursor=5), Known("B", "rollout-1", cursor=6, final=6)]
    assert entries(roster, ledger) == {
        "A": WriterEntry("rollout-0", {3: 2}, acknowledged=5),
        "B": WriterEntry("rollout-1", {}, acknowledged=6, final=6),
    }


def shard(ulid: str, sequence: int, modified: float) -> ObjectInfo:
    return ObjectInfo(shard_key(ulid, sequence), 1, "etag", modified)


def test_only_shards_that_were_read_and_used_up_before_the_oldest_checkpoint_expire():
    oldest = State(cursors={"A": 2}, time=1000.0)
    gone, used, waiting, young, later = (
        shard("0", 9, 100.0),
        shard("A", 1, 100.0),
        shard("A", 2, 100.0),
        shard("A", 1, 990.0),
        shard("B", 0, 1200.0),
    )
    assert expired([gone, used, waiting, young, later], oldest, grace_s=60.0) == [gone.key, used.key]
