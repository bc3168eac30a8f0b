"""control/state.json in the hands of the one trainer that may write it: compare-and-swap, fenced by the term."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from pipeline.messages import CONTROL_KEY, CONTROL_REMEDY, ControlState
from pipeline.storage import ABSENT, Conflict, Corrupted, Object, ObjectInfo, Storage, StorageError
from pipeline.trainer_log import Fenced, is_begun

log = logging.getLogger(__name__)


class ControlFile:
    def __init__(self, storage: Storage):
        self.storage = storage
        self._etag = ""
        self._written = b""
        self._writing = asyncio.Lock()

    async def seize(self, first: ControlState) -> tuple[ControlState | None, ObjectInfo]:
        """Make the file this term's, as the predecessor left it, or `first` if there is none.

        Returns what the predecessor last wrote. Raises Fenced if a higher term has it, ValueError if it is damaged.
        """
        while True:
            found = await self._get()
            old = ControlState.decode(found.data) if found else None
            if old and old.term >= first.term:
                raise _fenced(old.term, first.term)
            new = dataclasses.replace(old, term=first.term, stop=None, replaying=True) if old else first
            try:
                if found:
                    info = await self.storage.replace(CONTROL_KEY, new.encode(), found.info.etag)
                else:
                    info = await self.storage.create(CONTROL_KEY, new.encode())
            except Conflict:
                continue  # the predecessor was still alive: what it wrote counts
            self._etag = info.etag
            return old, info

    async def write(self, current: Callable[[], ControlState], fresh: bool = False) -> ObjectInfo | None:
        """Write the state that is current when it is this call's turn; None if it is there already and not `fresh`.

        A file that somebody has deleted is written anew: else trainer and workers would wait for each other for ever.
        Raises Fenced if a higher term has the file, StorageError if the store does not answer in time or the whole run
        was deleted, ValueError if the file was damaged.
        """
        async with self._writing:
            while True:
                state = current()
                data = state.encode()
                if data == self._written and not fresh:
                    return None
                try:
                    info = await self.storage.replace(CONTROL_KEY, data, self._etag)
                except Conflict:
                    self._etag = await self._condition(state.term)
                    continue
                self._etag, self._written = info.etag, data
                return info

    async def _condition(self, term: int) -> str:
        """On which the next try may write: that nothing has changed since this look at what is there.

        It is this trainer's own, if a write of it arrived although it seemed to fail; gone; or that of a predecessor
        which found it gone before it knew that it is fenced.
        """
        found = await self._get()
        if found is None:
            if not await is_begun(self.storage):
                raise StorageError(f"{CONTROL_KEY} is gone: somebody has deleted the run's objects")
            log.warning("%s was deleted, and is written anew", CONTROL_KEY)
            return ABSENT
        present = ControlState.decode(found.data)
        if present.term > term:
            raise _fenced(present.term, term)
        return found.info.etag

    async def _get(self) -> Object | None:
        try:
            return await self.storage.get(CONTROL_KEY)
        except Corrupted as error:
            raise ValueError(f"{error}; {CONTROL_REMEDY}") from None


def _fenced(theirs: int, ours: int) -> Fenced:
    return Fenced(f"a trainer of term {theirs} has taken over; this one has term {ours}")
