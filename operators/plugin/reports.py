"""With which environment `kubectl miles report` reads a run's store: the user's own, completed from the job."""

import base64
import socket
import urllib.parse
from collections.abc import Mapping
from typing import Any

from operators.kubectl import Kubectl, Refused

REACH_S = 5.0
"""For the store's endpoint to take a connection. The reader of a run would try for two minutes."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def environment(
    job: Mapping[str, Any], kubectl: Kubectl, own: Mapping[str, str], endpoint: str | None
) -> dict[str, str]:
    """`own`, with endpoint and region of the job's store and, where the user has no keys for S3, those of the store's
    Secret, which the user must be allowed to read. Raises Refused."""
    store = job["spec"]["store"]
    found = dict(own)
    if endpoint or store.get("endpoint"):
        found["AWS_ENDPOINT_URL"] = found["AWS_ENDPOINT_URL_S3"] = endpoint or store["endpoint"]
    if store.get("region"):
        found["AWS_REGION"] = store["region"]
    secret = store.get("secretRef", {}).get("name")
    if secret and "AWS_ACCESS_KEY_ID" not in own and "AWS_PROFILE" not in own:
        found |= keys(kubectl, secret, job["metadata"]["namespace"])
    return found


def keys(kubectl: Kubectl, secret: str, namespace: str) -> dict[str, str]:
    """The keys for S3 in a Secret. Raises Refused."""
    try:
        data = kubectl.get(f"secret/{secret}", f"--namespace={namespace}").get("data", {})
    except Refused as error:
        remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to keys that may read the store"
        raise Refused(f"no keys for the store: {error}; {remedy}") from None
    return {name: base64.b64decode(data[name]).decode() for name in KEYS if name in data}


def reach(environment: Mapping[str, str], namespace: str) -> None:
    """Raises Refused with a remedy where the store's endpoint takes no connection from here. Behind a proxy nothing is
    asked, and without an endpoint the store is the cloud's own. `namespace`: the job's."""
    url = environment.get("AWS_ENDPOINT_URL_S3")
    if not url or any(environment.get(name) or environment.get(name.upper()) for name in PROXIES):
        return
    try:
        place = urllib.parse.urlsplit(url)
        host, port = place.hostname or "", place.port or (443 if place.scheme == "https" else 80)
    except ValueError:
        raise Refused(f'the store\'s endpoint "{url}" is no address') from None
    try:
        socket.create_connection((host, port), REACH_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise Refused(
            f"the store does not answer at {url} ({why}); {_remedy(host, namespace, port, place.scheme)}"
        ) from None


def _remedy(host: str, namespace: str, port: int, scheme: str) -> str:
    """A Service has an address that the cluster alone knows: NAME[.NAMESPACE[.svc[.DOMAIN]]]."""
    service, namespace, *rest = host.split(".") if "." in host else (host, namespace)
    if rest and rest[0] != "svc":
        return "give --endpoint URL where it answers you at another address"
    forward = f"kubectl port-forward -n {namespace} service/{service} {port}"
    return f"where only the cluster knows it: {forward}, and beside that --endpoint {scheme}://localhost:{port}"
