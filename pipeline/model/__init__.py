"""The policy: a causal language model that scores the response tokens of a micro-batch.

Only the decoder runs on all tokens; the head runs on the hidden states that predict a response token. No dropout
anywhere: the same weights score the same tokens alike, whether a gradient is wanted or not.
With LoRA the base is frozen and the reference policy is the base with the adapter disabled: no second copy.
"""

from pipeline.model.export import adapter_files, full_files
from pipeline.model.policy import Policy, build

__all__ = ["Policy", "adapter_files", "build", "full_files"]
