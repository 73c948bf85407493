"""How much a forward pass keeps for backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def saved_bytes(output: Tensor, parameters: Iterable[Tensor] = ()) -> int:
    """The bytes that autograd keeps for the backward pass of `output`.

    Each storage counts once and whole, however many views of it are saved; the storages of `parameters` do
    not count, since they are alive anyway. The graph is only read: unlike saved-tensor hooks, this leaves
    backward as it is, down to the identity of the Parameters that it finds. What other hooks have packed
    (offloading, torch's non-reentrant checkpoint) is unpacked to be counted.
    """
    storages = {_address(parameter) for parameter in parameters}
    total = 0
    for tensor in _saved_tensors(output):
        if _address(tensor) not in storages:
            storages.add(_address(tensor))
            total += tensor.untyped_storage().nbytes()
    return total


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _saved_tensors(output: Tensor) -> Iterator[Tensor]:
    """Every tensor saved by a node of the graph behind `output`."""
    todo = [output.grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [function for function, _ in node.next_functions]
        if isinstance(node, torch.autograd.function.BackwardCFunction):  # written in Python
            saved = node.saved_tensors
        else:
            saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for value in saved:
            values = value if isinstance(value, tuple | list) else [value]
            yield from (v for v in values if isinstance(v, Tensor))
