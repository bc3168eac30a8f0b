"""pipeline.learner on one rank: what a step changes, and what it does not compute."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from pipeline import batching
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.config import CorrectionConfig
from pipeline.learner import Learner
from tests import policies
from tests.batches import batch_of, random_batch

GROUPS = [([1, 2, 3], [[4, 5], [6, 7]]), ([8, 9], [[10, 11, 12], [13]]), ([14, 15, 16], [[17], [18, 19]])]
"""The second group has rewards that differ."""
MIXED = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
EQUAL = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return policies.save_model("llama", tmp_path_factory.mktemp("model") / "llama")


def learner_of(folder, *, lora=policies.LORA, **algorithm) -> Learner:
    config = policies.run_config(folder, lora=lora)
    own = ALGORITHMS[algorithm.get("type", "grpo")]
    changes = {"learning_rate": 0.01, **own.defaults, "parameters": own.parameters, **algorithm}
    changed = config.algorithm.model_copy(update=changes)
    return Learner(config.model_copy(update={"algorithm": changed}), torch.device("cpu"))


@pytest.fixture
def learner(folder):
    return learner_of(folder)


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in learner.parameters.values()])


def trained(learner: Learner, rewards: list[float]) -> dict[str, float]:
    return learner.update(batch_of(GROUPS, rewards=rewards), step=1, stop=lambda: False)


@pytest.fixture
def packed(monkeypatch):
    """Counts of samples that were given to `pack`."""
    counts = []
    pack = batching.pack

    def counting(batch, include, ranks, limit):
        counts.append(int(include.sum()))
        return pack(batch, include, ranks, limit)

    monkeypatch.setattr(batching, "pack", counting)
    return counts


def test_groups_without_spread_cost_no_pass_and_change_neither_loss_nor_step(learner, packed, monkeypatch):
    row = trained(learner, MIXED)
    everything = Learner(learner.config, torch.device("cpu"))
    monkeypatch.setattr(everything, "_matters", lambda batch, trained: batch.valid)
    expected = trained(everything, MIXED)
    assert packed == [2, 6]
    for name in ("loss/policy", "actor/grad_norm", "reward/mean", "perf/samples"):
        assert row[name] == pytest.approx(expected[name], rel=1e-5), name
    assert torch.allclose(weights(learner), weights(everything), atol=1e-6)


def test_a_step_of_groups_without_spread_changes_nothing_and_reports_no_means(learner, packed):
    before = weights(learner)
    row = trained(learner, EQUAL)
    assert packed == [0]
    assert torch.equal(weights(learner), before)
    assert (row["actor/grad_norm"], row["loss/policy"], row["reward/frac_zero_std"]) == (0.0, 0.0, 1.0)
    assert "mismatch/kl" not in row
    assert "loss/entropy" not in row


@pytest.mark.parametrize("changes", [{"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}], ids=["kl", "entropy"])
def test_with_a_term_that_needs_no_advantage_every_sample_is_passed(folder, packed, changes):
    learner = learner_of(folder, **changes)
    trained(learner, MIXED)
    assert packed == [6]
    assert np.isfinite(weights(learner).numpy()).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_a_step_and_makes_the_better_sample_likelier(folder, name):
    learner = learner_of(folder, type=name)
    batch = dataclasses.replace(batch_of(GROUPS, rewards=MIXED), baselines=np.array([1.0, 1.0, 0.5, 0.5, 0.0, 0.0]))
    (part,) = batching.pack(batch, batch.groups == 1, 1, 4096)[0]
    before = learner.policy.score(part)
    row = learner.update(batch, 1, lambda: False)
    assert (row["actor/skipped"], row["actor/grad_norm"] > 0) == (0.0, True)
    change = (learner.policy.score(part) - before).numpy()
    good = batch.rewards[part.row] == 1.0
    assert change[good].sum() > change[~good].sum()


def test_entropy_rises_with_its_bonus(folder):
    entropies = []
    learner = learner_of(folder, entropy_coefficient=1.0)
    for step in range(1, 6):
        row = learner.update(batch_of(GROUPS, rewards=EQUAL), step, lambda: False)
        entropies.append(row["loss/entropy"])
    assert entropies[-1] > entropies[0] + 0.01


def test_the_policy_may_go_further_from_its_base_the_smaller_the_coefficient_and_it_outlives_a_restart(folder):
    adaptive = {"kl_coefficient": 0.5, "kl_target": 1e-3, "kl_horizon": 60}
    learner = learner_of(folder, **adaptive)
    first, second = (
        learner.update(batch_of(GROUPS, rewards=MIXED), step, lambda: False)["actor/kl_coefficient"] for step in (1, 2)
    )
    assert (first, second) == (0.5, pytest.approx(0.5 * (1 - 0.2 * 6 / 60)))  # no distance yet: the error is −1, cut
    resumed = learner_of(folder, **adaptive)
    resumed.restore(json.loads(json.dumps(learner.state())))
    assert resumed.kl_coefficient == learner.kl_coefficient != second
    fixed = learner_of(folder, kl_coefficient=0.1)
    fixed.restore(learner.state())
    assert fixed.kl_coefficient == 0.1, "a coefficient that an edit of the job has set"


def test_truncated_samples_are_left_out_of_loss_and_denominators_where_that_is_asked_for(folder, packed):
    batch = batch_of(GROUPS, rewards=MIXED)
    cut = dataclasses.replace(batch, truncated=np.array([0, 0, 1, 0, 0, 0], bool))
    plain = learner_of(folder, type="dapo").update(cut, 1, lambda: False)
    masked = learner_of(
        folder, type="dapo", parameters=ALGORITHMS["dapo"].parameters | {"mask_truncated": True}
    ).update(cut, 1, lambda: False)
    assert packed == [2, 1]
    assert masked["advantage/std"] == plain["advantage/std"], "it still counts in its group"
    assert masked["loss/policy"] != pytest.approx(plain["loss/policy"])
    packed.clear()
    with_kl = {"kl_coefficient": 0.1, "kl_placement": "reward", "correction": CorrectionConfig(type="none")}
    parameters = ALGORITHMS["dapo"].parameters | {"mask_truncated": True}
    learner_of(folder, type="dapo", parameters=parameters, **with_kl).update(cut, 1, lambda: False)
    assert packed == [6], "its penalty counts in its group, too"


def test_bypassing_the_old_policy_saves_its_pass(folder, monkeypatch):
    learner = learner_of(folder, correction=CorrectionConfig(bypass=True), updates_per_step=3)
    monkeypatch.setattr(learner.policy, "score", None)
    assert learner.update(batch_of(GROUPS, rewards=MIXED), 1, lambda: False)["actor/skipped"] == 0.0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lora", [None, policies.LORA], ids=["full", "lora"])
def test_compiled_layers_are_not_compiled_again_over_fifty_steps_of_varying_lengths(tmp_path, monkeypatch, lora):
    # What is compiled anew is Dynamo's and autograd's affair; C++ would only take longer.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    folder = policies.save_model("llama", tmp_path / "llama")
    config = policies.run_config(folder, lora=lora, compile=True, max_tokens_per_micro_batch=100)
    learner = Learner(config, torch.device("cpu"))
    compiled = []
    for step in range(1, 53):
        batch = random_batch(step % 5 + 1, step % 3 + 2, prompt=(2, 30), completion=(2, 40), vocabulary=64, seed=step)
        learner.update(batch, step=1, stop=lambda: False)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[1] > 0
    assert compiled[-1] == compiled[1]
    assert not torch._dynamo.utils.counters["recompile_limit"]
