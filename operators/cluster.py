"""The operator's client of the API server: the only importer of the kubernetes package. Objects are dicts.

Children are applied server-side under one field manager. A child that was never seen is only ever created, so that a
name which somebody else holds is not taken. Every request has a deadline; none but an event's is repeated here: the
pass fails, and a later pass plans anew.
"""

import asyncio
import base64
import contextlib
import json
import secrets
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import pydantic_core
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException

from operators import drift, manifest
from operators.act import Refused
from operators.cache import Cache, JobKey, controller
from operators.children import token_secret
from operators.clock import ServerClock
from operators.observed import Event, Key, Object
from operators.spec import API_VERSION, KIND
from operators.spot import MARKS
from operators.statusport import StatusPort, bearer

MANAGER = "miles"
AGENT = "miles-operator"
MANAGED = "app.kubernetes.io/managed-by=miles"
KEY_SECRET = "miles-operator-key"
REQUEST = aiohttp.ClientTimeout(total=15, sock_connect=5)
SILENCE_S = 100.0
"""A watch brings a bookmark every minute; one that is silent for longer is dead."""
WATCH = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENCE_S)
WATCH_S = 75
"""The server then ends a watch properly, a sign of life too (events have no bookmarks); it goes on where it was."""
APPLIES = 32
"""Children that are applied at once. More would not be done sooner by a busy server, and each would take a connection
of its own, for whose encryption asyncio keeps 256 KiB."""
APPLY = "application/apply-patch+yaml"
JSON = "application/json"
EVENT_LIMIT_S = 10.0
EVENT_PAUSE_S = 0.25
"""Before an event is asked for again; doubled each time."""
BUSY = (0, 429, 500, 502, 503, 504)
"""Statuses that the same request may not get a moment later."""
REFUSALS = (400, 403, 413, 422)
"""Statuses that the same request gets again: invalid, forbidden (a quota, an admission rule), too large."""
NEVER = "1"
"""A resourceVersion that no object has. Applied with it, an object is created, or the server answers Conflict."""


WARNINGS = ("type=Warning", "reason!=BackOff", "reason!=Unhealthy", "reason!=FailedScheduling")
"""Those that an object's own status does not tell: a refused pod, a volume that cannot be mounted."""


