"""The snippets of pipeline/README.md read a run's rollouts as they lie, in a folder and on S3."""

import pathlib
import re
import secrets

import pytest

from pipeline import codec
from pipeline.experience import Rollout, RolloutGroup
from pipeline.messages import shard_key
from pipeline.storage import open_storage
from pipeline.versions import Version

README = pathlib.Path(__file__).parent.parent / "pipeline/README.md"
SNIPPETS = {
    re.findall(r"^import (\w+)", code, re.MULTILINE)[0]: code
    for code in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
}
SAID = {
    "pandas": "four",
    "pyarrow": "4 samples, 8 tokens",
    "duckdb": "0.5",
    "polars": "four",
    "datasets": "num_rows: 4",
}
"""What each prints of the run below."""


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
async def run(request, tmp_path, monkeypatch) -> str:
    """A prefix with the shards of two writers: two groups each, half of their samples right."""
    place = str(tmp_path / "run")
    if request.param == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server").endpoint)
        place = f"s3://miles/{secrets.token_hex(8)}"
    storage = open_storage(place)
    for number, writer in enumerate("AB"):
        rollouts = [
            Rollout([7, 2], [-0.5, -0.1], text, "stop", reward, {"sum": reward}, None, [(0, Version(1, number))])
            for text, reward in [("five", 0.0), ("four", 1.0)]
        ]
        groups = [RolloutGroup(2 * number + n, "sums", "2 + 2 =", "4", [5, 9], rollouts, 0.0) for n in range(2)]
        await storage.create(shard_key(writer, 0), codec.encode(groups))
    return place


@pytest.mark.parametrize("library", SAID)
@pytest.mark.timeout(120)
def test_a_snippet_of_the_readme_reads_a_run(library, run, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    exec(compile(SNIPPETS[library].replace("RUN", run), str(README), "exec"), {})
    assert SAID[library] in capsys.readouterr().out


def test_every_snippet_of_the_readme_is_tried():
    assert SNIPPETS.keys() == SAID.keys()
