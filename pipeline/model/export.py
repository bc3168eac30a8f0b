"""The policy as files that stock transformers, peft and vLLM load.

Collective: every rank takes part in gathering the tensors, rank 0 writes. The names are those of the original model and
of PEFT, whatever sharding, compilation or adapters have done to the modules.
"""

import os
import pathlib

import peft
import safetensors.torch
import torch
from torch import Tensor

from pipeline import distributed
from pipeline.model.policy import Policy, of_critic

MAX_SHARD = "5GB"


def adapter_files(policy: Policy, folder: str | os.PathLike[str]) -> None:
    """adapter_config.json and adapter_model.safetensors (float32), as PEFT writes them."""
    assert isinstance(policy.model, peft.PeftModel)
    tensors = _gather(
        {name: value for name, value in policy.model.state_dict().items() if "lora_" in name and not of_critic(name)}
    )
    if distributed.rank() == 0:
        named = peft.get_peft_model_state_dict(policy.model, state_dict=tensors)
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(named, pathlib.Path(folder) / "adapter_model.safetensors", {"format": "pt"})
        policy.model.peft_config["default"].save_pretrained(os.fspath(folder))


def full_files(policy: Policy, folder: str | os.PathLike[str]) -> None:
    """config.json and safetensors files of at most 5 GB in the type the policy computes in; tied weights once."""
    base = policy.base
    own = dict(base.named_parameters())
    aliases = {name for name, _ in base.named_parameters(remove_duplicate=False)} - set(own)
    tensors = _gather({name: value for name, value in base.state_dict().items() if name not in aliases})
    if distributed.rank() == 0:
        converted = {
            name: value.to(policy.dtype) if value.is_floating_point() else value for name, value in tensors.items()
        }
        base.save_pretrained(folder, state_dict=converted, max_shard_size=MAX_SHARD)


def _convert(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors in this process's memory, on rank 0; the others hold one at a time."""
    if distributed.rank() == 0:
        return {name: whole.contiguous() for name, whole in distributed.gathered(tensors)}
    for _ in distributed.gathered(tensors):
        pass
    return {}
