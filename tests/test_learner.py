"""pipeline.learner on one rank: what a step changes, and what it does not compute."""

import numpy as np
import pytest
import torch

from pipeline import batching
from pipeline.learner import Learner
from tests import policies
from tests.batches import batch_of

GROUPS = [([1, 2, 3], [[4, 5], [6, 7]]), ([8, 9], [[10, 11, 12], [13]]), ([14, 15, 16], [[17], [18, 19]])]
"""The second group has rewards that differ."""
MIXED = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
EQUAL = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]


@pytest.fixture
def learner(tmp_path):
    folder = policies.save_model("llama", tmp_path / "llama")
    config = policies.run_config(folder, lora=policies.LORA)
    algorithm = config.algorithm.model_copy(update={"learning_rate": 0.01})
    return Learner(config.model_copy(update={"algorithm": algorithm}), torch.device("cpu"))


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


def test_groups_without_spread_cost_no_pass_and_change_neither_loss_nor_step(tmp_path, learner, packed, monkeypatch):
    row = trained(learner, MIXED)
    everything = Learner(learner.config, torch.device("cpu"))
    monkeypatch.setattr(everything, "_matters", lambda batch: batch.valid)
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


def test_with_a_kl_term_every_sample_is_passed(learner, packed):
    algorithm = learner.config.algorithm.model_copy(update={"kl_coefficient": 0.1})
    with_kl = Learner(learner.config.model_copy(update={"algorithm": algorithm}), torch.device("cpu"))
    trained(with_kl, MIXED)
    assert packed == [6]
    assert np.isfinite(weights(with_kl).numpy()).all()
