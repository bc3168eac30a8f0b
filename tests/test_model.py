"""pipeline.model: packed log-probabilities and gradients against stock transformers, and files that others load."""

import dataclasses
import json
import math

import numpy as np
import peft
import pytest
import safetensors
import torch
import transformers

from pipeline import batching, model
from pipeline.batching import EMPTY, EXAMPLE
from pipeline.experience import Ragged
from pipeline.model import logprobs as head
from pipeline.model.logprobs import token_logprobs
from tests import policies
from tests.batches import random_batch
from tests.policies import LORA, VOCABULARY, build, save_model

CPU = torch.device("cpu")
# transformers' RMSNorm computes in float32 whatever it is given; GPT-2's LayerNorm does not.
PRECISION = {"qwen2": 1e-5, "llama": 1e-5, "gpt2": 1e-10}
BATCH = random_batch(3, 4, prompt=(2, 20), completion=(1, 15), vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: save_model(kind, root / kind) for kind in policies.CONFIGS}


@pytest.fixture(params=list(policies.CONFIGS))
def folder(request, folders):
    return folders[request.param]


def stock(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def sample(number):
    prompt = BATCH.prompts.values[BATCH.prompts.offsets[number] : BATCH.prompts.offsets[number + 1]]
    return prompt, BATCH.completions.values[BATCH.completions.offsets[number] : BATCH.completions.offsets[number + 1]]


def unpacked(causal_model, temperature=1.0):
    """Log-probabilities of all samples, each by itself, end to end."""
    parts = []
    for number in range(len(BATCH.valid)):
        prompt, completion = (torch.as_tensor(ids).long() for ids in sample(number))
        logits = causal_model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        parts.append((logits / temperature).log_softmax(-1).gather(1, completion[:, None]).squeeze(1))
    return torch.cat(parts)


def packed(policy, max_tokens=4096):
    """The same, through micro-batches."""
    (share,) = batching.pack(BATCH, BATCH.valid, 1, max_tokens)
    scored = [policy(part)[0] for part in share]
    places = np.concatenate([BATCH.completions.offsets[part.row] + part.column for part in share])
    return torch.cat(scored)[torch.as_tensor(np.argsort(places))]


# Log-probabilities


@pytest.mark.parametrize("max_tokens", [40, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packing_with_shared_prompts_gives_each_samples_own_logprobs(folder, max_tokens, temperature):
    expected = unpacked(stock(folder, torch.float64), temperature)
    actual = packed(build(folder, temperature=temperature).double(), max_tokens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=PRECISION[folder.name])


@pytest.mark.parametrize("max_tokens", [40, 4096])
def test_what_an_environment_wrote_is_context_of_the_tokens_after_it_and_is_not_scored(folders, max_tokens):
    mask = np.random.default_rng(1).random(len(BATCH.completions.values)) < 0.5
    mask[BATCH.completions.offsets[:-1]] = mask[BATCH.completions.offsets[1:] - 1] = True
    turns = dataclasses.replace(BATCH, mask=Ragged(mask, BATCH.mask.offsets))
    (share,) = batching.pack(turns, turns.valid, 1, max_tokens)
    policy = build(folders["llama"]).double()
    places = np.concatenate([np.append(0, np.cumsum(turns.lengths))[part.row] + part.column for part in share])
    actual = torch.cat([policy(part)[0] for part in share])[torch.as_tensor(np.argsort(places))]
    expected = unpacked(stock(folders["llama"], torch.float64))[torch.as_tensor(mask)]
    torch.testing.assert_close(actual, expected, rtol=0, atol=PRECISION["llama"])


@pytest.mark.parametrize("max_tokens", [40, 4096])
def test_packing_gives_the_gradient_of_the_samples_by_themselves(folder, max_tokens):
    reference = stock(folder, torch.float64)
    weights = torch.linspace(-1, 1, len(BATCH.completions.values), dtype=torch.float64)
    (unpacked(reference) * weights).sum().backward()
    policy = build(folder).double()
    (packed(policy, max_tokens) * weights).sum().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected.values()))
    for name, parameter in policy.base.named_parameters():
        assert float((parameter.grad - expected[name]).norm()) < PRECISION[folder.name] * norm, name


def test_entropy_is_that_of_the_distribution_that_is_sampled_from(folders):
    policy = build(folders["llama"], temperature=0.5)
    prompt, completion = sample(0)
    ids = torch.as_tensor(np.concatenate([prompt, completion]))[None].long()
    distribution = torch.distributions.Categorical(logits=stock(folders["llama"])(ids).logits[0] / 0.5)
    part = batching.pack(BATCH, np.arange(len(BATCH.valid)) == 0, 1, 4096)[0][0]
    torch.testing.assert_close(policy(part)[1], distribution.entropy()[len(prompt) - 1 : -1], rtol=1e-4, atol=1e-4)


def test_temperature_is_applied_before_the_softmax():
    hidden, weight = torch.ones(3, 1), torch.tensor([[2.0], [1.0], [0.0]])
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([0, 1, 2]), temperature=0.5)
    assert logprobs.tolist() == pytest.approx([-0.1429, -2.1429, -4.1429], abs=5e-5)


