"""One optimizer step's samples: read from the shards that its plan names, and packed into micro-batches.

The samples of a group share their prompt, so a micro-batch holds it once, followed by the completions:

    tokens     p0 p1 p2 | a0 a1 | b0          prompt p, completions a0 a1 a2 and b0 b1
    position    0  1  2 |  3  4 |  3          a completion goes on where the prompt ends
    segment     0  0  0 |  1  1 |  2
    parent      0  0  0 |  0  0 |  0          a token sees earlier ones of its segment and of its parent
    source      2  3  4    2  5               the token whose hidden state predicts the target
    target     a0 a1 a2   b0 b1

The last token of a completion predicts nothing and is left out. What an environment wrote between two turns is input
like the rest, and predicted by nothing: it is no `target`, as if it were compacted away. The log-probabilities are
those of each prompt and completion by themselves, for P + n·(C−1) tokens instead of n·(P+C). Everything here is numpy.
"""

import asyncio
import dataclasses
import functools
import hashlib
import heapq

import numpy as np
import pyarrow as pa

from pipeline import codec, experience, selection
from pipeline.experience import Damaged, Ragged
from pipeline.storage import Corrupted, Storage
from pipeline.trainer_log import Plan
from pipeline.where import Condition


@dataclasses.dataclass(frozen=True)
class Batch:
    """All samples of one step, in the plan's order; those of a group lie together."""

    prompts: Ragged  # [N] of [P] token ids
    completions: Ragged  # [N] of [C] token ids
    logprobs: Ragged  # [N] of [C] float32, log μ of the sampled tokens; NaN for observations
    mask: Ragged  # [N] of [C] bool, the response mask: sampled by the policy, no observation
    rewards: np.ndarray  # [N] float64; NaN where unscorable
    parts: dict[str, np.ndarray]  # reward name → [N] float64, unweighted; NaN where missing
    valid: np.ndarray  # [N] bool: takes part in training
    groups: np.ndarray  # [N] int, position of the group in the plan
    steps: np.ndarray | None  # [N] int, `step` of the oldest version that made a token of the sample; None: not of ours
    truncated: np.ndarray  # [N] bool: ended at the length limit
    baselines: np.ndarray | None = None  # [N] reward of the group's greedy completion, NaN where there is none
    credits: np.ndarray | None = None  # [T] part of its sample's reward that came with the token
    baseline_parts: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # `parts` of the greedy completion

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each completion that the policy sampled, [N]."""
        return self._count(self.mask.values)

    @functools.cached_property
    def turns(self) -> np.ndarray:
        """Turns of the policy in each completion, [N]; 0 for one without tokens."""
        sampled = self.mask.values
        begins = sampled & ~np.append(False, sampled[:-1])
        begins[self.mask.offsets[:-1][self.lengths > 0]] = True
        return self._count(begins)

    @functools.cached_property
    def owners(self) -> np.ndarray:
        """Sample of each of the T tokens that the policy sampled, [T]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def places(self, part: "MicroBatch") -> np.ndarray:
        """Where the part's response tokens lie among those T, [R]; anywhere for those outside the response mask."""
        return (np.cumsum(self.lengths) - self.lengths)[part.row] + part.column

    def _count(self, flags: np.ndarray) -> np.ndarray:
        """How many are set in each completion: flags [T] → [N]."""
        return np.diff(np.append(0, np.cumsum(flags))[self.mask.offsets])


