"""What `miles render` prints is taken by a real API server: strictly validated, admitted as "restricted", stable."""

import pathlib

import pytest
import yaml

from operators import cli
from tests import apiserver
from tests.test_spec import EVERYTHING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not apiserver.available(), reason="needs etcd, kube-apiserver and kubectl (KUBEBUILDER_ASSETS)"),
]
SAMPLES = pathlib.Path(__file__).parent.parent / "manifests" / "samples"
RESTRICTED = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with apiserver.running(tmp_path_factory.mktemp("apiserver")) as server:
        assert server.kubectl("label", "namespace", "default", *RESTRICTED).returncode == 0
        yield server


@pytest.fixture(params=["everything", "reward", "s3", "gpu-7b", "multinode-70b-lora"])
def rendered(request, tmp_path, capsys) -> str:
    file = tmp_path / "everything.yaml"
    file.write_text(EVERYTHING)
    assert cli.main(["render", str(file if request.param == "everything" else SAMPLES / f"{request.param}.yaml")]) == 0
    return capsys.readouterr().out


def test_every_object_is_accepted_without_a_warning_and_a_second_apply_changes_nothing(server, rendered):
    for apply in (["apply", "--server-side"], ["diff", "--server-side"]):
        result = server.kubectl(*apply, "-f", "-", text=rendered)
        assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert server.kubectl("delete", "-f", "-", text=rendered).returncode == 0


def test_pods_are_admitted_in_a_restricted_namespace(server, rendered):
    workloads = [item for item in yaml.safe_load_all(rendered) if item["kind"] in ("Deployment", "Job")]
    for workload in workloads:
        pod = workload["spec"]["template"] | {"apiVersion": "v1", "kind": "Pod"}
        pod["metadata"] = pod["metadata"] | {"name": workload["metadata"]["name"]}
        pod["spec"].pop("priorityClassName", None)  # the cluster's own, not ours to make
        result = server.kubectl("create", "--dry-run=server", "-f", "-", text=yaml.safe_dump(pod))
        assert (result.returncode, result.stderr) == (0, "")
