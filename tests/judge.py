"""Asks a real API server what it makes of an RLJob file, as `kubectl apply --dry-run=server --validate=strict` would.

The server gets the YAML itself, one request a document, which is some twenty times as quick as kubectl. Where kubectl,
which turns YAML into JSON first, sees something else, it is done here as kubectl does it: it cuts a file at --- before
it reads it, and overlooks that a key is given twice, as is every key that overrides one merged by <<.
"""

import http.client
import json
import re
from typing import Any

from operators import documents
from tests.kubeapi import Api, until

CREATE = "/apis/miles.dev/v1alpha1/namespaces/default/rljobs?dryRun=All&fieldValidation=Strict"
SEPARATOR = re.compile(r"^---([^\n]*)(?:\n|\Z)", re.MULTILINE)
ONLY_TWICE = re.compile(
    r"[^;]*strict decoding error: yaml: unmarshal errors:(\n  line \d+: key .* already set in map)+"
)


def install(api: Api, definition: dict[str, Any]) -> None:
    """Create or update the CustomResourceDefinition and wait until its objects can be made."""
    api.apply(definition)
    name = definition["metadata"]["name"]

    def established() -> bool:
        found = api.get("CustomResourceDefinition", name).get("status", {}).get("conditions") or []  # null at first
        return any(item["type"] == "Established" and item["status"] == "True" for item in found)

    until(established, f"CustomResourceDefinition {name} is established")


class Judge:
    """One connection to the server."""

    def __init__(self, api: Api):
        self._headers = api.headers | {"Accept": "application/json"}
        self._connection = http.client.HTTPSConnection(api.host.removeprefix("https://"), context=api.tls, timeout=30)

    def verdict(self, text: str) -> tuple[list[Any], str]:
        """The objects that would be stored, with all defaults, or why not (on one line or more)."""
        pieces = SEPARATOR.split(text.removeprefix("\ufeff"))
        for after in pieces[1::2]:
            if after.strip()[:1] not in ("", "#"):
                return [], "invalid separator of documents"
        stored = []
        for document in pieces[::2]:
            if not re.search(r"^\s*[^#\s]", document, re.MULTILINE):
                continue  # comments at most
            code, answer = self._create(document, "yaml")
            if code == 400 and ONLY_TWICE.fullmatch(answer["message"]):
                code, answer = self._create_as_json(document)
            assert code in (201, 400, 422), f"the server is at fault: {code} {answer}"
            if code != 201:
                return [], str(answer["message"])
            stored.append(answer)
        return stored, "" if stored else "nothing to apply"

    def _create(self, text: str, kind: str) -> tuple[int, Any]:
        headers = self._headers | {"Content-Type": f"application/{kind}"}
        self._connection.request("POST", CREATE, body=text.encode(), headers=headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def _create_as_json(self, text: str) -> tuple[int, Any]:
        """A key that is itself given twice stays refused here, as by the command line; kubectl takes the last one."""
        try:
            return self._create(json.dumps(documents.read(text)[0].value), "json")
        except documents.Unreadable as error:
            return 400, {"message": str(error)}
