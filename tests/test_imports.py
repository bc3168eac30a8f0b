"""What a process loads, seen from outside; the order among modules is lint-imports' part (setup.cfg)."""

import functools
import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "vllm", "transformers", "peft"}
ALL_OF = """
import importlib, json, pkgutil, sys
for package in {packages!r}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(json.dumps(sorted(sys.modules)))
"""


@functools.cache
def loaded(*packages: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after importing `packages` and everything below them."""
    command = [sys.executable, "-c", ALL_OF.format(packages=packages)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_operator_loads_neither_torch_nor_vllm():
    assert not loaded("operators") & HEAVY


def test_the_operator_sees_only_the_contracts_of_the_data_plane():
    registries = {f"pipeline.{name}.registry" for name in ("algorithms", "environments", "rewards")}
    seen = {name for name in loaded("operators") if name.startswith("pipeline.")}
    assert seen <= {"pipeline.config", "pipeline.where", *registries, *(name.rpartition(".")[0] for name in registries)}


def test_the_command_line_starts_without_packages_of_any_extra():
    assert not loaded("operators.cli") & {"kopf", "kubernetes", "rich", "aiohttp", "numpy", "pyarrow"}


@pytest.mark.parametrize("module", ["pipeline.config", "pipeline.where", "pipeline.algorithms.registry"])
def test_the_contracts_need_nothing_but_pydantic(module):
    assert not loaded(module) & {*HEAVY, "numpy", "pyarrow", "aiohttp", "yaml"}


def test_the_rollout_worker_is_free_of_torch():
    found = loaded("pipeline.rollout")
    assert not found & {*HEAVY, "pipeline.trainer"}
    assert {"pipeline.experience", "pipeline.prompts", "pipeline.weights"} <= found


def test_rewards_are_free_of_torch():
    assert not loaded("pipeline.rewards") & HEAVY
