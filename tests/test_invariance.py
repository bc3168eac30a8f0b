"""The loss and the gradient of a batch, however it is spread: over 1, 2 or 4 real gloo ranks, one or two copies of the
model, 1 or 3 micro-batches, with prompts shared or repeated. And the step behind a checkpoint, on any number of ranks.

All that several ranks do is done in one start of two and one of four; the tests compare the results.
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pipeline import batching, checkpoint, distributed
from pipeline.algorithms import cispo, gspo
from pipeline.algorithms.aggregation import token_weights
from pipeline.algorithms.losses import Tokens, clipped_loss
from pipeline.algorithms.values import Targets, value_loss
from pipeline.background import Background
from pipeline.batching import MicroBatch
from pipeline.config import AlgorithmConfig, CorrectionConfig
from pipeline.learner import Learner
from pipeline.model import CRITIC, Policy
from pipeline.saver import Saver
from pipeline.storage import open_storage
from pipeline.versions import Version
from tests import gloo, policies
from tests.policies import LORA, VOCABULARY, save_model
from tests.test_distributed import BATCH, CPU, assert_same_gradient, prepared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # one rank
]

APART = dataclasses.replace(BATCH, groups=np.arange(len(BATCH.groups)))
"""The same samples; packed like this, none shares its prompt's tokens with another."""
LOSSES = {"clipped": clipped_loss, "gspo": gspo.loss, "cispo": cispo.loss, "value": value_loss}
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
EVERY_LOSS = [(loss, aggregation) for loss in LOSSES for aggregation in AGGREGATIONS]
Layout = tuple[int, str, str]
"""Micro-batches of a rank, whether a group's prompt is shared, and how the model is spread over the ranks."""
LAYOUTS: list[Layout] = [
    (1, "packed", "gathered"),
    (3, "packed", "sharded"),
    (1, "apart", "sharded"),
    (3, "apart", "gathered"),
]
WORLDS = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "2×2": (4, 2)}
"""Ranks, and copies of the model among them."""
WHOLE = distributed.UNSHARDED_BYTES
CONFIG = AlgorithmConfig(
    type="ppo",
    total_steps=1,
    prompts_per_step=4,
    group_size=4,
    kl_coefficient=0.3,
    entropy_coefficient=0.2,
    correction=CorrectionConfig(sequence_low=0.01, sequence_high=100.0),
    parameters={"dual_clip": 3.0, "value_clip": 0.2, "value_regularization": 0.1},
)
"""Everything that a loss can have."""


def share(count: int, packing: str) -> list[MicroBatch]:
    """This rank's samples of BATCH in `count` micro-batches."""
    batch, ranks = BATCH if packing == "packed" else APART, distributed.world_size()
    limits = (limit for limit in range(400, 0, -1))
    fitting = next(limit for limit in limits if len(batching.layout(batch, batch.valid, ranks, limit)[0]) == count)
    return batching.pack(batch, batch.valid, ranks, fitting)[distributed.rank()]


def gradient_of_loss(
    policy: Policy, sharding: distributed.Sharding, parts: list[MicroBatch], name: str, aggregation: str
) -> tuple[float, dict]:
    """Loss and gradient of one update on BATCH, of one of LOSSES, with KL, entropy bonus and π_old ≠ π_θ ≠ π_ref."""
    rng = np.random.default_rng(4)
    advantages, drift, distance = rng.normal(size=(3, len(BATCH.owners)))
    weights = token_weights(aggregation, BATCH.lengths, 32)
    total = 0.0
    policy.zero_grad()
    for number, part in enumerate(parts):
        places = BATCH.places(part)
        given = [torch.as_tensor(values[places] / 2) for values in (advantages, drift, distance)]
        mask, rows, share = (torch.as_tensor(values) for values in (part.mask, part.row, weights[part.row]))
        sharding.expect(last=number == len(parts) - 1)
        if name == "value":
            with policy.adapter(CRITIC):
                values = policy.values(part)
                old, initial = values.detach() + given[1], values.detach() + given[2]
                loss, _ = value_loss(values, Targets(mask, share, given[0] + 1, old, initial), CONFIG)
                loss.backward()
        else:
            logprobs, entropy = policy(part)
            old, reference = logprobs.detach() + given[1], logprobs.detach() + given[2]
            tokens = Tokens(mask, rows, share, given[0], torch.as_tensor(part.sampled).double(), old, reference)
            loss, _ = LOSSES[name](logprobs, entropy, tokens, CONFIG)
            loss.backward()
        total += loss.item()
    parameters = distributed.own_parameters(policy)
    gradients = dict(distributed.gathered({name: p.grad for name, p in parameters.items() if p.grad is not None}))
    return distributed.reduce({"loss": total})["loss"], {name: grad.clone() for name, grad in gradients.items()}


def every_loss(folder: pathlib.Path, world: str, losses: list[tuple[str, str]]) -> dict[Any, Any]:
    """By training, layout, loss and aggregation."""
    results = {}
    for training in ("full", "lora"):
        for placement in ("gathered", "sharded"):
            distributed.UNSHARDED_BYTES = WHOLE if placement == "gathered" else 0
            made = prepared(folder, training, "float64", critic=True, replicas=WORLDS[world][1])
            for layout in LAYOUTS:
                if layout[2] == placement:
                    parts = share(*layout[:2])
                    results |= {(training, layout, case): gradient_of_loss(*made, parts, *case) for case in losses}
    distributed.UNSHARDED_BYTES = WHOLE
    return results


