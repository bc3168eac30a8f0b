"""Procedural prompts: the tasks of `reasoning-gym` (package on PyPI), each with its own scorer.

Item i is pure in (seed, set, i). A task seeds item i with (seed + i), some through numpy, which takes 32 bits;
so training draws its seeds from the lower half of that range and evaluation from the upper one, and a prompt of
an evaluation is never trained on unless the task is so small that other seeds give the same question.
Tasks that iterate over Python sets repeat only under one PYTHONHASHSEED; the worker sets it.
"""

import base64
import dataclasses
import difflib
import functools
import hashlib
import pickle
import random
import warnings
from collections.abc import Iterable
from typing import Any

PREFIX = "reasoning-gym/"
HALF = 1 << 31
ITEMS = 1 << 30
"""Distinct items of an endless set, and distinct seeds it can start from."""
CHUNK = 4096
"""Items for which one dataset object is made; some tasks prepare all of theirs at once."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One generated item, and what its own scorer needs besides."""

    task: str
    parameters: dict[str, Any]
    item: dict[str, Any]
    """reasoning-gym's entry: question, answer, metadata."""

    @property
    def question(self) -> str:
        return str(self.item["question"])

    @property
    def answer(self) -> str | None:
        answer = self.item.get("answer")
        return None if answer is None else str(answer)

    def encoded(self) -> str:
        """What `rewards.generator` reads; pickled, because items hold tuples and other things that JSON loses."""
        return base64.b64encode(pickle.dumps((self.task, self.parameters, self.item))).decode()


class Generator:
    """Raises ValueError for an unknown task or parameters that the task refuses."""

    def __init__(self, name: str, generator: str, parameters: dict[str, Any], seed: int, held_out: bool) -> None:
        if not generator.startswith(PREFIX):
            raise ValueError(f"data set {name}: generator {generator!r} is unknown; use {PREFIX}<task>")
        if "seed" in parameters:
            raise ValueError(f"data set {name}: parameter `seed` is not a generator's; set data.seed")
        self.task = generator.removeprefix(PREFIX)
        self.parameters = {key: value for key, value in parameters.items() if key != "size"}
        self.size = _size(name, parameters.get("size"))
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        self._base = int.from_bytes(digest) % ITEMS + (HALF if held_out else 0)
        self._chunk = functools.lru_cache(maxsize=2)(self._make_chunk)
        try:
            self.entry(0)
        except (AssertionError, TypeError, ValueError, LookupError) as error:
            raise ValueError(f"data set {name}: {generator} with {self.parameters}: {error}") from None

    def entry(self, number: int) -> Entry:
        number %= self.size or ITEMS
        chunk, offset = divmod(number, CHUNK)
        dataset = self._chunk(chunk)
        with _seeded(self._base + number):
            return Entry(self.task, self.parameters, dataset[offset])

    def _make_chunk(self, chunk: int) -> Any:
        with _seeded(self._base + chunk * CHUNK):
            return create(self.task, {**self.parameters, "seed": self._base + chunk * CHUNK, "size": CHUNK})


def _size(name: str, size: Any) -> int | None:
    if size is None or (type(size) is int and 1 <= size <= ITEMS):
        return size
    raise ValueError(
        f"data set {name}: parameter size is {size!r}; give a whole number from 1 to {ITEMS}, or leave it out"
    )


def create(task: str, parameters: dict[str, Any]) -> Any:
    """A reasoning-gym dataset. Raises LookupError for an unknown task."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    if task not in DATASETS:
        raise LookupError(f"there is no such task; {_nearest(task, DATASETS) or 'reasoning-gym lists them'}")
    _, config = DATASETS[task]
    known = [field.name for field in dataclasses.fields(config)]
    for name in parameters.keys() - known:
        raise LookupError(f"there is no parameter {name}; {_nearest(name, known) or 'known are ' + ', '.join(known)}")
    return create_dataset(task, **parameters)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"did you mean {', '.join(near)}?" if near else None


class _seeded:
    """A few tasks draw from the global generators as well: seed those for a while."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        import numpy

        self.states = random.getstate(), numpy.random.get_state()
        random.seed(self.seed)
        numpy.random.seed(self.seed)

    def __exit__(self, *exception: object) -> None:
        import numpy

        random.setstate(self.states[0])
        numpy.random.set_state(self.states[1])
