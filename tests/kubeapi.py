"""A small client of a Kubernetes API server for tests: objects are dicts, errors carry the server's status.

It is not the operator's client on purpose: a test that looks through the code it tests sees that code's mistakes twice.
"""

import json
import pathlib
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import kubernetes.client
import kubernetes.config
import urllib3

Dict = dict[str, Any]
T = TypeVar("T")

# Where a kind that is asked for by its name alone is found; every other kind is in the core group.
API_VERSIONS = {
    "ClusterRole": "rbac.authorization.k8s.io/v1",
    "ClusterRoleBinding": "rbac.authorization.k8s.io/v1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
    "Deployment": "apps/v1",
    "EndpointSlice": "discovery.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "Job": "batch/v1",
    "Lease": "coordination.k8s.io/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "PriorityClass": "scheduling.k8s.io/v1",
    "ReplicaSet": "apps/v1",
    "RLJob": "miles.dev/v1alpha1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "ValidatingAdmissionPolicy": "admissionregistration.k8s.io/v1",
    "ValidatingAdmissionPolicyBinding": "admissionregistration.k8s.io/v1",
}
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class ApiError(Exception):
    """The server refused: `code` is the HTTP status, `reason` and `message` are the server's own words."""

    def __init__(self, code: int, status: Dict):
        self.code, self.reason, self.message = code, status.get("reason", ""), status.get("message", "")
        super().__init__(f"{code} {self.reason}: {self.message}")


class Api:
    """What the user of one kubeconfig sees of the server. Safe to use from several threads."""

    def __init__(self, kubeconfig: pathlib.Path):
        self.kubeconfig = kubeconfig
        settings = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(str(kubeconfig), client_configuration=settings)
        self.host = settings.host
        login: Any = settings.auth_settings()
        self.headers = {each["key"]: each["value"] for each in login.values()}
        self.tls = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if settings.cert_file:
            self.tls.load_cert_chain(settings.cert_file, settings.key_file)
        self._pool = urllib3.PoolManager(maxsize=64, ssl_context=self.tls, headers=self.headers)

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json", **query: Any) -> Dict:
        """The server's answer. `query` without its Nones becomes the URL's. Raises ApiError from status 400 on."""
        wanted = urllib.parse.urlencode({name: value for name, value in query.items() if value is not None})
        response = self._pool.request(
            method,
            f"{self.host}{path}?{wanted}",
            body=None if body is None else json.dumps(body),
            headers=self.headers | {"Content-Type": kind},
            timeout=30,
            retries=False,
        )
        try:
            answer = json.loads(response.data)
        except ValueError:
            answer = {"message": response.data.decode(errors="replace")}
        if response.status >= 400:
            raise ApiError(response.status, answer)
        return answer

    def get(self, kind: str, name: str, namespace: str | None = None) -> Dict:
        return self.request("GET", path(kind, namespace, name))

    def find(self, kind: str, name: str, namespace: str | None = None) -> Dict | None:
        """The object, or None where there is none."""
        try:
            return self.get(kind, name, namespace)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def list(self, kind: str, namespace: str | None = None, labels: str | None = None) -> list[Dict]:
        """Objects of one namespace, or of all; `labels` is a selector. Each has its kind, which lists leave out."""
        answer = self.request("GET", path(kind, namespace), labelSelector=labels)
        of = {"kind": kind, "apiVersion": answer["apiVersion"]}
        return [of | item for item in answer["items"]]

    def follow(self, kind: str) -> Iterator[tuple[str, Dict]]:
        """(ADDED, MODIFIED or DELETED; object) in all namespaces: what there is, then every change. Raises OSError."""
        listed = self.request("GET", path(kind, None))
        yield from (("ADDED", item) for item in listed["items"])
        version = listed["metadata"]["resourceVersion"]
        while True:
            query = urllib.parse.urlencode({"watch": "true", "resourceVersion": version, "timeoutSeconds": 600})
            url = f"{self.host}{path(kind, None)}?{query}"
            try:
                response = self._pool.request("GET", url, preload_content=False, timeout=660, retries=False)
                for line in response:
                    told = json.loads(line)
                    if told["type"] == "ERROR":
                        raise OSError(f"the watch of {kind} ended: {told['object']}")
                    version = told["object"]["metadata"]["resourceVersion"]
                    yield told["type"], told["object"]
            except urllib3.exceptions.HTTPError as error:
                raise OSError(f"the watch of {kind} broke: {error}") from error

    def create(self, body: Dict, namespace: str | None = None, **query: Any) -> Dict:
        """`query`: fieldValidation="Strict", dryRun="All" …"""
        where = namespace or body["metadata"].get("namespace")
        return self.request("POST", path(body["kind"], where, version=body["apiVersion"]), body, **query)

    def apply(self, body: Dict, namespace: str | None = None, manager: str = "test", **query: Any) -> Dict:
        """Server-side apply, strictly validated and forced; `query` may say otherwise."""
        where = namespace or body["metadata"].get("namespace")
        at = path(body["kind"], where, body["metadata"]["name"], version=body["apiVersion"])
        query = {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"} | query
        return self.request("PATCH", at, body, APPLY_PATCH, **query)

    def patch(
        self, kind: str, name: str, namespace: str | None, body: Dict, subresource: str = "", how: str = MERGE_PATCH
    ) -> Dict:
        return self.request("PATCH", path(kind, namespace, name, subresource), body, how)

    def delete(self, kind: str, name: str, namespace: str | None = None, **options: Any) -> None:
        """In the background unless `propagationPolicy` says otherwise; no error where there is none."""
        options = {"propagationPolicy": "Background"} | options
        try:
            self.request("DELETE", path(kind, namespace, name), options)
        except ApiError as error:
            if error.code != 404:
                raise


def path(kind: str, namespace: str | None, name: str = "", subresource: str = "", version: str = "") -> str:
    """The path of an object, or of all objects of a kind; all namespaces when `namespace` is None."""
    version = version or API_VERSIONS.get(kind, "v1")
    parts = ["api" if version == "v1" else "apis", version]
    parts += ["namespaces", namespace] if namespace and kind != "Namespace" else []
    return "/" + "/".join([*parts, plural(kind), *filter(None, (name, subresource))])


def plural(kind: str) -> str:
    word = kind.lower()
    if word.endswith("s"):
        return word if word == "endpoints" else word + "es"
    return word[:-1] + "ies" if word.endswith("y") else word + "s"


def until(condition: Callable[[], T], what: str, limit_s: float = 60.0) -> T:
    """What `condition` returns once that is true; asked ever less often. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + limit_s
    pause_s = 0.02
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.5)
    return found
