"""How often a run asks its object store, and what that costs; pure arithmetic.

Polling goes by the clock, whatever is trained: each worker reads control/state.json every `poll_s` and rewrites its
heartbeat every `heartbeat_s`, or, when it has long had nothing to do, every `heartbeat_s` and every other time; the
trainer, every `heartbeat_s`, lists writers/, reads each heartbeat and rewrites
control/state.json, and asks each worker with leases for its next shard every `poll_s` while it waits for groups, or
`flush_s`, and less often the longer that worker has been quiet. Work adds the shards, which the trainer reads to plan
and every rank to train, and a few records a step.
All is rather too much than too little: a worker may have no lease, and groups that finish together share a shard.
"""

import dataclasses
import math

from pipeline import polling
from pipeline.config import RunConfig

HOUR_S = 3600.0
PER_MILLION = {"PUT": 5.0, "GET": 0.4, "LIST": 5.0}
"""Dollars for a million requests: S3 Standard in us-east-1, list price."""
LISTED = 1000
"""Keys in one answer."""
RECORDS = 5
"""Written a step: plan, metrics, weights and their manifest, control/state.json."""


@dataclasses.dataclass(frozen=True)
class Requests:
    """By kind, for some time or some work."""

    put: float
    get: float
    list: float

    @property
    def dollars(self) -> float:
        counts = {"PUT": self.put, "GET": self.get, "LIST": self.list}
        return sum(counts[kind] * price for kind, price in PER_MILLION.items()) / 1e6

    def times(self, factor: float) -> "Requests":
        return Requests(self.put * factor, self.get * factor, self.list * factor)

    def plus(self, other: "Requests") -> "Requests":
        return Requests(self.put + other.put, self.get + other.get, self.list + other.list)


def idle_worker(config: RunConfig) -> Requests:
    """Of a worker that has long had nothing to do, in an hour; the trainer's share of it not counted."""
    looks = HOUR_S / max(config.rollout.poll_s, polling.MEAN * config.rollout.heartbeat_s)
    return Requests(put=looks / 2, get=looks, list=0)


def worker(config: RunConfig) -> Requests:
    """Of a worker that has work, in an hour, for its polling."""
    return Requests(put=HOUR_S / config.rollout.heartbeat_s, get=HOUR_S / config.rollout.poll_s, list=0)


def trainer(config: RunConfig, workers: int, waiting: float, quiet_s: float) -> Requests:
    """Of the trainer, in an hour, for its polling; `waiting` is the share of the time in which it waits for groups,
    `quiet_s` the time between two grants or shards of a worker."""
    rollout, beats = config.rollout, HOUR_S / config.rollout.heartbeat_s
    shares = ((waiting, rollout.poll_s), (1 - waiting, rollout.flush_s))
    looks = sum(share * polling.looks(quiet_s, period_s, rollout.heartbeat_s) for share, period_s in shares)
    looks *= HOUR_S / quiet_s
    return Requests(put=beats, get=workers * (beats + looks), list=beats * max(1, math.ceil(workers / LISTED)))


def step(config: RunConfig, workers: int, step_s: float, ranks: int) -> Requests:
    """Of the work of one step: its shards, each written once and read to be planned and by every rank, and records."""
    written = shards(config, workers, step_s)
    return Requests(put=written + RECORDS, get=written * (1 + ranks), list=0)


def shards(config: RunConfig, workers: int, step_s: float) -> float:
    """Of one step."""
    groups, rollout = config.algorithm.prompts_per_step, config.rollout
    flushes = workers * max(1.0, step_s / rollout.flush_s)
    return max(math.ceil(groups / rollout.shard_groups), min(groups, flushes))


def per_million_rollouts(config: RunConfig, workers: int, ranks: int, step_s: float, waiting: float) -> Requests:
    """Of all processes, for a million trained samples."""
    steps = 1e6 / (config.algorithm.prompts_per_step * config.algorithm.group_size)
    quiet_s = step_s / (1 + shards(config, workers, step_s) / max(1, workers))
    asked = worker(config).times(workers).plus(trainer(config, workers, waiting, quiet_s))
    return asked.times(steps * step_s / HOUR_S).plus(step(config, workers, step_s, ranks).times(steps))
