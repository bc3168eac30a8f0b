"""Weights from safetensors files straight into the parameters of this rank, whole or sharded.

The policy is built without storage (device `meta`) and sharded like that; only then does each rank read, of every
tensor in the files, the part that it keeps: no rank ever holds the model. Names, conversions and tied weights are
transformers' own affair. An adapter's first values are drawn whole and then cut, the same for any number of ranks.

Limit: the way into transformers' loader is not public; it is that of 5.19.
"""

import json
import math
import pathlib
from collections.abc import Collection
from typing import Any

import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from pipeline.batching import EXAMPLE
from pipeline.config import RunConfig
from pipeline.model import attention
from pipeline.model.policy import Policy

NAMED = 3
"""Tensors that an error names."""


def load(policy: Policy, config: RunConfig, device: torch.device) -> None:
    """Give `policy`, as build and distributed.shard leave it, its weights on `device`; collective.

    Raises ValueError for files that are not this model's, and for a model that Policy would score wrongly.
    """
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    _read(policy, config)
    _draw(policy, config.trainer.seed)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(name in trained)
    policy.to("cpu" if policy.offloaded else device)
    for module in policy.modules():
        module._buffers.update({name: buffer.to(device) for name, buffer in module.named_buffers(recurse=False)})
    if isinstance(policy.base.get_output_embeddings(), nn.Identity):
        return  # a critic by itself; the policy is the same model
    with torch.compiler.set_stance("force_eager"):  # two short passes are not worth compiling for
        _check_scores(policy, config.model.uri)


def allocate(policy: Policy, device: torch.device) -> None:
    """Give `policy` memory on `device` instead, of any content: for those who ask what training costs."""
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in placed:
                empty = torch.empty_like(parameter, device=device)
                placed[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, placed[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def _read(policy: Policy, config: RunConfig) -> None:
    base = _unadapted(policy.base)
    assert isinstance(base, transformers.PreTrainedModel)
    if isinstance(base.get_output_embeddings(), nn.Identity):  # transformers asks for the head, to be thrown away then
        text = base.config.get_text_config()
        head = nn.Linear(text.hidden_size, text.vocab_size, bias=False, device="meta", dtype=base.dtype)
        base.set_output_embeddings(head)
    conversions: Any = get_model_conversion_mapping(base)
    settings = LoadStateDictConfig(
        pretrained_model_name_or_path=config.model.path,
        dtype=base.dtype,
        dtype_plan=base._get_dtype_plan(base.dtype),
        weight_mapping=conversions,
    )
    try:
        info, _ = base._load_pretrained_model(base, None, _files(pathlib.Path(config.model.path)), settings)
        info = base._finalize_model_loading(base, settings, info)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"model.uri: {config.model.uri} cannot be trained: {error}") from None
    _check_complete(info.missing_keys, config.model.uri)


def _files(folder: pathlib.Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [str(folder / "model.safetensors")]
    return sorted({str(folder / name) for name in json.loads(index.read_text())["weight_map"].values()})


def _unadapted(module: nn.Module) -> nn.Module:
    """The same parameters under the names of the original model: adapters are left out, modules without children are
    shared, the others are copies with the same dictionaries of parameters and buffers."""
    if isinstance(module, BaseTunerLayer):
        return module.get_base_layer()
    if not module._modules:
        return module
    copy = object.__new__(type(module))
    children = {name: child and _unadapted(child) for name, child in module._modules.items()}
    copy.__dict__ = {**module.__dict__, "_modules": children}
    return copy


def _check_complete(missing: Collection[str], uri: str) -> None:
    """`missing`: what transformers has filled with random numbers; tied tensors are not among them."""
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise ValueError(
            f"model.uri: {uri} lacks the tensors {', '.join(sorted(missing)[:NAMED])}{more}: fetch or save it again"
        )


def _draw(policy: Policy, seed: int) -> None:
    """What no file holds: of an adapter, as PEFT has it, A uniform in ±1/√(inputs) and B zero; zero besides."""
    generator = torch.Generator().manual_seed(seed)
    for path, module in policy.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                whole = torch.zeros(parameter.shape)
                if "lora_A" in path:
                    bound = 1 / math.sqrt(whole[0].numel())
                    whole.uniform_(-bound, bound, generator=generator)
                setattr(module, name, nn.Parameter(_own_part(parameter, whole)))


def _own_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """Of `whole`, in the type of `parameter`, what this rank has of that."""
    whole = whole.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def _check_scores(policy: Policy, name: str) -> None:
    """Compare with transformers' own forward pass on two short samples of one prompt.

    Catches whatever Policy would leave out in silence: soft-capped or scaled logits, a bias of the head, layers that
    mix tokens by anything but attention, attention or positions that ignore what they are given.
    """
    register_fsdp_forward_method(policy, "unpacked")
    prompt = torch.as_tensor(EXAMPLE.input_ids[EXAMPLE.segment == 0])
    completions = [torch.as_tensor(EXAMPLE.target[EXAMPLE.row == row]) for row in (0, 1)]
    try:
        policy.base.set_attn_implementation(attention.STOCK)
        expected = torch.cat([policy.unpacked(prompt, completion) for completion in completions])
        policy.base.set_attn_implementation(attention.NAME)
        worst = float((policy.score(EXAMPLE) - expected).abs().max())
    except (TypeError, AttributeError) as error:
        raise ValueError(f"model.uri: {name} ({type(policy.base).__name__}) cannot be trained: {error}") from None
    if not worst <= _TOLERANCE[policy.dtype]:
        raise ValueError(
            f"model.uri: {name} ({type(policy.base).__name__}) cannot be trained: the log-probabilities of packed "
            f"samples differ by {worst:.3g} from the model's own"
        )
