"""A real S3 server (SeaweedFS) in a pod of a test cluster, reachable from here through `kubectl port-forward`."""

import contextlib
import json
import pathlib
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests import daemons, s3server
from tests.controlplane import ControlPlane
from tests.kubeapi import until

IMAGE = "weed:e2e"
PORTS = {"s3": 8333, "filer": 8888}
KEYS = {"accessKey": "miles", "secretKey": "miles-secret"}
LABELS = {"app": "s3"}


def objects(image: str = IMAGE) -> list[dict[str, Any]]:
    """What to apply; each is named s3. Data lives as long as the pod."""
    identities = [{"name": "miles", "credentials": [KEYS], "actions": ["Admin"]}]
    flags = [flag for flag in s3server.FLAGS if not flag.startswith("-ip.bind")]
    container = {
        "name": "weed",
        "image": image,
        "command": ["/weed", "-logtostderr=true", "server", "-dir=/data", "-ip.bind=0.0.0.0", *flags],
        "args": ["-s3.config=/etc/s3/s3.json", *(f"-{name}.port={port}" for name, port in PORTS.items())],
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": "s3"}, "periodSeconds": 2},
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "keys", "mountPath": "/etc/s3"},
        ],
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "data", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "keys", "configMap": {"name": "s3"}},
        ],
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "data": {"s3.json": json.dumps({"identities": identities})}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "spec": {
                "selector": {"matchLabels": LABELS},
                "template": {"metadata": {"labels": LABELS}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "spec": {"selector": LABELS, "ports": [{"name": name, "port": port} for name, port in PORTS.items()]},
        },
    ]


def credentials() -> dict[str, Any]:
    """The Secret, named s3, that a job's store.secretRef names."""
    data = {"AWS_ACCESS_KEY_ID": KEYS["accessKey"], "AWS_SECRET_ACCESS_KEY": KEYS["secretKey"]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "stringData": data}


@contextlib.contextmanager
def running(plane: ControlPlane, namespace: str, image: str = IMAGE) -> Iterator[s3server.S3Server]:
    """The server with the bucket `miles`, for pods of the namespace at http://s3:8333; the answer has the addresses by
    which this machine reaches it."""
    for each in objects(image):
        plane.api.apply({"metadata": {"name": "s3"}} | each, namespace)
    until(lambda: _ready(plane, namespace), "the S3 server's pod", 120)
    with (
        daemons.held_ports(2) as (s3, filer),
        daemons.running(
            plane.command(
                "port-forward",
                f"--namespace={namespace}",
                "service/s3",
                f"{s3}:{PORTS['s3']}",
                f"{filer}:{PORTS['filer']}",
            ),
            plane.folder / "port-forward.log",
        ) as process,
    ):
        server = s3server.S3Server(
            endpoint=f"http://127.0.0.1:{s3}",
            filer=f"http://127.0.0.1:{filer}",
            access_key_id=KEYS["accessKey"],
            secret_access_key=KEYS["secretKey"],
            region="us-east-1",
        )
        daemons.wait_until(lambda: _writable(server), process, plane.folder / "port-forward.log", 60)
        server.create_bucket("miles")
        yield server


def upload(server: s3server.S3Server, folder: pathlib.Path, prefix: str) -> None:
    """The files of `folder` to s3://miles/`prefix`."""
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        _put(server, f"buckets/miles/{prefix}/{file.name}", file.read_bytes())


def _ready(plane: ControlPlane, namespace: str) -> bool:
    deployment = plane.api.get("Deployment", "s3", namespace)
    return bool(deployment.get("status", {}).get("readyReplicas"))


def _writable(server: s3server.S3Server) -> bool:
    """Volumes appear seconds after the ports open."""
    with contextlib.suppress(OSError):
        _put(server, "ready", b"x" * 2048)
        return True
    return False


def _put(server: s3server.S3Server, path: str, data: bytes) -> None:
    request = urllib.request.Request(f"{server.filer}/{path}", data=data, method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
