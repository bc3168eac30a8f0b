"""A real Kubernetes API server for tests: etcd and kube-apiserver as two processes on loopback, ready in about 5 s.

The programs are those of any Kubernetes release, found in $KUBEBUILDER_ASSETS (the folder that envtest fills) or
PATH. Nothing runs behind the API: objects are validated, defaulted and admitted, no pod is started.
"""

import contextlib
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
START_SECONDS = 60.0
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: "https://127.0.0.1:{port}", insecure-skip-tls-verify: true}}}}]
users: [{{name: admin, user: {{token: admin-token}}}}]
contexts: [{{name: test, context: {{cluster: test, user: admin}}}}]
current-context: test
"""


def program(name: str) -> str | None:
    path = os.pathsep.join(filter(None, (os.environ.get("KUBEBUILDER_ASSETS"), os.environ["PATH"])))
    return shutil.which(name, path=path)


def available() -> bool:
    return all(program(name) for name in PROGRAMS)


class ApiServer:
    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"

    def kubectl(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [program("kubectl") or "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=30)


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[ApiServer]:
    """Start both programs with their state in `folder`; end them afterwards."""
    etcd_port, peer_port, port = free_ports(3)
    server = ApiServer(folder)
    server.kubeconfig.write_text(KUBECONFIG.format(port=port))
    (folder / "tokens.csv").write_text("admin-token,admin,admin,system:masters\n")
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True, timeout=30)
    etcd_url, peer_url = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
    with contextlib.ExitStack() as stack:
        etcd = [
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}",
            f"--listen-peer-urls={peer_url}",
            "--unsafe-no-fsync",
        ]
        apiserver = [
            f"--etcd-servers={etcd_url}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--disable-admission-plugins=ServiceAccount",
        ]
        stack.enter_context(process("etcd", etcd, folder))
        started = stack.enter_context(process("kube-apiserver", apiserver, folder))
        wait_until_ready(f"https://127.0.0.1:{port}/readyz", started)
        yield server


@contextlib.contextmanager
def process(name: str, arguments: list[str], folder: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / f"{name}.log", "wb") as log:
        started = subprocess.Popen([program(name) or name, *arguments], stdout=log, stderr=log)
    try:
        yield started
    finally:
        started.kill()  # the state is thrown away
        started.wait(timeout=30)


def wait_until_ready(url: str, started: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(url, headers={"Authorization": "Bearer admin-token"})
    while time.monotonic() < deadline and started.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            if urllib.request.urlopen(request, timeout=2, context=context).status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"kube-apiserver is not ready (exit code {started.poll()}); see its log beside the kubeconfig")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
