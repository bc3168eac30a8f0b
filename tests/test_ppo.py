"""PPO: generalised advantage estimation and the value loss by formula; the critic in training, and what it costs."""

import dataclasses

import numpy as np
import peft
import pytest
import safetensors.torch
import torch

from pipeline import batching
from pipeline.algorithms import ppo
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.algorithms.values import Targets, explained_variance, gae, value_loss
from pipeline.learner import Learner
from tests import policies
from tests.batches import batch_of
from tests.test_advantages import config_of, random_samples, samples_of
from tests.test_learner import GROUPS, MIXED, learner_of

PARAMETERS = ALGORITHMS["ppo"].parameters


# Advantages


def test_gae_skips_what_lies_behind_the_last_token():
    samples = samples_of([1], lengths=[3], values=[0.5, 0.4, 0.6])
    np.testing.assert_allclose(gae(samples, 1.0, 0.95), [0.451, 0.58, 0.4], rtol=1e-12)
    beside = samples_of([1, 7], valid=[1, 0], lengths=[3, 2], values=[0.5, 0.4, 0.6, 2, -1])
    np.testing.assert_allclose(gae(beside, 1.0, 0.95), [0.451, 0.58, 0.4, 0, 0], rtol=1e-12)
    untaught = samples_of([1], lengths=[3], values=[0, 0, 0])
    np.testing.assert_allclose(gae(untaught, 1.0, 0.95), [0.9025, 0.95, 1], rtol=1e-12)


def with_values(seed=0):
    samples = random_samples(seed)
    return dataclasses.replace(samples, values=np.random.default_rng(seed + 9).normal(size=samples.lengths.sum()))


