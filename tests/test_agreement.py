"""`miles validate` and the API server give the same verdict on any RLJob file, and read the same job from it.

Known differences, all on the strict side of the command line unless said otherwise:
- the size of a job and of its free parameters, which CEL cannot see;
- what data.replayFrom.where says, whose grammar CEL does not know;
- a key given twice (kubectl takes the last one in silence), tags other than those of JSON's types (kubectl reads them
  as strings), what follows `...` (kubectl passes it over), a file above 1 MiB;
- metadata that the server keeps itself (finalizers, ownerReferences …) is checked by the server alone;
- whether the namespace exists, only the server knows.
"""

import collections
import os
import pathlib

import pytest
from hypothesis import HealthCheck, assume, given, settings

from operators import crd, manifest
from tests.judge import Judge, install
from tests.rljob_files import files

EXAMPLES = int(os.environ.get("AGREEMENT_FILES", "300"))
WITH_KUBECTL = EXAMPLES // 20 + 25
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120 + EXAMPLES)]
FILES = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.fixture(scope="module")
def judge(control_plane):
    install(control_plane.api, crd.definition())
    return Judge(control_plane.api)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("files") / "job.yaml"


@pytest.fixture(scope="module")
def valid():
    """Files so far, by whether they were valid for both."""
    found: collections.Counter[bool] = collections.Counter()
    yield found
    print(f"\nagreement on {found.total()} files, {found[True]} of them valid")


@settings(FILES, max_examples=EXAMPLES)
@given(text=files())
def test_command_line_and_server_give_one_verdict_and_read_one_job(judge, file, valid, text):
    valid[agree(judge, file, text)] += 1


@settings(FILES, max_examples=WITH_KUBECTL)
@given(text=files())
def test_the_judge_of_the_test_above_judges_as_kubectl_does(judge, control_plane, file, text):
    stored, reason = judge.verdict(text)
    assume("is given twice" not in reason)
    file.write_text(text, encoding="utf-8")
    result = control_plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(file))
    assert bool(stored) == (result.returncode == 0), f"judge: {reason or 'created'}\nkubectl: {result.stderr}"


def agree(judge: Judge, file: pathlib.Path, text: str) -> bool:
    """Whether the file is valid for both. Raises AssertionError where they differ."""
    file.write_text(text, encoding="utf-8")
    try:
        jobs, refusal = manifest.load(str(file)), ""
    except manifest.Invalid as error:
        jobs, refusal = [], str(error)
    stored, reason = judge.verdict(text)
    assume(not stored or "spec.data.replayFrom.where" not in refusal)
    assert bool(jobs) == bool(stored), f"command line: {refusal or 'valid'}\nserver: {reason or 'created'}"
    for job, item in zip(jobs, stored, strict=True):
        read, faults = manifest.check(item)
        assert read is not None, [str(fault) for fault in faults]
        assert read.spec == job.spec
        assert (read.metadata.labels, read.metadata.annotations) == (job.metadata.labels, job.metadata.annotations)
    return bool(jobs)
