"""Floating-point operations that a pass over a micro-batch needs, by formula: what perf/mfu relates to a device's peak.

As in PaLM's appendix B (arXiv:2204.02311): 2 for each parameter and token, and 4·heads·head size in each layer for each
key of a token, forward. Backward as many again for the gradients of what came in, and once more for those of parameters
that are trained, of attention twice as many. As there, attention counts as if a token saw the keys behind it, too.
What is computed again in the backward pass does not count, nor do keys of other samples, which a mask hides.
"""

import dataclasses

import transformers
from torch import nn

from pipeline.batching import MicroBatch


@dataclasses.dataclass(frozen=True)
class Cost:
    """Numbers of parameters that a token is multiplied with, those of embeddings left out."""

    body: int
    """Of the layers; of experts those that a token is sent to."""
    trained_body: int
    head: int
    """Of the language model's head, which scores response tokens only."""
    trained_head: int
    attention: int
    """Layers × heads × head size."""

    @staticmethod
    def of(model: transformers.PreTrainedModel, adapter: str) -> "Cost":
        """`adapter` is the only one that is counted, where there are several: one computes at a time."""
        body, settings = model.base_model, model.config.get_text_config()
        tables = {id(each) for part in body.modules() if isinstance(part, nn.Embedding) for each in part.parameters()}
        used = [
            each
            for name, each in body.named_parameters()
            if id(each) not in tables and ("lora_" not in name or adapter in name.split("."))
        ]
        head = getattr(model.get_output_embeddings(), "weight", None)  # a critic by itself has none
        head_size = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
        return Cost(
            body=sum(_multiplied(each, settings) for each in used),
            trained_body=sum(_multiplied(each, settings) for each in used if each.requires_grad),
            head=0 if head is None else head.numel(),
            trained_head=head.numel() if head is not None and head.requires_grad else 0,
            attention=settings.num_hidden_layers * settings.num_attention_heads * head_size,
        )

    def of_pass(self, part: MicroBatch, *, head: bool, backward: bool) -> int:
        tokens, scored = len(part.input_ids), len(part.source) if head else 0
        keys = 2 * int((part.position_ids + 1).sum())
        products = 2 * (self.body * tokens + self.head * scored)
        attention = 4 * self.attention * keys
        if not backward:
            return products + attention
        of_weights = 2 * (self.trained_body * tokens + self.trained_head * scored)
        return 2 * products + of_weights + 3 * attention


def _multiplied(parameter: nn.Parameter, settings: transformers.PreTrainedConfig) -> int:
    experts = getattr(settings, "num_experts_per_tok", None)
    if experts and parameter.ndim == 3:  # [E, out, in], of all experts of a layer
        return parameter.numel() * experts // parameter.shape[0]
    return parameter.numel()
