"""Prompt data: which prompt an index names (`source`), from files (`file`) or made on the spot (`generated`)."""

from pipeline.prompts.source import Message, Prompt, PromptSet, PromptSource, as_text, open_set, permute

__all__ = ["Message", "Prompt", "PromptSet", "PromptSource", "as_text", "open_set", "permute"]
