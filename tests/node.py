"""A whole one-node Kubernetes on this machine, for tests in real pods: containerd, kubelet, kube-proxy and DNS beside
the control plane of `tests.controlplane`. Needs Linux and root; only one runs at a time.

All of it lives in namespaces of its own (network, mounts, processes): ending one process ends every pod and mount,
nothing of this machine is changed, and pods reach nothing outside. Two virtual devices join it to this machine:

    this machine, 198.18.0.1 miles-node ─── node0 198.18.0.2, node-1 ─── cni0 ─── pods in 10.244.0.0/24

`python -m tests.node` runs one until interrupted, and prints what to export to use it.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from tests import controlplane, daemons
from tests.kubeapi import until

NAME = "node-1"
HOST, ADDRESS, DEVICE = "198.18.0.1", "198.18.0.2", "miles-node"
PODS, SERVICES = "10.244.0.0/24", "10.96.0.0/16"
CGROUP = "miles-node"
PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr", "bridge", "loopback", "host-local", "coredns", "pause")
PACKAGES = {"runc": "runc", "nft": "nftables", "ip": "iproute2", "unshare": "util-linux", "openssl": "openssl"}
PAUSE = "localhost/pause:dev"
NAMESPACE = pathlib.Path(__file__).parent / "cluster" / "namespace.sh"
START_LIMIT_S = 180.0
# The kubelet sets these for the whole machine; they are put back.
KERNEL_SETTINGS: tuple[str, ...] = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
KERNEL_SETTINGS += ("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes")


class Node(controlplane.ControlPlane):
    """The running node's control plane, and its images."""

    def images(self) -> set[str]:
        return set(self._ctr("images", "list", "--quiet").split())

    def load(self, archive: pathlib.Path) -> None:
        """Import a Docker or OCI archive (the 6 GB of the data plane: minutes)."""
        self._ctr("images", "import", str(archive))

    def tag(self, name: str, alias: str) -> None:
        self._ctr("images", "tag", "--force", name, alias)

    def forget(self, *names: str) -> None:
        """Layers that no other image has go with them."""
        self._ctr("images", "remove", *(self.images() & set(names)))

    def _ctr(self, *arguments: str) -> str:
        return ctr(self.folder, *arguments)


