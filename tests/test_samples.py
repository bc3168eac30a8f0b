"""Every sample is a valid job, and has the children that its kind of machine needs."""

import importlib.util
import pathlib

import pytest

from operators import manifest, rules
from operators.children import children
from operators.resolve import Platform
from pipeline.config import RunConfig

FOLDER = pathlib.Path(__file__).parent.parent / "manifests" / "samples"
SAMPLES = sorted(FOLDER.glob("*.yaml"))
ON_ONE_MACHINE = ("tiny", "demo", "full", "reward-model", "environment", "replay")


def platform(path: pathlib.Path) -> Platform:
    return Platform(local=path.stem in ON_ONE_MACHINE, cpus=2, folder=str(path.parent))


def test_there_are_samples():
    assert {path.stem for path in SAMPLES} >= {*ON_ONE_MACHINE, "reward", "s3", "gpu-7b", "multinode-70b-lora"}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_valid_and_can_run_in_this_release(path):
    job, warnings = manifest.load_to_run(str(path))
    assert list(rules.broken(job)) == []
    assert warnings == []


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_has_children_whose_configuration_can_be_read(path):
    objects = children(manifest.load_one(str(path)), run_id="r", platform=platform(path))
    (mounted,) = (child for child in objects if child["kind"] == "ConfigMap")
    config = RunConfig.model_validate_json(mounted["data"]["run.json"])
    assert config.name == manifest.load_one(str(path)).metadata.name


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_listed_in_the_readme(path):
    assert f"[{path.name}]({path.name})" in (FOLDER / "README.md").read_text()


def test_the_reward_functions_that_samples_name_exist():
    specification = importlib.util.spec_from_file_location("rewards", FOLDER / "rewards.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    named = [
        reward.function for path in SAMPLES for reward in manifest.load_one(str(path)).spec.rewards if reward.function
    ]
    assert named
    assert all(hasattr(module, function.removeprefix("rewards.py:")) for function in named)


def test_the_reward_functions_score_as_they_say():
    specification = importlib.util.spec_from_file_location("rewards", FOLDER / "rewards.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert (module.share_of_digits("12ab"), module.share_of_digits("")) == (0.5, 0.0)
    assert (module.last_number("4 + 3 = 7", "7"), module.last_number("seven", "7")) == (1.0, 0.0)
    assert module.brevity(16, 64) == 0.75
