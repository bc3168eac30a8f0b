"""pipeline.distributed: two real gloo ranks must do what one rank does, in the loss, the gradient and the files.

All that two ranks do is done in one pair of processes (`two_ranks`); the tests compare its results. Every loss, on
up to four ranks, is in test_invariance.
"""

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline import batching, distributed, model
from pipeline.algorithms import aggregation, grpo
from pipeline.algorithms.losses import Tokens
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.algorithms.samples import Samples
from pipeline.batching import Batch
from pipeline.learner import Learner
from pipeline.model import CRITIC, Policy, of_critic
from tests import gloo, policies
from tests.batches import batch_of, random_batch
from tests.policies import LORA, VOCABULARY, save_model

pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")
BATCH = random_batch(4, 4, prompt=(2, 20), completion=(1, 15), vocabulary=VOCABULARY, seed=1)
LONELY = batch_of([([1, 2, 3], [[4, 5], [6]])], rewards=[0.0, 1.0])  # one block: nothing for a second rank
ONE_BY_ONE, SEVERAL, ALL = 1, 60, 4096  # tokens per micro-batch

CASES = {
    "-".join(map(str, (training, *case))): (training, *case)
    for training in ("full", "lora")
    for case in [
        ("float64", SEVERAL, "gathered"),
        ("float64", SEVERAL, "sharded"),
        ("float64", ALL, "gathered"),
        ("float64", ALL, "sharded"),
        ("float32", SEVERAL, "sharded"),
    ]
}
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
"""Of the gradient's norm."""


def prepared(
    folder: pathlib.Path, training: str, precision: str, critic: bool = False, replicas: int = 1
) -> tuple[Policy, distributed.Sharding]:
    policy = policies.build(folder, lora=LORA if training == "lora" else None, critic=critic)
    policy.entropy_gradient = critic
    policies.excite(policy)
    dtype = getattr(torch, precision)
    policy.to(dtype)
    heads = [policy.value_head] if policy.value_head else []
    return policy, distributed.shard(policy, policy.layers, CPU, dtype, exact=heads, replicas=replicas)


def steps(folder: pathlib.Path) -> list[dict[str, float]]:
    """What PPO logs of two steps, all four roles at work."""
    config = policies.run_config(folder, lora=LORA, max_tokens_per_micro_batch=SEVERAL)
    changes = {"type": "ppo", "learning_rate": 1e-2, "kl_coefficient": 0.1, "kl_placement": "reward"}
    own = ALGORITHMS["ppo"].parameters | {"value_regularization": 0.1}
    algorithm = config.algorithm.model_copy(update=changes | {"parameters": own})
    learner = Learner(config.model_copy(update={"algorithm": algorithm}), CPU)
    return [learner.update(BATCH, step, lambda: False) for step in (1, 2)]


def gradient_of(policy: Policy, sharding: distributed.Sharding, batch: Batch, limit: int) -> tuple[float, dict]:
    """Loss and gradient of one update, as the trainer takes them."""
    config = policies.run_config(pathlib.Path("unused")).algorithm
    advantages = grpo.advantages(Samples(batch.rewards, batch.valid, batch.groups, batch.lengths), config)
    weights = aggregation.token_weights("token-mean", batch.lengths, 32)
    parts = batching.pack(batch, batch.valid, distributed.world_size(), limit)[distributed.rank()]
    total = 0.0
    for number, part in enumerate(parts):
        sharding.expect(last=number == len(parts) - 1)
        logprobs, entropy = policy(part)
        tokens = Tokens(
            *(
                torch.as_tensor(values)
                for values in (part.mask, part.row, weights[part.row], advantages[batch.places(part)], part.sampled)
            )
        )
        loss, _ = grpo.loss(logprobs, entropy, tokens, config)
        loss.backward()
        total += loss.item()
    parameters = distributed.own_parameters(policy)
    gradients = dict(distributed.gathered({name: p.grad for name, p in parameters.items() if p.grad is not None}))
    return distributed.reduce({"loss": total})["loss"], gradients


