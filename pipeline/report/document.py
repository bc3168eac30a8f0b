"""From a run to the page: one JSON object, put into page.html beside its style and script.

The run's text (names, prompts, responses) is hostile until shown otherwise: here every `<` of it is escaped, page.js
sets it as text and never as HTML, and the Content-Security-Policy lets no other script run and nothing be fetched.
"""

import base64
import datetime
import hashlib
import html
import importlib.resources
import json
import math
import string
from typing import Any

from pipeline.report import configuration, curves, evaluations, history, rollouts, source, summary


async def build(run: str) -> str:
    """The page about `run`, a folder or a URI. Raises ValueError for what is no run, StorageError."""
    storage, config, uri = await source.open_run(run)
    past = await history.read(storage)
    shown, omissions = await rollouts.browse(storage, config, past)
    data = {
        **summary.of(config, past, await source.delivery(config, past.omissions)),
        "uri": configuration.redacted(uri),
        "generated": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "steps": list(past.metrics),
        "evaluations": evaluations.changes(past),
        "charts": curves.sections(config, past),
        "others": curves.others(past),
        "rollouts": shown,
        "omissions": [*evaluations.failures(past), *past.omissions, *omissions],
    }
    return page(config.name, data)


def page(title: str, data: dict[str, Any]) -> str:
    style, script = _asset("page.css"), _asset("page.js")
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    parts = {
        "policy": policy,
        "title": html.escape(clean(title)),
        "style": style,
        "script": script,
        "data": embed(data),
    }
    return string.Template(_asset("page.html")).substitute(parts)


def embed(data: Any) -> str:
    """JSON for a <script> element: nothing in it can end the element, open another or break a line of script."""
    text = json.dumps(clean(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def clean(value: Any) -> Any:
    """`value` as JSON and UTF-8 can hold it: null for NaN and infinities, U+FFFD for lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def _asset(name: str) -> str:
    return importlib.resources.files("pipeline.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
