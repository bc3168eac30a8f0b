"""Counts bytes held, operations and traffic of whatever runs under it, on tensors without storage.

A dispatch mode sees every operation below autograd and FSDP. Each storage is counted from the operation that returns
it first until nobody holds it, and when it is resized, as FSDP does with gathered weights. Operations are those of
torch.utils.flop_counter. Memory that an operation uses within itself is not seen.
"""

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop
from torch.utils.weak import WeakIdKeyDictionary

PLACES = {
    "/pipeline/model/logprobs.py": "logits",
    "/torch/distributed/fsdp/": "gathered layers",
    "/torch/optim/": "optimizer",
}
"""What memory is for, by the innermost of these files on the stack when it is allocated; activations besides."""
OFFLOADED = "offloaded"
"""What is assigned to this part lies in the CPU's memory, apart from the rest and from its peak."""
STEP = 1.002
"""Gradients are told from activations whenever memory has grown by this factor."""

_aten = torch.ops.aten
FORMULAS: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    **flop_registry,
}


class Counting(TorchDispatchMode):
    """To be entered within a FakeTensorMode. Whoever asks a tensor for its values is told that they are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: Counter[str] = Counter()
        """Bytes held, by part."""
        self.peak: Counter[str] = Counter()
        """The same when their sum was largest."""
        self.offloaded = 0
        """Bytes of that part when it was largest."""
        self.operations = 0
        """Floating-point operations of matrix products and attention."""
        self.traffic = 0
        """Bytes that collectives bring to this rank or take from it."""
        self.gradients: Callable[[], Iterable[Tensor]] = tuple
        """Those that are held just then."""
        self.gradients_part = "gradients"
        self._held = WeakIdKeyDictionary()  # storage → [part, bytes]
        self._examined = 0

    def assign(self, part: str, tensors: Iterable[Tensor]) -> None:
        """From now on their memory, counted so far or not, is that of `part`."""
        for tensor in tensors:
            entry = self._entry(_local(tensor).untyped_storage())
            self.parts[entry[0]] -= entry[1]
            entry[0] = part
            self.parts[part] += entry[1]
        self.offloaded = max(self.offloaded, self.parts[OFFLOADED])

    def __enter__(self) -> "Counting":
        self._resize, seen = torch.UntypedStorage.resize_, self._resized

        def resize(storage: torch.UntypedStorage, size: int, original: Any = self._resize) -> None:
            original(storage, size)
            seen(storage)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        FakeTensor.numpy = _ones  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        del FakeTensor.numpy
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        result = func(*args, **(kwargs or {}))
        if (formula := FORMULAS.get(func._overloadpacket)) is not None:
            self.operations += formula(*args, **(kwargs or {}), out_val=result)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
        if func.namespace == "c10d":
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.traffic += max(tensor.nbytes for tensor in given + tensors)
        for tensor in tensors:
            self._entry(tensor.untyped_storage())
        return result

    def _entry(self, storage: torch.UntypedStorage) -> list[Any]:
        if storage not in self._held:
            self._held[storage] = entry = [_part(), 0]
            weakref.finalize(storage, self._forget, entry)
            self._resized(storage)
        return self._held[storage]

    def _forget(self, entry: list[Any]) -> None:
        self.parts[entry[0]] -= entry[1]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (entry := self._held.get(storage)) is None:
            return
        self.parts[entry[0]] += storage.nbytes() - entry[1]
        entry[1] = storage.nbytes()
        if self._on_device() > STEP * self._examined:
            self.assign(self.gradients_part, self.gradients())
            self._examined = self._on_device()
        if self._on_device() > self.peak.total():
            self.peak = Counter({part: size for part, size in self.parts.items() if part != OFFLOADED})

    def _on_device(self) -> int:
        return self.parts.total() - self.parts[OFFLOADED]


def _ones(tensor: FakeTensor) -> np.ndarray:
    return np.ones(tensor.shape, str(tensor.dtype).removeprefix("torch."))


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _part() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if (part := _of_file(frame.f_code.co_filename)) is not None:
            return part
        frame = frame.f_back
    return "activations"


@functools.cache
def _of_file(name: str) -> str | None:
    return next((part for place, part in PLACES.items() if place in name), None)
