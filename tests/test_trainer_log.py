import asyncio

import pytest

from pipeline.storage import Storage, StorageError, Transient
from pipeline.trainer_log import (
    Collect,
    Drop,
    Fenced,
    GroupRef,
    Plan,
    Quarantine,
    Stop,
    Takeover,
    TrainerLog,
    Withdraw,
    decode,
    encode,
)


def plan(step: int, term: int) -> Plan:
    return Plan(step, term, groups=(GroupRef(step, "rollouts/v1/W/0.parquet", "ab", 0, 4),))


@pytest.mark.parametrize(
    "record",
    [
        Takeover(3),
        Plan(2, 1, (GroupRef(7, "k", "ab", 4, 8),), (Drop(3, "stale"),), (Quarantine("d", "torn"),)),
        Withdraw(2, 1, (Drop(7, "damaged"),), (Quarantine("k", "torn"),)),
        Collect(2, below=17),
        Stop(2, "complete", 9),
    ],
)
def test_a_record_survives_its_encoding(record):
    assert decode(encode(record)) == record


def test_a_plan_from_which_groups_are_withdrawn_keeps_the_others_in_order():
    references = tuple(GroupRef(index, "k", "ab", 0, 4) for index in (7, 3, 5))
    left = Plan(2, 1, references, replayed=True).without(Withdraw(2, 1, (Drop(3, "damaged"),), ()))
    assert [group.index for group in left.groups] == [7, 5]
    assert left.replayed


def test_that_a_plan_is_replayed_is_not_part_of_the_record():
    assert decode(encode(Plan(2, 1, (), replayed=True))) == Plan(2, 1, ())


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[]", b"{}", b'{"type": "party"}', b'{"type": []}', b'{"type": "stop", "term": 1}', b'"plan"'),
        *(
            b"[" * 100_000,
            b'{"type": "takeover", "term": "1"}',
            b'{"type": "stop", "term": 1, "reason": [], "step": 2}',
        ),
        encode(plan(1, 1)).replace(b'"key": "', b'"key": 5, "more": "'),
        encode(plan(1, 1)).replace(b'"start": 0', b'"start": 0.5'),
        encode(Withdraw(1, 1, (Drop(3, "damaged"),), ())).replace(b'"damaged"', b"{}"),
        encode(Withdraw(1, 1, (Drop(3, "damaged"),), ())).replace(b": 3", b": []"),
    ],
    ids=lambda data: data[:8].decode(),
)
def test_what_is_no_record_is_refused_with_its_text(data: bytes):
    with pytest.raises(ValueError, match="not a record of the trainer's log"):
        decode(data)


async def test_the_first_trainer_has_term_1_and_its_successor_sees_all_it_wrote(storage: Storage):
    first, second = TrainerLog(storage), TrainerLog(storage)
    assert await first.take_over() == []
    await first.append(plan(1, 1))
    assert await second.take_over() == [(0, Takeover(1)), (1, plan(1, 1))]
    assert (first.term, second.term, second.position) == (1, 2, 3)


async def test_replay_starts_at_the_position_of_the_checkpoint(storage: Storage):
    first, second = TrainerLog(storage), TrainerLog(storage)
    await first.take_over()
    await first.append(plan(1, 1))
    await first.append(plan(2, 1))
    assert await second.take_over(position=2, term=1) == [(2, plan(2, 1))]
    assert second.term == 2


async def test_records_appended_at_the_same_time_follow_one_another(storage: Storage):
    log = TrainerLog(storage)
    await log.take_over()
    await asyncio.gather(*(log.append(Collect(1, below=number)) for number in range(4)))
    assert log.position == 5


async def test_a_fenced_trainer_can_append_nothing_any_more(storage: Storage):
    zombie, successor = TrainerLog(storage), TrainerLog(storage)
    await zombie.take_over()
    await successor.take_over()
    await successor.append(plan(1, 2))
    for _ in range(2):
        with pytest.raises(Fenced, match="term 2"):
            await zombie.append(plan(1, 1))


class Before:
    """Lets `action` happen just before the first write of a record."""

    def __init__(self, action):
        self.action = action

    async def before(self, operation: str, key: str) -> None:
        if operation == "write" and self.action:
            action, self.action = self.action, None
            await action()

    async def after(self, operation: str, key: str) -> None:
        pass


async def test_a_plan_that_arrives_while_its_trainer_is_replaced_is_adopted(open_client):
    old = TrainerLog(open_client())
    await old.take_over()
    new = TrainerLog(open_client(faults=Before(lambda: old.append(plan(1, 1)))))
    assert await new.take_over() == [(0, Takeover(1)), (1, plan(1, 1))]
    assert (new.term, new.position) == (2, 3)


async def test_of_two_trainers_that_start_at_once_exactly_one_goes_on(open_client):
    rivals = [TrainerLog(open_client()) for _ in range(5)]
    outcomes = await asyncio.gather(*(rival.take_over() for rival in rivals), return_exceptions=True)
    lost = [outcome for outcome in outcomes if isinstance(outcome, Fenced)]
    survivors = [rival for rival, outcome in zip(rivals, outcomes, strict=True) if isinstance(outcome, list)]
    assert len(lost) + len(survivors) == 5
    outcomes = await asyncio.gather(*(log.append(plan(1, log.term)) for log in survivors), return_exceptions=True)
    assert sum(outcome is None for outcome in outcomes) == 1


class LostResponse:
    """The first write takes effect, but its response is lost; `silent`: nothing is answered from then on."""

    def __init__(self, silent: bool):
        self.silent, self.lost = silent, False

    async def before(self, operation: str, key: str) -> None:
        if self.lost and self.silent:
            raise Transient("time-out")

    async def after(self, operation: str, key: str) -> None:
        if operation == "write" and not self.lost:
            self.lost = True
            raise Transient("connection reset")


async def test_a_lost_response_is_recognised_as_ones_own_record(open_client):
    log = TrainerLog(open_client(faults=LostResponse(silent=False)))
    await log.take_over()
    await log.append(plan(1, 1))
    assert log.position == 2


async def test_after_an_outage_that_hid_the_outcome_the_log_cannot_be_used_further(open_client, clock):
    log = TrainerLog(open_client())
    await log.take_over()
    log.storage = open_client(faults=LostResponse(silent=True), clock=clock, deadline_s=5.0)
    with pytest.raises(StorageError):
        await log.append(plan(1, 1))
    log.storage = open_client()
    with pytest.raises(Fenced):
        await log.append(plan(1, 1))
