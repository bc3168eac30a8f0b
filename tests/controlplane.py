"""A real Kubernetes control plane for tests: etcd, API server, controllers and scheduler as processes on loopback.

It is, in this order: the cluster of the kubeconfig in $MILES_TEST_KUBECONFIG; else the programs in $KUBEBUILDER_ASSETS;
else those in the cache; else `tests/cluster/build.sh` builds them there from pinned Go modules. There is no node: pods
are scheduled to those of `tests.kubelet`, which moves their status. RBAC and ServiceAccounts are enforced.

`python -m tests.controlplane` runs one until interrupted, with such nodes, and prints what to export to use it;
`--build` only builds what is missing.
"""

import base64
import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import daemons
from tests.kubeapi import Api, until

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
BUILD = pathlib.Path(__file__).parent / "cluster" / "build.sh"
START_LIMIT_S = 120.0
USERS = {
    "admin": "system:masters",
    "kubelet": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
}
# Every request once, when it was answered, without its body.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "Metadata"}],
}
# Without real nodes time is short: a node is lost after 20 s of silence, not 50 s, and its pods leave 2 s later, not
# 300 s. A loopback address cannot be an endpoint of the Service `kubernetes`.
NODES_ARE_LOST_SOON = ["--node-monitor-grace-period=20s", "--node-monitor-period=1s"]
WITHOUT_NODES = [
    "--default-not-ready-toleration-seconds=2",
    "--default-unreachable-toleration-seconds=2",
    "--endpoint-reconciler-type=none",
]
MISSING = f"""\
no Kubernetes control plane: install Go 1.21 or newer so that tests/cluster/build.sh can build one, or name in \
KUBEBUILDER_ASSETS a folder with {", ".join(PROGRAMS)}"""
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


class Unavailable(Exception):
    """There is no control plane here; the text says what to install."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request that the server answered."""

    user: str
    verb: str
    resource: str  # plural, with its subresource: "pods/status"
    namespace: str
    name: str
    code: int
    agent: str
    denied: bool  # by the rules of access, not by admission or by what the object holds

    @property
    def writes(self) -> bool:
        return self.verb in WRITES


