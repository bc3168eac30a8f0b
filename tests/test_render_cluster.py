"""What `miles render` prints is taken by a real API server: strictly validated, admitted as "restricted", stable."""

import pathlib
from collections.abc import Iterator

import pytest
import yaml

from operators import cli
from tests.controlplane import ControlPlane
from tests.kubeapi import until
from tests.test_spec import EVERYTHING

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(180)]
SAMPLES = pathlib.Path(__file__).parent.parent / "manifests" / "samples"
MODES = [f"pod-security.kubernetes.io/{mode}" for mode in ("enforce", "warn")]


@pytest.fixture(scope="module")
def server(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """Its namespace `default`, which the samples are for, takes only restricted pods."""
    label = ["label", "namespace", "default"]
    assert control_plane.kubectl(*label, *(f"{mode}=restricted" for mode in MODES)).returncode == 0
    yield control_plane
    assert control_plane.kubectl(*label, *(f"{mode}-" for mode in MODES)).returncode == 0


@pytest.fixture(params=["everything", "reward", "s3", "gpu-7b", "multinode-70b-lora"])
def rendered(request, tmp_path, capsys) -> str:
    file = tmp_path / "everything.yaml"
    file.write_text(EVERYTHING)
    assert cli.main(["render", str(file if request.param == "everything" else SAMPLES / f"{request.param}.yaml")]) == 0
    return capsys.readouterr().out


def test_every_object_is_accepted_without_a_warning_and_a_second_apply_changes_nothing(server, rendered):
    result = server.kubectl("apply", "--server-side", "-f", "-", text=rendered)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout

    def unchanged():  # once the controllers have written their first status
        result = server.kubectl("diff", "--server-side", "-f", "-", text=rendered)
        return (result.returncode, result.stderr) == (0, "")

    until(unchanged, "a second apply changes nothing", 20)
    assert server.kubectl("delete", "-f", "-", text=rendered).returncode == 0


def test_pods_are_admitted_in_a_restricted_namespace(server, rendered):
    workloads = [item for item in yaml.safe_load_all(rendered) if item["kind"] in ("Deployment", "Job")]
    for workload in workloads:
        pod = workload["spec"]["template"] | {"apiVersion": "v1", "kind": "Pod"}
        pod["metadata"] = pod["metadata"] | {"name": workload["metadata"]["name"]}
        pod["spec"].pop("priorityClassName", None)  # the cluster's own, not ours to make
        result = server.kubectl("create", "--dry-run=server", "-f", "-", text=yaml.safe_dump(pod))
        assert (result.returncode, result.stderr) == (0, "")
