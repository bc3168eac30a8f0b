"""What a text of the cluster says here: mounted paths, Service names, ports and $(VARIABLES), replaced. Pure."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

LOOPBACK = "127.0.0.1"

Dict = Mapping[str, Any]


class Rewrite:
    """Replaces what one pod's texts name of the cluster.

    paths: mount path → folder here. ports: container port → port here. services: each with its ports, of the Service →
    here.
    """

    def __init__(
        self, paths: Mapping[str, str], ports: Mapping[int, int], services: Sequence[tuple[Dict, Mapping[int, int]]]
    ):
        self.paths, self.ports = paths, ports
        alternatives = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
        self.path_pattern = re.compile(rf"(^|=|://)({alternatives})(?=/|$)") if alternatives else None
        self.services = [(host_pattern(service), ports) for service, ports in services]

    def text(self, text: str) -> str:
        """A variable's value or an argument, before its references are expanded."""
        return re.sub(
            r"://(127\.0\.0\.1|localhost):(\d+)",
            lambda match: f"://{match[1]}:{self.ports.get(int(match[2]), match[2])}",
            self.shared(text),
        )

    def shared(self, text: str) -> str:
        """A text that does not belong to this pod alone: a loopback address in it is the user's, and stays."""
        if self.path_pattern is not None:
            text = self.path_pattern.sub(lambda match: match[1] + self.paths[match[2]], text)
        for pattern, ports in self.services:
            text = pattern.sub(functools.partial(local_host, ports=ports), text)
        return text

    def document(self, text: str) -> str:
        """A JSON document, in each of its strings."""
        return json.dumps(self._value(json.loads(text)), indent=2)

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.shared(value)
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return {key: self._value(item) for key, item in value.items()}
        return value


def host_pattern(service: Dict) -> re.Pattern[str]:
    """The names of a Service, or of a pod behind it, at the start of a text or of a URL's authority."""
    name, namespace = re.escape(service["metadata"]["name"]), re.escape(service["metadata"].get("namespace", ""))
    dns = rf"(?:\.{namespace}(?:\.svc(?:\.cluster\.local)?)?)?"
    return re.compile(rf"(?P<before>^|://)(?P<host>(?:[a-z0-9-]+\.)?{name}{dns})(?P<port>:\d+)?(?=/|$)")


def local_host(match: re.Match[str], ports: Mapping[int, int]) -> str:
    """127.0.0.1 for a Service's name; a bare word that is no URL is left, it may mean anything."""
    if not match["before"] and "." not in match["host"] and not match["port"]:
        return match[0]
    port = int(match["port"][1:]) if match["port"] else None
    return f"{match['before']}{LOOPBACK}" + (f":{ports.get(port, port)}" if port else "")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME) as Kubernetes does it: an unknown name stays as written, $$(NAME) is a literal $(NAME)."""

    def replacement(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$?\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)", replacement, text)
