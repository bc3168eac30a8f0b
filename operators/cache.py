"""What the watches have told: the children, pods and warnings of all jobs, by the uid of their job. No I/O.

Objects are kept as bytes, a fifth of what they take as Python values, and are read anew for each look. The bytes are
marshal's, which never leave the process: half the time of JSON to read, an eighth to write.
"""

import marshal
from collections.abc import Iterable
from typing import Any, NamedTuple

from operators import drift
from operators.observed import Object
from operators.spec import KIND

UID_LABEL = "miles.dev/job-uid"
JOB_LABEL = "miles.dev/job-name"
POD_SPEC = ("nodeName", "subdomain")
"""All that is kept of a pod's spec; and of its containers, names and resources."""


MOST_WARNINGS = 16
"""That are kept about one object."""
LONGEST_WARNING = 1024  # characters of its message, as the API server's own controllers write


class JobKey(NamedTuple):
    """An RLJob, and an entry of the work queue."""

    namespace: str
    name: str


class Name(NamedTuple):
    """One object of a kind."""

    namespace: str
    name: str


class Entry(NamedTuple):
    uid: str
    owner: str
    """The uid of its job; of a warning, of the object that it is about."""
    version: int
    key: JobKey | None
    data: bytes


class Cache:
    """Thread-unsafe: it lives in the event loop of its watches and of those who look."""

    def __init__(self) -> None:
        self.spot_nodes: frozenset[str] | None = None
        """Names of the nodes that the cloud may take away; None: not known."""
        self.changed: set[JobKey] = set()
        """Jobs of which something has changed; who looks at one takes it out."""
        self._objects: dict[str, dict[Name, Entry]] = {}
        self._by_owner: dict[str, set[tuple[str, Name]]] = {}
        self._keys: dict[str, JobKey] = {}  # uid of a child or pod → its job
        self._heard: dict[str, int] = {}  # kind → newest version that its watch has told

    def put(self, kind: str, found: Object) -> JobKey | None:
        """What a watch or a list told. Returns the job whose object that is, if any; a warning about an object that
        is not here is not kept."""
        name, entry = _named(found), self._entry(kind, found)
        self._heard[kind] = max(self._heard.get(kind, 0), entry.version)
        self._drop(kind, name)
        if kind != "Event" or entry.key is not None:
            self._keep(kind, name, entry)
        if kind == "Event":
            self._forget_warnings(entry.owner)
        return entry.key

    def put_answer(self, kind: str, found: Object) -> None:
        """What the server answered to a write of ours, ahead of the watch. An answer that the watch has overtaken is
        old: an object that is not here may be gone again."""
        name, entry = _named(found), self._entry(kind, found)
        held = self._objects.get(kind, {}).get(name)
        if entry.version > (held.version if held else self._heard.get(kind, 0)):
            self._drop(kind, name)
            self._keep(kind, name, entry)

    def remove(self, kind: str, found: Object) -> JobKey | None:
        entry = self._entry(kind, found)
        self._heard[kind] = max(self._heard.get(kind, 0), entry.version)
        self._drop(kind, _named(found))
        return entry.key

    def keep_only(self, kind: str, namespace: str, names: Iterable[Name]) -> set[JobKey]:
        """After a list: forgets what it did not name. Returns the jobs that lost something."""
        stay = set(names)
        held = self._objects.get(kind, {})
        gone = [name for name in held if name not in stay and namespace in ("", name.namespace)]
        keys = {held[name].key for name in gone}
        for name in gone:
            self._drop(kind, name)
        return {key for key in keys if key is not None}

    def find(self, kind: str, namespace: str, name: str) -> Any | None:
        entry = self._objects.get(kind, {}).get(Name(namespace, name))
        return None if entry is None else marshal.loads(entry.data)

    def of(self, uid: str, kinds: Iterable[str], namespace: str) -> list[Any]:
        """The objects of these kinds that belong to a job, or the warnings about an object, in a stable order; of its
        own namespace alone: who may write in another can give anything there this uid."""
        places = self._by_owner.get(uid)
        if places is None:
            return []
        wanted = set(kinds)
        names = sorted(place for place in places if place[0] in wanted and place[1].namespace == namespace)
        return [marshal.loads(self._objects[kind][name].data) for kind, name in names]

    def count(self) -> int:
        return sum(len(held) for held in self._objects.values())

    def _entry(self, kind: str, found: Object) -> Entry:
        metadata = found["metadata"]
        uid, version = metadata["uid"], int(metadata["resourceVersion"])
        if kind == "Event":
            about = found["involvedObject"].get("uid", "")
            return Entry(uid, about, version, self._keys.get(about), marshal.dumps(_event(found)))
        job, key = _job_of(kind, metadata)
        kept = _bare(found) if kind != KIND and key is None else _trimmed(kind, found)
        return Entry(uid, job, version, key, marshal.dumps(kept))

    def _keep(self, kind: str, name: Name, entry: Entry) -> None:
        self._mark(kind, name, entry)
        self._objects.setdefault(kind, {})[name] = entry
        self._by_owner.setdefault(entry.owner, set()).add((kind, name))
        if kind != "Event" and entry.key is not None:
            self._keys[entry.uid] = entry.key

    def _forget_warnings(self, about: str) -> None:
        """Those of longest ago: who may make events may make any number of them."""
        held = [name for kind, name in self._by_owner.get(about, ()) if kind == "Event"]
        if len(held) > MOST_WARNINGS:
            self._drop("Event", min(held, key=lambda name: self._objects["Event"][name].version))

    def _drop(self, kind: str, name: Name) -> None:
        entry = self._objects.get(kind, {}).pop(name, None)
        if entry is None:
            return
        self._mark(kind, name, entry)
        self._unlink(entry.owner, kind, name)
        if kind != "Event":
            self._keys.pop(entry.uid, None)
            for _, warning in list(self._by_owner.get(entry.uid, ())):
                self._drop("Event", warning)

    def _mark(self, kind: str, name: Name, entry: Entry) -> None:
        """What is left of a job that has gone is nobody's to look at, and would be marked for ever."""
        key = JobKey(*name) if kind == KIND else entry.key
        if key is not None and (kind == KIND or key in self._objects.get(KIND, ())):
            self.changed.add(key)

    def _unlink(self, owner: str, kind: str, name: Name) -> None:
        others = self._by_owner[owner]
        others.discard((kind, name))
        if not others:
            del self._by_owner[owner]