@pytest.mark.parametrize("trained_head", [False, True])
def test_logprobs_in_chunks_equal_dense_ones_with_their_gradients(monkeypatch, trained_head):
    monkeypatch.setattr(head, "LOGITS_PER_CHUNK", 4 * VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64, requires_grad=trained_head)
    target = torch.randint(VOCABULARY, (11,), generator=generator)
    dense = (hidden @ weight.T / 0.7).log_softmax(-1)
    chunked, entropy = token_logprobs(hidden, weight, target, 0.7)
    torch.testing.assert_close(chunked, dense.gather(1, target[:, None]).squeeze(1))
    torch.testing.assert_close(entropy, -(dense.exp() * dense).sum(-1))
    inputs = [hidden, weight] if trained_head else [hidden]
    scale = torch.linspace(-2, 3, 11, dtype=torch.float64)
    expected = torch.autograd.grad((dense.gather(1, target[:, None]).squeeze(1) * scale).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((chunked * scale).sum(), inputs), expected)


@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("chance", [0.5, 0.99, 0.998, 0.9999])
def test_in_bfloat16_a_token_that_was_nearly_certain_has_the_gradient_of_its_small_doubt(chance, trained_head):
    weight = torch.randn(32, 24, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(5))
    own, others = weight[3].double(), weight.double()
    steps = torch.linspace(0, 20, 100_001, dtype=torch.float64)[:, None] * own
    chances = (steps @ others.T).softmax(-1)[:, 3]
    hidden = steps[int((chances - chance).abs().argmin())].bfloat16()[None].requires_grad_()
    token_logprobs(hidden, weight.requires_grad_(trained_head), torch.tensor([3]), 1.0)[0].sum().backward()
    p = (hidden.detach().double() @ others.T).softmax(-1)
    expected = own - p @ others
    assert (hidden.grad.double() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("trained_head", [False, True])
def test_the_entropy_has_its_gradient_where_it_is_trained(monkeypatch, trained_head):
    monkeypatch.setattr(head, "LOGITS_PER_CHUNK", 4 * 13)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 5, generator=generator, dtype=torch.float64, requires_grad=trained_head)
    target = torch.randint(13, (6,), generator=generator)

    def both(hidden, weight):
        logprobs, entropy = token_logprobs(hidden, weight, target, 0.7, entropy_gradient=True)
        return logprobs.sin() + 3 * entropy.cos()

    assert torch.autograd.gradcheck(both, (hidden, weight))
    assert not token_logprobs(hidden, weight, target, 0.7)[1].requires_grad


def test_the_entropy_of_certainty_has_a_finite_gradient():
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    _, entropy = token_logprobs(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([1]), 1.0, entropy_gradient=True)
    entropy.sum().backward()
    assert hidden.grad.tolist() == [[0.0]]