def work(folder: pathlib.Path, out: pathlib.Path) -> None:
    rank = distributed.rank()
    results: dict[str, Any] = {"ranks": (rank, distributed.world_size())}
    results |= collectives(rank)
    whole = distributed.UNSHARDED_BYTES
    for name, (training, precision, limit, placement) in CASES.items():
        distributed.UNSHARDED_BYTES = whole if placement == "gathered" else 0
        results[name] = gradient_of(*prepared(folder, training, precision), BATCH, limit)
    for placement, limit_bytes in (("gathered", whole), ("sharded", 0)):
        distributed.UNSHARDED_BYTES = limit_bytes
        results[f"steps-{placement}"] = steps(folder)
        results |= {f"{name}-{placement}": value for name, value in life(folder, out / placement).items()}
    torch.save(results, out / f"rank{rank}.pt")


def collectives(rank: int) -> dict[str, Any]:
    distributed.barrier()
    return {
        "broadcast": distributed.broadcast({"plan": [1, 2]} if rank == 0 else None),
        "gather": distributed.gather(f"rank {rank}"),
        "any": (distributed.any_rank(rank == 1), distributed.any_rank(False)),
        "sum": distributed.reduce({"b": rank + 1.0, "a": torch.tensor(10.0 * rank)}),
        "max": distributed.reduce({"a": 3.0 - rank}, dist.ReduceOp.MAX),
    }


