"""What a linear layer has to communicate within its tensor-parallel group, and the few collectives for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_lowp.recipes import Operand


@dataclass(frozen=True)
class TensorParallel:
    """A column-parallel linear's communication.

    sequence_parallel: x holds this rank's rows; they are gathered for forward and for the weight gradient,
        and the input gradient is reduce-scattered.
    quantized_gather: with sequence_parallel, rows are quantized before they are gathered for forward: the
        same results, about half the bytes of bf16.
    allreduce_dgrad: the input gradient is summed over the group (not together with sequence_parallel).
    """

    group: dist.ProcessGroup
    sequence_parallel: bool = False
    allreduce_dgrad: bool = False
    quantized_gather: bool = False


@dataclass
class Pending:
    """A collective under way and the tensors it fills."""

    works: list[dist.Work]
    outputs: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.outputs


def gather_rows(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> Pending:
    """Start gathering every rank's rows of each tensor [R, ...] -> [ranks * R, ...].

    One-byte elements travel as uint8: gloo refuses float8 tensors.
    """
    works, outputs = [], []
    for tensor in tensors:
        sent = tensor.contiguous()
        if sent.element_size() == 1:
            sent = sent.view(torch.uint8)
        out = sent.new_empty((sent.shape[0] * group.size(), *sent.shape[1:]))
        works.append(dist.all_gather_into_tensor(out, sent, group=group, async_op=True))
        outputs.append(out.view(tensor.dtype))
    return Pending(works, tuple(outputs))


def gather_operand(operand: Operand, group: dist.ProcessGroup) -> Pending:
    """Start gathering an operand quantized along this rank's (aligned) rows.

    One scale for a whole matrix is the same on all ranks and stays.
    """
    if operand.scale.dim() < operand.data.dim():
        pending = gather_rows((operand.data,), group)
        return Pending(pending.works, (*pending.outputs, operand.scale))
    return gather_rows((operand.data, operand.scale), group)


def align_rows(x: Tensor, alignment: int, ranks: int = 1) -> Tensor:
    """Zero rows after each rank's share of x [ranks * R, N], so that a share is a multiple of `alignment`.

    Zeros change neither a block's scale nor a product. Where nothing is missing, x itself is returned.
    """
    rows, width = x.shape
    missing = -(rows // ranks) % alignment
    if missing == 0:
        return x
    return F.pad(x.view(ranks, rows // ranks, width), (0, 0, 0, missing)).flatten(0, 1)


def start_dgrad_reduction(dx: Tensor, parallel: TensorParallel) -> Pending:
    """Start summing the input gradient dx [T, K] over the group: scattered by rows, or on every rank."""
    if parallel.sequence_parallel:
        out = dx.new_empty((dx.shape[0] // parallel.group.size(), dx.shape[1]))
        work = dist.reduce_scatter_tensor(out, dx, group=parallel.group, async_op=True)
        return Pending([work], (out,))
    work = dist.all_reduce(dx, group=parallel.group, async_op=True)
    return Pending([work], (dx,))