class Unreadable(Damaged):
    """Shards of a plan are not what was planned any more. `shards`: key → reason."""

    def __init__(self, shards: dict[str, str]):
        super().__init__("; ".join(shards.values()))
        self.shards = shards


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The plan's samples are those of another run, whose indices and policies are not this run's."""

    condition: Condition | None = None
    """Which of them take part in training; None: all."""


async def load_plan(storage: Storage, plan: Plan, replayed: Replayed | None = None) -> Batch:
    """Read the plan's groups, whose shards lie in `storage`. Raises Unreadable, naming every shard that is not what was
    planned, StorageError if the store does not answer."""
    digests = {group.key: group.sha256 for group in plan.groups}
    read = await asyncio.gather(*(_read(storage, key, digest) for key, digest in digests.items()))
    if damaged := {key: reason for key, reason in zip(digests, read, strict=True) if isinstance(reason, str)}:
        raise Unreadable(damaged)
    shards: dict[str, pa.Table] = dict(zip(digests, read, strict=True))
    parts = [shards[group.key].slice(group.start, group.stop - group.start) for group in plan.groups]
    for group, part in zip(plan.groups, parts, strict=True):
        own = {group.index} if replayed is None else set(part["index"].to_pylist()[:1])
        if not own or set(part["index"].to_pylist()) != own:
            raise Damaged(f"{group.key}: rows {group.start}:{group.stop} are not those of prompt index {group.index}")
    groups = np.repeat(np.arange(len(parts)), [part.num_rows for part in parts])
    table = pa.concat_tables(parts).combine_chunks()
    if replayed is None:
        return _batch(table, groups)
    return dataclasses.replace(_batch(selection.narrowed(table, replayed.condition), groups), steps=None)


async def _read(storage: Storage, key: str, digest: str) -> pa.Table | str:
    """The shard, or why it cannot be trained."""
    try:
        found = await storage.get(key)
        if found is None:
            return f"{key}: planned, but not in the store"
        if hashlib.sha256(found.data).hexdigest() != digest:
            return f"{key}: its sha256 is not the planned one; the shard was changed after it was written"
        return codec.decode(found.data)
    except (Corrupted, Damaged) as error:
        return str(error)


def _batch(table: pa.Table, groups: np.ndarray) -> Batch:
    greedy = np.asarray([reason == experience.GREEDY for reason in table["invalid"].to_pylist()])  # [R]
    baselines = None
    baseline_parts: dict[str, np.ndarray] = {}
    if greedy.any():
        alone, owners = table.filter(pa.array(greedy)), groups[greedy]
        table, groups = table.filter(pa.array(~greedy)).combine_chunks(), groups[~greedy]
        baselines = _of_group(alone["reward"].to_numpy(), owners, groups)
        baseline_parts = {name: _of_group(values, owners, groups) for name, values in _parts(alone).items()}
    completions = experience.ragged(table, "completion_ids")
    mask, credits = experience.response_mask(table), experience.token_rewards(table)
    rewards = table["reward"].to_numpy().astype(np.float64)
    scored = np.isfinite(rewards) & (np.diff(completions.offsets) > 0)
    return Batch(
        prompts=experience.ragged(table, "prompt_ids"),
        completions=completions,
        logprobs=experience.ragged(table, "logprobs"),
        mask=Ragged(mask, completions.offsets),
        rewards=rewards,
        parts=_parts(table),
        valid=scored & table["invalid"].is_null().to_numpy(),
        groups=groups,
        steps=table["version_step"].to_numpy(),
        truncated=np.asarray(table["finish_reason"].to_pylist()) == "length",
        baselines=baselines,
        credits=None if credits is None else credits[mask],
        baseline_parts=baseline_parts,
    )


def _of_group(values: np.ndarray, owners: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For samples of `groups` [N] the value [G] of the group that `owners` [G] names, [N]; NaN where there is none."""
    known = np.full(max(groups.max(initial=0), owners.max()) + 1, np.nan)
    known[owners] = values
    return known[groups]


def _parts(table: pa.Table) -> dict[str, np.ndarray]:
    parts: dict[str, np.ndarray] = {}
    for row, entries in enumerate(table["rewards"].to_pylist()):
        for name, value in entries or []:
            parts.setdefault(name, np.full(table.num_rows, np.nan))[row] = np.nan if value is None else value
    return parts


