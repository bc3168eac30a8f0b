"""What was made of a job stays as it is while an attempt runs and nobody edits the job, although another release of the
operator, or another default image, would make something else of it: an upgrade restarts nothing. Pure.

A Deployment and the ConfigMap carry two digests: of what the job asked of their pods, and of what was made of that. The
same question with another answer is another operator, whose answer waits for the next attempt of the trainer, so that
trainer and workers change together, or for an edit of the job. Until then what pods are made from is not repaired, and
where such a child is gone it is made anew. A trainer's Job never changes.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from operators import drift
from operators.observed import Object

ASKED = "miles.dev/asked"
MADE = "miles.dev/made"


def signed(child: Mapping[str, Any], asked: str, attempt: int) -> dict[str, Any]:
    """With its digests, if it has a say in what pods are. `asked`: operators.edits.asked of the job."""
    if child["kind"] not in ("ConfigMap", "Deployment"):
        return dict(child)
    content = json.dumps(_content(child), sort_keys=True)
    said = {ASKED: f"{attempt}-{asked}", MADE: hashlib.sha256(content.encode()).hexdigest()[:16]}
    metadata = child["metadata"]
    return {**child, "metadata": {**metadata, "annotations": metadata.get("annotations", {}) | said}}


def settled(child: Mapping[str, Any], live: Object) -> dict[str, Any] | None:
    """The child as it is to be: `child` itself, or with the pods of the live one; None: as it is."""
    ours, theirs = (each["metadata"].get("annotations", {}) for each in (child, live))
    if ASKED not in ours or theirs.get(ASKED) != ours[ASKED] or theirs.get(MADE) in (None, ours[MADE]):
        return dict(child)
    if child["kind"] == "ConfigMap":
        return None
    kept = {name: theirs[name] for name in (MADE, drift.APPLIED) if name in theirs}
    metadata = {**child["metadata"], "annotations": ours | kept}
    return {**child, "metadata": metadata, "spec": {**child["spec"], "template": live["spec"]["template"]}}


def _content(child: Mapping[str, Any]) -> Any:
    return child["data"] if child["kind"] == "ConfigMap" else child["spec"]["template"]
