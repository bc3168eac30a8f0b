"""With which environment `kubectl miles report` reads a run's store: the user's own, completed from the job."""

import base64
from collections.abc import Mapping
from typing import Any

from operators.kubectl import Kubectl, Refused

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
