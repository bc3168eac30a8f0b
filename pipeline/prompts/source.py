"""Index n names a prompt: `PromptSource.at(n)` is pure in (configuration, n).

Draws are apportioned to the sets in cycles: with weights 3 and 1 every four successive draws hold three of the
first set and one of the second, in an order shuffled by (seed, cycle). A set of finite size is walked in passes,
each permuted by (seed, set, pass). The permutations are small Feistel networks, so that nothing is materialised
and no library's shuffle has to stay as it is. Generated sets are endless unless their size is given.
"""

import bisect
import collections
import dataclasses
import fractions
import functools
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pipeline.config import DataConfig, PromptSetConfig, StoreConfig
from pipeline.prompts.file import read_rows
from pipeline.prompts.generated import Entry, Generator

LONGEST_CYCLE = 10_000
ROUNDS = 4

logger = logging.getLogger(__name__)

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What one index stands for. Example: set `sums`, content "2 + 2 =", answer "4"."""

    index: int
    set: str
    content: str | list[Message]
    answer: str | None
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The other columns; rewards receive them by name."""
    entry: Entry | None = None
    """Of generated sets: what the generator's own scorer needs."""

    @property
    def text(self) -> str:
        """The prompt as people read it."""
        return self.content if isinstance(self.content, str) else as_text(self.content)