def controller(metadata: Any) -> Any | None:
    """The owner reference of the object's controller, if it has one."""
    return next((owner for owner in metadata.get("ownerReferences", ()) if owner.get("controller")), None)


def _job_of(kind: str, metadata: Any) -> tuple[str, JobKey | None]:
    """(uid, key) of the object's job. A pod's controller is a Job or a ReplicaSet, so its labels tell; a child of ours
    is what we control, whatever its labels say."""
    if kind == "Pod":
        labels = metadata.get("labels", {})
        uid, name = labels.get(UID_LABEL, ""), labels.get(JOB_LABEL)
    else:
        owner = controller(metadata) or {}
        uid, name = (owner["uid"], owner["name"]) if owner.get("kind") == KIND else ("", None)
    return uid, JobKey(metadata["namespace"], name) if name else None


def _named(found: Object) -> Name:
    return Name(found["metadata"]["namespace"], found["metadata"]["name"])


def _bare(found: Object) -> dict[str, Any]:
    """All that is kept of an object with our label that is no job's: whose it is."""
    names = ("name", "namespace", "uid", "resourceVersion", "ownerReferences")
    return {"metadata": {name: found["metadata"][name] for name in names if name in found["metadata"]}}


def _trimmed(kind: str, found: Object) -> dict[str, Any]:
    kept = {key: value for key, value in found.items() if key != "metadata"}
    kept["metadata"] = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    if kind == "Pod":
        spec = found.get("spec", {})
        containers = [
            {key: each[key] for key in ("name", "resources") if key in each} for each in spec.get("containers", ())
        ]
        kept["spec"] = {key: spec[key] for key in POD_SPEC if key in spec} | {"containers": containers}
    if kind == "ConfigMap":
        kept.pop("binaryData", None)
        kept["data"] = {key: drift.kept(value) for key, value in (found.get("data") or {}).items()}
    return kept


def _event(found: Object) -> dict[str, Any]:
    keep = ("type", "reason", "message", "involvedObject", "firstTimestamp", "lastTimestamp", "eventTime", "count")
    kept = {key: found[key] for key in keep if found.get(key) is not None}
    return kept | {"message": str(found.get("message") or "")[:LONGEST_WARNING]}
