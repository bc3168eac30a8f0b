"""Tiny random models of several kinds, and policies built from them, for tests of model and training."""

import pathlib
from typing import Any

import torch
import transformers

from pipeline import model
from pipeline.algorithms.registry import ALGORITHMS
from pipeline.config import RunConfig

VOCABULARY = 64
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}

CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    # Rotary positions, grouped queries, tied head.
    "qwen2": transformers.Qwen2Config(
        **SHAPE, num_key_value_heads=2, intermediate_size=96, tie_word_embeddings=True, max_position_embeddings=256
    ),
    # The same, head of its own.
    "llama": transformers.LlamaConfig(
        **SHAPE, num_key_value_heads=2, intermediate_size=96, tie_word_embeddings=False, max_position_embeddings=256
    ),
    # Absolute positions: wrong position ids show. Dropout, which no pass may use.
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0.3, resid_pdrop=0.3
    ),
}


def save_model(kind: str | transformers.PreTrainedConfig, folder: pathlib.Path) -> pathlib.Path:
    """Random weights, large enough that attention and positions matter."""
    config = CONFIGS[kind] if isinstance(kind, str) else kind
    with torch.random.fork_rng():
        torch.manual_seed(7)
        stock = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in stock.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    stock.save_pretrained(folder)
    return folder


def run_config(
    folder: pathlib.Path, *, temperature: float = 1.0, max_model_len: int = 128, **trainer: Any
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "test",
            "run_id": "test",
            "model": {"uri": str(folder), "path": str(folder)},
            "data": {"sets": []},
            "rewards": [],
            "algorithm": {
                "type": "grpo",
                "total_steps": 1,
                "prompts_per_step": 1,
                "group_size": 2,
                "sampling": {"temperature": temperature},
                "parameters": ALGORITHMS["grpo"].parameters,
            },
            "rollout": {"max_model_len": max_model_len},
            "trainer": trainer,
            "store": {"uri": "memory://test"},
        }
    )


LORA = {"rank": 4, "alpha": 8}


def build(folder: pathlib.Path, *, critic: bool = False, **options: Any) -> model.Policy:
    config, device = run_config(folder, **options), torch.device("cpu")
    policy = model.build(config, device, critic=critic)
    model.load(policy, config, device)
    return policy


def excite(policy: model.Policy) -> None:
    """Give the adapter the values of one that has been trained: at first its B is zero and half its gradient too."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