def test_gae_counts_a_turns_reward_at_its_last_token_and_the_rest_at_the_samples():
    """Turns of two tokens and of one; of the reward 1.5 the first turn earned 0.5."""
    values = {"values": [0.5, 0.4, 0.6]}
    samples = samples_of([1.5], lengths=[3], credits=[0, 0.5, 0], **values)
    deltas = [0.4 - 0.5, 0.5 + 0.6 - 0.4, 1.0 - 0.6]
    expected = [deltas[0] + 0.9 * (deltas[1] + 0.9 * deltas[2]), deltas[1] + 0.9 * deltas[2], deltas[2]]
    np.testing.assert_allclose(gae(samples, 1.0, 0.9), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_its_definition(seed):
    samples, gamma, lam = with_values(seed), 0.9, 0.8
    expected, start = np.zeros(samples.lengths.sum()), 0
    for sample, length in enumerate(samples.lengths):
        if samples.valid[sample]:
            values = [*samples.values[start : start + length], 0.0]
            rewards = [-penalty for penalty in samples.penalties[start : start + length]]
            rewards[-1] += samples.rewards[sample]
            errors = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
            for t in range(length):
                expected[start + t] = sum((gamma * lam) ** (u - t) * errors[u] for u in range(t, length))
        start += length
    np.testing.assert_allclose(gae(samples, gamma, lam), expected, rtol=1e-9, atol=1e-12)
    config = config_of("ppo", gamma=gamma, gae_lambda=lam)
    inside = expected[samples.mask]
    np.testing.assert_allclose(
        ppo.advantages(samples, config)[samples.mask], (inside - inside.mean()) / inside.std(), rtol=1e-9
    )
    np.testing.assert_allclose(ppo.returns(samples, config)[samples.mask], inside + samples.values[samples.mask])


def test_with_lambda_one_the_returns_are_those_of_the_rewards_whatever_the_critic_says():
    samples = with_values()
    returns = ppo.returns(samples, config_of("ppo"))
    np.testing.assert_allclose(returns[samples.mask], samples.discounted(samples.token_rewards, 1.0)[samples.mask])


def test_explained_variance():
    returns = np.array([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 2.0), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.full(3, 2.0)) == 0.0


# The value loss


def targets_of(count=40, seed=0, **changes):
    rng = np.random.default_rng(seed)
    drawn = {name: torch.tensor(rng.normal(size=count)) for name in ("returns", "old", "initial")}
    given = {"mask": torch.ones(count, dtype=torch.bool), "weights": torch.rand(count, dtype=torch.float64), **drawn}
    return Targets(**(given | changes))


def value_config(**parameters):
    return config_of("ppo", **parameters)


@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("pull", [0.0, 0.3])
def test_the_value_loss_equals_its_formula_and_its_finite_differences(clip, pull):
    targets = targets_of() if pull else targets_of(initial=None)
    config = value_config(value_clip=clip, value_regularization=pull)
    values = torch.tensor(np.random.default_rng(5).normal(size=40), requires_grad=True)
    loss, logged = value_loss(values, targets, config)
    expected, clipped = 0.0, 0
    for t in range(40):
        v, goal, old, weight = (
            float(each[t]) for each in (values.detach(), targets.returns, targets.old, targets.weights)
        )
        near = old + min(max(v - old, -clip), clip) if clip else v
        expected += weight * max((v - goal) ** 2, (near - goal) ** 2) / 2
        clipped += (near - goal) ** 2 > (v - goal) ** 2
        expected += weight * pull * (v - float(targets.initial[t])) ** 2 / 2 if pull else 0.0
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert float(logged.sums["critic/clip_frac"]) == clipped
    assert (0 < clipped < 40) == bool(clip)
    assert torch.autograd.gradcheck(lambda values: value_loss(values, targets, config)[0], (values,))


def test_tokens_outside_the_response_mask_change_neither_value_loss_nor_gradient():
    nothing = torch.full((4,), torch.nan, dtype=torch.float64, requires_grad=True)
    outside = targets_of(4, mask=torch.zeros(4, dtype=torch.bool), returns=nothing.detach(), old=nothing.detach())
    loss, _ = value_loss(nothing, outside, value_config())
    loss.backward()
    assert (loss.item(), nothing.grad.tolist()) == (0.0, [0.0] * 4)


# Training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return policies.save_model("llama", tmp_path_factory.mktemp("model") / "llama")


def ppo_learner(folder, lora=policies.LORA, parameters=None, **algorithm) -> Learner:
    return learner_of(folder, lora=lora, type="ppo", parameters=PARAMETERS | (parameters or {}), **algorithm)


def copied(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def changed(before, after):
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


BATCH = batch_of(GROUPS, rewards=MIXED)
KINDS = pytest.mark.parametrize("lora", [policies.LORA, None], ids=["lora", "full"])


@KINDS
def test_the_critic_learns_to_predict_returns_and_every_part_of_it_is_trained(folder, lora):
    learner = ppo_learner(folder, lora, learning_rate=2e-3)
    before = copied(learner.critic_parameters)
    assert {"value_head.weight", "value_head.bias"} <= {name.removeprefix("critic.") for name in before}
    rows = [learner.update(BATCH, step, lambda: False) for step in range(1, 13)]
    assert changed(before, learner.critic_parameters) == before.keys()
    assert rows[0]["loss/value"] > 4 * rows[-1]["loss/value"]
    assert rows[-1]["critic/explained_var"] > 0.5 > rows[0]["critic/explained_var"]
    assert all(row["critic/grad_norm"] > 0 and row["actor/skipped"] == 0 for row in rows)


@KINDS
def test_while_the_critic_warms_up_the_policy_stays_as_it_is(folder, lora):
    learner = ppo_learner(folder, lora, parameters={"critic_warmup_steps": 1})
    policy, critic = copied(learner.parameters), copied(learner.critic_parameters)
    row = learner.update(BATCH, 1, lambda: False)
    assert (row["actor/grad_norm"], row["critic/grad_norm"] > 0) == (0.0, True)
    assert changed(policy, learner.parameters) == set()
    assert changed(critic, learner.critic_parameters)
    learner.update(BATCH, 2, lambda: False)
    assert changed(policy, learner.parameters)


@KINDS
def test_policy_and_critic_do_not_touch_each_other_and_the_references_never_move(folder, lora):
    learner = ppo_learner(folder, lora, kl_coefficient=0.1, parameters={"value_regularization": 0.1})
    part = batching.EXAMPLE
    roles = learner.roles
    before = (roles.reference(part), roles.initial_values(part), roles.critic.score_values(part))
    torch.testing.assert_close(before[1], before[2])  # the critic begins as its reference
    assert torch.equal(roles.reference(part), learner.policy.score(part))
    for step in (1, 2):
        learner.update(BATCH, step, lambda: False)
    assert torch.equal(roles.reference(part), before[0])
    assert torch.equal(roles.initial_values(part), before[1])
    assert not torch.allclose(roles.critic.score_values(part), before[2], atol=1e-4)

    scored = learner.policy.score(part)
    with torch.no_grad():
        for parameter in learner.critic_parameters.values():
            parameter.add_(0.1)
    assert torch.equal(learner.policy.score(part), scored)


def test_the_critic_begins_near_zero_and_alike_in_every_attempt(folder):
    first, second = ppo_learner(folder), ppo_learner(folder)
    values = first.roles.critic.score_values(batching.EXAMPLE)
    assert 0 < float(values.abs().max()) < 1
    assert torch.equal(values, second.roles.critic.score_values(batching.EXAMPLE))


def test_without_kl_and_regularisation_no_frozen_copy_is_loaded(folder):
    roles = ppo_learner(folder, None).roles
    assert (roles.reference, roles.initial_values) == (None, None)


@KINDS
def test_a_resumed_learner_goes_on_bit_for_bit(folder, lora):
    learner, resumed = ppo_learner(folder, lora), ppo_learner(folder, lora)
    learner.update(BATCH, 1, lambda: False)
    saved = copied(learner.tensors())
    assert any("value_head" in name for name in saved)
    for name, tensor in resumed.tensors().items():
        tensor.copy_(saved[name])
    for each in (learner, resumed):
        each.update(BATCH, 2, lambda: False)
    assert changed(learner.tensors(), resumed.tensors()) == set()


def test_recomputing_activations_gives_policy_and_critic_the_same_gradients(folder):
    rows = []
    for frugal in (False, True):
        config = policies.run_config(folder, lora=policies.LORA, activation_checkpointing=frugal)
        algorithm = config.algorithm.model_copy(update={"type": "ppo", "parameters": PARAMETERS})
        learner = Learner(config.model_copy(update={"algorithm": algorithm}), torch.device("cpu"))
        policies.excite(learner.policy)
        rows.append(learner.update(BATCH, 1, lambda: False))
    for name in ("actor/grad_norm", "critic/grad_norm", "loss/value"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-5), name


def test_the_exported_adapter_is_the_policys_alone(folder, tmp_path):
    learner = ppo_learner(folder)
    learner.update(BATCH, 1, lambda: False)
    assert learner.export(str(tmp_path)) == "adapter"
    tensors = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    own = {name: each for name, each in learner.parameters.items() if "lora_" in name}
    assert len(tensors) == len(own)
    assert peft.PeftConfig.from_pretrained(tmp_path).r == policies.LORA["rank"]
    for name, tensor in tensors.items():
        assert torch.equal(tensor, own[f"model.{name}".replace(".weight", ".default.weight")]), name


def resident(learner: Learner) -> int:
    """Bytes of the weights that are kept, optimizer and activations apart."""
    modules = {id(learner.policy): learner.policy, id(learner.roles.critic): learner.roles.critic}
    tensors = [
        tensor
        for module in modules.values()
        if module is not None
        for tensor in [*module.parameters(), *module.buffers()]
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(each): each for each in tensors}.values())


def test_four_roles_on_one_base_need_little_more_than_grpo(folder, capsys):
    everything = {"kl_coefficient": 0.1, "parameters": {"value_regularization": 0.1}}
    four, grpo = resident(ppo_learner(folder, **everything)), resident(learner_of(folder, kl_coefficient=0.1))
    with capsys.disabled():
        print(f"\nresident weights: PPO LoRA, four roles {four:,} bytes; GRPO LoRA {grpo:,} bytes: {four / grpo:.3f}")
    assert four / grpo <= 1.15
