import pathlib
import re

import pytest

from operators import manifest

BROKEN = sorted((pathlib.Path(__file__).parent / "broken").glob("*.yaml"))
MINIMAL = """\
apiVersion: miles.dev/v1alpha1
kind: RLJob
metadata:
  name: arithmetic
spec:
  model:
    uri: hf://HuggingFaceTB/SmolLM2-135M-Instruct
  data:
    sets:
      - generator: reasoning-gym/chain_sum
  algorithm:
    type: grpo
    totalSteps: 200
  store:
    uri: s3://team-a/miles
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_there_are_enough_broken_files():
    assert len(BROKEN) >= 35


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_broken_file_is_refused_with_one_line_per_fault(path):
    expected = re.findall(r"^# expect: (.*)$", path.read_text(), re.MULTILINE)
    with pytest.raises(manifest.Invalid) as error:
        manifest.load(str(path))
    assert error.value.lines == [f"{path}:{line}" for line in expected]
    assert all(line.isprintable() for line in error.value.lines)


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_a_fault_names_line_field_and_remedy(path):
    for line in re.findall(r"^# expect: (.*)$", path.read_text(), re.MULTILINE):
        assert re.match(r"\d+: \S.*", line)
        assert "pydantic" not in line
        assert "Traceback" not in line


def test_other_kinds_in_the_file_are_passed_over(write):
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: rewards}\n---\n" + MINIMAL
    assert [job.metadata.name for job in manifest.load(write(text))] == ["arithmetic"]


def test_an_object_as_the_api_server_returns_it_is_valid(write):
    live = "  name: arithmetic\n  uid: 0-1\n  generation: 3\n  managedFields: [{manager: kubectl}]\n"
    job = manifest.load_one(write(MINIMAL.replace("  name: arithmetic\n", live) + "status:\n  phase: Running\n"))
    assert job.metadata.uid == "0-1"


def test_a_key_without_a_value_counts_as_absent(write):
    assert manifest.load_one(write(MINIMAL + "  trainer:\n  rollout:\n    replicas: ~\n")).spec.rollout.replicas == 1


@pytest.mark.parametrize("uid", ["''", "a b", "x" * 64])
def test_a_uid_that_is_none_of_the_servers_counts_as_absent(write, uid):
    text = MINIMAL.replace("  name: arithmetic\n", f"  name: arithmetic\n  uid: {uid}\n")
    assert manifest.load_one(write(text)).metadata.uid is None


NULLS = """\
  rollout:
    resources: {limits: {cpu: ~, memory: 2Gi}}
    template: {nodeSelector: {a: ~}, annotations: {b: ~}}
"""


def test_entries_of_a_map_without_a_value_count_as_the_api_server_counts_them(write):
    labels = "  name: arithmetic\n  namespace: ''\n  labels: {team: ~}\n"
    job = manifest.load_one(write(MINIMAL.replace("  name: arithmetic\n", labels) + NULLS))
    assert job.metadata.labels == {"team": ""}
    assert job.metadata.namespace == "default"
    assert job.spec.rollout.resources.limits == {"memory": "2Gi"}
    assert (job.spec.rollout.template.node_selector, job.spec.rollout.template.annotations) == ({}, {})


@pytest.mark.parametrize(
    ("added", "fault"),
    [
        ("  foo: ~\n", "16: spec.foo: unknown field"),
        ("status: {phases: 5}\n", '16: status.phases: unknown field; did you mean "phase"?'),
        ("  rollout: {resources: {limits: {memory: '%s'}}}\n" % ("1" * 33), "16: spec.rollout.resources.limits.memory"),
        ('  rollout: {resources: {limits: {memory: "2Gi\\n"}}}\n', "16: spec.rollout.resources.limits.memory"),
        (
            "  rollout: {resources: {limits: {memory: 9223372036854775808}}}\n",
            "16: spec.rollout.resources.limits.memory",
        ),
        ("  rollout: {template: {nodeSelector: {%s: a}}}\n" % ("x" * 64), "16: spec.rollout.template.nodeSelector"),
        ("  rewards: [{name: a, library: length, weight: '1e999'}]\n", "16: spec.rewards[0].weight"),
    ],
)
def test_what_the_api_server_refuses_is_refused_here(write, added, fault):
    with pytest.raises(manifest.Invalid) as error:
        manifest.load(write(MINIMAL + added))
    assert f"job.yaml:{fault}" in str(error.value)


def test_a_missing_file_and_a_binary_file_are_refused_in_one_line(tmp_path):
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"a: 1\n\xff\xfe")
    for path, problem in (
        (tmp_path / "nowhere", "No such file or directory"),
        (binary, "not UTF-8; save the file as UTF-8"),
    ):
        with pytest.raises(manifest.Invalid, match=problem) as error:
            manifest.load(str(path))
        assert len(error.value.lines) == 1


def test_a_large_file_is_refused_without_parsing_it(write):
    prompts = "".join(f"        - {{prompt: {'x' * 1000}}}\n" for _ in range(1200))
    with pytest.raises(manifest.Invalid, match="larger than 1024 KiB; put prompts into the store"):
        manifest.load(write(MINIMAL + prompts))


def test_an_object_too_large_for_an_annotation_is_refused(write):
    env = "".join(f"        - {{name: V{number}, value: {'x' * 4096}}}\n" for number in range(32))
    text = MINIMAL + f"  rollout:\n    template:\n      env:\n{env}  trainer:\n    template:\n      env:\n{env}"
    with pytest.raises(
        manifest.Invalid, match=r"job.yaml:6: spec: got .* \(object\): the job has \d+ bytes, at most 131072"
    ):
        manifest.load(write(text))


def test_settings_from_the_command_line_take_the_place_of_fields(write):
    settings = ["spec.algorithm.learningRate=1e-5", "spec.trainer.nodes=2", "spec.data.sets[0].limit=8"]
    spec = manifest.load_one(write(MINIMAL), settings).spec
    assert (spec.algorithm.learning_rate, spec.trainer.nodes, spec.data.sets[0].limit) == ("1e-5", 2, 8)


@pytest.mark.parametrize(
    "setting", ["spec.trainer.nodes=two", "spec.trainer.node=2", "spec.data.sets[3].limit=1", "nonsense"]
)
def test_a_wrong_setting_is_refused_in_one_line(write, setting):
    with pytest.raises(manifest.Invalid) as error:
        manifest.load_one(write(MINIMAL), [setting])
    assert len(error.value.lines) == 1


def test_two_jobs_in_one_file_cannot_be_run_as_one(write):
    with pytest.raises(manifest.Invalid, match="a second RLJob"):
        manifest.load_one(write(MINIMAL + "---\n" + MINIMAL))


def test_a_job_that_this_release_cannot_run_is_refused_but_valid(write):
    path = write(MINIMAL.replace("spec:\n", "spec:\n  suspend: true\n"))
    assert manifest.load(path)
    with pytest.raises(manifest.Invalid, match=r"spec\.suspend: only in a cluster: set it to false"):
        manifest.load_to_run(path)


def test_what_is_ignored_without_harm_is_a_warning(write):
    _, warnings = manifest.load_to_run(write(MINIMAL + "  rollout: {spot: true, autoscale: {min: 1, max: 2}}\n"))
    assert [warning.partition(":")[0] for warning in warnings] == ["spec.rollout.autoscale", "spec.rollout.spot"]
    assert manifest.load_to_run(write(MINIMAL))[1] == []