def ctr(folder: pathlib.Path, *arguments: str) -> str:
    """What containerd's client prints. Raises RuntimeError with its complaint."""
    program = str(controlplane.cache() / "ctr")
    command = [program, f"--address={folder}/containerd.sock", "--namespace=k8s.io", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if result.returncode:
        raise RuntimeError(f"ctr {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def prepare() -> None:
    """Build what is missing: a quarter of an hour on two cores, once. Raises Unavailable where that cannot be done."""
    if os.geteuid() != 0:
        raise controlplane.Unavailable("a node needs root: namespaces, mounts and cgroups")
    if missing := sorted(package for program, package in PACKAGES.items() if shutil.which(program) is None):
        raise controlplane.Unavailable(f"a node needs more programs; Debian: apt-get install {' '.join(missing)}")
    controlplane.prepare()
    programs = controlplane.cache()
    if not all((programs / name).exists() for name in PROGRAMS):
        subprocess.run(["bash", str(controlplane.BUILD), "node"], stdin=subprocess.DEVNULL)
    if not all((programs / name).exists() for name in PROGRAMS):
        raise controlplane.Unavailable(
            "no containerd: install Go 1.26 or newer, so that tests/cluster/build.sh can build it"
        )


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[Node]:
    """The node, ready and with DNS; it ends with the block, and with this process however that ends. Images stay in the
    cache for the next one. `folder` holds the logs; its path is short, as those of sockets must be."""
    log = folder / "node.log"
    inside = [sys.executable, "-m", "tests.node", "--inside", str(folder)]
    namespaces = ["--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kernel_settings_kept())
        stack.enter_context(_cgroups())
        process = stack.enter_context(daemons.running(["unshare", *namespaces, *inside], log))
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        daemons.wait_until(lambda: bool(children.read_text().strip()), process, log, 10)
        first = int(children.read_text().split()[0])
        stack.callback(_end, process, first)
        stack.enter_context(_connected(first))
        daemons.wait_until((folder / "ready").exists, process, log, START_LIMIT_S)
        kubectl = str(controlplane.cache() / "kubectl")
        yield Node(folder, folder / "admin.kubeconfig", kubectl, folder / "kubelet.kubeconfig")


def _end(process: "subprocess.Popen[bytes]", first: int) -> None:
    """Until all are gone: with the first process of the namespace the kernel ends the others."""
    process.kill()
    until(lambda: not pathlib.Path(f"/proc/{first}").exists(), "the end of the node's processes", 60)


@contextlib.contextmanager
def _connected(process: int) -> Iterator[None]:
    """A pair of virtual devices from here into the network namespace of `process`."""
    _ip(f"link add {DEVICE} type veth peer name node0 netns {process}")
    try:
        _ip(f"addr add {HOST}/30 dev {DEVICE}")
        _ip(f"link set {DEVICE} up")
        yield
    finally:
        # The kernel may keep the namespace, and with it the pair, for a while after its last process.
        _ip(f"link delete {DEVICE}")


def _ip(arguments: str) -> None:
    result = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"ip {arguments}: {result.stderr.strip()} (one node at a time: is another running?)")


@contextlib.contextmanager
def _kernel_settings_kept() -> Iterator[None]:
    before = {name: pathlib.Path("/proc/sys", name).read_text() for name in KERNEL_SETTINGS}
    try:
        yield
    finally:
        for name, value in before.items():
            pathlib.Path("/proc/sys", name).write_text(value)


@contextlib.contextmanager
def _cgroups() -> Iterator[None]:
    """A root of the pods' own control groups in each hierarchy (tried with version 1 only)."""
    top = pathlib.Path("/sys/fs/cgroup")
    folders = [each / CGROUP for each in (top, *top.iterdir()) if (each / "cgroup.procs").exists()]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):  # a new group of version 1 has neither
            if (folder.parent / file).exists():
                (folder / file).write_text((folder.parent / file).read_text())
    try:
        yield
    finally:
        for folder in folders:
            command = ["find", str(folder), "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]
            subprocess.run(command, capture_output=True)


def inside(folder: pathlib.Path) -> None:
    """The first process of the node's namespaces: starts the others, then waits for the end of one of them."""
    programs = controlplane.cache()
    subprocess.run(["bash", str(NAMESPACE), str(folder), ADDRESS, SERVICES], check=True)
    _write_configuration(folder)
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(controlplane.running(folder, node_address=ADDRESS))
        names: dict[int, str] = {}

        def start(program: str, *flags: str) -> None:
            command = [str(programs / program), *flags]
            names[stack.enter_context(daemons.running(command, folder / f"{program}.log")).pid] = program

        start("containerd", f"--config={folder}/containerd.toml")
        until(lambda: _works(ctr, folder, "version"), "containerd", START_LIMIT_S)
        if PAUSE not in ctr(folder, "images", "list", "--quiet"):
            ctr(folder, "images", "import", str(pack(programs / "pause", PAUSE, folder)))
        start(
            "kubelet",
            f"--config={folder}/kubelet.json",
            f"--kubeconfig={plane.kubelet_kubeconfig}",
            f"--hostname-override={NAME}",
            f"--node-ip={ADDRESS}",
            f"--root-dir={folder}/kubelet",
        )
        start("kube-proxy", f"--config={folder}/kube-proxy.json")
        start("coredns", "-conf", f"{folder}/Corefile")
        until(lambda: _ready(plane), f"{NAME} is Ready", START_LIMIT_S)
        (folder / "ready").touch()
        # Orphans end here too, and are reaped.
        while (ended := os.wait()[0]) not in names:
            pass
        raise RuntimeError(f"{names[ended]} ended; see its log in {folder}")


def pack(program: pathlib.Path, name: str, folder: pathlib.Path) -> pathlib.Path:
    """An archive in `folder`, as `docker save` writes it, of an image that holds one static program at the top."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    with tempfile.TemporaryDirectory(dir=folder) as parts:
        layer = pathlib.Path(parts, "layer.tar")
        with tarfile.open(layer, "w") as tar:
            tar.add(program, program.name)
        digest = hashlib.sha256(layer.read_bytes()).hexdigest()
        content = {"rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}
        content["config"] = {"Entrypoint": [f"/{program.name}"]}
        texts = {
            "manifest.json": [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}],
            "config.json": {"os": "linux", "architecture": machine} | content,
        }
        for file, text in texts.items():
            pathlib.Path(parts, file).write_text(json.dumps(text))
        archive = folder / f"{program.name}.tar"
        with tarfile.open(archive, "w") as tar:
            for file in (*texts, "layer.tar"):
                tar.add(pathlib.Path(parts, file), file)
    return archive


def _works(call: Any, *arguments: Any) -> bool:
    with contextlib.suppress(RuntimeError):
        call(*arguments)
        return True
    return False


def _ready(plane: controlplane.ControlPlane) -> bool:
    node = plane.api.find("Node", NAME) or {}
    conditions = node.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _write_configuration(folder: pathlib.Path) -> None:
    (folder / "cni").mkdir()
    # No name server outside the cluster.
    (folder / "resolv.conf").write_text("")
    (folder / "containerd.toml").write_text(_containerd(folder))
    services = f"kubernetes cluster.local in-addr.arpa ip6.arpa {{\n kubeconfig {folder}/kubelet.kubeconfig\n ttl 5\n}}"
    (folder / "Corefile").write_text(f".:53 {{\nerrors\ncache 5\n{services}\n}}\n")
    (folder / "cni" / "pods.conflist").write_text(json.dumps(_network()))
    (folder / "kubelet.json").write_text(json.dumps(_kubelet(folder)))
    (folder / "kube-proxy.json").write_text(json.dumps(_proxy(folder)))


def _containerd(folder: pathlib.Path) -> str:
    """Images stay in the cache; what runs does not."""
    programs = controlplane.cache()
    return f"""
version = 3
root = "{programs.parent}/containerd"
state = "/run/containerd"
[grpc]
  address = "{folder}/containerd.sock"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true # a container may lack the right to lower it
  disable_apparmor = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    runtime_path = "{programs}/containerd-shim-runc-v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = "{shutil.which("runc")}"
      SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{programs}"]
    conf_dir = "{folder}/cni"
"""


def _network() -> dict[str, Any]:
    addresses = {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": PODS}]]}
    bridge = {"type": "bridge", "bridge": "cni0", "isDefaultGateway": True, "hairpinMode": True, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def _kubelet(folder: pathlib.Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,
        "resolvConf": f"{folder}/resolv.conf",
        "clusterDomain": "cluster.local",
        "clusterDNS": [ADDRESS],
        # Nobody but the API server and this machine reaches the port.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1Gi", "imagefs.available": "1Gi"},
    }


def _proxy(folder: pathlib.Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{folder}/kubelet.kubeconfig"},
        "mode": "nftables",
        "hostnameOverride": NAME,
        "clusterCIDR": PODS,
        "oomScoreAdj": 0,
        # Only the first network namespace may set these.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--inside"]:
        inside(pathlib.Path(arguments[1]))
        return
    prepare()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="node-") as folder,
        running(pathlib.Path(folder)) as node,
    ):
        print(f"export MILES_TEST_KUBECONFIG={node.kubeconfig}", flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1:])
