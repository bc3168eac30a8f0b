"""pipeline.replay: steps of a real run, trained by the real trainer, come out again from its store."""

import asyncio
import json
import pathlib
import shutil
import sys

import pytest

from pipeline import archive, metrics, replay, weights
from pipeline.versions import Version
from tests.test_trainer import configure, one_thread, storage_of, tiny, train, worker  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one rank
STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny):  # noqa: F811
    """The folder of a finished run with checkpoints of steps 2, 4 and 6, of which the last two are kept. Its reward is
    normalised, by statistics that go from step to step."""
    folder = tmp_path_factory.mktemp("replay")
    config = configure(folder, tiny, rewards=[{"name": "low", "library": "generator", "normalize": True, "clip": 1.5}])
    with worker(config):
        train(config)
    (folder / "run.json").write_text(config.model_dump_json())
    return folder


def figures(config) -> list[dict]:
    """What of each step is no matter of the machine."""
    elsewhere = (*replay.ELSEWHERE, "time", "term")
    return [
        {name: value for name, value in row.items() if not name.startswith(elsewhere)}
        for row in asyncio.run(metrics.stored(storage_of(config)))
    ]


def test_a_run_trained_again_from_the_stored_samples_of_another_has_its_figures_and_no_worker(
    tiny,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    first = configure(tmp_path / "first", tiny)
    with worker(first):
        train(first)
    content = json.dumps({"config": first.model_dump(mode="json")}).encode()
    asyncio.run(storage_of(first).put("run.json", content))
    data = {"sets": [], "replay_from": {"uri": first.store.uri}}
    second = configure(tmp_path, tiny, "again", data=data, rewards=[])
    asyncio.run(archive.check(second, storage_of(second)))
    train(second)
    assert figures(second) == figures(first)
    assert len(figures(second)) == STEPS
    kept = {info.key.split("/")[0] for info in asyncio.run(storage_of(second).list(""))}
    assert "rollouts" not in kept
    assert asyncio.run(weights.published(storage_of(second))) == {Version(1, STEPS)}  # nobody loads the others
    (tmp_path / "run.json").write_text(second.model_dump_json())
    code, said = replayed(tmp_path, 5, monkeypatch, capsys)
    assert code == 0, said


def replayed(folder, step, monkeypatch, capsys, *options):
    monkeypatch.setattr(sys, "argv", ["miles replay", str(folder), "--step", str(step), *options])
    capsys.readouterr()  # what the training before had to say
    code = replay.main()
    said = capsys.readouterr()
    assert "Loading weights" not in said.err  # a bar of transformers
    return code, said


@pytest.mark.parametrize(
    ("step", "origin"),
    [(6, "checkpoint t000001-s00000000000000000004, after step 5"), (3, "the base model, after steps 1 to 2")],
)
def test_a_step_comes_out_as_it_was_logged(run, step, origin, monkeypatch, capsys):
    code, said = replayed(run, step, monkeypatch, capsys)
    assert code == 0, said
    assert f"sums: step {step}, from {origin}" in said.out
    assert "all figures are those that were logged" in said.out
    figures = {line.split()[0]: line.split()[1:] for line in said.out.splitlines() if "/" in line.split()[0]}
    assert {
        "loss/policy",
        "actor/grad_norm",
        "advantage/std",
        "reward/mean",
        "reward/low/running_std",
    } <= figures.keys()
    assert all(difference == "0.0e+00" for *_, difference in figures.values()), figures
    samples = [line.split() for line in said.out.splitlines() if line.split()[0].isdigit()]
    assert len(samples) == 2 * 4
    assert any(float(advantage) for _, _, _, advantage, *_ in samples)


def test_figures_that_were_not_logged_so_are_named(run, tiny, monkeypatch, capsys):  # noqa: F811
    storage = storage_of(configure(run, tiny))
    key = "metrics/v1/t000001-s00000000000000000005.json"
    row = asyncio.run(storage.get(key)).data
    asyncio.run(storage.put(key, json.dumps(json.loads(row) | {"actor/grad_norm": 1e6}).encode()))
    code, said = replayed(run, 5, monkeypatch, capsys)
    asyncio.run(storage.put(key, row))
    assert code == 1
    assert "different: actor/grad_norm (relative" in said.out


@pytest.mark.parametrize(
    ("step", "options", "words"),
    [
        (7, (), "--step: got 7; the run has planned steps 1 to 6"),
        (0, (), "--step: got 0; the run has planned steps 1 to 6"),
        (5, ("--model", "/nowhere"), "the base model is not in /nowhere; name its folder with --model"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(run, step, options, words, monkeypatch, capsys):
    code, said = replayed(run, step, monkeypatch, capsys, *options)
    assert (code, said.err) == (2, f"miles replay: {words}\n")


def test_rollouts_that_retention_has_deleted_are_named(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run / "run", tmp_path / "run")
    config = configure(tmp_path, json.loads((run / "run.json").read_text())["model"]["path"])
    (tmp_path / "run.json").write_text(config.model_dump_json())
    plan = next(
        content
        for file in sorted((tmp_path / "run" / "trainer" / "log").iterdir())
        if (content := json.loads(file.read_text())).get("step") == 2 and content["type"] == "plan"
    )
    for group in plan["groups"]:
        pathlib.Path(tmp_path / "run" / group["key"]).unlink(missing_ok=True)
    code, said = replayed(tmp_path, 3, monkeypatch, capsys)
    assert code == 2
    assert said.err.startswith(
        "miles replay: step 3 needs the rollouts of steps 1 to 3, since there is no checkpoint before it; those of 2"
    )
