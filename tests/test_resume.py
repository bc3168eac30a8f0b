import json

import pytest

from pipeline.leases import Frontier, Lease, Ledger
from pipeline.messages import WriterEntry, shard_key
from pipeline.resume import State, entries, expired
from pipeline.roster import Known
from pipeline.storage import ObjectInfo
from pipeline.trainer_log import GroupRef, Plan
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


def shard(ulid: str, sequence: int = 0) -> ObjectInfo:
    return ObjectInfo(shard_key(ulid, sequence), 1, "etag", 0.0)


@pytest.mark.parametrize(
    ("found", "expires"),
    [
        (shard("A", 1), True),  # below the cursor of the oldest checkpoint
        (shard("A", 2), False),  # a later checkpoint has used it up, the oldest has not
        (shard("used"), True),  # its writer is named by nobody
        (shard("planned"), False),  # nobody names its writer, but a plan behind the oldest checkpoint it
        (shard("new"), False),  # its writer came after the last checkpoint
        (shard("came"), False),  # its writer came after the oldest, and is gone; only a later checkpoint names it
    ],
)
def test_a_shard_expires_when_the_oldest_checkpoint_has_used_it_up_or_nobody_names_its_writer(found, expires):
    kept = [State(position=9, cursors={"A": 5, "came": 1}), State(position=4, cursors={"A": 2})]
    plan = Plan(3, 1, (GroupRef(0, shard_key("planned", 0), "", 0, 2),))
    assert expired([found], kept, [plan], {"A", "new"}) == [found.key] * expires


def test_what_is_no_shard_never_expires():
    assert expired([ObjectInfo("rollouts/v1/notes.parquet", 1, "etag", 0.0)], [State()], [], set()) == []