class Kind(NamedTuple):
    version: str
    plural: str
    selector: Mapping[str, str] = {"labelSelector": MANAGED}
    """What of this kind is listed and watched."""
    page: int = 100
    """Objects of a list that are read at once."""

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        root = "/api/v1" if self.version == "v1" else f"/apis/{self.version}"
        parts = [root, *(("namespaces", namespace) if namespace else ()), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


KINDS = {
    KIND: Kind(API_VERSION, "rljobs", {}),
    "ConfigMap": Kind("v1", "configmaps", page=20),  # of up to a MiB each
    "Deployment": Kind("apps/v1", "deployments"),
    "Job": Kind("batch/v1", "jobs"),
    "NetworkPolicy": Kind("networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "Service": Kind("v1", "services"),
    "Pod": Kind("v1", "pods"),
    "Secret": Kind("v1", "secrets"),
    "Event": Kind("v1", "events", {"fieldSelector": ",".join(WARNINGS)}),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
    "Node": Kind("v1", "nodes"),
}
CHILDREN = ("ConfigMap", "Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget", "Service")
"""The kinds of a job's children; the Secret is none of them, as the operator may not read it."""


class ApiError(Exception):
    """The API server refused, or (status 0) did not answer. `reason` is the server's own CamelCase word."""

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(f"{reason}: {message}" if reason else message)
        self.status, self.reason = status, reason


class Conflict(ApiError):
    """The object is no longer what was seen: look again, then decide again."""


class Held(Exception):
    """Somebody else's object has the name of a child."""


class Cluster:
    """One connection, as one user. `counted(verb, status)` is told of every answer."""

    def __init__(
        self,
        configuration: Configuration,
        cache: Cache,
        status: StatusPort,
        counted: Callable[[str, int], None] = lambda verb, status: None,
    ) -> None:
        self.configuration, self.cache, self.status, self.counted = configuration, cache, status, counted
        self.key = b""
        """What the tokens of status ports are derived from."""
        self.may_write: Callable[[], bool] = lambda: True
        """Whether this replica still leads. Asked before each write but that of the Lease: its process may be stopped
        for any time between two requests of a pass."""
        self.clock = ServerClock()
        self._client = ApiClient(configuration)
        self._applies = asyncio.Semaphore(APPLIES)
        self._held: dict[JobKey, set[Key]] = {}
        self._refused: dict[JobKey, dict[Key, str]] = {}
        self._rewritten: dict[tuple[JobKey, Key], tuple[Any, Any]] = {}
        """Child that did not become what was applied → (digest of what was applied, what it became)."""

    async def close(self) -> None:
        await self._client.close()

    async def connection(self) -> dict[str, Any]:
        """How another client reaches the same server as the same user now: tokens change."""
        settings = self.configuration
        scheme, _, token = (await settings.get_api_key_with_prefix("BearerToken") or "").partition(" ")
        return {
            "server": settings.host,
            "ca_path": settings.ssl_ca_cert,
            "insecure": not settings.verify_ssl,
            "certificate_path": settings.cert_file,
            "private_key_path": settings.key_file,
            "scheme": scheme or None,
            "token": token or None,
        }

    # Looking.

    async def get(self, kind: str, namespace: str, name: str) -> Any | None:
        """The object as the server holds it now; None: there is none."""
        try:
            return await self._request("get", "GET", KINDS[kind].path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def holds(self, job: Object) -> bool:
        """Whether the RLJob is still at this version."""
        metadata = job["metadata"]
        live = await self.get(KIND, metadata["namespace"], metadata["name"])
        return live is not None and live["metadata"]["resourceVersion"] == metadata["resourceVersion"]

    async def pages(
        self, kind: str, namespace: str, selector: Mapping[str, str] | None = None, *, bare: bool = False
    ) -> AsyncIterator[tuple[list[Any], str]]:
        """All objects in pages, each with the version of the whole list. `bare`: only their metadata."""
        accept = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1" if bare else JSON
        of = {"apiVersion": KINDS[kind].version, "kind": kind}  # which the items of a list do not say
        query = {"limit": str(KINDS[kind].page), **(KINDS[kind].selector if selector is None else selector)}
        while True:
            page = await self._request("list", "GET", KINDS[kind].path(namespace), query, accept=accept)
            # An empty list of metadata has null for its items.
            yield [of | item for item in page["items"] or ()], page["metadata"]["resourceVersion"]
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return

    async def list_job(self, kind: str, namespace: str, uid: str) -> list[Any]:
        """The objects with the label of this job, from the server itself."""
        selector = {"labelSelector": f"miles.dev/job-uid={uid}"}
        return [each async for page, _ in self.pages(kind, namespace, selector) for each in page]

    async def spot_nodes(self) -> frozenset[str]:
        """Names of the nodes that the cloud may take away."""
        marks = [{"labelSelector": f"{key}={value}"} for key, value in MARKS.items()]
        pages = [page for mark in marks async for page, _ in self.pages("Node", "", mark, bare=True)]
        return frozenset(node["metadata"]["name"] for page in pages for node in page)

    async def watch(self, kind: str, namespace: str, version: str) -> AsyncIterator[tuple[str, Any]]:
        """(type, object) of every change since `version`, bookmarks too, until the server ends it. Raises ApiError,
        also where the connection just breaks."""
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(WATCH_S), **KINDS[kind].selector}
        with _answering():
            response = await self._send("GET", KINDS[kind].path(namespace), query, timeout=WATCH)
            self.counted("watch", response.status)
            try:
                if response.status >= 400:
                    raise _refusal(response.status, await response.read())
                async for line in response.content:
                    told = pydantic_core.from_json(line)  # in half the time of json
                    if told["type"] == "ERROR":
                        raise _error(told["object"])
                    yield told["type"], told["object"]
            finally:
                response.close()

    async def foreign(self, key: JobKey, uid: str) -> frozenset[Key]:
        """The names of children of the job with this uid that somebody else was found to hold, and still does."""
        for held in list(self._held.get(key, ())):
            live = await self.get(held.kind, key.namespace, held.name)
            if live is None or (controller(live["metadata"]) or {}).get("uid") == uid:
                self._held[key].discard(held)
        return frozenset(self._held.get(key, ()))

    def refused(self, key: JobKey) -> Mapping[Key, str]:
        """Children of the job that the server refused when they were last applied, and its answer."""
        return dict(self._refused.get(key, {}))

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._held.pop(key, None)
        self._refused.pop(key, None)
        for child in [child for child in self._rewritten if child[0] == key]:
            del self._rewritten[child]

    # Acting: what `operators.act` asks for.

    async def apply(self, desired: Mapping[str, Any]) -> None:
        """Server-side apply, by force; not again where an admission rule made something else of the same, and it still
        is that. Raises Held where the name is somebody else's, Conflict where the object is not the one that was seen,
        Refused."""
        kind, metadata = desired["kind"], desired["metadata"]
        seen = self.cache.find(kind, metadata["namespace"], metadata["name"])
        child = _job(desired), _key(desired)
        if seen is not None and self._rewritten.get(child) == _made(desired, seen):
            return
        with self._refusing(desired):
            live = await self._create(desired) if seen is None else await self._take(desired, seen)
        self.cache.put_answer(kind, live)
        if drift.differs(live, desired):
            self._rewritten[child] = _made(desired, self.cache.find(kind, metadata["namespace"], metadata["name"]))
        else:
            self._rewritten.pop(child, None)

    async def delete(self, kind: str, name: str, namespace: str, uid: str) -> None:
        """Delete in the background the very object with that uid; one that is gone, or another's, is no error."""
        await self._delete(kind, namespace, name, {"uid": uid})

    async def delete_job(self, job: Object) -> None:
        """Delete the RLJob itself if it still is what was observed."""
        metadata = job["metadata"]
        seen = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        await self._delete(KIND, metadata["namespace"], metadata["name"], seen)

    async def write_status(self, job: Object, status: Mapping[str, Any]) -> None:
        """Raises Conflict where the RLJob is no longer at the version observed."""
        metadata = job["metadata"]
        path = KINDS[KIND].path(metadata["namespace"], metadata["name"], "status")
        body = {**job, "apiVersion": API_VERSION, "kind": KIND, "status": status}
        self.cache.put_answer(KIND, await self._request("update", "PUT", path, {"fieldManager": MANAGER}, body))

    async def post_event(self, job: Object, event: Event) -> None:
        """One that is lost is no error: refused, or not taken within EVENT_LIMIT_S. No pass comes back to it."""
        metadata, now = job["metadata"], self.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(8)}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:1024],
            "source": {"component": AGENT},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(EVENT_LIMIT_S):
                await self._insist(KINDS["Event"].path(metadata["namespace"]), body)

    async def _insist(self, path: str, body: Mapping[str, Any]) -> None:
        """Creates an object of a name of its own, so that it is not there twice. Raises ApiError for a refusal."""
        pause_s = EVENT_PAUSE_S
        while True:
            try:
                await self._request("create", "POST", path, body=body)
                return
            except ApiError as error:
                if error.status not in BUSY:
                    raise
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def ensure_token(self, job: Object) -> None:
        """The Secret that lets the trainer know our requests. It is never read: one that is there already is right,
        as the token follows from the job's uid."""
        checked, _ = manifest.check(job)
        assert checked is not None, "a trainer was planned for a job that is not valid"
        secret = token_secret(checked, bearer(self.key, job["metadata"]["uid"]))
        with contextlib.suppress(Conflict), self._refusing(secret):
            await self._request("create", "POST", KINDS["Secret"].path(job["metadata"]["namespace"]), body=secret)

    async def pause(self, job: Object, pods: Sequence[Object]) -> None:
        await self.status.pause(pods, bearer(self.key, job["metadata"]["uid"]))

    # The operator's own namespace.

    async def load_key(self, namespace: str) -> None:
        """The key that all replicas share; made where there is none."""
        body = {
            "metadata": {"name": KEY_SECRET, "namespace": namespace},
            "data": {"key": base64.b64encode(secrets.token_bytes(32)).decode()},
        }
        found = await self.get("Secret", namespace, KEY_SECRET)
        if found is None:
            with contextlib.suppress(Conflict):
                await self._request("create", "POST", KINDS["Secret"].path(namespace), body=body)
            found = await self.get("Secret", namespace, KEY_SECRET)
        self.key = base64.b64decode((found or body)["data"]["key"])

    async def write_lease(self, lease: Mapping[str, Any]) -> Any:
        """Create the Lease, or replace it if it still has the version in `lease`. Raises Conflict."""
        metadata = lease["metadata"]
        if "resourceVersion" in metadata:
            path = KINDS["Lease"].path(metadata["namespace"], metadata["name"])
            return await self._request("update", "PUT", path, body=lease, as_leader=False)
        path = KINDS["Lease"].path(metadata["namespace"])
        return await self._request("create", "POST", path, body=lease, as_leader=False)

    # Requests.

    @contextlib.contextmanager
    def _refusing(self, desired: Mapping[str, Any]) -> Iterator[None]:
        """Keeps in mind whether the server refuses this child. Raises Refused."""
        job, child = _job(desired), _key(desired)
        try:
            yield
        except ApiError as error:
            if error.status not in REFUSALS:
                raise
            self._refused.setdefault(job, {})[child] = str(error)
            raise Refused(f"{child.kind} {child.name}: {error}") from None
        self._refused.get(job, {}).pop(child, None)

    async def _create(self, desired: Mapping[str, Any]) -> Any:
        try:
            return await self._apply(desired, {"resourceVersion": NEVER})
        except Conflict:
            metadata = desired["metadata"]
            found = await self.get(desired["kind"], metadata["namespace"], metadata["name"])
            if found is None:
                raise
            return await self._take(desired, found)

    async def _take(self, desired: Mapping[str, Any], found: Object) -> Any:
        """Apply onto what is there, if that is ours."""
        metadata = desired["metadata"]
        ours, theirs = controller(metadata), controller(found["metadata"])
        assert ours is not None, "a child without an owner was planned"
        if theirs is None or theirs["uid"] != ours["uid"]:
            held = _key(desired)
            self._held.setdefault(JobKey(metadata["namespace"], ours["name"]), set()).add(held)
            raise Held(f"{held.kind} {held.name} exists and is not this job's")
        return await self._apply(desired, {"uid": found["metadata"]["uid"]})

    async def _apply(self, desired: Mapping[str, Any], only_if: Mapping[str, str]) -> Any:
        metadata = desired["metadata"]
        path = KINDS[desired["kind"]].path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": MANAGER, "force": "true"}
        body = {**desired, "metadata": {**metadata, **only_if}}
        async with self._applies:
            return await self._request("apply", "PATCH", path, query, body, APPLY)

    async def _delete(self, kind: str, namespace: str, name: str, only_if: Mapping[str, str]) -> None:
        body = {"propagationPolicy": "Background", "preconditions": only_if}
        try:
            await self._request("delete", "DELETE", KINDS[kind].path(namespace, name), body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def _request(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = JSON,
        accept: str = JSON,
        as_leader: bool = True,
    ) -> Any:
        if as_leader and method != "GET" and not self.may_write():
            raise ApiError(0, "", f"{method} {path} is not sent: this replica leads no longer")
        with _answering():
            response = await self._send(method, path, query or {}, body, content, accept)
            data = await response.read()
        self.counted(verb, response.status)
        if response.status >= 400:
            raise _refusal(response.status, data)
        return pydantic_core.from_json(data)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Any = None,
        content: str = JSON,
        accept: str = JSON,
        timeout: aiohttp.ClientTimeout = REQUEST,
    ) -> aiohttp.ClientResponse:
        headers = {"Content-Type": content, "Accept": accept, "User-Agent": AGENT}
        settings: Any = await self.configuration.auth_settings()
        for setting in settings.values():
            headers[setting["key"]] = setting["value"]
        url = f"{self.configuration.host}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        answer = await self._client.call_api(method, url, headers, body, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        self.clock.hear(response.headers.get("Date"))
        return response


