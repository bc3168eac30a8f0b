"""The watch of RLJobs by kopf, before an API server of a few answers; on a real one: tests.test_operator*."""

import asyncio
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from operators.handlers import WatchEnded, watch_jobs

JOB = {"metadata": {"name": "sums", "namespace": "team", "uid": "u", "resourceVersion": "7"}, "spec": {}}


def resource(name: str, kind: str) -> dict[str, Any]:
    verbs = ["list", "watch", "patch"]
    return {"resources": [{"name": name, "singularName": "", "kind": kind, "namespaced": True, "verbs": verbs}]}


def group(name: str, version: str) -> dict[str, Any]:
    return {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}


DISCOVERY = {  # kopf wants to know where namespaces and definitions are before it watches anything
    "/api": {"versions": ["v1"]},
    "/api/v1": resource("namespaces", "Namespace"),
    "/apis": {"groups": [group("miles.dev", "v1alpha1"), group("apiextensions.k8s.io", "v1")]},
    "/apis/miles.dev/v1alpha1": resource("rljobs", "RLJob"),
    "/apis/apiextensions.k8s.io/v1": resource("customresourcedefinitions", "CustomResourceDefinition"),
}
LIST = "/apis/miles.dev/v1alpha1/rljobs"


@contextlib.contextmanager
def serving(answers: dict[str, Any]) -> Iterator[str]:
    """404 for all other paths; a watch is never answered."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = None if "watch=true" in self.path else answers.get(self.path.partition("?")[0])
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer or {"kind": "Status", "code": 404}).encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


async def test_a_watch_that_kopf_gives_up_ends_and_can_be_begun_anew() -> None:
    listed = DISCOVERY | {LIST: {"metadata": {"resourceVersion": "9"}, "items": [JOB]}}
    heard: list[str] = []
    with serving(listed) as server:

        async def connection() -> dict[str, Any]:
            return {"server": server}

        for times in (1, 2):
            with pytest.raises(WatchEnded, match="404"):
                async with asyncio.timeout(30):
                    await watch_jobs(connection, (), lambda what, job: heard.append(job["metadata"]["name"]))
            assert heard == ["sums"] * times
