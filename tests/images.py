"""Builds the images of images/ on this machine with buildah, which needs no daemon, and loads them into a node.

They start from python:3.11-slim where a registry answers; else from a Debian with its Python, made by mmdebstrap. What
was built last is kept in the cache, and a node keeps what was loaded: without changes a second time takes seconds.
`python -m tests.images` builds only.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from tests import controlplane
from tests.node import Node

ROOT = pathlib.Path(__file__).parent.parent
VERSION = "0.1.0"
FILES = {"miles-operator": "operator.Dockerfile", "miles": "miles.Dockerfile"}
BASE = "docker.io/library/python:3.11-slim-bookworm"
LOCAL_BASE = "localhost/debian-python:bookworm"
# What the base image has that a minimal Debian lacks; headers, for packages that are compiled on installation.
PACKAGES = "ca-certificates,python3,python3-dev,python3-venv"
CERTIFICATES = "/etc/ssl/certs"
NEEDED = ("buildah", "mmdebstrap")


def prepare() -> None:
    """Raises Unavailable naming what has to be installed."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        raise controlplane.Unavailable(f"images need more programs; Debian: apt-get install {' '.join(missing)}")


def build() -> dict[str, str]:
    """Name → id of each image, built from the working tree: about six minutes the first time, most of it the 5 GB of
    the data plane's packages."""
    base = _base()
    built = {f"{name}:{VERSION}": _build(f"{name}:{VERSION}", file, base) for name, file in FILES.items()}
    _forget_earlier()
    return built


def _forget_earlier() -> None:
    """What no present image is made of: each change would add its gigabytes for ever."""
    _buildah("rm", "--all")  # of a build that was killed
    _buildah("rmi", "--prune")


def load(node: Node, images: dict[str, str]) -> None:
    """Make the node's images by these names the built ones; what they were before is forgotten."""
    for name, identity in images.items():
        wanted, prefix = f"docker.io/library/{name}", f"localhost/{name}-"
        before = {each for each in node.images() if each.startswith(prefix)}
        if prefix + identity not in before:
            with tempfile.TemporaryDirectory(dir=_storage()) as folder:
                archive = pathlib.Path(folder, "image.tar")
                _buildah("push", identity, f"docker-archive:{archive}:{prefix}{identity}")
                node.load(archive)
        node.tag(prefix + identity, wanted)
        for old in before - {prefix + identity}:
            node.forget(old, f"sha256:{old.removeprefix(prefix)}")


def _base() -> str:
    """The name of the base image."""
    if not _works("inspect", "--type=image", BASE) and not _works("inspect", "--type=image", LOCAL_BASE):
        if _works("pull", "--quiet", BASE):
            return BASE
        _make_base()
    return BASE if _works("inspect", "--type=image", BASE) else LOCAL_BASE


def _make_base() -> None:
    print(f"no registry for {BASE}: a Debian in its place, a minute or more", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=_storage()) as folder:
        command = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", f"{folder}/base.tar"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        pathlib.Path(folder, "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["python3"]\n')
        _buildah("build", f"--tag={LOCAL_BASE}", folder)


def _build(name: str, file: str, base: str) -> str:
    print(f"image {name}", file=sys.stderr, flush=True)
    options = ["--layers", "--network=host", f"--volume={CERTIFICATES}:{CERTIFICATES}:ro", f"--build-arg=BASE={base}"]
    _buildah("build", *options, "--pull=false", f"--tag={name}", f"--file={ROOT}/images/{file}", str(ROOT))
    return _buildah("images", "--quiet", "--no-trunc", name).split()[0].removeprefix("sha256:")


def _works(*arguments: str) -> bool:
    return subprocess.run(_command(*arguments), capture_output=True, env=_environment()).returncode == 0


def _buildah(*arguments: str) -> str:
    """What it prints. Raises RuntimeError with the end of its complaints."""
    result = subprocess.run(_command(*arguments), capture_output=True, text=True, env=_environment())
    if result.returncode:
        raise RuntimeError(f"buildah {arguments[0]}: {(result.stdout + result.stderr)[-4000:]}")
    return result.stdout


def _command(*arguments: str) -> list[str]:
    return ["buildah", f"--root={_storage()}/root", f"--runroot={_storage()}/run", *arguments]


def _environment() -> dict[str, str]:
    # Neither a container runtime nor systemd is needed; the temporary files may be larger than /var/tmp.
    own = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay", "TMPDIR": str(_storage())}
    return dict(os.environ) | own


def _storage() -> pathlib.Path:
    folder = controlplane.cache().parent / "buildah"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    prepare()
    for name, identity in build().items():
        print(name, identity)