def updates(batch: Batch, count: int) -> list[np.ndarray]:
    """The samples [N] bool that take part in each of `count` optimizer updates: whole groups, in the plan's order.

    As many groups in each, unless some of the plan have been withdrawn.
    """
    number = int(batch.groups.max()) + 1
    return [batch.valid & (batch.groups * count // number == update) for update in range(count)]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """T packed tokens of one forward pass, and R response tokens to be scored; see the module's example."""

    input_ids: np.ndarray  # [T] int64
    position_ids: np.ndarray  # [T] int64
    segment: np.ndarray  # [T] int64
    parent: np.ndarray  # [T] int64
    source: np.ndarray  # [R] int64, index into T
    target: np.ndarray  # [R] int64, token id
    row: np.ndarray  # [R] int64, sample in the batch
    column: np.ndarray  # [R] int64, position among the sampled tokens of its completion
    sampled: np.ndarray  # [R] float32, log μ
    mask: np.ndarray  # [R] bool, the response mask

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """(start, stop) of each prompt with its completions; no token sees another block."""
        starts = np.flatnonzero(np.diff(self.parent, prepend=-1))
        return list(zip(starts.tolist(), [*starts[1:].tolist(), len(self.parent)], strict=True))


@dataclasses.dataclass(frozen=True)
class Block:
    """A prompt with some of its completions."""

    samples: list[int]  # of one group
    tokens: int


def pack(batch: Batch, include: np.ndarray, ranks: int, max_tokens: int) -> list[list[MicroBatch]]:
    """The samples of `include` [N] bool as micro-batches of at most `max_tokens` packed tokens, one list per rank.

    Every rank gets the same number, filled up with empty ones (masked), so that none skips a collective;
    the n-th of all ranks are about equally long. A group that is too long is split and repeats its prompt; a sample
    that is too long by itself gets a micro-batch of its own. The same batch always packs in the same way.
    """
    shares = layout(batch, include, ranks, max_tokens)
    return [[_micro_batch(batch, blocks) for blocks in share] for share in shares]


def layout(batch: Batch, include: np.ndarray, ranks: int, max_tokens: int) -> list[list[list[Block]]]:
    """By rank and micro-batch: what `pack` puts into it."""
    bins = _distribute(_blocks(batch, include, max_tokens), ranks, max_tokens)
    bins.sort(key=lambda blocks: sum(block.tokens for block in blocks), reverse=True)
    return [bins[rank::ranks] for rank in range(ranks)]


def _blocks(batch: Batch, include: np.ndarray, max_tokens: int) -> list[Block]:
    blocks: list[Block] = []
    prompt_lengths, completion_lengths = np.diff(batch.prompts.offsets), np.diff(batch.completions.offsets)
    group = -1
    for sample in np.flatnonzero(include).tolist():
        own = int(completion_lengths[sample]) - 1
        if batch.groups[sample] == group and blocks[-1].tokens + own <= max_tokens:
            blocks[-1] = Block([*blocks[-1].samples, sample], blocks[-1].tokens + own)
        else:
            blocks.append(Block([sample], int(prompt_lengths[sample]) + own))
        group = batch.groups[sample]
    return blocks


def _distribute(blocks: list[Block], ranks: int, max_tokens: int) -> list[list[Block]]:
    """Into the smallest multiple of `ranks` bins that holds them all: longest first, each into the emptiest bin."""
    blocks = sorted(blocks, key=lambda block: (-block.tokens, block.samples))
    count = ranks
    while (bins := _fill(blocks, count, max_tokens)) is None:
        count += ranks
    return bins


def _fill(blocks: list[Block], count: int, max_tokens: int) -> list[list[Block]] | None:
    bins: list[list[Block]] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]
    for block in blocks:
        load, number = heapq.heappop(emptiest)
        if load and load + block.tokens > max_tokens:
            return None
        bins[number].append(block)
        heapq.heappush(emptiest, (load + block.tokens, number))
    return bins


def _micro_batch(batch: Batch, blocks: list[Block]) -> MicroBatch:
    builder = _Builder(batch)
    for block in sorted(blocks, key=lambda block: block.samples):
        builder.add(block.samples)
    return builder.finish() if blocks else EMPTY


EMPTY = MicroBatch(
    input_ids=np.zeros(2, np.int64),
    position_ids=np.arange(2),
    segment=np.zeros(2, np.int64),
    parent=np.zeros(2, np.int64),
    **{name: np.zeros(1, np.int64) for name in ("source", "target", "row", "column")},
    sampled=np.zeros(1, np.float32),
    mask=np.zeros(1, np.bool_),
)
"""One response token, outside the response mask: a forward and backward pass that changes nothing. It has a token more
than it needs, since compiled code makes a case of its own of lengths of one."""

EXAMPLE = MicroBatch(
    input_ids=np.array([3, 1, 4, 1, 5, 2]),
    position_ids=np.array([0, 1, 2, 3, 4, 3]),
    segment=np.array([0, 0, 0, 1, 1, 2]),
    parent=np.array([0, 0, 0, 0, 0, 0]),
    source=np.array([2, 3, 4, 2, 5]),
    target=np.array([1, 5, 9, 2, 6]),
    row=np.array([0, 0, 0, 1, 1]),
    column=np.array([0, 1, 2, 0, 1]),
    sampled=np.zeros(5, np.float32),
    mask=np.ones(5, np.bool_),
)
"""The picture above: prompt [3, 1, 4] with the completions [1, 5, 9] and [2, 6]."""


class _Builder:
    """Grows the arrays of one micro-batch, block by block."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.tokens = 0
        self.segments = 0
        self.fields: dict[str, list[np.ndarray]] = {field.name: [] for field in dataclasses.fields(MicroBatch)}

    def add(self, samples: list[int]) -> None:
        prompt = _row(self.batch.prompts, samples[0])
        parent = self.segments
        last = self._append(prompt, 0, parent) + len(prompt) - 1
        for sample in samples:
            completion, mask = _row(self.batch.completions, sample), _row(self.batch.mask, sample)
            start = self._append(completion[:-1], len(prompt), parent)
            sources = np.append(last, start + np.arange(len(completion) - 1))
            count = int(self.batch.lengths[sample])
            self._extend(
                source=sources[mask],
                target=completion[mask],
                row=np.full(count, sample),
                column=np.arange(count),
                sampled=_row(self.batch.logprobs, sample)[mask],
                mask=np.ones(count, np.bool_),
            )

    def finish(self) -> MicroBatch:
        columns = {name: np.concatenate(parts) for name, parts in self.fields.items()}
        return MicroBatch(
            **{name: column.astype(getattr(EMPTY, name).dtype, copy=False) for name, column in columns.items()}
        )

    def _append(self, ids: np.ndarray, position: int, parent: int) -> int:
        """One segment of tokens; returns where it starts."""
        start = self.tokens
        self._extend(
            input_ids=ids,
            position_ids=position + np.arange(len(ids)),
            segment=np.full(len(ids), self.segments),
            parent=np.full(len(ids), parent),
        )
        self.tokens += len(ids)
        self.segments += 1
        return start

    def _extend(self, **columns: np.ndarray) -> None:
        for name, values in columns.items():
            self.fields[name].append(values)


def _row(ragged: Ragged, row: int) -> np.ndarray:
    return ragged.values[ragged.offsets[row] : ragged.offsets[row + 1]]
