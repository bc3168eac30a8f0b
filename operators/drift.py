"""Whether a live object already says what we want of it. Pure.

Each object that we apply carries a digest of what was wanted. It is applied again if that has changed, or if one of
our own fields was changed by others; what they or the API server added is left alone.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from operators.observed import Object
from operators.spec.fields import amount

APPLIED = "miles.dev/applied"
LONGEST_KEPT = 128  # characters
QUANTITIES = {"requests", "limits", "sizeLimit"}
"""Keys below which values are quantities, which the API server rewrites: 1000m becomes 1."""
NAMES = ("uid", "mountPath", "name")
"""What tells the items of a list apart, the first of them that all have; other lists go by position."""


def kept(text: str) -> str:
    """What the cache keeps of a text that may be long: its digest tells whether it is still what was wanted."""
    return text if len(text) <= LONGEST_KEPT else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def marked(desired: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its own digest as an annotation."""
    digest = hashlib.sha256(json.dumps(desired, sort_keys=True).encode()).hexdigest()[:16]
    metadata = desired["metadata"]
    annotations = metadata.get("annotations", {}) | {APPLIED: digest}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def differs(live: Object, desired: Mapping[str, Any]) -> bool:
    """Whether `desired`, which is marked, has to be applied again."""
    return not _holds(desired, live, quantity=False)


def held(desired: Any, live: Any) -> Any:
    """What `live` says in the fields that `desired` has."""
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return {key: held(value, live[key]) for key, value in desired.items() if key in live}
    return live


def _holds(wanted: Any, live: Any, quantity: bool) -> bool:
    if wanted == live:
        return True
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            _holds(value, live[key], quantity or key in QUANTITIES) if key in live else _empty(value)
            for key, value in wanted.items()
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return isinstance(live, Sequence) and not isinstance(live, str) and _list_holds(wanted, live, quantity)
    if isinstance(wanted, str) and live == kept(wanted):
        return True
    return quantity and amount(wanted) is not None and amount(wanted) == amount(live)


def _list_holds(wanted: Sequence[Any], live: Sequence[Any], quantity: bool) -> bool:
    name = _name(wanted)
    if name is None:
        return len(wanted) == len(live) and all(
            _holds(each, other, quantity) for each, other in zip(wanted, live, strict=True)
        )
    found = {item.get(name): item for item in live if isinstance(item, Mapping)}
    return all(item[name] in found and _holds(item, found[item[name]], quantity) for item in wanted)


def _name(items: Sequence[Any]) -> str | None:
    """The key by which every item is known."""
    if not all(isinstance(item, Mapping) for item in items):
        return None
    for name in NAMES:
        if items and all(name in item for item in items) and len({item[name] for item in items}) == len(items):
            return name
    return None


def _empty(value: Any) -> bool:
    """The API server drops fields of this value, unless it keeps them, so both mean the same."""
    return value is None or value is False or value in ("", 0) or value == {} or value == []