def as_text(messages: Sequence[Message]) -> str:
    """A message alone by its content, several by role and content."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


class PromptSet(Protocol):
    name: str
    size: int | None
    """Distinct prompts; None: endless."""
    columns: frozenset[str]
    """What `row` of a prompt may hold."""
    left_out: str | None
    """How many rows are not used, and why, in words; None: all are."""

    def item(self, number: int, index: int) -> Prompt:
        """Prompt `number` (0 <= number < size), carrying `index`; pure."""
        ...


class PromptSource:
    """The training prompts. Opening them reads files and blocks: not in an event loop.

    Raises ValueError, naming set and remedy, for data that cannot be used.
    """

    def __init__(self, data: DataConfig, store: StoreConfig | None = None) -> None:
        names = [config.name for config in data.sets]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"data.sets: names must be distinct and at least one; they are {names}")
        self.seed = data.seed
        self.sets = [open_set(config, data.seed, store) for config in data.sets]
        self.shares = _shares(data.sets)
        self._bounds = list(itertools.accumulate(self.shares))
        self._cycle = functools.lru_cache(maxsize=4)(self._draw_cycle)

    @property
    def columns(self) -> frozenset[str]:
        """What `row` of some prompt may hold."""
        return frozenset().union(*(each.columns for each in self.sets))

    def at(self, n: int) -> Prompt:
        cycle, slot = divmod(n, self._bounds[-1])
        which, ordinal = self._cycle(cycle)[slot]
        draw, chosen = cycle * self.shares[which] + ordinal, self.sets[which]
        if chosen.size is None:
            return chosen.item(draw, n)
        turn, offset = divmod(draw, chosen.size)
        return chosen.item(permute(offset, chosen.size, f"{self.seed}/{chosen.name}/{turn}"), n)

    def _draw_cycle(self, cycle: int) -> list[tuple[int, int]]:
        """(set, how many of that set came before in this cycle) for each slot of a cycle."""
        length = self._bounds[-1]
        drawn = [0] * len(self.sets)
        order = []
        for slot in range(length):
            which = bisect.bisect_right(self._bounds, permute(slot, length, f"{self.seed}//{cycle}"))
            order.append((which, drawn[which]))
            drawn[which] += 1
        return order


def _shares(sets: Sequence[PromptSetConfig]) -> list[int]:
    """Draws per cycle of each set: the weights as the smallest whole numbers. [1.0, 0.2] gives [5, 1]."""
    weights = [fractions.Fraction(str(config.weight)) for config in sets]
    for config, weight in zip(sets, weights, strict=True):
        if weight <= 0:
            raise ValueError(f"data set {config.name}: weight {config.weight} must be above 0, or leave the set out")
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    shares = [number // math.gcd(*whole) for number in whole]
    if sum(shares) > LONGEST_CYCLE:
        raise ValueError(
            f"data.sets: weights {[config.weight for config in sets]} repeat only after {sum(shares)} draws; "
            f"round them so that they do within {LONGEST_CYCLE}"
        )
    return shares


def permute(position: int, size: int, key: str) -> int:
    """Where a pseudorandom permutation of range(size), chosen by `key`, sends `position`.

    A balanced Feistel network (Luby and Rackoff, 1988) over the next power of four, walked until it lands inside.
    """
    assert 0 <= position < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for number in range(ROUNDS):
            digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        position = left << half | right
        if position < size:
            return position


def open_set(config: PromptSetConfig, seed: int, store: StoreConfig | None = None, held_out: bool = False) -> PromptSet:
    """The set that `config` describes. `held_out`: of a generator, prompts that training never draws."""
    if (config.uri is None) == (config.generator is None):
        raise ValueError(f"data set {config.name}: give exactly one of uri and generator")
    if config.limit is not None and config.limit < 1:
        raise ValueError(f"data set {config.name}: limit is {config.limit}; give 1 or more, or leave it out")
    if config.generator is not None:
        return GeneratedSet(config, seed, held_out)
    return FileSet(config, *read_rows(config.uri or "", f"data set {config.name}", store))


class GeneratedSet:
    def __init__(self, config: PromptSetConfig, seed: int, held_out: bool) -> None:
        self.name = config.name
        self.generator = Generator(config.name, config.generator or "", config.parameters, seed, held_out)
        sizes = [size for size in (config.limit, self.generator.size) if size is not None]
        self.size = min(sizes, default=None)
        self.columns = frozenset({"item"})
        self.left_out: str | None = None

    def item(self, number: int, index: int) -> Prompt:
        entry = self.generator.entry(number)
        return Prompt(index, self.name, entry.question, entry.answer, {"item": entry.item}, entry)


class FileSet:
    """Rows of a file. Those without a usable prompt, and repeated ones, are left out, and told of."""

    def __init__(self, config: PromptSetConfig, count: int, row: Callable[[int], dict[str, Any]]) -> None:
        self.name, self._config, self._row = config.name, config, row
        self.left_out: str | None = None
        self.columns: frozenset[str] = frozenset()
        self._kept = self._select(count)
        self.size: int | None = len(self._kept)

    def item(self, number: int, index: int) -> Prompt:
        row = dict(self._row(self._kept[number]))
        content = row.pop(self._config.prompt_field)
        answer = _answer(row.pop(self._config.answer_field, None))
        return Prompt(index, self.name, _without_nulls(content), answer, row)

    def _select(self, count: int) -> list[int]:
        field, limit = self._config.prompt_field, self._config.limit
        kept: list[int] = []
        seen: set[bytes] = set()
        reasons: collections.Counter[str] = collections.Counter()
        first = ""
        for number in range(count):
            if limit is not None and len(kept) == limit:
                break
            try:
                row = self._row(number)
                reason = _unusable(row.get(field), field) or _repeated(row, field, self._config.answer_field, seen)
            except RecursionError:
                reason = "nested too deeply"
            if reason is None:
                kept.append(number)
                self.columns |= row.keys() - {field, self._config.answer_field}
            else:
                reasons[reason] += 1
                first = first or f"row {number + 1}: {reason}"
        self._report(count, len(kept), reasons, first)
        return kept

    def _report(self, count: int, kept: int, left_out: collections.Counter[str], first: str) -> None:
        where = f"data set {self.name} ({self._config.uri})"
        if count and not kept and set(left_out) == {_without(self._config.prompt_field)}:
            if any(self._config.prompt_field in self._row(number) for number in range(count)):
                raise ValueError(
                    f"{where}: the field {self._config.prompt_field!r} is empty in every row; "
                    "fill it, or name another in fields.prompt"
                )
            columns = ", ".join(sorted(self._row(0))) or "none"
            raise ValueError(
                f"{where}: no row has the field {self._config.prompt_field!r}; its first row has {columns}. "
                "Name the right one in fields.prompt"
            )
        reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.most_common())
        if not kept:
            raise ValueError(f"{where}: none of its {count} rows can be used ({reasons or 'it is empty'})")
        if reasons:
            self.left_out = f"{reasons} of its {count} rows, first {first}"
            logger.warning("%s: left out %s", where, self.left_out)


def _unusable(content: Any, field: str) -> str | None:
    """Why a row's prompt, its `field`, cannot be used; None if it can."""
    if content is None:
        return _without(field)
    if isinstance(content, str):
        return "blank" if not content.strip() else _undecodable(content)
    if not isinstance(content, list):
        return "neither text nor messages"
    if not content:
        return "blank"
    for message in content:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return "messages without role and content"
    if content[-1]["role"] == "assistant":
        return "ends with an assistant's message"
    return _undecodable(json.dumps(content, ensure_ascii=False, default=str))


def _without(field: str) -> str:
    return f"without the field {field!r}"


def _undecodable(text: str) -> str | None:
    """JSON may spell half of a surrogate pair, which is no character and which neither tokenizer nor Arrow takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "not valid Unicode"
    return None


def _repeated(row: dict[str, Any], prompt_field: str, answer_field: str, seen: set[bytes]) -> str | None:
    text = json.dumps([row[prompt_field], row.get(answer_field)], default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if digest in seen:
        return "repeated"
    seen.add(digest)
    return None


def _without_nulls(content: str | list[Message]) -> str | list[Message]:
    """Parquet gives every message every key; templates tell a missing key from a null one."""
    if isinstance(content, str):
        return content
    return [{key: value for key, value in message.items() if value is not None} for message in content]


def _answer(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
