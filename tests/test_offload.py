"""trainer.offload: from the CPU's memory all is trained as from elsewhere, and what is meant lies there.

On a CPU both memories are one: what is seen here is FSDP2's way through its offloading, not the way to a GPU.
"""

import pathlib
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from pipeline import distributed
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.learner import Learner
from pipeline.model import Policy
from tests import gloo, policies
from tests.batches import random_batch

CASES = {"full": (None, ("none", "reference", "all")), "lora": (policies.LORA, ("none", "all"))}
"""Adapter, and what may be offloaded. Each has critic and reference."""
BATCH = random_batch(4, 2, prompt=(2, 5), completion=(2, 6), vocabulary=policies.VOCABULARY)


def learner_of(folder: pathlib.Path, case: str, offload: str) -> Learner:
    lora, _ = CASES[case]
    config = policies.run_config(folder, lora=lora, offload=offload, dtype="float32", max_tokens_per_micro_batch=24)
    changes = {"type": "ppo", "parameters": ALGORITHMS["ppo"].parameters, "learning_rate": 1e-3, "kl_coefficient": 0.1}
    changed = config.algorithm.model_copy(update=changes)
    return Learner(config.model_copy(update={"algorithm": changed}), distributed.CPU)


def trained(folder: pathlib.Path, case: str, offload: str) -> dict[str, Any]:
    """What two steps log and leave, and which of the models are offloaded."""
    learner = learner_of(folder, case, offload)
    rows = [learner.update(BATCH, step, lambda: False) for step in (1, 2)]
    tensors = {name: tensor.clone() for name, tensor in distributed.gathered(learner.tensors())}
    own = {learner.roles.policy, learner.roles.critic} - {None}
    return {
        "rows": [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows],
        "tensors": tensors,
        "offloaded": {name: [offloaded(each) for each in models] for name, models in
                      (("trained", own), ("frozen", learner.roles.models - own))},
    }  # fmt: skip


def offloaded(policy: Policy) -> bool:
    groups = [
        group
        for module in policy.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    places = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups}
    assert len(places) <= 1
    if places == {True}:
        held = {parameter for group in groups for parameter in group.fsdp_params}
        assert len({id(parameter.sharded_param) for parameter in held}) == len(list(policy.parameters()))
    return places == {True}


def all_of(folder: pathlib.Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(case, offload): trained(folder, case, offload) for case in CASES for offload in CASES[case][1]}


def on_rank(folder: pathlib.Path) -> None:
    torch.save(all_of(folder), folder / f"rank{distributed.rank()}.pt")


def check(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    for (case, offload), result in found.items():
        places = result["offloaded"]
        assert set(places["trained"]) == {offload == "all"}, (case, offload)
        assert set(places["frozen"]) <= {offload != "none"}, (case, offload)
        assert bool(places["frozen"]) == (case != "lora")
        plain = found[case, "none"]
        for row, expected in zip(result["rows"], plain["rows"], strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-7), (case, offload)
        assert result["tensors"].keys() == plain["tensors"].keys()
        for name, tensor in result["tensors"].items():
            torch.testing.assert_close(tensor, plain["tensors"][name], rtol=1e-5, atol=1e-7, msg=f"{case} {name}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_one_rank_trains_the_same_from_the_cpus_memory(tmp_path):
    folder = policies.save_model("llama", tmp_path / "model")
    distributed.start()
    try:
        check(all_of(folder))
    finally:
        distributed.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_train_the_same_from_the_cpus_memory(tmp_path):
    folder = policies.save_model("llama", tmp_path / "model")
    gloo.run(on_rank, folder)
    check(torch.load(folder / "rank0.pt", weights_only=False))
