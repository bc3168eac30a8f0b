"""perf/mfu: operations by formula are those that pipeline.plan counts, over the peak of a device that is known."""

import itertools

import pytest
import torch
import transformers

from pipeline import batching, devices, model
from pipeline.batching import EXAMPLE
from pipeline.learner import Learner
from pipeline.model.flops import Cost
from pipeline.plan.rehearsal import full_batch, rehearse
from tests import policies
from tests.batches import random_batch

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1536, "vocab_size": 8000}


def config_of(folder, **changes):
    config = policies.run_config(folder, max_model_len=192, dtype="float32", max_tokens_per_micro_batch=256, **changes)
    sampling = config.algorithm.sampling.model_copy(update={"max_new_tokens": 64})
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"sampling": sampling})})


@pytest.mark.parametrize("lora", [None, policies.LORA], ids=["full", "lora"])
def test_operations_by_formula_are_those_that_are_counted_less_the_logits_that_are_computed_again(tmp_path, lora):
    settings = transformers.LlamaConfig(**SHAPE, num_hidden_layers=2, num_key_value_heads=4)
    folder = policies.save_model(settings, tmp_path)
    config = config_of(folder, lora=lora)
    policy, batch = model.build(config, CPU), full_batch(config, 1)
    parts = batching.pack(batch, batch.valid, 1, 256)[0]
    needed = sum(policy.cost.of_pass(part, head=True, backward=True) for part in parts)
    again = sum(2 * policy.cost.trained_head * len(part.source) for part in parts)
    assert rehearse(config, 1).operations == pytest.approx(needed + again, rel=0.03)


def test_a_pass_costs_what_its_tokens_response_tokens_and_keys_do():
    cost = Cost(body=1000, trained_body=100, head=10, trained_head=0, attention=1)
    keys = 2 * (1 + 2 + 3 + 4 + 5 + 4)
    forward = 2 * (1000 * 6 + 10 * 5) + 4 * keys
    assert cost.of_pass(EXAMPLE, head=True, backward=False) == forward
    assert cost.of_pass(EXAMPLE, head=False, backward=False) == forward - 2 * 10 * 5
    backward = 2 * (1000 * 6 + 10 * 5) + 2 * 100 * 6 + 8 * keys
    assert cost.of_pass(EXAMPLE, head=True, backward=True) == forward + backward


def test_a_token_is_sent_to_some_of_the_experts_only():
    settings = transformers.Qwen3MoeConfig(
        **SHAPE, num_hidden_layers=2, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2
    )
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(settings)
    experts = sum(each.numel() for each in whole.parameters() if each.ndim == 3)
    assert experts
    embedding = SHAPE["vocab_size"] * SHAPE["hidden_size"]
    others = whole.num_parameters() - experts - 2 * embedding
    assert Cost.of(whole, "default").body == others + experts // 4


@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "ppo"])
def test_an_update_is_related_to_the_peak_by_all_its_passes_with_the_reference_and_without_unused_adapters(
    tmp_path, critic
):
    config = policies.run_config(policies.save_model("llama", tmp_path), lora=policies.LORA)
    changes = {"kl_coefficient": 0.1}
    if critic:
        parameters = {"gamma": 1.0, "gae_lambda": 1.0, "value_clip": 0.2, "value_regularization": 0.0}
        changes |= {"type": "ppo", "parameters": parameters}
    learner = Learner(config.model_copy(update={"algorithm": config.algorithm.model_copy(update=changes)}), CPU)
    batch = random_batch(3, 2, prompt=(2, 5), completion=(2, 6), vocabulary=policies.VOCABULARY)
    assert "perf/mfu" not in learner.update(batch, 1, lambda: False), "a CPU's peak is not known"
    learner.peak_tflops = 1e-3
    row = learner.update(batch, 2, lambda: False)
    parts = batching.pack(batch, batch.valid, 1, config.trainer.max_tokens_per_micro_batch)[0]
    cost = model.build(config, CPU).cost  # of one adapter
    passes = [(True, True), (True, False)] + ([(False, True), (False, False)] if critic else [])
    needed = sum(
        cost.of_pass(part, head=head, backward=backward) for part, (head, backward) in itertools.product(parts, passes)
    )
    assert row["perf/mfu"] * 1e9 * row["perf/forward_backward_s"] == pytest.approx(needed)


@pytest.mark.parametrize(
    ("driver_name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA A10G", None),
        ("NVIDIA GB200", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_gpu_is_known_by_what_its_driver_calls_it(driver_name, tflops):
    assert devices.peak_tflops(driver_name) == tflops