def learner_of(folder: pathlib.Path, replicas: int = 1) -> Learner:
    config = policies.run_config(
        folder, lora=LORA, max_tokens_per_micro_batch=60, dtype="float32", model_replicas=replicas
    )
    algorithm = config.algorithm.model_copy(update={"learning_rate": 1e-3})
    return Learner(config.model_copy(update={"algorithm": algorithm}), CPU)


def saved_and_trained_on(folder: pathlib.Path, store: pathlib.Path) -> dict[str, Any]:
    """The third step behind a checkpoint of the second, by the learner that has written it."""
    learner, background = learner_of(folder), Background()
    for step in (1, 2):
        learner.update(BATCH, step, lambda: False)
    saver = Saver(open_storage(f"file://{store}"), background, kept if distributed.rank() == 0 else None)
    saver.begin(Version(1, 2), learner.tensors(), learner.state())
    third = third_step(learner)
    saver.settle(wait=True)
    background.close()
    assert saver.saved == Version(1, 2)
    return third


async def kept(version: Version, proven: bool) -> None:
    assert proven


def resumed(folder: pathlib.Path, store: pathlib.Path, replicas: int = 1) -> dict[str, Any]:
    """The same step by a learner that has only loaded that checkpoint."""
    learner, background = learner_of(folder, replicas), Background()
    storage = open_storage(f"file://{store}")
    found = background.run(checkpoint.newest(storage))
    good = checkpoint.load(storage, background.run, found, learner.tensors())
    background.close()
    learner.restore(good.state)
    return third_step(learner)


def third_step(learner: Learner) -> dict[str, Any]:
    row = learner.update(BATCH, 3, lambda: False)
    tensors = dict(distributed.gathered(learner.tensors()))
    return {"row": {name: row[name] for name in ("loss/policy", "actor/grad_norm")}, "tensors": tensors}


def of_two(folder: pathlib.Path, out: pathlib.Path) -> None:
    results: dict[str, Any] = {"2": every_loss(folder, "2", EVERY_LOSS)}
    results["uninterrupted"] = saved_and_trained_on(folder, out / "store")
    results["resumed"] = {"2": resumed(folder, out / "store")}
    torch.save(results, out / f"2-{distributed.rank()}.pt")


def of_four(folder: pathlib.Path, out: pathlib.Path) -> None:
    results: dict[str, Any] = {"4": every_loss(folder, "4", EVERY_LOSS)}
    results["2×2"] = every_loss(folder, "2×2", [("clipped", "token-mean"), ("value", "token-mean")])
    results["resumed"] = {"4": resumed(folder, out / "store"), "2×2": resumed(folder, out / "store", replicas=2)}
    torch.save(results, out / f"4-{distributed.rank()}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # GPT-2: its norms compute in the type they are given, so that float64 can show exactness.
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=1, n_head=4, n_positions=256)
    return save_model(config, tmp_path_factory.mktemp("model") / "gpt2")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two_ranks(folder, outputs):
    """The results of both ranks."""
    gloo.run(of_two, folder, outputs)
    return [torch.load(outputs / f"2-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def four_ranks(two_ranks, folder, outputs):
    """The same of four, which go on from the checkpoint of the two."""
    gloo.run(of_four, folder, outputs, count=4)
    return [torch.load(outputs / f"4-{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(scope="module")
def expected(folder):
    """Loss and gradient of every loss and aggregation on one rank, every sample by itself."""
    parts = batching.pack(BATCH, BATCH.valid, ranks=1, max_tokens=1)[0]
    results = {}
    for training in ("full", "lora"):
        made = prepared(folder, training, "float64", critic=True)
        results |= {(training, case): gradient_of_loss(*made, parts, *case) for case in EVERY_LOSS}
    return results


@pytest.fixture(scope="module")
def results_of(folder, two_ranks, four_ranks):
    """World → what each rank has made of every loss."""
    found = {"1": [every_loss(folder, "1", EVERY_LOSS)], "2": [each["2"] for each in two_ranks]}
    return found | {world: [each[world] for each in four_ranks] for world in ("4", "2×2")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("training", ["full", "lora"])
def test_every_loss_and_its_gradient_are_the_same_on_any_number_of_ranks_however_packed(
    results_of, expected, training, world, layout
):
    for results in results_of[world]:
        cases = [case for kind, made, case in results if (kind, made) == (training, layout)]
        assert len(cases) == (2 if world == "2×2" else len(EVERY_LOSS))
        for case in cases:
            assert_same_gradient(results[training, layout, case], expected[training, case], 1e-9)


def test_a_step_behind_a_checkpoint_is_bit_for_bit_the_same_on_as_many_ranks(two_ranks):
    for results in two_ranks:
        expected, actual = results["uninterrupted"], results["resumed"]["2"]
        assert actual["row"] == expected["row"]
        assert all(torch.equal(actual["tensors"][name], tensor) for name, tensor in expected["tensors"].items())


@pytest.mark.parametrize("world", ["1", "4", "2×2"])
def test_a_step_behind_a_checkpoint_of_another_number_of_ranks_agrees(two_ranks, four_ranks, folder, outputs, world):
    expected = two_ranks[0]["uninterrupted"]
    if world == "1":
        found = [resumed(folder, outputs / "store")]
    else:
        found = [each["resumed"][world] for each in four_ranks]
    for actual in found:
        assert actual["row"] == pytest.approx(expected["row"], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(actual["tensors"], expected["tensors"], rtol=0, atol=1e-5)
