"""Shards come in: each is reduced to what planning needs to know of its groups, the damaged ones are set apart."""

import itertools
import json
import logging
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from pipeline import codec
from pipeline.experience import Damaged
from pipeline.leases import Delivered, Ledger
from pipeline.messages import shard_key
from pipeline.roster import Known
from pipeline.storage import Corrupted, Object, Storage
from pipeline.trainer_log import GroupRef, Quarantine

log = logging.getLogger(__name__)

SMALLEST_SPREAD = 1e-6
"""Standard deviation of a group's rewards below which they count as equal."""
LONGEST_REASON = 400  # characters


class Intake:
    """`damaged`: shards that the next plan must name. `refused`: how many in a row are not what a worker should write.
    `vocabulary`: token ids must be below; None: not checked."""

    def __init__(self, storage: Storage, group_size: int, vocabulary: int | None):
        self.storage, self.group_size, self.vocabulary = storage, group_size, vocabulary
        self.damaged: dict[str, Quarantine] = {}
        self.refused = 0
        self._logged: set[str] = set()

    def logged(self, shards: Iterable[Quarantine]) -> None:
        """A plan in the log names these damaged shards."""
        for shard in shards:
            self._logged.add(shard.key)
            self.damaged.pop(shard.key, None)

    def is_logged(self, key: str) -> bool:
        return key in self._logged

    async def drain(self, known: Known, ledger: Ledger) -> None:
        """Read the shards of one writer up to its last, into the ledger."""
        while known.final is None or known.cursor < known.final:
            key = shard_key(known.ulid, known.cursor)
            try:
                shard = await self.storage.get(key)
                if shard is None:
                    return
                self._deliver(known, shard, ledger)
            except Corrupted as error:
                self._quarantine(known, key, error.object, str(error), ledger)
            known.cursor += 1

    def _deliver(self, known: Known, shard: Object, ledger: Ledger) -> None:
        key = shard.info.key
        try:
            table = codec.decode(shard.data, self.vocabulary, self.group_size)
        except Damaged as error:
            self.refused += not self.is_logged(key)
            self._quarantine(known, key, shard, str(error), ledger)
            return
        self.refused = 0
        for group in summarise(table, key, shard.info.sha256, known.ulid, known.cursor):
            ledger.deliver(group, catching_up=known.cursor < known.promised)

    def _quarantine(self, known: Known, key: str, shard: Object | None, reason: str, ledger: Ledger) -> None:
        """The indices that its metadata names are free again; others show up as not delivered."""
        if self.is_logged(key):
            return
        log.warning("shard %s is quarantined: %s", key, reason)
        self.damaged[key] = Quarantine(key, reason)
        for index in _named_indices(shard.metadata if shard else {}):
            ledger.release(index, known.ulid)


def summarise(table: pa.Table, key: str, sha256: str, writer: str, sequence: int) -> list[Delivered]:
    """The groups of a shard, in order. Versions are those of the samples that take part in training, if any do."""
    indices = table["index"].to_numpy()  # [R]
    steps = table["version_step"].to_numpy()  # [R]
    rewards = table["reward"].to_numpy()  # [R], NaN where null
    valid = table["invalid"].is_null().to_numpy()  # [R]
    bounds = [0, *(np.flatnonzero(np.diff(indices)) + 1).tolist(), len(indices)]
    groups = []
    for start, stop in itertools.pairwise(bounds):
        used = valid[start:stop] if valid[start:stop].any() else ~valid[start:stop]
        made, scored = steps[start:stop][used], rewards[start:stop][valid[start:stop]]
        groups.append(
            Delivered(
                ref=GroupRef(int(indices[start]), key, sha256, start, stop),
                writer=writer,
                sequence=sequence,
                oldest=int(made.min()),
                newest=int(made.max()),
                valid=len(scored),
                spread=len(scored) > 1 and float(scored.std(ddof=1)) > SMALLEST_SPREAD,
                why="" if len(scored) else " ".join(table["invalid"][start].as_py().split())[:LONGEST_REASON],
            )
        )
    return groups


def _named_indices(metadata: dict[str, str]) -> list[int]:
    """The prompt indices that a shard's metadata names; empty if it does not."""
    try:
        return [int(index) for index in json.loads(metadata.get("indices", "[]"))]
    except (ValueError, TypeError):
        return []