class ControlPlane:
    """A running control plane; `folder` is for files of the tests' own."""

    def __init__(
        self,
        folder: pathlib.Path,
        kubeconfig: pathlib.Path,
        kubectl: str,
        kubelet: pathlib.Path,
        interrupt: Callable[[str, float], None] = lambda program, seconds: pytest.skip("it is not ours to interrupt"),
    ):
        """interrupt: kills a program, and starts it again after so many seconds, with what it had stored."""
        self.folder = folder
        self.kubeconfig = kubeconfig
        self.kubelet_kubeconfig = kubelet
        self.api = Api(kubeconfig)
        self.interrupt = interrupt
        self._kubectl = kubectl

    def kubectl(
        self, *arguments: str, text: str | None = None, kubeconfig: pathlib.Path | None = None, limit_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl (0.1 s of CPU each; `api` costs less) as admin or as the user of `kubeconfig`."""
        command = self.command(*arguments, kubeconfig=kubeconfig)
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=limit_s)

    def command(self, *arguments: str, kubeconfig: pathlib.Path | None = None) -> list[str]:
        """kubectl's command line, for those of its commands that go on until they are ended."""
        return [self._kubectl, f"--kubeconfig={kubeconfig or self.kubeconfig}", *arguments]

    def new_namespace(self, **labels: str) -> str:
        """A namespace that can take pods."""
        name = f"t-{secrets.token_hex(4)}"
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        until(lambda: self.api.find("ServiceAccount", "default", name), f"the default ServiceAccount of {name}", 60)
        return name

    def service_account(self, namespace: str, name: str) -> pathlib.Path:
        """A kubeconfig for a token of this ServiceAccount (as `kubectl create token`), which is made if missing."""
        if self.api.find("ServiceAccount", name, namespace) is None:
            self.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}, namespace)
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        token = self.api.request("POST", path, request | {"spec": {"expirationSeconds": 24 * 3600}})["status"]["token"]
        admin = json.loads(self.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json").stdout)
        admin["users"][0]["user"] = {"token": token}
        admin["contexts"][0]["context"]["namespace"] = namespace
        file = self.folder / f"{namespace}-{name}.kubeconfig"
        file.write_text(json.dumps(admin))
        return file

    def mark(self) -> int:
        """A point in the record of requests; see `requests`."""
        return self._audit_log().stat().st_size

    def requests(self, since: int = 0, user: str | None = None, namespace: str | None = None) -> list[Request]:
        """Requests answered after the mark `since`; `user` as the server names it
        ("system:serviceaccount:NAMESPACE:NAME"). A watch appears when it ends."""
        with open(self._audit_log(), "rb") as log:
            log.seek(since)
            found = [_request(json.loads(line)) for line in log if line.endswith(b"\n")]
        return [each for each in found if user in (None, each.user) and namespace in (None, each.namespace)]

    def _audit_log(self) -> pathlib.Path:
        file = self.folder / "audit.log"
        if not file.exists():
            pytest.skip("a foreign cluster's requests cannot be counted")
        return file


def _request(event: dict[str, Any]) -> Request:
    target = event.get("objectRef", {})
    return Request(
        user=event["user"]["username"],
        verb=event["verb"],
        resource="/".join(filter(None, (target.get("resource", ""), target.get("subresource")))),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        agent=event.get("userAgent", ""),
        denied=event.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid",
    )


def cache() -> pathlib.Path:
    """Where build.sh puts programs."""
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "k8s-node"
    return pathlib.Path(os.environ.get("K8S_CACHE", default)) / "bin"


def find_programs() -> pathlib.Path | None:
    """The first folder that has every program; one without the controllers, as envtest makes it, does not count."""
    folders = [pathlib.Path(folder) for folder in (os.environ.get("KUBEBUILDER_ASSETS"), cache()) if folder]
    return next((each for each in folders if all((each / name).exists() for name in PROGRAMS)), None)


def prepare() -> None:
    """Build what is missing; ten minutes on two cores, once. Raises Unavailable where that cannot be done."""
    if os.environ.get("MILES_TEST_KUBECONFIG") or find_programs():
        return
    built = subprocess.run(["bash", str(BUILD), "control"], stdin=subprocess.DEVNULL)
    if built.returncode != 0:
        raise Unavailable(MISSING)


@contextlib.contextmanager
def running(folder: pathlib.Path, node_address: str | None = None) -> Iterator[ControlPlane]:
    """The control plane, ready; it ends with the block, and with this process however that ends.

    node_address: of this network namespace; real nodes join there, and are given Kubernetes' own time to be heard of.
    """
    existing = None if node_address else os.environ.get("MILES_TEST_KUBECONFIG")
    if existing:
        file = pathlib.Path(existing)
        yield ControlPlane(folder, file, shutil.which("kubectl") or str(cache() / "kubectl"), file)
        return
    programs = find_programs()
    if programs is None:
        raise Unavailable(MISSING)
    with daemons.held_ports(5) as ports:
        yield from _started(programs, Layout(folder, ports, node_address))


def _keep_parameters_followed(plane: ControlPlane) -> None:
    """An API server stops following ConfigMaps when the last admission policy that takes its parameters from one is
    deleted, and does not begin again for the next. So one stays that concerns no object at all."""
    name, group = "keeps-parameters-followed", "admissionregistration.k8s.io/v1"
    nothing = {
        "apiGroups": ["nothing.example"],
        "apiVersions": ["v1"],
        "resources": ["nothings"],
        "operations": ["CREATE"],
    }
    policy = {
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "matchConstraints": {"resourceRules": [nothing]},
        "validations": [{"expression": "true"}],
    }
    reference = {"name": name, "namespace": "default", "parameterNotFoundAction": "Allow"}
    binding = {"policyName": name, "validationActions": ["Deny"], "paramRef": reference}
    for kind, spec in (("ValidatingAdmissionPolicy", policy), ("ValidatingAdmissionPolicyBinding", binding)):
        plane.api.apply({"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": spec})


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the parts of a control plane are."""

    folder: pathlib.Path
    ports: list[int]  # of the API server, controllers, scheduler; etcd's two
    node_address: str | None

    @property
    def address(self) -> str:
        return self.node_address or "127.0.0.1"

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.ports[0]}"

    @property
    def etcd(self) -> str:
        return f"http://127.0.0.1:{self.ports[3]}"

    @property
    def certificate(self) -> pathlib.Path:
        return self.folder / "certificates" / "apiserver.crt"

    @property
    def key(self) -> pathlib.Path:
        return self.folder / "service-accounts.key"

    def kubeconfig(self, user: str) -> pathlib.Path:
        return self.folder / f"{user.removeprefix('system:')}.kubeconfig"


def _started(programs: pathlib.Path, layout: Layout) -> Iterator[ControlPlane]:
    tokens = {user: secrets.token_hex(16) for user in USERS}
    _write_files(layout, tokens)
    parts = {
        "etcd": (_etcd(layout), f"{layout.etcd}/readyz"),
        "kube-apiserver": (_apiserver(layout), f"{layout.server}/readyz"),
        "kube-controller-manager": (_controllers(layout), f"https://127.0.0.1:{layout.ports[1]}/healthz"),
        "kube-scheduler": (_scheduler(layout), f"https://127.0.0.1:{layout.ports[2]}/healthz"),
    }
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as stack:

        def start(program: str) -> None:
            (flags, health), log = parts[program], layout.folder / f"{program}.log"
            process = stack.enter_context(daemons.running([str(programs / program), *flags], log))
            daemons.wait_until(lambda: _answers(health), process, log, START_LIMIT_S)
            processes[program] = process

        def interrupt(program: str, seconds: float) -> None:
            processes[program].kill()
            processes[program].wait()
            time.sleep(seconds)
            start(program)

        start("etcd")
        start("kube-apiserver")
        for user in USERS:
            _write_kubeconfig(layout, user, tokens[user])
        start("kube-controller-manager")
        start("kube-scheduler")
        plane = ControlPlane(
            layout.folder,
            layout.kubeconfig("admin"),
            str(programs / "kubectl"),
            layout.kubeconfig("kubelet"),
            interrupt,
        )
        _keep_parameters_followed(plane)
        yield plane


def _etcd(layout: Layout) -> list[str]:
    return [
        f"--data-dir={layout.folder / 'etcd'}",
        f"--listen-client-urls={layout.etcd}",
        f"--advertise-client-urls={layout.etcd}",
        f"--listen-peer-urls=http://127.0.0.1:{layout.ports[4]}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _apiserver(layout: Layout) -> list[str]:
    return [
        f"--etcd-servers={layout.etcd}",
        f"--secure-port={layout.ports[0]}",
        f"--bind-address={layout.address}",
        f"--advertise-address={layout.address}",
        f"--cert-dir={layout.certificate.parent}",  # it makes its own
        f"--token-auth-file={layout.folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={layout.key}",
        f"--service-account-signing-key-file={layout.key}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        f"--audit-policy-file={layout.folder / 'audit-policy.json'}",
        f"--audit-log-path={layout.folder / 'audit.log'}",
        "--audit-log-maxsize=10000",
        *([] if layout.node_address else WITHOUT_NODES),
    ]


def _controllers(layout: Layout) -> list[str]:
    return [
        f"--kubeconfig={layout.kubeconfig('system:kube-controller-manager')}",
        f"--secure-port={layout.ports[1]}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={layout.key}",
        f"--root-ca-file={layout.certificate}",
        # With the default, 20 requests/s, the garbage collector is the slowest part of every test that deletes.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        *([] if layout.node_address else NODES_ARE_LOST_SOON),
    ]


def _scheduler(layout: Layout) -> list[str]:
    return [
        f"--kubeconfig={layout.kubeconfig('system:kube-scheduler')}",
        f"--secure-port={layout.ports[2]}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
    ]


def _write_files(layout: Layout, tokens: dict[str, str]) -> None:
    rows = [f'{tokens[user]},{user},{user},"{group}"' for user, group in USERS.items()]
    (layout.folder / "tokens.csv").write_text("\n".join(rows) + "\n")
    (layout.folder / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))
    subprocess.run(["openssl", "genrsa", "-out", str(layout.key), "2048"], check=True, capture_output=True, timeout=30)


def _write_kubeconfig(layout: Layout, user: str, token: str) -> None:
    authority = base64.b64encode(layout.certificate.read_bytes()).decode()
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": layout.server, "certificate-authority-data": authority}}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
        "current-context": "test",
    }
    layout.kubeconfig(user).write_text(json.dumps(content))


def _answers(url: str) -> bool:
    """Whether a health endpoint, which needs no login, says ok; its certificate is its own."""
    with contextlib.suppress(OSError):
        context = ssl._create_unverified_context()
        return urllib.request.urlopen(url, timeout=2, context=context).status == 200
    return False


def main(arguments: list[str]) -> None:
    from tests.kubelet import Kubelet

    try:
        prepare()
    except Unavailable as reason:
        sys.exit(str(reason) if os.environ.get("CI") or not arguments else None)
    if arguments == ["--build"]:
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="control-plane-") as folder,
        running(pathlib.Path(folder)) as plane,
        Kubelet(Api(plane.kubelet_kubeconfig)),
    ):
        print(f"export KUBECONFIG={plane.kubeconfig}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
