"""The model's own tokenizer and chat template, without transformers (which would bring torch into the worker).

Text that a user wrote stays text: a special token spelled inside a message is cut out before the template is
rendered and encoded as plain characters; everything else is encoded exactly as transformers'
`apply_chat_template` does. Token ids go on from here unchanged: nothing is ever decoded and encoded again.
"""

import datetime
import functools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

ROLES_OF_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PRIVATE_USE = range(0xE000, 0xF900)
STAND_IN = "reply"
"""Renders in place of what the policy said, whose ids are known and never made anew."""

Message = dict[str, Any]


class Tokenizer:
    """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json.

    Raises ValueError for a folder without tokenizer.json, with a file that cannot be read as what it is named, or with
    a template that is no valid Jinja.
    """

    eos_ids: frozenset[int]
    """Every id that ends a completion, whichever of the model's files names it."""
    vocabulary_size: int
    """Ids the model can sample are below it; models often have more rows than their tokenizer has tokens."""

    def __init__(self, folder: str, today: datetime.datetime | None = None) -> None:
        """`today` is the date that templates may print; fixed at start, so that prompts do not change overnight."""
        path = pathlib.Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise ValueError(
                f"model {folder}: no tokenizer.json; save the tokenizer with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes one"
            )
        settings = _read(path / "tokenizer_config.json")
        named = {role: _content(path, role, settings[role]) for role in ROLES_OF_TOKENS if settings.get(role)}
        self._tokenizer = _load(path / "tokenizer.json")
        known = [text for text in named.values() if self._tokenizer.token_to_id(text) is not None]
        self._tokenizer.add_special_tokens(known)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        self._plain.encode_special_tokens = True
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if special else None
        self._named = named
        self._template = _template(path, settings, today or datetime.datetime.now())
        config = _read(path / "config.json")
        self.eos_ids = _eos_ids(path, config, self._tokenizer.token_to_id(named.get("eos_token", "")))
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.vocabulary_size = int(config.get("vocab_size") or _text(config).get("vocab_size") or highest + 1)

    def encode(self, prompt: str | Sequence[Message], system: str | None = None) -> list[int]:
        """Token ids [P] of a prompt, ready to be completed.

        A string is one user message, or, where the model has no chat template, the text itself. `system` is put
        before messages that do not begin with one of their own. Raises ValueError for messages that the
        template refuses, or for messages without a template.
        """
        if isinstance(prompt, str) and self._template is None:
            return self._encode_text(f"{system}\n\n{prompt}" if system else prompt)
        if self._template is None:
            raise ValueError("the model has no chat template: give prompts as text, or name a tokenizer that has one")
        messages = _with_system(as_messages(prompt), system)
        mark = _unused_character(json.dumps(messages, ensure_ascii=False))
        cut: list[str] = []
        text = self._render([self._mask(message, mark, cut) for message in messages])
        return self._encode_masked(text, mark, cut)

    def encode_reply(
        self, messages: Sequence[Message], reply: Sequence[Message], last: int, system: str | None = None
    ) -> list[int]:
        """What follows the ids of a conversation that ended with the policy's turn, once `reply` answers it.

        `messages`: the conversation so far, the policy's turn at its end. `last`: the last id that was sampled; where
        it ends a turn it is not repeated. The result closes that turn, holds `reply`, and opens the policy's next turn.
        It is the difference of two renderings, so it does not depend on what a template looks like, nor on the words of
        the policy. Raises ValueError for a template that renders the one as no beginning of the other.
        """
        everything = _with_system([*messages, *reply], system)
        everything = [_stand_in(message) for message in everything]
        mark = _unused_character(json.dumps(everything, ensure_ascii=False))
        cut: list[str] = []
        masked = [self._mask(message, mark, cut) for message in everything]
        before, after = self._render(masked[: -len(reply) - 1]) + STAND_IN, self._render(masked)
        kept = self._encode_masked(STAND_IN, mark, [])
        ids = self._encode_masked(STAND_IN + after[len(before) :], mark, cut)
        if not after.startswith(before) or ids[: len(kept)] != kept:
            raise ValueError("the chat template renders earlier turns in another way once a message follows them")
        repeated = ids[len(kept) : len(kept) + 1] == [last] and last in self.eos_ids
        return ids[len(kept) + repeated :]

    def check_turns(self, system: str | None = None) -> None:
        """Raises ValueError where the chat template does not let token ids of earlier turns be kept."""
        if self._template is None:
            raise ValueError("environment: the model has no chat template; name a tokenizer that has one")
        messages = as_messages("question")
        for _ in range(2):
            messages = [*messages, {"role": "assistant", "content": "answer"}]
            reply = as_messages("observation")
            try:
                self.encode_reply(messages, reply, -1, system)
            except ValueError as error:
                raise ValueError(
                    f"environment: {error}, so their token ids could not be kept; name a tokenizer whose template "
                    "adds each message at the end"
                ) from None
            messages = [*messages, *reply]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; for people and rewards only."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _render(self, messages: Sequence[Message]) -> str:
        assert self._template
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._named
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None

    def _encode_text(self, text: str) -> list[int]:
        """A prompt without a template: BOS where the tokenizer puts it, once; the text itself has no special token."""
        return list(self._plain.encode(text, add_special_tokens=True).ids)

    def _mask(self, value: Any, mark: str, cut: list[str]) -> Any:
        """`value` with each spelled special token replaced by its number in `cut` between two marks."""
        if isinstance(value, str) and self._special:

            def remember(match: re.Match[str]) -> str:
                cut.append(match[0])
                return f"{mark}{len(cut) - 1}{mark}"

            return self._special.sub(remember, value)
        if isinstance(value, dict):
            return {key: self._mask(item, mark, cut) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mask(item, mark, cut) for item in value]
        return value

    def _encode_masked(self, text: str, mark: str, cut: list[str]) -> list[int]:
        """Ids of a rendered template; the template itself prints BOS, so none is added."""
        ids: list[int] = []
        for position, part in enumerate(re.split(f"{mark}(\\d+){mark}", text)):
            tokenizer, piece = (self._plain, cut[int(part)]) if position % 2 else (self._tokenizer, part)
            ids += tokenizer.encode(piece, add_special_tokens=False).ids
        return ids


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """A string is one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _with_system(messages: list[Message], system: str | None) -> list[Message]:
    if system and (not messages or messages[0].get("role") != "system"):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _stand_in(message: Message) -> Message:
    return {**message, "content": STAND_IN} if message["role"] == "assistant" else message


def _load(file: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"model {file} is not a tokenizer: {error}; fetch or save it again") from None


def _read(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"model {path} is not JSON: {error}; fetch or save it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"model {path} is not a JSON object; fetch or save it again")
    return content


def _content(path: pathlib.Path, role: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"model {path}/tokenizer_config.json: {role} is {token!r}, not a token; save it again")
    return text


def _eos_ids(path: pathlib.Path, config: dict[str, Any], own: int | None) -> frozenset[int]:
    ids = set() if own is None else {own}
    for source in (_read(path / "generation_config.json"), config, _text(config)):
        value = source.get("eos_token_id")
        ids |= set(value) if isinstance(value, list) else set() if value is None else {value}
    return frozenset(ids)


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The language part of a multimodal model's configuration."""
    return config.get("text_config") or {}


def _unused_character(text: str) -> str:
    """A private-use character that `text` does not contain; it fences what has been cut out."""
    used = set(text)
    return next(chr(code) for code in PRIVATE_USE if chr(code) not in used)


def _template(path: pathlib.Path, settings: dict[str, Any], today: datetime.datetime) -> jinja2.Template | None:
    """The chat template of a model folder, compiled in a sandbox; None if the folder has none."""
    file = path / "chat_template.jinja"
    source: Any = file.read_text() if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not source:
        return None
    try:
        return _environment(today).from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"model {path}: its chat template is not valid Jinja: {error}") from None


def _environment(today: datetime.datetime) -> jinja2.Environment:
    """What transformers offers to templates: the same whitespace rules, extensions, filters and functions."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    environment.filters["tojson"] = functools.partial(_to_json)
    environment.globals["raise_exception"] = _raise_exception
    strftime: Callable[[str], str] = today.strftime
    environment.globals["strftime_now"] = strftime
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training masks; here it prints them."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