def test_logprobs_of_extreme_logits_are_finite_with_a_finite_gradient():
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 1]), 1.0)
    logprobs.sum().backward()
    assert logprobs.tolist() == [-2000.0, 0.0]
    assert entropy.tolist() == [0.0, 0.0]
    assert torch.isfinite(hidden.grad).all()


def test_the_same_weights_scored_twice_give_a_ratio_of_exactly_one(folder):
    policy = build(folder).train()
    with_gradient = policy(EXAMPLE)[0]
    assert torch.exp(with_gradient - policy.score(EXAMPLE)).tolist() == [1.0] * 5
    assert with_gradient.requires_grad


def test_an_empty_micro_batch_gives_every_parameter_a_gradient_of_zero(folders):
    policy = build(folders["qwen2"])
    logprobs, _ = policy(EMPTY)
    torch.where(torch.as_tensor(EMPTY.mask), logprobs, 0.0).sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


# LoRA


def test_only_the_adapter_is_trained_and_it_is_float32(folders):
    policy = build(folders["qwen2"], lora=LORA, dtype="bfloat16")
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    assert {p.dtype for name, p in policy.named_parameters() if name not in trained} == {torch.bfloat16}


def test_full_fine_tuning_keeps_float32_weights_whatever_it_computes_in(folders):
    policy = build(folders["qwen2"], dtype="bfloat16")
    assert {(p.dtype, p.requires_grad) for p in policy.parameters()} == {(torch.float32, True)}


def test_the_reference_of_an_adapter_run_is_the_base_bit_for_bit(folder):
    base = build(folder).score(EXAMPLE)
    policy = build(folder, lora=LORA)
    assert torch.equal(policy.score(EXAMPLE), base), "an adapter starts as zero"
    policies.excite(policy)
    assert not torch.allclose(policy.score(EXAMPLE), base, atol=1e-3)
    assert torch.equal(policy.reference(EXAMPLE), base)
    policy(EXAMPLE)[0].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.parameters() if p.requires_grad)


def test_the_adapter_starts_alike_in_every_process(folders):
    first, second = (build(folders["llama"], lora=LORA, seed=5).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_gradient_of_an_adapter_equals_pefts_own(folders):
    policy = build(folders["gpt2"], lora=LORA).double()
    policies.excite(policy)
    reference = peft.get_peft_model(
        stock(folders["gpt2"], torch.float64), peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    ).double()
    reference.load_state_dict(policy.model.state_dict())
    unpacked(reference).sum().backward()
    packed(policy).sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    actual = {name: p.grad for name, p in policy.model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["embed_tokens"]])
def test_an_adapter_on_the_embedding_or_the_head_is_refused(folders, targets):
    with pytest.raises(ValueError, match=r"trainer\.lora\.targets: .* leave them out"):
        build(folders["llama"], lora={**LORA, "targets": targets})


@pytest.mark.parametrize("targets", [["nonesuch"], ["q_proj", "nonesuch"], ["nonesuch", "q_proj"]])
def test_targets_that_the_model_does_not_have_are_named_though_others_fit(folders, targets):
    with pytest.raises(ValueError, match=r"trainer\.lora\.targets: the model has no layers called nonesuch; write"):
        build(folders["llama"], lora={**LORA, "targets": targets})


# Models that would be scored wrongly


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    config = transformers.GraniteConfig(
        **policies.SHAPE, num_key_value_heads=2, intermediate_size=96, logits_scaling=4.0
    )
    with pytest.raises(ValueError, match=r"GraniteForCausalLM.*cannot be trained: the log-probabilities .* differ"):
        build(save_model(config, tmp_path / "granite"))


@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_model_that_caps_its_scores_is_refused_however_small_they_are_at_first(tmp_path, cap):
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, cap: 50.0}
    config = transformers.Gemma2Config(
        **policies.SHAPE, num_key_value_heads=2, intermediate_size=96, head_dim=32, **caps
    )
    with pytest.raises(ValueError, match=rf"cannot be trained: it caps its scores \({cap}"):
        build(save_model(config, tmp_path / "gemma"))


