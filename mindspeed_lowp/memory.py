"""How much a forward pass keeps for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SavedBytes:
    """The count of one `count_saved_bytes` block, in bytes."""

    total: int = 0


@contextmanager
def count_saved_bytes(*parameters: Tensor) -> Iterator[SavedBytes]:
    """Count the bytes that autograd saves for backward inside the block.

    Each storage counts once and whole, however many views of it are saved; the storages of `parameters` do
    not count, since they are alive anyway.

    >>> with count_saved_bytes(weight) as saved:  # doctest: +SKIP
    ...     y = lowp_linear(x, weight, None, recipe)
    >>> saved.total  # doctest: +SKIP
    """
    storages = (parameter.untyped_storage() for parameter in parameters)
    seen = {storage.data_ptr(): storage for storage in storages}
    known = {_place(parameter): parameter for parameter in parameters}
    saved = SavedBytes()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = storage  # held, so that no other storage takes its address
            saved.total += storage.nbytes()
        # Backward gets a Parameter back as the same object, with what Megatron keeps on it (main_grad, ...).
        return known.get(_place(tensor), tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _place(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
