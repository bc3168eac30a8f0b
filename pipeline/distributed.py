"""The ranks of one trainer: process group, agreement between ranks, and FSDP2.

torchrun's environment says who is who; without it there is one rank. Tensors of the model travel over NCCL on GPUs and
gloo on CPUs, everything else over gloo. Every collective has the deadline given to `start`; a rank that dies takes the
others with it (torchrun), so a wait ends in either way.

Losses carry the denominators of the whole batch, so gradients are SUMMED over ranks and micro-batches, never averaged.
"""

import dataclasses
import datetime
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

T = TypeVar("T")

CPU = torch.device("cpu")
UNSHARDED_BYTES = 2 * 1024**3
"""On a CPU: parameters of at most this size are kept whole on every rank rather than gathered again and again."""
UNSHARDED_FRACTION = 0.2
"""The same on a GPU, as a fraction of its memory."""


def start(timeout_s: float = 600.0) -> torch.device:
    """Join the process group that torchrun's environment describes; returns this rank's device."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else CPU
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    return device


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    any_rank(False)


def broadcast(value: T) -> T:
    """Rank 0's value on every rank; anything that pickles (it never leaves the trainer's own ranks)."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=CPU)
    return box[0]


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def any_rank(flag: bool) -> bool:
    """Whether any rank says so; all ranks get the same answer at the same point of their loops."""
    return bool(reduce({"flag": float(flag)}, dist.ReduceOp.MAX)["flag"])


def reduce(values: Mapping[str, float | Tensor], operation: Any = dist.ReduceOp.SUM) -> dict[str, float]:
    """Sum of each value over the ranks (or what `operation` says), in float64. Every rank brings the same names."""
    names = sorted(values)
    flat = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
    if world_size() > 1:
        dist.all_reduce(flat, operation)
    return dict(zip(names, flat.tolist(), strict=True))


def total(values: np.ndarray) -> np.ndarray:
    """Sum of an array over the ranks, in float64. Every rank brings the same shape."""
    if world_size() == 1:
        return values
    summed = torch.from_numpy(np.array(values, np.float64))
    dist.all_reduce(summed)
    return summed.numpy()


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a module is spread over the ranks."""

    module: nn.Module
    unsharded: bool
    """Small enough to stay gathered, and to add up whole gradients, from an update's first micro-batch to its last."""

    def expect(self, last: bool) -> None:
        """Call before each micro-batch's forward pass; `last`: the update's last one, whose backward pass ends it."""
        if isinstance(self.module, FSDPModule):
            self.module.set_is_last_backward(last)
            self.module.set_requires_gradient_sync(last or not self.unsharded)
            self.module.set_reshard_after_backward(last or not self.unsharded)


def shard(
    module: nn.Module,
    layers: Iterable[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    exact: Iterable[nn.Module] = (),
    replicas: int = 1,
    offload: bool = False,
) -> Sharding:
    """Spread `module` over the `device` of all ranks with FSDP2, one group per layer; computes in `dtype`.

    The module may be without storage yet (device `meta`), or on `device`.

    Modules in `exact` are groups of their own and compute in the type of their parameters. With several `replicas`
    (HSDP) each is spread over neighbouring ranks only, and gradients are summed over all of them besides.

    With `offload` each rank stores all in the CPU's memory, gradients too, and `device` holds a layer at a time.

    Parameters are kept in the type they have (the optimizer's), gradients summed in float32 (float64 if they are).
    Frozen parameters that are small (see UNSHARDED_BYTES) are not sharded: a copy on each rank costs no traffic.
    One rank that computes in its parameters' own type needs none of this and is left plain.
    """
    frozen = {parameter for parameter in module.parameters() if not parameter.requires_grad}
    trained = set(module.parameters()) - frozen
    mixed = any(parameter.dtype != dtype for parameter in trained)
    if world_size() == 1 and not mixed and not offload:
        return Sharding(module, unsharded=True)

    limit = 0 if offload else _limit(device)
    replicated = frozen if _bytes(frozen) <= limit else set()
    unsharded = _bytes(set(module.parameters()) - replicated) <= limit
    place = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    spread = functools.partial(fully_shard, mesh=_mesh(device, replicas), offload_policy=place)
    precision = MixedPrecisionPolicy(dtype, torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in layers:
        spread(layer, reshard_after_forward=not unsharded, mp_policy=precision, ignored_params=replicated)
    for part in exact:
        spread(part, reshard_after_forward=not unsharded)
    # Embedding and head: the backward pass begins with them, where there is one.
    spread(module, reshard_after_forward=offload and not trained, mp_policy=precision, ignored_params=replicated)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return Sharding(module, unsharded)


def _mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """Of replicas × shards ranks; those of a replica follow one another, as torchrun numbers them node by node."""
    if replicas == 1:
        return init_device_mesh(device.type, (world_size(),))
    assert world_size() % replicas == 0, f"{world_size()} ranks are no {replicas} replicas"
    return init_device_mesh(device.type, (replicas, world_size() // replicas), mesh_dim_names=("replicate", "shard"))


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _limit(device: torch.device) -> int:
    if device.type == "cuda":
        return int(UNSHARDED_FRACTION * torch.cuda.get_device_properties(device).total_memory)
    return UNSHARDED_BYTES


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters as this rank stores them (DTensors where sharded): for optimizer and checkpoint."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def gathered(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors on the CPU, one after the other; collective: every rank must go through all of them."""
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, whole.detach().cpu()


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
