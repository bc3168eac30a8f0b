"""pipeline.launch: a user's error costs seconds and one line; exit codes of ranks come through torchrun."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline import launch, termination
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.config import RunConfig
from pipeline.storage import Unavailable

PPO = {"type": "ppo", "total_steps": 4, "prompts_per_step": 2, "group_size": 1}


@pytest.fixture
def content(tmp_path):
    """A valid configuration, as JSON content, with a model folder that looks complete."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    save_file({"norm": np.zeros(1, np.float32)}, model / "model.safetensors")
    (model / "tokenizer.json").write_text('{"model": {}}')
    return {
        "name": "sums",
        "run_id": "r1",
        "model": {"uri": str(model), "path": str(model)},
        "data": {"sets": [{"name": "sums", "generator": "reasoning-gym/chain_sum"}]},
        "rewards": [{"name": "correct", "library": "generator"}],
        "algorithm": {"type": "grpo", "total_steps": 4, "prompts_per_step": 2, "group_size": 4}
        | {"parameters": {"dual_clip": 0, "dynamic_sampling": False}},
        "store": {"uri": f"file://{tmp_path}/store"},
    }


def edit(content, path, value):
    *parents, last = path.split(".")
    place = content
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value


def test_a_valid_configuration_passes_every_check(content):
    launch.check(RunConfig.model_validate(content))


def test_a_store_that_does_not_answer_may_be_tried_again(content, tmp_path, monkeypatch, capsys):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(content))
    monkeypatch.setenv("MILES_CONFIG", str(file))

    async def outage(storage):
        raise Unavailable("store s3://miles does not answer")

    monkeypatch.setattr(launch, "probe", outage)
    with pytest.raises(SystemExit) as end:
        launch.main()
    assert end.value.code == termination.FAILED
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("algorithm.type", "gpro", "algorithm.type: 'gpro' is not available; choose one of .*grpo"),
        ("algorithm.group_size", 1, "algorithm.group_size: 1 is too small"),
        ("algorithm.updates_per_step", 3, "algorithm.updates_per_step: 3 does not divide"),
        ("algorithm.parameters.gamma", 1.0, "algorithm.parameters.gamma: unknown to grpo; known are dual_clip"),
        ("algorithm.parameters", {"dual_clip": 3}, r"\.dynamic_sampling: got null; grpo needs true or false, .* false"),
        ("algorithm.parameters.dynamic_sampling", 1, "got 1; grpo needs true or false"),
        ("algorithm.parameters.dual_clip", True, "got true; grpo needs a number, at least 0, such as its default, 0.0"),
        ("algorithm.parameters.dual_clip", -1, "got -1; grpo needs a number, at least 0"),
        ("algorithm.parameters.dual_clip", float("nan"), "dual_clip: got NaN; grpo needs a number"),
        ("algorithm.parameters.dual_clip", 0.5, "dual_clip: got 0.5; give 0, or above 1"),
        ("algorithm", PPO | {"parameters": ALGORITHMS["ppo"].parameters | {"gamma": 1.5}}, "got 1.5; give at most 1"),
        ("model.path", "/nowhere", "model.path: /nowhere holds no config.json; fetch the model first"),
        ("store.uri", "ftp://somewhere", "ftp://somewhere"),
    ],
)
def test_a_users_error_names_the_field_and_the_remedy(content, field, value, message):
    edit(content, field, value)
    with pytest.raises(ValueError, match=message):
        launch.check(RunConfig.model_validate(content))


def test_each_attempt_leaves_its_configuration_in_the_store_and_the_first_one_names_the_run(content, tmp_path):
    launch.check(RunConfig.model_validate(content))
    content |= {"attempt": 1, "name": "edited"}
    launch.check(RunConfig.model_validate(content))
    launch.check(RunConfig.model_validate(content))  # the same attempt, restarted
    store = tmp_path / "store"
    assert json.loads((store / "run.json").read_text())["config"]["name"] == "sums"
    assert json.loads((store / "attempts" / "1.json").read_text())["config"]["name"] == "edited"


def test_weights_that_are_missing_or_no_safetensors_are_named(content):
    model = pathlib.Path(content["model"]["path"])
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"model\.path: .* has no file 'model\.safetensors' .* safetensors alone are read"
    ):
        launch.check(RunConfig.model_validate(content))
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(ValueError, match=r"no file 'model-1\.safetensors'"):
        launch.check(RunConfig.model_validate(content))


@pytest.mark.parametrize("broken", ["", "[]", "null", '{"architectures": [1]}'])
def test_a_broken_configuration_of_a_model_is_named(content, broken):
    pathlib.Path(content["model"]["path"], "config.json").write_text(broken)
    with pytest.raises(ValueError, match=r"^model\.path: .*/config\.json"):
        launch.check(RunConfig.model_validate(content))


def test_an_embedding_model_is_refused(content):
    pathlib.Path(content["model"]["path"], "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(ValueError, match="not a causal language model"):
        launch.check(RunConfig.model_validate(content))


def test_an_output_place_with_another_runs_model_is_refused(content, tmp_path):
    output = tmp_path / "output"
    output.mkdir()
    (output / "MANIFEST.json").write_text('{"run_id": "other"}')
    content["output"] = {"uri": f"file://{output}"}
    with pytest.raises(ValueError, match="already holds the model of run other"):
        launch.check(RunConfig.model_validate(content))
    (output / "MANIFEST.json").write_text('{"run_id": "r1"}')
    launch.check(RunConfig.model_validate(content))


def start(tmp_path, config, *command, **environment):
    (tmp_path / "run.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return subprocess.Popen(
        [sys.executable, *(command or ("-m", "pipeline.launch"))],
        env={
            **os.environ,
            "MILES_CONFIG": str(tmp_path / "run.json"),
            "MILES_TERMINATION_LOG": str(tmp_path / "termination"),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_wrong_configuration_exits_3_with_one_line_and_no_traceback(content, tmp_path):
    edit(content, "algorithm.total_steps", "many")
    edit(content, "algorithm.typ", "grpo")
    process = start(tmp_path, content)
    _, errors = process.communicate(timeout=50)
    assert process.returncode == termination.USER_ERROR
    assert errors.count("\n") == 1
    assert "algorithm.total_steps: Input should be a valid integer" in errors
    assert "algorithm.typ: Extra inputs are not permitted" in errors
    assert (tmp_path / "termination").read_text() == errors


TORCHRUN = """
import sys
from pipeline import launch
sys.exit(launch.torchrun(["--nproc-per-node=2", "--max-restarts=0", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_exit_code_of_the_failing_rank_becomes_torchruns(content, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(5)\ntime.sleep(300)\n")
    process = start(tmp_path, content, "-c", TORCHRUN, str(script))
    process.communicate(timeout=150)
    assert process.returncode == termination.FENCED


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_stopped_by_sigterm_exits_4_once_its_ranks_have_said_so(content, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "from pipeline import termination\n"
        "def stop(*_):\n"
        "    termination.report('stopped on request at step 3')\n"
        "    sys.exit(4)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'ready' + os.environ['RANK']).touch()\n"
        "time.sleep(300)\n"
    )
    process = start(tmp_path, content, "-c", TORCHRUN, str(script), PYTHONPATH=os.getcwd())
    deadline = time.monotonic() + 90
    while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == termination.STOPPED
    assert "[rank 1] stopped on request at step 3" in (tmp_path / "termination").read_text()
