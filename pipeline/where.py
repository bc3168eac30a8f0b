"""Conditions on samples, as SQL writes them behind WHERE: `reward > 0.5 and set = 'sums' and len(completion_ids) < 99`.

Text becomes a tree and nothing more: no function but len, no query, no file, no code. pipeline.selection applies it.

    condition  = every ("or" every)*
    every      = one ("and" one)*
    one        = "not" one | "(" condition ")" | test
    test       = value ("=" | "!=" | "<>" | "<" | "<=" | ">" | ">=") value
               | value ["not"] "in" "(" literal ("," literal)* ")"
               | value ["not"] "between" value "and" value
               | value ["not"] "like" text
               | value "is" ["not"] "null"
    value      = number | text | column | "len" "(" list column ")" | "rewards" "[" text "]"
"""

import dataclasses
import re
from typing import Literal

LONGEST = 2048
"""Characters of a condition."""
DEEPEST = 32
"""Levels of brackets and `not`."""

Kind = Literal["number", "text"]
COLUMNS: dict[str, Kind] = {
    "index": "number",
    "sample": "number",
    "set": "text",
    "prompt": "text",
    "answer": "text",
    "completion": "text",
    "finish_reason": "text",
    "reward": "number",
    "invalid": "text",
    "version_term": "number",
    "version_step": "number",
    "created": "number",
}
"""Columns of pipeline.experience.SCHEMA that hold one value a sample."""
LISTS = ("prompt_ids", "completion_ids", "turns")
"""Columns that hold a list a sample; only its length can be asked for."""
OPERATORS = ("=", "!=", "<>", "<=", ">=", "<", ">")


@dataclasses.dataclass(frozen=True)
class Column:
    name: str


@dataclasses.dataclass(frozen=True)
class Length:
    """Items in a list column; null where there is no list."""

    column: str


@dataclasses.dataclass(frozen=True)
class Reward:
    """One of the unweighted rewards by its name; null where the sample has no such reward."""

    name: str


@dataclasses.dataclass(frozen=True)
class Constant:
    value: int | float | str


Value = Column | Length | Reward | Constant


@dataclasses.dataclass(frozen=True)
class Comparison:
    operator: str
    left: Value
    right: Value


@dataclasses.dataclass(frozen=True)
class OneOf:
    value: Value
    choices: tuple[int | float | str, ...]


@dataclasses.dataclass(frozen=True)
class Like:
    value: Value
    pattern: str


@dataclasses.dataclass(frozen=True)
class IsNull:
    value: Value


@dataclasses.dataclass(frozen=True)
class Not:
    condition: "Condition"


@dataclasses.dataclass(frozen=True)
class And:
    left: "Condition"
    right: "Condition"


@dataclasses.dataclass(frozen=True)
class Or:
    left: "Condition"
    right: "Condition"


Condition = Comparison | OneOf | Like | IsNull | Not | And | Or

HINTS = {
    "null": "; a missing value is asked for by `is null`",
    "step": "; version_step is the step of the policy that sampled",
    "length": "; the length of a list is len(completion_ids)",
}
"""By a name that is no column: what may be meant."""

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)"""
    r"""|(?P<text>'(?:[^']|'')*')|(?P<quoted>"[^"]*")|(?P<word>[A-Za-z_]\w*)|(?P<sign><=|>=|<>|!=|[=<>(),\[\]]))""",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class Token:
    kind: str
    text: str
    place: int  # 1 is the first character


def parse(text: str) -> Condition:
    """Raises ValueError, one line that names the place and what is wrong there."""
    if len(text) > LONGEST:
        raise ValueError(f"the condition has {len(text)} characters, at most {LONGEST} are read")
    return _Parser(_tokens(text)).parse()


def rewards(condition: Condition | Value) -> set[str]:
    """Names of the rewards that it asks for."""
    if isinstance(condition, Reward):
        return {condition.name}
    parts = [getattr(condition, field.name) for field in dataclasses.fields(condition)]
    return {name for part in parts if isinstance(part, Condition | Value) for name in rewards(part)}


