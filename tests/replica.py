"""The operator as its users run it: replicas as processes, as its own ServiceAccount with the rules of manifests/.

Trainers' status ports, which pods without containers do not have, are stood in for by one HTTP server.
"""

import contextlib
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from tests import daemons
from tests.controlplane import ControlPlane
from tests.kubeapi import Api, ApiError, until

ROOT = pathlib.Path(__file__).parent.parent
NAMESPACE = "miles-system"
ACCOUNT = "miles-operator"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
INSTALLED = (
    *("crd/rljobs.yaml", "rbac/operator.yaml", "rbac/operator-own.yaml"),
    *("overlays/cluster/binding.yaml", "overlays/cluster/nodes.yaml"),
)
Dict = dict[str, Any]


def install(plane: ControlPlane) -> pathlib.Path:
    """The CRD and the operator's rules; returns the kubeconfig of its ServiceAccount."""
    until(lambda: not _leaving(plane), "the namespace of an operator that was removed is gone", 120)
    if plane.api.find("Namespace", NAMESPACE) is None:
        plane.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    for file in INSTALLED:
        for body in yaml.safe_load_all((ROOT / "manifests" / file).read_text()):
            plane.api.apply(body)
    until(lambda: served(plane.api), "RLJobs are served")
    return plane.service_account(NAMESPACE, ACCOUNT)


def _leaving(plane: ControlPlane) -> bool:
    return "deletionTimestamp" in (plane.api.find("Namespace", NAMESPACE) or {"metadata": {}})["metadata"]


def served(api: Api) -> bool:
    try:
        return api.list("RLJob") is not None
    except ApiError:
        return False


class Replica:
    """One process. It dies with the test."""

    def __init__(self, kubeconfig: pathlib.Path, folder: pathlib.Path, name: str, arguments: Sequence[str] = ()):
        self.name, self.log = name, folder / f"{name}.log"
        self._holder, self.port = daemons.hold()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "operators", f"--port={self.port}", *arguments],
                env=os.environ | {"KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": NAMESPACE, "POD_NAME": name},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=daemons.die_with_parent,
            )

    def kill(self) -> None:
        """As if its machine had vanished."""
        self.process.kill()
        self.process.wait()
        self._holder.close()

    def stop(self, limit_s: float = 30.0) -> float:
        """As the kubelet stops it; returns the seconds that it took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(limit_s)
        self._holder.close()
        return time.monotonic() - began

    def wait_until_leading(self, limit_s: float = 90.0) -> None:
        until(lambda: self.leads(), f"replica {self.name} leads; its log: {self.log}", limit_s)

    def leads(self) -> bool:
        """Whether it leads and knows all objects."""
        assert self.process.poll() is None, f"the operator has ended:\n{self.log.read_text()[-3000:]}"
        return self.get("/readyz")[0] == 200 and self.metrics().get("miles_leading") == 1

    def get(self, path: str) -> tuple[int, str]:
        """(status, text); status 0 where it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read().decode()
        except OSError:
            return 0, ""

    def metrics(self) -> dict[str, float]:
        """Each sample by its name with labels, as in the text format."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def said(self) -> list[Dict]:
        """Its log."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


class StatusPorts:
    """Answers for the rank 0 of every pod: GET /NAMESPACE/POD/status, POST /NAMESPACE/POD/pause."""

    def __init__(self) -> None:
        self.reports: dict[str, Dict] = {}
        """NAMESPACE/JOB, or NAMESPACE for all its jobs → what rank 0 tells; nobody else answers."""
        self.pauses: list[tuple[str, str]] = []
        """(NAMESPACE/POD, Authorization) of each request."""
        self.asked: list[str] = []
        self.url = ""

    def report(self, place: str) -> Dict | None:
        """Of the trainer pod NAMESPACE/POD, whose name is JOB-trainer-ATTEMPT-INDEX-RANDOM."""
        namespace, _, pod = place.partition("/")
        return self.reports.get(f"{namespace}/{pod.rpartition('-trainer-')[0]}", self.reports.get(namespace))

    @contextlib.contextmanager
    def serving(self) -> Iterator["StatusPorts"]:
        ports = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                place = self.path.strip("/").removesuffix("/status")
                ports.asked.append(place)
                report = ports.report(place)
                self.send_response(404 if report is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(report).encode())

            def do_POST(self) -> None:
                place = self.path.strip("/").removesuffix("/pause")
                ports.pauses.append((place, self.headers.get("Authorization", "")))
                self.send_response(202)
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}/{{namespace}}/{{name}}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def rljob(name: str, namespace: str, **spec: Any) -> Dict:
    """A small valid RLJob; `spec` by field."""
    return {
        "apiVersion": "miles.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"uri": "s3://models/tiny"},
            "data": {"sets": [{"generator": "reasoning-gym/chain_sum"}]},
            "algorithm": {"type": "grpo", "totalSteps": 100},
            "store": {"uri": "s3://team-a/miles"},
            **spec,
        },
    }
