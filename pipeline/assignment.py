"""Which writer evaluates which policy: one evaluation at a time, in the order of the requests; pure."""

import dataclasses
from collections.abc import Mapping

from pipeline.messages import EvaluationRequest
from pipeline.versions import Version


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A live writer that does not drain."""

    loaded: Version | None
    leases: int


class Assignments:
    def __init__(self, pending: Mapping[int, Version] | None = None):
        self.pending = dict(pending or {})
        """Step → version, in order of request."""
        self.current: EvaluationRequest | None = None

    @property
    def first(self) -> int | None:
        return next(iter(self.pending), None)

    def request(self, step: int, version: Version) -> None:
        self.pending[step] = version

    def settle(self, step: int) -> None:
        """The result of `step` lies in the store."""
        self.pending.pop(step, None)

    def assign(self, candidates: Mapping[str, Candidate], newest: Version | None) -> None:
        """Choose a writer for the first request, or keep the one chosen before.

        No writer goes back to an older policy: if all have passed the requested one, `newest` takes its place.
        """
        step = self.first
        if step is None:
            self.current = None
            return
        able = _not_beyond(candidates, self.pending[step])
        if candidates and not able and newest and newest > self.pending[step]:
            self.pending[step] = newest
            able = _not_beyond(candidates, newest)
        version, chosen = self.pending[step], self.current
        if chosen and chosen.step == step and chosen.version == version and chosen.writer in able:
            return
        writer = min(able, key=lambda ulid: (able[ulid].leases, ulid), default=None)
        self.current = EvaluationRequest(step, version, writer) if writer else None


def _not_beyond(candidates: Mapping[str, Candidate], version: Version) -> dict[str, Candidate]:
    return {
        ulid: candidate
        for ulid, candidate in candidates.items()
        if candidate.loaded is None or candidate.loaded <= version
    }