@pytest.mark.parametrize(
    "config",
    [
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, state_size=4),
        transformers.Lfm2Config(
            **policies.SHAPE,
            num_key_value_heads=2,
            intermediate_size=96,
            layer_types=["conv", "full_attention"],
        ),
    ],
    ids=["mamba", "lfm2"],
)
def test_a_model_that_mixes_tokens_otherwise_than_by_attention_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match=r"model\.uri: .* cannot be trained"):
        build(save_model(config, tmp_path / "model"))


def test_a_sliding_window_shorter_than_the_longest_sample_is_refused(tmp_path):
    config = transformers.MistralConfig(
        **policies.SHAPE, num_key_value_heads=2, intermediate_size=96, sliding_window=100
    )
    folder = save_model(config, tmp_path / "mistral")
    with pytest.raises(ValueError, match=r"attends to the last 100 tokens only.*set rollout\.maxModelLen \(now 128\)"):
        build(folder)
    build(folder, max_model_len=100)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_turn_by_the_longest_sample_beside_them_are_refused(tmp_path, kind):
    factors = {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8} if kind == "longrope" else {}
    config = transformers.LlamaConfig(
        **policies.SHAPE,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=64,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **factors}
        | {"original_max_position_embeddings": 64},
    )
    folder = save_model(config, tmp_path / kind)
    with pytest.raises(ValueError, match=rf"beyond 64 tokens \(rope_type {kind}\).*maxModelLen \(now 128\) to at"):
        build(folder)
    build(folder, max_model_len=64)


# Files


def test_an_exported_adapter_loads_into_stock_peft(folders, tmp_path):
    policy = build(folders["qwen2"], lora=LORA)
    policies.excite(policy)
    model.adapter_files(policy, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (
        4,
        8,
        sorted(settings["target_modules"]),
    )
    reloaded = peft.PeftModel.from_pretrained(stock(folders["qwen2"]), tmp_path)
    torch.testing.assert_close(packed(policy), unpacked(reloaded), rtol=0, atol=1e-4)
    assert not torch.allclose(unpacked(reloaded), unpacked(stock(folders["qwen2"])), atol=1e-2)


def test_an_exported_model_loads_into_stock_transformers(folder, tmp_path):
    policy = build(folder)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    model.full_files(policy, tmp_path)
    torch.testing.assert_close(unpacked(stock(tmp_path)), packed(policy), rtol=0, atol=1e-4)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(stock(folder)).__name__]


def test_an_exported_model_has_the_names_and_shapes_of_the_original(folder, tmp_path):
    model.full_files(build(folder, dtype="bfloat16"), tmp_path)
    assert contents(tmp_path, "BF16") == contents(folder, "F32")


def contents(folder, dtype):
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {part.get_dtype() for part in slices.values()} == {dtype}
        return {name: part.get_shape() for name, part in slices.items()}


def test_large_models_are_exported_in_several_files(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.model.export.MAX_SHARD", "100KB")
    model.full_files(build(folders["llama"]), tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    torch.testing.assert_close(unpacked(stock(tmp_path)), unpacked(stock(folders["llama"])), rtol=0, atol=1e-6)


# Options that change the cost only


def outcome(policy):
    packed(policy).sum().backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.requires_grad}


def test_recomputing_activations_changes_no_gradient_and_no_name(folders):
    plain, frugal = (
        outcome(build(folders["qwen2"], lora=LORA, activation_checkpointing=flag)) for flag in (False, True)
    )
    torch.testing.assert_close(frugal, plain)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiling_layers_changes_no_gradient_and_no_name(folders):
    plain, compiled = (outcome(build(folders["qwen2"], compile=flag)) for flag in (False, True))
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4)


def test_a_model_that_lacks_tensors_is_refused_and_they_are_named(tmp_path):
    file = save_model("llama", tmp_path / "llama") / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    kept = {name: value for name, value in tensors.items() if "layers.0.mlp" not in name}
    safetensors.torch.save_file(kept, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the tensors model\.layers\.0\.mlp\.down_proj\.weight, .*: fetch or"):
        build(file.parent)
