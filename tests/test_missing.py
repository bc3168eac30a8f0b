"""operators.missing: `miles validate` warns of what this machine lacks, and calls the job valid all the same."""

import subprocess
import sys

import pytest

from operators import cli, manifest
from operators.missing import missing
from operators.resolve import Platform, run_config
from tests.test_spec import MINIMAL

SETS = "      - generator: reasoning-gym/chain_sum\n"
REWARD = "  rewards: [{name: correct, library: math-verify}]\n"
assert SETS in MINIMAL


@pytest.fixture
def file(tmp_path):
    def write(sets: str, more: str = "") -> str:
        path = tmp_path / "job.yaml"
        path.write_text(MINIMAL.replace(SETS, "".join(f"      - {entry}\n" for entry in sets.split("\n"))) + more)
        return str(path)

    return write


def test_what_a_run_would_refuse_is_a_warning_for_each_set_and_changes_no_verdict(file, tmp_path, capfd):
    (tmp_path / "good.jsonl").write_text('{"prompt": "2 + 2 =", "answer": "4"}\n')
    sets = """{generator: reasoning-gym/chain_sums}
{generator: reasoning-gym/chain_sum, parameters: {max_digts: 1}}
{generator: reasoning-gym/chain_sum, name: good, parameters: {max_digits: 1}}
{uri: file://./none.jsonl}
{uri: file://./good.jsonl, name: here}
{uri: s3://elsewhere/none.jsonl, name: elsewhere}"""
    more = "  evaluation: {sets: [{generator: reasoning-gym/leg_counter, limit: 9}]}\n"
    path = file(sets, more + "  rewards: [{name: mine, function: mine.py:own}]\n")
    assert cli.main(["validate", path]) == 0
    out, err = capfd.readouterr()
    assert out == f"{path}: RLJob arithmetic is valid\n"
    expected = (
        ("rewards[0].function", "mine.py: No such file or directory"),
        ("data.sets[0]", "there is no such task; did you mean chain_sum, "),
        ("data.sets[1]", "there is no parameter max_digts; did you mean max_digits, "),
        ("data.sets[3]", "none.jsonl: [Errno 2] No such file or directory"),
        ("evaluation.sets[0]", "there is no such task; did you mean leg_counting"),
    )
    for line, (field, problem) in zip(err.splitlines(), expected, strict=True):
        assert line.startswith(f"{path}: warning: spec.{field}: ")
        assert problem in line


@pytest.mark.parametrize("content", [None, "def own(completion): return 1.0\n"])
def test_a_file_from_a_config_map_need_not_lie_here(file, tmp_path, content):
    if content:
        (tmp_path / "mine.py").write_text(content)
    reward = "  rewards: [{name: mine, function: mine.py:own, from: {configMap: rewards}}]\n"
    job = manifest.load_one(file("{uri: s3://elsewhere/prompts.jsonl}", reward))
    assert missing(job, str(tmp_path)) == []


def test_where_the_generators_package_is_not_installed_nothing_is_said_of_it(file):
    job = manifest.load_one(file("{generator: reasoning-gym/chain_sums}\n{uri: file:///none.jsonl}", REWARD))
    program = """
import sys
sys.modules["reasoning_gym"] = None
from pipeline.prompts.__main__ import main
main()
assert "torch" not in sys.modules
"""
    config = run_config(job, "validate", Platform(local=True)).model_dump_json()
    done = subprocess.run([sys.executable, "-c", program], input=config, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert done.stdout.startswith("data.sets[1]: data set none: cannot read")