def _made(desired: Mapping[str, Any], live: Object | None) -> tuple[Any, Any]:
    """(the digest of `desired`, what `live` says in its fields)."""
    return desired["metadata"].get("annotations", {}).get(drift.APPLIED), drift.held(desired, live)


def _job(desired: Mapping[str, Any]) -> JobKey:
    owner = controller(desired["metadata"])
    assert owner is not None, "a child without an owner was planned"
    return JobKey(desired["metadata"]["namespace"], owner["name"])


def _key(desired: Mapping[str, Any]) -> Key:
    return Key(desired["kind"], desired["metadata"]["name"])


async def load_configuration() -> Configuration:
    """How to reach the server: as a pod's ServiceAccount, else by the kubeconfig. Raises ValueError."""
    configuration = Configuration()
    configuration.connection_pool_maxsize = 0  # watches keep theirs; the number of workers is the bound
    try:
        config.load_incluster_config(configuration)
    except ConfigException:
        try:
            await config.load_kube_config(client_configuration=configuration)
        except (ConfigException, OSError) as error:
            raise ValueError(f"no API server is known: run in a pod, or set KUBECONFIG ({error})") from None
    # Else aiohttp looks for a proxy and a netrc at every request, in threads.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.proxy = configuration.proxy or _proxy(configuration.host)
    return configuration


def _proxy(host: str) -> str | None:
    """The one that the environment names for the API server."""
    address = urllib.parse.urlsplit(host)
    return None if urllib.request.proxy_bypass(address.netloc) else urllib.request.getproxies().get(address.scheme)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """No answer in time, or a broken connection, as an ApiError."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ApiError(0, "", f"the API server did not answer: {error or type(error).__name__}") from None


def _refusal(status: int, data: bytes) -> ApiError:
    try:
        return _error(json.loads(data))
    except (ValueError, TypeError, AttributeError):
        return ApiError(status, "", f"HTTP {status}: {data[:200]!r}")


def _error(told: Mapping[str, Any]) -> ApiError:
    status = int(told.get("code") or 500)
    make = Conflict if status == 409 else ApiError
    return make(status, str(told.get("reason", "")), str(told.get("message", ""))[:1000])