def _tokens(text: str) -> list[Token]:
    tokens, place = [], 0
    stripped = text.rstrip()
    while place < len(stripped):
        found = _TOKEN.match(stripped, place)
        if found is None or found.lastgroup is None:
            at = place + len(stripped[place:]) - len(stripped[place:].lstrip())
            raise ValueError(f"character {at + 1}: {stripped[at]!r} begins nothing that a condition is made of")
        kind = found.lastgroup
        tokens.append(Token(kind, found[kind], found.start(kind) + 1))
        place = found.end()
    return [*tokens, Token("end", "", len(stripped) + 1)]


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.position, self.depth = tokens, 0, 0

    def parse(self) -> Condition:
        found = self._condition()
        if self._next.kind != "end":
            raise self._wrong("`and`, `or` or the end")
        return found

    @property
    def _next(self) -> Token:
        return self.tokens[self.position]

    def _wrong(self, wanted: str) -> ValueError:
        token = self._next
        doubled = self.position and token.text == "=" == self.tokens[self.position - 1].text
        hint = "; equal is a single =" if doubled else ""
        return ValueError(f"character {token.place}: expected {wanted}, got {token.text or 'the end'}{hint}")

    def _take(self, *texts: str) -> str | None:
        """The next token, taken, if it is one of these words or signs; in lower case."""
        token = self._next
        if token.kind in ("word", "sign") and token.text.lower() in texts:
            self.position += 1
            return token.text.lower()
        return None

    def _need(self, text: str) -> None:
        if self._take(text) is None:
            raise self._wrong(f"`{text}`")

    def _condition(self) -> Condition:
        found = self._every()
        while self._take("or"):
            found = Or(found, self._every())
        return found

    def _every(self) -> Condition:
        found = self._one()
        while self._take("and"):
            found = And(found, self._one())
        return found

    def _one(self) -> Condition:
        opened = self._take("not", "(")
        if opened is None:
            return self._test()
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"character {self._next.place}: more than {DEEPEST} brackets and `not` within each other")
        if opened == "not":
            found: Condition = Not(self._one())
        else:
            found = self._condition()
            self._need(")")
        self.depth -= 1
        return found

    def _test(self) -> Condition:
        left = self._value()
        if operator := self._take(*OPERATORS):
            return self._compared(left, operator)
        if self._take("is"):
            negated = self._take("not")
            self._need("null")
            return Not(IsNull(left)) if negated else IsNull(left)
        negated, test = self._take("not"), self._take("in", "between", "like")
        if test == "in":
            found: Condition = OneOf(left, self._choices(left))
        elif test == "between":
            low = self._compared(left, ">=")
            self._need("and")
            found = And(low, self._compared(left, "<="))
        elif test == "like":
            found = Like(left, self._pattern(left))
        else:
            raise self._wrong("a comparison")
        return Not(found) if negated else found

    def _compared(self, left: Value, operator: str) -> Comparison:
        place, right = self._next.place, self._value()
        _same_kind(left, right, place)
        return Comparison("!=" if operator == "<>" else operator, left, right)

    def _choices(self, left: Value) -> tuple[int | float | str, ...]:
        self._need("(")
        found = []
        while True:
            token, value = self._next, self._value()
            if not isinstance(value, Constant):
                raise ValueError(f"character {token.place}: expected a number or 'text', got {token.text}")
            _same_kind(left, value, token.place)
            found.append(value.value)
            if not self._take(","):
                self._need(")")
                return tuple(found)

    def _pattern(self, left: Value) -> str:
        place, pattern = self._next.place, self._value()
        if not (isinstance(pattern, Constant) and isinstance(pattern.value, str)):
            raise ValueError(f"character {place}: expected 'text', in which % is any text and _ any character")
        _same_kind(left, pattern, place)
        return pattern.value

    def _value(self) -> Value:
        token = self._next
        if token.kind == "number":
            self.position += 1
            return Constant(_number(token))
        if token.kind == "text":
            self.position += 1
            return Constant(token.text[1:-1].replace("''", "'"))
        if token.kind not in ("word", "quoted"):
            raise self._wrong("a column, a number or 'text'")
        self.position += 1
        name = token.text.strip('"')
        if token.kind == "word" and name.lower() == "len" and self._take("("):
            return self._length()
        if name == "rewards":
            return self._reward()
        if name not in COLUMNS:
            asked = f"; of a list ask for its length: len({name})" if name in LISTS else HINTS.get(name.lower(), "")
            known = f"; there are {', '.join(COLUMNS)}; a text is written '{name}'"
            raise ValueError(f"character {token.place}: there is no column {name}{asked or known}")
        return Column(name)

    def _length(self) -> Length:
        token = self._next
        name = token.text.strip('"')
        if name not in LISTS:
            raise self._wrong(f"one of {', '.join(LISTS)}")
        self.position += 1
        self._need(")")
        return Length(name)

    def _reward(self) -> Reward:
        self._need("[")
        if self._next.kind != "text":
            raise self._wrong("a reward's name, as in rewards['correct']")
        name = self._next.text[1:-1].replace("''", "'")
        self.position += 1
        self._need("]")
        return Reward(name)


def _number(token: Token) -> int | float:
    if re.fullmatch(r"-?\d+", token.text) and abs(int(token.text)) <= 2**53:  # a column of floats has no others
        return int(token.text)
    return float(token.text)


def _kind(value: Value) -> Kind:
    if isinstance(value, Column):
        return COLUMNS[value.name]
    return "text" if isinstance(value, Constant) and isinstance(value.value, str) else "number"


def _same_kind(left: Value, right: Value, place: int) -> None:
    if _kind(left) != _kind(right):
        raise ValueError(f"character {place}: a {_kind(left)} cannot be compared with a {_kind(right)}")
