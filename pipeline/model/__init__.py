"""The policy: a causal language model that scores the response tokens of a micro-batch.

Only the decoder runs on all tokens; the head runs on the hidden states that predict a response token. No dropout
anywhere: the same weights score the same tokens alike, whether a gradient is wanted or not.
With LoRA the base is frozen and plays up to four roles without a second copy: the policy (an adapter), the reference
(adapters disabled), the critic (another adapter and a value head), and the critic as it began (adapters disabled, which
begin as zero, and the head's initial weights).
"""

from pipeline.model.export import adapter_files, full_files
from pipeline.model.loading import allocate, load
from pipeline.model.policy import CRITIC, Policy, build, of_critic

__all__ = ["CRITIC", "Policy", "adapter_files", "allocate", "build", "full_files", "load", "of_critic"]
