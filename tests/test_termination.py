"""pipeline.termination: what a process leaves for whoever reads its termination message."""

import json

import pytest

from operators import statusport
from pipeline import termination


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(termination.FILE_VARIABLE, str(tmp_path / "termination"))
    return tmp_path / "termination"


def test_the_first_cause_stands_first_and_no_line_takes_all_the_room(file):
    termination.report("the store\ndoes not answer")
    termination.report("x" * 5000)
    lines = file.read_text().splitlines()
    assert lines[0] == "the store does not answer"
    assert [len(line) for line in lines[1:]] == [termination.LINE_LIMIT]


def test_the_last_report_is_one_line_that_the_operator_reads(file):
    termination.report("a warning")
    termination.conclude({"phase": "complete", "step": 20, "reward": {"correct": 0.5}})
    line = file.read_text().splitlines()[1]
    assert line.startswith(statusport.REPORT_PREFIX)
    assert json.loads(line.removeprefix(statusport.REPORT_PREFIX))["reward"] == {"correct": 0.5}


def test_of_a_long_report_the_plain_values_are_left(file):
    termination.conclude({"phase": "complete", "step": 20, "reward": {str(n): 0.5 for n in range(1000)}})
    assert file.stat().st_size < termination.REPORT_LIMIT
    assert json.loads(file.read_text().removeprefix(termination.REPORT_PREFIX)) == {"phase": "complete", "step": 20}


def test_without_a_file_nothing_is_left(monkeypatch):
    monkeypatch.delenv(termination.FILE_VARIABLE, raising=False)
    monkeypatch.setattr(termination, "KUBERNETES_FILE", "/nowhere/termination-log")
    termination.conclude({"phase": "complete"})