def life(folder: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """What a policy goes through in a run: scored by its reference before anything else, trained, exported."""
    policy, sharding = prepared(folder, "lora", "float64")
    part = batching.EXAMPLE
    results: dict[str, Any] = {"reference": policy.reference(part)}
    results["lonely"] = gradient_of(policy, sharding, LONELY, ALL)
    policy.zero_grad()
    optimizer = torch.optim.SGD(distributed.own_parameters(policy).values(), lr=0.5)
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        gradient_of(policy, sharding, BATCH, SEVERAL)
        norms.append(distributed.clip_gradients(distributed.own_parameters(policy).values(), max_norm=0.01))
        optimizer.step()
    results |= {"norms": norms, "trained": policy.score(part), "still the base": policy.reference(part)}
    results["parameters"] = dict(distributed.gathered(distributed.own_parameters(policy)))
    model.adapter_files(policy, out / "adapter")
    full, _ = prepared(folder, "full", "float32")
    full.score(part)
    model.full_files(full, out / "full")
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # GPT-2: its norms compute in the type they are given, so that float64 can show exactness.
    return save_model("gpt2", tmp_path_factory.mktemp("model") / "gpt2")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two_ranks(folder, outputs):
    """The results of both ranks."""
    gloo.run(work, folder, outputs)
    return [torch.load(outputs / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def one_rank(folder, outputs):
    """The same of one rank, every sample by itself."""
    results = {
        (training, precision): gradient_of(*prepared(folder, training, precision), BATCH, ONE_BY_ONE)
        for training in ("full", "lora")
        for precision in ("float64", "float32")
    }
    return {**results, **life(folder, outputs / "alone")}


def norm(gradients):
    return float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())


def assert_same_gradient(actual, expected, tolerance):
    assert actual[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    assert actual[1].keys() == expected[1].keys()
    difference = {name: actual[1][name] - gradient for name, gradient in expected[1].items()}
    assert norm(expected[1]) > 1e-3
    assert norm(difference) < tolerance * norm(expected[1])


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_loss_and_gradient_of_one(two_ranks, one_rank, case):
    training, precision, _, _ = CASES[case]
    for results in two_ranks:
        assert_same_gradient(results[case], one_rank[training, precision], TOLERANCE[precision])


@pytest.mark.parametrize("limit", [SEVERAL, ALL])
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("training", ["full", "lora"])
def test_one_rank_has_the_same_gradient_packed_and_unpacked(folder, one_rank, training, precision, limit):
    packed = gradient_of(*prepared(folder, training, precision), BATCH, limit)
    assert_same_gradient(packed, one_rank[training, precision], TOLERANCE[precision])


@pytest.mark.parametrize("placement", ["gathered", "sharded"])
def test_ppo_takes_the_same_steps_on_two_ranks(two_ranks, folder, placement):
    expected = steps(folder)
    for results in two_ranks:
        for row, alone in zip(results[f"steps-{placement}"], expected, strict=True):
            for name in ("loss/policy", "loss/value", "actor/grad_norm", "critic/grad_norm", "critic/explained_var"):
                assert row[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("placement", ["gathered", "sharded"])
class TestALife:
    def test_a_rank_without_samples_takes_part_and_changes_nothing(self, two_ranks, one_rank, placement):
        assert_same_gradient(two_ranks[1][f"lonely-{placement}"], one_rank["lonely"], 1e-9)

    def test_updates_reach_the_next_forward_pass_and_leave_the_reference(self, two_ranks, one_rank, placement):
        for results in two_ranks:
            torch.testing.assert_close(results[f"trained-{placement}"], one_rank["trained"], rtol=0, atol=1e-10)
            torch.testing.assert_close(results[f"parameters-{placement}"], one_rank["parameters"], rtol=0, atol=1e-10)
            assert torch.equal(results[f"reference-{placement}"], results[f"still the base-{placement}"])
        assert not torch.allclose(one_rank["trained"], one_rank["reference"], atol=1e-4)

    def test_the_gradient_is_clipped_by_its_norm_over_all_ranks(self, two_ranks, one_rank, placement):
        for results in two_ranks:
            assert results[f"norms-{placement}"] == pytest.approx(one_rank["norms"], rel=1e-9)

    @pytest.mark.parametrize("file", ["adapter/adapter_model.safetensors", "full/model.safetensors"])
    def test_exported_files_are_whole(self, two_ranks, one_rank, outputs, placement, file):
        from safetensors.torch import load_file

        expected, actual = load_file(outputs / "alone" / file), load_file(outputs / placement / file)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_collectives_give_every_rank_the_same(two_ranks):
    for rank, results in enumerate(two_ranks):
        assert results["ranks"] == (rank, 2)
        assert results["broadcast"] == {"plan": [1, 2]}
        assert results["gather"] == ["rank 0", "rank 1"]
        assert results["any"] == (True, False)
        assert results["sum"] == {"a": 10.0, "b": 3.0}
        assert results["max"] == {"a": 3.0}


def test_without_a_process_group_there_is_one_rank():
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.broadcast(5) == 5
    assert distributed.gather(5) == [5]
    assert distributed.any_rank(True)
    assert distributed.reduce({"a": np.float64(2.5)}) == {"a": 2.5}


def test_one_rank_computes_in_bfloat16_and_keeps_float32_weights(folder):
    distributed.start()
    try:
        policy = policies.build(folder, dtype="bfloat16")
        plain = policies.build(folder).score(batching.EXAMPLE)
        sharding = distributed.shard(policy, policy.layers, CPU, policy.dtype)
        sharding.expect(last=True)
        logprobs, _ = policy(batching.EXAMPLE)
        logprobs.sum().backward()
        assert 0 < float((logprobs.detach() - plain).abs().max()) < 0.3
        parameters = distributed.own_parameters(policy)
        assert {p.dtype for p in parameters.values()} == {torch.float32}
        assert {p.grad.dtype for p in parameters.values()} == {torch.float32}
    finally:
        distributed.stop()


def test_the_value_head_computes_in_float32_on_a_base_in_bfloat16(folder):
    distributed.start()
    try:
        policy = policies.build(folder, dtype="bfloat16", lora=LORA, critic=True)
        sharding = distributed.shard(policy, policy.layers, CPU, policy.dtype, exact=[policy.value_head])
        with policy.adapter(CRITIC):
            sharding.expect(last=True)
            values = policy.values(batching.EXAMPLE)
            values.sum().backward()
        assert values.dtype == policy.initial_values(batching.EXAMPLE).dtype == torch.float32
        torch.testing.assert_close(values.detach(), policy.initial_values(batching.EXAMPLE), rtol=0, atol=1e-6)
        touched = {name for name, each in distributed.own_parameters(policy).items() if each.grad is not None}
        assert {"value_head.weight", "value_head.bias"} < touched
        assert all(of_critic(name) for name in touched)
    finally:
        distributed.stop()
